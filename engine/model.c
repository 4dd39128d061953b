/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include <inttypes.h>
#include <math.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SIZE_MAX_OF_SHAPE = 1 << 24, /* widths, vocabulary, context: far above any model, far below 32-bit overflow */
    NAME_BYTES = 40,             /* of the longest tensor name, with its NUL */
    SHOWN_BYTES = 200,
    KEY_BYTES = 96,           /* of the longest key, with its NUL */
    FINGERPRINT_SAMPLE = 256, /* bytes from the start, the middle and the end of a tensor */
};

/* The sizes that tensors are made of. */
enum dimension { ONE, WIDTH, FF_WIDTH, GATE_UP, VOCABULARY, HEAD, QUERIES, KEYS, QUERIES_AND_KEYS, PAIRS };

struct tensor_plan {
    const char *name;
    size_t place; /* of the struct tensor in struct model_layer or struct model */
    enum dimension rows;
    enum dimension columns;
    uint32_t with, without; /* traits of architectures that have it: one of `with` (0: any), none of `without` */
    bool optional;
};

static const struct tensor_plan model_plan[] = {
    {"token_embd.weight", offsetof(struct model, token_embedding), VOCABULARY, WIDTH, 0, 0, false},
    {"output_norm.weight", offsetof(struct model, output_norm), ONE, WIDTH, 0, 0, false},
    {"output.weight", offsetof(struct model, output), VOCABULARY, WIDTH, 0, 0, true}, /* absent: the embedding */
    {"rope_freqs.weight", offsetof(struct model, rope_divisors), ONE, PAIRS, 0, 0, true},
};

#define LAYER(member) offsetof(struct model_layer, member)
enum { BIASES = TRAIT_BIASES | TRAIT_BIASES_POSSIBLE };

static const struct tensor_plan layer_plan[] = {
    {"attn_norm.weight", LAYER(attn_norm), ONE, WIDTH, 0, 0, false},
    {"attn_q.weight", LAYER(attn_q), QUERIES, WIDTH, 0, TRAIT_FUSED, false},
    {"attn_k.weight", LAYER(attn_k), KEYS, WIDTH, 0, TRAIT_FUSED, false},
    {"attn_v.weight", LAYER(attn_v), KEYS, WIDTH, 0, TRAIT_FUSED, false},
    {"attn_output.weight", LAYER(attn_output), WIDTH, QUERIES, 0, 0, false},
    {"ffn_norm.weight", LAYER(ffn_norm), ONE, WIDTH, 0, 0, false},
    {"ffn_gate.weight", LAYER(ffn_gate), FF_WIDTH, WIDTH, 0, TRAIT_FUSED, false},
    {"ffn_up.weight", LAYER(ffn_up), FF_WIDTH, WIDTH, 0, TRAIT_FUSED, false},
    {"ffn_down.weight", LAYER(ffn_down), WIDTH, FF_WIDTH, 0, 0, false},
    {"attn_q.bias", LAYER(bias_q), ONE, QUERIES, BIASES, 0, false},
    {"attn_k.bias", LAYER(bias_k), ONE, KEYS, BIASES, 0, false},
    {"attn_v.bias", LAYER(bias_v), ONE, KEYS, BIASES, 0, false},
    {"attn_output.bias", LAYER(bias_output), ONE, WIDTH, TRAIT_BIASES_POSSIBLE, 0, true},
    {"attn_q_norm.weight", LAYER(norm_q), ONE, HEAD, TRAIT_HEAD_NORMS, 0, false},
    {"attn_k_norm.weight", LAYER(norm_k), ONE, HEAD, TRAIT_HEAD_NORMS, 0, false},
    {"post_attention_norm.weight", LAYER(attn_post_norm), ONE, WIDTH, TRAIT_POST_NORMS, 0, false},
    {"post_ffw_norm.weight", LAYER(ffn_post_norm), ONE, WIDTH, TRAIT_POST_NORMS, 0, false},
    {"attn_qkv.weight", LAYER(fused_qkv), QUERIES_AND_KEYS, WIDTH, TRAIT_FUSED, 0, false},
    {"ffn_up.weight", LAYER(fused_gate_up), GATE_UP, WIDTH, TRAIT_FUSED, 0, false},
};

enum {
    MODEL_TENSORS = sizeof model_plan / sizeof model_plan[0],
    LAYER_TENSORS = sizeof layer_plan / sizeof layer_plan[0],
};

