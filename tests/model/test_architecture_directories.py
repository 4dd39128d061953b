# SPDX-License-Identifier: Apache-2.0
"""The tiny models of tests/model/architectures/ as directories: transformers' own config.json beside safetensors files of the
same weights under transformers' names, against the logits of transformers and, bit for bit, those of the GGUF file.
"""
import json

import numpy as np
import pytest
from gguf import GGUFReader
from test_architectures import EXACT, FOLDER, NAMES, expected, run
from test_directory import END, train, write_safetensors

LLAMA = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm"}
INNER = {
    "gemma": LLAMA | {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
                      "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def halves(values, heads):
    """Rows of each head from neighbouring pairs to pairs half a head apart: as transformers has llama's."""
    rows = values.shape[0] // heads
    return values.reshape(heads, rows // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def transformers_tensors(name, config, vocabulary):
    """By transformers' names; words beyond those of the GGUF file have rows of zeros."""
    reader = GGUFReader(FOLDER / f"{name}.gguf")
    architecture = reader.fields["general.architecture"].contents()
    inner = INNER.get(architecture.rstrip("0123456789"), INNER.get(architecture, LLAMA))
    for tensor in reader.tensors:
        values, (outer, kind) = np.array(tensor.data), tensor.name.rsplit(".", 1)
        if outer == "rope_freqs":
            continue
        if outer in OUTER:
            called = OUTER[outer]
        else:
            _, layer, part = outer.split(".")
            called = f"model.layers.{layer}.{inner[part]}"
            if architecture == "llama" and part in ("attn_q", "attn_k"):
                values = halves(values, config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
        if outer in ("token_embd", "output"):
            values = np.pad(values, ((0, vocabulary - len(values)), (0, 0)))
        if architecture.startswith("gemma") and outer.endswith("norm"):
            values = values - np.float32(1)
        yield f"{called}.{kind}", values


@pytest.fixture(scope="module")
def tokenizer():
    return train("smollm")


def as_newer_versions_write_it(config):
    """All of rotation in one object, gemma's for each kind of layers."""
    config = dict(config)
    base, scaling = config.pop("rope_theta"), config.pop("rope_scaling", None) or {"rope_type": "default"}
    parameters = scaling | {"rope_theta": base}
    if "partial_rotary_factor" in config:
        parameters["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    if "rope_local_base_freq" in config:
        local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    return config | {"rope_parameters": parameters}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, tokenizer, tmp_path):
    vocabulary = tokenizer.get_vocab_size()
    config = json.loads((FOLDER / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": vocabulary}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_safetensors(tmp_path / "model.safetensors", dict(transformers_tensors(name, config, vocabulary)))
    ids, logits = expected(name)
    first = run(tmp_path, ids, *EXACT)
    (tmp_path / "config.json").write_text(json.dumps(as_newer_versions_write_it(config | {"vocab_size": vocabulary})))
    ours = run(tmp_path, ids, *EXACT)
    known = logits.shape[1]
    assert np.array_equal(ours, first)
    assert np.abs(ours[:, :known] - logits).max() < 5e-5 * max(1, np.abs(logits).max())
    # Norms of gemma lose a bit where 1 is taken away and added again, divisors of Llama 3 are computed anew.
    if not name.startswith(("gemma", "llama3")):
        assert np.array_equal(ours[:, :known], run(name, ids, *EXACT))
