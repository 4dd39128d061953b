/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the CPU backend: its state, the instruction-set tiers, and one table of kernels per operation family.
 *
 * Each family has a table of function pointers per tier (scalar, AVX2 + FMA + F16C, AVX-512 F/BW/VL/DQ/VNNI);
 * backend_cpu_open takes those of the highest tier that the machine and the option --cpu-features allow. A tier's file
 * is built into a static library with its own flags and must not be entered otherwise. The operations (cpu_*) split
 * work over threads and call kernels; they have the signatures of backend.h.
 */
#ifndef ENGINE_CPU_CPU_H
#define ENGINE_CPU_CPU_H

#include "engine/backend.h"
#include "engine/cpu/blocks.h"
#include "engine/cpu/threads.h"

enum cpu_tier { CPU_SCALAR, CPU_AVX2, CPU_AVX512, CPU_TIER_COUNT };

enum cpu_tier cpu_tier_detect(void);           /* the highest that this machine has */
const char *cpu_tier_name(enum cpu_tier tier); /* "scalar", "avx2", "avx512" */

struct linear_kernels;     /* linear.h */
struct attend_kernels;     /* attend.h */
struct statistics_kernels; /* statistics.h: what policies want to know of attention */
struct vector_kernels;     /* vector.h: norms, rotation, activation, softmax sums */
struct score_kernels;      /* score.h */

struct cpu_backend {
    struct backend base; /* first: a struct backend * is a struct cpu_backend * */
    enum cpu_tier tier;
    struct thread_pool *threads;
    const struct linear_kernels *linear;
    const struct attend_kernels *attend;
    const struct statistics_kernels *statistics;
    const struct vector_kernels *vector;
    const struct score_kernels *score;
    struct cpu_blocks blocks; /* what allocate gave */
    void *linear_scratch;     /* owned by linear.c */
    void *attend_scratch;     /* owned by attend.c */
    void *score_state;        /* owned by score_state.c */
    char description[128];
};

enum { CPU_ROWS_SHARED_LEAST = 4, CPU_ROWS_SHARED_MOST = 16 }; /* of each thread */

static inline struct cpu_backend *cpu_backend(struct backend *backend) {
    return (struct cpu_backend *)backend;
}

/* Whether operations share a batch of this many rows out by rows: each thread then owns some sequences through a whole
 * layer, and what it writes is read by nobody else. With fewer rows a thread weights, which every thread reads, cost
 * more than that saves; with more, every thread has enough to do between two exchanges. */
static inline bool cpu_shares_rows(const struct cpu_backend *cpu, uint32_t rows) {
    uint32_t threads = thread_pool_size(cpu->threads);
    return threads > 1 && rows / threads >= CPU_ROWS_SHARED_LEAST && rows <= threads * CPU_ROWS_SHARED_MOST;
}

/* Work on rows that need nothing of each other: shared out by rows where cpu_shares_rows says so, else in chunks of
 * chunk_rows; as few as one chunk are cheaper than waking the threads. */
void cpu_run_rows(struct cpu_backend *cpu, uint32_t rows, uint32_t chunk_rows, thread_part_work work, void *context);

/* linear.c */
const struct linear_kernels *cpu_linear_kernels(enum cpu_tier tier);
void cpu_linear_scratch_free(struct cpu_backend *cpu);
struct backend_weight *cpu_weight_create(struct backend *, const struct tensor *, bool exact, struct error *);
void cpu_weight_free(struct backend *, struct backend_weight *);
size_t cpu_weight_bytes(const struct backend_weight *);
void cpu_embed(struct backend *, const struct backend_weight *, const int32_t *tokens, uint32_t rows, float *out);
void cpu_linear(struct backend *, const struct backend_weight *const *weights, uint32_t weights_count, const float *x,
    uint32_t rows, bool add, float *out);

/* vector.c */
const struct vector_kernels *cpu_vector_kernels(enum cpu_tier tier);
void cpu_rms_norm(
    struct backend *, const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out);
