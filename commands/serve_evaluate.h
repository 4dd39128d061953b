/* SPDX-License-Identifier: Apache-2.0
 *
 * server_model.evaluate of `distillcache serve`.
 */
#ifndef COMMANDS_SERVE_EVALUATE_H
#define COMMANDS_SERVE_EVALUATE_H

#include "server/evaluation.h"

int serve_evaluate(const struct evaluation_run *asked, char **report, struct error *error);

#endif
