/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/worker.h"

#include "engine/model.h"
#include "parallel/messages.h"
#include "policy/network.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t MESSAGE_MOST = UINT64_C(1) << 30; /* bytes of one */

struct worker {
    struct backend *backend;
    struct wire_table table;
    size_t bytes_left; /* that the leader may still have */
    uint64_t next_address;
    struct message_weight *weights; /* [MESSAGE_WEIGHTS_MAX] */
    struct message_context context;
};

static const struct backend_operations *operations(const struct worker *worker) {
    return worker->backend->operations;
}

/* ---- memory ---- */

static int refuse(const char *what, struct error *error) {
    return error_set(error, ERROR_FORMAT, "the leader %s", what);
}

/* Addresses come in ascending order, with a gap between two: so the table is sorted, and none means two things. */
static int allocate(struct worker *worker, const struct message *m, struct error *result, struct error *error) {
    struct wire_table *table = &worker->table;
    if (m->address < worker->next_address || m->address > UINT64_MAX / 2 || m->bytes > UINT64_MAX / 4)
        return refuse("allocates where it has memory", error);
    if (table->count == table->capacity) {
        uint32_t capacity = 2 * table->capacity + 64;
        struct wire_range *grown = realloc(table->ranges, capacity * sizeof *grown);
        if (grown == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for the list of the leader's memory");
        table->ranges = grown;
        table->capacity = capacity;
    }
    void *memory = m->bytes <= worker->bytes_left ? operations(worker)->allocate(worker->backend, m->bytes) : NULL;
    if (memory == NULL) {
        error_set(result, ERROR_MEMORY, "no memory for %zu bytes", (size_t)m->bytes);
        return 0;
    }
    table->ranges[table->count++] = (struct wire_range){m->address, m->bytes, memory};
    worker->bytes_left -= m->bytes;
    worker->next_address = m->address + m->bytes + 1;
    return 0;
}

static int release(struct worker *worker, uint64_t address, struct error *error) {
    struct wire_table *table = &worker->table;
    uint32_t at = 0;
    while (at < table->count && table->ranges[at].address != address)
        at++;
    if (at == table->count)
        return refuse("releases what it has not", error);
    operations(worker)->release(worker->backend, table->ranges[at].memory);
    worker->bytes_left += table->ranges[at].bytes;
    table->count--;
    memmove(&table->ranges[at], &table->ranges[at + 1], (table->count - at) * sizeof *table->ranges);
    return 0;
}

/* `bytes` of an answer, to be filled. */
static void *answer_room(struct wire *answer, size_t bytes) {
    size_t at = answer->at;
    /* Grown by what lies there, whatever that is: it is overwritten. */
    static const uint8_t zeros[1 << 12];
    for (size_t done = 0; done < bytes && !answer->failed; done += sizeof zeros)
        wire_raw(answer, (void *)zeros, bytes - done < sizeof zeros ? bytes - done : sizeof zeros);
    return answer->failed ? NULL : answer->bytes + at;
}

static void download(struct worker *worker, const struct message *m, struct wire *answer) {
    void *room = answer_room(answer, m->bytes);
    if (room != NULL && m->bytes > 0)
        operations(worker)->download(worker->backend, room, m->memory, m->bytes);
}

/* ---- matrices and networks ---- */

static void create_weight(struct worker *worker, const struct message *m, struct wire *answer) {
    struct error result = {0};
    struct message_weight *weight = &worker->weights[m->handle];
    uint64_t bytes = 0;
    weight->weight = operations(worker)->weight_create(worker->backend, &m->tensor, m->exact, &result);
    if (weight->weight != NULL) {
        *weight = (struct message_weight){m->handle, m->tensor.rows, m->tensor.columns, weight->weight};
        bytes = operations(worker)->weight_bytes(weight->weight);
        result = (struct error){0};
    }
    message_code_error(answer, &result);
    if (result.code == 0)
        wire_u64(answer, &bytes);
    gguf_forget(worker->context.model->file, m->tensor.data, m->tensor.bytes);
}

static void free_weight(struct worker *worker, uint32_t handle) {
    operations(worker)->weight_free(worker->backend, worker->weights[handle].weight);
    worker->weights[handle] = (struct message_weight){0};
}

static void keep_network(struct worker *worker, struct message *m) {
    network_release((struct policy_network *)worker->context.networks[m->slot]);
    worker->context.networks[m->slot] = m->network;
    m->network = NULL;
}

/* ---- results ---- */

static void write_worst(const struct message *m, struct wire *answer) {
    for (uint32_t i = 0; i < m->count; i++)
        for (uint32_t head = 0; head < m->pool.layout.kv_heads; head++)
            if (m->layers[i].heads[head].worst != NULL)
                wire_u32(answer, m->layers[i].heads[head].worst);
}

static void score(struct worker *worker, const struct message *m, struct wire *answer) {
    struct error result = {0};
    operations(worker)->score(worker->backend, &m->pool, m->layers, m->count, m->heads, &result);
    if (!operations(worker)->host_memory) /* the worst slots come with the next operation that waits */
        operations(worker)->synchronize(worker->backend);
    message_code_error(answer, &result);
    if (result.code == 0)
        write_worst(m, answer);
}

static void prefer(struct worker *worker, const struct message *m, struct wire *answer) {
    size_t bytes = m->count * sizeof(double);
    double *numbers = answer_room(answer, 2 * bytes);
    if (numbers != NULL)
        operations(worker)->window_preference(
            worker->backend, &m->pool, m->layers, m->count, m->heads, numbers, numbers + m->count);
}

static void norm_slots(struct worker *worker, const struct message *m, struct wire *answer) {
    struct error result = {0};
    size_t slots = m->view.slots;
    float *norms = malloc(2 * slots * sizeof *norms + 1);
    if (norms == NULL)
        error_set(&result, ERROR_MEMORY, "no memory for the norms of %zu slots", slots);
    else
        operations(worker)->slot_norms(worker->backend, &m->pool, &m->view, &m->tensor, m->layer, m->head, m->heads,
            m->want_values ? norms : NULL, m->want_outputs ? norms + slots : NULL, &result);
    message_code_error(answer, &result);
    if (result.code == 0 && m->want_values)
        wire_raw(answer, norms, slots * sizeof *norms);
    if (result.code == 0 && m->want_outputs)
        wire_raw(answer, norms + slots, slots * sizeof *norms);
    free(norms);
}

/* ---- all ---- */

/* Operations without an answer. */
static int perform(struct worker *worker, struct message *m, struct error *error) {
    const struct backend_operations *o = operations(worker);
    struct backend *on = worker->backend;
    const struct backend_weight *weights[LINEAR_WEIGHTS_MAX];
    for (uint32_t i = 0; i < LINEAR_WEIGHTS_MAX; i++)
        weights[i] = m->weights[i].weight;
    switch (m->operation) {
    case MESSAGE_RELEASE:
        return release(worker, m->address, error);
    case MESSAGE_UPLOAD:
        o->upload(on, m->memory, m->data, m->bytes);
        break;
    case MESSAGE_WEIGHT_FREE:
        free_weight(worker, m->weights[0].handle);
        break;
    case MESSAGE_NETWORK:
        keep_network(worker, m);
        break;
    case MESSAGE_EMBED:
        o->embed(on, weights[0], m->tokens, m->rows, m->out);
        break;
    case MESSAGE_RMS_NORM:
        o->rms_norm(on, m->x, m->weight, m->epsilon, m->rows, m->width, m->out);
        break;
    case MESSAGE_LINEAR:
        o->linear(on, weights, m->weights_count, m->x, m->rows, m->add, m->out);
        break;
    case MESSAGE_ROPE:
        o->rope_and_append(on, &m->batch, &m->rope, m->heads, (float *)m->x);
        break;
    case MESSAGE_ATTEND:
        o->attend(on, &m->batch, m->heads, m->x, m->out);
        break;
    case MESSAGE_MOMENTS:
        o->query_moments(on, &m->batch, m->heads, m->x, m->moments);
        break;
    case MESSAGE_SUMMARISE:
        o->summarise(on, &m->pool, m->updates, m->count);
        break;
    case MESSAGE_ROTATE:
        o->rotate_slots(on, &m->pool, &m->rope, m->pages, m->from, m->keys, m->to, m->count);
        break;
    case MESSAGE_UNROTATE:
        o->unrotate_slots(on, &m->pool, &m->rope, m->pages, m->from, m->count, (float *)m->keys);
        break;
    case MESSAGE_SILU:
        o->silu_mul(on, m->x, m->rows, m->width, m->out);
        break;
    case MESSAGE_GATHER:
        o->gather_rows(on, m->x, m->rows_wanted, m->rows, m->width, m->out);
        break;
    case MESSAGE_COPY_PAGES:
        o->copy_pages(on, &m->pool, m->from, m->to, m->count);
        break;
    case MESSAGE_MOVE_SLOTS:
        o->move_slots(on, &m->pool, m->pages, m->from, m->to, m->count);
        break;
    case MESSAGE_CLEAR_SLOTS:
        o->clear_slots(on, &m->pool, m->pages, m->first, m->end);
        break;
    case MESSAGE_MOVE_STATISTICS:
        o->move_statistics(on, m->moves, m->count, m->group, m->head_dim);
        break;
    case MESSAGE_POISON:
        o->poison_pages(on, &m->pool, m->to, m->count);
        break;
    default:
        return refuse("asks for an operation that there is not", error);
    }
    return 0;
}

/* Operations with one; *answers false: it is none of them. */
static int reply(struct worker *worker, struct message *m, struct wire *answer, bool *answers, struct error *error) {
    struct error result = {0};
    int code = 0;
    *answers = true;
    switch (m->operation) {
    case MESSAGE_ALLOCATE:
        code = allocate(worker, m, &result, error);
        message_code_error(answer, &result);
        break;
    case MESSAGE_DOWNLOAD:
        download(worker, m, answer);
        break;
    case MESSAGE_SYNCHRONIZE:
        operations(worker)->synchronize(worker->backend);
        break;
    case MESSAGE_WEIGHT_CREATE:
        create_weight(worker, m, answer);
        break;
    case MESSAGE_SCORE:
        score(worker, m, answer);
        break;
    case MESSAGE_PREFERENCE:
        prefer(worker, m, answer);
        break;
    case MESSAGE_SLOT_NORMS:
        norm_slots(worker, m, answer);
        break;
    default:
        *answers = false;
    }
    if (code == 0 && answer->failed)
        code = error_set(error, ERROR_MEMORY, "no memory for an answer to the leader");
    return code;
}

int worker_take(struct worker *worker, uint32_t operation, void *bytes, size_t size, struct wire *answer, bool *answers,
    struct error *error) {
    struct message m = {.operation = (enum message_operation)operation};
    struct wire wire;
    wire_begin_reading(&wire, bytes, size, &worker->table);
    message_code(&wire, &worker->context, &m);
    int code = 0;
    if (!wire_is_done(&wire))
        code = error_set(error, ERROR_FORMAT, "the leader's message of kind %u has a fault", operation);
    if (code == 0)
        code = reply(worker, &m, answer, answers, error);
    if (code == 0 && !*answers)
        code = perform(worker, &m, error);
    network_release(m.network);
    wire_end_reading(&wire);
    return code;
}

int worker_run(struct worker *worker, struct link *link, struct error *error) {
    struct wire answer = {0};
    uint32_t operation;
    void *bytes;
    size_t size;
    int code;
    for (;;) {
        bool answers = false;
        code = link_receive(link, MESSAGE_MOST, true, &operation, &bytes, &size, error);
        if (code != 0 || operation == MESSAGE_GOODBYE)
            break;
        wire_begin_writing(&answer);
        code = worker_take(worker, operation, bytes, size, &answer, &answers, error);
        if (code == 0 && answers)
            code = link_send(link, operation, answer.bytes, answer.at, NULL, 0, error);
        if (code != 0)
            break;
    }
    wire_free(&answer);
    return code;
}

/* ---- opening and closing ---- */

struct worker *worker_create(const struct model *model, struct backend *backend, uint32_t rank, uint32_t world,
    size_t bytes_most, struct error *error) {
    struct worker *worker = calloc(1, sizeof *worker);
    struct message_weight *weights = calloc(MESSAGE_WEIGHTS_MAX, sizeof *weights);
    if (worker == NULL || weights == NULL) {
        free(worker);
        free(weights);
        error_set(error, ERROR_MEMORY, "no memory for a worker");
        return NULL;
    }
    *worker = (struct worker){.backend = backend,
        .bytes_left = bytes_most,
        .next_address = 1,
        .weights = weights,
        .context = {.model = model, .rank = rank, .world = world, .weights = weights}};
    return worker;
}

void worker_free(struct worker *worker) {
    if (worker == NULL)
        return;
    for (uint32_t i = 0; i < MESSAGE_WEIGHTS_MAX; i++)
        if (worker->weights[i].weight != NULL)
            free_weight(worker, i);
    for (uint32_t i = 0; i < MESSAGE_NETWORKS; i++)
        network_release((struct policy_network *)worker->context.networks[i]);
    for (uint32_t i = 0; i < worker->table.count; i++)
        operations(worker)->release(worker->backend, worker->table.ranges[i].memory);
    free(worker->table.ranges);
    free(worker->weights);
    free(worker);
}