void cpu_rms_norm_add(
    struct backend *, const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out);
void cpu_head_norms(struct backend *, const float *query_weight, const float *key_weight, float epsilon, uint32_t rows,
    uint32_t heads, uint32_t kv_heads, uint32_t head_dim, float *qkv);
void cpu_add_bias(struct backend *, const float *bias, uint32_t rows, uint32_t width, float *x);
void cpu_scale(struct backend *, float factor, uint32_t rows, uint32_t width, float *x);
void cpu_soft_cap(struct backend *, float cap, uint32_t rows, uint32_t width, float *x);
void cpu_gelu_mul(struct backend *, const float *gate_up, uint32_t rows, uint32_t width, float *out);
void cpu_silu_mul(struct backend *, const float *gate_up, uint32_t rows, uint32_t width, float *out);
void cpu_gather_rows(
    struct backend *, const float *x, const uint32_t *rows_wanted, uint32_t count, uint32_t width, float *out);

/* attend.c, statistics.c, query_moments.c, kv_pages.c */
const struct attend_kernels *cpu_attend_kernels(enum cpu_tier tier);
const struct statistics_kernels *cpu_statistics_kernels(enum cpu_tier tier);
void cpu_attend_scratch_free(struct cpu_backend *cpu);
void cpu_rope_and_append(
    struct backend *, const struct kv_batch *, const struct rope_params *, uint32_t heads, float *qkv);
void cpu_attend(struct backend *, const struct kv_batch *, uint32_t heads, const float *qkv, float *out);
bool cpu_attend_scores(const struct score_stage *stages, uint32_t count); /* score.c */
void cpu_query_moments(
    struct backend *, const struct kv_batch *, uint32_t heads, const float *qkv, const struct query_moments *moments);
void cpu_copy_pages(struct backend *, const struct kv_pool *, const uint32_t *from, const uint32_t *to, uint32_t count);
void cpu_move_slots(struct backend *, const struct kv_pool *, const uint32_t *pages, const uint32_t *from,
    const uint32_t *to, uint32_t count);
void cpu_clear_slots(struct backend *, const struct kv_pool *, const uint32_t *pages, uint32_t first, uint32_t end);
void cpu_poison_pages(struct backend *, const struct kv_pool *, const uint32_t *pages, uint32_t count);

/* score.c, score_state.c, score_numbers.c, score_attention.c, score_rotate.c */
const struct score_kernels *cpu_score_kernels(enum cpu_tier tier);
void cpu_score_state_free(struct cpu_backend *cpu);
int cpu_score(struct backend *, const struct kv_pool *, const struct score_layer *layers, uint32_t count,
    uint32_t heads, struct error *error);
int cpu_slot_norms(struct backend *, const struct kv_pool *, const struct kv_head_view *view,
    const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm, float *output_norm,
    struct error *error);
void cpu_window_preference(struct backend *, const struct kv_pool *, const struct score_layer *layers, uint32_t count,
    uint32_t heads, double *entropy, double *variance);
void cpu_rotate_slots(struct backend *, const struct kv_pool *, const struct rope_params *, const uint32_t *pages,
    const uint32_t *slots, const float *keys, const uint32_t *to, uint32_t count);
void cpu_unrotate_slots(struct backend *, const struct kv_pool *, const struct rope_params *, const uint32_t *pages,
    const uint32_t *slots, uint32_t count, float *keys);

/* summarise.c */
void cpu_summarise(struct backend *, const struct kv_pool *, const struct summary_update *updates, uint32_t count);

/* statistics_move.c */
void cpu_move_statistics(
    struct backend *, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim);

/* sample.c */
void cpu_sample(struct backend *, const float *logits, uint32_t rows, uint32_t vocabulary,
    const struct sample_params *params, struct sample_result *results);
void cpu_kl(struct backend *, const float *p, const uint32_t *p_rows, const float *q, uint32_t rows,
    uint32_t vocabulary, float *out);

#endif
