/* SPDX-License-Identifier: Apache-2.0
 *
 * Model directories. An input is three files, each [length, 2 bytes, little-endian][bytes], the last without a length:
 * config.json, tokenizer.json and model.safetensors. Opening the directory fails with a message, or gives a file of
 * which every byte that it points to can be read, and whose tokenizer encodes to ids of its vocabulary.
 */
#include "tests/fuzz/fuzz.h"

#include "engine/model.h"
#include "engine/tokenizer.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILES = 3 };
static const char *const names[FILES] = {"config.json", "tokenizer.json", "model.safetensors"};
static char folder[] = "/tmp/fuzz-directory-XXXXXX";
static volatile uint8_t sink;

static void expect(bool condition) {
    if (!condition)
        abort();
}

static void path_of(int file, char *path, size_t size) {
    snprintf(path, size, "%s/%s", folder, names[file]);
}

static void remove_folder(void) {
    char path[128];
    for (int i = 0; i < FILES; i++) {
        path_of(i, path, sizeof path);
        unlink(path);
    }
    rmdir(folder);
}

/* Anew each time: a mapping of a file that shrinks would lose its pages. */
static void write_file(int file, const uint8_t *data, size_t bytes) {
    char path[128];
    path_of(file, path, sizeof path);
    unlink(path);
    FILE *out = fopen(path, "wb");
    expect(out != NULL && fwrite(data, 1, bytes, out) == bytes && fclose(out) == 0);
}

static void write_files(const uint8_t *data, size_t bytes) {
    static bool made;
    if (!made) {
        expect(mkdtemp(folder) != NULL && atexit(remove_folder) == 0);
        made = true;
    }
    for (int i = 0; i < FILES; i++) {
        size_t length = bytes;
        if (i < FILES - 1) {
            length = bytes < 2 ? 0 : (size_t)(data[0] | data[1] << 8);
            data += bytes < 2 ? bytes : 2;
            bytes -= bytes < 2 ? bytes : 2;
            length = length < bytes ? length : bytes;
        }
        write_file(i, data, length);
        data += length;
        bytes -= length;
    }
}

