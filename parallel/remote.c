/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/remote.h"

#include "parallel/messages.h"
#include "policy/network.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Numbers of device memory: from here on, one after the other, none a second time. */
static const uint64_t FIRST_ADDRESS = UINT64_C(1) << 44;
enum { ADDRESS_GAP = 64, ANSWER_MOST = 1 << 28 /* bytes of an answer */ };

struct backend_weight {
    uint32_t handle;
    uint32_t rows, columns;
    uint64_t bytes;
};

struct remote {
    struct backend base; /* first */
    struct link link;
    struct communicator *communicator;
    uint32_t rank;
    struct wire out;
    struct message_context context;
    uint64_t next_address;
    bool handles[MESSAGE_WEIGHTS_MAX];  /* in use */
    uint64_t digests[MESSAGE_NETWORKS]; /* of networks that the worker keeps; 0: none */
    uint32_t next_network;
    char description[64];
};

static struct remote *remote_of(struct backend *backend) {
    return (struct remote *)backend;
}

/* ---- messages ---- */

static void fail(struct remote *r, const struct error *why) {
    struct error error;
    error_set(&error, ERROR_DEVICE, "rank %u is lost: %s", r->rank, why->message);
    communicator_give_up(r->communicator, &error);
}

static bool has_failed(const struct remote *r) {
    return communicator_check(r->communicator, NULL) != 0;
}

static bool send_with(struct remote *r, struct message *m, const void *more, size_t more_bytes) {
    struct error error;
    if (has_failed(r))
        return false;
    wire_begin_writing(&r->out);
    message_code(&r->out, &r->context, m);
    int code = r->out.failed ? error_set(&error, ERROR_MEMORY, "no memory for a message to it")
                             : link_send(&r->link, m->operation, r->out.bytes, r->out.at, more, more_bytes, &error);
    if (code != 0)
        fail(r, &error);
    return code == 0;
}

static bool tell(struct remote *r, struct message *m) {
    return send_with(r, m, NULL, 0);
}

/* The worker's answer to a message that was sent; false: there is none. */
static bool receive(struct remote *r, uint32_t operation, struct wire *answer) {
    struct error error;
    uint32_t got;
    void *bytes;
    size_t size;
    int code = link_receive(&r->link, ANSWER_MOST, false, &got, &bytes, &size, &error);
    if (code == 0 && got != operation)
        code = error_set(&error, ERROR_FORMAT, "it answered what it was not asked");
    if (code != 0)
        fail(r, &error);
    else
        wire_begin_reading(answer, bytes, size, NULL);
    return code == 0;
}

static bool ask(struct remote *r, struct message *m, struct wire *answer) {
    return tell(r, m) && receive(r, m->operation, answer);
}

/* The end of an answer, which must have been read completely. */
static bool finish(struct remote *r, const struct wire *answer) {
    const struct error error = {.code = ERROR_FORMAT, .message = "its answer has another form"};
    if (!wire_is_done(answer))
        fail(r, &error);
    return wire_is_done(answer);
}

/* Whether an answer is without error: its code and message, and then nothing. */
static int take_result(struct remote *r, struct wire *answer, struct error *error) {
    struct error result = {0};
    message_code_error(answer, &result);
    if (answer->failed)
        return error_set(error, ERROR_DEVICE, "rank %u gave no proper answer", r->rank);
    return result.code == 0 ? 0 : error_set(error, result.code, "%s", result.message);
}

static int lost(const struct remote *r, struct error *error) {
    int code = communicator_check(r->communicator, error);
    return code != 0 ? code : error_set(error, ERROR_DEVICE, "rank %u is lost", r->rank);
}

/* ---- memory ---- */

static void *remote_allocate(struct backend *backend, size_t bytes) {
    struct remote *r = remote_of(backend);
    struct message m = {.operation = MESSAGE_ALLOCATE, .address = r->next_address, .bytes = bytes};
    struct wire answer;
    struct error error;
    if (bytes > UINT64_C(1) << 48 || !ask(r, &m, &answer) || take_result(r, &answer, &error) != 0 ||
        !finish(r, &answer))
        return NULL;
    r->next_address += (bytes + 63) / 64 * 64 + ADDRESS_GAP;
    return (void *)(uintptr_t)m.address;
}

