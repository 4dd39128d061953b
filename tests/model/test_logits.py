# SPDX-License-Identifier: Apache-2.0
"""The engine's logits on the real model against the float32 reference, and against themselves however the work is cut.

Needs DISTILLCACHE_TEST_MODEL (the GGUF file that tests/data/logits_smollm2.json was made from) and the built
logits_tool in DISTILLCACHE_TEST_BUILD (default: build/ of the repository). Tolerances: tests/reference/README.md.
"""
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
MODEL = os.environ["DISTILLCACHE_TEST_MODEL"]
CASES = json.loads((ROOT / "tests/data/logits_smollm2.json").read_text())["cases"]
VOCABULARY = 49152
EXACT = ("--exact", "--kv", "f32")
TIMEOUT_S = 300


def run_tool(sequences, *options):
    """Standard output of the tool over lists of token ids."""
    text = "\n".join(" ".join(map(str, ids)) for ids in sequences)
    done = subprocess.run([BUILD / "tests/model/logits_tool", MODEL, *options], input=text.encode(), timeout=TIMEOUT_S,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def run_logits(sequences, *options):
    """Logits [tokens of all sequences, vocabulary]."""
    return np.frombuffer(run_tool(sequences, *options), np.float32).reshape(-1, VOCABULARY)


def run_top(sequences, *options):
    """Per sequence and token: (log-probability of the next token or None, [(id, log-probability)] of the best five)."""
    lines = iter(run_tool(sequences, "--top", *options).decode().splitlines())
    out = []
    for ids in sequences:
        rows = [next(lines).split() for _ in ids]
        out.append([(None if row[0] == "-" else float(row[0]),
                     [(int(i), float(p)) for i, p in zip(row[1::2], row[2::2])]) for row in rows])
    assert next(lines, None) is None
    return out


def fed(case):
    """The prompt and all but the last of the greedy tokens that the reference continued it with."""
    return case["ids"] + [step[0] for step in case["greedy"]][:-1]


def next_differences(rows, cases):
    """|difference| of the next token's log-probability at every prompt position that has a next token."""
    return np.concatenate([[abs(row[0] - expected) for row, expected in zip(case_rows, case["next_logprob"])]
                           for case_rows, case in zip(rows, cases)])


def check_top5(rows, case, tolerance):
    """Same ids in the same order, except where log-probabilities lie within the tolerance of each other. Twice the
    tolerance, because these are five times as many values as the next tokens' (the reference itself differs by up to
    0.026 when it rounds its cache to f16, where a next token's differs by 0.010)."""
    for position, ((_, ours), theirs) in enumerate(zip(rows, case["top5"])):
        expected = dict(map(tuple, theirs))
        for (token, logprob), (expected_token, expected_logprob) in zip(ours, theirs):
            where = f"{case['name']} position {position}: {ours} against {theirs}"
            assert abs(logprob - expected_logprob) <= 2 * tolerance, where
            if token != expected_token:  # a near tie: the reference puts this token within the tolerance of this rank
                assert abs(expected.get(token, theirs[-1][1]) - expected_logprob) <= 2 * tolerance, where


def check_greedy(rows, case, tolerance, margin):
    """The reference's own continuation, until a step is too close to call."""
    first = len(case["ids"]) - 1
    for step, (token, logprob, step_margin) in enumerate(case["greedy"]):
        if step_margin < margin:
            break
        best, best_logprob = rows[first + step][1][0]
        assert best == token, f"{case['name']} greedy step {step}"
        assert abs(best_logprob - logprob) <= tolerance, f"{case['name']} greedy step {step}"


@pytest.fixture(scope="session")
def int8_rows():
    return run_top([fed(case) for case in CASES])


@pytest.fixture(scope="session")
def int8_logits():
    return run_logits([case["ids"] for case in CASES])


def test_int8_is_as_close_as_int8_activations_allow(int8_rows):
    difference = next_differences(int8_rows, CASES)
    assert len(difference) == 1108
    same = [row[1][0][0] == best[0][0] for rows, case in zip(int8_rows, CASES) for row, best in zip(rows, case["top5"])]
    print(f"int8: mean {difference.mean():.4f} max {difference.max():.3f} top-1 same {np.mean(same):.4f}")
    assert difference.mean() <= 0.062
    assert difference.max() <= 1.0
    assert np.mean(same) >= 0.93


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case["name"] for case in CASES])
def test_int8_continues_greedily_where_the_reference_is_sure(int8_rows, case):
    check_greedy(int8_rows[case], CASES[case], 1.0, 0.6)


@pytest.mark.parametrize("options, tolerance, margin", [(EXACT, 1e-3, 2e-3), (("--exact", "--kv", "f16"), 0.02, 0.04)],
                         ids=["f32", "f16-cache"])
