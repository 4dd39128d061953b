# SPDX-License-Identifier: Apache-2.0
"""`distillcache train` in sizes that take seconds: its lines, its files, stopping and resuming, and
wrong usage. That training finds what it should is tests/unit/test_train_rank.c's. No test asserts a time.

Needs DISTILLCACHE_TEST_MODEL, or DISTILLCACHE_TEST_SLIM_MODEL with less arithmetic (slim_model.py), and the programs in
DISTILLCACHE_TEST_BUILD (default: build/ of the repository).
"""
import json
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import xml.etree.ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
MODEL = os.environ.get("DISTILLCACHE_TEST_SLIM_MODEL") or os.environ["DISTILLCACHE_TEST_MODEL"]
SHAPE = json.loads(subprocess.check_output([BUILD / "distillcache", "inspect", "--json", MODEL]))["shape"]
LAYERS, KV_HEADS, HEAD_DIM = (SHAPE[name] for name in ("layers", "kv_heads", "head_dim"))
TIMEOUT_S = 300
STEPS = 12
SIZES = {"sequences": 4, "prompt_least": 96, "prompt_most": 128, "future": 16, "rollout": 16, "valid_prompts": 2,
         "valid_rollout": 8, "valid_every": 5, "checkpoint_every": 4, "warmup_steps": 2}
OPTIONS = ("--method", "ranker", "--steps", STEPS, "--ratio", "0.4,0.3", "--json",
           *(part for name, value in SIZES.items() for part in ("--set", f"{name}={value}")))


def command(out, *options):
    return [BUILD / "distillcache", "train", "--model", MODEL, "--out", out, *map(str, options)]


def run_train(out, *options):
    return subprocess.run(command(out, *options), timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)


def events_of(text):
    return [json.loads(line) for line in text.splitlines()]


def metrics_of(events):
    """What does not depend on the time."""
    keys = ("step", "loss", "gradient_norm", "learning_rate", "kl_valid", "kl_valid_relative", "tokens")
    return {e["step"]: {k: e[k] for k in keys if k in e} for e in events if e["event"] == "metrics"}


def safetensors(file):
    data = pathlib.Path(file).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    return header.pop("__metadata__"), header


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def text(folder):
    """Lines of which none is like another, so that cuts differ."""
    lines = [f"{i}. The {a} of {b} weighed {i * i % 97} pounds and was sold to {c}."
             for i, (a, b, c) in enumerate((x, y, z) for x in ("barrel", "crate", "sack", "chest")
                                           for y in ("apples", "iron", "wool", "salt", "books")
                                           for z in ("the miller", "a ship", "the town", "my uncle"))]
    file = folder / "text.txt"
    file.write_text("\n".join(lines * 3) + "\n")
    return file


@pytest.fixture(scope="module")
def whole(folder, text):
    done = run_train(folder / "whole.safetensors", "--data", text, *OPTIONS, "--plot", folder / "curves.svg")
    assert done.returncode == 0, done.stderr
    return events_of(done.stdout)


def test_lines(whole):
    metrics = [e for e in whole if e["event"] == "metrics"]
    assert [e["step"] for e in metrics] == list(range(1, STEPS + 1))
    for event in metrics:
        assert event["stage"] == "rank" and event["steps"] == STEPS and event["seconds_left"] >= 0
        assert event["loss"] > 0 and event["gradient_norm"] > 0 and 0 < event["learning_rate"] < 0.00301
        compared = event["step"] in (5, 10, STEPS)
        assert ("kl_valid" in event) == compared and ("kl_valid_relative" in event) == compared
        assert "reward" not in event and "entropy" not in event
    checkpoints = [e for e in whole if e["event"] == "checkpoint"]
    assert [e["step"] for e in checkpoints] == [4, 8, STEPS] and {e["stage"] for e in whole} == {"rank"}
    assert all(pathlib.Path(e["file"]).is_file() for e in checkpoints)


def test_policy_file(whole, folder):
    metadata, tensors = safetensors(folder / "whole.safetensors")
    record = json.loads(metadata["record"])
    assert metadata["method"] == "ranker" and metadata["features"] == "content"
    assert record["options"]["rank_steps"] == str(STEPS) and record["data"] == "text.txt"
    relative = {v["step"]: v["relative_to_h2o"] for v in record["held_out"]}
    by_event = {e["step"]: e["kl_valid_relative"] for e in whole if "kl_valid_relative" in e}
    assert relative.keys() == by_event.keys()
    assert all(math.isclose(relative[s], by_event[s], rel_tol=1e-5) for s in relative)
    # The best of those compared is what is written.
    best = min((e["kl_valid"], e["step"]) for e in whole if "kl_valid" in e)[1]
    assert record["step"] == best
    assert tensors["content"]["shape"] == [LAYERS * KV_HEADS, 4, HEAD_DIM]


def test_plot(whole, folder):
    root = xml.etree.ElementTree.parse(folder / "curves.svg").getroot()
    names = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"loss", "held-out KL"} <= names and "reward" not in names


