# SPDX-License-Identifier: Apache-2.0
"""Training jobs and evaluations, on the fake trainer (tests/unit/fake_train.h): order, pause, events, survival, failures,
and what becomes of their policies."""

import pathlib
import subprocess

import pytest

from admin import TINY, Admin, expect_error
from conftest import FAKE, PATIENCE, eventually


@pytest.fixture(scope="module")
def admin(start_server, tmp_path_factory):
    return Admin(start_server, tmp_path_factory.mktemp("state"))


@pytest.fixture
def own(start_server, tmp_path):
    """A server of the test's own, that may be killed."""
    return Admin(start_server, tmp_path / "state")


def test_the_client_of_openai(admin):
    client = admin.client()
    file = client.files.create(file=("data.jsonl", b'{"text": "a"}\n'), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="fake", training_file=file.id, suffix="mine", seed=7, metadata={"team": "blue"},
        method={"type": "reinforcement", "reinforcement": {"hyperparameters": TINY}})
    assert (job.object, job.model, job.training_file, job.seed) == ("fine_tuning.job", "fake", file.id, 7)
    assert job.status == "queued" and job.fine_tuned_model is None and job.finished_at is None and job.error is None
    assert job.metadata == {"team": "blue"} and job.method.type == "reinforcement"
    done = eventually(lambda: (lambda j: j if j.status == "succeeded" else None)(client.fine_tuning.jobs.retrieve(job.id)))
    assert done.fine_tuned_model.startswith("mine-") and done.finished_at >= done.created_at
    assert done.trained_tokens == 40 and done.result_files == [] and done.estimated_finish is None
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))  # pages by itself
    assert "created" in events[-1].message and done.fine_tuned_model in events[0].message
    metrics = [event for event in events if event.type == "metrics" and event.data["reward"] == -0.25]
    assert metrics and metrics[0].level == "info" and metrics[0].object == "fine_tuning.job.event"
    assert len({event.id for event in events}) == len(events)
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [4, 2]
    assert checkpoints[0].fine_tuning_job_id == job.id and checkpoints[0].fine_tuned_model_checkpoint
    assert job.id in [entry.id for entry in client.fine_tuning.jobs.list(limit=5)]
    assert admin.job(job.id)["step"] == 4
    cancelled = client.fine_tuning.jobs.create(model="fake", training_file=admin.upload(b"!wait"))
    assert client.fine_tuning.jobs.pause(cancelled.id).status == "paused"
    assert client.fine_tuning.jobs.resume(cancelled.id).status in ("queued", "running")
    assert client.fine_tuning.jobs.cancel(cancelled.id).status == "cancelled"


def test_hyperparameters_from_both_places(admin):
    file = admin.upload()
    body = {"training_file": file, "hyperparameters": {"ratios": [0.5, 0.25], "hidden": "auto", "entropy": None, "n_epochs": "auto", **TINY},
            "method": {"type": "reinforcement", "reinforcement": {"hyperparameters": {"seed": 5, "rank_steps": 2}}}}
    job = admin.ok("POST", "/training/jobs", body)
    options = job["hyperparameters"]
    assert options["ratios"] == [0.5, 0.25] and options["seed"] == job["seed"] == 5 and options["rank_steps"] == 2
    assert options["method"] == "ranker" and options["hidden"] == 32
    assert job["method"]["reinforcement"]["hyperparameters"]["rank_steps"] == 2
    assert admin.wait(job["id"])["status"] == "succeeded"
    paper = admin.ok("POST", "/training/jobs", {"training_file": file, "hyperparameters": {
        "kl_steps": 0, "rank_steps": 1, "recipe": "paper", "method": "distillcache"}})
    assert paper["hyperparameters"]["features"] == "paper" and paper["hyperparameters"]["hidden"] == 128
    admin.wait(paper["id"])


