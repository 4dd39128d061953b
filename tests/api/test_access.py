# SPDX-License-Identifier: Apache-2.0
"""Who may ask what: keys, rates, web pages of other origins."""

import re
import subprocess
import time

import openai
import pytest

from conftest import FAKE, Stream, eventually, post_bytes, read_reply

COMPLETION = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 5}
KEYS = ["sk-first", "sk-second!~", "x", "sk-" + "long" * 200]
OPEN = ["/health", "/ready", "/version", "/metrics"]
WRONG = ["", "sk-firs", "sk-first2", "sk-firsT", "sk-secon", "sk-first,sk-second!~", "# comment", "X" * 5000, "\u00e9",
         "sk-firstsk-first", "none"]


@pytest.fixture(scope="module")
def guarded(start_server, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# comment\n\n  {KEYS[2]}\t\r\n{KEYS[3]}\n#{KEYS[3]}x\n")
    file.chmod(0o600)
    return start_server("--api-key-file", file, fake=True, key=KEYS[0], env={"DISTILLCACHE_API_KEY": ",".join(KEYS[:2])})


def refused(reply):
    error = reply.expect_error(401, code="invalid_api_key")
    assert reply.headers["www-authenticate"] == 'Bearer realm="distillcache"'
    return error


def with_key(server, key, method="POST", path=COMPLETION, body=BODY, name="Authorization", form="Bearer {}"):
    lines = post_bytes(path, body, f"{name}: {form.format(key)}") if method == "POST" else \
        f"{method} {path} HTTP/1.1\r\nHost: x\r\n{name}: {form.format(key)}\r\n\r\n".encode()
    return server.exchange(lines)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_in_both_headers(guarded, key):
    for name, form in (("Authorization", "Bearer {}"), ("authorization", "bearer {}"), ("X-Api-Key", "{}"), ("x-api-key", "{}")):
        assert with_key(guarded, key, name=name, form=form).status == 200
        assert with_key(guarded, key, "GET", "/v1/models", name=name, form=form).status == 200


@pytest.mark.parametrize("key", WRONG)
def test_wrong_keys(guarded, key):
    key = key.encode().decode("latin-1")
    for name, form in (("Authorization", "Bearer {}"), ("X-Api-Key", "{}")):
        refused(with_key(guarded, key, name=name, form=form))
    refused(with_key(guarded, key, "GET", "/v1/models"))


def test_malformed_authorization(guarded):
    for form in ("Basic {}", "{}", "Bearer", "Token {}", "Bearer\t{}"):
        refused(with_key(guarded, KEYS[0], form=form))
    reply = guarded.exchange(post_bytes(COMPLETION, BODY, "Authorization: Bearer wrong", f"X-Api-Key: {KEYS[0]}"))
    refused(reply)  # one that is sent wrongly is not made good by another


@pytest.mark.parametrize("method, path", [
    ("POST", COMPLETION), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"), ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"), ("HEAD", "/v1/models"), ("GET", "/v1/models/fake"), ("GET", "/nowhere"), ("DELETE", COMPLETION),
    ("GET", "//health"), ("GET", "/health/"), ("GET", "/metrics/x")])
def test_what_needs_a_key(guarded, method, path):
    reply = guarded.request(method, path, headers={"Authorization": ""})
    assert reply.status == 401 and reply.headers["www-authenticate"]


def test_what_needs_none(guarded):
    for path in OPEN:
        for method in ("GET", "HEAD", "OPTIONS"):
            assert guarded.request(method, path, headers={"Authorization": "Bearer wrong"}).status in (200, 204)


def test_preflight_needs_none(guarded):
    """Trap 23."""
    for path in (COMPLETION, "/v1/models", "/tokenize", *OPEN):
        reply = guarded.exchange(f"OPTIONS {path} HTTP/1.1\r\nHost: x\r\nOrigin: http://a.example\r\n"
                                 "Access-Control-Request-Method: POST\r\n\r\n".encode())
        assert reply.status == 204 and reply.headers["access-control-allow-origin"] == "*"


def test_refused_before_the_body_is_read(guarded):
    """With Expect the body is never sent; without, it is dropped and the connection goes on."""
    connection = guarded.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n")
    refused(read_reply(connection))
    connection = guarded.connect()
    connection.sendall(post_bytes(COMPLETION, BODY) + post_bytes(COMPLETION, BODY, f"X-Api-Key: {KEYS[1]}"))
    refused(read_reply(connection))
    assert read_reply(connection).status == 200


