/* SPDX-License-Identifier: Apache-2.0
 *
 * A model: its shape and its tensors, checked against each other. Knows architectures (architecture.h), no backend.
 *
 * GGUF keys `llama.*`, tensors `blk.N.*`, and so on for other architectures. The matrices of queries and keys are as
 * the file has them: where shape.rope_halves is set the two numbers of a rotated pair are half a head apart, else they
 * are neighbours (2i, 2i+1). What a file fuses (qkv, gate and up) is cut into its parts here.
 */
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H

#include "engine/architecture.h"
#include "engine/error.h"
#include "engine/gguf.h"
#include "engine/pooling.h"
#include "engine/rope_frequencies.h"
#include "engine/tensor.h"

enum { MODEL_HEAD_DIM_MAX = 256 };

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
    /* From here on 0, or what is neutral, is llama's. */
    struct rope_scaling rope_scaling;
    float local_rope_base;  /* of sliding layers, unscaled; 0: theirs is that of the others */
    bool rope_halves;       /* pairs are (i, i + rope_dim / 2) */
    float embedding_scale;  /* embeddings are multiplied by it; 0: are not */
    float score_scale;      /* of q k; 0: 1 / sqrt(head_dim) */
    float score_cap;        /* scaled scores become cap tanh(x / cap); 0: stay */
    float logit_cap;        /* the same of logits */
    bool gelu;              /* the gate's activation is GELU (tanh form), not SiLU */
    uint32_t global_layers; /* layers without a window */
};

/* Tensors that an architecture lacks have no data. */
struct model_layer {
    uint32_t window;           /* a token sees itself and the window - 1 before it; 0: all */
    struct tensor attn_norm;   /* [width] */
    struct tensor attn_q;      /* [heads * head_dim, width] */
    struct tensor attn_k;      /* [kv_heads * head_dim, width] */
    struct tensor attn_v;      /* [kv_heads * head_dim, width] */
    struct tensor attn_output; /* [width, heads * head_dim] */
    struct tensor ffn_norm;    /* [width] */
    struct tensor ffn_gate;    /* [ff_width, width] */
    struct tensor ffn_up;      /* [ff_width, width] */
    struct tensor ffn_down;    /* [width, ff_width] */
    struct tensor bias_q;      /* [heads * head_dim], added to queries; and so on: all three or none */
    struct tensor bias_k, bias_v;
    struct tensor bias_output;              /* [width] of W_o */
    struct tensor norm_q, norm_k;           /* [head_dim] RMS norms of each head before rotation */
    struct tensor attn_post_norm;           /* [width] of what attention adds */
    struct tensor ffn_post_norm;            /* [width] of what feed-forward adds */
    struct tensor fused_qkv, fused_gate_up; /* where attn_q, ..., ffn_gate, ... are cut from */
};

struct model {
    struct gguf *file;
    char *path;
    char *name; /* general.name, or the file's name without ending */
    const struct architecture *architecture;
    struct model_shape shape;
    struct tensor token_embedding; /* [vocabulary, width] */
    struct tensor output_norm;     /* [width] */
    struct tensor output;          /* [vocabulary, width]; the embedding again when the file ties them */
    struct tensor rope_divisors;   /* [rope_dim / 2] of frequencies; no data: none */
    struct model_layer *layers;    /* [shape.layers] */
    uint32_t *global_layers;       /* [shape.global_layers] ascending */
    uint32_t *windows;             /* [shape.layers] of each */
    char *names;                   /* storage of the tensors' names */
    enum tensor_type quantise; /* Q8_0 or Q4_0: backends get matrices in F32, F16 and BF16 so (quantise.h); F32: no */
    char fingerprint[65];      /* hex SHA-256 over names, types, sizes and a sample of the data of all tensors */
    enum pooling pooling;      /* of embeddings: as the file asks, MEAN where it does not; NONE: by one we lack */
};

/* Opens path, checks every tensor's presence, shape and format. The message of a failure names the file and the
 * missing or unsupported architecture, tensor or format. */
struct model *model_open(const char *path, struct error *error);
void model_free(struct model *model);

#endif
