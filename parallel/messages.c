/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/messages.h"

#include "engine/gguf.h"
#include "engine/model.h"
#include "parallel/message_parts.h"
#include "policy/network.h"

#include <string.h>

/* ---- memory and matrices ---- */

static void code_memory(struct wire *wire, struct message *m) {
    wire_u64(wire, &m->bytes);
    wire_memory(wire, m->memory, m->bytes);
}

static void code_upload(struct wire *wire, struct message *m) {
    code_memory(wire, m);
    if (wire->reading) /* who writes sends them from where they are, behind this */
        m->data = wire_array_of(wire, NULL, m->bytes, 1);
}

static void code_weight(struct wire *wire, const struct message_context *context, struct message_weight *weight) {
    wire_u32(wire, &weight->handle);
    if (!wire->reading || !wire_require(wire, weight->handle < MESSAGE_WEIGHTS_MAX))
        return;
    *weight = context->weights[weight->handle];
    wire_require(wire, weight->weight != NULL);
}

static void code_weight_create(struct wire *wire, const struct message_context *context, struct message *m) {
    wire_u32(wire, &m->handle);
    wire_bool(wire, &m->exact);
    message_code_tensor(wire, context, &m->tensor);
    if (wire->reading && wire_require(wire, m->handle < MESSAGE_WEIGHTS_MAX))
        wire_require(wire, context->weights[m->handle].weight == NULL);
}

static void code_linear(struct wire *wire, const struct message_context *context, struct message *m) {
    uint64_t width = 0;
    wire_u32(wire, &m->weights_count);
    wire_u32(wire, &m->rows);
    wire_bool(wire, &m->add);
    if (!wire_require(wire, m->weights_count >= 1 && m->weights_count <= LINEAR_WEIGHTS_MAX))
        return;
    for (uint32_t i = 0; i < m->weights_count; i++) {
        code_weight(wire, context, &m->weights[i]);
        wire_require(wire, m->weights[i].columns == m->weights[0].columns);
        width += m->weights[i].rows;
    }
    wire_memory(wire, m->x, wire_product(m->rows, m->weights[0].columns, sizeof(float), 1));
    wire_memory(wire, m->out, wire_product(m->rows, width, sizeof(float), 1));
}

/* ---- rows ---- */

static void code_embed(struct wire *wire, const struct message_context *context, struct message *m) {
    code_weight(wire, context, &m->weights[0]);
    wire_count(wire, &m->rows, sizeof *m->tokens);
    wire_array(wire, m->tokens, m->rows);
    wire_memory(wire, m->out, wire_product(m->rows, m->weights[0].columns, sizeof(float), 1));
}

static void code_rms_norm(struct wire *wire, struct message *m) {
    wire_u32(wire, &m->rows);
    wire_u32(wire, &m->width);
    wire_float(wire, &m->epsilon);
    size_t bytes = wire_product(m->rows, m->width, sizeof(float), 1);
    wire_memory(wire, m->x, bytes);
    wire_memory(wire, m->out, bytes);
    wire_memory(wire, m->weight, wire_product(m->width, sizeof(float), 1, 1));
}

static void code_silu(struct wire *wire, struct message *m) {
    wire_u32(wire, &m->rows);
    wire_u32(wire, &m->width);
    wire_memory(wire, m->x, wire_product(m->rows, m->width, 2 * sizeof(float), 1));
    wire_memory(wire, m->out, wire_product(m->rows, m->width, sizeof(float), 1));
}

static void code_gather(struct wire *wire, struct message *m) {
    uint32_t last = 0;
    wire_count(wire, &m->rows, sizeof *m->rows_wanted);
    wire_u32(wire, &m->width);
    wire_array(wire, m->rows_wanted, m->rows);
    for (uint32_t i = 0; i < m->rows && !wire->failed; i++)
        last = m->rows_wanted[i] > last ? m->rows_wanted[i] : last;
    wire_memory(wire, m->x, m->rows == 0 ? 0 : wire_product((uint64_t)last + 1, m->width, sizeof(float), 1));
    wire_memory(wire, m->out, wire_product(m->rows, m->width, sizeof(float), 1));
}

/* ---- networks ---- */

