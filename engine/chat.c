/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/chat.h"

#include <stdlib.h>
#include <string.h>

static const char template_text[] =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    "' }}{% endif %}";

static const char default_system[] = "<|im_start|>system\n"
                                     "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";
static const char message_begin[] = "<|im_start|>";
static const char message_end[] = "<|im_end|>\n";
static const char generation_prompt[] = "<|im_start|>assistant\n";

int chat_template_supported(const struct gguf *gguf, struct error *error) {
    static const char key[] = "tokenizer.chat_template";
    struct gguf_string text;
    if (gguf_find(gguf, key) == NULL)
        return error_set(error, ERROR_UNSUPPORTED, "the model has no chat template (%s)", key);
    if (gguf_get_string(gguf, key, &text, error) != 0)
        return error_set(error, ERROR_UNSUPPORTED, "the model's chat template (%s) is not a string", key);
    if (text.bytes != strlen(template_text) || memcmp(text.text, template_text, text.bytes) != 0)
        return error_set(error, ERROR_UNSUPPORTED,
            "the model's chat template (%s, %zu bytes) is not one that is known; use completions with a prompt of your "
            "own",
            key, text.bytes);
    return 0;
}

/* Writes to `text` where that is not NULL; counts always. */
struct writer {
    char *text;
    size_t bytes;
    bool overflow;
};

static void write_bytes(struct writer *writer, const char *from, size_t bytes) {
    if (bytes > SIZE_MAX / 2 - writer->bytes) {
        writer->overflow = true;
        return;
    }
    if (writer->text != NULL && bytes > 0)
        memcpy(writer->text + writer->bytes, from, bytes);
    writer->bytes += bytes;
}

static void write_string(struct writer *writer, const char *from) {
    write_bytes(writer, from, strlen(from));
}

static void write_prompt(
    struct writer *writer, const struct chat_message *messages, size_t count, bool add_generation_prompt) {
    if (count > 0 && strcmp(messages[0].role, "system") != 0)
        write_string(writer, default_system);
    for (size_t i = 0; i < count; i++) {
        write_string(writer, message_begin);
        write_string(writer, messages[i].role);
        write_string(writer, "\n");
        write_bytes(writer, messages[i].content, messages[i].content_bytes);
        write_string(writer, message_end);
    }
    if (add_generation_prompt)
        write_string(writer, generation_prompt);
}

char *chat_render(const struct chat_message *messages, size_t count, bool add_generation_prompt, size_t *bytes) {
    struct writer writer = {0};
    write_prompt(&writer, messages, count, add_generation_prompt);
    if (writer.overflow)
        return NULL;
    writer.text = malloc(writer.bytes + 1);
    if (writer.text == NULL)
        return NULL;
    writer.bytes = 0;
    write_prompt(&writer, messages, count, add_generation_prompt);
    writer.text[writer.bytes] = '\0';
    *bytes = writer.bytes;
    return writer.text;
}
