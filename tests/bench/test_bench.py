# SPDX-License-Identifier: Apache-2.0
"""`distillcache bench` in sizes that take seconds: the shape of its document and what must hold
between its figures. No test asserts a time.

Needs DISTILLCACHE_TEST_MODEL, or DISTILLCACHE_TEST_SLIM_MODEL with less arithmetic (slim_model.py), and the program in
DISTILLCACHE_TEST_BUILD (default: build/ of the repository).
"""
import json
import math
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
MODEL = os.environ.get("DISTILLCACHE_TEST_SLIM_MODEL") or os.environ["DISTILLCACHE_TEST_MODEL"]
FAKE_PEER = ROOT / "tests/bench/fake_peer.py"
SHAPE = json.loads(subprocess.check_output([BUILD / "distillcache", "inspect", "--json", MODEL]))["shape"]
HEADS = SHAPE["layers"] * SHAPE["kv_heads"]
KV_BYTES_PER_TOKEN = HEADS * SHAPE["head_dim"] * 2 * 2  # keys and values, f16
SMALL = ("--prefill", "40", "--decode", "4", "--batch", "1,3", "--depth", "0,256", "--pairs", "3")
POLICY_KEYS = {"ratio_full", "ratio_full_allowed", "ratio_full_reached", "kv_tokens_kept", "statistics_bytes",
               "policy_percent"}
TRAINING_KEYS = {"share", "share_used", "inter_token_ms", "inter_token_ms_alone", "inter_token_p99_ms",
                 "inter_token_p99_ms_alone", "growth", "growth_allowed", "tokens_per_second_alone",
                 "training_tokens_per_second", "first_token_ms", "first_token_ms_most", "first_token_ms_alone",
                 "yield_ms_most"}
RUN_KEYS = {"work", "batch", "depth", "kv_policy", "kv_ratio", "kv_tokens", "kv_settings", "tokens_per_second", "step_ms",
            "phases", "bytes_per_step", "read_bandwidth_fraction", "peer_tokens_per_second", "ratio", "training"} | POLICY_KEYS
PHASES = {"embed", "norm", "qkv", "rope", "attend", "attn_output", "gate_up", "silu", "down", "logits", "sample", "score",
          "select", "compact"}
TIMEOUT_S = 300


