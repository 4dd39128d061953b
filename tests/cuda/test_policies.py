# SPDX-License-Identifier: Apache-2.0
"""Scores of policies on the real model's prompt, on the CUDA device, against the reference's (tests/data/policy_scores.json),
within the tolerances of tests/model/test_prunes.py.

An emulated device computes some tokens a second: policies go in one batch, and by default there are two, one by
attention and one by keys. DISTILLCACHE_TEST_FULL=1 (scripts/test.sh --full), or a real device
(DISTILLCACHE_TEST_DEVICE=real): all of them, and with exact weights too.
"""
import os
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "model"))
import test_prunes as model  # noqa: E402

REAL = os.environ.get("DISTILLCACHE_TEST_DEVICE", "emulated") == "real"
FULL = REAL or os.environ.get("DISTILLCACHE_TEST_FULL") == "1"
MODES = {"int8": (), "exact": ("--exact",)} if FULL else {"int8": ()}
NAMES = model.NAMES if FULL else ["h2o", "keydiff"]
PROMPT = min(model.SCORES["prompts"], key=lambda prompt: len(prompt["ids"]))
model.TIMEOUT_S = 3000


@pytest.fixture(scope="module", params=MODES)
def outputs(request):
    if not REAL:
        os.environ["DISTILLCACHE_EMULATOR"] = "fast"
    budget, ids = model.SCORES["score_budget"], model.ids_text(PROMPT["ids"])
    lines = [f"scores;{model.spell(name, tokens=budget)};{ids}" for name in NAMES]
    group = min(len(NAMES), 16)
    return dict(zip(NAMES, model.run_tool(lines, *MODES[request.param], "--backend", "cuda", "--group", str(group))))


@pytest.mark.parametrize("name", NAMES)
def test_scores(outputs, name):
    assert np.median(model.score_differences(name, PROMPT, outputs[name])) <= 0.02