def test_lists_of_jobs(admin):
    ids = [admin.create(metadata={"run": str(i % 2), "odd []&=\"": "caf\u00e9"}) for i in range(4)]
    listed = admin.ok("GET", "/training/jobs?limit=4")
    assert [job["id"] for job in listed["data"]] == ids[::-1] and listed["has_more"] is True
    after = admin.ok("GET", f"/fine_tuning/jobs?limit=2&after={ids[3]}")
    assert [job["id"] for job in after["data"]] == [ids[2], ids[1]]
    odd = admin.ok("GET", "/training/jobs?metadata%5Brun%5D=1")
    assert [job["id"] for job in odd["data"]] == [ids[3], ids[1]] and odd["has_more"] is False
    assert admin.ok("GET", "/training/jobs?metadata[run]=1&metadata[run2]=x")["data"] == []
    both = admin.ok("GET", "/training/jobs?metadata[run]=0&metadata%5Bodd%20%5B%5D%26%3D%22%5D=caf%C3%A9")
    assert [job["id"] for job in both["data"]] == [ids[2], ids[0]]
    expect_error(admin.get("/training/jobs?after=ftjob-none"), 400, param="after")
    for id in ids:
        assert admin.wait(id)["status"] == "succeeded"


def test_one_job_at_a_time_in_order(admin):
    waiting = admin.upload(b"!wait")
    first = admin.create(waiting)
    admin.wait(first, "running")
    second, third = admin.create(), admin.create()
    assert admin.job(second)["status"] == admin.job(third)["status"] == "queued"
    status = admin.ok("GET", "/status")
    assert status["current"]["id"] == first and status["jobs"]["queued"] == 2
    assert admin.ok("POST", f"/training/jobs/{second}/cancel")["status"] == "cancelled"
    assert admin.ok("POST", f"/training/jobs/{first}/cancel")["status"] == "cancelled"
    assert admin.wait(third)["status"] == "succeeded"
    assert admin.job(second)["step"] == 0 and admin.job(second)["finished_at"]
    assert "the job is running" not in admin.messages(second)


def test_pause_and_resume(admin):
    job = admin.create(admin.upload(b"!wait"))
    eventually(lambda: admin.job(job)["step"] == 1, "a step")
    assert admin.ok("POST", f"/training/jobs/{job}/pause")["status"] == "paused"
    assert admin.ok("POST", f"/training/jobs/{job}/pause")["status"] == "paused"  # again: nothing changes
    eventually(lambda: admin.ok("GET", "/status")["current"] is None, "stopped")
    assert admin.job(job)["status"] == "paused"
    other = admin.create()
    assert admin.wait(other)["status"] == "succeeded"  # a paused job is in nobody's way
    for step in (2, 3):
        assert admin.ok("POST", f"/training/jobs/{job}/resume")["status"] in ("queued", "running")
        eventually(lambda: admin.job(job)["step"] == step, "goes on behind its checkpoint")
        assert admin.ok("POST", f"/training/jobs/{job}/pause")["status"] == "paused"
    assert admin.steps(job) == [1, 2, 3]
    assert any("goes on from its last checkpoint" in message for message in admin.messages(job))
    assert admin.ok("POST", f"/training/jobs/{job}/cancel")["status"] == "cancelled"
    for verb in ("pause", "resume"):
        expect_error(admin.post(f"/training/jobs/{job}/{verb}"), 400)
    expect_error(admin.post(f"/training/jobs/{other}/cancel"), 400)


# --- Events as they come ---


def test_streams_of_events(admin):
    job = admin.create(admin.upload(b"!wait"))
    stream = admin.stream(job)
    events = iter(stream)
    seen = [next(events) for _ in range(3)]
    assert [event["type"] for event in seen] == ["message", "message", "metrics"]
    assert seen[2]["data"]["step"] == 1 and seen[2]["data"]["reward"] == -1
    later = iter(admin.stream(job, "", {"Accept": "text/event-stream", "Last-Event-ID": stream.id}))
    admin.ok("POST", f"/training/jobs/{job}/cancel")
    rest, rest_later = list(events), list(later)
    assert rest[-1] == rest_later[-1] == "[DONE]"
    assert rest == rest_later and any(event["message"] == "the job was cancelled" for event in rest[:-1])
    again = list(admin.stream(job))
    assert again[:-1] == (seen + rest)[:len(again) - 1] and again[-1] == "[DONE]"
    listed = admin.ok("GET", f"/training/jobs/{job}/events?limit=100")["data"][::-1]
    assert [event["id"] for event in listed][:len(again) - 1] == [event["id"] for event in again[:-1]]


