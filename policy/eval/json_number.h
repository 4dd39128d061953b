/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers of reports and results in JSON: null where there is none.
 */
#ifndef POLICY_EVAL_JSON_NUMBER_H
#define POLICY_EVAL_JSON_NUMBER_H

#include <jansson.h>
#include <math.h>

/* A new value; NULL on failed allocation. */
static inline json_t *eval_json_number(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

#endif
