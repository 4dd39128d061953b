# SPDX-License-Identifier: Apache-2.0
"""Every architecture under every policy, on the tiny models of make_architectures.py (96 tokens of text).

What is expected follows from the definitions: with a budget that is never reached the logits are full's to the bit; with
one that is, layers without a window hold no more than it (per head, or together where heads compete) and every layer that
slides is left alone; and however the work is cut, the same stays. The policies are those that the program says it has.
Scores themselves are compared with the reference on the real model (test_prunes.py) and by operation (tests/parity).
"""
import functools
import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest
from test_network import metadata_of, random_tensors, reference, write_safetensors

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
FOLDER = pathlib.Path(__file__).parent / "architectures"
MODELS = sorted(path.stem for path in FOLDER.glob("*.npz"))
GLOBAL_LAYERS = {"gemma2": [1, 3], "gemma3": [5], "mistral-window": [], "phi3-window": []}  # of others: all
PROMPT, FED, BUDGET, INTERVAL = 80, 16, 40, 4
COMPETING = {"adakv", "pyramidkv", "cake", "laprox", "laprox_head", "rlkv", "hybrid", "distillcache", "ranker"}  # heads or layers
PROTECTING = {"full", "streaming", "h2o", "scissorhands", "tova", "snapkv", "pyramidkv", "adakv", "criticalkv", "keyformer", "cake",
              "restkv", "rlkv", "hybrid"}  # the newest token
NETWORKS = {"distillcache": "content", "ranker": "paper"}
TIMEOUT_S = 120


def run_tool(model, lines, *options):
    return subprocess.run([BUILD / "tests/model/prune_tool", FOLDER / f"{model}.gguf", "--kv-memory", "32", *options], timeout=TIMEOUT_S,
                          input="\n".join(lines).encode(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@functools.lru_cache
def policies():
    refusal = run_tool("llama", ["run;none;1;2"]).stderr.decode()
    names = re.search(r"there is no policy 'none'; there are (.*)", refusal).group(1)
    return re.findall(r"\w+", names.replace(" and ", " "))


def config_of(model):
    return json.loads((FOLDER / f"{model}.json").read_text())


def network_of(folder, model, features):
    """A file with a random network of the model's shape."""
    config, rng = config_of(model), np.random.default_rng(3)
    names = reference.CONTENT_INPUTS if features == "content" else reference.PAPER_INPUTS
    shape = {"features": features, "inputs": names, "content": 4 if features == "content" else 0, "hidden": 8,
             "layers": config["num_hidden_layers"], "kv_heads": config["num_key_value_heads"],
             "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    path = folder / f"{features}.safetensors"
    write_safetensors(path, random_tensors(rng, shape), metadata_of(shape))
    return path


def settings_of(folder, model, budget):
    """By policy, as on the command line."""
    settings = {}
    for name in policies():
        options = [name + (f":{network_of(folder, model, NETWORKS[name])}" if name in NETWORKS else "")]
        if name != "full":
            options += [f"tokens={budget}", f"interval={INTERVAL}"]
        if name in ("snapkv", "pyramidkv", "adakv", "criticalkv", "cake", "laprox", "laprox_head", "restkv"):
            options.append("window=8")
        if name == "rlkv":
            options += ["sinks=4", "recent_tokens=16"]
        settings[name] = ",".join(options)
    return settings


def run(model, settings, *options):
    """Documents by policy; all in one process."""
    ids = np.load(FOLDER / f"{model}.npz")["ids"].tolist()
    prompt, fed = " ".join(map(str, ids[:PROMPT])), " ".join(map(str, ids[PROMPT:PROMPT + FED]))
    done = run_tool(model, [f"run;{policy};{prompt};{fed}" for policy in settings.values()], *options)
    assert done.returncode == 0, done.stderr.decode()
    return dict(zip(settings, map(json.loads, done.stdout.decode().splitlines()), strict=True))


def global_layers(model):
    return GLOBAL_LAYERS.get(model, list(range(config_of(model)["num_hidden_layers"])))


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("networks")


@pytest.fixture(scope="module")
def pruned(model, folder):
    return run(model, settings_of(folder, model, BUDGET))


def test_the_policies_are_all():
    assert {"full", "h2o", "snapkv", "tova", "expected_attention", "restkv", "hybrid", "distillcache"} <= set(policies())
    assert len(policies()) >= 23


def test_a_budget_that_is_not_reached_changes_no_bit(model, folder):
    whole = run(model, settings_of(folder, model, PROMPT + FED))
    for policy, document in whole.items():
        assert document == whole["full"], policy


@pytest.mark.parametrize("stage,seen", [("prompt", PROMPT), ("decode", PROMPT + FED)])
def test_layers_without_a_window_hold_their_budget(model, pruned, stage, seen):
    layers = global_layers(model)
    for policy, document in pruned.items():
        heads = [kept for layer in layers for kept in document[stage][layer]]
        assert all(kept == [] for layer, of in enumerate(document[stage]) if layer not in layers for kept in of)
        for kept in heads:
            assert kept == sorted(set(kept)) and all(0 <= position < seen for position in kept), policy
            assert kept[-1] == seen - 1 or policy not in PROTECTING, policy
        counts = [len(kept) for kept in heads]
        if policy == "full":
            assert counts == [seen] * len(heads)
        elif policy in COMPETING:  # some hold more, others less
            assert sum(counts) <= BUDGET * len(heads), policy
            assert sum(counts) >= BUDGET * len(heads) // 3, policy
        else:
            assert counts == [BUDGET] * len(heads), policy


def test_pruning_is_felt_where_there_is_something_to_prune(model, pruned):
    for policy, document in pruned.items():
        felt = document["top"] != pruned["full"]["top"]
        assert felt == (policy != "full" and global_layers(model) != []), policy


def test_cuts_and_swaps_change_nothing(model, folder, pruned):
    settings = settings_of(folder, model, BUDGET)
    assert run(model, settings, "--chunk", "9", "--group", "8") == pruned
    assert run(model, settings, "--swap") == pruned