static void remote_release(struct backend *backend, void *memory) {
    struct message m = {.operation = MESSAGE_RELEASE, .address = (uint64_t)(uintptr_t)memory};
    if (memory != NULL)
        tell(remote_of(backend), &m);
}

static void remote_upload(struct backend *backend, void *to, const void *from, size_t bytes) {
    for (size_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < MESSAGE_UPLOAD_MOST ? bytes - done : MESSAGE_UPLOAD_MOST;
        struct message m = {.operation = MESSAGE_UPLOAD, .memory = (char *)to + done, .bytes = part};
        if (!send_with(remote_of(backend), &m, (const char *)from + done, part))
            return;
    }
}

static void remote_download(struct backend *backend, void *to, const void *from, size_t bytes) {
    struct remote *r = remote_of(backend);
    for (size_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < MESSAGE_UPLOAD_MOST ? bytes - done : MESSAGE_UPLOAD_MOST;
        struct message m = {.operation = MESSAGE_DOWNLOAD, .memory = (char *)from + done, .bytes = part};
        struct wire answer;
        memset((char *)to + done, 0, part);
        if (!ask(r, &m, &answer))
            continue;
        wire_raw(&answer, (char *)to + done, part);
        finish(r, &answer);
    }
}

static void remote_synchronize(struct backend *backend) {
    struct message m = {.operation = MESSAGE_SYNCHRONIZE};
    struct wire answer;
    if (ask(remote_of(backend), &m, &answer))
        finish(remote_of(backend), &answer);
}

/* ---- matrices ---- */

static struct backend_weight *create_weight(
    struct remote *r, const struct tensor *tensor, uint32_t handle, bool exact, struct error *error) {
    struct message m = {.operation = MESSAGE_WEIGHT_CREATE, .handle = handle, .tensor = *tensor, .exact = exact};
    struct backend_weight *weight = calloc(1, sizeof *weight);
    struct wire answer;
    int code;
    if (weight == NULL)
        code = error_set(error, ERROR_MEMORY, "no memory for tensor %s", tensor->name);
    else if (!ask(r, &m, &answer))
        code = lost(r, error);
    else
        code = take_result(r, &answer, error);
    if (code == 0) {
        *weight = (struct backend_weight){.handle = handle, .rows = tensor->rows, .columns = tensor->columns};
        wire_u64(&answer, &weight->bytes);
        code = finish(r, &answer) ? 0 : lost(r, error);
    }
    if (code == 0)
        return weight;
    free(weight);
    return NULL;
}

static struct backend_weight *remote_weight_create(
    struct backend *backend, const struct tensor *tensor, bool exact, struct error *error) {
    struct remote *r = remote_of(backend);
    uint32_t handle = 0;
    while (handle < MESSAGE_WEIGHTS_MAX && r->handles[handle])
        handle++;
    if (handle == MESSAGE_WEIGHTS_MAX) {
        error_set(error, ERROR_UNSUPPORTED, "more than %d matrices on one rank", MESSAGE_WEIGHTS_MAX);
        return NULL;
    }
    struct backend_weight *weight = create_weight(r, tensor, handle, exact, error);
    r->handles[handle] = weight != NULL;
    return weight;
}

static struct message_weight name_weight(const struct backend_weight *weight) {
    return (struct message_weight){.handle = weight->handle, .rows = weight->rows, .columns = weight->columns};
}

static void remote_weight_free(struct backend *backend, struct backend_weight *weight) {
    struct remote *r = remote_of(backend);
    if (weight == NULL)
        return;
    struct message m = {.operation = MESSAGE_WEIGHT_FREE, .weights = {name_weight(weight)}};
    tell(r, &m);
    r->handles[weight->handle] = false;
    free(weight);
}

static size_t remote_weight_bytes(const struct backend_weight *weight) {
    return weight->bytes;
}

static void remote_embed(
    struct backend *backend, const struct backend_weight *weight, const int32_t *tokens, uint32_t rows, float *out) {
    struct message m = {
        .operation = MESSAGE_EMBED, .weights = {name_weight(weight)}, .tokens = tokens, .rows = rows, .out = out};
    tell(remote_of(backend), &m);
}

