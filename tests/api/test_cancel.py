# SPDX-License-Identifier: Apache-2.0
"""A client that leaves is cancelled, whatever its request was doing, and nobody else is (traps 14, 15)."""

import os
import socket

import pytest

from conftest import Stream, eventually, post_bytes, read_reply

COMPLETION = "/v1/completions"


def running(server):
    metrics = server.metrics()
    return metrics["num_requests_running"], metrics["num_requests_waiting"]


def leave(connection, how):
    if how == "half":  # a client that closes only its sending side counts as gone
        connection.shutdown(socket.SHUT_WR)
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()
    else:
        connection.close()


@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_while_decoding(fake, stream, how):
    connection = fake.connect()
    connection.sendall(post_bytes(COMPLETION, {"prompt": "abc", "max_tokens": 8000, "stream": stream}))
    eventually(lambda: running(fake) == (1, 0), "running")
    if stream:
        connection.recv(100)
    leave(connection, how)
    eventually(lambda: running(fake) == (0, 0), "cancelled")


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_sockets_are_closed_beside_an_idle_connection(fake, how):
    """Who left holds no place among the connections, though others are older and idle."""
    def is_socket(path):
        try:
            return os.readlink(path).startswith("socket:")
        except FileNotFoundError:
            return False  # closed since it was listed

    def sockets():
        return sum(is_socket(entry.path) for entry in os.scandir(f"/proc/{fake.process.pid}/fd"))

    with fake.connect() as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        before = sockets()
        for _ in range(8):
            connection = fake.connect()
            connection.sendall(post_bytes(COMPLETION, {"prompt": "abc", "max_tokens": 8000, "stream": True}))
            connection.recv(100)
            leave(connection, how)
        eventually(lambda: sockets() <= before + 1, "closed")


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_while_queued(fake, how):
    other = Stream(fake, COMPLETION, prompt="xyz", max_tokens=8000)
    events = iter(other)
    next(events)
    connection = fake.connect()
    connection.sendall(post_bytes(COMPLETION, {"prompt": "!never"}))
    eventually(lambda: running(fake) == (1, 1), "queued")
    leave(connection, how)
    eventually(lambda: running(fake)[1] == 0, "cancelled")
    for _ in range(50):
        assert next(events)["choices"]
    assert running(fake) == (1, 0)
    other.close()


def test_a_reader_that_stopped_reading_and_leaves(fake):
    """More is pending than the sockets hold, so the connection waits to write when its client goes."""
    stream = Stream(fake, COMPLETION, prompt="a" * 4000, max_tokens=4000, n=16)
    eventually(lambda: running(fake)[0] == 16, "running")
    stream.close()
    eventually(lambda: running(fake) == (0, 0), "cancelled")


def test_logged_as_gone(fake):
    connection = fake.connect()
    connection.sendall(post_bytes(COMPLETION, {"prompt": "!never"}, "X-Request-Id: leaver-1"))
    eventually(lambda: running(fake) == (0, 1), "queued")
    connection.close()

    def access():
        return [event for event in fake.events() if event.get("id") == "leaver-1" and event["event"] == "request"]

    assert eventually(access, "access log")[0]["outcome"] == "client left"


def test_many_come_and_go(fake):
    """Every second one leaves at once; the others are served."""
    staying = []
    for i in range(200):
        connection = fake.connect()
        connection.sendall(post_bytes(COMPLETION, {"prompt": "abc", "max_tokens": 20, "stream": i % 4 < 2}))
        if i % 2:
            connection.close()
        else:
            staying.append(connection)
        if len(staying) == 3:
            for held in staying:
                assert read_reply(held).status in (200, 503)
                held.close()
            staying = []
    for held in staying:
        held.close()


# --- With the model ---


@pytest.fixture(scope="module")
def narrow(start_server):
    """One sequence at a time, and prefill in many small steps."""
    return start_server("--max-sequences", 1, "--batch-tokens", 32, "--kv-memory", "256M")


