/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors files of a directory, as tensors with GGUF's names and order of rows. A file is the length of a JSON
 * object (u64, little-endian), the object, then data; the object has for every tensor {"dtype", "shape",
 * "data_offsets": [from, to]} (bytes within the data).
 */
#include "engine/directory_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "engine/bytes.h"

enum { HEADER_MAX = 100 << 20, NAME_BYTES = 128 };

struct name_pair {
    const char *here;
    const char *gguf;
};

static const struct name_pair model_names[] = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
};

static const struct name_pair layer_names[] = {
    {"input_layernorm.weight", "attn_norm.weight"},
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"self_attn.q_proj.bias", "attn_q.bias"},
    {"self_attn.k_proj.bias", "attn_k.bias"},
    {"self_attn.v_proj.bias", "attn_v.bias"},
    {"self_attn.o_proj.bias", "attn_output.bias"},
    {"self_attn.q_norm.weight", "attn_q_norm.weight"},
    {"self_attn.k_norm.weight", "attn_k_norm.weight"},
    {"self_attn.qkv_proj.weight", "attn_qkv.weight"},
    {"mlp.gate_up_proj.weight", "ffn_up.weight"},
    {"mlp.gate_proj.weight", "ffn_gate.weight"},
    {"mlp.up_proj.weight", "ffn_up.weight"},
    {"mlp.down_proj.weight", "ffn_down.weight"},
    {"pre_feedforward_layernorm.weight", "ffn_norm.weight"},
    {"post_feedforward_layernorm.weight", "post_ffw_norm.weight"},
};

/* How a tensor's values become GGUF's. */
enum change { KEEP, INTERLEAVE, ADD_ONE, FACTORS };

struct shard_tensor {
    struct gguf_tensor tensor; /* its name is in `name` */
    char name[NAME_BYTES];
    enum change change;
    uint32_t heads; /* INTERLEAVE: rows are these */
};

struct reading {
    const struct directory *directory;
    struct gguf *gguf;
    struct shard_tensor *tensors;
    size_t count, capacity;
    struct error *error;
};

static int add_tensor(struct reading *reading, const struct shard_tensor *tensor) {
    if (reading->count == reading->capacity) {
        size_t capacity = reading->capacity == 0 ? 256 : 2 * reading->capacity;
        struct shard_tensor *tensors = realloc(reading->tensors, capacity * sizeof *tensors);
        if (tensors == NULL)
            return error_set(reading->error, ERROR_MEMORY, "%s: no memory for its tensors", reading->directory->path);
        reading->tensors = tensors;
        reading->capacity = capacity;
    }
    reading->tensors[reading->count++] = *tensor;
    return 0;
}

/* GGUF's name; the own name where GGUF has none, so that whoever looks at it says so. */
static void translate_name(const struct directory *directory, const char *name, char out[NAME_BYTES]) {
    unsigned layer;
    int end = 0;
    snprintf(out, NAME_BYTES, "%s", name);
    for (size_t i = 0; i < sizeof model_names / sizeof model_names[0]; i++)
        if (strcmp(name, model_names[i].here) == 0)
            snprintf(out, NAME_BYTES, "%s", model_names[i].gguf);
    if (sscanf(name, "model.layers.%7u.%n", &layer, &end) != 1 || end == 0)
        return;
    for (size_t i = 0; i < sizeof layer_names / sizeof layer_names[0]; i++)
        if (strcmp(name + end, layer_names[i].here) == 0)
            snprintf(out, NAME_BYTES, "blk.%u.%s", layer, layer_names[i].gguf);
    if (strcmp(name + end, "post_attention_layernorm.weight") == 0)
        snprintf(out, NAME_BYTES, "blk.%u.%s", layer,
            directory->architecture->traits & TRAIT_POST_NORMS ? "post_attention_norm.weight" : "ffn_norm.weight");
}

static bool ends_with(const char *text, const char *end) {
    size_t bytes = strlen(text), end_bytes = strlen(end);
    return bytes >= end_bytes && strcmp(text + bytes - end_bytes, end) == 0;
}

/* Tensors that are no weights, or another's once more. */
static bool is_left_out(const struct directory *directory, const char *name) {
    return ends_with(name, "rotary_emb.inv_freq") ||
           (strcmp(name, "lm_head.weight") == 0 &&
               json_is_true(json_object_get(directory->config, "tie_word_embeddings")));
}