static bool is_planned(const struct model *model, const struct tensor_plan *plan) {
    uint32_t traits = model->architecture->traits;
    return (plan->with == 0 || (plan->with & traits) != 0) && (plan->without & traits) == 0;
}

static uint64_t dimension_size(const struct model_shape *shape, enum dimension dimension) {
    switch (dimension) {
    case ONE:
        return 1;
    case WIDTH:
        return shape->width;
    case FF_WIDTH:
        return shape->ff_width;
    case GATE_UP:
        return 2 * (uint64_t)shape->ff_width;
    case VOCABULARY:
        return shape->vocabulary;
    case HEAD:
        return shape->head_dim;
    case QUERIES:
        return (uint64_t)shape->heads * shape->head_dim;
    case KEYS:
        return (uint64_t)shape->kv_heads * shape->head_dim;
    case QUERIES_AND_KEYS:
        return ((uint64_t)shape->heads + 2 * (uint64_t)shape->kv_heads) * shape->head_dim;
    case PAIRS:
        return shape->rope_dim / 2;
    }
    return 0;
}

/* ---- keys ---- */

/* A key of the architecture: "llama." and the name. */
struct key {
    char text[KEY_BYTES];
};

static struct key key_of(const struct model *model, const char *name) {
    struct key key;
    snprintf(key.text, sizeof key.text, "%s.%s", model->architecture->name, name);
    return key;
}

static const struct gguf_pair *find_key(const struct model *model, const char *name) {
    return gguf_find(model->file, key_of(model, name).text);
}

/* A positive size of the shape. */
static int get_size(const struct model *model, const char *name, uint32_t *out, struct error *error) {
    struct key key = key_of(model, name);
    int code = gguf_get_uint32(model->file, key.text, out, error);
    if (code == 0 && (*out == 0 || *out > SIZE_MAX_OF_SHAPE))
        code = error_set(
            error, ERROR_FORMAT, "%s: key \"%s\" is %u, not 1 to %d", model->path, key.text, *out, SIZE_MAX_OF_SHAPE);
    return code;
}

/* The same, of a key that may be absent: *out then stays as it is. */
static int get_optional_size(const struct model *model, const char *name, uint32_t *out, struct error *error) {
    return find_key(model, name) == NULL ? 0 : get_size(model, name, out, error);
}

/* A number that may be absent, and is at least `least`. */
static int get_optional_float(
    const struct model *model, const char *name, float least, float *out, struct error *error) {
    struct key key = key_of(model, name);
    if (find_key(model, name) == NULL)
        return 0;
    int code = gguf_get_float(model->file, key.text, out, error);
    if (code == 0 && !(*out >= least && isfinite(*out)))
        code = error_set(error, ERROR_FORMAT, "%s: key \"%s\" is %g, not a number of at least %g", model->path,
            key.text, (double)*out, (double)least);
    return code;
}

/* ---- the shape ---- */

/* What the key says: the values of llama.cpp and of gguf's PoolingType. A file without pooling (0) is a model for text,
 * whose embeddings are the mean as they are without the key. */
static int read_pooling(struct model *model, struct error *error) {
    enum { FILE_NONE, FILE_MEAN, FILE_FIRST, FILE_LAST };
    struct key key = key_of(model, "pooling_type");
    uint32_t type = FILE_NONE;
    int code = find_key(model, "pooling_type") == NULL ? 0 : gguf_get_uint32(model->file, key.text, &type, error);
    model->pooling = type == FILE_NONE || type == FILE_MEAN ? POOLING_MEAN
                     : type == FILE_LAST                    ? POOLING_LAST
                                                            : POOLING_NONE;
    return code;
}

