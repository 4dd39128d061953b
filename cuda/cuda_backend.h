/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the CUDA backend: its state, errors, scratch memory, and the staging of host arguments.
 *
 * The host side of an operation (cuda_NAME, with the signature that backend.h gives it) does three things: it stages
 * what lies in host memory, it calls a launcher of a .cu file (device pointers, sizes and the stream, nothing else),
 * and it checks the launch. It does not wait, so that operations queue up on the stream in call order. operations.c
 * lists them; one that is missing there is NULL.
 *
 * Errors. Operations return nothing: the first error is logged with the operation's name and kept; everything after it
 * does nothing. synchronize, download and whatever else waits for a result end the program when there was one, since
 * CUDA's errors are not recoverable and results would be garbage (cuda_wait). A rank of several makes their
 * communicator fail instead, so that requests end with the error.
 */
#ifndef CUDA_CUDA_BACKEND_H
#define CUDA_CUDA_BACKEND_H

#include "cuda/late.h"
#include "cuda/queue.h"
#include "engine/backend.h"

#include <cuda_runtime_api.h>

enum {
    CUDA_STAGE_ALIGNMENT = 16,
    CUDA_RING_SEGMENTS = 4,
    CUDA_SEGMENT_BYTES = 1 << 20, /* at first; a larger call makes all segments larger */
    /* Of a rank: pinned memory may be allocated when all devices are idle only, and another may wait for this one. */
    CUDA_RANK_SEGMENT_BYTES = 8 << 20,
};

/* Pinned host memory and device memory of the same size, both cut into the same segments. Arguments are written to the
 * host side, copied to the same place of the device side, and read there by kernels. The copies and the kernels lie on
 * one stream, so that only the host side must wait before it is written again: until the copies out of a segment are
 * done (an event a segment). */
struct cuda_ring {
    char *host, *device;
    size_t segment_bytes;
    uint32_t segment;                       /* that is being filled */
    size_t used;                            /* bytes of it */
    cudaEvent_t copied[CUDA_RING_SEGMENTS]; /* recorded when the segment was left */
};

/* Device memory that grows as needed and is kept from call to call. */
struct cuda_scratch {
    void *memory;
    size_t bytes;
};

struct cuda_backend {
    struct backend base; /* first: a struct backend * is a struct cuda_backend * */
    int device;
    cudaStream_t stream;
    struct communicator *communicator; /* that this is a rank of; NULL: it is alone. Not owned */
    uint32_t rank;
    cudaError_t failed;       /* cudaSuccess, or the first error */
    uint32_t multiprocessors; /* of the device */
    uint32_t capability;      /* 10 * major + minor: 80, 89, 90 */
    bool pooled;              /* memory comes from the device's pool, in order with the stream (memory.c) */
    size_t shared_bytes_max;  /* dynamic shared memory that a block can opt in to */
    uint64_t generation;      /* how often memory that operations keep from call to call was made or moved */
    bool capturing;           /* launches go to a graph (step.c): nothing may be staged, allocated or waited for */
    bool capture_broken;      /* something would have been */
    struct cuda_ring ring;
    bool busy;                          /* something was called since the stream was waited for */
    struct cuda_queue queue;            /* moves and marks of slots that wait */
    struct cuda_late late;              /* results that come with the next wait */
    struct cuda_scratch moved, results; /* pages.c, sample.c */
    struct rope_state *rope;            /* rope.c */
    struct step_state *step;            /* step.c */
    void *linear; /* each family's own state, made when first needed; freed by its cuda_NAME_free */
    void *attend;
    void *score;
    void *select;
    char description[384];
};

/* Makes the backend's device that of this thread: ranks are called by several. */
cudaError_t cuda_use_device(struct cuda_backend *cuda);

/* How an operation begins: what waits in the queue was called before it. */
static inline struct cuda_backend *cuda_backend(struct backend *backend) {
    struct cuda_backend *cuda = (struct cuda_backend *)backend;
    cuda_use_device(cuda);
    cuda->busy = true;
    if (cuda->queue.filled)
        cuda_queue_send(cuda);
    return cuda;
}

/* Whether result is success; else logs and keeps it, and a rank's communicator fails. what: "rms_norm". */
bool cuda_check(struct cuda_backend *cuda, cudaError_t result, const char *what);

/* The same for the launches since the last call. */
bool cuda_check_launch(struct cuda_backend *cuda, const char *what);

