/* SPDX-License-Identifier: Apache-2.0
 *
 * How wrong a head's output becomes when only some of its slots are left: of recorded queries after the prompt
 * (record.h, outputs), for the query heads of a KV head,
 *
 *   |(o_S - o) W_h| / |o W_h|,   o = sum_i p_i v_i / sum_i p_i,
 *
 * o over all slots, o_S over those that stay and over the tokens after the prompt, W_h the columns of the attention
 * output matrix that belong to query head h (policy/stages.h); the mean over queries and query heads. Norms are taken
 * through W_h^T W_h, once computed: |x W_h|^2 = x W_h W_h^T x.
 */
#ifndef POLICY_TRAIN_OUTPUT_H
#define POLICY_TRAIN_OUTPUT_H

#include "policy/train/record.h"

/* [layers][query heads][head_dim][head_dim], nothing set of sliding layers; on training->threads, gives way between
 * layers. NULL: ERROR_MEMORY, or ERROR_CANCELLED. */
float *output_grams(struct training *training, const struct model *model, struct error *error);

/* Numbers of work space that output_open wants for a head of so many slots. */
size_t output_work(const struct records *records, uint32_t slots);

/* One head of one sequence, ready for errors of several selections. */
struct output {
    uint32_t slots, rows, group, dim; /* rows: queries * group */
    const float *grams;               /* of the head's first query head */
    const float *later;               /* as recorded */
    float *attention;                 /* [rows][slots] */
    float *values;                    /* [slots][dim] */
    float *whole;                     /* [rows][dim] o */
    float *norms;                     /* [rows] |o W_h| */
    float *kept;                      /* [dim] scratch */
};
void output_open(const struct records *records, const struct recorded_sequence *sequence,
    const struct recorded_head *head, const float *grams, float *work, struct output *out);
/* keep [slots]: 1: it stays. 0 without any recorded query. */
double output_error(const struct output *output, const uint8_t *keep);

#endif
