/* SPDX-License-Identifier: Apache-2.0
 *
 * Parts of messages (messages.h): pools, batches, heads with their statistics, layers to score. For messages.c.
 */
#ifndef PARALLEL_MESSAGE_PARTS_H
#define PARALLEL_MESSAGE_PARTS_H

#include "parallel/messages.h"

/* Lowest and highest page number of a message. */
struct message_pages {
    uint32_t low, high; /* low > high: none yet */
};

/* The pool and the number of heads. A reader's pool must be the model's; its base is the leader's number until
 * message_find_pool, at the end of the message, has seen that all pages lie in memory of the leader's. */
void message_code_pool(
    struct wire *wire, const struct message_context *context, struct message *m, struct message_pages *pages);
void message_find_pool(struct wire *wire, struct message *m, const struct message_pages *pages);

void message_code_pages(struct wire *wire, struct message_pages *pages, const uint32_t **list, uint32_t count);
void message_code_view(struct wire *wire, struct message_pages *pages, struct kv_head_view *view, uint32_t head_dim);
void message_code_rope(struct wire *wire, struct rope_params *rope, uint32_t head_dim);
void message_code_tensor(struct wire *wire, const struct message_context *context, struct tensor *tensor);
void message_code_moments(
    struct wire *wire, const struct query_moments **moments, uint32_t count, uint32_t heads, uint32_t head_dim);
/* Returns how many rows the matrices of the batch have at least. */
uint32_t message_code_batch(
    struct wire *wire, const struct message_context *context, struct message *m, struct message_pages *pages);
void message_code_layers(
    struct wire *wire, const struct message_context *context, struct message *m, struct message_pages *pages);
void message_code_updates(struct wire *wire, struct message *m, struct message_pages *pages);
void message_code_moves(struct wire *wire, struct message *m);

#endif
