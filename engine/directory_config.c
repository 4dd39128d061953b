/* SPDX-License-Identifier: Apache-2.0
 *
 * config.json: the architecture's sizes, as a GGUF file names them.
 */
#include "engine/directory_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Fields of config.json that are numbers, and the ends of their keys. Those that are absent or null are left out. */
static const struct {
    const char *field;
    const char *key;
    bool is_real;
} numbers[] = {
    {"num_hidden_layers", "block_count", false},
    {"hidden_size", "embedding_length", false},
    {"intermediate_size", "feed_forward_length", false},
    {"max_position_embeddings", "context_length", false},
    {"num_attention_heads", "attention.head_count", false},
    {"num_key_value_heads", "attention.head_count_kv", false},
    {"vocab_size", "vocab_size", false},
    {"rms_norm_eps", "attention.layer_norm_rms_epsilon", true},
    {"attn_logit_softcapping", "attn_logit_softcapping", true},
    {"final_logit_softcapping", "final_logit_softcapping", true},
    {"rope_local_base_freq", "rope.freq_base_swa", true},
};

static int config_error(
    const struct directory *directory, int code, const char *field, const char *what, struct error *error) {
    return error_set(error, code, "%s/config.json: field \"%s\" %s", directory->path, field, what);
}

/* A whole number of config.json from 1 on; otherwise when it is absent. */
static int get_size(
    const struct directory *directory, const char *field, uint32_t otherwise, uint32_t *out, struct error *error) {
    const json_t *value = json_object_get(directory->config, field);
    *out = otherwise;
    if (value == NULL || json_is_null(value))
        return 0;
    if (!json_is_integer(value) || json_integer_value(value) < 1 || json_integer_value(value) > INT32_MAX)
        return config_error(directory, ERROR_FORMAT, field, "is not a positive integer", error);
    *out = (uint32_t)json_integer_value(value);
    return 0;
}

static void write_key(const struct directory *directory, const char *end, char key[128]) {
    snprintf(key, 128, "%s.%s", directory->architecture->name, end);
}

static int write_numbers(const struct directory *directory, struct metadata *metadata, struct error *error) {
    char key[128];
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        const json_t *value = json_object_get(directory->config, numbers[i].field);
        uint32_t size;
        if (value == NULL || json_is_null(value))
            continue;
        write_key(directory, numbers[i].key, key);
        if (numbers[i].is_real && !json_is_number(value))
            return config_error(directory, ERROR_FORMAT, numbers[i].field, "is not a number", error);
        if (numbers[i].is_real) {
            metadata_float(metadata, key, json_number_value(value));
            continue;
        }
        int code = get_size(directory, numbers[i].field, 0, &size, error);
        if (code != 0)
            return code;
        metadata_uint32(metadata, key, size);
    }
    return 0;
}

static int read_heads(struct directory *directory, struct metadata *metadata, struct error *error) {
    char key[128];
    int code = get_size(directory, "num_attention_heads", 0, &directory->heads, error);
    if (code == 0)
        code = get_size(directory, "hidden_size", 0, &directory->width, error);
    if (code == 0)
        code = get_size(directory, "num_hidden_layers", 0, &directory->layers, error);
    if (code == 0 && (directory->heads == 0 || directory->width == 0))
        return config_error(directory, ERROR_FORMAT, directory->heads == 0 ? "num_attention_heads" : "hidden_size",
            "is missing", error);
    if (code == 0)
        code = get_size(directory, "num_key_value_heads", directory->heads, &directory->kv_heads, error);
    if (code == 0)
        code = get_size(directory, "head_dim", directory->width / directory->heads, &directory->head_dim, error);
    if (code == 0)
        code = get_size(directory, "vocab_size", 0, &directory->vocabulary, error);
    if (code != 0)
        return code;
    write_key(directory, "attention.key_length", key);
    metadata_uint32(metadata, key, directory->head_dim);
    write_key(directory, "attention.value_length", key);
    metadata_uint32(metadata, key, directory->head_dim);
    return 0;
}