def test_a_long_stream_is_whole(admin):
    """More events than one reading takes, several readers, some late."""
    job = admin.create(hyperparameters={**TINY, "rank_steps": 1500, "checkpoint_every": 1000})
    first = admin.stream(job)
    middle = []
    events = iter(first)
    for event in events:
        if event != "[DONE]" and event["type"] == "metrics" and event["data"]["step"] == 300:
            middle.append(admin.stream(job))
        if event == "[DONE]":
            break
    admin.wait(job)
    for stream in [*middle, admin.stream(job)]:
        steps = [event["data"]["step"] for event in stream
                 if event != "[DONE]" and event["type"] == "metrics" and event["message"].startswith("step")]
        assert steps == list(range(1, 1501))


def test_readers_that_leave(admin):
    job = admin.create(admin.upload(b"!wait"))
    for _ in range(5):
        stream = admin.stream(job)
        next(iter(stream))
        stream.close()
    admin.ok("POST", f"/training/jobs/{job}/cancel")
    assert list(admin.stream(job))[-1] == "[DONE]"


# --- Failures ---


@pytest.mark.parametrize("data, code, words", [
    (b"!bad", "invalid_file", ":1: not a JSON object"), (b"!full", "io_error", "No space left on device"),
    (b"!pages", "kv_memory_too_small", "page pool"), (b"!garbage", "invalid_file", ".safetensors")])
def test_jobs_that_fail_say_why(admin, data, code, words):
    before = admin.ok("GET", "/policies")["data"]
    job = admin.wait(admin.create(admin.upload(data)))
    assert job["status"] == "failed" and job["error"]["code"] == code and words in job["error"]["message"], job["error"]
    assert job["fine_tuned_model"] is None and job["finished_at"] and job["estimated_finish"] is None
    event = admin.ok("GET", f"/training/jobs/{job['id']}/events")["data"][0]
    assert event["level"] == "error" and event["message"] == job["error"]["message"]
    assert admin.ok("GET", "/policies")["data"] == before
    assert list(admin.stream(job["id"]))[-1] == "[DONE]"


def test_files_that_are_gone(admin):
    blocker = admin.create(admin.upload(b"!wait"))
    deleted, lost = admin.upload(), admin.upload()
    jobs = [admin.create(deleted), admin.create(validation_file=deleted), admin.create(lost)]
    admin.delete(f"/files/{deleted}")
    (pathlib.Path(admin.state) / "files" / f"{lost}.jsonl").unlink()
    admin.ok("POST", f"/training/jobs/{blocker}/cancel")
    for job, param, words in zip(jobs, ("training_file", "validation_file", "training_file"),
                                 ("was deleted", "was deleted", "not in the state directory")):
        error = admin.wait(job)["error"]
        assert error["code"] == "file_not_found" and error["param"] == param and words in error["message"]
    assert admin.get(f"/files/{lost}/content").status == 500


# --- Survival ---


def expect_told_once(admin, job, steps):
    """Events and checkpoints of every 5 steps are those of a job that nobody disturbed."""
    assert admin.steps(job) == list(range(1, steps + 1))
    assert [message for message in admin.messages(job) if message.startswith("checkpoint")] == [
        f"checkpoint at step {step} of {steps}" for step in range(5, steps + 1, 5)]
    checkpoints = admin.ok("GET", f"/training/jobs/{job}/checkpoints?limit=100")["data"]
    assert [checkpoint["step_number"] for checkpoint in checkpoints] == list(range(steps, 0, -5))


def test_killed_at_any_moment_it_goes_on(own):
    job = own.create(hyperparameters={**TINY, "rank_steps": 60, "checkpoint_every": 5})
    waiting = own.create()
    for steps in (3, 12, 31):
        own.kill()
        own.start(FAKE_TRAIN_STEP_MS="20")
        eventually(lambda: own.job(job)["step"] >= steps, "steps")
    own.kill()
    own.start()
    assert own.wait(job)["status"] == "succeeded" and own.wait(waiting)["status"] == "succeeded"
    expect_told_once(own, job, 60)
    policies = [policy["id"] for policy in own.ok("GET", "/policies")["data"]]
    assert policies == [own.job(job)["fine_tuned_model"], own.job(waiting)["fine_tuned_model"]]


