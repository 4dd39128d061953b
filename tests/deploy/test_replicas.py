# SPDX-License-Identifier: Apache-2.0
"""Two replicas behind Debian's nginx with docker/nginx/distillcache.conf: the same beginning goes to the same replica,
streams pass as they come, a replica that dies loses only what it was streaming, one that drains gets nothing new.

Most of it is on fake servers (tests/unit/fake_server.c), whose names in replies tell who answered."""

import http.client
import json
import random
import signal
import threading

import pytest

from conftest import PATIENCE, api, eventually

KEYS = 24  # two ways of asking that are not sent to the same replica agree on all of so many with a chance of 2^-24


def text_of(number, bytes=1500):
    """Text that differs from others' from its start on, and is longer than what nginx looks at."""
    generator = random.Random(number)
    return "".join(generator.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(bytes))


@pytest.fixture
def fakes(start_server):
    """Two fake replicas, a and b."""

    def start(*options, **env):
        return [start_server("--model-alias", name, *options, fake=True, env=env) for name in "ab"]

    return start


@pytest.fixture(scope="module")
def pair(start_server):
    return [start_server("--model-alias", name, fake=True) for name in "ab"]


def who(proxy, body, path="/v1/completions", headers=None):
    """The replica that answers."""
    reply = proxy.post(path, body, headers)
    assert reply.status == 200, reply.body
    return reply.json["model"]


def prompts_for(proxy, name, count, begin=""):
    """Prompts whose replica is the one with this name, tried one after the other."""
    found, number = [], 0
    while len(found) < count:
        prompt, number = begin + text_of(number), number + 1
        if who(proxy, {"prompt": prompt, "max_tokens": 1}) == name:
            found.append(prompt)
    return found


# --- Who is asked ---


def test_cached_tokens_grow_in_a_conversation(start_server, start_proxy):
    """With the real model: each turn finds what the turns before left, though nobody names a replica."""
    replicas = [start_server("--kv-memory", "64M", "--threads", 1) for _ in range(2)]
    proxy = start_proxy(*replicas)
    client, model = proxy.client(), replicas[0].model
    for story in range(2):
        messages = [{"role": "user", "content": f"Story {story}. " + "The keeper counted the ships in the fog. " * 30}]
        before = 0
        for turn in range(3):
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            # At first what every chat begins with, if its replica has seen one.
            assert cached < 64 if turn == 0 else cached > max(before, 250), (story, turn, cached)
            before = cached
            messages += [{"role": "assistant", "content": answer.choices[0].message.content},
                         {"role": "user", "content": f"And then? {turn} " + "Go on, in detail. " * 4}]
    hits = [replica.metrics()["prefix_cache_hits_total"] for replica in replicas]
    assert sum(hits) > 1000, hits


def test_same_beginning_same_replica(pair, start_proxy):
    proxy = start_proxy(*pair)
    owners = {}
    for number in range(KEYS):
        text = text_of(number)
        owners[number] = who(proxy, {"prompt": text, "max_tokens": 1})
        spaced = f'{{\n "max_tokens" : 1,\n "user": "\\"prompt\\": \\"x\\"",\n "prompt" :\t{json.dumps(text + "tail")} }}'
        assert who(proxy, spaced.encode()) == owners[number]
        assert who(proxy, {"stream": False, "max_tokens": 2, "prompt": text + "!"}) == owners[number]
        chat = [{"role": "system", "content": text}, {"role": "user", "content": "one"}]
        owner = who(proxy, {"messages": chat, "max_tokens": 1}, "/v1/chat/completions")
        chat += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
        assert who(proxy, {"max_tokens": 1, "messages": chat}, "/v1/chat/completions") == owner
        ids = [ord(c) for c in text]
        owner = who(proxy, {"prompt": ids, "max_tokens": 1})
        assert who(proxy, {"prompt": ids + [5], "max_tokens": 1}) == owner
    assert set(owners.values()) == {"a", "b"}, "all went to one replica"


def test_cache_key_comes_first(pair, start_proxy):
    proxy = start_proxy(*pair)
    owners = set()
    for number in range(KEYS):
        asked = {who(proxy, {"prompt": text_of(i), "max_tokens": 1, "prompt_cache_key": f"user-{number}"})
                 for i in range(3)}
        assert len(asked) == 1
        owners |= asked
    assert owners == {"a", "b"}


def test_header_stands_for_bodies_that_are_not_kept(pair, start_proxy):
    """X-Prefix-Hash, copied from an answer: where nginx has not kept the body in memory."""
    proxy = start_proxy(*pair, **{"client_body_buffer_size 16m;": "client_body_buffer_size 1k;"})
    owners = set()
    for number in range(KEYS):
        text = text_of(number, 6000)
        first = proxy.post("/v1/completions", {"prompt": text, "max_tokens": 1})
        name = {"X-Prefix-Hash": first.headers["x-prefix-hash"]}
        asked = {who(proxy, {"prompt": text + tail, "max_tokens": 1}, headers=name) for tail in "abc"}
        assert len(asked) == 1
        owners |= asked
    assert owners == {"a", "b"}
    # Without a name they take turns.
    assert {who(proxy, {"prompt": text_of(0, 6000), "max_tokens": 1}) for _ in range(8)} == {"a", "b"}


