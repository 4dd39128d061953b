# SPDX-License-Identifier: Apache-2.0
"""scripts/paper_tables.sh: its words, its tables from hand-made documents, and in tiny sizes on the real model.

Needs DISTILLCACHE_TEST_MODEL and the programs in DISTILLCACHE_TEST_BUILD (default: build/ of the repository).
DISTILLCACHE_TEST_SLIM_MODEL names a model with less arithmetic (slim_model.py); without it the other one is taken.
"""
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build")) / "distillcache"
MODEL = os.environ.get("DISTILLCACHE_TEST_MODEL") or "/nonexistent"
SLIM_MODEL = os.environ.get("DISTILLCACHE_TEST_SLIM_MODEL") or MODEL
TIMEOUT_S = 300
TABLES = ["budgets", "trained", "lengths", "hybrid", "rewards", "features", "paper", "transfer", "errors", "positions",
          "curves", "latency"]
TINY_TRAINING = ["--sequences", "1", "--", "--set", "prompt_most=160", "--set", "valid_prompts=1", "--set", "valid_rollout=4",
                 "--set", "rollout=8"]


def run(*arguments, script="paper_tables.sh", model=SLIM_MODEL):
    environment = {**os.environ, "DISTILLCACHE_MODEL": model}
    return subprocess.run([ROOT / "scripts" / script, *map(str, arguments)], timeout=TIMEOUT_S, capture_output=True, text=True,
                          env=environment, stdin=subprocess.DEVNULL)