static int read_architecture(struct model *model, struct error *error) {
    struct gguf_string text;
    char shown[SHOWN_BYTES], names[ARCHITECTURE_NAMES_BYTES];
    int code = gguf_get_string(model->file, "general.architecture", &text, error);
    if (code != 0)
        return code;
    gguf_string_show(text, shown, sizeof shown);
    model->architecture = architecture_find(shown);
    if (model->architecture != NULL)
        return 0;
    architecture_names(names);
    return error_set(
        error, ERROR_UNSUPPORTED, "%s: architecture \"%s\" is not supported; these are: %s", model->path, shown, names);
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
    int code = get_size(model, "attention.head_count", &shape->heads, error);
    if (code != 0)
        return code;
    shape->kv_heads = shape->heads;
    code = get_optional_size(model, "attention.head_count_kv", &shape->kv_heads, error);
    if (code != 0)
        return code;
    if (shape->heads % shape->kv_heads != 0)
        return error_set(error, ERROR_FORMAT, "%s: %u query heads are no multiple of %u KV heads", model->path,
            shape->heads, shape->kv_heads);
    if (find_key(model, "attention.key_length") != NULL)
        code = get_size(model, "attention.key_length", &shape->head_dim, error);
    else if (shape->width % shape->heads != 0)
        code = error_set(error, ERROR_FORMAT, "%s: the width %u is no multiple of %u heads", model->path, shape->width,
            shape->heads);
    else
        shape->head_dim = shape->width / shape->heads;
    uint32_t value_length = shape->head_dim;
    if (code == 0)
        code = get_optional_size(model, "attention.value_length", &value_length, error);
    if (code != 0)
        return code;
    if (value_length != shape->head_dim)
        return error_set(error, ERROR_UNSUPPORTED, "%s: keys of %u and values of %u numbers a head are not supported",
            model->path, shape->head_dim, value_length);
    if (shape->head_dim % 2 != 0 || shape->head_dim > MODEL_HEAD_DIM_MAX)
        return error_set(error, ERROR_UNSUPPORTED, "%s: heads of %u numbers are not supported (even, at most %d)",
            model->path, shape->head_dim, MODEL_HEAD_DIM_MAX);
    return 0;
}

/* ---- rotation ---- */

static int read_scaling_kind(const struct model *model, struct rope_scaling *scaling, struct error *error) {
    static const struct {
        const char *name;
        enum rope_scaling_kind kind;
    } kinds[] = {{"none", ROPE_UNSCALED}, {"linear", ROPE_LINEAR}, {"yarn", ROPE_YARN}};
    struct gguf_string text;
    char shown[SHOWN_BYTES];
    scaling->kind = ROPE_LINEAR; /* a factor without a kind */
    if (find_key(model, "rope.scaling.type") == NULL)
        return 0;
    int code = gguf_get_string(model->file, key_of(model, "rope.scaling.type").text, &text, error);
    if (code != 0)
        return code;
    gguf_string_show(text, shown, sizeof shown);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(shown, kinds[i].name) == 0) {
            scaling->kind = kinds[i].kind;
            return 0;
        }
    return error_set(error, ERROR_UNSUPPORTED,
        "%s: rope scaling \"%s\" is not supported (linear and yarn are, and divisors in the tensor rope_freqs.weight)",
        model->path, shown);
}

static int read_yarn(const struct model *model, struct rope_scaling *scaling, struct error *error) {
    if (scaling->kind != ROPE_YARN)
        return 0;
    scaling->beta_fast = 32;
    scaling->beta_slow = 1;
    int code = get_size(model, "rope.scaling.original_context_length", &scaling->original_context, error);
    if (code == 0)
        code = get_optional_float(model, "rope.scaling.attn_factor", 0, &scaling->attention_factor, error);
    if (code == 0)
        code = get_optional_float(model, "rope.scaling.yarn_beta_fast", 1, &scaling->beta_fast, error);
    if (code == 0)
        code = get_optional_float(model, "rope.scaling.yarn_beta_slow", 0x1p-10F, &scaling->beta_slow, error);
    float multiplier = 0;
    if (code == 0)
        code = get_optional_float(model, "rope.scaling.yarn_log_multiplier", 0, &multiplier, error);
    if (code == 0 && multiplier != 0)
        code = error_set(error, ERROR_UNSUPPORTED, "%s: rope scaling (key \"%s\" is %g) is not supported", model->path,
            key_of(model, "rope.scaling.yarn_log_multiplier").text, (double)multiplier);
    /* Scores are multiplied as a whole, so all of a head must turn. */
    if (code == 0 && model->shape.rope_dim != model->shape.head_dim)
        code = error_set(error, ERROR_UNSUPPORTED,
            "%s: rope scaling \"yarn\" of %u of a head's %u numbers is not supported", model->path,
            model->shape.rope_dim, model->shape.head_dim);
    return code;
}

