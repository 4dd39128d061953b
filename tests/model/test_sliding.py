# SPDX-License-Identifier: Apache-2.0
"""Policies on models with sliding layers: each gives the same tokens and keeps the same positions however the work is
cut, shared, forked or swapped, and with everything kept gives transformers' logits (test_architectures.py).

prune_tool fills freed pages with NaN and checks the page cache after every step, so that a page which was freed too
early shows. The models are those of make_architectures.py: windows of 20 tokens, 96 tokens of text.
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
POLICIES = ("full", "streaming,tokens=32", "h2o,ratio=0.4", "snapkv,tokens=32,window=8", "tova,tokens=32",
            "pyramidkv,tokens=32,window=8", "cake,tokens=32,window=8", "rlkv,ratio=0.5", "hybrid,ratio=0.5",
            "expected_attention,tokens=32", "keyformer,tokens=32", "knorm,tokens=32", "laprox,tokens=32",
            "scissorhands,tokens=32", "h2o,ratio=0.5,summary=true", "streaming,tokens=32,positions=cache")
MODELS = {"gemma3": (5,), "gemma2": (1, 3), "mistral-window": ()}  # and their global layers
PER_HEAD = ("streaming", "snapkv", "tova", "keyformer", "scissorhands", "knorm")  # whose heads do not compete
PROMPT, FED = 85, 11
TIMEOUT_S = 120


def ids_of(model):
    return np.load(FOLDER / f"{model}.npz")["ids"].tolist()


def run(model, *options, policies=POLICIES):
    """Documents by policy."""
    ids = ids_of(model)
    prompt, fed = " ".join(map(str, ids[:PROMPT])), " ".join(map(str, ids[PROMPT:]))
    lines = "\n".join(f"run;{policy};{prompt};{fed}" for policy in policies)
    done = subprocess.run([BUILD / "tests/model/prune_tool", FOLDER / f"{model}.gguf", "--kv-memory", "32", *options],
                          input=lines.encode(), timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    documents = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert len(documents) == len(policies)
    return dict(zip(policies, documents))


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request):
    return request.param


@pytest.fixture(scope="module")
def whole(model):
    return run(model)


def test_policies_prune_global_layers_to_their_budget(model, whole):
    for policy, document in whole.items():
        for layer, heads in enumerate(document["decode"]):
            for kept in heads:
                if layer not in MODELS[model]:
                    assert kept == []
                elif "tokens=32" in policy and policy.split(",")[0] in PER_HEAD:
                    assert len(kept) == 32, (policy, layer)
                elif policy == "full":
                    assert kept == list(range(PROMPT + FED))


def test_budgets_change_what_is_computed(model, whole):
    if MODELS[model]:
        assert whole["streaming,tokens=32"]["top"] != whole["full"]["top"]
    else:  # nothing is left to prune
        assert all(document["top"] == whole["full"]["top"] for document in whole.values())


@pytest.mark.parametrize("options", [("--chunk", "7"), ("--swap",), ("--group", "8", "--threads", "2"), ("--share",)],
                         ids=lambda options: options[0][2:])
def test_cuts_swaps_and_shared_prefixes_change_nothing(model, whole, options):
    assert run(model, *options) == whole


def test_forks_are_what_they_would_be_alone(model):
    """Tasks with a policy in common compute their prompt once."""
    policies = ("h2o,tokens=32", "h2o,tokens=40", "streaming,tokens=32", "streaming,tokens=48")
    assert run(model, "--fork", "--group", "4", policies=policies) == run(model, policies=policies)