static void choose_change(const struct directory *directory, struct shard_tensor *tensor) {
    const char *name = tensor->name;
    bool queries = ends_with(name, ".attn_q.weight") || ends_with(name, ".attn_q.bias");
    bool keys = ends_with(name, ".attn_k.weight") || ends_with(name, ".attn_k.bias");
    if (!(directory->architecture->traits & TRAIT_HALVES) && (queries || keys)) {
        tensor->change = INTERLEAVE;
        tensor->heads = queries ? directory->heads : directory->kv_heads;
    } else if ((directory->architecture->traits & TRAIT_NORMS_LESS_ONE) && ends_with(name, "norm.weight")) {
        tensor->change = ADD_ONE;
    }
}

static int find_dtype(const char *dtype, uint32_t *type) {
    static const struct {
        const char *name;
        enum tensor_type type;
    } dtypes[] = {{"F32", TENSOR_F32}, {"F16", TENSOR_F16}, {"BF16", TENSOR_BF16}};
    for (size_t i = 0; dtype != NULL && i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(dtype, dtypes[i].name) == 0) {
            *type = dtypes[i].type;
            return 0;
        }
    }
    return -1;
}

static int entry_error(const struct reading *reading, const char *file, const char *name, int code, const char *what) {
    return error_set(reading->error, code, "%s/%s: tensor \"%.100s\": %s", reading->directory->path, file, name, what);
}

static int read_entry(struct reading *reading, const char *file, const char *name, const json_t *entry,
    const uint8_t *data, size_t bytes) {
    const json_t *shape = json_object_get(entry, "shape"), *offsets = json_object_get(entry, "data_offsets");
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    struct shard_tensor found = {.change = KEEP};
    struct gguf_tensor *tensor = &found.tensor;
    if (strlen(name) >= NAME_BYTES)
        return entry_error(reading, file, name, ERROR_FORMAT, "its name is too long");
    if (is_left_out(reading->directory, name))
        return 0;
    if (find_dtype(dtype, &tensor->type) != 0) {
        char what[100];
        snprintf(what, sizeof what, "dtype %.40s is not supported (F32, F16 and BF16 are)", dtype ? dtype : "(none)");
        return entry_error(reading, file, name, ERROR_UNSUPPORTED, what);
    }
    tensor->dimensions = (uint32_t)json_array_size(shape);
    if (tensor->dimensions < 1 || tensor->dimensions > 4)
        return entry_error(reading, file, name, ERROR_FORMAT, "the number of dimensions is not 1 to 4");
    for (uint32_t i = 0; i < 4; i++) {
        const json_t *size = i < tensor->dimensions ? json_array_get(shape, tensor->dimensions - 1 - i) : NULL;
        if (size != NULL && (!json_is_integer(size) || json_integer_value(size) < 1))
            return entry_error(reading, file, name, ERROR_FORMAT, "a size is not a positive integer");
        tensor->size[i] = size != NULL ? (uint64_t)json_integer_value(size) : 1;
    }
    translate_name(reading->directory, name, found.name);
    tensor->name = (struct gguf_string){found.name, strlen(found.name)};
    int code = gguf_count_bytes(tensor, file, reading->error);
    if (code != 0)
        return code;
    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (!json_is_integer(first) || !json_is_integer(last) || json_array_size(offsets) != 2 ||
        json_integer_value(first) < 0 || json_integer_value(last) < json_integer_value(first) ||
        (uint64_t)json_integer_value(last) > bytes)
        return entry_error(reading, file, name, ERROR_FORMAT, "truncated or corrupt: data_offsets are not in the file");
    if ((uint64_t)(json_integer_value(last) - json_integer_value(first)) != tensor->bytes)
        return entry_error(reading, file, name, ERROR_FORMAT, "data_offsets and shape disagree");
    tensor->data = data + json_integer_value(first);
    tensor->offset = (uint64_t)(data - reading->gguf->mappings[reading->gguf->mapping_count - 1].data) +
                     (uint64_t)json_integer_value(first);
    choose_change(reading->directory, &found);
    if (found.change == INTERLEAVE) {
        uint64_t rows = tensor->dimensions == 1 ? tensor->size[0] : tensor->size[1];
        if (rows % (2 * (uint64_t)found.heads) != 0)
            return entry_error(reading, file, name, ERROR_FORMAT, "its rows are not whole heads of two halves");
    }
    return add_tensor(reading, &found);
}

