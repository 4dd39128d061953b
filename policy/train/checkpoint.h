/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a run in one file, "checkpoint.state" in the run's directory: everything that internal.h marks as saved,
 * and what train.c reports from. It is written to a temporary name, synced and renamed: it is whole, or the one before.
 */
#ifndef POLICY_TRAIN_CHECKPOINT_H
#define POLICY_TRAIN_CHECKPOINT_H

#include "policy/train/internal.h"

/* A held-out comparison that was made. */
struct validated {
    uint64_t step;
    double kl, relative;
};
enum { VALIDATED_MAX = 4096 }; /* of a run; later ones are not listed in the record */

/* Means since the last report. */
struct report_sums {
    double loss, reward, entropy, gradient_norm;
    double learning_rate; /* of the last step */
    uint64_t steps;
};

struct run_state {
    struct training training;
    struct policy_network *best; /* by held-out KL; NULL: none was compared */
    uint32_t validated_count;
    uint32_t best_at;            /* index into validated */
    struct validated *validated; /* [VALIDATED_MAX] */
    struct report_sums sums;
    uint64_t settled; /* step after which nothing is due any more: comparison, report */
};

/* ERROR_IO (full disk, no such directory), ERROR_MEMORY. */
int checkpoint_save(const struct run_state *state, struct error *error);
/* 1: there was none, and nothing changed. ERROR_IO, ERROR_FORMAT (not whole), ERROR_INVALID (of a run with other
 * options, data or model: says which), ERROR_MEMORY. */
int checkpoint_load(struct run_state *state, struct error *error);

/* "name=value" lines of all options, and of data and model: what a run's numbers depend on. NULL: no memory. */
char *checkpoint_describe(const struct training *training);

#endif
