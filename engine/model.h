/* SPDX-License-Identifier: Apache-2.0
 *
 * A model: its shape and its tensors, checked against each other. Knows architectures, no backend.
 *
 * Architecture `llama` (Touvron et al. 2023; GGUF keys `llama.*`, tensors `blk.N.*`). GGUF stores the query and key
 * matrices of this architecture permuted, so that the two numbers of a rotated pair are neighbours (2i, 2i+1).
 */
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H

#include "engine/error.h"
#include "engine/gguf.h"
#include "engine/tensor.h"

struct model_shape {
    uint32_t layers;
    uint32_t heads;    /* query heads */
    uint32_t kv_heads; /* heads is a multiple of it */
    uint32_t head_dim; /* even, at most 256 */
    uint32_t width;    /* of the residual stream */
    uint32_t ff_width; /* of the feed-forward block */
    uint32_t vocabulary;
    uint32_t context;  /* tokens */
    uint32_t rope_dim; /* leading values of a head that are rotated, <= head_dim */
    float rope_base;
    float norm_epsilon;
};

struct model_layer {
    struct tensor attn_norm;   /* [width] */
    struct tensor attn_q;      /* [heads * head_dim, width] */
    struct tensor attn_k;      /* [kv_heads * head_dim, width] */
    struct tensor attn_v;      /* [kv_heads * head_dim, width] */
    struct tensor attn_output; /* [width, heads * head_dim] */
    struct tensor ffn_norm;    /* [width] */
    struct tensor ffn_gate;    /* [ff_width, width] */
    struct tensor ffn_up;      /* [ff_width, width] */
    struct tensor ffn_down;    /* [width, ff_width] */
};

struct model {
    struct gguf *file;
    char *path;
    char *name;         /* general.name, or the file's name without ending */
    char *architecture; /* general.architecture */
    struct model_shape shape;
    struct tensor token_embedding; /* [vocabulary, width] */
    struct tensor output_norm;     /* [width] */
    struct tensor output;          /* [vocabulary, width]; the embedding again when the file ties them */
    struct model_layer *layers;    /* [shape.layers] */
    char *names;                   /* storage of the tensors' names */
    enum tensor_type quantise; /* Q8_0 or Q4_0: backends get matrices in F32, F16 and BF16 so (quantise.h); F32: no */
    char fingerprint[65];      /* hex SHA-256 over names, types, sizes and a sample of the data of all tensors */
};

/* Opens path, checks every tensor's presence, shape and format. The message of a failure names the file and the
 * missing or unsupported architecture, tensor or format. */
struct model *model_open(const char *path, struct error *error);
void model_free(struct model *model);

/* Architectures that model_open accepts: NULL-terminated list of names. */
const char *const *model_architectures(void);

#endif
