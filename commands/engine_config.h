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

#endif