def test_float32_engine_equals_the_reference(options, tolerance, margin):
    rows = run_top([fed(case) for case in CASES], *options)
    difference = next_differences(rows, CASES)
    print(f"{options}: mean {difference.mean():.2g} max {difference.max():.2g}")
    assert difference.max() <= tolerance
    for case_rows, case in zip(rows, CASES):
        check_top5(case_rows, case, tolerance)
        check_greedy(case_rows, case, tolerance, margin)


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture(scope="session")
def reference_rows():
    """Log-probabilities [tokens, vocabulary] of the reference, by case: about 10 s for all."""
    sys.path.insert(0, str(ROOT / "tests/reference"))
    from reference.model import Model
    model = Model(MODEL)
    return [log_softmax(model.prefill(case["ids"])[0]) for case in CASES]


def divergences(reference_rows, logits):
    """KL(reference || engine) of every position, in nats."""
    out, at = [], 0
    for expected in reference_rows:
        ours = log_softmax(logits[at:at + len(expected)])
        out.append((np.exp(expected) * (expected - ours)).sum(-1))
        at += len(expected)
    return np.concatenate(out)


def test_divergence_over_full_rows_is_small(reference_rows, int8_logits):
    kl = divergences(reference_rows, int8_logits)
    assert len(kl) == 1116
    print(f"int8: KL mean {kl.mean():.2g} max {kl.max():.2g}")
    assert kl.mean() < 0.01


def test_divergence_of_the_float32_engine_is_rounding(reference_rows):
    last = slice(-2, None)
    kl = divergences(reference_rows[last], run_logits([case["ids"] for case in CASES[last]], *EXACT))
    print(f"f32: KL mean {kl.mean():.2g} max {kl.max():.2g}")
    assert np.abs(kl).max() < 1e-6


def test_reported_logprobs_are_those_of_the_logits(int8_rows, int8_logits):
    at = 0
    for rows, case in zip(int8_rows, CASES):
        logprobs = log_softmax(int8_logits[at:at + len(case["ids"])])
        at += len(case["ids"])
        for position in range(0, len(case["ids"]) - 1, 7):
            following, best = rows[position]
            assert abs(logprobs[position][case["ids"][position + 1]] - following) < 1e-4
            assert [token for token, _ in best] == np.argsort(-logprobs[position], kind="stable")[:5].tolist()


# However the work is cut, the rows are the same to the last bit. A later row depends on all cached tokens before it, so
# that every 8th one is enough.

# 300 tokens, more than one split of attention, and 44. Half of the chunk sizes end inside pages.
LONG = [CASES[0]["ids"] + CASES[1]["ids"], CASES[7]["ids"]]
SHORT = [CASES[1]["ids"], CASES[7]["ids"]]
TINY = [CASES[1]["ids"][:24], CASES[7]["ids"][:9]]  # for plain C, which is slow
STRIDE = ("--stride", "8")


@pytest.fixture(scope="session")
def whole():
    """The rows of sequences computed one after another in as few batches as possible."""
    return {"int8": run_tool(LONG, *STRIDE), "exact": run_tool(SHORT, *EXACT, *STRIDE),
            "int8 tiny": run_tool(TINY), "exact tiny": run_tool(TINY, *EXACT)}


@pytest.mark.parametrize("options", [("--chunk", "1", "--threads", "3"), ("--chunk", "7", "--threads", "1"), ("--together",),
                                     ("--together", "--chunk", "1"), ("--together", "--chunk", "5", "--threads", "3")],
                         ids=" ".join)
def test_rows_do_not_depend_on_how_the_work_is_cut(whole, options):
    assert run_tool(LONG, *STRIDE, *options) == whole["int8"]


@pytest.mark.parametrize("options", [("--chunk", "7"), ("--together", "--chunk", "1"), ("--threads", "1")], ids=" ".join)
def test_rows_of_the_float32_engine_do_not_depend_on_it_either(whole, options):
    assert run_tool(SHORT, *EXACT, *STRIDE, *options) == whole["exact"]


def tiers():
    """The tiers that this machine has, lowest first."""
    flags = pathlib.Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    has_avx2 = {"avx2", "fma", "f16c"} <= set(flags)
    has_avx512 = has_avx2 and {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= set(flags)
    return ["scalar"] + ["avx2"] * has_avx2 + ["avx512"] * has_avx512


@pytest.mark.parametrize("tier", tiers())
@pytest.mark.parametrize("kind, options", [("int8 tiny", ()), ("exact tiny", EXACT)], ids=["int8", "exact"])
def test_tiers_agree_to_the_last_bit(whole, kind, options, tier):
    assert run_tool(TINY, *options, "--features", tier) == whole[kind]
