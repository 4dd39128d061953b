/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/transformer.h"

#include "engine/quantise.h"

#include <stdlib.h>
#include <string.h>

#include "engine/clock.h"

struct layer_weights {
    float *attn_norm;   /* device [width] */
    float *ffn_norm;    /* device [width] */
    float *bias;        /* device [(heads + 2 kv_heads) * head_dim]; this and those that follow: NULL: there is none */
    float *bias_output; /* device [width] */
    float *norm_q, *norm_k;                /* device [head_dim] */
    float *attn_post_norm, *ffn_post_norm; /* device [width] */
    struct backend_weight *qkv[3];
    struct backend_weight *attn_output;
    struct backend_weight *gate_up[2];
    struct backend_weight *down;
};

struct transformer {
    struct backend *backend;
    uint32_t ranks; /* of the backend: what of a matrix each has is part of its width */
    const struct model *model;
    struct model_shape shape;
    uint32_t rows_max;
    struct backend_weight *embedding;
    struct backend_weight *output; /* the embedding again when they are tied */
    float *output_norm;            /* device [width] */
    struct layer_weights *layers;
    float *inverse_freq; /* host [2][rope_dim / 2] of global layers, of sliding ones */
    /* Device work space, rows_max rows each. */
    float *x;         /* [rows, width] residual stream */
    float *normed;    /* [rows, width] */
    float *qkv;       /* [rows, (heads + 2 kv_heads) * head_dim / ranks] */
    float *attention; /* [rows, heads * head_dim / ranks] */
    float *gate_up;   /* [rows, 2 ff_width / ranks] */
    float *activated; /* [rows, ff_width / ranks] */
    float *hidden;    /* [rows, width] wanted rows after the final norm */
    float *gathered;  /* [TRANSFORMER_TILE, width] */
    float *logits[2]; /* [TRANSFORMER_TILE, vocabulary] of rank 0, made when first needed */
    bool profiling;
    struct engine_profile profile;
};

static const struct backend_operations *operations(const struct transformer *t) {
    return t->backend->operations;
}

/* Of one rank. */
static uint32_t attention_width(const struct transformer *t) {
    return t->shape.heads / t->ranks * t->shape.head_dim;
}

static uint32_t ff_width(const struct transformer *t) {
    return t->shape.ff_width / t->ranks;
}

/* Where a file has the number that becomes number i of a head. */
static uint32_t place_in_head(const struct model_shape *shape, uint32_t i) {
    if (!shape->rope_halves || i >= shape->rope_dim)
        return i;
    return i / 2 + i % 2 * (shape->rope_dim / 2);
}

/* A vector [columns], its heads in the backend's order if they turn. */
static void read_vector(const struct transformer *t, const struct tensor *tensor, bool turns, float *out) {
    const struct model_shape *s = &t->shape;
    tensor_dequantise_row(tensor, 0, out);
    float head[MODEL_HEAD_DIM_MAX];
    for (uint32_t first = 0; turns && s->rope_halves && first < tensor->columns; first += s->head_dim) {
        memcpy(head, out + first, s->head_dim * sizeof *head);
        for (uint32_t i = 0; i < s->head_dim; i++)
            out[first + i] = head[place_in_head(s, i)];
    }
}

/* Vectors [count], one behind the other, of which the first `turning` turn. NULL: no memory. */
static float *upload_vectors(
    struct transformer *t, const struct tensor *const *tensors, uint32_t count, uint32_t turning, struct error *error) {
    size_t bytes = 0, at = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += tensors[i]->columns * sizeof(float);
    float *values = malloc(bytes);
    float *device = operations(t)->allocate(t->backend, bytes);
    if (values == NULL || device == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for tensor %s", tensors[0]->name);
        operations(t)->release(t->backend, device);
        free(values);
        return NULL;
    }
    for (uint32_t i = 0; i < count; at += tensors[i]->columns, i++)
        read_vector(t, tensors[i], i < turning, values + at);
    operations(t)->upload(t->backend, device, values, bytes);
    free(values);
    return device;
}

