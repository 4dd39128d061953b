/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/architecture.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum {
    GEMMA = TRAIT_POST_NORMS | TRAIT_GELU | TRAIT_EMBEDDING_SCALE | TRAIT_HALVES | TRAIT_WINDOW | TRAIT_NORMS_LESS_ONE,
};

static const struct architecture architectures[] = {
    {.name = "llama", .model_types = "llama, mistral", .traits = TRAIT_BIASES_POSSIBLE | TRAIT_WINDOW},
    {.name = "qwen2", .model_types = "qwen2", .traits = TRAIT_BIASES | TRAIT_HALVES},
    {.name = "qwen3", .model_types = "qwen3", .traits = TRAIT_HEAD_NORMS | TRAIT_HALVES},
    {.name = "gemma2",
        .model_types = "gemma2",
        .traits = GEMMA | TRAIT_CAPS,
        .window_period = 2,
        .scaled_by_width = 46},
    {.name = "gemma3",
        .model_types = "gemma3_text",
        .traits = GEMMA | TRAIT_HEAD_NORMS,
        .window_period = 6,
        .local_rope_base = 10000,
        .scaled_by_width = 62},
    {.name = "phi3", .model_types = "phi3", .traits = TRAIT_FUSED | TRAIT_HALVES | TRAIT_WINDOW},
};

enum { ARCHITECTURES = sizeof architectures / sizeof architectures[0] };

const struct architecture *architecture_at(uint32_t index) {
    return index < ARCHITECTURES ? &architectures[index] : NULL;
}

const struct architecture *architecture_find(const char *name) {
    for (uint32_t i = 0; i < ARCHITECTURES; i++)
        if (strcmp(architectures[i].name, name) == 0)
            return &architectures[i];
    return NULL;
}

/* Whether a list with ", " between its words has the word. */
static int has_word(const char *list, const char *word) {
    size_t bytes = strlen(word);
    for (const char *at = list; bytes > 0 && (at = strstr(at, word)) != NULL; at += bytes)
        if ((at == list || at[-1] == ' ') && (at[bytes] == '\0' || at[bytes] == ','))
            return 1;
    return 0;
}

const struct architecture *architecture_find_type(const char *model_type) {
    for (uint32_t i = 0; i < ARCHITECTURES; i++)
        if (has_word(architectures[i].model_types, model_type))
            return &architectures[i];
    return NULL;
}

double architecture_query_divisor(
    const struct architecture *architecture, uint32_t layers, uint32_t width, uint32_t heads, uint32_t head_dim) {
    bool by_width = architecture->scaled_by_width != 0 && layers == architecture->scaled_by_width;
    return by_width ? (double)width / heads : head_dim;
}

void architecture_names(char names[ARCHITECTURE_NAMES_BYTES]) {
    size_t at = 0;
    names[0] = '\0';
    for (uint32_t i = 0; i < ARCHITECTURES && at < ARCHITECTURE_NAMES_BYTES; i++)
        at += (size_t)snprintf(
            names + at, ARCHITECTURE_NAMES_BYTES - at, "%s%s", i > 0 ? ", " : "", architectures[i].name);
}
