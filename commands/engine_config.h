/* SPDX-License-Identifier: Apache-2.0
 *
 * From the configuration's text forms to what the engine takes: for every command that opens one.
 */
#ifndef COMMANDS_ENGINE_CONFIG_H
#define COMMANDS_ENGINE_CONFIG_H

#include "config/config.h"
#include "engine/chat_template.h"
#include "engine/engine.h"

/* Borrows strings of config. */
struct engine_options engine_options_of(const struct config *config);

/* The model of --model, to be loaded as --quantize says. */
struct model *engine_open_model(const struct config *config, struct error *error);

/* Puts the model's file before an error's message, unless it stands there already. Returns the code. */
int engine_error_of_file(const struct config *config, struct error *error);

/* Gives policies that want a trained network the one that ships for the engine's model, and warns of one that was
 * trained for another model (policy_settings_resolve and its errors). */
int engine_resolve_policies(
    const struct engine *engine, struct policy_settings *policies, size_t count, struct error *error);

/* The chat template of a command. */
struct chat_config {
    struct chat_template *template; /* NULL: there is none, or one that cannot be read */
    struct error refusal;           /* why */
};
/* The one that --chat-template names, whose faults are errors, or the model's own, whose faults are a refusal. */
int chat_config_open(const struct config *config, const struct model *model, const struct tokenizer *tokenizer,
    struct chat_config *chat, struct error *error);
struct chat_source chat_config_source(const struct chat_config *chat); /* borrows */
void chat_config_close(struct chat_config *chat);

#endif
