/* SPDX-License-Identifier: Apache-2.0
 *
 * What a prune keeps of a prompt by distance from its ends: whether a policy holds the first and the newest tokens.
 * Numbers are parts of all layers and heads that keep a token, means over the tokens in question; NaN where there are
 * none.
 */
#ifndef POLICY_EVAL_POSITIONS_H
#define POLICY_EVAL_POSITIONS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

enum { KEPT_FIRST = 8, KEPT_SINKS = 4, KEPT_RECENT = 32, KEPT_DISTANCES = 24 };

struct eval_positions {
    bool present;
    double sinks, recent, between; /* the first KEPT_SINKS; the last KEPT_RECENT; all others */
    double first[KEPT_FIRST];      /* each by itself */
    /* Of the others, by distance from the end, 1 for the newest: [0] distance 1, [n] above 2^(n-1) and up to 2^n. */
    double distance[KEPT_DISTANCES];
};

/* kept [tokens]: how many of the heads of all layers keep each. */
void eval_positions_measure(const uint32_t *kept, uint32_t tokens, uint32_t heads, struct eval_positions *out);

/* Means of those that are present, each number over those that have it. A sum begins with all zero. */
struct eval_positions_sum {
    struct eval_positions sums, counts;
};
void eval_positions_add(struct eval_positions_sum *sum, const struct eval_positions *positions);
void eval_positions_mean(const struct eval_positions_sum *sum, struct eval_positions *out);

/* "kept_sinks", "kept_recent", "kept_between", "kept_first": [...], "kept_distance": [...]; numbers that are none are
 * null, behind the last one absent. Writes nothing when not present. Not 0: no memory. */
int eval_positions_write(json_t *object, const struct eval_positions *positions);
/* Present when the object has them all. */
void eval_positions_read(const json_t *object, struct eval_positions *positions);

#endif
