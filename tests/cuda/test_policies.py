# SPDX-License-Identifier: Apache-2.0
"""Policies on the real model's prompt, on the CUDA device, against the reference's (tests/data/policy_scores.json): scores,
and what is kept after the prompt and after decode steps that prune. Within the tolerances of tests/model/test_prunes.py,
with int8 activations and with exact weights, the cache in f16.

An emulated device computes some tokens a second: DISTILLCACHE_TEST_FULL=1 (scripts/test.sh --full), or a real device
(DISTILLCACHE_TEST_DEVICE=real). By default parity compares scores with their definitions, and beside_cpu_cuda of the engine's
tests what every policy keeps with the CPU backend.
"""
import functools
import os
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "model"))
import test_prunes as model  # noqa: E402

REAL = os.environ.get("DISTILLCACHE_TEST_DEVICE", "emulated") == "real"
FULL = REAL or os.environ.get("DISTILLCACHE_TEST_FULL") == "1"
pytestmark = pytest.mark.skipif(not FULL, reason="takes an emulated device long: DISTILLCACHE_TEST_FULL=1")
MODES = {"int8": (), "exact": ("--exact",)}
NAMES = model.NAMES
PROMPT = min(model.SCORES["prompts"], key=lambda prompt: len(prompt["ids"]))
CASES = PROMPT["cases"]
model.TIMEOUT_S = 6000


@functools.cache
def run_on_device(mode):
    """What the tool says of each policy's scores, and of each case; one run, in which policies compute the prompt once."""
    if not REAL:
        os.environ["DISTILLCACHE_EMULATOR"] = "fast"
    ids = PROMPT["ids"]
    tasks = [(name, model.score_line(model.spell(name, tokens=model.SCORES["score_budget"]), ids)) for name in NAMES]
    tasks += [(case["policy"], model.run_line(model.case_policy(case), ids, case["decode"]["fed"])) for case in CASES]
    out = model.run_forked(tasks, *MODES[mode], "--backend", "cuda")
    return dict(zip(NAMES, out)), out[len(NAMES):]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_scores(mode, name):
    scored, _ = run_on_device(mode)
    assert np.median(model.score_differences(name, PROMPT, scored[name])) <= 0.02


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, list(CASES[i].values())[:3])))
@pytest.mark.parametrize("mode", MODES)
def test_kept(mode, index):
    case, out = CASES[index], run_on_device(mode)[1][index]
    model.check_case(out, case, False)
    if case["scope"] == "head":  # counts follow from budgets alone
        assert model.counts(out["prompt"]) == case["kept"]["counts"]
        assert model.counts(out["decode"]) == case["decode"]["kept"]["counts"]