static void code_network(struct wire *wire, const struct message_context *context, struct message *m) {
    struct network_shape shape = {0};
    struct network_array array;
    if (!wire->reading)
        shape = m->network->shape;
    uint32_t features = shape.features;
    wire_u32(wire, &m->slot);
    wire_u32(wire, &features);
    wire_u32(wire, &shape.inputs);
    wire_u32(wire, &shape.content);
    wire_u32(wire, &shape.hidden);
    wire_u32(wire, &shape.layers);
    wire_u32(wire, &shape.kv_heads);
    wire_u32(wire, &shape.head_dim);
    shape.features = (enum network_features)features;
    if (!wire_require(wire, m->slot < MESSAGE_NETWORKS && features <= FEATURES_PAPER))
        return;
    if (wire->reading) {
        const struct model_shape *model = &context->model->shape;
        if (!wire_require(wire, shape.layers == model->layers && shape.kv_heads == model->kv_heads &&
                                    shape.head_dim == model->head_dim))
            return;
    }
    if (wire->reading && (m->network = network_create(&shape, NULL)) == NULL)
        wire_fail(wire);
    for (uint32_t i = 0; !wire->failed && network_array(m->network, i, &array); i++)
        wire_raw(wire, array.values, array.count * sizeof *array.values);
}

/* ---- pages and slots ---- */

/* Page numbers of slots up to the last of the lists. */
static void code_slot_lists(struct wire *wire, struct message *m, struct message_pages *pages) {
    uint32_t most = 0;
    wire_count(wire, &m->count, sizeof *m->from);
    wire_array(wire, m->from, m->count);
    wire_array_or_null(wire, m->to, m->count);
    bool moves = m->operation == MESSAGE_MOVE_SLOTS;
    wire_require(wire, m->to != NULL || m->count == 0 || m->operation == MESSAGE_UNROTATE);
    for (uint32_t i = 0; i < m->count && !wire->failed; i++) {
        most = m->from[i] > most ? m->from[i] : most;
        most = moves && m->to[i] > most ? m->to[i] : most;
    }
    message_code_pages(wire, pages, &m->pages, m->count == 0 ? 0 : most / KV_PAGE_SLOTS + 1);
}

static void code_keys(struct wire *wire, struct message *m) {
    wire_memory(wire, m->keys, wire_product(m->count, m->pool.layout.head_dim, sizeof(float), 1));
}

static void code_page_lists(struct wire *wire, struct message *m, struct message_pages *pages) {
    wire_count(wire, &m->count, sizeof *m->to);
    message_code_pages(wire, pages, &m->to, m->count);
    if (m->operation == MESSAGE_COPY_PAGES)
        message_code_pages(wire, pages, &m->from, m->count);
}