def test_interrupted_and_resumed(whole, folder, text):
    out = folder / "part.safetensors"
    process = subprocess.Popen(command(out, "--data", text, *OPTIONS), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    seen = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if seen[-1]["event"] == "metrics" and seen[-1]["step"] == 6:
            process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 1
    assert "stopped at step" in process.stderr.read()
    assert not out.exists()
    done = run_train(out, "--data", text, *OPTIONS, "--resume")
    assert done.returncode == 0, done.stderr
    again = events_of(done.stdout)
    assert again[0]["message"].startswith("resumed at step")
    expected = metrics_of(whole)
    assert metrics_of(seen).items() <= expected.items() and metrics_of(again).items() <= expected.items()
    assert {**metrics_of(seen), **metrics_of(again)} == expected
    assert out.read_bytes() == (folder / "whole.safetensors").read_bytes()


def test_the_policy_serves(whole, folder, text):
    done = subprocess.run([BUILD / "distillcache", "eval", "--model", MODEL, "--task", "kl", "--data", text, "--json",
                           "--length", "160", "--continuation", "8", "--limit", "2", "--kv-ratio", "0.4", "--kv-policy",
                           f"distillcache:{folder / 'whole.safetensors'}", "--kv-policy", "random"],
                          timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    rows = json.loads(done.stdout)["rows"]
    # Its interval is 16: pruned once, after the prompt, to one less than the budget beside the summary.
    assert [r["kv_tokens_kept"] for r in rows] == [168, 0.4 * 160 - 1 + 8, math.floor(0.4 * 168)]


def test_gates(folder, text):
    """Method rlkv: its file is what the policy reads."""
    out = folder / "gates.json"
    done = run_train(out, "--data", text, *OPTIONS, "--method", "rlkv", "--steps", 2, "--ratio", "0.8", "--students", 2)
    assert done.returncode == 0, done.stderr
    events = events_of(done.stdout)
    metrics = [e for e in events if e["event"] == "metrics"]
    assert [e["stage"] for e in metrics] == ["gates", "gates"] and "kl_valid" in metrics[-1]
    assert all(e["entropy"] > 0 and "loss" not in e for e in metrics)
    written = json.loads(out.read_text())
    assert [len(layer) for layer in written["gates"]] == [KV_HEADS] * LAYERS and written["method"] == "rlkv"
    assert written["record"]["options"]["gate_steps"] == "2"
    assert any(gate != 0.5 for layer in written["gates"] for gate in layer)
    done = subprocess.run([BUILD / "distillcache", "eval", "--model", MODEL, "--task", "kl", "--data", text, "--json",
                           "--length", "160", "--continuation", "8", "--limit", "1", "--kv-policy",
                           f"rlkv:{out},sparsity=0.5"], timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["rows"][1]["kv_tokens_kept"] == (168 + 80) / 2


def test_rollouts(folder, text):
    """The paper's recipe, and a reward on recorded examples: they report what they learn from."""
    for reward, sampler in (("kl", "gumbel"), ("rollout8", "subset"), ("ranking", "gumbel")):
        done = run_train(folder / f"{reward}.safetensors", "--data", text, *OPTIONS, "--method", "distillcache",
                         "--recipe", "paper", "--steps", 2, "--students", 2, "--set", f"reward={reward}", "--set",
                         f"sampler={sampler}", "--set", "valid_prompts=0")
        assert done.returncode == 0, done.stderr
        metrics = [e for e in events_of(done.stdout) if e["event"] == "metrics"]
        assert [e["stage"] for e in metrics] == ["kl", "kl"]
        for event in metrics:
            assert event["entropy"] > 0 and event["gradient_norm"] > 0
            assert event["reward"] < 0 if reward != "ranking" else 0 < event["reward"] <= 1


@pytest.mark.parametrize("options, message", [
    (("--set", "colour=red"), "no option is called \"colour\": method, recipe"),
    (("--set", "hidden"), "must be NAME=VALUE"),
    (("--set", "method=rlkv"), "give --method instead"),
    (("--ratio", "0.5,2"), "option --ratio"),
    (("--data", "/nowhere.txt"), "/nowhere.txt"),
    (("--set", "prompt_most=100000"), "more than the"),
])
def test_wrong_usage(folder, options, message):
    done = run_train(folder / "wrong.safetensors", "--method", "ranker", *options)
    assert done.returncode in (1, 2) and message in done.stderr
    assert not (folder / "wrong.safetensors").exists()


# The data of scripts/train_policy.sh.

def test_training_data(tmp_path):
    """The first half of the lines by articles, and questions in groups; always the same."""
    text, questions = tmp_path / "text.txt", tmp_path / "questions.jsonl"
    article = " = Title {} = \n" + "A line about it .\n" * 200 + " = = A part = = \n" + "Another line .\n" * 50
    text.write_text("".join(article.format(i) for i in range(8)), encoding="utf-8")
    questions.write_text("".join(json.dumps({"question": f"{i} + 1 ?", "answer": f"{i + 1}"}) + "\n" for i in range(90)),
                         encoding="utf-8")
    command = [sys.executable, ROOT / "scripts/training_data.py", text]
    alone, twice, more = (subprocess.run(command + rest, timeout=60, text=True, check=True, stdout=subprocess.PIPE).stdout
                          for rest in ([], [], [questions]))
    assert alone == twice
    articles = [json.loads(line)["text"] for line in alone.splitlines()]
    assert sorted(a.split("\n")[0] for a in articles) == [f" = Title {i} = " for i in range(4)]
    assert all(a.count("= = A part = =") == 1 for a in articles)
    texts = [json.loads(line)["text"] for line in more.splitlines()]
    asked = [t for t in texts if t.startswith("Question: ")]
    assert set(articles) <= set(texts) and len(asked) == 60 and len(texts) == 64
    assert all(t.count("Question: ") == 8 and t.count("\nAnswer: ") == 8 for t in asked)
