# SPDX-License-Identifier: Apache-2.0
"""What the scheduler promises, seen from outside: continuous batching, shared prefixes, determinism."""

import concurrent.futures
import threading

import pytest

from conftest import Stream, eventually, memory_of

pytestmark = pytest.mark.repeats
COMPLETION = "/v1/completions"
STORY = "Once upon a time, in a land far away,"


def tokens_of(reply):
    return [choice["logprobs"]["tokens"] for choice in reply["choices"]]


def ids(count, first=1000):
    return [first + (i * 37) % 5000 for i in range(count)]


class Follower(threading.Thread):
    """Reads a stream and keeps what came."""

    def __init__(self, server, **body):
        super().__init__(daemon=True)
        self.stream = Stream(server, COMPLETION, ignore_eos=True, **body)
        self.events = []
        self.start()

    def run(self):
        for event in self.stream:
            self.events.append(event)

    @property
    def done(self):
        return bool(self.events) and self.events[-1] == "[DONE]"


@pytest.fixture(scope="module")
def chunked(start_server):
    return start_server("--prefill-chunk", 32, "--kv-memory", "256M")


def test_continuous_batching(chunked):
    """A request that arrives while others decode gets its first token while they go on, and they get a token for each
    of its prefill chunks."""
    others = [Follower(chunked, prompt=f"{STORY} number {i}", max_tokens=500, temperature=0) for i in range(2)]
    eventually(lambda: all(len(other.events) > 2 for other in others), "decoding")
    before = [len(other.events) for other in others]
    late = Stream(chunked, COMPLETION, prompt=ids(640), max_tokens=4, ignore_eos=True)
    next(iter(late))
    for other, count in zip(others, before):
        assert not other.done, "the late request waited for the others"
        assert len(other.events) - count >= 640 / 32 - 4, "a stream paused for longer than one prefill chunk"
    late.close()
    for other in others:
        other.join()
        assert other.events[-2]["choices"][0]["finish_reason"] == "length"
    chunked.idle()


def test_prefix_is_reused_from_a_running_request(server):
    """62 whole blocks of 16 of the 1,000 shared tokens."""
    shared, own, other = ids(1000), ids(500, 7000), ids(500, 13000)
    running = Follower(server, prompt=shared + own, max_tokens=1000)
    eventually(lambda: running.events, "decoding")
    reply = server.complete(prompt=shared + other, max_tokens=2)
    assert not running.done
    assert reply["usage"]["prompt_tokens"] == 1500
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 992
    running.stream.connection.shutdown(2)
    server.idle()


def test_prefix_metrics(server):
    prompt = ids(400, 20000)
    before = server.idle()
    server.complete(prompt=prompt, max_tokens=1)
    server.complete(prompt=prompt, max_tokens=1)
    after = server.idle()
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == 384
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == 800


@pytest.mark.parametrize("number, policy", list(enumerate(["h2o", "distillcache"])))
def test_prefix_under_a_policy_that_sums(server, number, policy):
    """Statistics come with the prefix: the same tokens, and a longer prompt goes on from there."""
    prompt, more = ids(400, 30000 + 1000 * number), ids(200, 35000)
    cache = {"policy": policy, "tokens": 60}
    before = server.idle()
    replies = [server.complete(prompt=prompt, max_tokens=12, temperature=0, logprobs=0, kv_cache=cache) for _ in range(2)]
    replies.append(server.complete(prompt=prompt + more, max_tokens=1, kv_cache=cache))
    assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies] == [0, 384, 384]
    assert tokens_of(replies[0]) == tokens_of(replies[1])
    after = server.idle()
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == 768
    assert after["prefix_snapshot_bytes"] > before["prefix_snapshot_bytes"]


REQUEST = dict(prompt=STORY + " there lived a very old and very wise dragon who loved to count:", max_tokens=40, seed=11,
               temperature=1.0, top_p=0.95, n=2, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(start_server):
    """The request's tokens alone on a fresh server."""
    server = start_server("--kv-memory", "256M")
    tokens = tokens_of(server.complete(**REQUEST))
    assert tokens[0] != tokens[1]
    return tokens


def among_others(server, count):
    """The request's tokens among others that run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        others = [pool.submit(server.complete, prompt=f"{i} {STORY}" * (1 + i % 4), max_tokens=60, seed=i, temperature=1,
                              ignore_eos=True) for i in range(count)]
        mine = server.complete(**REQUEST)
        for other in others:
            assert other.result()["usage"]["completion_tokens"] == 60
    return tokens_of(mine)


def test_same_tokens_again_and_with_the_prefix_reused(server, expected):
    assert tokens_of(server.complete(**REQUEST)) == expected
    reply = server.complete(**REQUEST)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert tokens_of(reply) == expected


def test_same_tokens_streamed(server, expected):
    joined = [[], []]
    for event in Stream(server, COMPLETION, **REQUEST):
        if event != "[DONE]":
            choice = event["choices"][0]
            joined[choice["index"]] += choice["logprobs"]["tokens"]
    assert joined == expected


def test_same_tokens_among_others(server, expected):
    """Trap 27."""
    assert among_others(server, 16) == expected


@pytest.mark.parametrize("chunk", [1, 7])
def test_same_tokens_with_any_prefill_chunk(start_server, expected, chunk):
    server = start_server("--prefill-chunk", chunk, "--batch-tokens", 24, "--kv-memory", "128M")
    assert among_others(server, 6) == expected
    server.stop()


def test_same_tokens_after_preemption(start_server, expected):
    server = start_server("--kv-memory", memory_of(540), "--no-prefix-sharing")
    assert among_others(server, 10) == expected
    assert server.idle()["num_preemptions_total"] > 0, "the test did not force any preemption"
    server.stop()


def test_one_prompt_of_many_is_as_alone(server, expected):
    body = {**REQUEST, "prompt": ["Other", REQUEST["prompt"]]}
    reply = server.complete(**{**body, "temperature": 0})
    alone = server.complete(**{**REQUEST, "temperature": 0})
    assert tokens_of(reply)[2:] == tokens_of(alone)