def test_openai_client(guarded):
    def client(key):
        return openai.OpenAI(base_url=guarded.url + "/v1", api_key=key, max_retries=0)
    assert client(KEYS[1]).completions.create(model="fake", prompt="a", max_tokens=1).choices[0].text == "a"
    with pytest.raises(openai.AuthenticationError) as raised:
        client("sk-wrong").completions.create(model="fake", prompt="a", max_tokens=1)
    assert raised.value.code == "invalid_api_key"


def test_keys_show_nowhere(guarded):
    """Neither right nor wrong ones: not in the log, answers, metrics, the printed configuration, messages at start."""
    wrong = "sk-attempt-xyz"
    reply = with_key(guarded, wrong)
    assert wrong not in reply.body.decode()
    with_key(guarded, KEYS[3])
    guarded.request("GET", f"/v1/models?key={KEYS[3]}", headers={"X-Api-Key": KEYS[3]})
    eventually(lambda: guarded.log.count('"path":"/v1/models"') >= 1, "access log")
    shown = guarded.log + guarded.get("/metrics").body.decode()
    assert wrong not in shown and not any(key in shown for key in (KEYS[0], KEYS[1], KEYS[3]))
    printed = subprocess.run([FAKE.replace("tests/unit/fake_server", "distillcache"), "serve", "--print-config", "--model", "x",
                              "--api-key", KEYS[0], "--api-key", KEYS[3]], capture_output=True, text=True)
    assert printed.returncode == 0 and "api_key" in printed.stdout and KEYS[0] not in printed.stdout + printed.stderr


@pytest.mark.parametrize("options, content, words", [
    (["--api-key-file", "FILE"], None, "api-key-file No such file"), (["--api-key-file", "FILE"], b"", "api-key-file no key"),
    (["--api-key-file", "FILE"], b"# only\n\n", "api-key-file no key"), (["--api-key-file", "FILE"], b"good\nsecret key\n", "line 2 api-key-file"),
    (["--api-key-file", "FILE"], b"k" * 1025, "line 1 1024"), (["--api-key-file", "FILE"], b"secret\0key", "api-key-file text"),
    (["--api-key-file", "FILE"], "schl\u00fcssel-secret".encode(), "line 1 ASCII"), (["--api-key-file", "/"], None, "api-key-file directory"),
    (["--api-key-file", "FILE"], b"a" * (1 << 20 | 1), "api-key-file bytes"),
    (["--api-key", "secret key"], None, "api-key number 1"), (["--api-key", "a,,b"], None, "api-key number 2"),
    (["--rate-limit", "5"], None, "rate-limit api-key"), (["--tls-cert", "x"], None, "tls-cert tls-key"),
    (["--tls-key", "x"], None, "tls-cert tls-key")])