static void remote_linear(struct backend *backend, const struct backend_weight *const *weights, uint32_t weights_count,
    const float *x, uint32_t rows, bool add, float *out) {
    struct message m = {
        .operation = MESSAGE_LINEAR, .weights_count = weights_count, .x = x, .rows = rows, .add = add, .out = out};
    for (uint32_t i = 0; i < weights_count; i++)
        m.weights[i] = name_weight(weights[i]);
    tell(remote_of(backend), &m);
}

/* ---- rows ---- */

static void remote_rms_norm(struct backend *backend, const float *x, const float *weight, float epsilon, uint32_t rows,
    uint32_t width, float *out) {
    struct message m = {.operation = MESSAGE_RMS_NORM,
        .x = x,
        .weight = weight,
        .epsilon = epsilon,
        .rows = rows,
        .width = width,
        .out = out};
    tell(remote_of(backend), &m);
}

static void remote_silu_mul(struct backend *backend, const float *gate_up, uint32_t rows, uint32_t width, float *out) {
    struct message m = {.operation = MESSAGE_SILU, .x = gate_up, .rows = rows, .width = width, .out = out};
    tell(remote_of(backend), &m);
}

static void remote_gather_rows(
    struct backend *backend, const float *x, const uint32_t *rows_wanted, uint32_t count, uint32_t width, float *out) {
    struct message m = {
        .operation = MESSAGE_GATHER, .x = x, .rows_wanted = rows_wanted, .rows = count, .width = width, .out = out};
    tell(remote_of(backend), &m);
}

/* ---- batches ---- */

static void remote_rope_and_append(
    struct backend *backend, const struct kv_batch *batch, const struct rope_params *rope, uint32_t heads, float *qkv) {
    struct message m = {
        .operation = MESSAGE_ROPE, .pool = *batch->pool, .batch = *batch, .rope = *rope, .heads = heads, .x = qkv};
    tell(remote_of(backend), &m);
}

static void remote_attend(
    struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv, float *out) {
    struct message m = {
        .operation = MESSAGE_ATTEND, .pool = *batch->pool, .batch = *batch, .heads = heads, .x = qkv, .out = out};
    tell(remote_of(backend), &m);
}

static void remote_query_moments(struct backend *backend, const struct kv_batch *batch, uint32_t heads,
    const float *qkv, const struct query_moments *moments) {
    struct message m = {.operation = MESSAGE_MOMENTS,
        .pool = *batch->pool,
        .batch = *batch,
        .heads = heads,
        .x = qkv,
        .moments = moments};
    tell(remote_of(backend), &m);
}

/* ---- scores ---- */

/* Sees that the worker has a network; its place is in the context until the message is over. */
static int place_network(struct remote *r, const struct policy_network *network, struct error *error) {
    uint64_t digest = network_digest(network);
    uint32_t place = 0, tried = 0;
    while (place < MESSAGE_NETWORKS && r->digests[place] != digest)
        place++;
    if (place < MESSAGE_NETWORKS) {
        r->context.networks[place] = network;
        return 0;
    }
    do /* the oldest that this message does not need */
        place = r->next_network++ % MESSAGE_NETWORKS;
    while (r->context.networks[place] != NULL && ++tried < MESSAGE_NETWORKS);
    if (tried == MESSAGE_NETWORKS)
        return error_set(error, ERROR_UNSUPPORTED, "more than %d networks in one step", MESSAGE_NETWORKS);
    struct message m = {.operation = MESSAGE_NETWORK, .slot = place, .network = (struct policy_network *)network};
    if (!tell(r, &m))
        return lost(r, error);
    r->digests[place] = digest;
    r->context.networks[place] = network;
    return 0;
}

static bool is_placed(const struct remote *r, const struct policy_network *network) {
    for (uint32_t i = 0; i < MESSAGE_NETWORKS; i++)
        if (r->context.networks[i] == network)
            return true;
    return false;
}

