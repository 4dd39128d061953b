/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include <inttypes.h>
#include <math.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEAD_DIM_MAX = 256,
    SIZE_MAX_OF_SHAPE = 1 << 24, /* widths, vocabulary, context: far above any model, far below 32-bit overflow */
    NAME_BYTES = 40,             /* of the longest tensor name, with its NUL */
    SHOWN_BYTES = 200,
    FINGERPRINT_SAMPLE = 256, /* bytes from the start, the middle and the end of a tensor */
};

/* The sizes that tensors are made of. */
enum dimension { ONE, WIDTH, FF_WIDTH, VOCABULARY, QUERIES, KEYS };

struct tensor_plan {
    const char *name;
    size_t place; /* of the struct tensor in struct model_layer or struct model */
    enum dimension rows;
    enum dimension columns;
};

static const struct tensor_plan model_plan[] = {
    {"token_embd.weight", offsetof(struct model, token_embedding), VOCABULARY, WIDTH},
    {"output_norm.weight", offsetof(struct model, output_norm), ONE, WIDTH},
    {"output.weight", offsetof(struct model, output), VOCABULARY, WIDTH}, /* last: may be absent */
};

static const struct tensor_plan layer_plan[] = {
    {"attn_norm.weight", offsetof(struct model_layer, attn_norm), ONE, WIDTH},
    {"attn_q.weight", offsetof(struct model_layer, attn_q), QUERIES, WIDTH},
    {"attn_k.weight", offsetof(struct model_layer, attn_k), KEYS, WIDTH},
    {"attn_v.weight", offsetof(struct model_layer, attn_v), KEYS, WIDTH},
    {"attn_output.weight", offsetof(struct model_layer, attn_output), WIDTH, QUERIES},
    {"ffn_norm.weight", offsetof(struct model_layer, ffn_norm), ONE, WIDTH},
    {"ffn_gate.weight", offsetof(struct model_layer, ffn_gate), FF_WIDTH, WIDTH},
    {"ffn_up.weight", offsetof(struct model_layer, ffn_up), FF_WIDTH, WIDTH},
    {"ffn_down.weight", offsetof(struct model_layer, ffn_down), WIDTH, FF_WIDTH},
};

enum {
    MODEL_TENSORS = sizeof model_plan / sizeof model_plan[0],
    LAYER_TENSORS = sizeof layer_plan / sizeof layer_plan[0],
};

const char *const *model_architectures(void) {
    static const char *const names[] = {"llama", NULL};
    return names;
}

static uint64_t dimension_size(const struct model_shape *shape, enum dimension dimension) {
    switch (dimension) {
    case ONE:
        return 1;
    case WIDTH:
        return shape->width;
    case FF_WIDTH:
        return shape->ff_width;
    case VOCABULARY:
        return shape->vocabulary;
    case QUERIES:
        return (uint64_t)shape->heads * shape->head_dim;
    case KEYS:
        return (uint64_t)shape->kv_heads * shape->head_dim;
    }
    return 0;
}

/* A positive size of the shape. */
static int get_size(const struct model *model, const char *key, uint32_t *out, struct error *error) {
    int code = gguf_get_uint32(model->file, key, out, error);
    if (code == 0 && (*out == 0 || *out > SIZE_MAX_OF_SHAPE))
        code = error_set(
            error, ERROR_FORMAT, "%s: key \"%s\" is %u, not 1 to %d", model->path, key, *out, SIZE_MAX_OF_SHAPE);
    return code;
}

/* The same, of a key that may be absent: *out then stays as it is. */
static int get_optional_size(const struct model *model, const char *key, uint32_t *out, struct error *error) {
    return gguf_find(model->file, key) == NULL ? 0 : get_size(model, key, out, error);
}

static int get_optional_float(const struct model *model, const char *key, float *out, struct error *error) {
    return gguf_find(model->file, key) == NULL ? 0 : gguf_get_float(model->file, key, out, error);
}