static int read_scaling(struct model *model, struct error *error) {
    struct rope_scaling *scaling = &model->shape.rope_scaling;
    scaling->factor = 1;
    int code = read_scaling_kind(model, scaling, error);
    if (code == 0)
        code = get_optional_float(model, "rope.scale_linear", 0, &scaling->factor, error);
    if (code == 0)
        code = get_optional_float(model, "rope.scaling.factor", 0, &scaling->factor, error);
    if (code == 0 && scaling->factor != 0 && scaling->factor < 1)
        code = error_set(error, ERROR_FORMAT, "%s: key \"%s\" is %g, below 1", model->path,
            key_of(model, "rope.scaling.factor").text, (double)scaling->factor);
    if (code != 0)
        return code;
    if (scaling->factor == 0 || scaling->factor == 1) /* 0 stands for "not given" in some files */
        *scaling = (struct rope_scaling){.kind = ROPE_UNSCALED, .factor = 1};
    return read_yarn(model, scaling, error);
}

static int read_rope(struct model *model, struct error *error) {
    struct model_shape *shape = &model->shape;
    shape->rope_dim = shape->head_dim;
    shape->rope_base = 10000;
    shape->rope_halves = (model->architecture->traits & TRAIT_HALVES) != 0;
    shape->local_rope_base = model->architecture->local_rope_base;
    int code = get_optional_size(model, "rope.dimension_count", &shape->rope_dim, error);
    if (code == 0)
        code = get_optional_float(model, "rope.freq_base", 0, &shape->rope_base, error);
    if (code == 0 && shape->local_rope_base > 0)
        code = get_optional_float(model, "rope.freq_base_swa", 1, &shape->local_rope_base, error);
    if (code != 0)
        return code;
    if (shape->rope_dim > shape->head_dim || shape->rope_dim % 2 != 0)
        return error_set(error, ERROR_FORMAT, "%s: key \"%s\" is %u, not even and at most %u", model->path,
            key_of(model, "rope.dimension_count").text, shape->rope_dim, shape->head_dim);
    if (!(shape->rope_base > 0))
        return error_set(error, ERROR_FORMAT, "%s: key \"%s\" is %g, not above 0", model->path,
            key_of(model, "rope.freq_base").text, (double)shape->rope_base);
    return read_scaling(model, error);
}

/* ---- traits ---- */

/* Keys of models that the architecture's name also covers, but that compute something else. */
static int check_variants(const struct model *model, struct error *error) {
    uint32_t experts = 0;
    bool causal = true;
    int code = 0;
    if (find_key(model, "expert_count") != NULL)
        code = gguf_get_uint32(model->file, key_of(model, "expert_count").text, &experts, error);
    if (code == 0 && find_key(model, "attention.causal") != NULL)
        code = gguf_get_bool(model->file, key_of(model, "attention.causal").text, &causal, error);
    if (code == 0 && experts != 0)
        code =
            error_set(error, ERROR_UNSUPPORTED, "%s: mixtures of experts (%u) are not supported", model->path, experts);
    if (code == 0 && !causal)
        code = error_set(error, ERROR_UNSUPPORTED, "%s: attention that is not causal is not supported", model->path);
    if (code == 0 && gguf_find_tensor(model->file, "rope_factors_long.weight") != NULL)
        code = error_set(error, ERROR_UNSUPPORTED,
            "%s: rope scaling \"longrope\" (tensor rope_factors_long.weight) is not supported", model->path);
    return code;
}

static int read_traits(struct model *model, struct error *error) {
    struct model_shape *shape = &model->shape;
    const struct architecture *architecture = model->architecture;
    uint32_t traits = architecture->traits;
    int code = 0;
    shape->gelu = (traits & TRAIT_GELU) != 0;
    if (traits & TRAIT_EMBEDDING_SCALE)
        shape->embedding_scale = sqrtf((float)shape->width);
    if (traits & TRAIT_CAPS) {
        code = get_optional_float(model, "attn_logit_softcapping", 0, &shape->score_cap, error);
        if (code == 0)
            code = get_optional_float(model, "final_logit_softcapping", 0, &shape->logit_cap, error);
    }
    double divisor =
        architecture_query_divisor(architecture, shape->layers, shape->width, shape->heads, shape->head_dim);
    double factor = (double)rope_score_factor(&shape->rope_scaling);
    if (divisor != shape->head_dim || factor != 1)
        shape->score_scale = (float)(factor / sqrt(divisor));
    return code;
}

/* The window of sliding layers; 0: there are none. */
static int read_window(const struct model *model, uint32_t *window, struct error *error) {
    struct key key = key_of(model, "attention.sliding_window");
    *window = 0;
    if (find_key(model, "attention.sliding_window") == NULL)
        return 0;
    int code = gguf_get_uint32(model->file, key.text, window, error);
    if (code != 0 || *window == 0 || *window >= model->shape.context)
        *window = 0; /* nothing ever leaves it */
    else if (!(model->architecture->traits & TRAIT_WINDOW))
        code = error_set(error, ERROR_UNSUPPORTED, "%s: sliding windows (key \"%s\" is %u) are not supported for %s",
            model->path, key.text, *window, model->architecture->name);
    return code;
}

