/* SPDX-License-Identifier: Apache-2.0
 *
 * GGUF files and models: whatever the bytes, opening either fails with a message or gives a directory of which every
 * byte that it points to can be read.
 */
#include "tests/fuzz/fuzz.h"

#include "engine/model.h"
#include "tests/unit/tiny_llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static volatile uint8_t sink;

static void read_all(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        sink ^= ((const uint8_t *)data)[i];
}

static void expect(bool condition) {
    if (!condition)
        abort();
}

static void read_pair(const struct gguf_pair *pair) {
    read_all(pair->key.text, pair->key.bytes);
    for (uint64_t i = 0; i < pair->count; i++) {
        if (pair->strings != NULL)
            read_all(pair->strings[i].text, pair->strings[i].bytes);
        else if (pair->type == GGUF_ARRAY)
            sink ^= (uint8_t)(gguf_array_int(pair, i) + (gguf_array_float(pair, i) > 1));
    }
}

static void read_pairs(const struct gguf *gguf) {
    for (size_t i = 0; i < gguf_pair_count(gguf); i++) {
        const struct gguf_pair *pair = gguf_pair_at(gguf, i);
        char key[128];
        uint32_t number;
        float real;
        bool truth;
        struct gguf_string string;
        read_pair(pair);
        gguf_string_show(pair->key, key, sizeof key);
        gguf_get_uint32(gguf, key, &number, NULL);
        gguf_get_float(gguf, key, &real, NULL);
        gguf_get_bool(gguf, key, &truth, NULL);
        gguf_get_string(gguf, key, &string, NULL);
    }
}

static void read_directory(const struct gguf *gguf) {
    read_pairs(gguf);
    for (size_t i = 0; i < gguf_tensor_count(gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor_at(gguf, i);
        read_all(tensor->name.text, tensor->name.bytes);
        if (tensor->data != NULL)
            read_all(tensor->data, tensor->bytes);
    }
}

static void read_tensor(const struct tensor *tensor) {
    float *row = malloc(tensor->columns * sizeof *row);
    expect(row != NULL);
    tensor_dequantise_row(tensor, 0, row);
    tensor_dequantise_row(tensor, tensor->rows - 1, row);
    free(row);
}

/* Through a file without a name, since models are opened by path. */
static void open_model(const uint8_t *data, size_t bytes) {
    static int descriptor = -1;
    char path[64];
    struct error error = {0};
    if (descriptor < 0)
        descriptor = memfd_create("fuzz", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, 0) != 0 || pwrite(descriptor, data, bytes, 0) != (ssize_t)bytes)
        return;
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    struct model *model = model_open(path, &error);
    expect(model != NULL || (error.code < 0 && error.message[0] != '\0'));
    for (uint32_t i = 0; model != NULL && i < model->shape.layers; i++) {
        read_tensor(&model->layers[i].attn_q);
        read_tensor(&model->layers[i].ffn_down);
    }
    if (model != NULL)
        read_tensor(&model->output);
    model_free(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct error error = {0};
    struct gguf *gguf = gguf_open_memory(data, bytes, "input", &error);
    if (gguf == NULL) {
        expect(error.code < 0 && error.message[0] != '\0');
        return 0;
    }
    read_directory(gguf);
    gguf_free(gguf);
    open_model(data, bytes);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    struct tiny_llama options = tiny_llama_default();
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_Q4_1};
    if (index >= sizeof types / sizeof types[0])
        return NULL;
    options.layers = 1;
    options.heads = 2;
    options.kv_heads = 1;
    options.width = options.ff_width = 32;
    options.vocabulary = index == 0 ? 262 : 2;
    options.type = options.embedding_type = types[index];
    options.tied = index % 2 == 0;
    return tiny_llama_create(&options, bytes);
}
