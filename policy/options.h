/* SPDX-License-Identifier: Apache-2.0
 *
 * What policy/settings.c uses of the option table beside the functions of policy/policy.h.
 */
#ifndef POLICY_OPTIONS_H
#define POLICY_OPTIONS_H

#include "policy/policy.h"

/* Sets the option's field alone, or fails and changes nothing. */
int option_set(
    struct policy_settings *settings, uint32_t index, const char *value, bool allow_files, struct error *error);

/* Whether it was set by name. */
bool option_named(const struct policy_settings *settings, const char *name);

/* Whether every field that the policy reads is in its range. */
int options_check(const struct policy_settings *settings, struct error *error);

/* A user's text for a message: shortened, printable ASCII. out of at least 64 bytes; returns it. */
const char *policy_option_quote(const char *value, char *out, size_t size);

#endif