static int read_period(const struct model *model, uint32_t *period, struct error *error) {
    const struct gguf_pair *pair = find_key(model, "attention.sliding_window_pattern");
    struct key key = key_of(model, "attention.sliding_window_pattern");
    *period = model->architecture->window_period;
    if (pair != NULL && pair->type == GGUF_ARRAY)
        return error_set(
            error, ERROR_UNSUPPORTED, "%s: key \"%s\" is a list, which is not supported", model->path, key.text);
    return pair != NULL ? gguf_get_uint32(model->file, key.text, period, error) : 0;
}

/* Which layers slide. */
static int read_windows(struct model *model, struct error *error) {
    uint32_t layers = model->shape.layers, window, period;
    int code = read_window(model, &window, error);
    if (code == 0)
        code = read_period(model, &period, error);
    if (code != 0)
        return code;
    model->windows = calloc(layers, sizeof *model->windows);
    model->global_layers = calloc(layers, sizeof *model->global_layers);
    if (model->windows == NULL || model->global_layers == NULL)
        return error_set(error, ERROR_MEMORY, "%s: no memory for %u layers", model->path, layers);
    for (uint32_t layer = 0; layer < layers; layer++) {
        bool global = window == 0 || (period != 0 && layer % period == period - 1);
        model->windows[layer] = model->layers[layer].window = global ? 0 : window;
        if (global)
            model->global_layers[model->shape.global_layers++] = layer;
    }
    return 0;
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
    int code = get_optional_size(model, "vocab_size", &stated, error);
    if (code == 0 && stated != rows)
        code = error_set(error, ERROR_FORMAT, "%s: token_embd.weight has %" PRIu64 " rows, but %s is %u", model->path,
            rows, key_of(model, "vocab_size").text, stated);
    if (code == 0 && tokens != NULL && tokens->count != rows)
        code = error_set(error, ERROR_FORMAT,
            "%s: token_embd.weight has %" PRIu64 " rows, but the tokenizer %" PRIu64 " tokens", model->path, rows,
            tokens->count);
    return code;
}

static int read_epsilon(struct model *model, struct error *error) {
    struct key key = key_of(model, "attention.layer_norm_rms_epsilon");
    int code = gguf_get_float(model->file, key.text, &model->shape.norm_epsilon, error);
    if (code == 0 && !(model->shape.norm_epsilon >= 0))
        code = error_set(error, ERROR_FORMAT, "%s: key \"%s\" is %g, below 0", model->path, key.text,
            (double)model->shape.norm_epsilon);
    return code;
}

static int read_shape(struct model *model, struct error *error) {
    struct model_shape *shape = &model->shape;
    int code = get_size(model, "block_count", &shape->layers, error);
    if (code == 0)
        code = get_size(model, "embedding_length", &shape->width, error);
    if (code == 0)
        code = get_size(model, "feed_forward_length", &shape->ff_width, error);
    if (code == 0)
        code = get_size(model, "context_length", &shape->context, error);
    if (code == 0)
        code = read_epsilon(model, error);
    if (code == 0)
        code = read_heads(model, error);
    if (code == 0)
        code = read_rope(model, error);
    if (code == 0)
        code = check_variants(model, error);
    if (code == 0)
        code = read_traits(model, error);
    if (code == 0)
        code = read_vocabulary(model, error);
    if (code == 0)
        code = read_pooling(model, error);
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
        if (is_planned(model, &layer_plan[i]) && strcmp(name, expected) == 0)
            return true;
    }
    return false;
}

/* Tensors that the model does not use would change what it computes: experts, further norms. */
static int check_unused(const struct model *model, struct error *error) {
    for (size_t i = 0; i < gguf_tensor_count(model->file); i++) {
        char shown[SHOWN_BYTES];
        gguf_string_show(gguf_tensor_at(model->file, i)->name, shown, sizeof shown);
        if (!is_used(model, shown))
            return error_set(error, ERROR_UNSUPPORTED, "%s: tensor %s is not supported", model->path, shown);
    }
    return 0;
}

