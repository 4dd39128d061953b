/* SPDX-License-Identifier: Apache-2.0
 *
 * Small random models of architecture `llama`, as GGUF files, for tests that must not need the real one. The same
 * options give the same bytes everywhere.
 *
 *   struct tiny_llama options = tiny_llama_default();
 *   options.type = TENSOR_Q4_1;
 *   char *path = tiny_llama_save(&options);
 *   struct model *model = model_open(path, &error);
 *   unlink(path), free(path);                         // the mapping stays valid
 */
#ifndef TESTS_UNIT_TINY_LLAMA_H
#define TESTS_UNIT_TINY_LLAMA_H

#include "tests/unit/gguf_writer.h"

struct tiny_llama {
    uint32_t layers;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim; /* width and heads * head_dim may differ */
    uint32_t width;
    uint32_t ff_width;
    uint32_t vocabulary; /* 259 and more: with a tokenizer */
    uint32_t context;
    enum tensor_type type;           /* of the layers' matrices */
    enum tensor_type embedding_type; /* of token_embd and output */
    bool tied;                       /* without a tensor output.weight */
    bool broken;                     /* output_norm is NaN, and so are all logits */
    float newline_gain;              /* times the row of token_embd of the line break, to make it likely; 0: 1 */
    bool adds_bos;                   /* prompts begin with token 1 */
    uint32_t window;                 /* of every second layer, the first included; 0: none */
    uint64_t seed;
};

/* 2 layers, 4 heads over 2 KV heads of 16, width 64, ff 96, 320 tokens, context 512, F32, tied, seed 1. */
struct tiny_llama tiny_llama_default(void);
/* One KV head with two query heads of 32 and 32 columns of ff for each rank, 321 tokens, which ranks have unevenly. */
struct tiny_llama tiny_llama_for_ranks(uint32_t ranks, enum tensor_type type);

/* The parts, for tests that leave one out or add one. Widths are multiples of 32 for quantised types. */
void tiny_llama_write_shape(struct gguf_writer *writer, const struct tiny_llama *options);
/* Byte-level BPE like SmolLM2's: <|endoftext|> 0, <|im_start|> 1 (bos), <|im_end|> 2 (eos), the 256 bytes from 3 on in
 * byte order, then pairs of lower-case letters ("aa" is 259, "ab" 260, ...) with their merges. */
void tiny_llama_write_tokenizer(struct gguf_writer *writer, const struct tiny_llama *options);
void tiny_llama_write_tensors(struct gguf_writer *writer, const struct tiny_llama *options);

/* All three: the bytes of a file (the caller frees them), or the path of a temporary file. */
uint8_t *tiny_llama_create(const struct tiny_llama *options, size_t *bytes);
char *tiny_llama_save(const struct tiny_llama *options);

#endif