def test_bad_options(tmp_path, options, content, words):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    options = [str(file) if option == "FILE" else option for option in options]
    result = subprocess.run([FAKE, "serve", "--model", "fake", "--port", "0", *options], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and [word for word in words.split() if word.lower() not in result.stderr.lower()] == [], result.stderr
    assert "secret" not in result.stderr


# --- Rates ---


def test_rate_limit(start_server):
    """Each key has its own bucket; what computes nothing, or is refused, takes nothing from it."""
    server = start_server("--api-key", "a", "--api-key", "b", "--rate-limit", 3, fake=True, key="a")
    began = time.monotonic()
    for _ in range(5):
        assert server.get("/v1/models").status == 200
        server.post(COMPLETION, BODY, {"Authorization": "Bearer c"}).expect_error(401, code="invalid_api_key")
    for path, body in ((COMPLETION, BODY), ("/tokenize", {"prompt": "a"}), (COMPLETION, {**BODY, "stream": True})):
        assert server.post(path, body).status == 200
    for _ in range(3):
        reply = server.post(COMPLETION, BODY)
        elapsed = time.monotonic() - began
        if reply.status == 200 and elapsed > 15:
            pytest.skip("the machine is too slow to exceed three requests a minute")
        reply.expect_error(429, "requests", "rate_limit_exceeded")
        seconds, milliseconds = int(reply.headers["retry-after"]), int(reply.headers["retry-after-ms"])
        assert 0 < milliseconds <= 20000 and seconds == -(-milliseconds // 1000)
        # A bucket of 3 a minute that had 3 at the beginning gets the next after 20 seconds.
        assert milliseconds / 1000 + elapsed >= 19.9
    for _ in range(3):
        assert server.post(COMPLETION, BODY, {"Authorization": "Bearer b"}).status == 200


# --- Origins ---


def origin_of(reply):
    return reply.headers.get("access-control-allow-origin")


def every_kind(server, origin):
    """Answers of every kind: plain, streamed, errors of each layer, preflights."""
    headers = {} if origin is None else {"Origin": origin}
    yield server.get("/health", headers)
    yield server.post(COMPLETION, BODY, headers)
    yield server.post(COMPLETION, {**BODY, "stream": True}, headers)
    yield server.post(COMPLETION, b"{", headers)
    yield server.post(COMPLETION, {"prompt": "!fail"}, headers)
    yield server.post(COMPLETION, b"x" * 70000, headers)
    yield server.get("/nowhere", headers)
    yield server.get(COMPLETION, headers)
    yield server.get("/v1/models", {"Authorization": "Bearer wrong", **headers})
    yield server.get("/health", {"X-Big": "a" * 17000, **headers})
    yield server.request("OPTIONS", COMPLETION, headers={"Access-Control-Request-Method": "POST", **headers})


def test_any_origin(start_server):
    server = start_server("--api-key", "a", "--max-body", 65536, fake=True, key="a")
    statuses = []
    for origin in (None, "http://a.example", "null"):
        for reply in every_kind(server, origin):
            statuses.append(reply.status)
            assert origin_of(reply) == "*" and "vary" not in reply.headers
            exposed = reply.headers["access-control-expose-headers"].lower()
            assert "x-request-id" in exposed and "retry-after" in exposed and "retry-after-ms" in exposed
    assert set(statuses) == {200, 204, 400, 401, 404, 405, 413, 431, 500}


@pytest.mark.parametrize("options", [["--cors-origin", "https://chat.example", "--cors-origin", "http://localhost:3000"],
                                     ["--cors-origin", "https://chat.example,http://localhost:3000"]])
def test_given_origins(start_server, options):
    server = start_server("--api-key", "a", "--max-body", 65536, *options, fake=True, key="a")
    for origin, allowed in (("https://chat.example", True), ("http://localhost:3000", True), ("HTTPS://Chat.Example", True),
                            ("http://chat.example", False), ("https://chat.example:8443", False), ("https://chat.example.evil", False),
                            ("https://evil", False), ("null", False), ("*", False), (",", False), (None, False)):
        for reply in every_kind(server, origin):
            assert origin_of(reply) == (origin if allowed else None)
            assert reply.headers["vary"] == "Origin"
            assert ("access-control-allow-methods" in reply.headers) == (allowed and reply.status == 204)


def test_no_origin(start_server):
    server = start_server("--cors-origin=", fake=True)
    reply = server.get("/health", {"Origin": "http://a.example"})
    assert origin_of(reply) is None and "vary" not in reply.headers and reply.status == 200


# --- A request's time ---


@pytest.fixture(scope="module")
def impatient(start_server):
    return start_server("--request-timeout", 1, fake=True, env={"FAKE_STEP_US": "5000"})


def test_request_timeout_keeps_what_there_is(impatient):
    """Like max_tokens: a beginning is an answer, and nobody repeats it."""
    reply = impatient.post(COMPLETION, {"prompt": "abc", "max_tokens": 8000, "n": 2, "logprobs": 1})
    assert reply.status == 200
    for choice in reply.json["choices"]:
        assert choice["finish_reason"] == "length" and choice["text"].startswith("abcabc")
        assert len(choice["logprobs"]["tokens"]) == len(choice["text"])
    assert reply.json["usage"]["completion_tokens"] == sum(len(choice["text"]) for choice in reply.json["choices"]) < 16000
    events = list(Stream(impatient, COMPLETION, prompt="abc", max_tokens=8000))
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length" and len(events) < 8000
    assert impatient.post(COMPLETION, BODY).json["choices"][0]["text"] == "hello"


def test_request_timeout_without_a_token(impatient):
    """A 503 that openai's client does not repeat."""
    for stream in (False, True):
        reply = impatient.post(COMPLETION, {"prompt": "!never", "stream": stream})
        reply.expect_error(503, "server_error", "request_timeout")
        assert reply.headers["x-should-retry"] == "false" and "retry-after" not in reply.headers

    def asked(name):
        return sum(event["event"] == "request" and event.get("id") == name for event in impatient.events())

    client = openai.OpenAI(base_url=impatient.url + "/v1", api_key="none", max_retries=2)
    for name, prompt in (("once", "!never"), ("thrice", "!fail")):
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="fake", prompt=prompt, extra_headers={"X-Request-Id": name})
    eventually(lambda: asked("thrice") == 3, "repeated and logged")
    assert asked("once") == 1
    assert re.search("over request-timeout", impatient.log)
    impatient.idle()