static int place_networks(struct remote *r, const struct score_layer *layers, uint32_t count, struct error *error) {
    int code = 0;
    memset(r->context.networks, 0, sizeof r->context.networks);
    for (uint32_t i = 0; i < count && code == 0; i++)
        if (layers[i].network != NULL && !is_placed(r, layers[i].network))
            code = place_network(r, layers[i].network, error);
    return code;
}

static void take_worst(struct wire *answer, const struct message *m) {
    uint32_t kv_heads = m->pool.layout.kv_heads;
    for (uint32_t i = 0; i < m->count; i++)
        for (uint32_t head = 0; head < kv_heads; head++)
            if (m->layers[i].heads[head].worst != NULL)
                wire_u32(answer, m->layers[i].heads[head].worst);
}

static int remote_score(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers,
    uint32_t count, uint32_t heads, struct error *error) {
    struct remote *r = remote_of(backend);
    struct message m = {.operation = MESSAGE_SCORE, .pool = *pool, .layers = layers, .count = count, .heads = heads};
    struct wire answer;
    int code = place_networks(r, layers, count, error);
    if (code != 0)
        return code;
    if (!ask(r, &m, &answer))
        return lost(r, error);
    code = take_result(r, &answer, error);
    if (code == 0)
        take_worst(&answer, &m);
    return finish(r, &answer) ? code : lost(r, error);
}

static void remote_window_preference(struct backend *backend, const struct kv_pool *pool,
    const struct score_layer *layers, uint32_t count, uint32_t heads, double *entropy, double *variance) {
    struct remote *r = remote_of(backend);
    struct message m = {
        .operation = MESSAGE_PREFERENCE, .pool = *pool, .layers = layers, .count = count, .heads = heads};
    struct wire answer;
    memset(entropy, 0, count * sizeof *entropy);
    memset(variance, 0, count * sizeof *variance);
    if (!ask(r, &m, &answer))
        return;
    wire_raw(&answer, entropy, count * sizeof *entropy);
    wire_raw(&answer, variance, count * sizeof *variance);
    finish(r, &answer);
}

static void remote_summarise(
    struct backend *backend, const struct kv_pool *pool, const struct summary_update *updates, uint32_t count) {
    struct message m = {.operation = MESSAGE_SUMMARISE, .pool = *pool, .updates = updates, .count = count};
    tell(remote_of(backend), &m);
}

static int remote_slot_norms(struct backend *backend, const struct kv_pool *pool, const struct kv_head_view *view,
    const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm, float *output_norm,
    struct error *error) {
    struct remote *r = remote_of(backend);
    struct message m = {.operation = MESSAGE_SLOT_NORMS,
        .pool = *pool,
        .view = *view,
        .tensor = *output,
        .layer = layer,
        .head = head,
        .heads = heads,
        .want_values = value_norm != NULL,
        .want_outputs = output_norm != NULL};
    struct wire answer;
    if (!ask(r, &m, &answer))
        return lost(r, error);
    int code = take_result(r, &answer, error);
    if (code == 0 && value_norm != NULL)
        wire_raw(&answer, value_norm, view->slots * sizeof *value_norm);
    if (code == 0 && output_norm != NULL)
        wire_raw(&answer, output_norm, view->slots * sizeof *output_norm);
    return finish(r, &answer) ? code : lost(r, error);
}

/* ---- pages ---- */

static void remote_rotate_slots(struct backend *backend, const struct kv_pool *pool, const struct rope_params *rope,
    const uint32_t *pages, const uint32_t *slots, const float *keys, const uint32_t *to, uint32_t count) {
    struct message m = {.operation = MESSAGE_ROTATE,
        .pool = *pool,
        .rope = *rope,
        .pages = pages,
        .from = slots,
        .keys = keys,
        .to = to,
        .count = count};
    tell(remote_of(backend), &m);
}

static void remote_unrotate_slots(struct backend *backend, const struct kv_pool *pool, const struct rope_params *rope,
    const uint32_t *pages, const uint32_t *slots, uint32_t count, float *keys) {
    struct message m = {.operation = MESSAGE_UNROTATE,
        .pool = *pool,
        .rope = *rope,
        .pages = pages,
        .from = slots,
        .keys = keys,
        .count = count};
    tell(remote_of(backend), &m);
}