@pytest.mark.parametrize("at", [5, 40])
def test_killed_right_behind_a_checkpoint(own, at):
    """When many steps have just been told: they are not told again, and must be stored."""
    own.kill()
    own.start(FAKE_TRAIN_STEP_MS="0", FAKE_TRAIN_DIE_AT=str(at))
    job = own.create(hyperparameters={**TINY, "rank_steps": 60, "checkpoint_every": 5})
    own.server.process.wait(PATIENCE)
    own.start()
    assert own.wait(job)["status"] == "succeeded"
    expect_told_once(own, job, 60)


def test_what_was_paused_or_cancelled_stays_so(own):
    paused, cancelled = own.create(admin_wait := own.upload(b"!wait")), own.create(admin_wait)
    eventually(lambda: own.job(paused)["step"] == 1, "a step")
    own.ok("POST", f"/training/jobs/{paused}/pause")
    own.ok("POST", f"/training/jobs/{cancelled}/cancel")
    own.kill()
    own.start()
    assert own.job(paused)["status"] == "paused" and own.job(cancelled)["status"] == "cancelled"
    own.ok("POST", f"/training/jobs/{paused}/resume")
    eventually(lambda: own.job(paused)["step"] >= 1 and own.job(paused)["status"] == "running", "it runs")
    own.ok("POST", f"/training/jobs/{paused}/cancel")


def test_a_cancelled_job_keeps_no_checkpoints(own):
    jobs = pathlib.Path(own.state) / "jobs"
    running, paused = own.create(own.upload(b"!wait")), own.create(own.upload(b"!wait"))
    eventually(lambda: own.job(running)["step"] == 1, "a step")
    own.ok("POST", f"/training/jobs/{running}/cancel")
    eventually(lambda: own.job(paused)["step"] == 1, "a step of the other one")
    eventually(lambda: [path.name for path in jobs.iterdir()] == [paused], "nothing is left of the running one")
    own.ok("POST", f"/training/jobs/{paused}/pause")
    eventually(lambda: own.ok("GET", f"/training/jobs/{paused}/checkpoints")["data"], "it has a checkpoint")
    assert list((jobs / paused).iterdir())
    own.ok("POST", f"/training/jobs/{paused}/cancel")
    eventually(lambda: not list(jobs.iterdir()), "nothing is left of the paused one")
    for job in (running, paused):
        assert own.ok("GET", f"/training/jobs/{job}/checkpoints")["data"] == []


def test_a_drain_leaves_a_checkpoint(own):
    job = own.create(admin_wait := own.upload(b"!wait"))
    queued = own.create()
    stream = iter(own.stream(job))
    assert [next(stream) for _ in range(3)][2]["data"]["step"] == 1
    assert own.server.stop() == 0
    list(stream)  # ends
    own.start()
    eventually(lambda: own.job(job)["step"] == 2, "it goes on behind the checkpoint")
    assert own.steps(job) == [1, 2]
    assert any("the server shuts down" in message for message in own.messages(job))
    own.ok("POST", f"/training/jobs/{job}/cancel")
    assert own.wait(queued)["status"] == "succeeded"


def test_uploads_cut_by_a_kill_leave_nothing(own):
    files = pathlib.Path(own.state) / "files"
    whole = own.upload()
    (files / ".upload-file-torn").write_bytes(b"half")
    own.kill()
    own.start()
    assert [path.name for path in files.iterdir()] == [f"{whole}.jsonl"]
    assert own.get(f"/files/{whole}/content").status == 200


# --- Policies ---


def test_policies(own):
    names = [own.wait(own.create(suffix=suffix))["fine_tuned_model"] for suffix in ("one", "two")]
    listed = own.ok("GET", "/policies")["data"]
    assert [policy["id"] for policy in listed] == names and not any(policy["active"] for policy in listed)
    assert listed[0]["usable"] and listed[0]["method"] == "distillcache" and listed[0]["parameters"] > 0
    assert own.ok("POST", f"/policies/{names[0]}/activate")["active"] is True
    assert own.ok("GET", f"/policies/{names[0]}")["active"] is True
    expect_error(own.delete(f"/policies/{names[0]}"), 409)
    assert own.ok("DELETE", f"/policies/{names[1]}")["deleted"] is True
    expect_error(own.get(f"/policies/{names[1]}"), 404)
    own.kill()
    own.start()
    listed = own.ok("GET", "/policies")["data"]
    assert [(policy["id"], policy["active"]) for policy in listed] == [(names[0], True)]
    assert own.ok("GET", "/status")["policy"]["active"] == names[0]
    assert own.ok("POST", f"/policies/{names[0]}/deactivate")["active"] is False
    assert own.ok("DELETE", f"/policies/{names[0]}")["deleted"] is True
    eventually(lambda: not list((pathlib.Path(own.state) / "policies").iterdir()), "the files are gone")