/* Which layers slide: all, or all but the last of each period. A list of them must say the same. */
static int read_layer_types(
    const struct directory *directory, bool slides, struct metadata *metadata, struct error *error) {
    const json_t *types = json_object_get(directory->config, "layer_types"), *type;
    uint32_t period = directory->architecture->window_period;
    char key[128], what[96];
    size_t layer;
    int code = get_size(directory, "_sliding_window_pattern", period, &period, error);
    if (code == 0)
        code = get_size(directory, "sliding_window_pattern", period, &period, error);
    if (code != 0)
        return code;
    json_array_foreach(types, layer, type) {
        bool global = !slides || (period != 0 && layer % period == period - 1);
        const char *name = json_string_value(type), *expected = global ? "full_attention" : "sliding_attention";
        if (name != NULL && strcmp(name, expected) == 0)
            continue;
        snprintf(what, sizeof what, "has another layer %zu than %s, which is not supported", layer, expected);
        return config_error(directory, ERROR_UNSUPPORTED, "layer_types", what, error);
    }
    if (slides && period != directory->architecture->window_period) {
        write_key(directory, "attention.sliding_window_pattern", key);
        metadata_uint32(metadata, key, period);
    }
    return 0;
}

/* Windows: where `use_sliding_window` is there (qwen), it must be true. */
static int read_window(const struct directory *directory, struct metadata *metadata, struct error *error) {
    const json_t *used = json_object_get(directory->config, "use_sliding_window");
    uint32_t window;
    char key[128];
    int code = get_size(directory, "sliding_window", 0, &window, error);
    if (code != 0)
        return code;
    bool slides = window != 0 && (used == NULL || json_is_true(used));
    if (slides) {
        write_key(directory, "attention.sliding_window", key);
        metadata_uint32(metadata, key, window);
    }
    return read_layer_types(directory, slides, metadata, error);
}

static double get_number(const json_t *object, const char *field, double otherwise) {
    const json_t *value = json_object_get(object, field);
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

/* What GGUF has no key for, since it follows from the architecture. */
static int check_traits(const struct directory *directory, struct error *error) {
    const struct architecture *architecture = directory->architecture;
    const char *expected = architecture->traits & TRAIT_GELU ? "gelu_pytorch_tanh" : "silu";
    const char *const activations[] = {"hidden_activation", "hidden_act"};
    double divisor = architecture_query_divisor(
        architecture, directory->layers, directory->width, directory->heads, directory->head_dim);
    char what[160];
    for (size_t i = 0; i < 2; i++) {
        const char *name = json_string_value(json_object_get(directory->config, activations[i]));
        if (name == NULL)
            continue;
        if (strcmp(name, expected) == 0)
            break; /* the first counts */
        snprintf(what, sizeof what, "is \"%.60s\", not \"%s\"", name, expected);
        return config_error(directory, ERROR_UNSUPPORTED, activations[i], what, error);
    }
    if (get_number(directory->config, "query_pre_attn_scalar", divisor) != divisor) {
        snprintf(what, sizeof what, "is not %g, as of all published models with %u layers", divisor, directory->layers);
        return config_error(directory, ERROR_UNSUPPORTED, "query_pre_attn_scalar", what, error);
    }
    if (json_is_true(json_object_get(directory->config, "use_bidirectional_attention")))
        return config_error(directory, ERROR_UNSUPPORTED, "use_bidirectional_attention", "is true", error);
    return 0;
}

/* Linear and yarn scaling have keys; Llama 3's becomes a tensor; others are told by their name. */
static int write_scaling(
    struct directory *directory, const json_t *scaling, struct metadata *metadata, struct error *error) {
    const json_t *named = json_object_get(scaling, "rope_type");
    const char *type = json_string_value(named != NULL ? named : json_object_get(scaling, "type"));
    char key[128], what[160];
    if (type == NULL || strcmp(type, "default") == 0)
        return 0;
    if (strcmp(type, "llama3") == 0) {
        directory->llama3 = scaling;
        return 0;
    }
    if (strcmp(type, "linear") != 0 && strcmp(type, "yarn") != 0) {
        snprintf(what, sizeof what, "has type \"%.80s\", which is not supported (linear, yarn and llama3 are)", type);
        return config_error(directory, ERROR_UNSUPPORTED, "rope_scaling", what, error);
    }
    static const struct {
        const char *field;
        double standard;
    } fixed[] = {{"attention_factor", 0}, {"mscale", 0}, {"mscale_all_dim", 0}, {"beta_fast", 32}, {"beta_slow", 1}};
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
        if (get_number(scaling, fixed[i].field, fixed[i].standard) == fixed[i].standard)
            continue;
        snprintf(what, sizeof what, "has %s, which is not supported", fixed[i].field);
        return config_error(directory, ERROR_UNSUPPORTED, "rope_scaling", what, error);
    }
    write_key(directory, "rope.scaling.type", key);
    metadata_string(metadata, key, type, strlen(type));
    write_key(directory, "rope.scaling.factor", key);
    metadata_float(metadata, key, get_number(scaling, "factor", 1));
    const json_t *original = json_object_get(scaling, "original_max_position_embeddings");
    if (json_is_integer(original) && json_integer_value(original) > 0 && json_integer_value(original) <= INT32_MAX) {
        write_key(directory, "rope.scaling.original_context_length", key);
        metadata_uint32(metadata, key, (uint32_t)json_integer_value(original));
    }
    return 0;
}

