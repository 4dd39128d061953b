# SPDX-License-Identifier: Apache-2.0
"""What is refused, with exact status, type, code and param; and that refusing harms nothing."""

import json
import random

import openai
import pytest

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b'"x"', b"{} x", b"{}{}", b'{"prompt":"a","prompt":"b"}', b'{"prompt":NaN}',
    b'{"prompt":"a","temperature":Infinity}', b'{"prompt":"a","temperature":1e999}',
    b'{"prompt":"a","seed":123456789012345678901234567890}', b'{"prompt":"\\ud800"}', b'{"prompt":"\\udc00x"}',
    b'{"prompt":"\xff"}', b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"x":' + b'{"x":' * 100000, b"\x00" * 100, "{'prompt': 'a'}".encode("utf-16"),
], ids=lambda body: f"{len(body)}-{body[:8]!r}")
def test_bad_json(fake, body):
    """Trap 13 among others."""
    for path in (COMPLETION, CHAT, "/v1/embeddings", "/apply-template", "/tokenize", "/detokenize"):
        if len(body) < 65536:
            fake.post(path, body).expect_error(400)


VALUES = [
    (dict(), "prompt"), (dict(prompt=5), "prompt"), (dict(prompt=[]), "prompt"), (dict(prompt=[[]]), "prompt"),
    (dict(prompt=["a", 1]), "prompt"), (dict(prompt=[1, "a"]), "prompt"), (dict(prompt=[[1], 2]), "prompt"),
    (dict(prompt=[[1], "a"]), "prompt"), (dict(prompt=[1, [2]]), "prompt"), (dict(prompt=[-1]), "prompt"),
    (dict(prompt=[10**9]), "prompt"), (dict(prompt=[2**40]), "prompt"), (dict(prompt=[0.5]), "prompt"),
    (dict(prompt=[["a"]]), "prompt"), (dict(prompt=["a"] * 17, n=128), "prompt"),
    (dict(prompt=[[5] * 4000] * 3, n=128, echo=True), "echo"),
    (dict(prompt="a", n=0), "n"), (dict(prompt="a", n=129), "n"), (dict(prompt="a", n=1.5), "n"),
    (dict(prompt="a", n="1"), "n"), (dict(prompt="a", n=True), "n"), (dict(prompt="a", n=1e300), "n"),
    (dict(prompt="a", temperature=-1), "temperature"), (dict(prompt="a", temperature=2.01), "temperature"),
    (dict(prompt="a", top_p=1.1), "top_p"), (dict(prompt="a", top_k=-2), "top_k"), (dict(prompt="a", min_p=2), "min_p"),
    (dict(prompt="a", seed=1.5), "seed"), (dict(prompt="a", seed=2**63), None), (dict(prompt="a", stop=5), "stop"),
    (dict(prompt="a", stop=list("abcde")), "stop"), (dict(prompt="a", stop=""), "stop"),
    (dict(prompt="a", stop=["x", None]), "stop"), (dict(prompt="a", max_tokens=-1), "max_tokens"),
    (dict(prompt="a", max_tokens=2**40), "max_tokens"),
    (dict(prompt="a", logprobs=6), "logprobs"), (dict(prompt="a", logprobs=True), "logprobs"),
    (dict(prompt="a", echo="yes"), "echo"), (dict(prompt="a", stream=1), "stream"),
    (dict(prompt="a", stream_options={}), "stream_options"), (dict(prompt="a", ignore_eos=0), "ignore_eos"),
    (dict(prompt="a", best_of=3, n=4), "best_of"), (dict(prompt="a", suffix="b"), "suffix"),
    (dict(prompt="a", logit_bias={"5": 101}), "logit_bias"), (dict(prompt="a", logit_bias={"99999999": 1}), "logit_bias"),
    (dict(prompt="a", logit_bias={str(i): 0 for i in range(1025)}), "logit_bias"), (dict(prompt="a", stop_token_ids=[10**9]), "stop_token_ids"),
    (dict(prompt=[[5] * 4000] * 3, n=128, repetition_penalty=2), "repetition_penalty"),
    (dict(prompt="a", presence_penalty=2.1), "presence_penalty"), (dict(prompt="a", frequency_penalty=-3), "frequency_penalty"),
    (dict(prompt="a", response_format={"type": "grammar"}), "response_format"), (dict(prompt="a", tools=[{}]), "tools"),
]