static int read_header(struct reading *reading, const char *file, const struct gguf_mapping *mapping) {
    json_error_t problem;
    const char *name;
    json_t *entry;
    uint64_t length = mapping->bytes < 8 ? UINT64_MAX : load_u64(mapping->data);
    if (length > HEADER_MAX || length > mapping->bytes - 8)
        return error_set(reading->error, ERROR_FORMAT, "%s/%s: not a safetensors file, or truncated",
            reading->directory->path, file);
    json_t *header = json_loadb((const char *)mapping->data + 8, length, JSON_REJECT_DUPLICATES, &problem);
    if (header == NULL || !json_is_object(header)) {
        json_decref(header);
        return error_set(reading->error, ERROR_FORMAT, "%s/%s: the header is not a JSON object: %s",
            reading->directory->path, file, header == NULL ? problem.text : "another value");
    }
    int code = 0;
    json_object_foreach(header, name, entry) {
        if (code == 0 && strcmp(name, "__metadata__") != 0)
            code =
                read_entry(reading, file, name, entry, mapping->data + 8 + length, mapping->bytes - 8 - (size_t)length);
    }
    json_decref(header);
    return code;
}

static int read_shard(struct reading *reading, const char *file) {
    struct gguf_mapping mapping = {0};
    char *path = directory_join(reading->directory, file);
    if (path == NULL)
        return error_set(reading->error, ERROR_MEMORY, "%s: no memory", reading->directory->path);
    int code = gguf_map_file(path, &mapping, reading->error);
    free(path);
    if (code == 0)
        code = gguf_add_mapping(reading->gguf, mapping, reading->error);
    if (code != 0)
        return code;
    reading->gguf->other_bytes += mapping.bytes;
    return read_header(reading, file, &mapping);
}

/* The files of an index, each once; every tensor that it lists must then be there. */
static int read_index(struct reading *reading, const json_t *map) {
    const char *name;
    json_t *file, *files = json_object();
    int code = files == NULL ? error_set(reading->error, ERROR_MEMORY, "%s: no memory", reading->directory->path) : 0;
    json_object_foreach((json_t *)map, name, file) {
        const char *text = json_string_value(file);
        if (code == 0 && (text == NULL || text[0] == '\0' || strchr(text, '/') != NULL))
            code = error_set(reading->error, ERROR_FORMAT,
                "%s/model.safetensors.index.json: tensor \"%.100s\" is in no file of the directory",
                reading->directory->path, name);
        if (code != 0 || json_object_get(files, text) != NULL)
            continue;
        if (json_object_set(files, text, file) != 0)
            code = error_set(reading->error, ERROR_MEMORY, "%s: no memory", reading->directory->path);
        else
            code = read_shard(reading, text);
    }
    json_decref(files);
    return code;
}

static int read_shards(struct reading *reading) {
    json_t *index = NULL;
    int code = directory_read_json(reading->directory, "model.safetensors.index.json", false, &index, reading->error);
    if (code == 0 && index == NULL)
        return read_shard(reading, "model.safetensors");
    const json_t *map = json_object_get(index, "weight_map");
    if (code == 0 && !json_is_object(map))
        code = error_set(reading->error, ERROR_FORMAT, "%s/model.safetensors.index.json: weight_map is missing",
            reading->directory->path);
    if (code == 0)
        code = read_index(reading, map);
    json_decref(index);
    return code;
}

/* Llama 3: low frequencies are divided by the factor, high ones stay, between them it is interpolated. */
static int add_factors(struct reading *reading) {
    struct shard_tensor factors = {.name = "rope_freqs.weight", .change = FACTORS};
    if (reading->directory->llama3 == NULL)
        return 0;
    factors.tensor = (struct gguf_tensor){.type = TENSOR_F32, .dimensions = 1, .size = {1, 1, 1, 1}};
    factors.tensor.size[0] = reading->directory->head_dim / 2;
    int code = gguf_count_bytes(&factors.tensor, reading->directory->path, reading->error);
    return code != 0 ? code : add_tensor(reading, &factors);
}

