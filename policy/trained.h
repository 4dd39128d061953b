/* SPDX-License-Identifier: Apache-2.0
 *
 * Names of trained policies in the texts of settings: "distillcache:NAME", and what distillcache means without a name.
 */
#ifndef POLICY_TRAINED_H
#define POLICY_TRAINED_H

#include "policy/policy.h"

/* What stands behind names of trained policies ("distillcache:NAME"), where there is something that knows them. */
struct trained_policies {
    /* Gives settings the network or the gates of that name. NULL: where distillcache scores, the network that it means
     * without a name, if there is one. A negative code: there is no such name, it cannot be used, or the policy cannot
     * use it. */
    int (*apply)(void *context, const char *name, struct policy_settings *settings, struct error *error);
    void *context;
    bool files; /* settings may also name files: what has a slash, or is a file, is none of the names */
};

/* Any name may be one, and gives nothing: for checks before the names are known. Files are read. */
extern const struct trained_policies trained_policies_unknown;

/* policy_settings_parse, with names of trained policies behind the colon. trained NULL: there are only files. */
int policy_settings_parse_trained(
    const char *text, const struct trained_policies *trained, struct policy_settings *settings, struct error *error);
/* Gives settings that want a network and have none the one that their policy means without a name. trained NULL: none.
 */
int policy_settings_take_trained(
    const struct trained_policies *trained, struct policy_settings *settings, struct error *error);

#endif