@pytest.mark.parametrize("body, param", VALUES, ids=[f"{param}-{i}" for i, (_, param) in enumerate(VALUES)])
def test_bad_values(server, body, param):
    """Traps 12, 21, 29: known fields are served or refused by name, before anything is queued."""
    before = server.metrics()["prompt_tokens_total"]
    for stream in ([None, True] if param not in ("stream", "stream_options") else [None]):
        extra = {} if stream is None else {"stream": stream}
        server.post(COMPLETION, {**body, **extra}).expect_error(400, param=param)
    assert server.metrics()["prompt_tokens_total"] == before


@pytest.mark.parametrize("path, body, words", [
    (COMPLETION, dict(prompt="a", n=129), "n 129 128"), (COMPLETION, dict(prompt="a", temperature=2.5), "temperature 2.5 2"),
    (COMPLETION, dict(prompt="a", logprobs=6), "logprobs 6 5"), (COMPLETION, dict(prompt="a", max_tokens=-1), "max_tokens -1 0"),
    (COMPLETION, dict(prompt="a", n=21, best_of=21), "best_of 21 20"), (COMPLETION, dict(prompt="a", stop=list("abcde")), "stop 5 4"),
    (COMPLETION, dict(prompt="a", stop={}), "stop object string"), (COMPLETION, dict(prompt="a", stop=[7]), "stop number string"),
    (COMPLETION, dict(prompt={}), "prompt object string"), (COMPLETION, dict(prompt=["a", 7]), "prompt 1 number strings"),
    (COMPLETION, dict(prompt=[1, 2, 300]), "prompt 300 259"), (COMPLETION, dict(prompt=["a"] * 20, n=128), "20 128 2560 2048"),
    (COMPLETION, dict(prompt="a", stream=True, stream_options=3), "stream_options number object"),
    (COMPLETION, dict(prompt=[1] * 9000), "9000 8192"), (COMPLETION, b"x" * 70000, "70000 65536"),
    (CHAT, dict(messages=USER, top_logprobs=21), "top_logprobs 21 20"), (CHAT, dict(messages=USER, top_logprobs=2), "top_logprobs 2"),
    (CHAT, dict(messages=[{"role": "king"}]), "messages[0].role king user"),
    (CHAT, dict(messages=[{"role": "user", "content": 4}]), "messages[0].content number string"),
    (CHAT, dict(messages=USER, tool_choice="any"), "tool_choice required auto")])
def test_messages_name_parameter_value_and_limit(fake, path, body, words):
    reply = fake.post(path, body)
    assert reply.status in (400, 413)
    message = reply.json["error"]["message"]
    assert [word for word in words.split() if word not in message] == [], message


