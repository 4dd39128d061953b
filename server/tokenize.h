/* SPDX-License-Identifier: Apache-2.0
 *
 * Text to token ids and back, in the shapes of vLLM and llama.cpp at once:
 *   POST /tokenize    {"prompt": text} (vLLM) or {"content": text} (llama.cpp); add_special_tokens / add_special: put
 * the model's BOS token in front if it wants one (default true with prompt, false with content); parse_special: texts
 * of special tokens become those tokens (default true); return_token_strs (vLLM): also the tokens' texts
 *                     -> {"tokens": [...], "count": n, "max_model_len": n[, "token_strs": [...]]}
 *   POST /detokenize  {"tokens": [...]} -> {"prompt": text, "content": text}; what is not UTF-8 becomes U+FFFD
 *   GET /tokenizer_info (vLLM; lm-eval looks for it) -> {"bos_token": text or null, "eos_token": likewise,
 * "add_bos_token", "vocab_size", "model_max_length"}
 */
#ifndef SERVER_TOKENIZE_H
#define SERVER_TOKENIZE_H

#include "server/http.h"

void tokenize_handle(struct exchange *exchange);
void detokenize_handle(struct exchange *exchange);
void tokenizer_info_handle(struct exchange *exchange);

#endif
