# SPDX-License-Identifier: Apache-2.0
"""Model files against the Python package gguf: what `inspect` says of them, and every weight format's values.

The package writes one file of all formats itself; the real model (DISTILLCACHE_TEST_MODEL) is read by both.
"""
import functools
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]  # that the package can write
READ_ONLY = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}  # where f16 lie
ROWS = 7  # of each tensor of the real model
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def model():
    path = os.environ.get("DISTILLCACHE_TEST_MODEL")
    assert path, "DISTILLCACHE_TEST_MODEL is not set: this test needs the real model"
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file by the package: all formats, an architecture that does not exist, a format that we do not know."""
    path = tmp_path_factory.mktemp("gguf") / "written.gguf"
    random = np.random.default_rng(5)
    writer = GGUFWriter(path, "nonesuch")
    writer.add_block_count(3)
    writer.add_float64("wide", 0.1)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_string("text", "über\nlines")
    for name in FORMATS:
        values = random.standard_normal((9, 96), np.float32) * 10.0 ** random.integers(-3, 3, (9, 1))
        kind = GGMLQuantizationType[name]
        writer.add_tensor(f"tensor.{name}", quantize(values.astype(np.float32), kind), raw_dtype=kind)
    for name, halves in READ_ONLY.items():
        kind = GGMLQuantizationType[name]
        values, block_bytes = GGML_QUANT_SIZES[kind]
        data = random.integers(0, 256, (9, 3 * 256 // values, block_bytes), np.uint8)
        for at in halves:
            data[..., at : at + 2] = random.standard_normal(data.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
        writer.add_tensor(f"tensor.{name}", data.reshape(9, -1), raw_dtype=kind)
    kind = GGMLQuantizationType.TQ2_0
    writer.add_tensor("tensor.other", quantize(random.standard_normal((2, 256), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@functools.lru_cache
def read(path):
    return GGUFReader(path)  # takes seconds for a whole vocabulary


def inspect(path, *options):
    return subprocess.run([BUILD / "distillcache", "inspect", path, *options], capture_output=True, timeout=TIMEOUT_S)


def describe(path):
    done = inspect(path, "--json")
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def dequantise(path, rows):
    """The values of (tensor name, row) pairs, one after the other."""
    lines = "".join(f"{row} {name}\n" for name, row in rows)
    done = subprocess.run([BUILD / "tests/model/dequantise_rows", path], input=lines.encode(), capture_output=True,
                          timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.float32)


def expected_row(tensor, row):
    """data is [rows, bytes or values]; a vector is one row."""
    data = tensor.data if tensor.data.ndim == 2 else tensor.data[None]
    return dequantize(data[row : row + 1], tensor.tensor_type)[0]


def compare_rows(path, tensors, count):
    random = np.random.default_rng(1)
    wanted, expected = [], []
    for tensor in tensors:
        rows = int(tensor.shape[1]) if len(tensor.shape) > 1 else 1
        for row in sorted({0, rows - 1, *random.integers(0, rows, count).tolist()}):
            wanted.append((tensor.name, row))
            expected.append(expected_row(tensor, row))
    np.testing.assert_array_equal(dequantise(path, wanted), np.concatenate(expected))


def compare_directory(path, document):
    reader = read(path)
    ours = [(t["name"], t["format"], t["shape"], t["offset"]) for t in document["tensors"]]
    theirs = [(t.name, t.tensor_type.name, [int(n) for n in reversed(t.shape)], t.data_offset) for t in reader.tensors]
    assert ours == theirs
    for tensor, known in zip(reader.tensors, document["tensors"]):
        assert known["bytes"] in (tensor.n_bytes, None)
        assert (known["bytes"] is None) == (tensor.tensor_type.name not in (*FORMATS, *READ_ONLY))
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = document["metadata"][key]
        contents = field.contents()
        if isinstance(contents, list):
            assert value["count"] == len(contents)
        elif isinstance(contents, float):
            assert value == pytest.approx(contents, rel=1e-6)
        else:
            assert value == contents


def test_written_rows(written):
    tensors = [t for t in read(written).tensors if t.tensor_type.name in (*FORMATS, *READ_ONLY)]
    assert len(tensors) == len(FORMATS) + len(READ_ONLY)
    compare_rows(written, tensors, 9)


def test_written_directory(written):
    document = describe(written)
    compare_directory(written, document)
    assert document["runnable"] is False
    assert "nonesuch" in document["reason"]
    assert {"kind": "architecture", "name": "nonesuch"} in document["unsupported"]
    assert {"kind": "format", "name": "tensor.other", "format": "TQ2_0"} in document["unsupported"]
    assert document["shape"] == {"layers": 3}
    assert document["totals"]["formats"]["Q4_1"] == {"tensors": 1, "values": 864, "bytes": 540}


def test_text_says_the_same(written):
    done = inspect(written)
    text = done.stdout.decode()
    assert done.returncode == 0
    assert "cannot run it" in text and "nonesuch" in text
    assert "format not supported" in text
    assert "über?lines" in text


def test_broken_file(written, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(written).read_bytes()[:1000])
    for options in ((), ("--json",)):
        done = inspect(str(broken), *options)
        assert done.returncode == 1
        assert done.stdout == b""
        assert b"broken.gguf" in done.stderr and b"truncated or corrupt" in done.stderr


def test_model_rows(model):
    compare_rows(model, read(model).tensors, ROWS)


def test_model_directory(model):
    document = describe(model)
    compare_directory(model, document)
    assert document["runnable"] is True
    assert document["unsupported"] == []
    assert len(document["fingerprint"]) == 64
    assert document["shape"] == {"layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "width": 576, "ff_width": 1536,
                                 "vocabulary": 49152, "context": 8192, "rope_dim": 64, "rope_base": 100000,
                                 "norm_epsilon": pytest.approx(1e-5), "global_layers": 30}
    assert document["tokenizer"] == {"model": "gpt2", "pre": "smollm", "tokens": 49152, "merges": 48900, "bos": 1,
                                     "eos": 2, "adds_bos": False, "chat_template": True, "chat_templates": ["default"]}