def test_a_policy_that_is_damaged_is_not_activated(own):
    name = own.wait(own.create())["fine_tuned_model"]
    file = pathlib.Path(own.state) / "policies" / f"{name}.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    message = expect_error(own.post(f"/policies/{name}/activate"), 400)
    assert "cannot be used" in message
    own.kill()
    own.start()
    policy = own.ok("GET", f"/policies/{name}")
    assert policy["usable"] is False and policy["problem"] and not policy["active"]
    expect_error(own.post(f"/policies/{name}/activate"), 400)
    reply = own.server.post("/v1/completions", {"prompt": "a", "kv_cache": {"policy": f"distillcache:{name}"}})
    reply.expect_error(400, param="kv_cache.policy")


def test_requests_choose_policies_by_name(own):
    name = own.wait(own.create())["fine_tuned_model"]
    for policy in (f"distillcache:{name}", f"ranker:{name}"):
        own.server.complete(prompt="abc", max_tokens=3, kv_cache={"policy": policy, "ratio": 0.5})
    for policy in ("distillcache:none", f"h2o:{name}", f"full:{name}", "distillcache:", "distillcache:/etc/passwd",
                   f"distillcache:../policies/{name}", f"distillcache:{name}.safetensors", ":", f"x:{name}"):
        reply = own.server.post("/v1/completions", {"prompt": "a", "kv_cache": {"policy": policy}})
        reply.expect_error(400, param="kv_cache.policy")
    without = {"prompt": "a", "max_tokens": 1, "kv_cache": {"policy": "distillcache"}}
    own.server.post("/v1/completions", without).expect_error(400, param="kv_cache.policy")  # none ships for this model
    own.ok("POST", f"/policies/{name}/activate")
    assert own.server.post("/v1/completions", without).status == 200


def test_the_servers_own_policy_is_the_active_one(start_server, tmp_path):
    """None ships for this model: the state directory alone has one."""
    own = Admin(start_server, tmp_path / "state")
    name = own.wait(own.create())["fine_tuned_model"]
    own.ok("POST", f"/policies/{name}/activate")
    own.kill()
    own.options = ("--kv-policy", "distillcache", "--kv-ratio", "0.5")
    own.start()
    assert own.ok("GET", "/status")["policy"]["active"] == name
    own.server.complete(prompt="abc", max_tokens=3)
    own.server.complete(prompt="abc", max_tokens=3, kv_cache={"ratio": 0.25})
    own.ok("POST", f"/policies/{name}/deactivate")
    for body in ({"prompt": "a"}, {"prompt": "a", "kv_cache": {"ratio": 0.25}}):
        own.server.post("/v1/completions", body).expect_error(400, param="kv_cache.policy")
    own.server.complete(prompt="abc", max_tokens=3, kv_cache={"policy": "h2o"})
    own.ok("POST", f"/policies/{name}/activate")
    own.server.complete(prompt="abc", max_tokens=3)


def test_the_servers_own_policy_by_name(start_server, tmp_path):
    own = Admin(start_server, tmp_path / "state")
    names = [own.wait(own.create())["fine_tuned_model"] for _ in range(2)]
    own.kill()
    own.options = ("--kv-policy", f"distillcache:{names[1]},ratio=0.5")
    own.start()
    own.server.complete(prompt="abc", max_tokens=3)
    own.ok("POST", f"/policies/{names[0]}/activate")
    own.server.complete(prompt="abc", max_tokens=3)
    own.ok("POST", f"/policies/{names[0]}/deactivate")
    own.server.complete(prompt="abc", max_tokens=3)
    own.kill()
    command = [FAKE, "serve", "--model", "fake", "--port", "0", "--state-dir", str(own.state), "--kv-policy"]
    for policy in ("distillcache:none", "distillcache"):
        done = subprocess.run([*command, policy], stderr=subprocess.PIPE, timeout=PATIENCE, text=True)
        # The fake's log, which another thread writes, may end before or after the message.
        errors = [line for line in done.stderr.splitlines() if line.startswith("fake_server: ")]
        assert done.returncode == 1 and errors and "polic" in errors[-1], done.stderr


