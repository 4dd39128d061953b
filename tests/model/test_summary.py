# SPDX-License-Identifier: Apache-2.0
"""Policies with a summary slot on the real model against the NumPy reference (tests/reference/reference/summary.py): what
is kept, and the log-probabilities of decode steps that prune; and against themselves, however the work is cut.

Environment as for test_prunes.py.
"""
import functools
import json
import os
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/reference"), str(ROOT / "tests/model")]

from reference import policies as po  # noqa: E402
from reference.model import Model, log_softmax  # noqa: E402
from reference.summary import SummarySequence  # noqa: E402
from test_prunes import DEFAULT, EXACT, counts, run_line, run_tool, spell  # noqa: E402

SCHEDULES = json.loads((ROOT / "tests/data/policy_schedules.json").read_text())
IDS, FED = SCHEDULES["ids"][:170], SCHEDULES["ids"][170:184]
TOKENS, RATIO = {"tokens": 48}, {"ratio": 0.25, "minimum": 8}
# Policy, budget, options as the server spells them, keywords of the reference.
CASES = [
    ("h2o", TOKENS, {}, {}),
    ("h2o", RATIO, {"prefill_prune_every": 48}, {"prefill_prune_every": 48}),
    ("h2o_mean", TOKENS, {"scope": "layer", "interval": 4}, {"scope": "layer", "interval": 4}),
    ("streaming", RATIO, {"interval": 3}, {"interval": 3}),
    ("snapkv", TOKENS, {}, {}),
    ("snapkv", TOKENS, {"decode": "keep"}, {"frozen_prompt": True}),
    ("tova", TOKENS, {}, {}),
]
NAMES = ["-".join([policy, *budget, *options]) for policy, budget, options, _ in CASES]


@functools.cache
def reference_model():
    return Model(os.environ["DISTILLCACHE_TEST_MODEL"])


@functools.cache
def run_reference(index):
    """Positions kept [layer][head] after the prompt and in the end, logits after each step."""
    policy, budget, _, keywords = CASES[index]
    slots = po.Budget(tokens=budget.get("tokens", 0), ratio=budget.get("ratio", 1), b_min=budget.get("minimum", 0))
    sequence = SummarySequence(reference_model(), po.POLICIES[policy], slots, **keywords)
    kept = lambda: [[head.positions.tolist() for head in layer] for layer in sequence.cache.heads]
    sequence.read_prompt(IDS)
    prompt = kept()
    logprobs = [log_softmax(sequence.step(token)) for token in FED]
    return prompt, logprobs, kept()


@functools.cache
def run_ours(options):
    lines = []
    for policy, budget, extra, _ in CASES:
        text = spell(policy, **budget, **{"interval": 1, **extra}, summary=1)
        lines.append(run_line(text, IDS, FED))
    return run_tool(lines, *options)


def share(ours, theirs):
    pairs = [(a, b) for x, y in zip(ours, theirs) for a, b in zip(x, y)]
    return sum(len(set(a) & set(b)) for a, b in pairs) / sum(len(b) for _, b in pairs)


def differences(top, logprobs):
    return np.array([abs(value - row[token]) for five, row in zip(top, logprobs) for token, value in five])


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_exact(index):
    """The same tokens stay, and then log-probabilities agree; window statistics in f16 may break a tie otherwise."""
    out, (prompt, logprobs, decode) = run_ours(EXACT)[index], run_reference(index)
    exact = share(out["prompt"], prompt) == 1 and share(out["decode"], decode) == 1
    assert share(out["prompt"], prompt) >= 0.995 and share(out["decode"], decode) >= 0.99
    if "scope" not in CASES[index][2]:
        assert counts(out["prompt"]) == counts(prompt) and counts(out["decode"]) == counts(decode)
    assert len(out["top"]) == len(FED)
    assert differences(out["top"], logprobs).max() <= (2e-3 if exact else 0.2)
    assert exact or CASES[index][0] in ("snapkv", "tova")


@pytest.mark.parametrize("index", range(4), ids=NAMES[:4])
def test_default(index):
    out, (prompt, logprobs, decode) = run_ours(DEFAULT)[index], run_reference(index)
    assert share(out["prompt"], prompt) >= 0.9 and share(out["decode"], decode) >= 0.9
    assert differences(out["top"], logprobs).mean() <= 0.25


def test_the_summary_counts_as_one_slot_and_tells():
    """B - 1 tokens stay; without the summary the same steps come out otherwise."""
    out = run_ours(EXACT)[NAMES.index("h2o-tokens")]
    assert all(len(head) == 47 for layer in out["decode"] for head in layer)
    plain, = run_tool([run_line(spell("h2o", tokens=48, interval=1), IDS, FED)], *EXACT)
    _, logprobs, _ = run_reference(NAMES.index("h2o-tokens"))
    assert differences(plain["top"], logprobs).max() > 0.05


@pytest.mark.parametrize("options", [("--chunk", "7"), ("--share",),
                                     ("--threads", "1", "--group", "5", "--swap")], ids=" ".join)
def test_nothing_depends_on_how_the_work_is_cut(options):
    assert run_ours(DEFAULT) == run_ours(options)
