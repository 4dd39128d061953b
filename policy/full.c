/* SPDX-License-Identifier: Apache-2.0
 *
 * full: nothing is ever evicted.
 */
#include "policy/policies.h"

static void set_defaults(struct policy_settings *settings) {
    settings->ratio = 1;
}

const struct policy policy_full = {
    .name = "full",
    .summary = "nothing is evicted",
    .source = "the full cache",
    .defaults = set_defaults,
};