static int read_architecture(struct model *model, struct error *error) {
    struct gguf_string text;
    char shown[SHOWN_BYTES];
    int code = gguf_get_string(model->file, "general.architecture", &text, error);
    if (code != 0)
        return code;
    gguf_string_show(text, shown, sizeof shown);
    model->architecture = strdup(shown);
    if (model->architecture == NULL)
        return error_set(error, ERROR_MEMORY, "%s: no memory", model->path);
    for (const char *const *name = model_architectures(); *name != NULL; name++)
        if (strcmp(shown, *name) == 0)
            return 0;
    return error_set(
        error, ERROR_UNSUPPORTED, "%s: architecture \"%s\" is not supported (llama is)", model->path, shown);
}

/* general.name, or the file's name without its ending. */
static int read_name(struct model *model, struct error *error) {
    struct gguf_string text = {NULL, 0};
    char shown[SHOWN_BYTES];
    if (gguf_find(model->file, "general.name") != NULL) {
        int code = gguf_get_string(model->file, "general.name", &text, error);
        if (code != 0)
            return code;
    }
    if (text.bytes == 0) {
        const char *slash = strrchr(model->path, '/');
        const char *base = slash == NULL ? model->path : slash + 1;
        const char *dot = strrchr(base, '.');
        bool has_ending = dot != NULL && dot != base;
        text = (struct gguf_string){base, has_ending ? (size_t)(dot - base) : strlen(base)};
    }
    model->name = strdup(gguf_string_show(text, shown, sizeof shown));
    return model->name == NULL ? error_set(error, ERROR_MEMORY, "%s: no memory", model->path) : 0;
}

static int read_heads(struct model *model, struct error *error) {
    struct model_shape *shape = &model->shape;
    int code = get_size(model, "llama.attention.head_count", &shape->heads, error);
    if (code != 0)
        return code;
    shape->kv_heads = shape->heads;
    code = get_optional_size(model, "llama.attention.head_count_kv", &shape->kv_heads, error);
    if (code != 0)
        return code;
    if (shape->heads % shape->kv_heads != 0)
        return error_set(error, ERROR_FORMAT, "%s: %u query heads are no multiple of %u KV heads", model->path,
            shape->heads, shape->kv_heads);
    if (gguf_find(model->file, "llama.attention.key_length") != NULL)
        code = get_size(model, "llama.attention.key_length", &shape->head_dim, error);
    else if (shape->width % shape->heads != 0)
        code = error_set(error, ERROR_FORMAT, "%s: the width %u is no multiple of %u heads", model->path, shape->width,
            shape->heads);
    else
        shape->head_dim = shape->width / shape->heads;
    uint32_t value_length = shape->head_dim;
    if (code == 0)
        code = get_optional_size(model, "llama.attention.value_length", &value_length, error);
    if (code != 0)
        return code;
    if (value_length != shape->head_dim)
        return error_set(error, ERROR_UNSUPPORTED, "%s: keys of %u and values of %u numbers a head are not supported",
            model->path, shape->head_dim, value_length);
    if (shape->head_dim % 2 != 0 || shape->head_dim > HEAD_DIM_MAX)
        return error_set(error, ERROR_UNSUPPORTED, "%s: heads of %u numbers are not supported (even, at most %d)",
            model->path, shape->head_dim, HEAD_DIM_MAX);
    return 0;
}

/* Only unscaled rotary positions are supported; a model that wants others would silently give wrong text. */
static int check_rope_scaling(const struct model *model, struct error *error) {
    static const char *const factors[] = {
        "llama.rope.scaling.factor", "llama.rope.scale_linear", "llama.rope.scaling.attn_factor"};
    struct gguf_string type = {"none", 4};
    int code = 0;
    if (gguf_find(model->file, "llama.rope.scaling.type") != NULL)
        code = gguf_get_string(model->file, "llama.rope.scaling.type", &type, error);
    if (code == 0 && (type.bytes != 4 || memcmp(type.text, "none", 4) != 0)) {
        char shown[SHOWN_BYTES];
        code = error_set(error, ERROR_UNSUPPORTED, "%s: rope scaling \"%s\" is not supported", model->path,
            gguf_string_show(type, shown, sizeof shown));
    }
    for (size_t i = 0; code == 0 && i < sizeof factors / sizeof factors[0]; i++) {
        float factor = 1;
        code = get_optional_float(model, factors[i], &factor, error);
        if (code == 0 && factor != 1 && factor != 0) /* 0 stands for "not given" in some files */
            code = error_set(error, ERROR_UNSUPPORTED, "%s: rope scaling (key \"%s\" is %g) is not supported",
                model->path, factors[i], (double)factor);
    }
    return code;
}

