# SPDX-License-Identifier: Apache-2.0
"""The policies' network against NumPy (tests/reference/reference/distillcache.py): files, inputs, scores, budgets.

Files are written and read here by a reader of the format alone. Needs the built network_tool in
DISTILLCACHE_TEST_BUILD (default: build/ of the repository); no model.
"""
import json
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
sys.path.insert(0, str(ROOT / "tests/reference"))
from reference import distillcache as reference  # noqa: E402
from reference import policies  # noqa: E402

SEED = 20240915
FINGERPRINT = "0123456789abcdef" * 4
SCOPES = ["head", "layer", "model"]


def run_tool(requests):
    """The tool's replies to requests, one each."""
    text = "".join(json.dumps(request, allow_nan=False) + "\n" for request in requests)
    done = subprocess.run([BUILD / "tests/model/network_tool"], input=text.encode(), timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(replies) == len(requests)
    return replies


def write_safetensors(path, tensors, metadata):
    """tensors: float32 arrays, or (dtype, shape, bytes), by name; in this order."""
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        dtype, shape, content = tensor if isinstance(tensor, tuple) else ("F32", tensor.shape, tensor.tobytes())
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    """(tensors, metadata)"""
    content = path.read_bytes()
    length, = struct.unpack_from("<Q", content)
    header = json.loads(content[8:8 + length])
    assert (8 + length) % 8 == 0  # data are aligned
    metadata, data = header.pop("__metadata__"), content[8 + length:]
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert entry["dtype"] == "F32"
        tensors[name] = np.frombuffer(data[start:end], "<f4").reshape(entry["shape"])
    assert sum(tensor.nbytes for tensor in tensors.values()) == len(data)
    return tensors, metadata


def random_shape(rng, features):
    names = reference.CONTENT_INPUTS if features == "content" else reference.PAPER_INPUTS
    few = rng.random() < 0.4
    inputs = [name for name in names if not few or rng.random() < 0.5] or [names[0]]
    return {"features": features, "inputs": inputs,
            "content": int(rng.choice([0, 1, 4, 16])) if features == "content" else 0,
            "hidden": int(rng.choice([1, 7, 32, 128, 256])), "layers": int(rng.integers(1, 6)),
            "kv_heads": int(rng.integers(1, 4)), "head_dim": int(rng.choice([4, 64]))}


def random_tensors(rng, shape):
    tensors = {name: rng.normal(size=size).astype(np.float32) for name, size in reference.arrays(shape).items()}
    tensors["layer_budgets"] = rng.uniform(0, 2, shape["layers"]).astype(np.float32)
    for name in ("scale", "g1", "g2"):
        if name in tensors:
            tensors[name] = np.abs(tensors[name])
    if rng.random() < 0.5:  # another order is as good
        tensors = {name: tensors[name] for name in rng.permutation(list(tensors))}
    return tensors


def metadata_of(shape, **more):
    names = (["content"] if shape["content"] else []) + shape["inputs"]
    return {"format": "distillcache-policy-1", "method": "ranker", "features": shape["features"],
            "inputs": ",".join(names), **{key: str(shape[key]) for key in ("content", "hidden", "layers", "kv_heads",
                                                                          "head_dim")},
            "fingerprint": FINGERPRINT, "scope": "layer", "floor": "0.6", "interval": "8", "summary": "1",
            "protect_recent": "0", "protect_sinks": "4", "record": json.dumps({"steps": 12, "text": "\u00e9\""}), **more}


def random_slots(rng, shape):
    """Slots of one head as attention would leave them; float32, as the program has them."""
    seen = int(rng.choice([1, 2, 30, 500, 20000]))
    count = int(min(seen, rng.integers(1, 60)))
    positions = np.sort(rng.choice(seen, count, replace=False))
    queries = seen - positions
    mean = rng.random(count) ** rng.choice([1, 8])
    mean[rng.random(count) < 0.1] = 0
    spread = rng.random(count) * mean
    spread[rng.random(count) < 0.1] = 0
    lists = {"sum": mean * queries, "squared": (mean ** 2 + spread ** 2) * queries * rng.choice([1, 0.999999]),
             "entropy": rng.random(count) * np.log(positions + 1), "value_norm": rng.normal(size=count) * 3,
             "output_norm": rng.normal(size=count) * 3, "content": rng.normal(size=count * shape["content"]) * 3}
    return {"seen": seen, "budget": int(rng.integers(1, seen + 40)), "positions": positions,
            **{name: values.astype(np.float32).astype(np.float64) for name, values in lists.items()}}


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def doubled(tensors):
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


@pytest.mark.parametrize("features", ["content", "paper"])
def test_inputs_and_scores(tmp_path, features):
    rng = np.random.default_rng(SEED)
    requests, cases = [], []
    for i in range(60):
        shape = random_shape(rng, features)
        tensors = random_tensors(rng, shape)
        path = tmp_path / f"{i}.safetensors"
        write_safetensors(path, tensors, metadata_of(shape))
        for _ in range(4):
            slots, head = random_slots(rng, shape), int(rng.integers(shape["layers"] * shape["kv_heads"]))
            requests.append({"op": "score", "file": str(path), "head": head,
                             **{key: plain(value) for key, value in slots.items()}})
            cases.append((shape, doubled(tensors), slots, head))
    for reply, (shape, p, slots, head) in zip(run_tool(requests), cases):
        assert "error" not in reply, reply
        count = len(slots["positions"])
        inputs = np.reshape(reply["inputs"], (count, -1))
        expected = reference.gather(shape, slots)
        # Where the variance is lost in rounding, only the clamp to 0 is certain.
        compare = np.ones(expected.shape, bool)
        if "deviation" in shape["inputs"]:
            queries = slots["seen"] - slots["positions"]
            mean_of_squares, square = slots["squared"] / queries, (slots["sum"] / queries) ** 2
            lost = np.abs(mean_of_squares - square) < 1e-5 * square
            compare[lost, shape["content"] + shape["inputs"].index("deviation")] = False
        assert np.allclose(inputs[compare], expected[compare], rtol=2e-5, atol=2e-5)
        # Each step from what the program itself had before it: an error of one does not hide in the next.
        standard = reference.standardise(shape, inputs)
        ours = np.reshape(reply["standard"], (3, 2))
        if features == "paper":
            assert np.allclose(ours[:len(standard)].ravel(), np.ravel(standard), rtol=1e-5, atol=1e-6)
            assert not ours[len(standard):].any()
        normalised = np.reshape(reply["normalised"], (count, -1))
        assert np.allclose(normalised, reference.normalise(shape, p, head, ours, inputs), rtol=1e-4, atol=1e-4)
        scores = reference.score(shape, p, head, normalised)
        assert np.allclose(reply["scores"], scores, rtol=1e-5, atol=1e-5 * np.abs(scores).max())


def test_scores_of_the_fixture(tmp_path):
    """The paper's network on the vectors of tests/data/mlp.json."""
    cases = json.loads((ROOT / "tests/data/mlp.json").read_text())["cases"]
    requests, used = [], []
    for i, case in enumerate(cases):
        p = {name: np.array(value, np.float32) for name, value in case["parameters"].items()}
        hidden, inputs = p["w1"].shape
        if inputs != len(reference.PAPER_INPUTS):
            continue
        shape = {"features": "paper", "inputs": reference.PAPER_INPUTS, "content": 0, "hidden": hidden, "layers": 1,
                 "kv_heads": 1, "head_dim": 1}
        p.setdefault("skip", np.zeros((1, inputs), np.float32))
        levels = {name: np.ones(1, np.float32) for name in reference.LEVELS}
        path = tmp_path / f"{i}.safetensors"
        write_safetensors(path, p | levels, metadata_of(shape))
        requests.append({"op": "normalised", "file": str(path), "head": 0, "inputs": np.ravel(case["x"]).tolist()})
        used.append(case)
    assert used
    for reply, case in zip(run_tool(requests), used):
        assert np.allclose(reply["scores"], case["scores"], rtol=1e-5, atol=1e-5)


def test_files_are_read_and_written(tmp_path):
    """What is in a file written here is what the program has, and what it writes."""
    rng = np.random.default_rng(SEED + 1)
    for i in range(40):
        shape = random_shape(rng, rng.choice(["content", "paper"]).item())
        tensors = random_tensors(rng, shape)
        metadata = metadata_of(shape, scope=SCOPES[i % 3], floor=repr(round(float(rng.random()), 4)))
        path, copy = tmp_path / "a", tmp_path / "b"
        write_safetensors(path, tensors, metadata)
        loaded, _ = run_tool([{"op": "load", "file": str(path)}, {"op": "save", "file": str(path), "to": str(copy)}])
        assert "error" not in loaded, loaded
        assert {key: loaded[key] for key in shape} == shape
        assert loaded["scope"] == i % 3 and loaded["record"] == metadata["record"]
        assert loaded["floor"] == float(np.float32(metadata["floor"]))
        assert (loaded["interval"], loaded["summary"], loaded["protect_recent"], loaded["protect_sinks"]) == (8, True, 0, 4)
        assert set(loaded["arrays"]) == set(tensors)
        written, again = read_safetensors(copy)
        for name, tensor in tensors.items():
            assert np.array_equal(np.float32(loaded["arrays"][name]).reshape(tensor.shape), tensor)
            assert np.array_equal(written[name], tensor)
        assert set(again) == set(metadata) and np.float32(again.pop("floor")) == np.float32(metadata.pop("floor"))
        assert again == metadata


def small_case():
    rng = np.random.default_rng(SEED + 2)
    shape = {"features": "content", "inputs": ["sum", "age"], "content": 2, "hidden": 3, "layers": 2, "kv_heads": 1,
             "head_dim": 4}
    return shape, random_tensors(rng, shape)


@pytest.mark.parametrize("change, words", [
    (lambda t, m: t.pop("w1"), "no tensor 'w1'"),
    (lambda t, m: t.update(more=np.zeros(3, np.float32)), "unknown tensor 'more'"),
    (lambda t, m: t.update(w2=t["w2"].astype(np.float64)), "not the"),
    (lambda t, m: t.update(w2=("F64", [3], bytes(24))), "not F32"),
    (lambda t, m: t.update(w2=t["w2"][:2]), "shape of tensor 'w2' is not [3]"),
    (lambda t, m: t.update(w1=np.ascontiguousarray(t["w1"].T)), "shape of tensor 'w1' is not [3, 4]"),
    (lambda t, m: t.update(skip=t["skip"] * np.float32(np.inf)), "not finite"),
    (lambda t, m: t.update(b1=t["b1"] * np.float32(np.nan)), "not finite"),
    (lambda t, m: t.update(layer_budgets=-t["layer_budgets"]), "negative"),
    (lambda t, m: m.update(features="hidden_state"), "features is 'hidden_state'"),
    (lambda t, m: m.update(inputs="content,age,sum"), "inputs is"),
    (lambda t, m: m.update(inputs="content,sum,height"), "inputs is"),
    (lambda t, m: m.update(hidden="4"), "shape of tensor"),
    (lambda t, m: m.update(record="[1]"), "record"),
    (lambda t, m: m.update(fingerprint="xyz"), "fingerprint"),
    (lambda t, m: m.pop("scope"), "'scope'"),
    (lambda t, m: m.update(extra="1"), "unknown key 'extra'"),
])
def test_wrong_files_are_refused(tmp_path, change, words):
    shape, tensors = small_case()
    metadata = metadata_of(shape)
    change(tensors, metadata)
    write_safetensors(tmp_path / "wrong", tensors, metadata)
    reply, = run_tool([{"op": "load", "file": str(tmp_path / "wrong")}])
    assert words in reply["error"] and "wrong" in reply["error"], reply


def test_broken_files_are_refused(tmp_path):
    shape, tensors = small_case()
    write_safetensors(tmp_path / "whole", tensors, metadata_of(shape))
    content = (tmp_path / "whole").read_bytes()
    rng = np.random.default_rng(SEED + 3)
    requests = []
    for i in range(200):
        path = tmp_path / f"{i}"
        path.write_bytes(content[:int(rng.integers(len(content)))])
        requests.append({"op": "load", "file": str(path)})
    for reply in run_tool(requests):
        assert "error" in reply


def test_budgets_of_layers(tmp_path):
    rng = np.random.default_rng(SEED + 4)
    requests, expected = [], []
    for i in range(150):
        shape = {"features": "content", "inputs": ["sum"], "content": 0, "hidden": 1, "head_dim": 1,
                 "layers": int(rng.integers(1, 33)), "kv_heads": int(rng.integers(1, 4))}
        tensors = random_tensors(rng, shape)
        path = tmp_path / f"{i}"
        write_safetensors(path, tensors, metadata_of(shape))
        for _ in range(5):
            seen, tokens, summary = int(rng.integers(3, 3000)), int(rng.integers(1, 1500)), bool(rng.integers(2))
            budgets = reference.layer_budgets(tensors["layer_budgets"].astype(np.float64),
                                              tensors["layer_budget_slopes"].astype(np.float64), seen, tokens, summary,
                                              policies.share_out)
            requests.append({"op": "allocate", "file": str(path), "seen": seen, "tokens": tokens, "summary": summary})
            expected.append([budget for budget in budgets for _ in range(shape["kv_heads"])])
    for request, ours, theirs in zip(requests, run_tool(requests), expected):
        assert ours == theirs, request