static void read_tensors(const struct gguf *gguf) {
    for (size_t i = 0; i < gguf_tensor_count(gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor_at(gguf, i);
        for (size_t j = 0; j < tensor->name.bytes; j++)
            sink ^= (uint8_t)tensor->name.text[j];
        for (size_t j = 0; j < tensor->bytes; j++)
            sink ^= ((const uint8_t *)tensor->data)[j];
    }
}

static void encode(const struct gguf *gguf) {
    static const char text[] = "a <s>b\xff \xe4\xbd\xa0  ab</s>";
    struct error error = {0};
    struct tokenizer *tokenizer = tokenizer_create(gguf, &error);
    struct token_list list = {0};
    expect(tokenizer != NULL || (error.code < 0 && error.message[0] != '\0'));
    if (tokenizer != NULL)
        expect(tokenizer_encode(tokenizer, text, sizeof text - 1, true, &list, NULL) == 0);
    for (size_t i = 0; i < list.count; i++)
        expect(list.ids[i] >= 0 && (uint32_t)list.ids[i] < tokenizer_vocabulary(tokenizer));
    token_list_free(&list);
    tokenizer_free(tokenizer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct error error = {0};
    write_files(data, bytes);
    struct gguf *gguf = gguf_open(folder, &error);
    expect(gguf != NULL || (error.code < 0 && error.message[0] != '\0'));
    if (gguf == NULL)
        return 0;
    read_tensors(gguf);
    encode(gguf);
    gguf_free(gguf);
    model_free(model_open(folder, &error));
    return 0;
}

/* One layer of one head of 2, width 4. */
static size_t write_tensors(char *out, const char *dtype, size_t value_bytes) {
    static const struct {
        const char *name;
        int rows; /* 0: a vector of 4 */
    } tensors[] = {{"model.embed_tokens.weight", 6}, {"model.norm.weight", 0},
        {"model.layers.0.input_layernorm.weight", 0}, {"model.layers.0.self_attn.q_proj.weight", 4},
        {"model.layers.0.self_attn.k_proj.weight", 4}, {"model.layers.0.self_attn.v_proj.weight", 4},
        {"model.layers.0.self_attn.o_proj.weight", 4}, {"model.layers.0.post_attention_layernorm.weight", 0},
        {"model.layers.0.mlp.gate_proj.weight", 4}, {"model.layers.0.mlp.up_proj.weight", 4},
        {"model.layers.0.mlp.down_proj.weight", 4}};
    size_t at = 8, data = 0;
    out[at++] = '{';
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        size_t bytes = (tensors[i].rows == 0 ? 1 : (size_t)tensors[i].rows) * 4 * value_bytes;
        at += (size_t)sprintf(
            out + at, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i == 0 ? "" : ",", tensors[i].name, dtype);
        at += (size_t)(tensors[i].rows == 0 ? sprintf(out + at, "4]") : sprintf(out + at, "%d,4]", tensors[i].rows));
        at += (size_t)sprintf(out + at, ",\"data_offsets\":[%zu,%zu]}", data, data + bytes);
        data += bytes;
    }
    out[at++] = '}';
    for (int i = 0; i < 8; i++)
        out[i] = (char)((at - 8) >> (8 * i));
    memset(out + at, 0x3c, data);
    return at + data;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const char *const configs[] = {
        "{\"model_type\":\"llama\",\"hidden_size\":4,\"num_hidden_layers\":1,\"intermediate_size\":4,"
        "\"num_attention_heads\":2,\"num_key_value_heads\":2,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,"
        "\"vocab_size\":6,\"tie_word_embeddings\":true,\"eos_token_id\":[1,2],\"rope_scaling\":{\"rope_type\":"
        "\"llama3\","
        "\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_embeddings\":32}}",
        "{\"model_type\":\"gemma2\",\"hidden_size\":4,\"num_hidden_layers\":1,\"intermediate_size\":4,"
        "\"num_attention_heads\":1,\"head_dim\":4,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"vocab_size\":"
        "6}"};
    static const char *const tokenizers[] = {
        "{\"added_tokens\":[{\"id\":0,\"content\":\"<s>\",\"special\":true},{\"id\":1,\"content\":\"</"
        "s>\",\"special\":true}],"
        "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"use_regex\":true},\"post_processor\":{"
        "\"type\":"
        "\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}]},"
        "\"model\":"
        "{\"type\":\"BPE\",\"vocab\":{\"a\":2,\"b\":3,\"ab\":4},\"merges\":[\"a b\"]}}",
        "{\"added_tokens\":[{\"id\":0,\"content\":\"<unk>\",\"special\":true}],\"normalizer\":{\"type\":\"Sequence\","
        "\"normalizers\":[{\"type\":\"Prepend\"},{\"type\":\"Replace\"}]},\"pre_tokenizer\":null,\"model\":{\"type\":"
        "\"BPE\","
        "\"byte_fallback\":true,\"unk_token\":\"<unk>\",\"vocab\":{\"<unk>\":0,\"<0xFF>\":1,\"\u2581\":2,\"a\":3,"
        "\"\u2581"
        "a\":4},\"merges\":[[\"\u2581\",\"a\"]]}}"};
    static const char *const dtypes[] = {"F32", "BF16"};
    enum { SEEDS = 2, SIZE_MAX_OF_SEED = 8192 };
    if (index >= SEEDS)
        return NULL;
    uint8_t *seed = malloc(SIZE_MAX_OF_SEED);
    expect(seed != NULL);
    const char *const texts[] = {configs[index], tokenizers[index]};
    size_t at = 0;
    for (int i = 0; i < 2; i++) {
        size_t length = strlen(texts[i]);
        seed[at++] = (uint8_t)length;
        seed[at++] = (uint8_t)(length >> 8);
        memcpy(seed + at, texts[i], length);
        at += length;
    }
    at += write_tensors((char *)seed + at, dtypes[index], index == 0 ? 4 : 2);
    expect(at <= SIZE_MAX_OF_SEED);
    *bytes = at;
    return seed;
}
