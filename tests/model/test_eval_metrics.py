# SPDX-License-Identifier: Apache-2.0
"""Metrics and files of the evaluation beside independent implementations: the package rouge, difflib, and LongBench's
and SQuAD's definitions in plain Python. Needs no model."""
import collections
import difflib
import hashlib
import json
import os
import random
import re
import string
import subprocess
import unicodedata
from pathlib import Path

import pytest
from rouge import Rouge

ROOT = Path(__file__).resolve().parents[2]
SEED = 20231103
CASES = 1500

# SHA-256, first 16 digits, of LongBench's published prompt formats (config/dataset2prompt.json).
PROMPTS = {
    "narrativeqa": "5178f3835db90239",
    "qasper": "0fbdd123fe7f83d6",
    "multifieldqa_en": "20b4666a2de8a1f7",
    "hotpotqa": "9ec4ae308865bd0c",
    "2wikimqa": "9ec4ae308865bd0c",
    "musique": "9ec4ae308865bd0c",
    "gov_report": "91c25d585b189ced",
    "qmsum": "dca23b678fe0183b",
    "multi_news": "2af3f28c40b902e6",
    "trec": "0eff8bebdba99d91",
    "triviaqa": "00a802e6377e72fc",
    "samsum": "a68d884234907eef",
    "lsht": "f3edabdf7fae53d6",
    "passage_count": "986550b6c61009c6",
    "passage_retrieval_en": "39b96b7fa52bdd2a",
    "passage_retrieval_zh": "c1e2346e245eb365",
    "lcc": "6a1f24cf0bb83cd9",
    "repobench-p": "ee9ec182ea5ffeb7",
}
OUTPUT_LENGTHS = {"narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "hotpotqa": 32, "2wikimqa": 32, "musique": 32,
                  "gov_report": 512, "qmsum": 512, "multi_news": 512, "trec": 64, "triviaqa": 32, "samsum": 128,
                  "lsht": 64, "passage_count": 32, "passage_retrieval_en": 32, "passage_retrieval_zh": 32, "lcc": 64,
                  "repobench-p": 64}
OUTSIDE_CHAT = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def tool(arguments, text=None):
    path = Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build")) / "tests" / "model" / "eval_tool"
    return subprocess.run([path, *map(str, arguments)], input=text, capture_output=True, text=True, encoding="utf-8",
                          timeout=120)


def scores(cases):
    done = tool(["score"], "".join(json.dumps(case) + "\n" for case in cases))
    assert done.returncode == 0, done.stderr
    values = [float(line) for line in done.stdout.split()]
    assert len(values) == len(cases)
    return values


def load(task, path, *options):
    done = tool(["load", task, path, *options])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines[:-1]], int(lines[-1])


# References.

def normalise(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(?:the|an|a)\b", " ", text).split()


def f1(output, answer):
    output, answer = normalise(output), normalise(answer)
    same = (collections.Counter(output) & collections.Counter(answer)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(output), same / len(answer)
    return 2 * precision * recall / (precision + recall)


def rouge_l(output, answer):
    try:
        return Rouge().get_scores([output], [answer], avg=True)["rouge-l"]["f"]
    except ValueError:  # a text without a sentence
        return 0.0


def edit(output, answer):
    lines = [line for line in output.lstrip("\n").split("\n") if not re.search("[`#]|//", line)]
    line = lines[0] if lines else ""
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def digits(output, number):
    numbers = re.findall(r"\d+", output)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def retrieval(output, answer):
    return digits(output, re.search(r"Paragraph (\d+)", answer).group(1))


def classification(output, answer, classes):
    matched = [name for name in classes if name in output]
    for name in matched:  # the list changes under the loop, as in LongBench
        if name != answer and name in answer:
            matched.remove(name)
    return 1 / len(matched) if answer in matched else 0.0


def contains_any(output, answer):
    output, answer = " ".join(normalise(output)), " ".join(normalise(answer))
    return float(answer != "" and answer in output)


def contains(output, answer):
    return float(answer != "" and answer.lower() in output.lower())


# Random texts that have much in common. Characters are those of Unicode 3.2, about which all later tables agree.

WORDS = ("the a an The AN answer Paris paris. New York's 42 1,000 x=1; // # ` foo_bar(a, b) don't État ΣΊΣΥΦΟΣ ΟΔΟΣ, İstanbul "
         "STRASSE straße ١٢٣ 12 3 ½ 你好 世界 Paragraph paragraph a\u0301 e\u0301 naïve ﬁ Ⅷ _ _the_ \u00a0 \u3000 \u1680 ... . ! "
         "class number location human entity").split(" ")
SPACES = [" ", " ", " ", " ", "  ", "\n", "\t", ". ", ".", "", ", ", "\u2003", "\x1c"]


def any_character(rng):
    while True:
        c = chr(rng.randrange(1, rng.choice([0x80, 0x250, 0x530, 0x3100, 0x20000])))
        if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co"):
            return c


def random_text(rng, most=25):
    text = ""
    for _ in range(rng.randrange(most)):
        text += any_character(rng) if rng.random() < 0.05 else rng.choice(WORDS)
        text += rng.choice(SPACES)
    return text


def changed(rng, text):
    """The text with some of it left out, doubled or replaced."""
    parts = re.split(r"(\s+)", text)
    return "".join(rng.choice(["", part, part, part, part, part + part, part.upper(), rng.choice(WORDS)]) for part in parts)


def pairs(seed, count=CASES, most=25):
    rng = random.Random(seed)
    for _ in range(count):
        text = random_text(rng, most)
        yield (changed(rng, text), text) if rng.random() < 0.8 else (random_text(rng, most), text)


def compare(metric, reference, cases, **fields):
    cases = list(cases)
    got = scores([{"metric": metric, "output": output, "answers": [answer], **fields} for output, answer in cases])
    wanted = [reference(output, answer) for output, answer in cases]
    for case, a, b in zip(cases, got, wanted):
        assert a == pytest.approx(b, abs=1e-12), (SEED, metric, case)
    assert len(set(wanted)) > 1, "the cases tell nothing apart"


@pytest.mark.parametrize("metric, reference", [("f1", f1), ("rouge-l", rouge_l), ("edit", edit), ("contains", contains),
                                               ("contains-any", contains_any)])
def test_random_texts(metric, reference):
    compare(metric, reference, pairs(SEED))


def test_every_lower_case():
    """Lower case, white space, punctuation and words of every character, in F1's normalisation."""
    characters = [chr(i) for i in range(1, 0x1E000) if unicodedata.ucd_3_2_0.category(chr(i)) not in ("Cn", "Cs", "Co")]
    compare("f1", f1, [("a" + c + "the " + c + "x", "the" + c.lower() + "a") for c in characters])


def test_rouge_of_long_texts():
    compare("rouge-l", rouge_l, pairs(SEED + 1, 60, 300))


def test_edit_of_long_lines():
    """Lines of 200 characters and more, in which difflib leaves frequent characters out."""
    rng = random.Random(SEED + 2)
    alphabet = "abcdefghijklmnopqrstuvwxyz(){}=+ \u00e9\u4f60"
    cases = []
    for _ in range(150):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(150, 900)))
        other = "".join(c for c in text if rng.random() < 0.8)
        cases.append((other, text) if rng.random() < 0.7 else (text[::-1], text))
    compare("edit", edit, cases)


