/* SPDX-License-Identifier: Apache-2.0
 *
 * The largest of many numbers, for arithmetic that ranks slots.
 */
#ifndef POLICY_TRAIN_TOP_H
#define POLICY_TRAIN_TOP_H

#include <stdint.h>

/* order [count]: indices of the `count` largest of values [slots], largest first; of equal ones the higher index first.
 * No value is NaN; count <= slots. O(slots log count). */
void top_of(const double *values, uint32_t slots, uint32_t count, uint32_t *order);

#endif
