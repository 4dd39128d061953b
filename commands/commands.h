/* SPDX-License-Identifier: Apache-2.0
 *
 * The commands of the program: one file each, called by main.c with a configuration that has been read and checked.
 * The log is open, SIGPIPE is ignored. A command reports a failure itself, on standard error, and returns an exit code.
 */
#ifndef COMMANDS_COMMANDS_H
#define COMMANDS_COMMANDS_H

#include "config/config.h"

enum exit_code { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

int command_serve(const struct config *config);
int command_bench(const struct config *config);
int command_eval(const struct config *config);
int command_train(const struct config *config);
int command_inspect(const struct config *config);
int command_worker(const struct config *config);

#endif
