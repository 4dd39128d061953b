/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat messages to prompt text, by ChatML as SmolLM2's template writes it. Other templates are recognised as such and
 * refused, so that no model gets a prompt it was not trained on.
 *
 * The prompt is to be encoded with parse_special: its markers (<|im_start|>, <|im_end|>) are special tokens. The same
 * text inside a role or a message becomes those tokens too, as it does in transformers and llama.cpp: whoever puts
 * words of strangers into messages must expect that they can end a message and begin another.
 */
#ifndef ENGINE_CHAT_H
#define ENGINE_CHAT_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/error.h"
#include "engine/gguf.h"

struct chat_message {
    const char *role;    /* system, user, assistant, ...: written as it is (a caller makes `developer` `system`) */
    const char *content; /* [content_bytes], may hold any byte */
    size_t content_bytes;
};

/* 0 when the file's tokenizer.chat_template is the one that chat_render writes. ERROR_UNSUPPORTED when there is none
 * or another. */
int chat_template_supported(const struct gguf *gguf, struct error *error);

/* The prompt of count messages, NUL-terminated, its length in *bytes; the caller frees it. A conversation that does not
 * begin with a system message gets the template's own. add_generation_prompt: ends with the beginning of an assistant's
 * message. NULL when memory ran out. */
char *chat_render(const struct chat_message *messages, size_t count, bool add_generation_prompt, size_t *bytes);

#endif
