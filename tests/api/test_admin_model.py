# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation on the real model, beside requests, with tiny runs."""

import json
import random

import pytest

from admin import Admin
from conftest import Stream, eventually

RANKER = {"method": "ranker", "rank_steps": 40, "sequences": 4, "prompt_least": 64, "prompt_most": 96, "future": 16,
          "valid_prompts": 0, "checkpoint_every": 10, "content": 2, "hidden": 4}
WORDS = "the cat sat on a mat and looked at red green blue birds while rain fell over quiet hills near old bridges".split()


def corpus(lines=30):
    generator = random.Random(1)
    return "".join(json.dumps({"text": " ".join(generator.choice(WORDS) for _ in range(400))}) + "\n"
                   for _ in range(lines)).encode()


@pytest.fixture
def admin(start_server, tmp_path):
    return Admin(start_server, tmp_path / "state", "--kv-memory", "128M", fake=False)


def losses(admin, job):
    events = admin.ok("GET", f"/training/jobs/{job}/events?limit=10000")["data"][::-1]
    return {event["data"]["step"]: event["data"]["loss"] for event in events if event["data"] and "loss" in event["data"]}


@pytest.mark.repeats
def test_a_killed_job_gives_the_same_numbers(admin):
    file = admin.upload(corpus())
    job = admin.create(file, hyperparameters=RANKER, suffix="whole")
    whole = admin.wait(job)
    assert whole["status"] == "succeeded" and whole["trained_tokens"] > 0, whole["error"]
    torn = admin.create(file, hyperparameters=RANKER, suffix="torn")
    eventually(lambda: admin.job(torn)["step"] >= 12 or admin.job(torn)["status"] == "succeeded", "a checkpoint")
    admin.kill()
    admin.start()
    assert admin.wait(torn)["status"] == "succeeded", admin.job(torn)["error"]
    assert len(losses(admin, job)) == 40 and losses(admin, job) == losses(admin, torn)
    names = [policy["id"] for policy in admin.ok("GET", "/policies")["data"] if not policy["shipped"]]
    assert [name.split("-")[0] for name in names] == ["whole", "torn"]
    files = [(admin.state / "policies" / f"{name}.safetensors").read_bytes() for name in names]
    assert len(files[0]) == len(files[1])


def test_requests_go_on_beside_a_job(admin):
    job = admin.create(admin.upload(corpus()), hyperparameters={**RANKER, "rank_steps": 100000, "sequences": 64})
    eventually(lambda: admin.job(job)["status"] == "running", "it runs")
    alone = admin.server.complete(prompt="The quick brown fox", max_tokens=12, temperature=0)
    events = list(Stream(admin.server, "/v1/completions", prompt="The quick brown fox", max_tokens=12, temperature=0))
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"]) == alone["choices"][0]["text"]
    assert admin.ok("GET", "/status")["training"]["turns"] > 0
    assert admin.ok("POST", f"/training/jobs/{job}/cancel")["status"] == "cancelled"
    eventually(lambda: admin.ok("GET", "/status")["current"] is None, "stopped")

    def all_free():  # as of the last step of a request
        admin.server.complete(prompt="a", max_tokens=2)
        memory = admin.ok("GET", "/status")["memory"]
        return memory["pages_free"] == memory["pages_total"]

    eventually(all_free, "the job's pages are free")


@pytest.mark.parametrize("field", ["training_file", "validation_file"])
def test_bad_data_fails_with_file_and_line(admin, field):
    files = {"training_file": admin.upload(corpus()), "validation_file": admin.upload(corpus())}
    files[field] = admin.upload(b'{"text": "x"}\n{"no": 1}\n')
    error = admin.wait(admin.create(files["training_file"], validation_file=files["validation_file"],
                                    hyperparameters={**RANKER, "valid_prompts": 1}))["error"]
    assert error["code"] == "invalid_file" and error["param"] == field and ".jsonl: line 2:" in error["message"]


def damage(data, how):
    return {"half": data[:len(data) // 2], "empty": b"", "noise": b"x" * 1000,
            "one bit": data[:-100] + bytes([data[-100] ^ 4]) + data[-99:]}[how]


@pytest.mark.repeats
@pytest.mark.parametrize("how", ["half", "empty", "noise", "one bit"])
def test_a_damaged_checkpoint_fails(admin, how):
    job = admin.create(admin.upload(corpus()), hyperparameters={**RANKER, "rank_steps": 100000})
    eventually(lambda: admin.job(job)["step"] >= 12, "a checkpoint")
    admin.kill()
    checkpoint = admin.state / "jobs" / job / "checkpoint.state"
    checkpoint.write_bytes(damage(checkpoint.read_bytes(), how))
    admin.start()
    ended = admin.wait(job)
    assert ended["status"] == "failed" and ended["error"]["code"] == "invalid_file", ended
    assert ended["error"]["param"] is None and "checkpoint" in ended["error"]["message"]
    assert [policy for policy in admin.ok("GET", "/policies")["data"] if not policy["shipped"]] == []


def test_a_policy_made_here_is_used_at_once(admin):
    file = admin.upload(corpus(), purpose="fine-tune")
    name = admin.wait(admin.create(file, hyperparameters={**RANKER, "rank_steps": 2}))["fine_tuned_model"]
    request = {"prompt": " ".join(WORDS * 8), "max_tokens": 8, "temperature": 0}
    kept = admin.server.complete(**request, kv_cache={"policy": f"ranker:{name}", "tokens": 64})["usage"]
    assert kept["kv_tokens_kept"] < kept["kv_tokens_seen"]
    assert admin.ok("POST", f"/policies/{name}/activate")["active"]
    active = admin.server.complete(**request, kv_cache={"policy": "distillcache", "tokens": 64})["usage"]
    assert active["kv_tokens_kept"] < active["kv_tokens_seen"]
    evaluation = admin.ok("POST", "/evaluations", {"task": "kl", "policies": ["h2o", f"distillcache:{name}"],
                                                   "ratios": [0.5], "lengths": [96], "limit": 1, "continuation": 4})["id"]
    done = eventually(lambda: (lambda e: e if e["status"] in ("succeeded", "failed") else None)(
        admin.ok("GET", f"/evaluations/{evaluation}")), "evaluated")
    assert done["status"] == "succeeded", done["error"]
    assert len(done["rows"]) == 3 and all(row["kl"] >= 0 for row in done["rows"])