CHATS = [
    (dict(), "messages"), (dict(messages=[]), "messages"), (dict(messages=["hi"]), "messages[0]"),
    (dict(messages=[{"content": "x"}]), "messages[0].role"), (dict(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
    (dict(messages=USER + [{"role": "user", "content": None}]), "messages[1].content"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), "messages[0].content"),
    (dict(messages=USER, max_tokens=-1), "max_tokens"), (dict(messages=USER, top_logprobs=1), "top_logprobs"),
    (dict(messages=USER, logprobs=True, top_logprobs=21), "top_logprobs"), (dict(messages=USER, logprobs=5), "logprobs"),
    (dict(messages=USER, tools=[{"type": "function"}]), "tools[0]"), (dict(messages=USER, tool_choice="required"), "tool_choice"),
    (dict(messages=USER, reasoning_effort="low"), "reasoning_effort"), (dict(messages=USER, verbosity="low"), "verbosity"),
    (dict(messages=USER, add_special_tokens="x"), "add_special_tokens"), (dict(messages=USER, priority=1), "priority"),
]


@pytest.mark.parametrize("body, param", CHATS, ids=[f"{param}-{i}" for i, (_, param) in enumerate(CHATS)])
def test_bad_chats(server, body, param):
    server.post(CHAT, body).expect_error(400, param=param)


def test_unknown_model(server):
    """Trap 31."""
    for path, body in ((COMPLETION, {"prompt": "a", "max_tokens": 1}), (CHAT, {"messages": USER, "max_tokens": 1}),
                       ("/tokenize", {"prompt": "a"})):
        server.post(path, {**body, "model": "gpt-4"}).expect_error(404, code="model_not_found", param="model")
        assert server.post(path, {**body, "model": server.model}).status == 200
    server.get("/v1/models/gpt-4").expect_error(404, code="model_not_found", param="model")
    with pytest.raises(openai.NotFoundError) as raised:
        server.client().completions.create(model="gpt-4", prompt="a")
    assert raised.value.code == "model_not_found"


def test_unknown_route(server):
    for path in ("/", "/v1", "/v1/models/", "/v1/completions/", "/v1/embeddings/", "/%00", "/../etc/passwd"):
        server.get(path).expect_error(404)
        server.post(path, {}).expect_error(404)


def test_unknown_fields_are_ignored(fake):
    """Trap 20; each is logged once."""
    for _ in range(2):
        assert fake.post(COMPLETION, {"prompt": "a", "flux_capacitor": {"on": True}}).status == 200
    logged = [event for event in fake.events() if event.get("field") == "flux_capacitor"]
    assert len(logged) == 1


def test_context_exceeded(server):
    limit = server.get("/v1/models").json["data"][0]["max_model_len"]
    for stream in (False, True):  # trap 16
        server.post(COMPLETION, {"prompt": [5] * (limit + 1), "stream": stream}).expect_error(
            400, code="context_length_exceeded", param="prompt")
    server.post(COMPLETION, {"prompt": [5] * limit}).expect_error(400, code="context_length_exceeded", param="prompt")


def test_queue_full(fake):
    """Trap 30: a prompt 503, and the openai client is told when to try again."""
    waiting = [fake.connect() for _ in range(4)]
    from conftest import eventually, post_bytes
    for connection in waiting:
        connection.sendall(post_bytes(COMPLETION, {"prompt": "!never"}))
    eventually(lambda: fake.metrics()["num_requests_waiting"] == 4, "queue is full")
    reply = fake.post(COMPLETION, {"prompt": "!never", "stream": True})
    reply.expect_error(503, "server_error", "queue_full")
    assert int(reply.headers["retry-after"]) > 0
    assert fake.get("/health").status == 200
    for connection in waiting:
        connection.close()


def test_faults_before_and_after_the_first_token(fake):
    from conftest import Stream
    fake.post(COMPLETION, {"prompt": "!fail"}).expect_error(500, "server_error")
    fake.post(COMPLETION, {"prompt": "!fail", "stream": True}).expect_error(500, "server_error")
    fake.post(COMPLETION, {"prompt": "!late"}).expect_error(500, "server_error")
    fake.post(COMPLETION, {"prompt": ["ok", "!fail"], "max_tokens": 2}).expect_error(500, "server_error")
    events = list(Stream(fake, COMPLETION, prompt="!late"))
    assert [event["choices"][0]["text"] for event in events[:3]] == ["!", "l", "a"]
    assert set(events[-2]) == {"error"} and events[-2]["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"
    with pytest.raises(openai.APIError, match="made to fail"):
        list(fake.client().completions.create(model="fake", prompt="!late", stream=True))


def mutated(seed):
    """A body that was once good."""
    chance = random.Random(seed)
    good = chance.choice([
        {"prompt": "hello", "max_tokens": 3, "logprobs": 2, "stop": ["a", "b"], "stream": True},
        {"prompt": [[1, 2], [3]], "n": 2, "temperature": 0.5, "seed": 7},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "é😀"}]}], "max_tokens": 3},
        {"tokens": [1, 2, 3], "prompt": "x"},
    ])
    body = bytearray(json.dumps(good, ensure_ascii=chance.random() < 0.5).encode())
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(body))
        action = chance.randrange(4)
        if action == 0:
            body[at] = chance.randrange(256)
        elif action == 1:
            del body[at:at + chance.randint(1, 8)]
        elif action == 2:
            body[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
        else:
            body[at:at] = chance.choice([b"null", b"[", b"}", b"1e99999", b'"', b"\\u0000", b"-", b"99999999999999999999"])
        if not body:
            body = bytearray(b"{")
    return bytes(body)


def test_random_bodies_leave_the_server_healthy(start_server):
    server = start_server("--context", 128, "--kv-memory", "64M")  # a body that lost its max_tokens ends there
    expected = server.complete(prompt="The sun is", temperature=0, max_tokens=4)["choices"]
    for seed in range(200):
        body = mutated(seed)
        path = (COMPLETION, CHAT, "/tokenize", "/detokenize")[seed % 4]
        reply = server.post(path, body)
        assert reply.status in (200, 400, 404), (seed, body, reply.status, reply.body)
        if reply.status != 200:
            assert set(reply.json["error"]) == {"message", "type", "param", "code"}
        else:
            reply.body.decode("utf-8")
    server.idle()
    assert server.complete(prompt="The sun is", temperature=0, max_tokens=4)["choices"] == expected