static int read_rope(struct model *model, struct error *error) {
    struct model_shape *shape = &model->shape;
    shape->rope_dim = shape->head_dim;
    shape->rope_base = 10000;
    int code = get_optional_size(model, "llama.rope.dimension_count", &shape->rope_dim, error);
    if (code == 0)
        code = get_optional_float(model, "llama.rope.freq_base", &shape->rope_base, error);
    if (code != 0)
        return code;
    if (shape->rope_dim > shape->head_dim || shape->rope_dim % 2 != 0)
        return error_set(error, ERROR_FORMAT, "%s: key \"llama.rope.dimension_count\" is %u, not even and at most %u",
            model->path, shape->rope_dim, shape->head_dim);
    if (!(shape->rope_base > 0))
        return error_set(error, ERROR_FORMAT, "%s: key \"llama.rope.freq_base\" is %g, not above 0", model->path,
            (double)shape->rope_base);
    return check_rope_scaling(model, error);
}

/* Keys of models that this architecture's name also covers, but that compute something else. */
static int check_variants(const struct model *model, struct error *error) {
    uint32_t experts = 0;
    bool causal = true;
    int code = 0;
    if (gguf_find(model->file, "llama.expert_count") != NULL)
        code = gguf_get_uint32(model->file, "llama.expert_count", &experts, error);
    if (code == 0 && gguf_find(model->file, "llama.attention.causal") != NULL)
        code = gguf_get_bool(model->file, "llama.attention.causal", &causal, error);
    if (code == 0 && experts != 0)
        code =
            error_set(error, ERROR_UNSUPPORTED, "%s: mixtures of experts (%u) are not supported", model->path, experts);
    if (code == 0 && !causal)
        code = error_set(error, ERROR_UNSUPPORTED, "%s: attention that is not causal is not supported", model->path);
    return code;
}

/* The embedding has a row for each token of the vocabulary; every other statement of its size must agree. */
static int read_vocabulary(struct model *model, struct error *error) {
    const struct gguf_tensor *embedding = gguf_find_tensor(model->file, "token_embd.weight");
    const struct gguf_pair *tokens = gguf_find(model->file, "tokenizer.ggml.tokens");
    if (embedding == NULL)
        return error_set(error, ERROR_FORMAT, "%s: tensor token_embd.weight is missing", model->path);
    uint64_t rows = embedding->size[1];
    if (rows > SIZE_MAX_OF_SHAPE)
        return error_set(error, ERROR_FORMAT, "%s: token_embd.weight has %" PRIu64 " rows, not 1 to %d", model->path,
            rows, SIZE_MAX_OF_SHAPE);
    model->shape.vocabulary = (uint32_t)rows;
    uint32_t stated = model->shape.vocabulary;
    int code = get_optional_size(model, "llama.vocab_size", &stated, error);
    if (code == 0 && stated != rows)
        code = error_set(error, ERROR_FORMAT, "%s: token_embd.weight has %" PRIu64 " rows, but llama.vocab_size is %u",
            model->path, rows, stated);
    if (code == 0 && tokens != NULL && tokens->count != rows)
        code = error_set(error, ERROR_FORMAT,
            "%s: token_embd.weight has %" PRIu64 " rows, but the tokenizer %" PRIu64 " tokens", model->path, rows,
            tokens->count);
    return code;
}

