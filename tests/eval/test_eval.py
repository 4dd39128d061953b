# SPDX-License-Identifier: Apache-2.0
"""`distillcache eval` in sizes that take seconds: its document, its files, stopping and resuming; and its figures against
recomputation: KL, loss and kept tokens by the NumPy reference, means and intervals from the results that --resume keeps.
No test asserts a time.

Needs DISTILLCACHE_TEST_MODEL and the programs in DISTILLCACHE_TEST_BUILD (default: build/ of the repository).
DISTILLCACHE_TEST_SLIM_MODEL names the model with less arithmetic (slim_model.py); without it the other one is taken.
"""
import csv
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
SPEAKING_MODEL = os.environ["DISTILLCACHE_TEST_MODEL"]
MODEL = os.environ.get("DISTILLCACHE_TEST_SLIM_MODEL") or SPEAKING_MODEL
TIMEOUT_S = 300
ROW_KEYS = {"task", "kv_policy", "kv_ratio", "length", "n", "tokens_per_second", "kv_tokens_kept", "kv_tokens_seen",
            "kv_bytes", "kv_bytes_full", "kept_sinks", "kept_recent", "kept_between", "kept_first", "kept_distance"}
KL_KEYS = {"kl", "kl_ci", "kl_geometric", "top1", "perplexity", "perplexity_full", "perplexity_increase"}
ANSWER_KEYS = {"score", "score_ci", "score_full", "score_difference", "score_difference_ci", "chance", "claimed",
               "full_right", "errors", "gold_logprob", "gold_logprob_ci", "gold_logprob_full", "gold_logprob_difference",
               "gold_logprob_difference_ci", "length_ratio"}
POLICIES = ("--kv-policy", "h2o", "--kv-policy", "streaming,sinks=8", "--kv-ratio", "0.5,0.2")
NEEDLE = ("--task", "needle", "--length", "200,320", "--limit", "3", *POLICIES)
KL = ("--task", "kl", "--length", "160", "--continuation", "8", "--limit", "3", *POLICIES)


def command(*options):
    return [BUILD / "distillcache", "eval", "--model", MODEL, *map(str, options)]


