/* SPDX-License-Identifier: Apache-2.0
 *
 * The vocabulary that policies and backends share: what attention can record of a slot (statistics), and of what a
 * score is made (stages). A policy declares both; a backend computes both; neither knows the other.
 *
 * Notation (policy/README.md): p[h,t,i] probability of query head h at query t on slot i; a[t,i] its mean over the G
 * query heads of the KV head's group; L tokens seen, B budget; u_{h,i} = v_i W_h what slot i adds to the layer's output
 * per unit of attention of head h. A query counts for the slots it can see.
 */
#ifndef POLICY_STAGES_H
#define POLICY_STAGES_H

#include <stdint.h>

/* Bits of a need mask. Sums are integers, so that no order of adding matters: every term is rint(x * 2^24). */
enum statistic {
    STATISTIC_SUM = 1 << 0,         /* sum of a[t,i] over all queries since the slot's token entered */
    STATISTIC_SQUARED = 1 << 1,     /* sum of the group mean of p[h,t,i]^2 over the same queries */
    STATISTIC_WINDOW = 1 << 2,      /* a[t,i] of the last w queries, one by one (f16), and their sum */
    STATISTIC_HEAD_WINDOW = 1 << 3, /* p[h,t,i] of the last w queries (f16) */
    STATISTIC_OUTPUTS = 1 << 4,     /* attention output o_h of each query head for the last w queries (f32) */
    STATISTIC_ABOVE = 1 << 5,       /* of the last `history` queries: whether a[t,i] > 1 / (slots the query saw) */
    STATISTIC_ENTROPY = 1 << 6,     /* group mean of the entropy of the attention row of the slot's own query (f16) */
    STATISTIC_NOISY = 1 << 7,       /* sum of the group mean of softmax((logit + Gumbel) / tau), see keyformer */
    STATISTIC_MOMENTS = 1 << 8,     /* of a layer: mean and second moment of pre-RoPE queries at positions >= 4 */
    STATISTIC_OUTPUT_NORM =
        1 << 9,                   /* cached slot scalar: group mean of the L1 norm of u_{h,i}; computed by its stage */
    STATISTIC_CONTENT = 1 << 10,  /* what the network keeps of a slot (network.h), f16; computed by its stage */
    STATISTIC_STANDARD = 1 << 11, /* of a head: the frozen means and deviations of the paper's network */
};

enum {
    STATISTIC_ABOVE_BITS = 512, /* most queries of history */
    STATISTIC_FRACTION_BITS = 24,
    STATISTIC_STANDARD_NUMBERS = 8,
};

/* Each stage reads and writes one float score per slot of a head, in the order given. "slot's position" is original. */
enum score_stage_kind {
    /* Scores of their own. */
    STAGE_POSITION,       /* the position */
    STAGE_RANDOM,         /* uniform in (0, 1): random_uniform(seed, layer * K + head, position, 0) */
    STAGE_SUM,            /* STATISTIC_SUM */
    STAGE_SUM_PER_QUERY,  /* STATISTIC_SUM / (L - position) */
    STAGE_ABOVE,          /* number of queries of the history above */
    STAGE_WINDOW_SUM,     /* sum of a[t,i] over the window */
    STAGE_WINDOW_SPREAD,  /* mean + x * population variance of a[t,i] over the window (the queries there are, <= w) */
    STAGE_NOISY,          /* STATISTIC_NOISY */
    STAGE_KEY_NORM,       /* minus the L2 norm of the key */
    STAGE_KEY_DIFFERENCE, /* minus the cosine of the key and the mean of the head's normalised keys */
    STAGE_EXPECTED_ATTENTION, /* group mean of softmax over slots that are not sinks (position < 4) of k.mu/sqrt(d) +
                               * k S k/(2d), plus x; mu, S the moments rotated by the mean rotation of the next n
                               * positions from L; sinks NaN */
    STAGE_LAPROX,             /* see policy/laprox.c; over all heads of the layer, the same score for every head */
    STAGE_LAPROX_HEAD,        /* the same within the head's group */
    STAGE_DROP_ERROR,         /* see policy/restkv.c: EMA (x) over the window of the error when the slot is dropped */
    /* Changes of what is there. */
    STAGE_LAYER_MEAN,        /* mean over the layer's heads, slot by slot (all heads hold the same slots) */
    STAGE_TIMES_VALUE_NORM,  /* times the L2 norm of the value */
    STAGE_TIMES_OUTPUT_NORM, /* (score + x) times STATISTIC_OUTPUT_NORM; protected slots stay +infinity */
    STAGE_POOL_MAX, /* maximum over unprotected slots at most n / 2 positions away; protected ones are not touched */
    STAGE_POOL_ADAPTIVE, /* mean, kernel and shift by how far the head's most attended positions move (restkv.c) */
    STAGE_PROTECT,       /* +infinity at positions < sinks or >= recent_from of the head (struct score_head) */
    STAGE_PROTECT_BEST, /* +infinity for the B / 2 best by now (selection's order), protected ones counted among them */
    /* The DistillCache network (network.h) of score_layer.network. Frees nothing, protects nothing. */
    STAGE_NETWORK,
    STAGE_LOG_SOFTMAX, /* score - ln(sum over the head's slots of e^score), +infinity and NaN left out of the sum and as
                        * they are: heads of a layer compare */
    STAGE_KIND_COUNT,
};

enum { SCORE_STAGES_MAX = 8 };

struct score_stage {
    enum score_stage_kind kind;
    float x;
    uint32_t n;
};

#endif
