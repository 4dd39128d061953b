# SPDX-License-Identifier: Apache-2.0
"""Every architecture's logits against those of transformers, on the tiny models of tests/model/architectures/.

The fixtures are made by make_architectures.py. Cuts of the work and instruction sets must not change a bit.
"""
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
FOLDER = pathlib.Path(__file__).parent / "architectures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
EXACT = ("--exact", "--kv", "f32")
TIMEOUT_S = 120


def run(model, ids, *options):
    """Logits [tokens, vocabulary] of a fixture by its name, or of a model by its path."""
    path = FOLDER / f"{model}.gguf" if isinstance(model, str) else model
    done = subprocess.run([BUILD / "tests/model/logits_tool", path, *options],
                          input=" ".join(map(str, ids)).encode(), timeout=TIMEOUT_S, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.float32).reshape(len(ids), -1)


def expected(name):
    data = np.load(FOLDER / f"{name}.npz")
    return data["ids"], data["logits"]


def test_there_is_a_fixture_of_each_architecture():
    assert {"llama", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    ids, logits = expected(name)
    ours = run(name, ids, *EXACT)
    difference = np.abs(ours - logits).max()
    print(f"{name}: {difference:.2g} of {logits.std():.2f}")
    assert logits.std() > 0.3
    assert difference < 5e-5 * max(1, np.abs(logits).max())


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_tiers_give_the_same_bits(name):
    """Eight bit weights and activations are what is served."""
    ids, logits = expected(name)
    whole = run(name, ids)
    assert np.corrcoef(whole.ravel(), logits.ravel())[0, 1] > 0.99
    for options in (("--chunk", "7"), ("--chunk", "1", "--threads", "2"), ("--features", "scalar"),
                    ("--features", "avx2", "--chunk", "33")):
        assert np.array_equal(run(name, ids, *options), whole), options


def test_the_readme_lists_what_inspect_says_is_supported():
    done = subprocess.run([BUILD / "distillcache", "inspect", FOLDER / "llama.gguf", "--json"], timeout=TIMEOUT_S,
                          stdout=subprocess.PIPE, check=True)
    supported = json.loads(done.stdout)["supported"]
    models = (ROOT / "README.md").read_text().split("\n## Models\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip().strip("`") for line in models.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row != "general.architecture"] == supported["architectures"]
    assert [name for name in supported["formats"] if name not in models] == []