/* Waits for the stream, and hands over late results (late.h). After an error it ends the program, but for a rank: there
 * the communicator has the error, and results are nobody's. */
void cuda_wait(struct cuda_backend *cuda);

/* Until the stream, or an event of it, is done. A rank's may wait for other ranks: not beyond the communicator's
 * patience, and not long once it has failed. The device's error, or cudaErrorUnknown: it still works. */
cudaError_t cuda_wait_stream(struct cuda_backend *cuda);
cudaError_t cuda_wait_event(struct cuda_backend *cuda, cudaEvent_t event);

/* True while a graph is captured, which is then given up: for what cannot be part of one. */
static inline bool cuda_breaks_capture(struct cuda_backend *cuda) {
    cuda->capture_broken |= cuda->capturing;
    return cuda->capturing;
}

/* Makes scratch at least `bytes` large; its contents are lost when it grows (to at least twice its size; waits then).
 * Returns its memory, NULL when there is none (which is kept as an error) or when it would have to grow within a
 * capture. */
void *cuda_scratch_reserve(struct cuda_backend *cuda, struct cuda_scratch *scratch, size_t bytes);
void cuda_scratch_free(struct cuda_scratch *scratch);

/* ---- staging ----
 *
 *   struct cuda_stage stage;
 *   if (!cuda_stage_begin(cuda, cuda_stage_size(count * sizeof *pages), &stage))
 *       return;
 *   const uint32_t *device_pages = cuda_stage_copy(&stage, pages, count * sizeof *pages);
 *   cuda_stage_send(cuda, &stage);
 *   launch_something(device_pages, ..., cuda->stream);
 *
 * What was staged is valid for kernels that are launched before the next stage is opened (cuda_upload_bytes may come in
 * between). */
struct cuda_stage {
    char *host, *device; /* CUDA_STAGE_ALIGNMENT-byte aligned */
    size_t bytes;        /* that were asked for */
    size_t used;
};

/* What one array takes in a stage: rounded up. */
static inline size_t cuda_stage_size(size_t bytes) {
    return (bytes + CUDA_STAGE_ALIGNMENT - 1) / CUDA_STAGE_ALIGNMENT * CUDA_STAGE_ALIGNMENT;
}

/* Opens room for `bytes` (the sum of cuda_stage_size over the arrays, or more). False when there was an error, and
 * within a capture. */
bool cuda_stage_begin(struct cuda_backend *cuda, size_t bytes, struct cuda_stage *stage);

/* Room for one array: where the host writes it until the stage is sent (it must not read it back: the memory may be
 * write-combined), and in *device where kernels will find it. */
void *cuda_stage_add(struct cuda_stage *stage, size_t bytes, const void **device);

/* The same with the array's contents: returns its address on the device. */
const void *cuda_stage_copy(struct cuda_stage *stage, const void *from, size_t bytes);

/* One asynchronous copy of all that was added. False when there was an error. */
bool cuda_stage_send(struct cuda_backend *cuda, struct cuda_stage *stage);

/* stage.c; used by backend.c alone. */
cudaError_t cuda_ring_create(struct cuda_ring *ring, size_t segment_bytes);
void cuda_ring_free(struct cuda_ring *ring);

/* Copies host memory of any size to device memory through the ring, in order with the stream, without waiting for it
 * (but for a free segment). The host memory may be forgotten when this returns. */
void cuda_upload_bytes(struct cuda_backend *cuda, void *to, const void *from, size_t bytes);

/* ---- operations, as in backend.h ---- */

/* memory.c */
void cuda_memory_prepare(struct cuda_backend *cuda); /* once, when the backend is opened */
void *cuda_allocate(struct backend *, size_t bytes);
void cuda_release(struct backend *, void *memory);
void cuda_upload(struct backend *, void *to, const void *from, size_t bytes);
void cuda_download(struct backend *, void *to, const void *from, size_t bytes);
void cuda_synchronize(struct backend *);

/* backend.c */
const char *cuda_describe(struct backend *);
void cuda_close(struct backend *);

/* operations.c */
extern const struct backend_operations cuda_operations;
extern void (*const cuda_family_frees[])(struct cuda_backend *); /* what cuda_close calls; the last is NULL */

/* weights.h: weight_create, weight_free, weight_bytes, embed. */

/* linear */
void cuda_linear(struct backend *, const struct backend_weight *const *weights, uint32_t weights_count, const float *x,
    uint32_t rows, bool add, float *out);