static void code_clear_slots(struct wire *wire, struct message *m, struct message_pages *pages) {
    wire_u32(wire, &m->first);
    wire_u32(wire, &m->end);
    wire_require(wire, m->end <= MESSAGE_SLOTS_MAX && m->first <= m->end);
    message_code_pages(wire, pages, &m->pages, (m->end + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS);
}

/* ---- messages on a pool ---- */

static void code_attention(
    struct wire *wire, const struct message_context *context, struct message *m, struct message_pages *pages) {
    uint32_t rows = message_code_batch(wire, context, m, pages), dim = m->pool.layout.head_dim;
    uint64_t width = (uint64_t)m->heads * dim;
    wire_memory(wire, m->x, wire_product(rows, width + 2 * (uint64_t)m->pool.layout.kv_heads * dim, sizeof(float), 1));
    if (m->operation == MESSAGE_ATTEND)
        wire_memory(wire, m->out, wire_product(rows, width, sizeof(float), 1));
    if (m->operation == MESSAGE_ROPE)
        message_code_rope(wire, &m->rope, dim);
    if (m->operation == MESSAGE_MOMENTS)
        message_code_moments(wire, &m->moments, m->batch.items_count, m->heads, dim);
}

static void code_slot_norms(
    struct wire *wire, const struct message_context *context, struct message *m, struct message_pages *pages) {
    wire_u32(wire, &m->layer);
    wire_u32(wire, &m->head);
    wire_bool(wire, &m->want_values);
    wire_bool(wire, &m->want_outputs);
    message_code_view(wire, pages, &m->view, m->pool.layout.head_dim);
    message_code_tensor(wire, context, &m->tensor);
    wire_require(wire, m->head < m->pool.layout.kv_heads && m->layer < m->pool.layout.layers &&
                           m->tensor.columns == (uint64_t)m->heads * m->pool.layout.head_dim);
    if (wire->reading)
        wire_require(wire, m->tensor.rows == context->model->shape.width);
}

static void code_on_pool(struct wire *wire, const struct message_context *context, struct message *m) {
    struct message_pages pages;
    message_code_pool(wire, context, m, &pages);
    if (wire->failed)
        return;
    switch (m->operation) {
    case MESSAGE_ROPE:
    case MESSAGE_ATTEND:
    case MESSAGE_MOMENTS:
        code_attention(wire, context, m, &pages);
        break;
    case MESSAGE_SCORE:
    case MESSAGE_PREFERENCE:
        message_code_layers(wire, context, m, &pages);
        break;
    case MESSAGE_SUMMARISE:
        message_code_updates(wire, m, &pages);
        break;
    case MESSAGE_SLOT_NORMS:
        code_slot_norms(wire, context, m, &pages);
        break;
    case MESSAGE_ROTATE:
    case MESSAGE_UNROTATE:
        message_code_rope(wire, &m->rope, m->pool.layout.head_dim);
        code_slot_lists(wire, m, &pages);
        code_keys(wire, m);
        break;
    case MESSAGE_MOVE_SLOTS:
        code_slot_lists(wire, m, &pages);
        break;
    case MESSAGE_CLEAR_SLOTS:
        code_clear_slots(wire, m, &pages);
        break;
    case MESSAGE_COPY_PAGES:
    case MESSAGE_POISON:
        code_page_lists(wire, m, &pages);
        break;
    default:
        wire_fail(wire);
    }
    message_find_pool(wire, m, &pages);
}

/* ---- all ---- */

void message_code(struct wire *wire, const struct message_context *context, struct message *m) {
    switch (m->operation) {
    case MESSAGE_GOODBYE:
    case MESSAGE_SYNCHRONIZE:
        break;
    case MESSAGE_ALLOCATE:
        wire_u64(wire, &m->address);
        wire_u64(wire, &m->bytes);
        break;
    case MESSAGE_RELEASE:
        wire_u64(wire, &m->address);
        break;
    case MESSAGE_UPLOAD:
        code_upload(wire, m);
        break;
    case MESSAGE_DOWNLOAD:
        code_memory(wire, m);
        break;
    case MESSAGE_WEIGHT_CREATE:
        code_weight_create(wire, context, m);
        break;
    case MESSAGE_WEIGHT_FREE:
        code_weight(wire, context, &m->weights[0]);
        break;
    case MESSAGE_NETWORK:
        code_network(wire, context, m);
        break;
    case MESSAGE_EMBED:
        code_embed(wire, context, m);
        break;
    case MESSAGE_RMS_NORM:
        code_rms_norm(wire, m);
        break;
    case MESSAGE_LINEAR:
        code_linear(wire, context, m);
        break;
    case MESSAGE_SILU:
        code_silu(wire, m);
        break;
    case MESSAGE_GATHER:
        code_gather(wire, m);
        break;
    case MESSAGE_MOVE_STATISTICS:
        message_code_moves(wire, m);
        break;
    default:
        code_on_pool(wire, context, m);
    }
}

uint32_t message_worst_count(const struct message *message, uint32_t kv_heads) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < message->count; i++)
        for (uint32_t head = 0; head < kv_heads; head++)
            count += message->layers[i].heads[head].worst != NULL;
    return count;
}

void message_code_error(struct wire *wire, struct error *error) {
    int32_t code = error->code;
    wire_i32(wire, &code);
    wire_text(wire, error->message, sizeof error->message);
    error->code = code;
}

void message_write_header(uint8_t header[MESSAGE_HEADER_BYTES], uint32_t operation, size_t bytes) {
    uint64_t size = bytes;
    memset(header, 0, MESSAGE_HEADER_BYTES);
    memcpy(header, &operation, sizeof operation);
    memcpy(header + 8, &size, sizeof size);
}

bool message_read_header(
    const uint8_t header[MESSAGE_HEADER_BYTES], uint64_t most, uint32_t *operation, uint64_t *bytes) {
    uint32_t zero;
    memcpy(operation, header, sizeof *operation);
    memcpy(&zero, header + 4, sizeof zero);
    memcpy(bytes, header + 8, sizeof *bytes);
    return zero == 0 && *operation >= MESSAGE_GOODBYE && *operation < MESSAGE_OPERATIONS && *bytes <= most;
}
