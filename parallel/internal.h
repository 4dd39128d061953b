/* SPDX-License-Identifier: Apache-2.0
 *
 * The inside of parallel.h: what its files share.
 *
 *   parallel.c   the backend, its memory, operations that all ranks do alike
 *   weights.c    matrices in parts, embed, linear
 *   attention.c  operations on a batch, cut by heads
 *   pages.c      operations on pages and statistics of some heads
 *   score.c      scores of slots
 *   select.c     selection, on each rank or by the host
 *   step.c       all layers of a batch at once
 */
#ifndef PARALLEL_INTERNAL_H
#define PARALLEL_INTERNAL_H

#include "parallel/crew.h"
#include "parallel/parallel.h"
#include "policy/select.h"

/* What allocate gave: as many bytes on each rank. */
struct rank_memory {
    char *base[BACKEND_RANKS_MAX];
    size_t bytes;
};

/* Host memory that grows. */
struct host_space {
    void *memory;
    size_t bytes;
};

struct rank {
    struct backend *backend;
    struct host_space batch, score; /* what a batch's, or a call of score's, part for this rank is made of */
    float *logits;                  /* device [PARALLEL_LOGITS_ROWS][tokens of this rank] */
    size_t logits_bytes;
    float *scores; /* device: of heads that have no place for theirs */
    size_t scores_count;
    struct kv_step step; /* the rank's part of the step under way, in step_space */
    struct kv_pool step_pool;
    struct host_space step_space;
};

enum { PARALLEL_LOGITS_ROWS = 32 };

struct parallel {
    struct backend base; /* first */
    struct backend_operations operations;
    struct backend *inner[BACKEND_RANKS_MAX];
    struct rank ranks[BACKEND_RANKS_MAX];
    uint32_t ranks_count;
    struct communicator *communicator;
    struct crew *crew;
    struct communicator_sum pending; /* of rank 0's addresses, that the next operation takes; x NULL: none */
    struct rank_memory *memory;      /* [memory_count] by rank 0's address */
    uint32_t memory_count, memory_capacity;
    struct host_space select;                     /* bits, of the last selection */
    uint32_t first_tokens[BACKEND_RANKS_MAX + 1]; /* of the ranks' parts of the vocabulary */
    bool stepping;                                /* from step_begin on */
    struct kv_step step;                          /* under way, as the caller has it */
    struct select_scratch select_scratch;
    char description[512];
};

static inline struct parallel *parallel_of(struct backend *backend) {
    return (struct parallel *)backend;
}

/* Runs work(context, rank) on all ranks, unless the backend has failed; the sum that is pending before. */
void parallel_run(struct parallel *p, crew_work work, void *context);

/* x [rows][width] of all ranks is to be added up: by the rank in its work (parallel_sum_on_rank), or, where a norm can
 * be taken with it, by the next operation, which probably is that norm (parallel_sum_later, by the caller). Each does
 * nothing where the other does. */
void parallel_sum_on_rank(struct parallel *p, uint32_t rank, float *x, uint32_t rows, uint32_t width);
void parallel_sum_later(struct parallel *p, float *x, uint32_t rows, uint32_t width);
/* The rank's numbers of tokens [rows]: no row of its part where another rank has the token. */
void parallel_own_tokens(const struct parallel *p, uint32_t rank, const int32_t *tokens, uint32_t rows, int32_t *own);
/* The rank's part of a batch of the step under way; false: it is none. */
bool parallel_step_batch(const struct parallel *p, const struct kv_batch *batch, uint32_t rank, struct kv_batch *part);
void parallel_fail(struct parallel *p, int code, const char *what);

void *parallel_address(struct backend *backend, const void *memory, uint32_t rank);
/* Makes the memory at least that large; its content is lost. NULL: there is none. */
void *parallel_reserve(struct host_space *space, size_t bytes);
/* Of each rank the space at `space` (offsetof in struct rank); false: there is no memory, and the backend has failed
 * with `what`. */
bool parallel_reserve_ranks(struct parallel *p, size_t space, size_t bytes, const char *what);

/* The pool as a rank's own backend sees it, with page numbers as they are. */
struct kv_pool parallel_pool(struct parallel *p, const struct kv_pool *pool, uint32_t rank);
/* A rank's columns of an output matrix. */
struct tensor parallel_output(const struct parallel *p, const struct tensor *output, uint32_t rank);
struct query_moments parallel_moments(struct parallel *p, const struct query_moments *moments, uint32_t rank);

/* The operations of backend.h. */
struct backend_weight *parallel_weight_split(
    struct backend *, const struct tensor *, enum weight_role role, bool exact, struct error *);
void parallel_weight_free(struct backend *, struct backend_weight *);
size_t parallel_weight_bytes(const struct backend_weight *);
void parallel_embed(struct backend *, const struct backend_weight *, const int32_t *tokens, uint32_t rows, float *out);
void parallel_linear(struct backend *, const struct backend_weight *const *weights, uint32_t weights_count,
    const float *x, uint32_t rows, bool add, float *out);

enum step_way parallel_step_begin(struct backend *, const struct kv_step *step, uint32_t *rows);
bool parallel_step_start(struct backend *, enum step_way way);
bool parallel_step_end(struct backend *);

void parallel_rope_and_append(
    struct backend *, const struct kv_batch *, const struct rope_params *, uint32_t heads, float *qkv);
void parallel_attend(struct backend *, const struct kv_batch *, uint32_t heads, const float *qkv, float *out);
void parallel_query_moments(
    struct backend *, const struct kv_batch *, uint32_t heads, const float *qkv, const struct query_moments *moments);

int parallel_score(struct backend *, const struct kv_pool *, const struct score_layer *layers, uint32_t count,
    uint32_t heads, struct error *error);
int parallel_select(
    struct backend *, const struct kv_pool *, const struct selection *selections, uint32_t count, struct error *error);
void parallel_window_preference(struct backend *, const struct kv_pool *, const struct score_layer *layers,
    uint32_t count, uint32_t heads, double *entropy, double *variance);

void parallel_summarise(struct backend *, const struct kv_pool *, const struct summary_update *updates, uint32_t count);
int parallel_slot_norms(struct backend *, const struct kv_pool *, const struct kv_head_view *view,
    const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm, float *output_norm,
    struct error *error);
void parallel_rotate_slots(struct backend *, const struct kv_pool *, const struct rope_params *, const uint32_t *pages,
    const uint32_t *slots, const float *keys, const uint32_t *to, uint32_t count);
void parallel_unrotate_slots(struct backend *, const struct kv_pool *, const struct rope_params *,
    const uint32_t *pages, const uint32_t *slots, uint32_t count, float *keys);
void parallel_copy_pages(
    struct backend *, const struct kv_pool *, const uint32_t *from, const uint32_t *to, uint32_t count);
void parallel_move_slots(struct backend *, const struct kv_pool *, const uint32_t *pages, const uint32_t *from,
    const uint32_t *to, uint32_t count);
void parallel_clear_slots(
    struct backend *, const struct kv_pool *, const uint32_t *pages, uint32_t first, uint32_t end);
void parallel_move_statistics(
    struct backend *, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim);
void parallel_write_tables(struct backend *, const struct kv_table_write *writes, uint32_t count);
void parallel_poison_pages(struct backend *, const struct kv_pool *, const uint32_t *pages, uint32_t count);

#endif