def test_model_decoding(server):
    stream = Stream(server, COMPLETION, prompt="Once upon a time", max_tokens=4000, ignore_eos=True)
    for _, event in zip(range(3), stream):
        assert event["choices"]
    stream.close()
    generated = server.idle()["generation_tokens_total"]
    assert server.metrics()["generation_tokens_total"] == generated
    assert server.metrics()["kv_bytes"] == 0


def test_model_prefilling(narrow):
    before = narrow.idle()
    connection = narrow.connect()
    connection.sendall(post_bytes(COMPLETION, {"prompt": [1000 + i % 5000 for i in range(6000)], "max_tokens": 5}))
    eventually(lambda: running(narrow) == (1, 0), "prefilling")
    connection.close()
    after = narrow.idle()
    assert after["generation_tokens_total"] == before["generation_tokens_total"]
    assert after["steps_total"] - before["steps_total"] < 6000 / 32, "the prefill was not cut short"
    assert narrow.metrics()["steps_total"] == after["steps_total"]


def test_model_queued(narrow):
    stream = Stream(narrow, COMPLETION, prompt="Once upon a time", max_tokens=120, ignore_eos=True)
    events = iter(stream)
    next(events)
    queued = narrow.connect()
    queued.sendall(post_bytes(COMPLETION, {"prompt": "Never", "max_tokens": 5}))
    eventually(lambda: running(narrow) == (1, 1), "queued")
    queued.close()
    eventually(lambda: running(narrow)[1] == 0, "cancelled")
    rest = list(events)
    assert rest[-1] == "[DONE]" and rest[-2]["choices"][0]["finish_reason"] == "length"
    narrow.idle()


# --- Clients that stay and do not read ---


def slow_reader_events(server):
    return [event for event in server.events() if event["event"].startswith("client does not read its stream")]


def test_a_stream_that_nobody_reads_is_cut(fake):
    """It would fill gigabytes: 128 choices of 8000 tokens with their log-probabilities."""
    before = len(slow_reader_events(fake))
    other = Stream(fake, COMPLETION, prompt="xyz", max_tokens=3000)
    events = iter(other)
    next(events)
    unread = fake.connect()
    unread.sendall(post_bytes(COMPLETION, {"prompt": "abc", "n": 128, "logprobs": 5, "max_tokens": 8000, "stream": True}))
    cut = eventually(lambda: slow_reader_events(fake)[before:], "cut")
    assert cut[0]["unread_bytes"] <= cut[0]["limit"] == 16 << 20
    rest = list(events)
    assert rest[-1] == "[DONE]" and len(rest) == 3000
    eventually(lambda: running(fake) == (0, 0), "cancelled")
    received = 0
    try:
        while piece := unread.recv(1 << 20):
            received += len(piece)
            assert b"[DONE]" not in piece
    except ConnectionResetError:
        pass
    assert received < 32 << 20
    assert len(slow_reader_events(fake)) == before + 1


def test_a_late_reader_gets_everything(fake):
    """What is within the limit waits; and an echo, which comes all at once, does not count."""
    before = len(slow_reader_events(fake))
    body = {"prompt": "a" * 8000, "echo": True, "n": 32, "logprobs": 5, "max_tokens": 20}
    generated = fake.metrics()["generation_tokens_total"]
    stream = Stream(fake, COMPLETION, **body)
    eventually(lambda: fake.metrics()["generation_tokens_total"] == generated + 32 * 20, "generated")
    entries, reasons = 0, 0
    for event in stream:
        if event == "[DONE]":
            break
        choice = event["choices"][0]
        entries += len(choice["logprobs"]["tokens"]) if choice["logprobs"] else 0
        reasons += choice["finish_reason"] == "length"
    assert event == "[DONE]" and (entries, reasons) == (32 * 8020, 32)
    assert slow_reader_events(fake)[before:] == []
    stream.close()