static int read_shape(struct model *model, struct error *error) {
    struct model_shape *shape = &model->shape;
    int code = get_size(model, "llama.block_count", &shape->layers, error);
    if (code == 0)
        code = get_size(model, "llama.embedding_length", &shape->width, error);
    if (code == 0)
        code = get_size(model, "llama.feed_forward_length", &shape->ff_width, error);
    if (code == 0)
        code = get_size(model, "llama.context_length", &shape->context, error);
    if (code == 0)
        code = gguf_get_float(model->file, "llama.attention.layer_norm_rms_epsilon", &shape->norm_epsilon, error);
    if (code == 0 && !(shape->norm_epsilon >= 0))
        code = error_set(error, ERROR_FORMAT, "%s: key \"llama.attention.layer_norm_rms_epsilon\" is %g, below 0",
            model->path, (double)shape->norm_epsilon);
    if (code == 0)
        code = read_heads(model, error);
    if (code == 0)
        code = read_rope(model, error);
    if (code == 0)
        code = check_variants(model, error);
    if (code == 0)
        code = read_vocabulary(model, error);
    return code;
}

/* A tensor of the file as a matrix of exactly the planned shape, in a format that we can read. */
static int take_tensor(
    struct model *model, const struct tensor_plan *plan, const char *name, struct tensor *out, struct error *error) {
    const struct gguf_tensor *found = gguf_find_tensor(model->file, name);
    uint64_t rows = dimension_size(&model->shape, plan->rows);
    uint64_t columns = dimension_size(&model->shape, plan->columns);
    if (found == NULL)
        return error_set(error, ERROR_FORMAT, "%s: tensor %s is missing", model->path, name);
    if (found->size[0] != columns || found->size[1] != rows || found->size[2] != 1 || found->size[3] != 1)
        return error_set(error, ERROR_FORMAT,
            "%s: tensor %s has sizes %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64 ", not %" PRIu64 " x %" PRIu64,
            model->path, name, found->size[0], found->size[1], found->size[2], found->size[3], columns, rows);
    if (rows > SIZE_MAX_OF_SHAPE)
        return error_set(error, ERROR_FORMAT, "%s: tensor %s has %" PRIu64 " rows, more than %d", model->path, name,
            rows, SIZE_MAX_OF_SHAPE);
    if (tensor_format_find(found->type) == NULL) {
        char names[TENSOR_FORMAT_NAMES_BYTES];
        tensor_format_names(names);
        return error_set(error, ERROR_UNSUPPORTED, "%s: tensor %s has format %s, which is not supported; these are: %s",
            model->path, name, tensor_type_name(found->type), names);
    }
    *out = (struct tensor){.name = name,
        .type = (enum tensor_type)found->type,
        .rows = (uint32_t)rows,
        .columns = (uint32_t)columns,
        .data = found->data,
        .bytes = found->bytes};
    return 0;
}

static bool is_used(const struct model *model, const char *name) {
    unsigned layer;
    char expected[NAME_BYTES];
    for (size_t i = 0; i < MODEL_TENSORS; i++)
        if (strcmp(name, model_plan[i].name) == 0)
            return true;
    if (sscanf(name, "blk.%9u.", &layer) != 1 || layer >= model->shape.layers)
        return false;
    for (size_t i = 0; i < LAYER_TENSORS; i++) {
        snprintf(expected, sizeof expected, "blk.%u.%s", layer, layer_plan[i].name);
        if (strcmp(name, expected) == 0)
            return true;
    }
    return false;
}

/* Tensors that the model does not use would change what it computes: biases, rope factors, experts. */
static int check_unused(const struct model *model, struct error *error) {
    for (size_t i = 0; i < gguf_tensor_count(model->file); i++) {
        char shown[SHOWN_BYTES];
        gguf_string_show(gguf_tensor_at(model->file, i)->name, shown, sizeof shown);
        if (!is_used(model, shown))
            return error_set(error, ERROR_UNSUPPORTED, "%s: tensor %s is not supported", model->path, shown);
    }
    return 0;
}

static int take_layer(struct model *model, uint32_t layer, char (*names)[NAME_BYTES], struct error *error) {
    int code = 0;
    for (size_t i = 0; code == 0 && i < LAYER_TENSORS; i++) {
        const struct tensor_plan *plan = &layer_plan[i];
        struct tensor *out = (struct tensor *)((char *)&model->layers[layer] + plan->place);
        snprintf(names[i], NAME_BYTES, "blk.%u.%s", layer, plan->name);
        code = take_tensor(model, plan, names[i], out, error);
    }
    return code;
}

