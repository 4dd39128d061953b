#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of each architecture, and the logits that transformers computes with them: tests/model/architectures/.

    python3 -m venv v && v/bin/pip install torch==2.8.0 'transformers>=4.56,<5' gguf==0.19.0
    v/bin/python tests/model/make_architectures.py

Not part of the tests: it takes gigabytes of packages. Each model is one of transformers' own classes with random weights
(seed 1), written as GGUF with the tensor names and the changes that llama.cpp's converter makes (norms of gemma with 1
added; queries and keys of llama in neighbouring pairs; llama3's frequencies as divisors). NAME.npz has the token ids
[tokens] and the logits [tokens, vocabulary], float32, of one pass over them with eager attention; NAME.json is the model's
config.json.
"""
import json
import math
import pathlib

import gguf
import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "architectures"
TOKENS = 96
VOCABULARY = 64
COMMON = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, initializer_range=0.3,
              tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)

# name: (class, GGUF architecture, further configuration)
MODELS = {
    "llama": ("Llama", "llama", {}),
    "llama-bias": ("Llama", "llama", dict(attention_bias=True)),
    "llama3-rope": ("Llama", "llama", dict(rope_theta=500.0, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))),
    "llama-linear": ("Llama", "llama", dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama-yarn": ("Llama", "llama", dict(head_dim=16, rope_theta=1000.0, rope_scaling=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64))),
    "mistral-window": ("Mistral", "llama", dict(sliding_window=20)),
    "qwen2": ("Qwen2", "qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", "qwen3", dict(head_dim=24)),
    "gemma2": ("Gemma2", "gemma2", dict(head_dim=16, sliding_window=20, num_hidden_layers=4, query_pre_attn_scalar=16,
                                        attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
                                        hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)),
    "gemma3": ("Gemma3", "gemma3", dict(head_dim=16, sliding_window=20, num_hidden_layers=7, query_pre_attn_scalar=16,
                                        rope_theta=1000000.0, rope_local_base_freq=10000.0,
                                        hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)),
    "phi3": ("Phi3", "phi3", dict(partial_rotary_factor=0.75, head_dim=16, hidden_size=64)),
    "phi3-window": ("Phi3", "phi3", dict(sliding_window=20)),
}

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES_GEMMA = dict(NAMES, post_attention_layernorm="post_attention_norm", pre_feedforward_layernorm="ffn_norm",
                   post_feedforward_layernorm="post_ffw_norm")


def make_config(kind, changes):
    of_kind = {"Gemma3": transformers.Gemma3TextConfig}.get(kind, getattr(transformers, kind + "Config"))
    return of_kind(architectures=[kind + "ForCausalLM"], **dict(COMMON, **changes))


def make_model(kind, changes):
    config = make_config(kind, changes)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    with torch.no_grad():  # norms and biases that are 0 or 1 would hide mistakes
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                value += 0.3 * torch.randn_like(value)
    return model, config


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def pairs_to_neighbours(weight, heads):
    """Rows of each head: from pairs half a head apart to neighbours, as the converter does for llama."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model, config, architecture):
    names = NAMES_GEMMA if architecture.startswith("gemma") else NAMES
    for name, value in model.state_dict().items():
        value = value.float().numpy()
        if architecture.startswith("gemma") and "norm" in name:
            value = value + np.float32(1)
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                yield "output.weight", value
        elif name == "model.embed_tokens.weight":
            yield "token_embd.weight", value
        elif name == "model.norm.weight":
            yield "output_norm.weight", value
        else:
            _, _, layer, inner = name.split(".", 3)
            inner, kind = inner.rsplit(".", 1)
            if architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in inner else config.num_key_value_heads
                value = pairs_to_neighbours(value, heads)
            yield f"blk.{layer}.{names[inner]}.{kind}", value


def llama3_divisors(config):
    """Of the frequencies, as the converter writes them; formula of transformers' rope type "llama3"."""
    scaling, dim = config.rope_scaling, head_dim(config)
    out = []
    for i in range(dim // 2):
        wave = 2 * math.pi * config.rope_theta ** (2 * i / dim)
        turns = scaling["original_max_position_embeddings"] / wave
        low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
        smooth = (turns - low) / (high - low)
        out.append(1.0 if turns > high else factor if turns < low else 1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def write_gguf(path, model, config, architecture):
    writer = gguf.GGUFWriter(path, architecture)
    dim = head_dim(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(int(dim * getattr(config, "partial_rotary_factor", 1)))
    writer.add_rope_freq_base(config.rope_theta)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    # A vocabulary, so that other programs take the file: its words are never used.
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>".encode() for i in range(VOCABULARY)])
    writer.add_token_scores([-float(i) for i in range(VOCABULARY)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in tensors_of(model, config, architecture):
        # Matrices are stored in 16 bits, and are exactly that in the model too.
        writer.add_tensor(name, value.astype(np.float16) if value.ndim == 2 else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    FOLDER.mkdir(exist_ok=True)
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, VOCABULARY, TOKENS))
    for name, (kind, architecture, changes) in MODELS.items():
        model, config = make_model(kind, changes)
        with torch.no_grad():
            for value in model.parameters():
                if value.ndim == 2:
                    value.copy_(value.half().float())
            logits = model(ids[None]).logits[0].float().numpy()
        write_gguf(FOLDER / f"{name}.gguf", model, config, architecture)
        (FOLDER / f"{name}.json").write_text(config.to_json_string())
        np.savez_compressed(FOLDER / f"{name}.npz", ids=ids.numpy().astype(np.int32), logits=logits)
        print(json.dumps({"model": name, "spread": float(logits.std())}))


if __name__ == "__main__":
    main()