def test_numbers_of_the_output():
    rng = random.Random(SEED + 3)
    outputs = [" ".join(rng.choice(["Paragraph 3", "3", "03", "33", "x3y", "3.3", "\u0663", "12", "none", "3\n"])
                        for _ in range(rng.randrange(6))) for _ in range(300)]
    compare("count", digits, [(output, "3") for output in outputs])
    compare("retrieval", retrieval, [(output, "Paragraph 3") for output in outputs])


def test_classes():
    rng = random.Random(SEED + 4)
    classes = ["Date", "Other date", "Date of birth", "a", "at", "Dat", "Other", "", "Date", "of"]
    cases = [(" ".join(rng.choice(classes) for _ in range(rng.randrange(5))), rng.choice(classes)) for _ in range(500)]
    compare("classification", lambda output, answer: classification(output, answer, classes), cases, classes=classes)


def test_best_of_answers_and_first_line():
    got = scores([
        {"metric": "f1", "output": "\n\nParis\nLondon", "answers": ["Rome", "London"], "first_line": True},
        {"metric": "f1", "output": "\n\nParis\nLondon", "answers": ["Rome", "Paris"], "first_line": True},
        {"metric": "f1", "output": "\n\nParis\nLondon", "answers": ["Rome", "Paris"]},
        {"metric": "contains", "output": "12 and 15", "answers": ["12", "13", "14", "15"]},
    ])
    assert got == [0, 1, pytest.approx(2 / 3), 0.5]


# Files.

def longbench_line(name, **fields):
    return json.dumps({"input": "<input>", "context": "<context>", "answers": ["Paragraph 1"], "length": 1, "dataset": name,
                       "language": "en", "all_classes": ["x"], "_id": "1", **fields}) + "\n"


def test_longbench_prompts_are_the_published_ones(tmp_path):
    path = tmp_path / "all.jsonl"
    path.write_text("".join(longbench_line(name) for name in PROMPTS), encoding="utf-8")
    items, skipped = load("longbench", path)
    assert skipped == 0 and [item["group"] for item in items] == list(PROMPTS)
    for item in items:
        name = item["group"]
        assert item["context"].endswith("<context>")
        prompt = (item["context"] + item["question"]).replace("<context>", "{context}").replace("<input>", "{input}")
        assert hashlib.sha256(prompt.encode()).hexdigest()[:16] == PROMPTS[name], name
        assert item["max_tokens"] == OUTPUT_LENGTHS[name], name
        assert item["chat"] == (name not in OUTSIDE_CHAT), name
        assert item["first_line"] == (name in {"trec", "triviaqa", "samsum", "lsht"}), name


def test_a_sample_is_a_function_of_the_seed(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": "w " * i, "answer": str(i)}) + "\n" for i in range(1, 101)))
    samples = [[int(item["answers"][0]) for item in load("jsonl", path, "--limit", 10, "--seed", seed)[0]]
               for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0] == sorted(samples[0]) and len(set(samples[0])) == 10
    items, skipped = load("jsonl", path, "--length", 40)
    assert len(items) == 40 and skipped == 60
