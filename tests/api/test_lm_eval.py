# SPDX-License-Identifier: Apache-2.0
"""lm-eval's local-completions on the server: a multiple-choice task by echo and log-probabilities, beside the NumPy
reference. With DISTILLCACHE_TEST_LM_EVAL, a Python that has tests/requirements-lm-eval.txt (scripts/test.sh --full)."""

import json
import os
import pathlib
import subprocess
import sys

import numpy
import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests/reference"))
from reference.model import Model, log_softmax  # noqa: E402

PYTHON = os.environ.get("DISTILLCACHE_TEST_LM_EVAL", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="DISTILLCACHE_TEST_LM_EVAL names no Python with lm-eval")
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo", "Peru": "Lima", "Norway": "Oslo",
            "Cuba": "Havana", "Kenya": "Nairobi", "Iran": "Tehran", "Greece": "Athens"}
TASK = """task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: %s
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""


def documents():
    names = list(CAPITALS)
    for i, country in enumerate(names):
        choices = [CAPITALS[names[(i + step * 3) % len(names)]] for step in range(4)]
        yield {"country": country, "choices": choices[i % 4:] + choices[:i % 4], "answer": (4 - i % 4) % 4}


def evaluate(server, folder):
    """What lm-eval measures: accuracy, and each document's log-likelihoods."""
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents()))
    (folder / "tasks").mkdir()
    (folder / "tasks/capitals.yaml").write_text(TASK % data)
    command = [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--model_args",
               f"model={server.model},base_url={server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4",
               "--tasks", "capitals", "--include_path", folder / "tasks", "--output_path", folder / "out", "--log_samples"]
    offline = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    result = subprocess.run(list(map(str, command)), env={**os.environ, **offline}, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    [results] = (folder / "out").rglob("results_*.json")
    [samples] = (folder / "out").rglob("samples_*.jsonl")
    accuracy = json.loads(pathlib.Path(results).read_text())["results"]["capitals"]["acc,none"]
    lines = sorted((json.loads(line) for line in pathlib.Path(samples).read_text().splitlines()), key=lambda line: line["doc_id"])
    return accuracy, [[float(response[0][0]) for response in line["resps"]] for line in lines]


def test_multiple_choice(start_server, tmp_path):
    server = start_server("--precision", "f32", "--kv-format", "f32")
    accuracy, found = evaluate(server, tmp_path)
    model = Model(os.environ["DISTILLCACHE_TEST_MODEL"])
    right = 0
    for document, likelihoods in zip(documents(), found, strict=True):
        context = f"The capital of {document['country']} is"
        expected = []
        for choice in document["choices"]:
            ids, begin = server.tokenize(context + " " + choice), len(server.tokenize(context))
            logprobs = log_softmax(model.prefill(ids)[0])
            expected.append(sum(logprobs[i - 1, ids[i]] for i in range(begin, len(ids))))
        assert likelihoods == pytest.approx(expected, abs=2e-3), document
        right += int(numpy.argmax(expected)) == document["answer"]
    assert accuracy == pytest.approx(right / len(CAPITALS))
    assert right > len(CAPITALS) / 2  # the model knows some