/* Whether the file lacks what a layer may lack. Biases of queries, keys and values come together. */
static bool may_lack(const struct model *model, uint32_t layer, const struct tensor_plan *plan) {
    char name[NAME_BYTES];
    bool possible = plan->with == BIASES && (model->architecture->traits & TRAIT_BIASES) == 0;
    if (!possible && !plan->optional)
        return false;
    snprintf(name, sizeof name, "blk.%u.%s", layer, possible ? "attn_q.bias" : plan->name);
    return gguf_find_tensor(model->file, name) == NULL;
}

static int check_divisors(const struct model *model, struct error *error) {
    const struct tensor *tensor = &model->rope_divisors;
    float divisors[MODEL_HEAD_DIM_MAX];
    if (tensor->data == NULL)
        return 0;
    tensor_dequantise_row(tensor, 0, divisors);
    for (uint32_t i = 0; i < tensor->columns; i++)
        if (!(divisors[i] > 0 && isfinite(divisors[i])))
            return error_set(error, ERROR_FORMAT, "%s: tensor %s has a divisor of %g", model->path, tensor->name,
                (double)divisors[i]);
    return 0;
}

static void cut_fused(const struct model_shape *shape, struct model_layer *layer) {
    uint32_t queries = shape->heads * shape->head_dim, keys = shape->kv_heads * shape->head_dim;
    layer->attn_q = tensor_cut_rows(&layer->fused_qkv, 0, queries);
    layer->attn_k = tensor_cut_rows(&layer->fused_qkv, queries, keys);
    layer->attn_v = tensor_cut_rows(&layer->fused_qkv, queries + keys, keys);
    layer->ffn_gate = tensor_cut_rows(&layer->fused_gate_up, 0, shape->ff_width);
    layer->ffn_up = tensor_cut_rows(&layer->fused_gate_up, shape->ff_width, shape->ff_width);
}

static int take_layer(struct model *model, uint32_t layer, char (*names)[NAME_BYTES], struct error *error) {
    int code = 0;
    for (size_t i = 0; code == 0 && i < LAYER_TENSORS; i++) {
        const struct tensor_plan *plan = &layer_plan[i];
        struct tensor *out = (struct tensor *)((char *)&model->layers[layer] + plan->place);
        if (!is_planned(model, plan) || may_lack(model, layer, plan))
            continue;
        snprintf(names[i], NAME_BYTES, "blk.%u.%s", layer, plan->name);
        code = take_tensor(model, plan, names[i], out, error);
    }
    if (code == 0 && (model->architecture->traits & TRAIT_FUSED))
        cut_fused(&model->shape, &model->layers[layer]);
    return code;
}

/* Tensors that each layer has at least. */
static size_t layer_tensors_least(const struct model *model) {
    size_t count = 0;
    for (size_t i = 0; i < LAYER_TENSORS; i++)
        count += is_planned(model, &layer_plan[i]) && (layer_plan[i].with & TRAIT_BIASES_POSSIBLE) == 0;
    return count;
}

static int read_tensors(struct model *model, struct error *error) {
    uint32_t layers = model->shape.layers;
    if (layers > gguf_tensor_count(model->file) / layer_tensors_least(model))
        return error_set(error, ERROR_FORMAT, "%s: %u layers need more than the file's %zu tensors", model->path,
            layers, gguf_tensor_count(model->file));
    model->layers = calloc(layers, sizeof *model->layers);
    model->names = calloc(layers, LAYER_TENSORS * (size_t)NAME_BYTES);
    if (model->layers == NULL || model->names == NULL)
        return error_set(error, ERROR_MEMORY, "%s: no memory for %u layers", model->path, layers);
    int code = 0;
    for (size_t i = 0; code == 0 && i < MODEL_TENSORS; i++) {
        const struct tensor_plan *plan = &model_plan[i];
        if (!plan->optional || gguf_find_tensor(model->file, plan->name) != NULL)
            code = take_tensor(model, plan, plan->name, (struct tensor *)((char *)model + plan->place), error);
    }
    if (model->output.data == NULL)
        model->output = model->token_embedding;
    char(*names)[NAME_BYTES] = (char(*)[NAME_BYTES])model->names;
    for (uint32_t i = 0; code == 0 && i < layers; i++)
        code = take_layer(model, i, names + (size_t)i * LAYER_TENSORS, error);
    if (code == 0)
        code = check_divisors(model, error);
    if (code == 0)
        code = read_windows(model, error);
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
    if (data == NULL) /* the architecture has none */
        return;
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
    free(model->global_layers);
    free(model->windows);
    free(model);
}
