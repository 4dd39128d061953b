/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/tiny_llama.h"

#include "engine/random.h"
#include "tests/unit/quantise.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTE_TOKENS = 3, PAIR_TOKENS = BYTE_TOKENS + 256, TEXT_BYTES = 24 };

struct tiny_llama tiny_llama_default(void) {
    return (struct tiny_llama){.layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 16,
        .width = 64,
        .ff_width = 96,
        .vocabulary = 320,
        .context = 512,
        .type = TENSOR_F32,
        .embedding_type = TENSOR_F32,
        .tied = true,
        .seed = 1};
}

struct tiny_llama tiny_llama_for_ranks(uint32_t ranks, enum tensor_type type) {
    struct tiny_llama shape = tiny_llama_default();
    shape.heads = 2 * ranks;
    shape.kv_heads = ranks;
    shape.ff_width = 32 * ranks;
    shape.head_dim = 32;
    shape.vocabulary = 321; /* not the same for all */
    shape.type = type;
    shape.embedding_type = type == TENSOR_F32 ? type : TENSOR_Q8_0;
    return shape;
}

void tiny_llama_write_shape(struct gguf_writer *writer, const struct tiny_llama *options) {
    gguf_writer_string(writer, "general.architecture", "llama");
    gguf_writer_string(writer, "general.name", "tiny");
    gguf_writer_uint32(writer, "llama.block_count", options->layers);
    gguf_writer_uint32(writer, "llama.context_length", options->context);
    gguf_writer_uint32(writer, "llama.embedding_length", options->width);
    gguf_writer_uint32(writer, "llama.feed_forward_length", options->ff_width);
    gguf_writer_uint32(writer, "llama.attention.head_count", options->heads);
    gguf_writer_uint32(writer, "llama.attention.head_count_kv", options->kv_heads);
    if (options->window > 0) {
        gguf_writer_uint32(writer, "llama.attention.sliding_window", options->window);
        gguf_writer_uint32(writer, "llama.attention.sliding_window_pattern", 2);
    }
    gguf_writer_uint32(writer, "llama.attention.key_length", options->head_dim);
    gguf_writer_uint32(writer, "llama.attention.value_length", options->head_dim);
    gguf_writer_uint32(writer, "llama.rope.dimension_count", options->head_dim);
    gguf_writer_float(writer, "llama.rope.freq_base", 10000);
    gguf_writer_float(writer, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_writer_uint32(writer, "llama.vocab_size", options->vocabulary);
}

/* GPT-2's alphabet: a printable character for each byte, as UTF-8. */
static void byte_text(unsigned byte, char *out) {
    unsigned character = byte;
    bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    if (!printable) /* the others follow from 256 on, in byte order: 0 to 32, 127 to 160, 173 */
        character = 256 + (byte <= 32 ? byte : byte <= 160 ? byte - 127 + 33 : 67);
    if (character < 128)
        sprintf(out, "%c", (char)character);
    else
        sprintf(out, "%c%c", (char)(0xc0 | character >> 6), (char)(0x80 | (character & 63)));
}

static void token_text(uint32_t token, char *out) {
    static const char *const special[BYTE_TOKENS] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    uint32_t pair = token - PAIR_TOKENS;
    if (token < BYTE_TOKENS)
        sprintf(out, "%s", special[token]);
    else if (token < PAIR_TOKENS)
        byte_text(token - BYTE_TOKENS, out);
    else if (pair < 26 * 26)
        sprintf(out, "%c%c", 'a' + (char)(pair / 26), 'a' + (char)(pair % 26));
    else
        sprintf(out, "<unused%u>", token);
}

void tiny_llama_write_tokenizer(struct gguf_writer *writer, const struct tiny_llama *options) {
    uint32_t count = options->vocabulary;
    uint32_t pairs = count < PAIR_TOKENS ? 0 : count - PAIR_TOKENS < 26 * 26 ? count - PAIR_TOKENS : 26 * 26;
    char(*texts)[TEXT_BYTES] = calloc(count + pairs + 1, sizeof *texts);
    const char **pointers = calloc(count + pairs + 1, sizeof *pointers);
    int32_t *types = calloc(count + 1, sizeof *types);
    if (texts == NULL || pointers == NULL || types == NULL)
        abort();
    for (uint32_t i = 0; i < count; i++) {
        token_text(i, texts[i]);
        types[i] = i < BYTE_TOKENS ? 3 : 1; /* control, normal */
    }
    for (uint32_t i = 0; i < pairs; i++)
        sprintf(texts[count + i], "%c %c", 'a' + (char)(i / 26), 'a' + (char)(i % 26));
    for (uint32_t i = 0; i < count + pairs; i++)
        pointers[i] = texts[i];
    gguf_writer_string(writer, "tokenizer.ggml.model", "gpt2");
    gguf_writer_string(writer, "tokenizer.ggml.pre", "smollm");
    gguf_writer_strings(writer, "tokenizer.ggml.tokens", pointers, count);
    gguf_writer_int32s(writer, "tokenizer.ggml.token_type", types, count);
    gguf_writer_strings(writer, "tokenizer.ggml.merges", pointers + count, pairs);
    gguf_writer_uint32(writer, "tokenizer.ggml.bos_token_id", 1);
    gguf_writer_uint32(writer, "tokenizer.ggml.eos_token_id", 2);
    gguf_writer_bool(writer, "tokenizer.ggml.add_bos_token", options->adds_bos);
    free(texts);
    free(pointers);
    free(types);
}

/* A matrix [rows, columns] of uniform numbers of mean `mean` and half-width `spread`. */
static void write_tensor(struct gguf_writer *writer, const struct tiny_llama *options, const char *name,
    enum tensor_type type, uint32_t rows, uint32_t columns, float mean, float spread) {
    size_t row_bytes = tensor_row_bytes(type, columns);
    float *row = calloc(columns, sizeof *row);
    uint8_t *data = calloc(rows, row_bytes);
    if (row == NULL || data == NULL)
        abort();
    uint32_t stream = 0; /* each tensor's own random numbers */
    for (const char *c = name; *c != '\0'; c++)
        stream = stream * 31 + (uint8_t)*c;
    for (uint32_t i = 0; i < rows; i++) {
        for (uint32_t j = 0; j < columns; j++)
            row[j] = mean + spread * (2 * random_uniform(options->seed, stream, i, j) - 1);
        bool louder = options->newline_gain > 0 && i == BYTE_TOKENS + '\n' && strcmp(name, "token_embd.weight") == 0;
        for (uint32_t j = 0; louder && j < columns; j++)
            row[j] *= options->newline_gain;
        test_quantise(type, row, columns, data + i * row_bytes);
    }
    gguf_writer_tensor(writer, name, type, rows == 1 ? 1 : 2, (uint64_t[]){columns, rows}, data, rows * row_bytes);
    free(row);
    free(data);
}

/* Variance 1 / columns keeps activations of order 1 through the layers. */
static void write_matrix(struct gguf_writer *writer, const struct tiny_llama *options, uint32_t layer, const char *name,
    uint32_t rows, uint32_t columns) {
    char full[64];
    snprintf(full, sizeof full, "blk.%u.%s.weight", layer, name);
    write_tensor(writer, options, full, options->type, rows, columns, 0, sqrtf(3.0f / (float)columns));
}

static void write_norm(struct gguf_writer *writer, const struct tiny_llama *options, uint32_t layer, const char *name) {
    char full[64];
    snprintf(full, sizeof full, "blk.%u.%s.weight", layer, name);
    write_tensor(writer, options, full, TENSOR_F32, 1, options->width, 1, 0.5f);
}

void tiny_llama_write_tensors(struct gguf_writer *writer, const struct tiny_llama *options) {
    uint32_t width = options->width;
    float spread = 4 * sqrtf(3.0f / (float)width); /* logits of standard deviation about 4 */
    write_tensor(writer, options, "token_embd.weight", options->embedding_type, options->vocabulary, width, 0, spread);
    write_tensor(writer, options, "output_norm.weight", TENSOR_F32, 1, width, options->broken ? NAN : 1, 0.5f);
    if (!options->tied)
        write_tensor(writer, options, "output.weight", options->embedding_type, options->vocabulary, width, 0, spread);
    for (uint32_t i = 0; i < options->layers; i++) {
        write_norm(writer, options, i, "attn_norm");
        write_matrix(writer, options, i, "attn_q", options->heads * options->head_dim, width);
        write_matrix(writer, options, i, "attn_k", options->kv_heads * options->head_dim, width);
        write_matrix(writer, options, i, "attn_v", options->kv_heads * options->head_dim, width);
        write_matrix(writer, options, i, "attn_output", width, options->heads * options->head_dim);
        write_norm(writer, options, i, "ffn_norm");
        write_matrix(writer, options, i, "ffn_gate", options->ff_width, width);
        write_matrix(writer, options, i, "ffn_up", options->ff_width, width);
        write_matrix(writer, options, i, "ffn_down", width, options->ff_width);
    }
}

uint8_t *tiny_llama_create(const struct tiny_llama *options, size_t *bytes) {
    struct gguf_writer *writer = gguf_writer_create();
    tiny_llama_write_shape(writer, options);
    if (options->vocabulary >= PAIR_TOKENS)
        tiny_llama_write_tokenizer(writer, options);
    tiny_llama_write_tensors(writer, options);
    return gguf_writer_finish(writer, bytes);
}

char *tiny_llama_save(const struct tiny_llama *options) {
    size_t bytes;
    uint8_t *data = tiny_llama_create(options, &bytes);
    char *path = test_file_create(data, bytes);
    free(data);
    return path;
}
