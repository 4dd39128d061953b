/* SPDX-License-Identifier: Apache-2.0
 *
 * From the configuration's text forms to what the engine takes: for every command that opens one.
 */
#ifndef COMMANDS_ENGINE_CONFIG_H
#define COMMANDS_ENGINE_CONFIG_H

#include "config/config.h"
#include "engine/engine.h"

/* Borrows strings of config. */
struct engine_options engine_options_of(const struct config *config);

/* Puts the model's file before an error's message, unless it stands there already. Returns the code. */
int engine_error_of_file(const struct config *config, struct error *error);

/* Gives policies that want a trained network the one that ships for the engine's model, and warns of one that was
 * trained for another model (policy_settings_resolve and its errors). */
int engine_resolve_policies(
    const struct engine *engine, struct policy_settings *policies, size_t count, struct error *error);

#endif