static int read_tensors(struct model *model, struct error *error) {
    uint32_t layers = model->shape.layers;
    if (layers > gguf_tensor_count(model->file) / LAYER_TENSORS)
        return error_set(error, ERROR_FORMAT, "%s: %u layers need more than the file's %zu tensors", model->path,
            layers, gguf_tensor_count(model->file));
    model->layers = calloc(layers, sizeof *model->layers);
    model->names = calloc(layers, LAYER_TENSORS * (size_t)NAME_BYTES);
    if (model->layers == NULL || model->names == NULL)
        return error_set(error, ERROR_MEMORY, "%s: no memory for %u layers", model->path, layers);
    int code = 0;
    for (size_t i = 0; code == 0 && i < MODEL_TENSORS; i++) {
        const struct tensor_plan *plan = &model_plan[i];
        struct tensor *out = (struct tensor *)((char *)model + plan->place);
        if (out == &model->output && gguf_find_tensor(model->file, plan->name) == NULL)
            *out = model->token_embedding;
        else
            code = take_tensor(model, plan, plan->name, out, error);
    }
    char(*names)[NAME_BYTES] = (char(*)[NAME_BYTES])model->names;
    for (uint32_t i = 0; code == 0 && i < layers; i++)
        code = take_layer(model, i, names + (size_t)i * LAYER_TENSORS, error);
    return code != 0 ? code : check_unused(model, error);
}

static void hash_number(struct sha256_ctx *hash, uint64_t number) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(number >> (8 * i));
    sha256_update(hash, sizeof bytes, bytes);
}

static void hash_tensor(struct sha256_ctx *hash, const struct tensor *tensor) {
    const uint8_t *data = tensor->data;
    size_t bytes = tensor->bytes;
    hash_number(hash, strlen(tensor->name));
    sha256_update(hash, strlen(tensor->name), (const uint8_t *)tensor->name);
    hash_number(hash, tensor->type);
    hash_number(hash, tensor->rows);
    hash_number(hash, tensor->columns);
    if (bytes <= 3 * FINGERPRINT_SAMPLE) {
        sha256_update(hash, bytes, data);
        return;
    }
    sha256_update(hash, FINGERPRINT_SAMPLE, data);
    sha256_update(hash, FINGERPRINT_SAMPLE, data + (bytes - FINGERPRINT_SAMPLE) / 2);
    sha256_update(hash, FINGERPRINT_SAMPLE, data + bytes - FINGERPRINT_SAMPLE);
}

/* In the order of the plans, not of the file: a file that was only rearranged is the same model. */
static void compute_fingerprint(struct model *model) {
    struct sha256_ctx hash;
    uint8_t digest[SHA256_DIGEST_SIZE];
    sha256_init(&hash);
    for (size_t i = 0; i < MODEL_TENSORS; i++)
        hash_tensor(&hash, (const struct tensor *)((const char *)model + model_plan[i].place));
    for (uint32_t layer = 0; layer < model->shape.layers; layer++)
        for (size_t i = 0; i < LAYER_TENSORS; i++)
            hash_tensor(&hash, (const struct tensor *)((const char *)&model->layers[layer] + layer_plan[i].place));
    sha256_digest(&hash, sizeof digest, digest);
    for (size_t i = 0; i < sizeof digest; i++)
        snprintf(model->fingerprint + 2 * i, 3, "%02x", digest[i]);
}

struct model *model_open(const char *path, struct error *error) {
    struct model *model = calloc(1, sizeof *model);
    if (model == NULL || (model->path = strdup(path)) == NULL) {
        error_set(error, ERROR_MEMORY, "%s: no memory", path);
        goto failed;
    }
    model->file = gguf_open(path, error);
    if (model->file == NULL)
        goto failed;
    if (read_architecture(model, error) != 0 || read_name(model, error) != 0 || read_shape(model, error) != 0 ||
        read_tensors(model, error) != 0)
        goto failed;
    compute_fingerprint(model);
    return model;
failed:
    model_free(model);
    return NULL;
}

void model_free(struct model *model) {
    if (model == NULL)
        return;
    gguf_free(model->file);
    free(model->layers);
    free(model->names);
    free(model->path);
    free(model->name);
    free(model->architecture);
    free(model);
}