def test_requests_without_a_prompt_take_turns(pair, start_proxy):
    proxy = start_proxy(*pair)
    assert {proxy.get("/v1/models").json["data"][0]["id"] for _ in range(8)} == {"a", "b"}


@pytest.mark.parametrize("body", [
    b"", b"\0\xff\xfe" * 1000, b"{", b'"prompt":', b'{"prompt"' + b" " * 300000 + b":1}", b'"messages"' * 50000,
    b'{"prompt": "' + b"\\\\" * 500000, b'{"prompt_cache_key": "' + b"k" * 100000 + b'"}', b'{"prompt_cache_key": ""}'],
    ids=lambda body: repr(body[:12]))
def test_bad_bodies_get_the_replicas_error(pair, start_proxy, body):
    proxy = start_proxy(*pair)
    reply = proxy.post("/v1/completions", body)
    assert reply.status == 400 and reply.json["error"]["type"] == "invalid_request_error", reply.body
    assert reply.json == pair[0].post("/v1/completions", body).json


# --- Streams ---


def test_streams_pass_as_they_come(fakes, start_proxy):
    """The first token is here before those that would fill a buffer exist, and a client that leaves ends the work."""
    a, b = fakes(FAKE_STEP_US="100000")
    proxy = start_proxy(a, b)
    stream = api.Stream(proxy, "/v1/completions", prompt="!slow", max_tokens=8000)
    chunk = next(iter(stream))
    replica = a if chunk["model"] == "a" else b
    metrics = replica.metrics()
    assert metrics["num_requests_running"] == 1
    assert metrics["generation_tokens_total"] < 2048 / len(json.dumps(chunk)), "held back"
    stream.close()
    replica.idle()


# --- Replicas that go ---


class Streams:
    """Streams that threads read to their ends."""

    def __init__(self, proxy, prompts, tokens):
        self.whole, self.broken = [], []
        self.begun = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self.read, args=(proxy, prompt, tokens)) for prompt in prompts]
        for thread in self.threads:
            thread.start()
        for _ in prompts:
            assert self.begun.acquire(timeout=PATIENCE)

    def read(self, proxy, prompt, tokens):
        text, name, last = "", None, None
        try:
            for event in api.Stream(proxy, "/v1/completions", prompt=prompt, max_tokens=tokens, ignore_eos=True):
                if name is None:
                    self.begun.release()
                if event != "[DONE]":
                    name, text = event["model"], text + event["choices"][0]["text"]
                last = event
        except (http.client.IncompleteRead, ConnectionError):
            pass
        (self.whole if last == "[DONE]" and len(text) == tokens else self.broken).append((prompt, name))

    def join(self):
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


class Load:
    """Threads that ask one thing after the other until they are told to end."""

    def __init__(self, proxy, prompts, **body):
        self.replies, self.ending = [], threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=(proxy, prompt, body)) for prompt in prompts]
        for thread in self.threads:
            thread.start()

    def ask(self, proxy, prompt, body):
        while not self.ending.is_set():
            reply = proxy.post("/v1/completions", {"prompt": prompt, **body})
            self.replies.append((reply.status, reply.json.get("model")))

    def more(self, count):
        """Waits until so many more were answered."""
        before = len(self.replies)
        eventually(lambda: len(self.replies) >= before + count, "answers")

    def end(self):
        self.ending.set()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_killed_replica_loses_only_what_it_streams(fakes, start_proxy):
    a, b = fakes(FAKE_STEP_US="5000")
    proxy = start_proxy(a, b)
    prompts = {name: prompts_for(proxy, name, 2) for name in "ab"}
    slow = {name: prompts_for(proxy, name, 4, "!slow") for name in "ab"}  # some 50 ms a token
    streams = Streams(proxy, slow["a"] + slow["b"], tokens=150)
    load = Load(proxy, prompts["a"] + prompts["b"], max_tokens=20)
    load.more(8)
    assert a.metrics()["num_requests_running"] >= 4
    a.kill()
    load.more(40)
    streams.join()
    load.end()
    # Whole answers, also those that a was working on, come from b; a's streams had begun and are cut.
    assert {status for status, _ in load.replies} == {200}, load.replies
    assert {name for _, name in load.replies[-20:]} == {"b"}
    assert sorted(streams.broken) == sorted((prompt, "a") for prompt in slow["a"])
    assert sorted(streams.whole) == sorted((prompt, "b") for prompt in slow["b"])


def test_answer_that_has_not_begun_is_asked_for_again(fakes, start_proxy):
    """A whole answer whose replica dies comes from the other one."""
    a, b = fakes()
    proxy = start_proxy(a, b)
    body = {"prompt": "!slow", "max_tokens": 300, "prompt_cache_key": keys_for(proxy, "a", 1)[0]}
    replies = []
    asking = threading.Thread(target=lambda: replies.append(proxy.post("/v1/completions", body)))
    asking.start()
    eventually(lambda: a.metrics()["generation_tokens_total"] > 20, "a works on it")
    a.kill()
    asking.join(PATIENCE)
    assert replies and replies[0].status == 200, replies
    assert replies[0].json["model"] == "b" and len(replies[0].json["choices"][0]["text"]) == 300