def cells(text):
    """Rows of the one table in a text, its head first."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set("".join(rows[1])) == {"-"} and len({len(row) for row in rows}) == 1
    return [rows[0], *rows[2:]]


def table(name, state, *options, **how):
    done = run(name, "--program", PROGRAM, "--state", state, *options, **how)
    assert done.returncode == 0, done.stderr
    return cells(done.stdout)


# Words.


def test_help_names_every_table():
    done = run("--help")
    assert done.returncode == 0 and done.stderr == ""
    assert re.findall(r"^  (\w+) ", done.stdout, re.M) == TABLES
    assert all(run(name, "--help").stdout == done.stdout for name in TABLES)


@pytest.mark.parametrize("arguments,words", [
    ((), "which table?"),
    (("budget",), 'there is no table "budget": budgets, trained'),
    (("budgets", "--sequences", "3"), "unknown option --sequences"),
    (("latency", "--text", "x"), "unknown option --text"),
    (("lengths", "limit", "3"), "unknown argument limit"),
    (("lengths", "--limit"), "--limit needs a value"),
    (("lengths", "--limit=0"), '--limit: "0" is not a whole number above 0'),
    (("rewards", "--steps", "many"), '--steps: "many"'),
    (("latency", "--depth", "-4"), '--depth: "-4"'),
    (("lengths", "--text", "/nonexistent"), "cannot read /nonexistent"),
    (("lengths", "--program", "/nonexistent"), "there is no program /nonexistent"),
    (("transfer", "--from", "/nonexistent"), "--from: cannot read /nonexistent"),
    (("curves", "--program", PROGRAM, "--questions", "/dev/null", "--state", "STATE"), "--questions goes with --text"),
    (("curves", "--program", PROGRAM, "--seeds", "1;2", "--state", "STATE"), '"1;2" is not a list of whole numbers'),
    (("trained", "--program", PROGRAM, "--policies", "h3o", "--limit", "1", "--state", "STATE"), "h3o"),
    (("trained", "--program", PROGRAM, "--state", "STATE/a b"), "has a space"),
])
def test_refusals_say_why(arguments, words, tmp_path):
    done = run(*(str(a).replace("STATE", str(tmp_path)) for a in arguments))
    assert done.returncode != 0 and done.stdout == ""
    assert words in done.stderr


def test_train_policy_takes_the_same_form():
    assert "--text is needed" in run(script="train_policy.sh").stderr
    assert "unknown option --limit" in run("--limit", "3", script="train_policy.sh").stderr
    assert "usage: scripts/train_policy.sh" in run("--help", script="train_policy.sh").stdout


# Hand-made documents.


def format_table(*arguments):
    done = subprocess.run([sys.executable, ROOT / "scripts/paper_tables.py", *map(str, arguments)], capture_output=True,
                          text=True, timeout=60, check=True)
    return cells(done.stdout), done.stdout


def test_relative_is_that_of_the_results(tmp_path):
    """Two seeds of a policy beside a base, with results of another network and another continuation in the same file."""
    rng = np.random.default_rng(5)
    kl = {name: rng.lognormal(-2, 1, (6, 2)) for name in ("base", "a", "b", "old")}
    rows, lines = [{"kv_policy": "full", "kv_ratio": 1, "length": 64, "perplexity": 20.0, "n": 6, "kl": 0}], []
    for name, policy, network in (("base", "base", None), ("old", "a", "2"), ("a", "a", "1"), ("old", "a", "2"), ("b", "b", "1")):
        for item, part in np.ndindex(6, 2):
            line = {"model": "m", "task": "kl", "seed": 3, "query_aware": False, "continuation": 32, "kv_policy": policy,
                    "kv_ratio": 0.25, "length": 64, "item": item, "part": part, "kl": kl[name][item, part]}
            lines += [{**line, "kv_network": network}, {**line, "continuation": 64, "kl": 9.0}, {**line, "seed": 4, "kl": 9.0}]
        if name != "old":
            rows.append({"kv_policy": policy, "kv_ratio": 0.25, "length": 64, "n": 6, "kl": kl[name].mean(), "perplexity": 21.0,
                         "kl_geometric": math.exp(np.log(kl[name]).mean()), "kv_bytes": 30, "kv_bytes_full": 100})
    document = {"model": "m", "seed": 3, "lengths": [64], "items": 6, "task": "kl", "complete": False, "rows": rows}
    (tmp_path / "kl.json").write_text(json.dumps(document))
    (tmp_path / "kl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn": ')
    found, text = format_table("rewards", "--label", "a=ours", "--label", "b=ours", "--base", "base", "--results",
                               tmp_path / "kl.jsonl", tmp_path / "kl.json")
    assert "stopped before the end" in text
    assert [row[0] for row in found] == ["policy (25 %)", "`full`", "`base`", "ours"]
    assert found[0][1:] == ["25 %", "perplexity", "bytes, part of full's"] and found[3][2:] == ["21.0", "0.30"]
    numbers = [float(n) for n in re.findall(r"\d+\.\d+", found[3][1])]
    geometric, low, high, arithmetic, *seeds = numbers
    logs = [np.log(kl[name] / kl["base"]).mean(1) for name in ("a", "b")]
    both = (logs[0] + logs[1]) / 2
    drawn = np.exp(rng.choice(both, (20000, 6)).mean(1))
    assert geometric == pytest.approx(math.exp(both.mean()), abs=0.006)
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), rel=0.08)
    assert arithmetic == pytest.approx((kl["a"].mean() + kl["b"].mean()) / 2 / kl["base"].mean(), abs=0.006)
    assert seeds == pytest.approx([math.exp(l.mean()) for l in logs], abs=0.006)


def test_curves_take_the_last_of_a_step(tmp_path):
    """A run that was killed and went on from a checkpoint tells some steps twice."""
    events = [{"step": 1, "stage": "rank", "loss": 5.0}, {"step": 2, "stage": "rank", "loss": 4.0, "kl_valid": 0.5,
                                                         "kl_valid_relative": 1.5}]
    events += [{**events[1], "loss": 3.0}, {"step": 3, "stage": "kl", "reward": -1.0, "kl_valid": 0.25, "kl_valid_relative": 0.75}]
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(json.dumps(e) + "\n" for e in events))
    found, _ = format_table("curves", tmp_path / "a", tmp_path / "b")
    assert found[0][2:5] == ["loss or reward (1)", "held-out KL (1)", "as part of h2o's (1)"]
    assert found[1] == ["2", "rank", *["3.000", "0.5000", "1.500"] * 2]
    assert found[2] == ["3", "kl", *["-1.000", "0.2500", "0.750"] * 2]


def test_errors_add_up(tmp_path):
    def row(policy, right, wrong, length):
        return {"kv_policy": policy, "kv_ratio": 0.5, "length_ratio": length,
                "errors": {"right": right, "repetitive": 1, "over_length": 0, "wrong": wrong}}
    for task, numbers in (("needle", (3, 2, 1.5)), ("arithmetic", (4, 0, 0.5))):
        document = {"model": "m", "seed": 1, "lengths": [64], "items": 6, "task": task, "complete": True,
                    "rows": [{**row("full", 6, 0, 1), "kv_ratio": 1}, row("h2o", *numbers)]}
        (tmp_path / task).write_text(json.dumps(document))
    found, _ = format_table("errors", tmp_path / "needle", tmp_path / "arithmetic")
    assert found[1:] == [["`h2o`", "50 %", "3 / 1 / 0 / 2; 1.50", "4 / 1 / 0 / 0; 0.50", "7 / 2 / 0 / 2; 1.00"]]


# On the model.


def test_positions_of_streaming_are_known(tmp_path):
    options = ("--limit", "2", "--length", "128", "--ratio", "0.5", "--policies", "streaming,sinks=5 h2o")
    found = table("positions", tmp_path, *options)
    assert found[1][:6] == ["`streaming,sinks=5`", "50 %", "100", f"{100 * (64 - 36) / 92:.0f}", "100",
                            "100 / 100 / 100 / 100 / 100 / 0 / 0 / 0"]
    assert found[0][6] == "distance from the end 1 / 2 / 3-4 / 5-8 / 9-16 / 17-32 / 33-64 / 65-128"
    assert found[1][6] == f"100 / 100 / 100 / 100 / 100 / 100 / {100 * 27 / 32:.0f} / 0" and found[2][0] == "`h2o`"
    assert (tmp_path / "positions/positions-128.svg").exists()
    results, = (tmp_path / "results").iterdir()
    before = results.read_text()
    assert table("positions", tmp_path, *options) == found and results.read_text() == before  # nothing was run again


def test_base_is_there_once(tmp_path):
    options = ("--limit", "1", "--length", "96", "--ratio", "0.5")
    for policies in ("streaming", "streaming h2o,interval=16"):
        found = table("trained", tmp_path, *options, "--policies", policies)
        assert sorted(row[0] for row in found[1:]) == ["`full`", "`h2o,interval=16`", "`streaming`"]
        assert next(row for row in found if "h2o" in row[0])[1].startswith("1 (KL 0.")


def test_training_is_done_once(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f" = Ship {i} = \n" + "The keeper wrote the hour of the ship into the book. " * 50 for i in range(24)))
    options = ("--text", text, "--steps", "2", "--seeds", "7", *TINY_TRAINING)
    found = table("curves", tmp_path / "state", *options)
    assert [row[0] for row in found[1:]] == ["1", "2"] and [row[1] for row in found[1:]] == ["rank", "kl_parameter"]
    trained = {f.name: f.read_bytes() for f in (tmp_path / "state/trained").glob("*.*") if f.is_file()}
    assert {"curves-seed7.safetensors", "curves-seed7.svg"} <= set(trained)
    again = run("curves", "--program", PROGRAM, "--state", tmp_path / "state", *options)
    assert cells(again.stdout) == found and ": training" not in again.stderr
    other = run("curves", "--program", PROGRAM, "--state", tmp_path / "state", *options, "--set", "hidden=8")
    assert other.returncode == 0 and ": training curves-seed7" in other.stderr  # of other options: anew
    assert (tmp_path / "state/trained/curves-seed7.safetensors").read_bytes() != trained["curves-seed7.safetensors"]


def test_rewards_train_five_policies(tmp_path):
    found = table("rewards", tmp_path, "--steps", "1", "--rank-steps", "1", "--limit", "1", "--length", "128", "--ratio", "0.5",
                  *TINY_TRAINING)
    assert [row[0] for row in found[1:]] == ["`full`", "`h2o,interval=16`", "warm start alone", "kl", "kl, no entropy bonus",
                                             "rollout8", "ranking"]
    assert all(re.match(r"\d+\.\d\d \[", row[1]) for row in found[3:])


def test_the_paper_s_recipe_is_beside_the_shipped_policy(tmp_path):
    found = table("paper", tmp_path, "--steps", "1", "--limit", "1", "--length", "96", "--ratio", "0.5",
                  *TINY_TRAINING[2:], model=MODEL)  # the one that a policy is shipped for
    assert [row[0] for row in found[1:]] == ["`full`", "`h2o,interval=16`", "h2o at the paper's interval, 1",
                                             "the shipped policy", "recipe paper"]
    assert all(re.match(r"\d+\.\d\d \[", row[1]) for row in found[3:])


def test_networks_of_another_model_are_carried_over(tmp_path):
    found = table("transfer", tmp_path, "--from", MODEL, "--steps", "2", "--policies", "streaming", "--limit", "1",
                  "--length", "96", "--ratio", "0.5", *TINY_TRAINING)
    assert [row[0] for row in found[1:]] == [
        "`full`", "`h2o,interval=16`", "`streaming`", "the paper's five, trained on the other model",
        "statistics, trained on the other model", "the paper's five, trained on this model", "content, trained on this model"]
    assert all(re.match(r"\d+\.\d\d \[", row[1]) for row in found[3:])


def test_latency_has_the_phases(tmp_path):
    found = table("latency", tmp_path, "--depth", "96", "--batch", "2", "--policies", "h2o distillcache", "--ratio", "0.5",
                  "--", "--prefill", "16", "--decode", "16", model=MODEL)  # the one that a policy is shipped for
    assert found[0][5:9] == ["statistics", "score", "select", "compact"]
    assert [row[0].split(",")[0] for row in found[1:]] == ["full", "h2o", "distillcache"]
    assert found[1][5:9] == [""] * 4 and all(float(cell) >= 0 for row in found[2:] for cell in row[6:9])