static int write_factors(const struct reading *reading, float *out) {
    const struct directory *directory = reading->directory;
    static const char *const fields[] = {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"};
    double values[4];
    for (int i = 0; i < 4; i++) {
        const json_t *value = json_object_get(directory->llama3, fields[i]);
        values[i] = json_is_number(value) ? json_number_value(value) : 0;
        if (!(values[i] > 0) || !isfinite(values[i]))
            return error_set(reading->error, ERROR_FORMAT, "%s/config.json: %s of the rope scaling is not above 0",
                directory->path, fields[i]);
    }
    const double factor = values[0], low = values[1], high = values[2], context = values[3];
    for (uint32_t i = 0; i < directory->head_dim / 2; i++) {
        double wave = 2 * M_PI * pow(directory->rope_base, 2.0 * i / directory->head_dim);
        double smooth = (context / wave - low) / (high - low);
        if (wave < context / high)
            out[i] = 1;
        else if (wave > context / low)
            out[i] = (float)factor;
        else
            out[i] = (float)(1 / ((1 - smooth) / factor + smooth));
    }
    return 0;
}

/* Rows of a head are (first halves, second halves) of the pairs; GGUF has pair after pair. */
static void interleave(const struct shard_tensor *from, uint8_t *out) {
    const struct gguf_tensor *tensor = &from->tensor;
    uint64_t rows = tensor->dimensions == 1 ? tensor->size[0] : tensor->size[1];
    size_t row_bytes = tensor->bytes / rows, head_rows = rows / from->heads;
    for (uint64_t row = 0; row < rows; row++) {
        size_t head = row / head_rows, at = row % head_rows;
        size_t source = head * head_rows + at / 2 + (at % 2) * (head_rows / 2);
        memcpy(out + row * row_bytes, (const uint8_t *)tensor->data + source * row_bytes, row_bytes);
    }
}

static size_t changed_bytes(const struct shard_tensor *tensor) {
    uint64_t values = tensor->tensor.size[0] * tensor->tensor.size[1] * tensor->tensor.size[2] * tensor->tensor.size[3];
    size_t bytes = tensor->change == KEEP         ? 0
                   : tensor->change == INTERLEAVE ? tensor->tensor.bytes
                                                  : values * sizeof(float);
    return (bytes + 63) / 64 * 64;
}

static int change_tensor(const struct reading *reading, struct shard_tensor *found, uint8_t *out) {
    struct gguf_tensor *tensor = &found->tensor;
    int code = 0;
    if (found->change == INTERLEAVE) {
        interleave(found, out);
    } else if (found->change == FACTORS) {
        code = write_factors(reading, (float *)out);
    } else {
        uint64_t values = tensor->size[0] * tensor->size[1] * tensor->size[2] * tensor->size[3];
        struct tensor row = {.name = found->name,
            .type = (enum tensor_type)tensor->type,
            .rows = 1,
            .columns = (uint32_t)values,
            .data = tensor->data,
            .bytes = tensor->bytes};
        tensor_dequantise_row(&row, 0, (float *)out);
        for (uint64_t i = 0; i < values; i++)
            ((float *)out)[i] += 1;
        tensor->type = TENSOR_F32;
        tensor->bytes = values * sizeof(float);
    }
    tensor->data = out;
    return code;
}

/* All that are changed, in memory of their own. */
static int change_tensors(struct reading *reading) {
    struct gguf_mapping memory = {0};
    for (size_t i = 0; i < reading->count; i++)
        memory.bytes += changed_bytes(&reading->tensors[i]);
    if (memory.bytes == 0)
        return 0;
    memory.data = mmap(NULL, memory.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory.data == MAP_FAILED)
        return error_set(reading->error, ERROR_MEMORY, "%s: no memory to reorder queries and keys, %zu bytes",
            reading->directory->path, memory.bytes);
    uint8_t *out = memory.data;
    int code = gguf_add_mapping(reading->gguf, memory, reading->error);
    for (size_t i = 0; code == 0 && i < reading->count; i++) {
        size_t bytes = changed_bytes(&reading->tensors[i]);
        if (bytes > 0)
            code = change_tensor(reading, &reading->tensors[i], out);
        out += bytes;
    }
    return code;
}

/* Names move to memory that gguf owns, by name so that the order of a hash table does not show. */
static int compare_tensors(const void *a, const void *b) {
    return strcmp(((const struct shard_tensor *)a)->name, ((const struct shard_tensor *)b)->name);
}

static int hand_over(struct reading *reading) {
    struct gguf_tensor *tensors = calloc(reading->count + 1, sizeof *tensors);
    char(*names)[NAME_BYTES] = calloc(reading->count + 1, sizeof *names);
    reading->gguf->names = names;
    if (tensors == NULL || names == NULL) {
        free(tensors);
        return error_set(reading->error, ERROR_MEMORY, "%s: no memory for its tensors", reading->directory->path);
    }
    if (reading->count > 0)
        qsort(reading->tensors, reading->count, sizeof *reading->tensors, compare_tensors);
    for (size_t i = 0; i < reading->count; i++) {
        tensors[i] = reading->tensors[i].tensor;
        memcpy(names[i], reading->tensors[i].name, NAME_BYTES);
        tensors[i].name = (struct gguf_string){names[i], strlen(names[i])};
    }
    int code = gguf_add_tensors(reading->gguf, tensors, reading->count, reading->error);
    free(tensors);
    return code;
}

int directory_read_tensors(const struct directory *directory, struct gguf *gguf, struct error *error) {
    struct reading reading = {.directory = directory, .gguf = gguf, .error = error};
    int code = read_shards(&reading);
    if (code == 0)
        code = add_factors(&reading);
    if (code == 0)
        code = change_tensors(&reading);
    if (code == 0)
        code = hand_over(&reading);
    free(reading.tensors);
    return code;
}