def keys_for(proxy, name, count):
    """Cache keys whose replica is the one with this name."""
    found, number = [], 0
    while len(found) < count:
        key, number = f"key-{number}", number + 1
        if who(proxy, {"prompt": "x", "max_tokens": 1, "prompt_cache_key": key}) == name:
            found.append(key)
    return found


def test_draining_replica_gets_nothing_new_and_finishes(fakes, start_proxy):
    a, b = fakes("--drain-timeout", 1000, FAKE_STEP_US="5000")
    proxy = start_proxy(a, b)
    slow = prompts_for(proxy, "a", 3, "!slow")
    streams = Streams(proxy, slow, tokens=200)
    load = Load(proxy, prompts_for(proxy, "a", 3), max_tokens=3)
    load.more(6)
    a.process.send_signal(signal.SIGTERM)
    eventually(lambda: a.get("/ready").status == 503 if a.process.poll() is None else True, "draining")
    load.more(9)  # those at work when the signal came
    before = len(load.replies)
    load.more(30)
    load.end()
    assert {status for status, _ in load.replies} == {200}, load.replies
    assert {name for _, name in load.replies[before:]} == {"b"}
    assert a.metrics()["num_requests_running"] == 3, "its streams were to be still running"
    streams.join()
    assert sorted(streams.whole) == sorted((prompt, "a") for prompt in slow) and not streams.broken
    assert a.process.wait(PATIENCE) == 0


def test_replica_comes_back(fakes, start_server, start_proxy):
    """Its beginnings are its own again when fail_timeout is over."""
    a, b = fakes()
    proxy = start_proxy(a, b)
    prompt = prompts_for(proxy, "a", 1)[0]
    port = a.port
    assert a.stop() == 0
    assert who(proxy, {"prompt": prompt, "max_tokens": 1}) == "b"
    start_server("--model-alias", "a", "--port", port, fake=True)
    eventually(lambda: who(proxy, {"prompt": prompt, "max_tokens": 1}) == "a", "a is asked again")


def test_full_queue_overflows(fakes, start_proxy):
    """503 of one replica: the other one answers. 503 of both: the client is told, in the API's shape."""
    a, b = fakes("--max-waiting", 1, FAKE_MAX_RUNNING="1")
    proxy = start_proxy(a, b)
    key = keys_for(proxy, "a", 1)[0]
    body = {"prompt": "!slow", "max_tokens": 8000, "prompt_cache_key": key}
    streams = []

    def fill(replica):
        """One request runs there, one waits."""
        streams.append(api.Stream(proxy, "/v1/completions", **body))
        assert next(iter(streams[-1]))["model"] == replica.model
        streams.append(api.Stream(proxy, "/v1/completions", **body))
        eventually(lambda: replica.metrics()["num_requests_waiting"] == 1, "one waits")

    fill(a)
    assert who(proxy, {**body, "max_tokens": 1}) == "b"
    fill(b)
    reply = proxy.post("/v1/completions", body)
    expect_shape(reply, 503, "server_error")
    assert int(reply.headers["retry-after"]) > 0
    for stream in streams:
        stream.close()
    eventually(lambda: proxy.post("/v1/completions", {**body, "max_tokens": 1}).status == 200, "served again")


def test_popular_beginning_overflows(fakes, start_proxy):
    a, b = fakes()
    proxy = start_proxy(a, b, options="max_conns=2")
    key = keys_for(proxy, "a", 1)[0]
    streams = []
    for name in "aabb":
        streams.append(api.Stream(proxy, "/v1/completions", prompt="!slow", max_tokens=8000, prompt_cache_key=key))
        assert next(iter(streams[-1]))["model"] == name
    for stream in streams:
        stream.close()


# --- What nginx says itself ---


def expect_shape(reply, status, type):
    assert reply.status == status and reply.headers["content-type"] == "application/json", reply.body
    assert set(reply.json) == {"error"} and set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert reply.json["error"]["type"] == type


def test_words_of_nginx(fakes, start_proxy):
    a, b = fakes()
    proxy = start_proxy(a, b, **{"client_max_body_size 16m;": "client_max_body_size 8k;"})
    assert proxy.get("/health").json == {"status": "ok"} and proxy.get("/ready").status == 200
    expect_shape(proxy.get("/metrics"), 404, "invalid_request_error")
    expect_shape(proxy.get("/admin/v1/status"), 404, "invalid_request_error")
    expect_shape(proxy.post("/v1/completions", {"prompt": "x" * 9000}), 413, "invalid_request_error")
    assert a.stop() == b.stop() == 0
    for _ in range(3):
        reply = proxy.post("/v1/completions", {"prompt": "x"})
        expect_shape(reply, 503, "server_error")
        assert reply.headers["retry-after"] == "2" and reply.headers["access-control-allow-origin"] == "*"