/* How many numbers of a head turn. */
static int read_rotated(
    const struct directory *directory, const json_t *parameters, struct metadata *metadata, struct error *error) {
    const char *field = "partial_rotary_factor";
    double part = get_number(parameters, field, get_number(directory->config, field, 1));
    char key[128];
    if (!(part > 0 && part <= 1))
        return config_error(directory, ERROR_FORMAT, field, "is not above 0 and at most 1", error);
    if (part != 1 && !(directory->architecture->traits & TRAIT_HALVES))
        return config_error(directory, ERROR_UNSUPPORTED, field, "is not 1", error);
    write_key(directory, "rope.dimension_count", key);
    metadata_uint32(metadata, key, (uint32_t)(directory->head_dim * part));
    return 0;
}

/* Newer files have all of it in rope_parameters, and there gemma's for each kind of layers. */
static int read_rope(struct directory *directory, struct metadata *metadata, struct error *error) {
    const json_t *parameters = json_object_get(directory->config, "rope_parameters");
    const json_t *scaling = json_object_get(directory->config, "rope_scaling");
    const json_t *sliding = json_object_get(parameters, "sliding_attention");
    const json_t *global = json_object_get(parameters, "full_attention");
    char key[128];
    if (json_is_object(global))
        parameters = global;
    directory->rope_base = get_number(parameters, "rope_theta", get_number(directory->config, "rope_theta", 10000));
    if (!(directory->rope_base > 0) || !isfinite(directory->rope_base))
        return config_error(directory, ERROR_FORMAT, "rope_theta", "is not above 0", error);
    write_key(directory, "rope.freq_base", key);
    metadata_float(metadata, key, directory->rope_base);
    const char *type = json_string_value(json_object_get(sliding, "rope_type"));
    if (type != NULL && strcmp(type, "default") != 0)
        return config_error(
            directory, ERROR_UNSUPPORTED, "rope_parameters", "scales layers that slide, which is not supported", error);
    if (json_is_number(json_object_get(sliding, "rope_theta"))) {
        write_key(directory, "rope.freq_base_swa", key);
        metadata_float(metadata, key, get_number(sliding, "rope_theta", 0));
    }
    int code = read_rotated(directory, parameters, metadata, error);
    return code != 0 ? code
                     : write_scaling(directory, json_is_object(parameters) ? parameters : scaling, metadata, error);
}

int directory_read_config(struct directory *directory, struct metadata *metadata, struct error *error) {
    const char *type = json_string_value(json_object_get(directory->config, "model_type"));
    if (type == NULL)
        return config_error(directory, ERROR_FORMAT, "model_type", "is missing", error);
    directory->architecture = architecture_find_type(type);
    if (directory->architecture == NULL) {
        char what[160];
        snprintf(what, sizeof what, "is \"%.80s\", which is not supported", type);
        return config_error(directory, ERROR_UNSUPPORTED, "model_type", what, error);
    }
    const char *architecture = directory->architecture->name;
    metadata_string(metadata, "general.architecture", architecture, strlen(architecture));
    int code = write_numbers(directory, metadata, error);
    if (code == 0)
        code = read_heads(directory, metadata, error);
    if (code == 0)
        code = check_traits(directory, error);
    if (code == 0)
        code = read_window(directory, metadata, error);
    if (code == 0)
        code = read_rope(directory, metadata, error);
    return code;
}