static void remote_copy_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *from, const uint32_t *to, uint32_t count) {
    struct message m = {.operation = MESSAGE_COPY_PAGES, .pool = *pool, .from = from, .to = to, .count = count};
    tell(remote_of(backend), &m);
}

static void remote_move_slots(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages,
    const uint32_t *from, const uint32_t *to, uint32_t count) {
    struct message m = {
        .operation = MESSAGE_MOVE_SLOTS, .pool = *pool, .pages = pages, .from = from, .to = to, .count = count};
    tell(remote_of(backend), &m);
}

static void remote_clear_slots(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t first, uint32_t end) {
    struct message m = {.operation = MESSAGE_CLEAR_SLOTS, .pool = *pool, .pages = pages, .first = first, .end = end};
    if (first < end)
        tell(remote_of(backend), &m);
}

static void remote_move_statistics(
    struct backend *backend, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim) {
    struct message m = {
        .operation = MESSAGE_MOVE_STATISTICS, .moves = moves, .count = count, .group = group, .head_dim = head_dim};
    tell(remote_of(backend), &m);
}

static void remote_poison_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t count) {
    struct message m = {.operation = MESSAGE_POISON, .pool = *pool, .to = pages, .count = count};
    tell(remote_of(backend), &m);
}

/* ---- opening and closing ---- */

static const char *remote_describe(struct backend *backend) {
    return remote_of(backend)->description;
}

static void remote_close(struct backend *backend) {
    struct remote *r = remote_of(backend);
    struct message m = {.operation = MESSAGE_GOODBYE};
    if (backend == NULL)
        return;
    if (r->communicator != NULL)
        tell(r, &m);
    link_close(&r->link);
    wire_free(&r->out);
    free(r);
}

static const struct backend_operations operations = {
    .name = "remote",
    .host_memory = false,
    .describe = remote_describe,
    .close = remote_close,
    .allocate = remote_allocate,
    .release = remote_release,
    .upload = remote_upload,
    .download = remote_download,
    .synchronize = remote_synchronize,
    .weight_create = remote_weight_create,
    .weight_free = remote_weight_free,
    .weight_bytes = remote_weight_bytes,
    .embed = remote_embed,
    .rms_norm = remote_rms_norm,
    .linear = remote_linear,
    .rope_and_append = remote_rope_and_append,
    .attend = remote_attend,
    .query_moments = remote_query_moments,
    .score = remote_score,
    .summarise = remote_summarise,
    .slot_norms = remote_slot_norms,
    .window_preference = remote_window_preference,
    .rotate_slots = remote_rotate_slots,
    .unrotate_slots = remote_unrotate_slots,
    .silu_mul = remote_silu_mul,
    .gather_rows = remote_gather_rows,
    .copy_pages = remote_copy_pages,
    .move_slots = remote_move_slots,
    .clear_slots = remote_clear_slots,
    .move_statistics = remote_move_statistics,
    .poison_pages = remote_poison_pages,
};

struct backend *remote_open(struct link *link, uint32_t rank, struct error *error) {
    struct remote *r = calloc(1, sizeof *r);
    if (r == NULL) {
        link_close(link);
        error_set(error, ERROR_MEMORY, "no memory for rank %u", rank);
        return NULL;
    }
    r->base.operations = &operations;
    r->base.by_name = true;
    r->link = *link;
    *link = (struct link){.socket = -1};
    r->rank = rank;
    r->next_address = FIRST_ADDRESS;
    snprintf(r->description, sizeof r->description, "rank %u of another process", rank);
    return &r->base;
}

void remote_set_communicator(struct backend *backend, struct communicator *communicator) {
    remote_of(backend)->communicator = communicator;
}

bool remote_is(const struct backend *backend) {
    return backend->operations == &operations;
}

void remote_stop(struct backend *backend) {
    link_stop(&remote_of(backend)->link);
}

void remote_look(struct backend *backend) {
    struct remote *r = remote_of(backend);
    const struct error error = {.code = ERROR_IO, .message = "the connection broke"};
    if (!has_failed(r) && link_is_broken(&r->link))
        fail(r, &error);
}
