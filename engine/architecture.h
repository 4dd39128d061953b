/* SPDX-License-Identifier: Apache-2.0
 *
 * The architectures that this program can compute, and what each is made of: one table, from which files are read and
 * checked, and which `inspect` shows. An architecture is a llama layer (transformer.h) with traits.
 *
 * Names: GGUF's general.architecture, which also begins the keys of its metadata, and transformers' model_type in
 * config.json. Sources: GGUF specification; transformers' modelling files of these types (facts only).
 */
#ifndef ENGINE_ARCHITECTURE_H
#define ENGINE_ARCHITECTURE_H

#include <stdint.h>

enum architecture_trait {
    TRAIT_BIASES = 1 << 0,          /* queries, keys and values have biases */
    TRAIT_BIASES_POSSIBLE = 1 << 1, /* they have if the file has them */
    TRAIT_HEAD_NORMS = 1 << 2,      /* RMS norms of each query and key head before rotation */
    TRAIT_POST_NORMS = 1 << 3,      /* norms of what attention and feed-forward add to the residual stream */
    TRAIT_GELU = 1 << 4,            /* the gate is GELU (tanh form), not SiLU */
    TRAIT_EMBEDDING_SCALE = 1 << 5, /* embeddings are multiplied by sqrt(width) */
    TRAIT_CAPS = 1 << 6,            /* scores and logits may have soft caps: cap tanh(x / cap) */
    TRAIT_FUSED = 1 << 7,           /* one matrix has queries, keys and values, one gate and up */
    TRAIT_HALVES = 1 << 8,          /* rotated pairs are (i, i + dim / 2); without: (2i, 2i + 1) */
    TRAIT_WINDOW = 1 << 9,          /* layers may slide: they see the last `window` tokens alone */
    TRAIT_NORMS_LESS_ONE = 1 << 10, /* transformers' files have the weights of norms less 1 */
};

struct architecture {
    const char *name;         /* in GGUF */
    const char *model_types;  /* in config.json, ", " between several */
    uint32_t traits;          /* mask of enum architecture_trait */
    uint32_t window_period;   /* of each so many layers the last is global; 0: all slide, where there is a window */
    float local_rope_base;    /* of sliding layers, which are not scaled; 0: that of all layers */
    uint32_t scaled_by_width; /* with as many layers queries are divided by sqrt(width / heads), not sqrt(head_dim) */
};

const struct architecture *architecture_find(const char *name); /* by its name in GGUF; NULL: none */
/* By transformers' model_type. */
const struct architecture *architecture_find_type(const char *model_type);
const struct architecture *architecture_at(uint32_t index); /* of the table; NULL at its end */

/* Queries are divided by the root of this. */
double architecture_query_divisor(
    const struct architecture *architecture, uint32_t layers, uint32_t width, uint32_t heads, uint32_t head_dim);

/* Names of all, ", " between them. */
enum { ARCHITECTURE_NAMES_BYTES = 128 };
void architecture_names(char names[ARCHITECTURE_NAMES_BYTES]);

#endif
