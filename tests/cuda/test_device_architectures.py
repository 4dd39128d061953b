# SPDX-License-Identifier: Apache-2.0
"""Other architectures than llama on the CUDA device: transformers' logits, and policies beside the CPU backend.

The models are the tiny ones of tests/model/architectures/ (tests/model/test_architectures.py, test_sliding.py). Tokens come
in pieces of all kinds: a piece of a prompt for prefill's kernels, then steps of one token, which are captured and replayed as
graphs; sliding layers free what left their window, and freed pages are filled with NaN. The emulator runs without its
checks, which parity has. DISTILLCACHE_TEST_DEVICE=real: on the device of the build. With it, or DISTILLCACHE_TEST_FULL=1, all
the models.
"""
import os
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "model"))
import test_architectures as architectures  # noqa: E402
import test_sliding as sliding  # noqa: E402

# Little memory, since all of it is filled with NaN.
CUDA = ("--backend", "cuda", "--kv-memory", "8")
REAL = os.environ.get("DISTILLCACHE_TEST_DEVICE", "emulated") == "real"
FULL = REAL or os.environ.get("DISTILLCACHE_TEST_FULL") == "1"
NAMES = [name for name in architectures.NAMES if FULL or name in ("gemma2", "gemma3", "phi3-window", "qwen2", "qwen3")]
POLICIES = ("full", "streaming,tokens=32", "h2o,ratio=0.4", "snapkv,tokens=32,window=8", "tova,tokens=32",
            "expected_attention,tokens=32", "h2o,ratio=0.5,summary=true")
MODELS = {"gemma2": (1, 3), "gemma3": (5,), "mistral-window": (), "phi3": None, "qwen2": None, "qwen3": None}
architectures.TIMEOUT_S = sliding.TIMEOUT_S = 900


@pytest.fixture(autouse=True)
def fast_emulator(monkeypatch):
    if not REAL:
        monkeypatch.setenv("DISTILLCACHE_EMULATOR", "fast")


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    ids, logits = architectures.expected(name)
    for options in (("--exact", "--kv", "f32"), ("--exact", "--chunk", "40")):
        ours = architectures.run(name, ids, *CUDA, *options)
        bound = 5e-5 if "f32" in options else 5e-3
        assert np.abs(ours - logits).max() < bound * max(1, np.abs(logits).max()), options


@pytest.mark.parametrize("name", [name for name in MODELS if FULL or name == "gemma2"])
def test_policies_keep_what_they_keep_on_the_cpu(name):
    """Of heads that do not compete positions are the same but for scores that are nearly equal; the others' counts are."""
    options = ("--exact", "--kv", "f32", "--group", "8")
    want = sliding.run(name, *options, policies=POLICIES)
    got = sliding.run(name, *options, *CUDA, policies=POLICIES)
    kept = missed = 0
    for policy in POLICIES:
        for step in ("prompt", "decode"):
            for ours, theirs in zip(heads_of(got[policy][step]), heads_of(want[policy][step]), strict=True):
                assert len(ours) == len(theirs), (policy, step)
                kept += len(theirs)
                missed += len(set(theirs) - set(ours))
        for ours, theirs in zip(got[policy]["top"], want[policy]["top"], strict=True):
            assert abs(ours[0][1] - theirs[0][1]) < 0.02, policy
    assert missed <= kept / 200
    if MODELS[name] != ():
        assert kept > 500


def heads_of(layers):
    return [kept for heads in layers for kept in heads]
