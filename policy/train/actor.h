/* SPDX-License-Identifier: Apache-2.0
 *
 * What acts and learns in the stage kl, without an engine: K students prune by draws from the network (choice.h), each
 * prune leaves the gradient of its log-probability, and once returns are known their sum weighted by advantages is the
 * policy gradient. reinforce.c feeds it from rollouts, the tests from a toy.
 *
 * A prune's gradient is computed when the prune happens and kept by itself (as many numbers as the network has): what
 * the slots were is not kept. Where all of them would take more than ACTOR_BYTES, neighbouring prunes of a student
 * share a place, and count by the return of the first of them: rewards that came before a draw change nothing in the
 * mean.
 *
 * Heads of one call compete as the network's scope says: each alone, those of a layer, or all that are given. Scores
 * and gradients are computed on threads; sums over heads are made in an order that does not depend on their number.
 */
#ifndef POLICY_TRAIN_ACTOR_H
#define POLICY_TRAIN_ACTOR_H

#include "policy/train/gradient.h"
#include "policy/train/train.h"

struct thread_pool;

enum { ACTOR_BYTES = 512 << 20 };

struct actor_options {
    enum train_sampler sampler;
    float temperature;
    uint64_t seed;
    uint32_t students;
    uint32_t prunes;                      /* of a rollout, at most */
    uint32_t heads_most;                  /* of a call */
    uint32_t slots_most;                  /* of a head */
    size_t bytes;                         /* for gradients; 0: ACTOR_BYTES */
    const struct policy_network *network; /* its shape; and scope and floor */
    struct thread_pool *threads;
};

struct actor; /* NULL on failed allocation */
struct actor *actor_create(const struct actor_options *options);
void actor_free(struct actor *actor); /* NULL allowed */

/* A head at a prune. slots.keys and slots.standard as gradient.h wants them. */
struct actor_head {
    uint32_t head; /* layer * kv_heads + KV head; ascending in a call */
    uint32_t budget;
    struct train_slots slots;
    const uint32_t *positions; /* [slots.count] distinct, below 2^24 */
    uint8_t *keep;             /* [slots.count] out: 1: it stays */
};

/* A part of one student's prune. */
struct actor_prune {
    const struct policy_network *network;
    uint64_t step; /* of the stage: with student, prune, head and position it decides all noise */
    uint32_t student, prune;
    bool learns; /* its gradient will count: something follows it */
    uint32_t sinks, recent_from;
    const struct actor_head *heads;
    uint32_t heads_count;
};

/* Forgets all draws. */
void actor_clear(struct actor *actor);
/* Draws; scope layer: all heads of a layer are in one call, scope model: all heads. Parts of a prune add up.
 * ERROR_MEMORY. */
int actor_draw(struct actor *actor, const struct actor_prune *prune, struct error *error);
/* Of what a student drew at a prune so far: mean entropy per slot over the groups that had something to draw; 0. */
double actor_entropy(const struct actor *actor, uint32_t student, uint32_t prune);
/* The prune whose return counts for this one: itself, or the first one of its place. */
uint32_t actor_first(const struct actor *actor, uint32_t prune);

/* gradient = minus the mean over students of the sum over places of advantage * gradient: an optimiser descends along
 * it. advantages [students][prunes]: those of actor_first count. */
void actor_gradient(const struct actor *actor, const double *advantages, struct gradient *gradient);

#endif
