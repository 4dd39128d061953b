/* SPDX-License-Identifier: Apache-2.0
 *
 * Rollouts: one prompt, a teacher that keeps everything and students that prune, side by side in one batch. All are fed
 * the same tokens after the prompt; after each, KL(teacher || student) of the next-token distributions. The first token
 * after the prompt is not compared: its logits precede every prune. Used by the stages kl and kl_parameter and by
 * validation.
 */
#ifndef POLICY_TRAIN_ROLLOUT_H
#define POLICY_TRAIN_ROLLOUT_H

#include "policy/train/internal.h"

enum { ROLLOUT_STUDENTS_MAX = 32 };

/* One student. */
struct rollout_student {
    /* Policy, budget and options; the network is borrowed. Students whose settings need the same statistics share the
     * computation of the prompt (engine.h, sequence_set_budget and forks) where that is possible. */
    struct policy_settings settings;
    /* Takes the place of the policy's own choice at every prune that is due, by sequence_prune_to; NULL: the policy's.
     * prune: its number, from 0. */
    int (*choose)(void *context, struct sequence *sequence, uint32_t prune, struct error *error);
    void *context;
};

struct rollout_plan {
    const int32_t *prompt;
    uint32_t prompt_tokens;
    const int32_t
        *continuation; /* [steps] tokens to feed; NULL: what the teacher finds most likely, end tokens banned */
    uint32_t steps;
    const struct rollout_student *students;
    uint32_t students_count;
    float *entropies; /* [steps] out: of the teacher's distribution at each step but 0, nats; NULL: not wanted */
};

/* The plan of a sequence of the data set: what follows in it is fed where there is enough of it, else the teacher's own
 * choices. */
struct rollout_plan rollout_plan_of(const struct training *training, const struct dataset_sequence *data,
    const struct rollout_student *students, uint32_t students_count);
/* The reward of a student as a whole: -ln(mean of kl [steps] but the first + 0.02). */
double rollout_reward(const float *kl, uint32_t steps);

/* kl [students][steps]: kl[s][0] is 0. 0, TRAIN_AGAIN never (the whole rollout is begun anew inside), else as
 * train_run. reset, if given, is called before a rollout is begun anew, so that `choose` may forget what it recorded.
 */
int rollout_run(struct training *training, const struct rollout_plan *plan, float *kl, void (*reset)(void *context),
    void *reset_context, struct error *error);

#endif
