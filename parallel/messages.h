/* SPDX-License-Identifier: Apache-2.0
 *
 * What a leader says to a worker: one message for each operation of backend.h that a rank is asked for, with its
 * arguments. Host arrays go along, device memory goes by address (wire.h). message_code is both the writer and the
 * reader of all of them; for a reader it checks everything that an operation would follow without a look of its own:
 * page numbers, slots, rows, sizes of buffers, shapes against the model's. After it, no argument leads outside the
 * memory that the leader was given. What an operation checks itself (score_check.h) is left to it.
 *
 * A message on a connection: its operation (4 bytes), 4 zero bytes, the length of what follows (8), then that, filled
 * up to a multiple of 8 bytes. Operations marked "answers" are followed by a message of the same operation from the
 * worker, the others by nothing: the leader goes on at once.
 */
#ifndef PARALLEL_MESSAGES_H
#define PARALLEL_MESSAGES_H

#include "engine/backend.h"
#include "parallel/wire.h"

/* Raised whenever a message changes its form. */
enum { MESSAGE_PROTOCOL = 1 };

enum message_operation {
    MESSAGE_GOODBYE = 1, /* the leader ends */
    MESSAGE_ALLOCATE,    /* answers */
    MESSAGE_RELEASE,
    MESSAGE_UPLOAD,
    MESSAGE_DOWNLOAD,      /* answers: the bytes */
    MESSAGE_SYNCHRONIZE,   /* answers */
    MESSAGE_WEIGHT_CREATE, /* answers */
    MESSAGE_WEIGHT_FREE,
    MESSAGE_NETWORK, /* keeps a policy's network, for MESSAGE_SCORE */
    MESSAGE_EMBED,
    MESSAGE_RMS_NORM,
    MESSAGE_LINEAR,
    MESSAGE_ROPE,
    MESSAGE_ATTEND,
    MESSAGE_MOMENTS,
    MESSAGE_SCORE, /* answers */
    MESSAGE_SUMMARISE,
    MESSAGE_SLOT_NORMS, /* answers */
    MESSAGE_PREFERENCE, /* answers */
    MESSAGE_ROTATE,
    MESSAGE_UNROTATE,
    MESSAGE_SILU,
    MESSAGE_GATHER,
    MESSAGE_COPY_PAGES,
    MESSAGE_MOVE_SLOTS,
    MESSAGE_CLEAR_SLOTS,
    MESSAGE_MOVE_STATISTICS,
    MESSAGE_POISON,
    MESSAGE_OPERATIONS,
};

enum {
    MESSAGE_HEADER_BYTES = 16,
    MESSAGE_UPLOAD_MOST = 16 << 20, /* bytes at once */
    MESSAGE_WEIGHTS_MAX = 1 << 13,  /* matrices of a rank */
    MESSAGE_NETWORKS = 64,          /* that a worker keeps */
    MESSAGE_ROWS_MAX = 1 << 20,     /* of a batch */
    MESSAGE_SLOTS_MAX = 1 << 28,    /* of a head */
};

struct message_weight {
    uint32_t handle; /* the leader's number of it, below MESSAGE_WEIGHTS_MAX */
    uint32_t rows, columns;
    struct backend_weight *weight; /* the worker's; NULL: there is none of that number */
};

/* What both ends know beforehand. */
struct message_context {
    const struct model *model;                               /* reading */
    uint32_t rank, world;                                    /* reading */
    const struct message_weight *weights;                    /* reading: [MESSAGE_WEIGHTS_MAX] */
    const struct policy_network *networks[MESSAGE_NETWORKS]; /* writing: those of this message; reading: all */
};

/* Arguments by the names they have in backend.h. Which are used depends on the operation. */
struct message {
    enum message_operation operation;
    uint64_t address; /* allocate, release */
    uint64_t bytes;   /* allocate, upload, download */
    void *memory;     /* device: upload, download */
    const void *data; /* upload: host [bytes] */
    /* matrices */
    uint32_t handle;
    struct tensor tensor; /* weight_create, slot_norms */
    bool exact;
    struct message_weight weights[LINEAR_WEIGHTS_MAX];
    uint32_t weights_count;
    bool add;
    /* rows */
    const float *x, *weight;
    const int32_t *tokens;       /* [rows] */
    const uint32_t *rows_wanted; /* [rows] */
    float epsilon;
    uint32_t rows, width;
    float *out;
    /* batches */
    struct kv_pool pool;
    struct kv_batch batch;
    struct rope_params rope;
    uint32_t heads;
    const struct query_moments *moments; /* [items_count] */
    /* prunes */
    const struct score_layer *layers;     /* [count] */
    const struct summary_update *updates; /* [count] */
    const struct statistics_move *moves;  /* [count] */
    uint32_t count, group, head_dim;
    struct kv_head_view view;
    uint32_t layer, head;
    bool want_values, want_outputs; /* slot_norms */
    uint32_t slot;                  /* network: its place */
    struct policy_network *network; /* network; a reader's own, to be released */
    /* pages and slots */
    const uint32_t *pages;
    uint32_t pages_count;
    const uint32_t *from, *to; /* [count]; rotate: slots and positions */
    const float *keys;         /* device */
    uint32_t first, end;
};

/* Reading: wire.failed says that there was a fault. */
void message_code(struct wire *wire, const struct message_context *context, struct message *message);

/* Worst slots of all heads that name theirs, in order: what an answer to MESSAGE_SCORE holds after its code. */
uint32_t message_worst_count(const struct message *message, uint32_t kv_heads);

/* Code and message of an answer. */
void message_code_error(struct wire *wire, struct error *error);

/* The head of a message of `bytes` bytes, which are then filled up. */
void message_write_header(uint8_t header[MESSAGE_HEADER_BYTES], uint32_t operation, size_t bytes);
/* false: this is none of at most `most` bytes. */
bool message_read_header(
    const uint8_t header[MESSAGE_HEADER_BYTES], uint64_t most, uint32_t *operation, uint64_t *bytes);

#endif
