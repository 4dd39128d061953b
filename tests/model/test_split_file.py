# SPDX-License-Identifier: Apache-2.0
"""Models in several GGUF files, as the Python package gguf splits them."""
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from test_model_file import dequantise, describe, inspect

TENSORS, PART = 8, 3


@pytest.fixture
def parts(tmp_path):
    """Three files of at most three tensors."""
    random = np.random.default_rng(7)
    writer = GGUFWriter(tmp_path / "whole.gguf", "llama", split_max_tensors=PART)
    writer.add_block_count(2)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    values = {}
    for i in range(TENSORS):
        kind = GGMLQuantizationType.Q8_0 if i % 2 else GGMLQuantizationType.F32
        data = quantize(random.standard_normal((5, 64), np.float32), kind)
        writer.add_tensor(f"tensor.{i}", data, raw_dtype=kind)
        values[f"tensor.{i}"] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("whole-0000?-of-00003.gguf"))
    assert len(paths) == 3
    return paths


def test_all_parts_are_found(parts):
    document = describe(str(parts[0]))
    assert sorted(t["name"] for t in document["tensors"]) == [f"tensor.{i}" for i in range(TENSORS)]
    assert document["bytes"] == sum(p.stat().st_size for p in parts)
    assert document["shape"] == {"layers": 2}
    wanted, expected = [], []
    for path in parts:
        for tensor in GGUFReader(path).tensors:
            for row in range(5):
                wanted.append((tensor.name, row))
                data = tensor.data[row]
                expected.append(data if data.dtype == np.float32 else dequantise_q8(data))
    np.testing.assert_array_equal(dequantise(str(parts[0]), wanted), np.concatenate(expected))


def dequantise_q8(data):
    blocks = data.reshape(-1, 34)
    return (blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)).reshape(-1)


def refusal(path):
    done = inspect(str(path))
    assert done.returncode == 1 and done.stdout == b""
    return done.stderr.decode()


def test_a_missing_part_is_named(parts):
    parts[1].unlink()
    message = refusal(parts[0])
    assert parts[1].name in message and "No such file" in message


def test_another_part_is_refused(parts):
    message = refusal(parts[1])
    assert "part 2 of 3" in message and parts[0].name in message


def test_mismatched_parts_are_named(parts, tmp_path):
    parts[1].write_bytes(parts[2].read_bytes())
    message = refusal(parts[0])
    assert parts[1].name in message and "part 3 of 3, not 2 of 3" in message


def test_a_truncated_part_is_named(parts):
    parts[2].write_bytes(parts[2].read_bytes()[:-40])
    message = refusal(parts[0])
    assert parts[2].name in message and "truncated" in message


def test_a_part_of_another_model(parts, tmp_path):
    """The same tensors again, and fewer than there should be."""
    data = parts[2].read_bytes()
    assert data.count(b"tensor.6") == 1
    parts[2].write_bytes(data.replace(b"tensor.6", b"tensor.1"))
    assert '"tensor.1" occurs twice' in refusal(parts[0])
    total = b"split.tensors.count" + (5).to_bytes(4, "little")
    parts[2].write_bytes(data)
    parts[0].write_bytes(parts[0].read_bytes().replace(total + (TENSORS).to_bytes(4, "little"), total + (99).to_bytes(4, "little")))
    assert "split.tensors.count is 99" in refusal(parts[0])


def test_a_part_with_another_name(parts, tmp_path):
    other = tmp_path / "renamed.gguf"
    other.write_bytes(parts[0].read_bytes())
    assert "NAME-00001-of-00003.gguf" in refusal(other)
