# SPDX-License-Identifier: Apache-2.0
"""Directories as transformers writes them, against a GGUF file of the same random model and against `tokenizers`.

The GGUF file is written with the package gguf as llama.cpp's converter does it; the safetensors files by hand, from the
format's description.
"""
import json
import struct

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from random_texts import encode_all, random_texts
from test_model_file import dequantise, describe, inspect
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from vocabularies import PATTERNS, WHOLE_PIECES, fixture_texts

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, FF_WIDTH = 2, 4, 2, 8, 32, 48
TEXTS = fixture_texts() + random_texts(300)
BEGIN, END = "<|begin|>", "<|end|>"


def train(pre):
    """A tokenizer as tokenizer.json has it, with BOS by its post-processor."""
    if pre.startswith("pieces"):
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        prefix = [normalizers.Prepend("\u2581")] if pre == "pieces" else []
        tokenizer.normalizer = normalizers.Sequence(prefix + [normalizers.Replace(" ", "\u2581")])
        specials = ["<unk>"] + [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=specials, limit_alphabet=120)
        tokenizer.train_from_iterator(fixture_texts(), trainer)
        described = json.loads(tokenizer.to_str())  # bytes are words of the model, not tokens that are searched for
        described["added_tokens"] = [t for t in described["added_tokens"] if t["content"] == "<unk>"]
        tokenizer = Tokenizer.from_str(json.dumps(described))
        if pre == "pieces_added":  # tokens that merges make too, as in gemma's
            words = tokenizer.get_vocab()
            pairs = sorted((t for t in words if len(t) == 2 and t.isascii()), key=words.get)[:3]
            assert len(pairs) == 3
            tokenizer.add_tokens([AddedToken(t, normalized=False) for t in pairs])
    else:
        tokenizer = Tokenizer(models.BPE(ignore_merges=pre in WHOLE_PIECES))
        if pre == "smollm":
            parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=True)]
        elif pre == "gpt-2":
            parts = [pre_tokenizers.ByteLevel(False, use_regex=True)]
        else:
            parts = [pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[pre]]
            parts += [pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
        tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
        trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator(fixture_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (BEGIN, END)])
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    return tokenizer


def random_tensors(vocabulary, tied):
    random = np.random.default_rng(3)
    tensor = lambda *shape: random.standard_normal(shape, np.float32)
    out = {"model.embed_tokens.weight": tensor(vocabulary, WIDTH), "model.norm.weight": tensor(WIDTH)}
    if not tied:
        out["lm_head.weight"] = tensor(vocabulary, WIDTH)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        out |= {layer + "input_layernorm.weight": tensor(WIDTH), layer + "post_attention_layernorm.weight": tensor(WIDTH),
                layer + "self_attn.q_proj.weight": tensor(HEADS * HEAD_DIM, WIDTH),
                layer + "self_attn.k_proj.weight": tensor(KV_HEADS * HEAD_DIM, WIDTH),
                layer + "self_attn.v_proj.weight": tensor(KV_HEADS * HEAD_DIM, WIDTH),
                layer + "self_attn.o_proj.weight": tensor(WIDTH, HEADS * HEAD_DIM),
                layer + "mlp.gate_proj.weight": tensor(FF_WIDTH, WIDTH), layer + "mlp.up_proj.weight": tensor(FF_WIDTH, WIDTH),
                layer + "mlp.down_proj.weight": tensor(WIDTH, FF_WIDTH)}
    return out


def to_bfloat(values):
    return (values.view(np.uint32) >> 16).astype(np.uint16)


DTYPES = {"F32": lambda v: v, "F16": lambda v: v.astype(np.float16), "BF16": to_bfloat}