# --- Evaluations ---


def test_evaluations(admin):
    name = admin.wait(admin.create())["fine_tuned_model"]
    created = admin.ok("POST", "/evaluations", {"task": "kl", "policies": ["h2o", f"distillcache:{name},ratio=0.5"],
                                                "ratios": [0.25, 1], "lengths": [64], "limit": 2, "metadata": {"a": "b"}})
    assert created["object"] == "evaluation" and created["status"] == "queued" and created["metadata"] == {"a": "b"}
    done = eventually(lambda: (lambda e: e if e["status"] == "succeeded" else None)(
        admin.ok("GET", f"/evaluations/{created['id']}")))
    assert [row["kv_policy"] for row in done["rows"]] == ["h2o", "distillcache"] and done["report"]["task"] == "kl"
    assert done["progress"] == {"done": 2, "total": 2} and done["finished_at"] and done["error"] is None
    failed = admin.ok("POST", "/evaluations", {"task": "arithmetic"})["id"]
    failed = eventually(lambda: (lambda e: e if e["status"] == "failed" else None)(admin.ok("GET", f"/evaluations/{failed}")))
    assert failed["error"]["message"] == "the task is too hard" and failed["rows"] is None
    listed = admin.ok("GET", "/evaluations?limit=2")
    assert [entry["id"] for entry in listed["data"]] == [failed["id"], created["id"]]


def test_evaluations_know_the_active_policy_and_no_files(own, tmp_path):
    def evaluate(policy):
        made = own.post("/evaluations", {"task": "kl", "policies": [policy]})
        return made if made.status != 200 else eventually(lambda: (lambda e: e if e["status"] in ("succeeded", "failed")
                                                                   else None)(own.ok("GET", f"/evaluations/{made.json['id']}")))

    name = own.wait(own.create())["fine_tuned_model"]
    file = pathlib.Path(own.state) / "policies" / f"{name}.safetensors"
    failed = evaluate("distillcache")
    assert failed["status"] == "failed" and "no policy distillcache is trained" in failed["error"]["message"]
    own.ok("POST", f"/policies/{name}/activate")
    assert evaluate("distillcache")["status"] == "succeeded"
    assert evaluate("hybrid,base=distillcache")["status"] == "succeeded"
    for policy in (f"distillcache:{file}", f"distillcache,network={file}", "rlkv,gates=/dev/zero", "distillcache:",
                   f"distillcache:../policies/{name}", f"h2o:{name}", f"rlkv:{name}", "distillcache,network=/etc/passwd"):
        expect_error(own.post("/evaluations", {"task": "kl", "policies": [policy]}), 400, param="policies")


def test_evaluations_share_the_queue(admin):
    running = admin.ok("POST", "/evaluations", {"task": "needle"})["id"]
    eventually(lambda: admin.ok("GET", f"/evaluations/{running}")["status"] == "running", "it runs")
    job = admin.create()
    queued = admin.ok("POST", "/evaluations", {"task": "needle"})["id"]
    assert admin.job(job)["status"] == "queued"
    assert admin.ok("GET", "/status")["current"]["kind"] == "evaluation"
    assert admin.ok("POST", f"/evaluations/{queued}/cancel")["status"] == "cancelled"
    assert admin.ok("POST", f"/evaluations/{running}/cancel")["status"] == "cancelled"
    assert admin.wait(job)["status"] == "succeeded"


def test_an_evaluation_begins_again_after_a_kill(own):
    running = own.ok("POST", "/evaluations", {"task": "needle"})["id"]
    eventually(lambda: own.ok("GET", f"/evaluations/{running}")["status"] == "running", "it runs")
    own.kill()
    own.start()
    eventually(lambda: own.ok("GET", f"/evaluations/{running}")["status"] == "running", "it runs again")
    own.ok("POST", f"/evaluations/{running}/cancel")


# --- Metrics ---


def test_metrics_of_training(own):
    assert "training_step" not in own.server.metrics()
    own.wait(own.create())
    metrics = own.server.metrics()
    assert metrics["training_step"] == metrics["training_steps"] == 4
    assert metrics["training_reward"] == -0.25 and metrics["training_kl_valid"] == 0.25
