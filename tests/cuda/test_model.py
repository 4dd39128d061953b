# SPDX-License-Identifier: Apache-2.0
"""The whole model on the CUDA backend, beside the CPU backend of the same program.

int8 activations make the two differ where two tokens are nearly equally likely: greedy tokens have to be the same up to
the first one whose margin over the second best, in log-probability, is below 0.6 (engine/cpu's own margin to the float
reference). An emulated step takes seconds, so that prompts are few and go in one batch. DISTILLCACHE_TEST_DEVICE=real
(scripts/gpu_check.sh): the build is one of -Dcuda=enabled, and its device is asked for more tokens. With
DISTILLCACHE_TEST_RANKS=N as many devices compute the model together, which add up as DISTILLCACHE_TEST_ALL_REDUCE says.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ports import free_port  # noqa: E402

REAL = os.environ.get("DISTILLCACHE_TEST_DEVICE", "emulated") == "real"
FULL = REAL or os.environ.get("DISTILLCACHE_TEST_FULL") == "1"
RANKS = int(os.environ.get("DISTILLCACHE_TEST_RANKS", "1"))
ALL_REDUCE = os.environ.get("DISTILLCACHE_TEST_ALL_REDUCE", "auto")
MARGIN = 0.6
PROMPTS = [
    "The capital of France is",
    "One, two, three, four,",
    "Water boils at a temperature of",
    "def add(a, b):\n    return",
][: None if FULL else 2]
TOKENS = 6 if FULL else 5
TOKENS_FULL = 64 if REAL else TOKENS  # with nothing evicted, where a set that differs by one slot would tell later
CACHES = {
    "full": None,
    "h2o": {"policy": "h2o", "tokens": 8, "minimum": 4},
    "snapkv": {"policy": "snapkv", "tokens": 8, "minimum": 4, "window": 4},
    "distillcache": {"policy": "distillcache", "tokens": 8, "minimum": 4, "interval": 2},
}


def program():
    return str(pathlib.Path(os.environ["DISTILLCACHE_TEST_BUILD"]) / "distillcache")


class Server:
    """distillcache serve with one backend, on a free port."""

    def __init__(self, backend, log, graphs="on"):
        self.port = free_port()
        environment = {**os.environ, "DISTILLCACHE_CUDA_GRAPHS": graphs}
        if not REAL:
            environment["DISTILLCACHE_EMULATOR"] = "fast"
        command = [program(), "serve", "--model", os.environ["DISTILLCACHE_TEST_MODEL"], "--backend", backend]
        command += ["--kv-memory", "64M", "--port", str(self.port)]
        if backend == "cuda" and RANKS > 1:
            command += ["--tensor-parallel", str(RANKS), "--all-reduce", ALL_REDUCE]
        self.log = open(log, "w+")
        self.process = subprocess.Popen(command, stderr=self.log, env=environment)
        end = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5).read()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < end, self.said()
                time.sleep(0.2)

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def complete(self, cache):
        tokens = TOKENS_FULL if cache is None else TOKENS
        body = {"prompt": PROMPTS, "max_tokens": tokens, "temperature": 0, "logprobs": 2}
        if cache is not None:
            body["kv_cache"] = cache
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=1800) as answer:
            choices = json.load(answer)["choices"]
        return [choice["logprobs"] for choice in sorted(choices, key=lambda choice: choice["index"])]

    def stop(self):
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    pair = [Server(backend, folder / f"{backend}.log") for backend in ("cpu", "cuda")]
    yield pair
    for server in pair:
        server.stop()


@pytest.fixture(scope="module")
def answers(servers):
    """What the two servers say with each cache: all are asked for at once, so that one batch has them."""
    with concurrent.futures.ThreadPoolExecutor(2 * len(CACHES)) as pool:
        asked = {name: [pool.submit(server.complete, cache) for server in servers] for name, cache in CACHES.items()}
    return {name: [answer.result() for answer in pair] for name, pair in asked.items()}


def certain_tokens(logprobs):
    """Tokens before the first whose choice hangs by a small margin."""
    count = 0
    for top in logprobs["top_logprobs"]:
        best, second = sorted(top.values(), reverse=True)[:2]
        if best - second < MARGIN:
            break
        count += 1
    return count


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_greedy_tokens_are_those_of_the_cpu(answers, cache):
    cpu, cuda = answers[cache]
    compared = 0
    for want, got in zip(cpu, cuda, strict=True):
        count = certain_tokens(want)
        assert got["tokens"][:count] == want["tokens"][:count]
        compared += count
    assert compared >= 4, "the prompts leave too little to compare"


@pytest.mark.skipif(not REAL, reason="test_graphs.c compares their bits on the emulated device")
def test_graphs_change_nothing(servers, tmp_path):
    plain = Server("cuda", tmp_path / "plain.log", graphs="off")
    try:
        for cache in CACHES.values():
            assert servers[1].complete(cache) == plain.complete(cache)
    finally:
        plain.stop()


def test_the_device_says_what_it_is(servers):
    cpu, cuda = (server.said() for server in servers)
    assert "cuda, " in cuda and "cuda, " not in cpu
    assert ("cuda, emulator" in cuda) != REAL
