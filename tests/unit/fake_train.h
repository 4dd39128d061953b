/* SPDX-License-Identifier: Apache-2.0
 *
 * Training and evaluation without a model, for tests of the server's jobs: the interfaces of train_run and
 * server_model.evaluate.
 *
 * A training makes rank_steps steps of FAKE_TRAIN_STEP_MS milliseconds each (environment; default 1), reports the
 * reward -1 / step, and every checkpoint_every steps writes the step's number to `checkpoint` and a policy file beside
 * it, and reports the KL 1 / step. It takes up the number when it is there. The process is killed as soon as the number
 * FAKE_TRAIN_DIE_AT is written (environment; default: never). In the end a small network is written. What the training
 * file begins with changes that:
 *   "!bad"      ERROR_FORMAT with the file's name and line     "!full"     ERROR_IO, as on a full disk, after a step
 *   "!garbage"  the policy file that is written is none        "!pages"    ERROR_PAGES
 *   "!wait"     makes one step and then waits until it is stopped
 *
 * An evaluation reports one row for each policy; task "arithmetic" fails, task "needle" waits until it is stopped.
 */
#ifndef TESTS_UNIT_FAKE_TRAIN_H
#define TESTS_UNIT_FAKE_TRAIN_H

#include "policy/train/train.h"
#include "server/evaluation.h"

#define FAKE_FINGERPRINT "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define FAKE_TRAIN_MODEL                                                                                               \
    (struct policy_model) {                                                                                            \
        .fingerprint = FAKE_FINGERPRINT, .layers = 2, .kv_heads = 2, .head_dim = 4                                     \
    }

int fake_train(const struct train_run *run, struct error *error);
int fake_evaluate(const struct evaluation_run *run, char **report, struct error *error);

#endif