static float *upload_vector(struct transformer *t, const struct tensor *tensor, bool turns, struct error *error) {
    return upload_vectors(t, &tensor, 1, turns, error);
}

static int load_matrix(struct transformer *t, const struct tensor *tensor, enum weight_role role, bool exact,
    struct backend_weight **out, struct error *error) {
    struct tensor smaller = *tensor;
    void *memory = NULL;
    if (quantise_takes(tensor, t->model->quantise)) {
        int code = quantise_tensor(tensor, t->model->quantise, &smaller, &memory, error);
        if (code != 0)
            return code;
    }
    if (t->ranks > 1)
        *out = operations(t)->weight_split(t->backend, &smaller, role, exact, error);
    else
        *out = operations(t)->weight_create(t->backend, &smaller, exact, error);
    free(memory);
    return *out != NULL ? 0 : error ? error->code : ERROR_MEMORY;
}

static int load_and_forget(struct transformer *t, const struct tensor *tensor, enum weight_role role, bool exact,
    struct backend_weight **out, struct error *error) {
    int code = load_matrix(t, tensor, role, exact, out, error);
    if (code == 0)
        gguf_forget(t->model->file, tensor->data, tensor->bytes);
    return code;
}

/* W_q or W_k: rows of each head in the backend's order. */
static int load_turning(
    struct transformer *t, const struct tensor *tensor, bool exact, struct backend_weight **out, struct error *error) {
    const struct model_shape *s = &t->shape;
    if (!s->rope_halves)
        return load_and_forget(t, tensor, WEIGHT_ROWS, exact, out, error);
    size_t row_bytes = tensor_row_bytes(tensor->type, tensor->columns);
    char *rows = malloc(tensor->rows * row_bytes);
    if (rows == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for tensor %s", tensor->name);
    for (uint32_t row = 0; row < tensor->rows; row++) {
        uint32_t from = row / s->head_dim * s->head_dim + place_in_head(s, row % s->head_dim);
        memcpy(rows + row * row_bytes, tensor_row(tensor, from), row_bytes);
    }
    struct tensor ordered = *tensor;
    ordered.data = rows;
    ordered.bytes = tensor->rows * row_bytes;
    ordered.stride = 0;
    int code = load_matrix(t, &ordered, WEIGHT_ROWS, exact, out, error);
    free(rows);
    if (code == 0)
        gguf_forget(t->model->file, tensor->data, tensor->bytes);
    return code;
}

/* Vectors of a layer that this model has. */
static int load_vectors(
    struct transformer *t, const struct model_layer *from, struct layer_weights *to, struct error *error) {
    const struct {
        const struct tensor *tensor;
        bool turns;
        float **vector;
    } vectors[] = {
        {&from->attn_norm, false, &to->attn_norm},
        {&from->ffn_norm, false, &to->ffn_norm},
        {&from->bias_output, false, &to->bias_output},
        {&from->norm_q, true, &to->norm_q},
        {&from->norm_k, true, &to->norm_k},
        {&from->attn_post_norm, false, &to->attn_post_norm},
        {&from->ffn_post_norm, false, &to->ffn_post_norm},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        if (vectors[i].tensor->data == NULL)
            continue;
        *vectors[i].vector = upload_vector(t, vectors[i].tensor, vectors[i].turns, error);
        if (*vectors[i].vector == NULL)
            return ERROR_MEMORY;
    }
    if (from->bias_q.data == NULL)
        return 0;
    const struct tensor *const biases[] = {&from->bias_q, &from->bias_k, &from->bias_v};
    to->bias = upload_vectors(t, biases, 3, 2, error);
    return to->bias != NULL ? 0 : ERROR_MEMORY;
}

static int load_layer(
    struct transformer *t, const struct model_layer *from, bool exact, struct layer_weights *to, struct error *error) {
    int code = load_vectors(t, from, to, error);
    if (code == 0)
        code = load_turning(t, &from->attn_q, exact, &to->qkv[0], error);
    if (code == 0)
        code = load_turning(t, &from->attn_k, exact, &to->qkv[1], error);
    const struct {
        const struct tensor *tensor;
        enum weight_role role;
        struct backend_weight **weight;
    } matrices[] = {
        {&from->attn_v, WEIGHT_ROWS, &to->qkv[2]},
        {&from->attn_output, WEIGHT_COLUMNS, &to->attn_output},
        {&from->ffn_gate, WEIGHT_ROWS, &to->gate_up[0]},
        {&from->ffn_up, WEIGHT_ROWS, &to->gate_up[1]},
        {&from->ffn_down, WEIGHT_COLUMNS, &to->down},
    };
    for (size_t i = 0; code == 0 && i < sizeof matrices / sizeof matrices[0]; i++)
        code = load_and_forget(t, matrices[i].tensor, matrices[i].role, exact, matrices[i].weight, error);
    return code;
}

static int load_weights(struct transformer *t, const struct model *model, bool exact, struct error *error) {
    t->layers = calloc(t->shape.layers, sizeof *t->layers);
    if (t->layers == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u layers", t->shape.layers);
    int code = load_and_forget(t, &model->token_embedding, WEIGHT_VOCABULARY, exact, &t->embedding, error);
    if (code != 0)
        return code;
    if (model->output.data == model->token_embedding.data)
        t->output = t->embedding;
    else if ((code = load_and_forget(t, &model->output, WEIGHT_VOCABULARY, exact, &t->output, error)) != 0)
        return code;
    t->output_norm = upload_vector(t, &model->output_norm, false, error);
    if (t->output_norm == NULL)
        return ERROR_MEMORY;
    for (uint32_t layer = 0; layer < t->shape.layers; layer++) {
        code = load_layer(t, &model->layers[layer], exact, &t->layers[layer], error);
        if (code != 0)
            return code;
    }
    return 0;
}

static int allocate_workspace(struct transformer *t, struct error *error) {
    const struct model_shape *s = &t->shape;
    size_t qkv_width = (size_t)(s->heads + 2 * s->kv_heads) / t->ranks * s->head_dim;
    const struct {
        float **buffer;
        size_t width;
    } buffers[] = {
        {&t->x, s->width},
        {&t->normed, s->width},
        {&t->qkv, qkv_width},
        {&t->attention, attention_width(t)},
        {&t->gate_up, 2 * (size_t)ff_width(t)},
        {&t->activated, ff_width(t)},
        {&t->hidden, s->width},
    };
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) {
        *buffers[i].buffer = operations(t)->allocate(t->backend, t->rows_max * buffers[i].width * sizeof(float));
        if (*buffers[i].buffer == NULL)
            return error_set(error, ERROR_MEMORY, "no memory to compute %u tokens at once", t->rows_max);
    }
    t->gathered = operations(t)->allocate(t->backend, TRANSFORMER_TILE * s->width * sizeof(float));
    return t->gathered != NULL ? 0 : error_set(error, ERROR_MEMORY, "no memory for the transformer");
}

static int compute_frequencies(struct transformer *t, struct error *error) {
    const struct model_shape *s = &t->shape;
    const struct tensor *tensor = &t->model->rope_divisors;
    const struct rope_scaling unscaled = {.kind = ROPE_UNSCALED};
    uint32_t pairs = s->rope_dim / 2;
    float divisors[MODEL_HEAD_DIM_MAX];
    t->inverse_freq = malloc((2 * pairs + 1) * sizeof(float));
    if (t->inverse_freq == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the transformer");
    if (tensor->data != NULL)
        tensor_dequantise_row(tensor, 0, divisors);
    rope_frequencies(
        &s->rope_scaling, s->rope_base, s->rope_dim, tensor->data != NULL ? divisors : NULL, t->inverse_freq);
    if (s->local_rope_base > 0)
        rope_frequencies(&unscaled, s->local_rope_base, s->rope_dim, NULL, t->inverse_freq + pairs);
    else
        memcpy(t->inverse_freq + pairs, t->inverse_freq, pairs * sizeof(float));
    return 0;
}

/* Whether the backend has all that the model needs. */
static int check_backend(const struct transformer *t, struct error *error) {
    const struct backend_operations *o = operations(t);
    const struct model_shape *s = &t->shape;
    const struct model_layer *layer = &t->model->layers[0];
    const struct {
        const char *name;
        bool needed, there;
    } parts[] = {
        {"sliding windows", s->global_layers < s->layers, o->attend_variants},
        {"soft caps of attention", s->score_cap != 0, o->attend_variants},
        {"its scale of attention", s->score_scale != 0, o->attend_variants},
        {"soft caps of logits", s->logit_cap != 0, o->soft_cap != NULL},
        {"a scale of embeddings", s->embedding_scale != 0, o->scale != NULL},
        {"GELU", s->gelu, o->gelu_mul != NULL},
        {"norms of heads", layer->norm_q.data != NULL, o->head_norms != NULL},
        {"norms of what layers add", layer->attn_post_norm.data != NULL, o->rms_norm_add != NULL},
        {"matrices in another form than its file's", s->rope_halves || t->model->quantise != TENSOR_F32,
            !t->backend->by_name},
        {"biases", layer->bias_q.data != NULL || layer->bias_output.data != NULL, o->add_bias != NULL},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (parts[i].needed && !parts[i].there)
            return error_set(error, ERROR_UNSUPPORTED,
                "%s: this model of architecture %s needs %s, which the backend (%s) does not have", t->model->path,
                t->model->architecture->name, parts[i].name, o->describe(t->backend));
    return 0;
}

struct transformer *transformer_create(
    struct backend *backend, const struct model *model, uint32_t rows_max, bool exact, struct error *error) {
    struct transformer *t = calloc(1, sizeof *t);
    if (t == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the transformer");
        return NULL;
    }
    t->backend = backend;
    t->ranks = backend_ranks(backend);
    t->model = model;
    t->shape = model->shape;
    t->rows_max = rows_max;
    if (check_backend(t, error) != 0 || compute_frequencies(t, error) != 0 ||
        load_weights(t, model, exact, error) != 0 || allocate_workspace(t, error) != 0) {
        transformer_free(t);
        return NULL;
    }
    return t;
}

static void free_layer(struct transformer *t, struct layer_weights *layer) {
    const struct backend_operations *o = operations(t);
    float *vectors[] = {layer->attn_norm, layer->ffn_norm, layer->bias, layer->bias_output, layer->norm_q,
        layer->norm_k, layer->attn_post_norm, layer->ffn_post_norm};
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++)
        o->release(t->backend, vectors[i]);
    for (int i = 0; i < 3; i++)
        o->weight_free(t->backend, layer->qkv[i]);
    o->weight_free(t->backend, layer->attn_output);
    o->weight_free(t->backend, layer->gate_up[0]);
    o->weight_free(t->backend, layer->gate_up[1]);
    o->weight_free(t->backend, layer->down);
}

void transformer_free(struct transformer *t) {
    if (t == NULL)
        return;
    for (uint32_t layer = 0; t->layers != NULL && layer < t->shape.layers; layer++)
        free_layer(t, &t->layers[layer]);
    free(t->layers);
    if (t->output != t->embedding)
        operations(t)->weight_free(t->backend, t->output);
    operations(t)->weight_free(t->backend, t->embedding);
    float *buffers[] = {
        t->output_norm, t->x, t->normed, t->qkv, t->attention, t->gate_up, t->activated, t->hidden, t->gathered};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        operations(t)->release(t->backend, buffers[i]);
    struct backend *first = backend_of_rank(t->backend, 0);
    for (int i = 0; i < 2; i++)
        first->operations->release(first, t->logits[i]);
    free(t->inverse_freq);
    free(t);
}

/* Profiling: every operation is followed by one of these. */
static double phase_start(struct transformer *t) {
    return t->profiling ? clock_seconds() : 0;
}

static void phase_end(struct transformer *t, enum engine_phase phase, double start, double bytes) {
    if (!t->profiling)
        return;
    operations(t)->synchronize(t->backend);
    t->profile.seconds[phase] += clock_seconds() - start;
    t->profile.bytes[phase] += bytes;
}

static size_t weights_bytes(const struct transformer *t, struct backend_weight *const *weights, uint32_t count) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += operations(t)->weight_bytes(weights[i]);
    return bytes;
}

static void run_linear(struct transformer *t, enum engine_phase phase, struct backend_weight *const *weights,
    uint32_t count, const float *x, uint32_t rows, bool add, float *out) {
    double start = phase_start(t);
    operations(t)->linear(t->backend, (const struct backend_weight *const *)weights, count, x, rows, add, out);
    phase_end(t, phase, start, (double)weights_bytes(t, weights, count));
}

static void run_norm(struct transformer *t, const float *x, const float *weight, uint32_t rows, float *out) {
    double start = phase_start(t);
    operations(t)->rms_norm(t->backend, x, weight, t->shape.norm_epsilon, rows, t->shape.width, out);
    phase_end(t, PHASE_NORM, start, 0);
}

/* Bytes of keys and values that one pass over the batch's slots reads. */
static double kv_bytes_read(const struct transformer *t, const struct kv_batch *kv) {
    double slots = 0;
    for (uint32_t i = 0; i < kv->items_count * t->shape.kv_heads; i++)
        slots += kv->views[i].slots - kv->views[i].from_slot;
    return slots * 2 * t->shape.head_dim * (double)kv_format_bytes(kv->pool->layout.format);
}

/* Biases and norms of queries, keys and values, as far as the layer has them. */
static void adjust_qkv(struct transformer *t, const struct layer_weights *w, uint32_t rows) {
    const struct model_shape *s = &t->shape;
    double start = phase_start(t);
    if (w->bias != NULL)
        operations(t)->add_bias(t->backend, w->bias, rows, (s->heads + 2 * s->kv_heads) * s->head_dim, t->qkv);
    if (w->norm_q != NULL)
        operations(t)->head_norms(
            t->backend, w->norm_q, w->norm_k, s->norm_epsilon, rows, s->heads, s->kv_heads, s->head_dim, t->qkv);
    if (w->bias != NULL || w->norm_q != NULL)
        phase_end(t, PHASE_NORM, start, 0);
}

/* moments [items] may be NULL. */
static void run_attention(struct transformer *t, const struct layer_weights *w, const struct kv_batch *kv,
    const struct query_moments *moments, uint32_t rows) {
    const struct model_shape *s = &t->shape;
    run_norm(t, t->x, w->attn_norm, rows, t->normed);
    run_linear(t, PHASE_QKV, w->qkv, 3, t->normed, rows, false, t->qkv);
    adjust_qkv(t, w, rows);
    struct rope_params rope = transformer_rope(t, kv->layer);
    double start = phase_start(t);
    if (moments != NULL) {
        operations(t)->query_moments(t->backend, kv, s->heads, t->qkv, moments);
        phase_end(t, PHASE_ATTEND, start, 0);
        start = phase_start(t);
    }
    operations(t)->rope_and_append(t->backend, kv, &rope, s->heads, t->qkv);
    phase_end(t, PHASE_ROPE, start, 0);
    start = phase_start(t);
    operations(t)->attend(t->backend, kv, s->heads, t->qkv, t->attention);
    phase_end(t, PHASE_ATTEND, start, t->profiling ? kv_bytes_read(t, kv) : 0);
}

/* x += the product, or its norm. Uses normed. */
static void run_residual(struct transformer *t, enum engine_phase phase, struct backend_weight **weight,
    const float *post_norm, const float *in, uint32_t rows) {
    if (post_norm == NULL) {
        run_linear(t, phase, weight, 1, in, rows, true, t->x);
        return;
    }
    run_linear(t, phase, weight, 1, in, rows, false, t->normed);
    double start = phase_start(t);
    operations(t)->rms_norm_add(t->backend, t->normed, post_norm, t->shape.norm_epsilon, rows, t->shape.width, t->x);
    phase_end(t, PHASE_NORM, start, 0);
}

static void run_feed_forward(struct transformer *t, struct layer_weights *w, uint32_t rows) {
    const struct backend_operations *o = operations(t);
    run_norm(t, t->x, w->ffn_norm, rows, t->normed);
    run_linear(t, PHASE_GATE_UP, w->gate_up, 2, t->normed, rows, false, t->gate_up);
    double start = phase_start(t);
    (t->shape.gelu ? o->gelu_mul : o->silu_mul)(t->backend, t->gate_up, rows, ff_width(t), t->activated);
    phase_end(t, PHASE_SILU, start, 0);
    run_residual(t, PHASE_DOWN, &w->down, w->ffn_post_norm, t->activated, rows);
}

static void swap_streams(struct transformer *t) {
    float *swap = t->x;
    t->x = t->normed;
    t->normed = swap;
}

/* After the last layer's attention only wanted rows matter: moves them to the front of x and attention. */
static void drop_unwanted_rows(struct transformer *t, const struct transformer_batch *batch) {
    const struct backend_operations *o = operations(t);
    o->gather_rows(t->backend, t->attention, batch->wanted, batch->wanted_count, attention_width(t), t->qkv);
    o->gather_rows(t->backend, t->x, batch->wanted, batch->wanted_count, t->shape.width, t->normed);
    swap_streams(t);
}

static struct kv_batch layer_batch(const struct transformer *t, const struct transformer_batch *batch, uint32_t layer) {
    size_t heads = (size_t)layer * batch->items_count * t->shape.kv_heads;
    return (struct kv_batch){
        .pool = batch->pool,
        .items = batch->items,
        .items_count = batch->items_count,
        .views = batch->views + heads,
        .layer = layer,
        .statistics = batch->statistics == NULL ? NULL : batch->statistics + heads,
        .scored = batch->scored == NULL ? NULL : batch->scored + (size_t)layer * batch->items_count,
        .window = t->model->windows[layer],
        .scale = t->shape.score_scale,
        .cap = t->shape.score_cap,
    };
}

/* rows: of the batch, or more, of which the last are nobody's. */
static void compute(struct transformer *t, const struct transformer_batch *batch, uint32_t rows) {
    uint32_t layers = t->shape.layers;
    bool drops = batch->wanted_count < batch->rows;
    double start = phase_start(t);
    operations(t)->embed(t->backend, t->embedding, batch->tokens, rows, t->x);
    if (t->shape.embedding_scale != 0)
        operations(t)->scale(t->backend, t->shape.embedding_scale, rows, t->shape.width, t->x);
    phase_end(t, PHASE_EMBED, start, 0);
    for (uint32_t layer = 0; layer < layers; layer++) {
        struct layer_weights *w = &t->layers[layer];
        struct kv_batch kv = layer_batch(t, batch, layer);
        const struct query_moments *moments =
            batch->moments == NULL ? NULL : batch->moments + (size_t)layer * batch->items_count;
        run_attention(t, w, &kv, moments, rows);
        const float *attention = t->attention;
        if (layer + 1 == layers && drops) {
            if (batch->wanted_count == 0)
                return;
            drop_unwanted_rows(t, batch);
            attention = t->qkv;
            rows = batch->wanted_count;
        }
        run_residual(t, PHASE_ATTN_OUTPUT, &w->attn_output, w->attn_post_norm, attention, rows);
        if (w->bias_output != NULL)
            operations(t)->add_bias(t->backend, w->bias_output, rows, t->shape.width, t->x);
        run_feed_forward(t, w, rows);
    }
    run_norm(t, t->x, t->output_norm, rows, t->hidden);
    if (drops) /* back to where it is expected: a step may be done again with the same addresses */
        swap_streams(t);
}

/* Whether other batches of as many items call the same operations. */
static bool repeats(const struct transformer *t, const struct transformer_batch *batch) {
    if (t->profiling || batch->wanted_count != batch->rows || batch->items_count != batch->rows)
        return false;
    for (uint32_t i = 0; i < batch->items_count; i++)
        if (batch->items[i].first_row != i || batch->items[i].rows != 1)
            return false;
    return true;
}

/* False: nothing was computed. */
static bool compute_step(struct transformer *t, const struct transformer_batch *batch, const struct kv_step *step) {
    uint32_t rows = batch->rows;
    enum step_way way = operations(t)->step_begin(t->backend, step, &rows);
    if (!operations(t)->step_start(t->backend, way))
        return false;
    if (way == STEP_REPLAY)
        return true;
    compute(t, batch, rows);
    if (!operations(t)->step_end(t->backend))
        return false;
    return way == STEP_CALLS || operations(t)->step_start(t->backend, STEP_REPLAY);
}

void transformer_forward(struct transformer *t, const struct transformer_batch *batch) {
    const struct rope_params rope = transformer_rope(t, 0);
    const struct kv_step step = {
        .owner = t,
        .tokens = batch->tokens,
        .rows = batch->rows,
        .rows_room = t->rows_max,
        .pool = batch->pool,
        .items = batch->items,
        .items_count = batch->items_count,
        .views = batch->views,
        .statistics = batch->statistics,
        .moments = batch->moments,
        .scored = batch->scored,
        .wanted = batch->wanted_count < batch->rows ? batch->wanted : NULL,
        .wanted_count = batch->wanted_count,
        .heads = t->shape.heads,
        .rope = &rope,
        .repeats = repeats(t, batch),
    };
    if (operations(t)->step_begin == NULL)
        compute(t, batch, batch->rows);
    else
        while (!compute_step(t, batch, &step))
            ; /* not in the way that was tried: next time in a lesser one */
    t->profile.steps++;
}

const float *transformer_hidden(const struct transformer *t, uint32_t row) {
    return t->hidden + (size_t)row * t->shape.width;
}

/* Device rows [count, width] of hidden rows: where they are, if they lie in order. */
static const float *collect_hidden(struct transformer *t, const uint32_t *hidden_rows, uint32_t count) {
    enum { ALIGNMENT = 4 }; /* floats */
    bool in_order = (size_t)hidden_rows[0] * t->shape.width % ALIGNMENT == 0;
    for (uint32_t i = 1; i < count; i++)
        in_order &= hidden_rows[i] == hidden_rows[0] + i;
    if (in_order)
        return t->hidden + (size_t)hidden_rows[0] * t->shape.width;
    operations(t)->gather_rows(t->backend, t->hidden, hidden_rows, count, t->shape.width, t->gathered);
    return t->gathered;
}

const float *transformer_logits(
    struct transformer *t, const uint32_t *hidden_rows, uint32_t count, uint32_t which, struct error *error) {
    struct backend *first = backend_of_rank(t->backend, 0);
    size_t bytes = TRANSFORMER_TILE * (size_t)t->shape.vocabulary * sizeof(float);
    if (t->logits[which] == NULL)
        t->logits[which] = first->operations->allocate(first, bytes);
    if (t->logits[which] == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for logits");
        return NULL;
    }
    const float *hidden = collect_hidden(t, hidden_rows, count);
    run_linear(t, PHASE_LOGITS, &t->output, 1, hidden, count, false, t->logits[which]);
    if (t->shape.logit_cap != 0)
        first->operations->soft_cap(first, t->shape.logit_cap, count, t->shape.vocabulary, t->logits[which]);
    return backend_check(t->backend, error) == 0 ? t->logits[which] : NULL;
}

struct rope_params transformer_rope(const struct transformer *t, uint32_t layer) {
    uint32_t dim = t->shape.rope_dim, table = t->model->windows[layer] != 0;
    return (struct rope_params){.dim = dim, .inverse_freq = t->inverse_freq + (size_t)table * (dim / 2)};
}

size_t transformer_weight_bytes(const struct transformer *t) {
    size_t bytes = weights_bytes(t, &t->output, 1);
    for (uint32_t layer = 0; layer < t->shape.layers; layer++) {
        const struct layer_weights *w = &t->layers[layer];
        bytes += weights_bytes(t, w->qkv, 3) + weights_bytes(t, &w->attn_output, 1) + weights_bytes(t, w->gate_up, 2) +
                 weights_bytes(t, &w->down, 1);
    }
    return bytes;
}

struct engine_profile *transformer_profile(struct transformer *t) {
    return &t->profile;
}

void transformer_profile_enable(struct transformer *t, bool enable) {
    t->profiling = enable;
    memset(&t->profile, 0, sizeof t->profile);
}
