/* SPDX-License-Identifier: Apache-2.0
 *
 * What an evaluation is asked to do: the request of the admin API as options of `distillcache eval`, checked by the
 * same table (config/options.h), and the run that somebody else provides (server_model.evaluate).
 *
 * | field        | option         | value                                                                 |
 * |--------------|----------------|-----------------------------------------------------------------------|
 * | task         | --task         | required                                                              |
 * | policies     | --kv-policy    | texts; trained policies by name ("distillcache:NAME"), never by file  |
 * | ratios       | --kv-ratio     | numbers                                                               |
 * | tokens       | --kv-tokens    | number                                                                |
 * | lengths      | --length       | numbers                                                               |
 * | data         | --data         | id of an uploaded file                                                |
 * | limit, seed, query_aware, continuation | the same                                                    |
 * distillcache without a name is the policy that is active when the evaluation runs, or else the one that ships.
 */
#ifndef SERVER_EVALUATION_H
#define SERVER_EVALUATION_H

#include "config/config.h"
#include "engine/chat_template.h"
#include "server/fields.h"

struct engine;
struct tokenizer;
struct background;

struct evaluation_run {
    const struct config *config;
    const struct trained_policies *trained;
    struct engine *engine;
    const struct tokenizer *tokenizer;
    struct chat_source chat;
    struct background *background;  /* NULL: the engine is free */
    bool (*stopped)(void *context); /* asked between steps: end with ERROR_CANCELLED */
    void (*progress)(void *context, uint64_t done, uint64_t total);
    void *context;
};
/* Runs it: *report is the JSON document of policy/eval/report.h, for the caller to free. */
typedef int (*evaluation_evaluate)(const struct evaluation_run *run, char **report, struct error *error);

/* Fills the configuration (to be freed in any case). trained: without files; file: path of data, NULL: none or not
 * known yet. -1: the fault names the field. */
int evaluation_config(const json_t *request, const struct trained_policies *trained, const char *file,
    struct config *config, struct fault *fault);

#endif