def run_bench(*options, **environment):
    return subprocess.run([BUILD / "distillcache", "bench", "--model", MODEL, *options], timeout=TIMEOUT_S,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


def memory(mebibytes):
    """For --kv-memory: what holds as many tokens as this does where a token has 90 heads."""
    return str(mebibytes * 2**20 * HEADS // 90)


def document(*options, **environment):
    done = run_bench("--json", *options, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plain():
    return document(*SMALL)


def one(doc, work, batch=1, depth=None):
    runs = [r for r in doc["runs"] if r["work"] == work and r["batch"] == batch and depth in (None, r["depth"])]
    assert len(runs) == 1
    return runs[0]


def test_document_has_the_promised_shape(plain):
    assert set(plain) == {"runs", "machine", "resident_bytes"}
    works = [(run["work"], run["batch"], run["depth"]) for run in plain["runs"]]
    assert works == [("prefill", 1, 40), ("decode", 1, 0), ("decode", 1, 256), ("decode", 3, 0), ("decode", 3, 256),
                     ("first_token", 1, 40), ("request", 1, 1)]
    for run in plain["runs"]:
        assert set(run) == RUN_KEYS
        assert run["kv_policy"] == "full" and run["kv_ratio"] == 1
        assert run["kv_tokens"] is None and run["kv_settings"] is None
        assert all(run[key] is None for key in POLICY_KEYS) and run["training"] is None
        assert run["tokens_per_second"] > 0 and run["step_ms"] > 0
        assert math.isfinite(run["tokens_per_second"])


def test_nothing_is_reported_that_was_not_measured(plain):
    for run in plain["runs"]:
        assert run["ratio"] is None and run["peer_tokens_per_second"] is None
        engine_work = run["work"] in ("prefill", "decode")
        assert (run["bytes_per_step"] is not None) == (run["read_bandwidth_fraction"] is not None) == engine_work
        assert bool(run["phases"]) == (not engine_work)
    assert "peer" not in plain["machine"]


def test_step_time_and_rate_are_of_the_same_runs(plain):
    for run in plain["runs"]:
        tokens = {"decode": run["batch"], "prefill": 40, "first_token": 40, "request": 1}[run["work"]]
        assert run["tokens_per_second"] * run["step_ms"] == pytest.approx(1000 * tokens, rel=1e-6)


def test_bytes_are_weights_plus_what_is_cached(plain):
    weights = os.path.getsize(MODEL) - 2e6  # less the vocabulary's texts
    empty = one(plain, "decode", 1, 0)["bytes_per_step"]
    assert 0.95 * weights < empty < 1.25 * weights
    for batch in (1, 3):
        grown = one(plain, "decode", batch, 256)["bytes_per_step"] - one(plain, "decode", batch, 0)["bytes_per_step"]
        assert grown == pytest.approx(batch * 256 * KV_BYTES_PER_TOKEN, rel=0.02)
    # Three sequences read the weights once.
    three = one(plain, "decode", 3, 0)["bytes_per_step"]
    assert three - empty < 3 * 8 * KV_BYTES_PER_TOKEN


def test_machine_is_described(plain):
    machine = plain["machine"]
    assert set(machine) == {"cpu", "cores", "features", "memory_bytes", "core_to_core_ns", "load_average", "os", "compiler", "backend",
                            "threads"}
    assert machine["threads"] == machine["cores"] == len(os.sched_getaffinity(0))
    assert "cpu" in machine["backend"]
    assert (machine["core_to_core_ns"] is None) == (len(os.sched_getaffinity(0)) == 1)
    assert machine["memory_bytes"] > 1 << 28
    assert 50e6 < plain["resident_bytes"] < machine["memory_bytes"]


def test_phases_cover_the_step():
    doc = document("--prefill", "16", "--decode", "4", "--depth", "64", "--pairs", "1", "--profile", "--threads", "1")
    assert doc["machine"]["threads"] == 1
    for run in (one(doc, "decode"), one(doc, "prefill")):
        assert set(run["phases"]) == PHASES
        assert all(phase["seconds"] >= 0 for phase in run["phases"].values())
        assert sum(phase["bytes"] for phase in run["phases"].values()) == pytest.approx(run["bytes_per_step"], rel=1e-3)
    assert one(doc, "decode")["phases"]["logits"]["bytes"] > 20e6
    requests = one(doc, "request")["phases"]
    assert set(requests) == {"queued", "prefill", "cancel"}
    assert sum(requests[p]["seconds"] for p in ("queued", "prefill")) * 1e3 <= one(doc, "request")["step_ms"] * 1.5


def test_lower_tier_is_taken():
    doc = document("--prefill", "2", "--decode", "1", "--pairs", "1", "--cpu-features", "scalar")
    assert "scalar" in doc["machine"]["backend"]


def test_peer_is_paired_run_by_run(tmp_path):
    log = tmp_path / "log"
    doc = document(*SMALL, "--threads", "2", "--peer", "llama-cpp-python", "--peer-python", str(FAKE_PEER),
                   FAKE_PEER_LOG=str(log))
    arguments, *questions = log.read_text().splitlines()
    assert arguments.endswith(f"scripts/peer_llama_cpp.py --model {MODEL} --threads 2")
    expected = ["prefill 40"] + [f"decode 4 depth {d} batch {b}" for b in (1, 3) for d in (0, 256)]
    assert questions == [question for question in expected for _ in range(4)]  # one to warm up, three pairs
    assert doc["machine"]["peer"] == "fake peer, AVX = 0"
    for run in doc["runs"]:
        if run["work"] not in ("prefill", "decode"):
            assert run["ratio"] is None
            continue
        tokens, seconds = (40, 1000) if run["work"] == "prefill" else (4 * run["batch"], 2000)
        assert run["peer_tokens_per_second"] == pytest.approx(tokens / seconds)
        assert run["ratio"] == pytest.approx(run["tokens_per_second"] / run["peer_tokens_per_second"], rel=1e-6)


def test_peer_that_dies_is_an_error_with_its_exit_code(tmp_path):
    done = run_bench("--json", *SMALL, "--peer", "llama-cpp-python", "--peer-python", str(FAKE_PEER),
                     FAKE_PEER_LOG=str(tmp_path / "log"), FAKE_PEER_DIES_AT="2")
    assert done.returncode == 1 and done.stdout == ""
    assert "exit code 9" in done.stderr and "prefill 40" in done.stderr


def test_peer_that_is_missing_is_an_error(tmp_path):
    done = run_bench("--json", *SMALL, "--peer", "llama-cpp-python", "--peer-python", str(tmp_path / "python"))
    assert done.returncode == 1 and done.stdout == ""
    assert str(tmp_path / "python") in done.stderr
    done = run_bench("--json", *SMALL, "--peer", "vllm")
    assert done.returncode != 0 and "vllm" in done.stderr


def test_work_that_does_not_fit_is_an_error_that_says_what():
    done = run_bench("--json", "--prefill", "16", "--decode", "4", "--depth", "100000", "--pairs", "1")
    assert done.returncode == 1 and done.stdout == ""
    assert "decode batch 1 depth 100000" in done.stderr
    done = run_bench("--json", "--prefill", "16", "--decode", "4", "--batch", "3", "--depth", "256", "--kv-memory", memory(16),
                     "--pairs", "1")
    assert done.returncode == 1
    assert "decode batch 3 depth 256" in done.stderr and "--kv-memory" in done.stderr
    for options in ((), ("--kv-policy", "streaming")):
        done = run_bench("--json", "--prefill", "100000", *options)
        assert done.returncode == 1
        assert "prefill of 100000 tokens" in done.stderr and "depth" not in done.stderr


def test_policies_and_ratios_are_options():
    small = ("--json", "--prefill", "2", "--decode", "1", "--pairs", "1")
    assert run_bench(*small, "--kv-policy", "full", "--kv-ratio", "1.0").returncode == 0
    for name, value in (("--kv-policy", "h3o"), ("--kv-ratio", "1.5")):
        done = run_bench(*small, name, value)
        assert done.returncode == 2 and done.stdout == "" and name[2:] in done.stderr and value in done.stderr


@pytest.fixture(scope="module")
def pruned():
    return document("--prefill", "200", "--decode", "4", "--batch", "2", "--depth", "400", "--pairs", "2", "--profile",
                    "--kv-policy", "full", "--kv-policy", "streaming", "--kv-policy", "h2o", "--kv-ratio", "0.25,0.5")


def test_each_policy_runs_beside_full(pruned):
    expected = [("full", 1), ("streaming", 0.25), ("streaming", 0.5), ("h2o", 0.25), ("h2o", 0.5)]
    for work in ("prefill", "decode"):
        assert [(r["kv_policy"], r["kv_ratio"]) for r in pruned["runs"] if r["work"] == work] == expected
    for run in pruned["runs"]:
        assert set(run) == RUN_KEYS
        if run["kv_policy"] == "full":
            assert all(run[key] is None for key in POLICY_KEYS)
            continue
        assert run["kv_settings"].startswith(f"{run['kv_policy']}, ratio {run['kv_ratio']}")
        assert run["ratio"] is None and run["ratio_full"] > 0
        if run["work"] == "prefill":
            assert run["policy_percent"] == pytest.approx(100 / run["ratio_full"] - 100, abs=1e-6)


def test_bytes_of_a_pruned_step_are_what_is_kept(pruned):
    full, *policies = [run for run in pruned["runs"] if run["work"] == "decode"]
    seen = 400 + 4 * (2 + 2)  # what the runs added: pairs, warm-up and profile
    for run in policies:
        plain = run["kv_policy"] == "streaming"
        assert run["kv_tokens_kept"] == math.floor(run["kv_ratio"] * seen)
        assert (run["statistics_bytes"] == 0) == plain
        # A sum and a sum of squares at most, of 8 bytes a slot, with room to grow.
        assert run["statistics_bytes"] <= 2 * HEADS * 2 * 16 * run["kv_tokens_kept"]
        saved = full["bytes_per_step"] - (run["bytes_per_step"] - run["statistics_bytes"])
        assert saved == pytest.approx(2 * (1 - run["kv_ratio"]) * 400 * KV_BYTES_PER_TOKEN, rel=0.06)
        assert run["ratio_full_allowed"] == pytest.approx(full["bytes_per_step"] / run["bytes_per_step"], rel=1e-6)
        assert run["ratio_full_reached"] == pytest.approx(run["ratio_full"] / run["ratio_full_allowed"], rel=1e-6)


def test_phases_of_a_policy_are_told(pruned):
    for run in pruned["runs"]:
        if run["work"] != "decode" or run["kv_policy"] == "full":
            continue
        phases = run["phases"]
        assert set(phases) == PHASES | {"statistics"}  # a policy without any may be scored in attention
        assert 0 <= phases["statistics"]["seconds"] < phases["attend"]["seconds"] + run["step_ms"] / 1e3
        assert -100 < run["policy_percent"] < 100
        assert phases["score"]["seconds"] > 0


def test_a_number_of_tokens_is_a_budget_too():
    doc = document("--prefill", "64", "--decode", "2", "--batch", "1", "--depth", "128", "--pairs", "1", "--kv-policy",
                   "snapkv,window=8", "--kv-tokens", "50")
    run = [r for r in doc["runs"] if r["work"] == "decode"][1]
    assert (run["kv_policy"], run["kv_ratio"], run["kv_tokens"], run["kv_tokens_kept"]) == ("snapkv", None, 50, 50)
    assert "window 8" in run["kv_settings"]
    assert run["policy_percent"] is None  # without --profile


def test_pruned_sequences_need_one_prefill_at_a_time():
    """Three sequences with the full cache take 37 MB of 56 (memory()); beside them there is room for what a policy keeps of two and the
    prefill of one, not of two."""
    options = ("--json", "--prefill", "16", "--decode", "2", "--pairs", "1", "--depth", "512", "--kv-policy", "streaming")
    done = run_bench(*options, "--kv-memory", memory(56), "--batch", "3")
    assert done.returncode == 0, done.stderr
    done = run_bench(*options, "--kv-memory", memory(50), "--batch", "3")
    assert done.returncode == 1 and "decode batch 3 depth 512 streaming, ratio 0.25" in done.stderr
    assert "--kv-memory" in done.stderr


def test_admission_counts_what_fits():
    """A pool of 16 MiB holds 4,033 pages, a sequence of 128 tokens 8 in each of 90 heads: 5 sequences (memory())."""
    doc = document("--prefill", "16", "--decode", "1", "--pairs", "1", "--depth", "128", "--kv-memory", memory(16),
                   "--admission", "--kv-policy", "streaming", "--kv-policy", "h2o")
    full, streaming, h2o = [run for run in doc["runs"] if run["work"] == "admission"]
    assert full["batch"] == 5 and full["ratio_full"] is None
    for run in (streaming, h2o):
        assert set(run) == RUN_KEYS and run["depth"] == 128
        assert run["ratio_full"] == pytest.approx(run["batch"] / full["batch"])
        # The budget is 32 tokens: two pages, and a third where a new token finds no free slot. How many prompts are
        # computed in one step, with all their tokens, depends on when they arrive.
        assert 8 <= run["batch"] <= 20
    done = run_bench("--json", "--prefill", "2", "--decode", "1", "--pairs", "1", "--admission")
    assert done.returncode == 1 and "--depth" in done.stderr


def test_training_is_measured_beside_streams(tmp_path):
    doc = document("--prefill", "16", "--decode", "12", "--pairs", "2", "--batch", "3", "--depth", "20", "--training",
                   "--training-share", "0.5", TMPDIR=str(tmp_path))
    run = one(doc, "training", batch=3, depth=20)
    assert set(run) == RUN_KEYS and set(run["training"]) == TRAINING_KEYS
    training = run["training"]
    assert training["share"] == 0.5 and 0 < training["share_used"] < 1
    assert training["growth"] > 0 and training["growth_allowed"] == pytest.approx(2.2)
    for name in ("inter_token_ms", "inter_token_ms_alone"):
        assert 0 < training[name] <= training[name.replace("_ms", "_p99_ms")]
    assert run["step_ms"] == training["inter_token_ms"] and run["tokens_per_second"] > 0
    assert 0 < training["first_token_ms"] <= training["first_token_ms_most"]
    assert training["yield_ms_most"] > 0
    assert training["training_tokens_per_second"] is None or training["training_tokens_per_second"] > 0  # told of late
    assert list(tmp_path.iterdir()) == []  # the job's folder is gone


def test_table_has_a_line_per_run():
    done = run_bench("--prefill", "16", "--decode", "2", "--pairs", "1")
    assert done.returncode == 0
    for work in ("prefill", "decode", "first_token", "request"):
        assert sum(line.startswith(work + " ") for line in done.stdout.splitlines()) == 1