void cuda_linear_free(struct cuda_backend *cuda); /* cuda->linear; may be NULL */

/* attend */
void cuda_attend(struct backend *, const struct kv_batch *, uint32_t heads, const float *qkv, float *out);
void cuda_query_moments(
    struct backend *, const struct kv_batch *, uint32_t heads, const float *qkv, const struct query_moments *moments);
void cuda_summarise(struct backend *, const struct kv_pool *, const struct summary_update *updates, uint32_t count);
void cuda_window_preference(struct backend *, const struct kv_pool *, const struct score_layer *layers, uint32_t count,
    uint32_t heads, double *entropy, double *variance);
void cuda_attend_free(struct cuda_backend *cuda); /* cuda->attend; may be NULL */

/* step.c */
enum step_way cuda_step_begin(struct backend *, const struct kv_step *step, uint32_t *rows);
bool cuda_step_start(struct backend *, enum step_way way);
bool cuda_step_end(struct backend *);
void cuda_step_free(struct cuda_backend *cuda); /* cuda->step; may be NULL */

/* score */
int cuda_score(struct backend *, const struct kv_pool *, const struct score_layer *layers, uint32_t count,
    uint32_t heads, struct error *error);
int cuda_slot_norms(struct backend *, const struct kv_pool *, const struct kv_head_view *view,
    const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm, float *output_norm,
    struct error *error);
void cuda_score_free(struct cuda_backend *cuda); /* cuda->score; may be NULL */

/* select */
int cuda_select(
    struct backend *, const struct kv_pool *, const struct selection *selections, uint32_t count, struct error *error);
void cuda_select_free(struct cuda_backend *cuda); /* cuda->select; may be NULL */

/* vector.c */
void cuda_rms_norm(
    struct backend *, const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out);
void cuda_rms_norm_add(
    struct backend *, const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out);
void cuda_head_norms(struct backend *, const float *query_weight, const float *key_weight, float epsilon, uint32_t rows,
    uint32_t heads, uint32_t kv_heads, uint32_t head_dim, float *qkv);
void cuda_add_bias(struct backend *, const float *bias, uint32_t rows, uint32_t width, float *x);
void cuda_scale(struct backend *, float factor, uint32_t rows, uint32_t width, float *x);
void cuda_soft_cap(struct backend *, float cap, uint32_t rows, uint32_t width, float *x);
void cuda_silu_mul(struct backend *, const float *gate_up, uint32_t rows, uint32_t width, float *out);
void cuda_gelu_mul(struct backend *, const float *gate_up, uint32_t rows, uint32_t width, float *out);
void cuda_gather_rows(
    struct backend *, const float *x, const uint32_t *rows_wanted, uint32_t count, uint32_t width, float *out);

/* rope.c */
void cuda_rope_and_append(
    struct backend *, const struct kv_batch *, const struct rope_params *, uint32_t heads, float *qkv);
void cuda_rotate_slots(struct backend *, const struct kv_pool *, const struct rope_params *, const uint32_t *pages,
    const uint32_t *slots, const float *keys, const uint32_t *to, uint32_t count);
void cuda_unrotate_slots(struct backend *, const struct kv_pool *, const struct rope_params *, const uint32_t *pages,
    const uint32_t *slots, uint32_t count, float *keys);
void cuda_rope_free(struct cuda_backend *cuda);

/* pages.c */
void cuda_copy_pages(
    struct backend *, const struct kv_pool *, const uint32_t *from, const uint32_t *to, uint32_t count);
void cuda_move_slots(struct backend *, const struct kv_pool *, const uint32_t *pages, const uint32_t *from,
    const uint32_t *to, uint32_t count);
void cuda_clear_slots(struct backend *, const struct kv_pool *, const uint32_t *pages, uint32_t first, uint32_t end);
void cuda_poison_pages(struct backend *, const struct kv_pool *, const uint32_t *pages, uint32_t count);
void cuda_move_statistics(
    struct backend *, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim);

/* tables.c */
void cuda_write_tables(struct backend *, const struct kv_table_write *writes, uint32_t count);

/* sample.c */
void cuda_sample(struct backend *, const float *logits, uint32_t rows, uint32_t vocabulary,
    const struct sample_params *params, struct sample_result *results);
void cuda_kl(struct backend *, const float *p, const uint32_t *p_rows, const float *q, uint32_t rows,
    uint32_t vocabulary, float *out);

#endif
