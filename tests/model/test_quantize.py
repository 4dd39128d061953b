# SPDX-License-Identifier: Apache-2.0
"""--quantize: matrices that are brought to a smaller format when they are loaded, against the package gguf."""
import json
import subprocess

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from test_directory import FF_WIDTH, LAYERS, WIDTH, random_tensors, write_directory, write_gguf
from test_model_file import BUILD, TIMEOUT_S

VOCABULARY = 40
TOKENS = [list(range(3, 35)), [7, 7, 7, 8]]


def rows_of(path, wanted, quantise):
    lines = "".join(f"{row} {name}\n" for name, row in wanted)
    return subprocess.run([BUILD / "tests/model/dequantise_rows", path, quantise], input=lines.encode(), capture_output=True,
                          timeout=TIMEOUT_S)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("wanted", ["Q8_0", "Q4_0"])
def test_values(tmp_path, stored, wanted):
    random = np.random.default_rng(11)
    values = (random.standard_normal((40, 96)) * 10.0 ** random.integers(-6, 4, (40, 1))).astype(np.float32)
    values[1] = 0
    values[2] = np.tile([1, -1, 0.5, -0.5], 24)  # two values of the largest magnitude, halves that are rounded
    values[3] = -np.abs(values[3])
    values[4, :32] = np.arange(32) * 127 / 31
    kind = GGMLQuantizationType[stored]
    data = quantize(values, kind)
    writer = GGUFWriter(tmp_path / "values.gguf", "llama")
    writer.add_tensor("matrix", data, raw_dtype=kind)
    writer.add_tensor("vector", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kept = dequantize(GGUFReader(tmp_path / "values.gguf").tensors[0].data, kind)
    expected = dequantize(quantize(kept, GGMLQuantizationType[wanted]), GGMLQuantizationType[wanted])
    done = rows_of(tmp_path / "values.gguf", [("matrix", row) for row in range(40)], wanted.lower())
    assert done.returncode == 0, done.stderr.decode()
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32), expected.reshape(-1))
    done = rows_of(tmp_path / "values.gguf", [("vector", 0)], wanted.lower())
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32), values[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_values_that_no_block_holds(tmp_path, bad):
    values = np.ones((3, 64), np.float32)
    values[2, 40] = bad
    writer = GGUFWriter(tmp_path / "values.gguf", "llama")
    writer.add_tensor("matrix", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for wanted in ("q8_0", "q4_0"):
        done = rows_of(tmp_path / "values.gguf", [("matrix", 0)], wanted)
        assert done.returncode != 0 and b"tensor matrix, row 2, columns from 32" in done.stderr


def logits(path, *options):
    lines = "".join(json.dumps(tokens) + "\n" for tokens in TOKENS)
    done = subprocess.run([BUILD / "tests/model/logits_tool", path, "--threads", "1", *options], input=lines.encode(),
                          capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.float32)


def quantised(tensors, kind):
    """As a converter would: matrices alone, and only those whose rows are whole blocks."""
    return {name: dequantize(quantize(values, kind), kind) if values.ndim == 2 and values.shape[1] % 32 == 0 else values
            for name, values in tensors.items()}


@pytest.mark.parametrize("wanted", ["Q8_0", "Q4_0"])
def test_the_model_computes_with_them(tmp_path, wanted):
    """In exact mode a quantised matrix and its values as F32 give the same bits, which those before do not."""
    kind = GGMLQuantizationType[wanted]
    assert WIDTH % 32 == 0 and FF_WIDTH % 32 != 0 and LAYERS > 1
    tensors = {name: values * np.float32(0.3) for name, values in random_tensors(VOCABULARY, False).items()}
    write_gguf(tmp_path / "whole.gguf", tensors, VOCABULARY)
    write_gguf(tmp_path / "small.gguf", quantised(tensors, kind), VOCABULARY)
    ours = logits(tmp_path / "whole.gguf", "--exact", "--quantize", wanted.lower())
    reference = logits(tmp_path / "small.gguf", "--exact")
    # Queries and keys were permuted after they were quantised, by whole rows: the same values.
    np.testing.assert_array_equal(ours, reference)
    if wanted == "Q4_0":
        assert np.abs(logits(tmp_path / "whole.gguf", "--exact") - reference).max() > 1e-3


def test_a_directory_is_served_quantised(tmp_path):
    write_directory(tmp_path / "model", dtype="BF16")
    done = subprocess.run([BUILD / "distillcache", "bench", "--model", tmp_path / "model", "--json", "--quantize", "q8_0",
                           "--prefill", "16", "--decode", "4", "--batch", "1", "--threads", "1", "--kv-memory", "16M"],
                          capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr.decode()
    assert {run["work"] for run in json.loads(done.stdout)["runs"]} >= {"prefill", "decode"}
