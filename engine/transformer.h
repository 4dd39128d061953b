/* SPDX-License-Identifier: Apache-2.0
 *
 * The transformer: the weights of a model on a backend, and the order of operations in a layer. The only place that
 * knows that order; engine.c is its only caller.
 *
 * Llama layer (Touvron et al. 2023), x the residual stream of one token:
 *   x += W_o attend(rope(W_q h), rope(W_k h), W_v h)   with h = rms_norm(x)
 *   x += W_down (silu(W_gate h) * (W_up h))            with h = rms_norm(x)
 * and by the fields of struct model_shape and the tensors that a model has: biases of q, k and v; norms of each of
 * their heads; norms of what is added to x; another activation, scale of scores and of embeddings; soft caps; windows.
 *
 * Rotated pairs are neighbours in the backend: where a file has them half a head apart, the rows of W_q and W_k (their
 * biases and norms too) change places on their way there.
 */
#ifndef ENGINE_TRANSFORMER_H
#define ENGINE_TRANSFORMER_H

#include "engine/backend.h"
#include "engine/engine.h"
#include "engine/model.h"

struct transformer; /* opaque */

/* One batch. Rows are the concatenated tokens of the items. */
struct transformer_batch {
    const int32_t *tokens; /* [rows] */
    uint32_t rows;         /* <= rows_max */
    const struct kv_pool *pool;
    const struct kv_item *items; /* [items_count] */
    uint32_t items_count;
    const struct kv_head_view *views; /* [layers][items_count][kv_heads] */
    /* What attention adds to; NULL: no sequence of the batch needs any. */
    const struct kv_statistics *statistics; /* [layers][items_count][kv_heads] */
    const struct query_moments *moments;    /* [layers][items_count] */
    const struct score_layer *scored;       /* [layers][items_count] struct kv_batch; NULL: none */
    const uint32_t *wanted;                 /* [wanted_count] rows whose final hidden state is asked for */
    uint32_t wanted_count;
};

/* Loads the model's weights into the backend and lets the file's pages go. rows_max: of one batch. model must outlive
 * it. ERROR_UNSUPPORTED: the backend lacks what the model needs, and the message says what. */
struct transformer *transformer_create(
    struct backend *backend, const struct model *model, uint32_t rows_max, bool exact, struct error *error);
void transformer_free(struct transformer *transformer); /* NULL allowed */

/* Computes a batch (whether it did: backend_check); the hidden states of wanted rows, after the final norm, are kept:
 * [wanted_count, width]. */
void transformer_forward(struct transformer *transformer, const struct transformer_batch *batch);

/* Hidden states [wanted_count - row, width] on the device: of the last batch's wanted rows from `row` on. */
const float *transformer_hidden(const struct transformer *transformer, uint32_t row);

/* Logits [count, vocabulary] on the device, or on rank 0 of several of hidden rows (indices into the last batch's
 * wanted rows); count <= TRANSFORMER_TILE. Two buffers, so that two sets can be compared; which is 0 or 1. */
enum { TRANSFORMER_TILE = 32 };
const float *transformer_logits(
    struct transformer *transformer, const uint32_t *hidden_rows, uint32_t count, uint32_t which, struct error *error);

/* Of a layer; valid as long as the transformer lives. Global layers have the same. */
struct rope_params transformer_rope(const struct transformer *transformer, uint32_t layer);
size_t transformer_weight_bytes(const struct transformer *transformer);
struct engine_profile *transformer_profile(struct transformer *transformer);
void transformer_profile_enable(struct transformer *transformer, bool enable); /* also resets */

#endif
