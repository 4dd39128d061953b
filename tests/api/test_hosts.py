# SPDX-License-Identifier: Apache-2.0
"""One model in three processes (`distillcache worker`): the answers of three ranks in one process, who is let in, and what
ends with what. The model has three KV heads."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from conftest import PATIENCE, SERVER, Stream, eventually

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ports import free_port  # noqa: E402

SMALL = ("--kv-memory", "64M", "--context", 512, "--threads", 1)
KEY = {"DISTILLCACHE_RENDEZVOUS_KEY": "a secret of the test"}
POLICIES = [None, {"policy": "h2o", "tokens": 24}, {"policy": "adakv", "tokens": 32, "window": 8},
            {"policy": "distillcache", "tokens": 32}]


class Worker:
    def __init__(self, address, rank, log, env=KEY):
        self.log_path = log
        command = [SERVER, "worker", "--model", os.environ["DISTILLCACHE_TEST_MODEL"], "--rank", str(rank), "--rendezvous",
                   address, "--threads", "1"]
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(command, stderr=errors, env={**os.environ, **env})

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    def wait(self):
        code = self.process.wait(PATIENCE)
        assert "Sanitizer" not in self.log, self.log
        return code


@pytest.fixture
def start_world(start_server, tmp_path):
    """A leader of three ranks that waits, and what starts workers; all are ended after the test."""
    started = []

    class World:
        def __init__(self):
            self.address = f"127.0.0.1:{free_port()}"
            self.leader = start_server("--world", 3, "--rendezvous", self.address, *SMALL, ready=False, env=KEY)

        def worker(self, rank, **how):
            started.append(Worker(self.address, rank, tmp_path / f"worker-{len(started)}", **how))
            return started[-1]

        def wait_ready(self):
            self.leader.wait_ready()
            return self

    yield World
    for worker in started:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()


def ask(server):
    """Greedy tokens with their log-probabilities under several policies, and what is kept."""
    answers = []
    for policy in POLICIES:
        extra = {} if policy is None else {"kv_cache": policy}
        reply = server.complete(model=server.model, prompt="A list of towns and rivers, with their lengths: " * 4, max_tokens=12,
                                temperature=0, logprobs=3, **extra)
        answers.append((reply["choices"][0]["text"], reply["choices"][0]["logprobs"], reply["usage"]))
    return answers


def pour_noise(address):
    """Strangers: one who says nothing, some who talk nonsense, one who asks for a page."""
    host, port = address.split(":")

    def connect():
        try:
            return socket.create_connection((host, int(port)), timeout=PATIENCE)
        except ConnectionRefusedError:
            return None

    silent = eventually(connect, "a leader that listens")
    for noise in (b"", b"\x00" * 5000, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20, b"DCRANKS\0" * 26):
        with connect() as stranger:
            stranger.sendall(noise)
    return silent


@pytest.mark.repeats
def test_three_processes_answer_as_three_ranks_of_one(start_server, start_world):
    ranks = start_server("--tensor-parallel", 3, *SMALL)
    expected = ask(ranks)
    assert ranks.stop() == 0
    world = start_world()
    silent = pour_noise(world.address)
    stranger = world.worker(1, env={"DISTILLCACHE_RENDEZVOUS_KEY": "another"})
    assert stranger.wait() == 1
    assert "another rendezvous-key" in stranger.log
    workers = [world.worker(rank) for rank in (1, 2)]
    eventually(lambda: "a worker joined" in world.leader.log, "a worker that joined")
    world.wait_ready()
    silent.close()
    assert ask(world.leader) == expected
    assert world.leader.stop() == 0
    for worker in workers:
        assert worker.wait() == 0
        assert "the leader has ended" in worker.log


def test_a_worker_that_is_killed_ends_all(start_world):
    world = start_world()
    first, second = world.worker(1), world.worker(2)
    world.wait_ready()
    streams = [Stream(world.leader, "/v1/completions", model=world.leader.model, prompt=f"Number {i} is", max_tokens=400,
                      ignore_eos=True).start() for i in range(3)]
    beginnings = [iter(stream) for stream in streams]
    for beginning in beginnings:
        assert next(beginning)["choices"]
    first.process.kill()
    for beginning in beginnings:
        errors = [event["error"]["message"] for event in beginning if "error" in event]
        assert len(errors) == 1 and "rank 1 is lost" in errors[0], errors
    assert world.leader.process.wait(PATIENCE) == 1
    assert "rank 1 is lost" in world.leader.log and "Sanitizer" not in world.leader.log
    assert second.wait() == 1
    assert "rank 2 ends: the connection broke" in second.log


def test_a_worker_that_is_told_to_end(start_world):
    """While it waits, and while it works; a leader that nobody asks for anything notices."""
    waiting = Worker(f"127.0.0.1:{free_port()}", 1, pathlib.Path(os.devnull))
    world = start_world()
    first, second = world.worker(1), world.worker(2)
    world.wait_ready()
    for worker in (waiting, first):
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(PATIENCE) == 0
    assert world.leader.process.wait(PATIENCE) == 1
    assert "rank 1 is lost" in world.leader.log
    assert second.wait() == 1


def test_what_does_not_fit_is_usage():
    def run(command, *options, env=None):
        return subprocess.run([SERVER, command, "--model", "m", *map(str, options)], capture_output=True, text=True,
                              env={**os.environ, **(env or {})}, timeout=PATIENCE)

    cases = [(("serve", "--world", 2), "needs rendezvous"), (("worker", "--rank", 1), "needs rendezvous"),
             (("worker", "--rendezvous", "127.0.0.1:1"), "rank"), (("worker", "--rank", 8), "rank"),
             (("serve", "--world", 9), "world"),
             (("serve", "--world", 2, "--rendezvous", "0.0.0.0:7000"), "give a rendezvous-key"),
             (("worker", "--rank", 1, "--rendezvous", "[fe80::1]:7000"), "give a rendezvous-key"),
             (("bench", "--world", 2, "--rendezvous", "127.0.0.1:7000", "--tensor-parallel", 2), "tensor-parallel 2")]
    for command, words in cases:
        done = run(*command)
        assert done.returncode == 2 and words in done.stderr, (command, done.stderr)
