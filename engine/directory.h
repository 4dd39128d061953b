/* SPDX-License-Identifier: Apache-2.0
 *
 * Model directories as transformers writes them, read as if they were GGUF files: what their JSON files say becomes the
 * metadata that a GGUF file of the same model has, and their tensors get GGUF's names, by mmap.
 *
 *   config.json                  the architecture and its sizes (directory_config.c)
 *   model.safetensors            tensors in F32, F16 or BF16
 *   model.safetensors.index.json in its place, with the files that it names
 *   tokenizer.json               byte-level BPE, or BPE with byte_fallback (SentencePiece's)
 *   tokenizer_config.json        BOS, EOS and whether they are added; chat templates
 *   chat_template.jinja          the chat template, over the other's
 *   generation_config.json       further tokens that end an answer
 *
 * The last three may be absent.
 *
 * Three kinds of tensors differ from GGUF's and are copied, until gguf_forget: queries and keys of `llama`, whose rows
 * GGUF interleaves so that the two numbers of a rotated pair are neighbours; norms of gemma, which GGUF stores with 1
 * added; the frequencies' factors of Llama 3, which config.json describes by four numbers.
 *
 * Nothing is trusted. Sources: safetensors' format description; transformers' files of these models; llama.cpp's
 * converter for what GGUF stores differently (facts only).
 */
#ifndef ENGINE_DIRECTORY_H
#define ENGINE_DIRECTORY_H

#include <stdbool.h>

#include "engine/gguf.h"

bool directory_is(const char *path); /* a directory of any kind */

/* NULL with a message that names the file and what is wrong in it. gguf_open calls this. */
struct gguf *directory_open(const char *path, struct error *error);

#endif