def run_eval(*options):
    return subprocess.run(command(*options), timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def document(*options):
    done = run_eval("--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def results_of(file):
    return [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()]


def without_speed(doc):
    """The document without what differs from run to run."""
    doc = json.loads(json.dumps(doc))
    for row in doc["rows"] + doc["groups"]:
        del row["tokens_per_second"]
    return doc


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def needle(folder):
    return document(*NEEDLE, "--csv", folder / "needle.csv", "--svg", folder / "needle", "--resume", folder / "needle.jsonl")


@pytest.fixture(scope="module")
def kl(folder):
    return document(*KL, "--svg", folder / "kl", "--resume", folder / "kl.jsonl")


# Document.


def test_rows_of_needle(needle):
    rows = [(r["kv_policy"], r["kv_ratio"], r["length"]) for r in needle["rows"]]
    variants = [("full", 1)] + [(p, r) for p in ("h2o", "streaming,sinks=8") for r in (0.5, 0.2)]
    assert rows == [(p, r, length) for length in (200, 320) for p, r in variants]
    assert needle["complete"] and needle["lengths"] == [200, 320] and needle["items"] == 6 and needle["skipped"] == 0
    for row in needle["rows"]:
        assert set(row) == ROW_KEYS | ANSWER_KEYS
        assert row["n"] == 3 and sum(row["errors"].values()) == row["full_right"]
        assert row["score_ci"][0] <= row["score"] <= row["score_ci"][1]
        assert row["gold_logprob"] < 0
    assert {r["group"] for r in needle["groups"]} == {"depth 0.00", "depth 0.25", "depth 0.50"}


def test_full_is_its_own_reference(needle, kl):
    for row in needle["rows"]:
        if row["kv_policy"] == "full":
            assert row["score"] == row["score_full"] and row["score_difference_ci"] == [0, 0]
            assert row["gold_logprob_difference"] == 0 and row["length_ratio"] == 1
            assert row["errors"]["right"] == row["full_right"] and row["kv_bytes"] <= row["kv_bytes_full"]
    full = kl["rows"][0]
    assert full["kl"] == 0 and full["kl_geometric"] == 0 and full["top1"] == 1 and full["perplexity_increase"] == 1


def test_rows_of_kl(kl):
    for row in kl["rows"]:
        assert set(row) == ROW_KEYS | KL_KEYS
        assert row["perplexity_full"] == kl["rows"][0]["perplexity"]
        assert row["kl_ci"][0] <= row["kl"] <= row["kl_ci"][1]
    assert [r["group"] for r in kl["groups"]] == ["text", "own"] * 5
    by_name = {(r["kv_policy"], r["kv_ratio"]): r for r in kl["rows"]}
    for policy in ("h2o", "streaming,sinks=8"):
        assert 0 < by_name[policy, 0.5]["kl"] < by_name[policy, 0.2]["kl"]


def test_ratio_of_bytes():
    """Statistics and summary slots (policy/README.md, engine/summary.h) count: keys and values of a slot take 256 bytes and
    its position 4; h2o's sum 8; the sums of a summary slot 130 floats and itself 129."""
    doc = document("--task", "kl", "--length", "256", "--continuation", "1", "--limit", "1", "--kv-ratio", "0.5",
                   "--kv-ratio-of", "bytes", "--kv-policy", "streaming", "--kv-policy", "h2o", "--kv-policy",
                   "h2o,summary=1", "--kv-policy", "streaming,tokens=40")
    kept = {row["kv_policy"]: row["kv_tokens_kept"] for row in doc["rows"]}
    assert kept["streaming"] == 128
    assert kept["h2o"] == 128 * 260 // 268
    assert kept["h2o,summary=1"] == (128 * 260 - 131 * 4) // 268  # the slot that it is has no page
    assert kept["streaming,tokens=40"] == 40


def test_budget_is_what_is_held(kl, needle):
    for row in kl["rows"]:
        if row["kv_policy"] != "full":
            assert row["kv_tokens_seen"] == 168
            assert row["kv_tokens_kept"] == max(math.floor(row["kv_ratio"] * 168), 32)
            assert row["kv_bytes"] < row["kv_bytes_full"]
    for row in needle["rows"]:
        assert row["length"] * 0.8 < row["kv_tokens_seen"] <= row["length"] + 10


def test_kept_positions_are_those_of_streaming(kl):
    """What streaming with 8 sinks holds of a prompt of 160 tokens is known without running it."""
    for row in (r for r in kl["rows"] if r["kv_policy"] == "streaming,sinks=8"):
        recent = max(math.floor(row["kv_ratio"] * 160), 32) - 8
        kept = [p < 8 or p >= 160 - recent for p in range(160)]
        assert row["kept_sinks"] == 1 and row["kept_first"] == [1] * 8
        assert row["kept_recent"] == pytest.approx(np.mean(kept[-32:]))
        assert row["kept_between"] == pytest.approx(np.mean(kept[4:-32]))
        distances = [range(1, 2)] + [range(2 ** n // 2 + 1, min(2 ** n, 152) + 1) for n in range(1, 9)]
        assert row["kept_distance"] == pytest.approx([np.mean([kept[-d] for d in some]) for some in distances])
    assert kl["rows"][0]["kept_between"] == 1 and set(kl["rows"][0]["kept_distance"]) == {1}


def test_table_has_the_same_rows(needle, folder):
    done = run_eval(*NEEDLE, "--resume", folder / "needle.jsonl")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()[1:] if " tok/s" in line]
    assert [(l[0], float(l[1]), int(l[2]), float(l[4])) for l in lines] == \
        [(r["kv_policy"], r["kv_ratio"], r["length"], round(r["score"], 3)) for r in needle["rows"]]


def test_csv_says_the_same(needle, folder):
    rows = list(csv.DictReader((folder / "needle.csv").open()))
    assert len(rows) == len(needle["rows"]) + len(needle["groups"])
    for line, row in zip(rows, needle["rows"] + needle["groups"]):
        assert line["kv_policy"] == row["kv_policy"] and line["group"] == row.get("group", "")
        assert float(line["score"]) == pytest.approx(row["score"]) and line["kl"] == ""
        assert float(line["gold_logprob_low"]) == pytest.approx(row["gold_logprob_ci"][0], rel=1e-6)


def test_plots_are_xml(needle, kl, folder):
    names = {p.name for p in (folder / "needle").iterdir()}
    assert {"budget-score-200.svg", "budget-score-320.svg", "budget-gold_logprob-320.svg", "length-score.svg",
            "positions-200.svg", "positions-320.svg", "retained-h2o.svg", "retained-streaming_sinks_8.svg", "depth-h2o.svg", "kept-h2o.html",
            "kept-streaming_sinks_8.html"} <= names
    assert {"budget-kl-160.svg", "positions-160.svg"} <= {p.name for p in (folder / "kl").iterdir()}
    for file in [*(folder / "needle").iterdir(), *(folder / "kl").iterdir()]:
        text = file.read_text()
        root = xml.etree.ElementTree.fromstring(re.sub(r"^<!DOCTYPE html>", "", text))
        assert root.tag in ("{http://www.w3.org/2000/svg}svg", "html")
        assert "nan" not in text.lower().replace("nairobi", "") or file.suffix == ".html"


def test_kept_text_is_the_prompt(needle, folder):
    page = xml.etree.ElementTree.fromstring(
        (folder / "needle/kept-streaming_sinks_8.html").read_text().replace("<!DOCTYPE html>", ""))
    texts = page.findall(".//pre")
    assert len(texts) == 2
    spans = [(s.attrib["class"], s.text) for s in texts[0]]
    assert "".join(t for _, t in spans).startswith("Some special magic numbers are hidden in the following text.")
    # Sinks and the most recent tokens are kept by all heads, what lies between by none.
    assert [degree for degree, _ in spans] == ["k7", "k0", "k7"]


# Recomputation.


def selected(results, **where):
    return [r for r in results if all(r[k] == v for k, v in where.items())]


def test_means_are_those_of_the_results(kl, needle, folder):
    results = results_of(folder / "kl.jsonl")
    assert len(results) == 3 * 2 * 5
    for row in kl["rows"]:
        own = selected(results, kv_policy=row["kv_policy"], kv_ratio=row["kv_ratio"])
        values = np.array([r["kl"] for r in own])
        assert row["kl"] == pytest.approx(values.mean(), rel=1e-6, abs=1e-12)
        assert row["top1"] == pytest.approx(np.mean([r["top1"] for r in own]))
        text = [r for r in own if r["group"] == "text"]
        assert row["perplexity"] == pytest.approx(math.exp(np.mean([r["loss"] for r in text])), rel=1e-6)
        if row["kv_policy"] != "full":
            assert row["kl_geometric"] == pytest.approx(math.exp(np.log(np.maximum(values, 1e-9)).mean()), rel=1e-6)
    results = results_of(folder / "needle.jsonl")
    for row in needle["rows"]:
        own = selected(results, kv_policy=row["kv_policy"], kv_ratio=row["kv_ratio"], length=row["length"])
        full = selected(results, kv_policy="full", length=row["length"])
        assert row["score"] == pytest.approx(np.mean([r["score"] for r in own]))
        assert row["gold_logprob_difference"] == pytest.approx(
            np.mean([r["gold_logprob"] for r in own]) - np.mean([r["gold_logprob"] for r in full]), rel=1e-6, abs=1e-9)
        for result in own:  # the score says whether the number is in the output
            assert result["score"] == (result["gold"] in result["output"])


def test_intervals_are_those_of_a_bootstrap(folder):
    file = folder / "many.jsonl"
    doc = document("--task", "kl", "--length", "64", "--continuation", "4", "--limit", "25", "--kv-policy", "streaming",
                   "--kv-ratio", "0.5", "--resume", file)
    row = doc["rows"][1]
    results = selected(results_of(file), kv_policy="streaming")
    items = np.array([np.mean([r["kl"] for r in results if r["item"] == i]) for i in range(25)])
    means = items[np.random.default_rng(0).integers(0, 25, (20000, 25))].mean(1)
    width = np.quantile(means, 0.975) - np.quantile(means, 0.025)
    assert row["kl_ci"][0] == pytest.approx(np.quantile(means, 0.025), abs=0.06 * width)
    assert row["kl_ci"][1] == pytest.approx(np.quantile(means, 0.975), abs=0.06 * width)


@pytest.fixture(scope="module")
def reference():
    sys.path.insert(0, str(ROOT / "tests/reference"))
    from reference import model as reference_model
    from reference import policies as reference_policies
    return reference_model, reference_policies, reference_model.Model(MODEL)


TEXT = ("The lobster lives on the sea floor, where it hides under rocks by day and comes out at night to feed. The old "
        "fisherman knew the rocks well. He had set his pots there for forty years, and his father before him, and in all "
        "that time the sea had never given him nothing. On the morning of the storm he went out alone, for the boy was "
        "ill, and the wind stood in the east. The lobster pots lay heavy in the boat, and the gulls cried over the grey "
        "water as he rowed towards the rocks where the lobster lives.")
STEPS = 6


def encode(text):
    data = text.encode()
    done = subprocess.run([BUILD / "tests/model/encode_texts", MODEL], input=len(data).to_bytes(4, "little") + data,
                          stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    return [int(i) for i in done.stdout.split()]


@pytest.mark.parametrize("policy,budget", [("h2o", 0.3), ("snapkv", 0.4)])
def test_kl_is_that_of_the_reference(policy, budget, reference, folder):
    """The same text, teacher-forced through the NumPy model with the reference's own policy, in float32."""
    reference_model, reference_policies, model = reference
    ids = encode(TEXT)
    length = len(ids) - STEPS - 1
    file, log = folder / f"{policy}.txt", folder / f"{policy}.jsonl"
    file.write_text(TEXT)
    document("--task", "kl", "--data", file, "--length", length, "--continuation", STEPS, "--limit", 1, "--kv-policy",
             policy, "--kv-ratio", budget, "--precision", "f32", "--kv-format", "f32", "--resume", log)
    students = []
    for name in ("full", policy):
        sequence = reference_policies.Sequence(model, reference_policies.POLICIES[name],
                                               reference_policies.Budget(ratio=budget, b_min=32))
        first = sequence.prefill(ids[:length])[-1]
        sequence.prune()
        students.append(sequence)
    for part, group in enumerate(("text", "own")):
        full, pruned = (s.fork(s.policy, s.budget) for s in students)
        token, kl, loss = (ids[length] if part == 0 else int(first.argmax())), [], []
        for step in range(STEPS):
            p = reference_model.log_softmax(full.step(token).astype(np.float64))
            q = reference_model.log_softmax(pruned.step(token).astype(np.float64))
            token = ids[length + step + 1] if part == 0 else int(p.argmax())
            kl.append((np.exp(p) * (p - q)).sum())
            loss.append(-q[token])
        result, = selected(results_of(log), kv_policy=policy, group=group)
        assert result["loss"] == pytest.approx(np.mean(loss), abs=2e-3)
        assert result["kl"] == pytest.approx(np.mean(kl), rel=0.02, abs=5e-5)
        assert np.mean(kl) > 1e-3  # or nothing was compared


# Choices.


def test_query_aware_prunes_after_the_question(needle):
    aware = document(*NEEDLE, "--query-aware")
    for row, other in zip(aware["rows"], needle["rows"]):
        if row["kv_policy"] == "full":
            assert row["gold_logprob"] == pytest.approx(other["gold_logprob"], abs=1e-6)
        else:
            assert row["gold_logprob"] != other["gold_logprob"]
    assert aware["query_aware"] is True


def test_seed_chooses_the_items(needle, folder):
    again = document(*NEEDLE)
    assert without_speed(again) == without_speed(needle)
    other = document(*NEEDLE, "--seed", "2")
    assert other["rows"][0]["gold_logprob"] != needle["rows"][0]["gold_logprob"]


@pytest.mark.parametrize("task", ["multi-needle", "kv-retrieval", "variable-tracking", "arithmetic"])
def test_other_generated_tasks(task):
    doc = document("--task", task, "--length", "320", "--limit", "2", "--kv-policy", "h2o", "--kv-ratio", "0.5")
    assert [r["kv_policy"] for r in doc["rows"]] == ["full", "h2o"]
    assert all(r["n"] == 2 and r["gold_logprob"] < 0 for r in doc["rows"])


def test_own_questions_from_a_file(folder):
    file = folder / "own.jsonl"
    items = [{"context": "The colour of the house is red. ", "question": "The colour of the house is", "answer": "red",
              "max_tokens": 4}, {"prompt": "One, two, three, four, five, six, seven,", "answer": "eight", "max_tokens": 3}]
    file.write_text("".join(json.dumps(i) + "\n" for i in items))
    doc = document("--task", "jsonl", "--data", file, "--kv-policy", "streaming,tokens=8", "--model", SPEAKING_MODEL)
    assert doc["rows"][0]["n"] == 2 and doc["rows"][0]["gold_logprob"] > -4
    assert doc["rows"][1]["kv_tokens"] == 8 and "kv_ratio" not in doc["rows"][1]


@pytest.mark.parametrize("options,words", [
    (("--task", "haystack"), "no task 'haystack', there are: kl; generated: needle"),
    (("--task", "gsm8k"), "needs its file"),
    (("--task", "needle", "--data", "x"), "takes no --data"),
    (("--task", "needle", "--length", "20"), "too short"),
    (("--task", "kl", "--data", "/nonexistent"), "cannot open /nonexistent"),
    (("--task", "needle", "--kv-policy", "h3o"), "h2o"),
    (("--task", "needle", "--kv-ratio", "1.5"), "1.5"),
    (("--task", "needle", "--length", "100000"), "100000"),
    (("--task", "needle", "--kv-policy", "h2o", "--kv-policy", "tova", "--kv-policy", "h2o"), "kv-policy \"h2o\" is given twice"),
    (("--task", "needle", "--kv-policy", "h2o", "--kv-ratio", "0.5,0.50"), "kv-ratio \"0.50\" is given twice"),
    (("--task", "needle", "--length", "320,512,320"), "length \"320\" is given twice"),
    (("--task", "needle", "--csv", "/nonexistent/x"), "cannot write /nonexistent/x"),
    (("--task", "needle", "--batch-tokens", "3"), "--batch-tokens"),
    ((), "task"),
])
def test_refusals_say_why(options, words):
    done = run_eval("--json", *options)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert words in done.stderr


# Stopping and resuming.


def test_stopped_and_resumed_is_as_if_never_stopped(kl, folder):
    file = folder / "stopped.jsonl"
    process = subprocess.Popen(command("--json", *KL, "--resume", file), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    first = next(line for line in process.stderr if " info " not in line)  # not the log's
    assert "item 1 of 3" in first
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    stopped = json.loads(out)
    done = len(results_of(file))
    assert stopped["complete"] is False and 0 < done < 30 and done % 10 == 0
    assert stopped["rows"][0]["n"] == done // 10
    resumed = document(*KL, "--resume", file)
    assert without_speed(resumed) == without_speed(kl)
    assert len(results_of(file)) == 30  # nothing was computed twice


def test_resume_computes_what_is_new_only(folder):
    file = folder / "grown.jsonl"
    some = ("--task", "needle", "--length", "160", "--limit", "2", "--resume", file, "--kv-policy", "h2o")
    document(*some, "--kv-ratio", "0.5")
    first = results_of(file)
    document(*some, "--kv-ratio", "0.5,0.3")
    assert results_of(file)[:4] == first and len(results_of(file)) == 6
    document(*some, "--kv-ratio", "0.5", "--limit", "3")
    assert len(results_of(file)) == 8
    with file.open("a") as out:
        out.write('{"torn": ')
    done = run_eval(*some, "--kv-ratio", "0.3", "--json")
    assert done.returncode == 0 and "not whole" in done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 2


def test_results_do_not_depend_on_memory_or_batches(kl):
    small = document(*KL, "--kv-memory", "14M", "--batch-tokens", "32", "--no-prefix-sharing", "--threads", "1")
    for row in small["rows"] + kl["rows"]:
        row.pop("tokens_per_second"), row.pop("kv_bytes")
    assert small["rows"] == kl["rows"]


# The table of scripts/paper_tables.sh budgets.


def test_table_of_budgets(kl, needle, folder):
    needle = {**needle, "rows": [r for r in needle["rows"] if r["length"] == 200]}
    files = []
    for name, doc in (("kl", kl), ("needle", needle)):
        files.append(folder / f"table-{name}.json")
        files[-1].write_text(json.dumps(doc))
    done = subprocess.run([sys.executable, ROOT / "scripts/paper_tables.py", "budgets", *files], timeout=TIMEOUT_S,
                          text=True, stdout=subprocess.PIPE, check=True)
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line.startswith("|")]
    assert lines[0] == ["tokens kept: 50 % / 20 %", "kl; perplexity", "needle"]
    assert [line[0] for line in lines[2:]] == ["`full`", "`h2o`", "`streaming,sinks=8`"]
    rows = {(r["kv_policy"], r["kv_ratio"]): r for r in kl["rows"]}
    assert lines[3][1] == "; ".join(" / ".join(f"{rows['h2o', ratio][name]:.{digits}f}" for ratio in (0.5, 0.2))
                                    for name, digits in (("kl_geometric", 3), ("perplexity", 1)))
    rows = {(r["kv_policy"], r["kv_ratio"]): r for r in needle["rows"]}
    assert f"({rows['h2o', 0.5]['gold_logprob']:.1f} / {rows['h2o', 0.2]['gold_logprob']:.1f})" in lines[3][2]