def write_safetensors(path, tensors, dtype=None):
    """All tensors in a format, or each in that of its numbers."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        part = DTYPES[dtype](values).tobytes() if dtype else values.tobytes()
        header[name] = {"dtype": dtype or {2: "F16", 4: "F32"}[values.itemsize], "shape": list(values.shape),
                        "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
          "intermediate_size": FF_WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
          "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": None}


def write_directory(folder, pre="smollm", dtype="F32", tied=True, shards=1, **config):
    folder.mkdir()
    tokenizer = train(pre)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size() + 7  # rows beyond the last token, as many models have
    tensors = random_tensors(vocabulary, tied)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocabulary, "tie_word_embeddings": tied} | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": BEGIN, "eos_token": {"content": END}, "chat_template": "{{ messages[0].content }}"}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    names = sorted(tensors)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            write_safetensors(folder / file, {n: tensors[n] for n in names[i::shards]}, dtype)
        index = {"metadata": {}, "weight_map": {n: files[j % shards] for j, n in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tokenizer, tensors


def interleaved(values, heads):
    """What llama.cpp's converter does to queries and keys of llama."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(path, tensors, vocabulary):
    """The same model; without a tokenizer, but for the number of its tokens."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FF_WIDTH)
    writer.add_context_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    names |= {f"model.layers.{i}.{here}": f"blk.{i}.{there}" for i in range(LAYERS) for here, there in parts.items()}
    for name, values in tensors.items():
        name = names[name.removesuffix(".weight")]
        if name.endswith("attn_q") or name.endswith("attn_k"):
            values = interleaved(values, HEADS if name.endswith("q") else KV_HEADS)
        writer.add_tensor(name + ".weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied, shards", [(True, 1), (False, 3)])
def test_the_same_model_as_gguf(tmp_path, tied, shards):
    tokenizer, tensors = write_directory(tmp_path / "model", tied=tied, shards=shards)
    path = str(tmp_path / "model.gguf")
    write_gguf(path, tensors, tokenizer.get_vocab_size() + 7)
    here, there = describe(str(tmp_path / "model")), describe(path)
    assert here["runnable"] is True, here.get("reason")
    assert here["fingerprint"] == there["fingerprint"]
    assert here["shape"] == there["shape"]
    assert here["name"] == "model"
    rows = [(t.name, row) for t in GGUFReader(path).tensors for row in range(int(t.shape[1]) if len(t.shape) > 1 else 1)]
    np.testing.assert_array_equal(dequantise(str(tmp_path / "model"), rows), dequantise(path, rows))


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_values(tmp_path, dtype):
    _, tensors = write_directory(tmp_path / "model", dtype=dtype)
    expected = tensors["model.layers.1.mlp.up_proj.weight"]
    expected = expected.astype(np.float16).astype(np.float32) if dtype == "F16" else \
        (to_bfloat(expected).astype(np.uint32) << 16).view(np.float32)
    rows = [("blk.1.ffn_up.weight", row) for row in range(FF_WIDTH)]
    np.testing.assert_array_equal(dequantise(str(tmp_path / "model"), rows), expected.reshape(-1))


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "o200k", "pieces", "pieces_added"])
def test_tokenizer(tmp_path, pre):
    tokenizer, _ = write_directory(tmp_path / "model", pre=pre)
    begin = tokenizer.token_to_id(BEGIN)
    document = describe(str(tmp_path / "model"))["tokenizer"]
    assert document["bos"] == begin and document["adds_bos"] is True and document["eos"] == tokenizer.token_to_id(END)
    assert document["chat_templates"] == ["default"]
    texts = TEXTS
    if pre == "qwen2":  # the package's table of composition may be another version's
        import unicodedata
        texts = [t for t in texts if normalizers.NFC().normalize_str(t) == unicodedata.normalize("NFC", t)]
    texts = [t for t in texts if t and BEGIN not in t and END not in t and (not pre.startswith("pieces") or "<unk>" not in t)]
    for text, ids in zip(texts, encode_all(str(tmp_path / "model"), texts)):
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids, text
    text = f"{BEGIN}a{END} b"
    assert [i for i in encode_all(str(tmp_path / "model"), [text], "--special")[0] if i == begin] == [begin]


def test_llama3_scaling(tmp_path):
    """The factors as transformers computes them (modeling_rope_utils, llama3)."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 2048}
    write_directory(tmp_path / "model", rope_scaling=scaling)
    inverse = 1.0 / 50000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    wave = 2 * np.pi / inverse
    smooth = (2048 / wave - 1.0) / 3.0
    scaled = np.where(wave > 2048, inverse / 8, np.where(wave < 512, inverse, (1 - smooth) * inverse / 8 + smooth * inverse))
    assert len({*np.round(inverse / scaled, 3)}) > 2
    found = dequantise(str(tmp_path / "model"), [("rope_freqs.weight", 0)])
    np.testing.assert_allclose(found, inverse / scaled, rtol=1e-6)


def refusal(path):
    done = inspect(str(path))
    text = done.stderr.decode() + done.stdout.decode()
    assert done.returncode in (0, 1) and "This program can run it" not in text
    return text


def change_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_refusals(tmp_path):
    """Each names the file, and the field or tensor in it."""
    model = tmp_path / "model"
    write_directory(model)
    config, weights = (model / "config.json").read_text(), (model / "model.safetensors").read_bytes()
    for fields, words in [({"model_type": "mamba"}, ['"mamba"', "config.json"]), ({"hidden_size": 0}, ["hidden_size"]),
                          ({"num_attention_heads": None}, ["num_attention_heads"]),
                          ({"rope_scaling": {"rope_type": "longrope"}}, ['"longrope"']), ({"head_dim": 6}, ["attn_q.weight"]),
                          ({"num_key_value_heads": 3}, ["k_proj"]), ({"rope_theta": -1}, ["rope_theta"]),
                          ({"hidden_act": "relu"}, ["hidden_act", '"relu"']), ({"partial_rotary_factor": 0.5}, ["not 1"]),
                          ({"partial_rotary_factor": 0}, ["partial_rotary_factor"]),
                          ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "layer 1"]),
                          ({"sliding_window": 9, "layer_types": ["full_attention"]}, ["layer_types", "layer 0"]),
                          ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1}}, ["mscale"]),
                          ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, ["rope_parameters"]),
                          ({"query_pre_attn_scalar": 99}, ["query_pre_attn_scalar"]),
                          ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"])]:
        change_json(model / "config.json", **fields)
        message = refusal(model)
        assert all(word in message for word in words), message
        (model / "config.json").write_text(config)
    for data, words in [(weights[:-8], ["model.safetensors", "truncated"]), (weights[:5], ["not a safetensors file"]),
                        (weights.replace(b'"F32"', b'"F64"', 1), ["F64", "is not supported"]),
                        (weights.replace(b"q_proj.weight", b"q_prox.weight", 1), ["q_prox.weight", "missing"][1:]),
                        (struct.pack("<Q", 1 << 60) + weights[8:], ["model.safetensors"]),
                        (weights.replace(b'"data_offsets": [0', b'"data_offsets": [4', 1), ["disagree"]), (b"", ["empty"])]:
        (model / "model.safetensors").write_bytes(data)
        message = refusal(model)
        assert all(word in message for word in words), message
    (model / "model.safetensors").unlink()
    assert "model.safetensors: cannot open" in refusal(model)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b"}}))
    assert "in no file of the directory" in refusal(model)
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(tokenizer[:-2])
    assert "tokenizer.json: line" in refusal(model)
    (model / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer) | {"pre_tokenizer": {"type": "Whitespace"}}))
    assert "not supported" in refusal(model)
    (model / "config.json").unlink()
    assert "config.json: cannot open" in refusal(model)
