# SPDX-License-Identifier: Apache-2.0
"""A state directory whose disk is full, or may only be read: what failed says so, and what can be read still is."""

import os
import shutil
import subprocess

import pytest

from admin import TINY, Admin, form
from conftest import eventually

LONG = {**TINY, "rank_steps": 100000}


def mount(*words):
    return subprocess.run(["mount", *map(str, words)], capture_output=True, text=True).returncode == 0


@pytest.fixture
def disk(tmp_path):
    """A disk of 8 MiB, where the tests may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or not mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", place):
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", "--recursive", place], check=True)


@pytest.fixture
def admin(start_server, disk):
    admin = Admin(start_server, disk / "state")
    yield admin
    admin.kill()


def fill(disk):
    with open(disk / "filler", "ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


def expect_full(admin, job):
    ended = admin.wait(job)
    assert ended["status"] == "failed" and ended["error"]["code"] == "io_error", ended
    assert "No space left on device" in ended["error"]["message"]
    assert ended["fine_tuned_model"] is None and admin.ok("GET", "/policies")["data"] == []


@pytest.mark.parametrize("late", [False, True])
def test_jobs_fail_on_a_full_disk(admin, disk, late):
    file = admin.upload()
    if late:  # while one is at work
        running = admin.create(file, hyperparameters=LONG)
        eventually(lambda: admin.job(running)["step"] >= 4, "steps")
        fill(disk)
        expect_full(admin, running)
    for _ in range(8):  # again and again: none of them hangs, or takes what is needed to say that it failed
        fill(disk)
        expect_full(admin, admin.create(file, hyperparameters=LONG))
    assert admin.get("/files").status == admin.get("/status").status == admin.get("/training/jobs").status == 200
    body = form([("purpose", None, b"fine-tune"), ("file", "a.jsonl", b"x" * 100000)])
    reply = admin.post("/files", body, {"Content-Type": "multipart/form-data; boundary=XYZ"})
    assert reply.status == 500 and "No space left on device" in reply.json["error"]["message"]
    eventually(lambda: len(os.listdir(disk / "state" / "files")) == 1, "nothing is left of it")
    (disk / "filler").unlink()
    assert admin.wait(admin.create(file))["status"] == "succeeded"


def test_a_kill_on_a_full_disk(admin, disk):
    job = admin.create(hyperparameters=LONG)
    eventually(lambda: admin.job(job)["step"] >= 4, "steps")
    admin.kill()
    fill(disk)
    admin.start()
    expect_full(admin, job)


def test_folders_that_may_only_be_read(admin, disk):
    file = admin.upload()
    for folder in ("files", "jobs", "policies"):
        place = disk / "state" / folder
        assert mount("--bind", place, place) and mount("-o", "remount,bind,ro", place)
    job = admin.wait(admin.create(file))
    assert job["status"] == "failed" and "Read-only file system" in job["error"]["message"]
    body = form([("purpose", None, b"fine-tune"), ("file", "a.jsonl", b"x")])
    reply = admin.post("/files", body, {"Content-Type": "multipart/form-data; boundary=XYZ"})
    assert reply.status == 500 and "Read-only file system" in reply.json["error"]["message"]
    assert admin.get(f"/files/{file}/content").status == 200
