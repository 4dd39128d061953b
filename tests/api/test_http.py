# SPDX-License-Identifier: Apache-2.0
"""HTTP itself: methods, bodies, connections, limits, request ids."""

import json
import re
import socket
import subprocess

import pytest

from conftest import SERVER, Stream, eventually, post_bytes, read_reply

COMPLETION = "/v1/completions"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = {"prompt": "hello", "max_tokens": 5}


def read_all(connection):
    """What comes until the server closes the connection, orderly or not."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


expect_end = read_all


def test_head_is_get_without_body(fake):
    for path in ("/health", "/ready", "/v1/models", "/v1/models/fake", "/version", "/metrics"):
        head, get = fake.request("HEAD", path), fake.get(path)
        assert head.status == get.status == 200 and head.body == b"" and get.body
        assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("method, path, allow", [
    ("GET", COMPLETION, "POST, OPTIONS"), ("PUT", "/v1/chat/completions", "POST, OPTIONS"),
    ("HEAD", "/tokenize", "POST, OPTIONS"), ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
    ("DELETE", "/v1/models/fake", "GET, HEAD, OPTIONS"), ("POST", "/metrics", "GET, HEAD, OPTIONS"),
    ("BREW", "/health", "GET, HEAD, OPTIONS")])
def test_method_not_allowed(fake, method, path, allow):
    reply = fake.request(method, path)
    assert reply.status == 405 and reply.headers["allow"] == allow
    if method != "HEAD":
        reply.expect_error(405)


def test_options(fake):
    """Trap 23: a preflight is answered without a key."""
    reply = fake.request("OPTIONS", COMPLETION, headers={
        "Origin": "http://a.example", "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type"})
    assert reply.status == 204 and reply.headers["allow"] == "POST, OPTIONS"
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "authorization" in reply.headers["access-control-allow-headers"].lower()
    fake.request("OPTIONS", "/nowhere").expect_error(404)


def chunked(path, body, size, trailer=b""):
    pieces = [body[i:i + size] for i in range(0, len(body), size)]
    data = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + data + b"0\r\n" + trailer + b"\r\n"


@pytest.mark.parametrize("size", [1, 7, 100000])
def test_chunked_body(fake, size):
    """Trap 22."""
    reply = fake.exchange(chunked(COMPLETION, json.dumps(BODY).encode(), size))
    assert reply.json["choices"][0]["text"] == "hello"
    reply.socket.sendall(chunked(COMPLETION, json.dumps(BODY).encode(), size, b"X-Checksum: 5\r\n"))
    assert read_reply(reply.socket).status == 200


def test_body_in_small_pieces(fake):
    connection = fake.connect()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in post_bytes(COMPLETION, BODY):
        connection.sendall(bytes([byte]))
    assert read_reply(connection).json["choices"][0]["text"] == "hello"


def test_keep_alive(fake):
    connection = fake.connect()
    for i in range(20):
        connection.sendall(GET if i % 2 else post_bytes(COMPLETION, BODY))
        assert read_reply(connection).status == 200
    connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert read_reply(connection).headers["connection"].lower() == "close"
    expect_end(connection)


def test_keep_alive_after_errors_and_streams(fake):
    connection = fake.connect()
    for body in (b"{", BODY, {**BODY, "stream": True}, {"prompt": "!fail"}, {"prompt": "!late", "stream": True}, BODY):
        connection.sendall(post_bytes(COMPLETION, body))
        read_reply(connection)
    connection.sendall(GET)
    assert read_reply(connection).status == 200


def test_heads_among_pipelined_requests(fake):
    """A HEAD has no body, whatever its length says, and the next answer begins right behind."""
    connection = fake.connect()
    paths = [("HEAD", "/version"), ("GET", "/version"), ("HEAD", "/nowhere"), ("HEAD", "/metrics"), ("HEAD", COMPLETION), ("GET", "/health")]
    connection.sendall(b"".join(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for method, path in paths))
    replies, statuses, lengths = connection.makefile("rb"), [], []
    for method, _ in paths:
        line, length = replies.readline(), 0
        statuses.append(int(line.split()[1]))
        while (line := replies.readline().strip()):
            name, value = line.split(b": ", 1)
            length = int(value) if name.lower() == b"content-length" else length
        lengths.append(length)
        if method == "GET":
            json.loads(replies.read(length))
    assert statuses == [200, 200, 404, 200, 405, 200] and lengths[0] == lengths[1] and min(lengths) > 0


def test_pipelining(fake):
    connection = fake.connect()
    connection.sendall(post_bytes(COMPLETION, BODY) + GET + post_bytes(COMPLETION, {**BODY, "prompt": "again"}) + GET)
    replies = connection.makefile("rb")
    bodies = []
    for _ in range(4):
        status, length = replies.readline(), 0
        assert b" 200 " in status
        while (line := replies.readline().strip()):
            name, value = line.split(b": ", 1)
            length = int(value) if name.lower() == b"content-length" else length
        bodies.append(json.loads(replies.read(length)))
    assert bodies[0]["choices"][0]["text"] == "hello" and bodies[2]["choices"][0]["text"] == "again"


def test_http_1_0(fake):
    reply = fake.exchange(b"GET /health HTTP/1.0\r\n\r\n")
    assert reply.status == 200
    expect_end(reply.socket)
    data = json.dumps({**BODY, "stream": True}).encode()
    reply = fake.exchange(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
    assert reply.body.endswith(b"data: [DONE]\n\n") and "transfer-encoding" not in reply.headers


@pytest.mark.parametrize("target, status", [
    ("http://x/health", 200), ("HTTP://x:80/health?a=b", 200), ("https://x/v1/models/fake", 200), ("http://x", 404),
    ("http://x/", 404), ("http://", 404), ("httpx://x/health", 404), ("/http://x/health", 404), ("x", 404), ("*", 404)])
def test_target_forms(fake, target, status):
    """A proxy's absolute form is the same request; what is none of ours is not found."""
    assert fake.exchange(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()).status == status


def test_content_types(fake):
    assert fake.post(COMPLETION, BODY).headers["content-type"] == "application/json"
    assert fake.post(COMPLETION, {**BODY, "stream": True}).headers["content-type"].startswith("text/event-stream")
    assert fake.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert fake.post(COMPLETION, json.dumps(BODY), {"Content-Type": kind}).status == 200


# --- Request ids ---


def test_request_ids(fake):
    first, second = fake.get("/health"), fake.get("/health")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert fake.get("/nope").headers["x-request-id"]
    reply = fake.get("/health", {"X-Request-Id": "my.id-1:2_3"})
    assert reply.headers["x-request-id"] == "my.id-1:2_3"
    for bad in ("", "x" * 64, "a b", "a\tb", "ü".encode().decode("latin-1"), "a;b", '"'):
        returned = fake.get("/health", {"X-Request-Id": bad}).headers["x-request-id"]
        assert returned != bad and returned.startswith("req-")


def test_request_id_on_every_log_line(fake):
    reply = fake.post(COMPLETION, BODY, {"X-Request-Id": "log-me-1"})
    assert reply.json["id"].startswith("cmpl-")

    def lines():
        found = [event for event in fake.events() if event.get("id") == "log-me-1"]
        return found if any(event["event"] == "request" for event in found) else None

    access = [event for event in eventually(lines, "access log") if event["event"] == "request"]
    assert len(access) == 1 and access[0]["status"] == 200 and access[0]["path"] == COMPLETION
    assert access[0]["method"] == "POST" and access[0]["completion"] == reply.json["id"]
    assert {"seconds", "received", "sent", "outcome"} <= set(access[0])
    own = fake.post(COMPLETION, BODY)
    assert own.headers["x-request-id"] == own.json["id"]


def test_openai_client_sees_the_request_id(fake):
    reply = fake.client().completions.with_raw_response.create(model="fake", prompt="a", max_tokens=1)
    assert reply.request_id == reply.parse().id


# --- Limits ---


def test_body_over_the_limit(fake):
    """The client gets to read the 413, whether it announces the size or not."""
    big = b'{"prompt":"' + b"a" * 70000 + b'"}'
    reply = fake.post(COMPLETION, big)
    reply.expect_error(413)
    reply = fake.exchange(chunked(COMPLETION, big, 5000))
    reply.expect_error(413)
    reply.socket.sendall(GET)
    assert read_reply(reply.socket).status == 200
    fake.post("/nowhere", big).expect_error(413)
    exact = b'{"prompt":"a"}' + b" " * (65536 - 14)
    assert fake.post(COMPLETION, exact).status == 200


def test_expect_continue(fake):
    connection = fake.connect()
    data = json.dumps(BODY).encode()
    connection.sendall(post_bytes(COMPLETION, data, "Expect: 100-continue")[:-len(data)])
    assert connection.recv(1000).startswith(b"HTTP/1.1 100 Continue\r\n")
    connection.sendall(data)
    assert read_reply(connection).status == 200
    # A body that is too large is refused before it is sent.
    connection = fake.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\nExpect: 100-continue\r\n\r\n")
    read_reply(connection).expect_error(413)
    expect_end(connection)


def test_absurd_length_is_refused_at_once(fake):
    reply = fake.exchange(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n")
    reply.expect_error(413)
    expect_end(reply.socket)


def test_two_lengths_are_refused(fake):
    reply = fake.exchange(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
                          b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    reply.expect_error(400)
    reply = fake.exchange(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\nxx")
    reply.expect_error(400)


def test_headers_over_the_limit(fake):
    """Trap 24: 431 in our shape; far above, the library's own."""
    reply = fake.exchange(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 17000 + b"\r\n\r\n")
    reply.expect_error(431)
    reply = fake.exchange(b"GET /health?" + b"a" * 17000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    reply.expect_error(431)
    assert fake.exchange(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 15000 + b"\r\n\r\n").status == 200


def test_header_floods(fake):
    """What the HTTP library answers itself, or cuts: the server stays well."""
    for line in (b"X-Big: " + b"a" * 1000000, b"".join(b"X-%d: y\r\n" % i for i in range(50000)), b"a" * 200000):
        connection = fake.connect()
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n")
            expect_end(connection)
        except (BrokenPipeError, ConnectionResetError):
            pass
        connection.close()
    assert fake.get("/health").status == 200


@pytest.mark.parametrize("data, status", [
    (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no Host
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n", 413),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnothex\r\n", 400),
    (b"GET /health HTTP/7.0\r\nHost: x\r\n\r\n", 505)])
def test_what_the_library_answers_itself(fake, data, status):
    """In HTML, as README.md says."""
    reply = fake.exchange(data)
    assert reply.status == status and b"<html>" in reply.body and "x-request-id" not in reply.headers
    assert fake.get("/health").status == 200


def test_garbage_instead_of_http(fake):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), b"\r\n" * 1000, b"\x00" * 5000, b"GET\r\n\r\n",
                 b"GET  HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        connection = fake.connect()
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        expect_end(connection)
    assert fake.get("/health").status == 200


def test_an_end_right_behind_the_data_is_noticed(fake):
    """Not only when a timeout is over. What is whole is answered."""
    def cut():
        return sum("receive timeout" in event["event"] for event in fake.events())

    before = cut()
    sent = []
    for i in range(60):
        connection = fake.connect()
        connection.sendall((b"\r\n", b"\x16\x03\x01" + bytes(200), b"GET /health HT", GET, b"POST / HTTP/1.1\r\n")[i % 5])
        connection.shutdown(socket.SHUT_WR)
        sent.append(connection)
    for i, connection in enumerate(sent):
        received = read_all(connection)
        assert received == b"" or received.startswith(b"HTTP/1.1 200 OK") == (i % 5 == 3)
        connection.close()
    assert cut() == before


# --- Deadlines ---


def test_keep_alive_outlasts_clients_pools():
    """Trap 26: by default longer than the 90 seconds for which clients keep connections."""
    command = [SERVER, "serve", "--print-config", "--model", "x"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    value = re.search(r"^keep_alive: (\d+)$", shown, re.MULTILINE)
    assert value and int(value[1]) > 90, shown


@pytest.fixture(scope="module")
def hasty(start_server):
    return start_server("--receive-timeout", 1, "--keep-alive", 1, fake=True, env={"FAKE_STEP_US": "2000"})


@pytest.mark.parametrize("head", [b"GET /health HT", b"GET /health HTTP/1.1\r\nHost", post_bytes(COMPLETION, BODY)[:-5]])
def test_slow_senders_are_cut(hasty, head):
    """Trap 25: the deadline is for the whole request, however busy the sender is."""
    connection = hasty.connect()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(head)
    connection.settimeout(0.1)

    def cut():
        try:
            connection.sendall(b" ")
            return connection.recv(1000) == b""
        except TimeoutError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True

    eventually(cut, "cut")
    assert hasty.get("/health").status == 200


def test_idle_connections_are_closed(hasty):
    idle, used = hasty.connect(), hasty.connect()
    used.sendall(GET)
    assert read_reply(used).status == 200
    expect_end(idle)
    expect_end(used)


def test_deadlines_do_not_touch_running_requests(hasty):
    """Both take at least 1,200 steps of 2 ms: longer than both timeouts together."""
    whole = hasty.connect()
    whole.sendall(post_bytes(COMPLETION, {"prompt": "abc", "max_tokens": 1200}))
    events = list(Stream(hasty, COMPLETION, prompt="abc", max_tokens=1200))
    assert events[-1] == "[DONE]" and len(events) == 1201
    assert read_reply(whole).json["usage"]["completion_tokens"] == 1200


def test_connection_limit(start_server):
    server = start_server("--max-connections", 4, fake=True)
    held = [server.connect() for _ in range(4)]
    for connection in held:
        connection.sendall(GET)
        read_reply(connection)
    late = server.connect()  # waits in the backlog
    late.sendall(GET)
    held.pop().close()
    assert read_reply(late).status == 200


def test_slow_reader_gets_everything(fake):
    stream = Stream(fake, COMPLETION, prompt="0123456789" * 50, max_tokens=1000)
    eventually(lambda: fake.metrics()["num_requests_running"] == 0 and
               fake.metrics()["num_requests_waiting"] == 0, "generated without a reader")
    events = list(stream)
    assert events[-1] == "[DONE]"
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == ("0123456789" * 100)


def fnv(data):
    """FNV-1a (64 bits)."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def test_prefix_hash_names_the_beginning(fake, start_server):
    """Of the first prompt's first 256 tokens (here bytes), however they are sent and whatever follows."""
    assert fnv(b"foobar") == "85944171f73967e8"  # a test vector of FNV's authors

    def name(server, path="/v1/completions", **body):
        reply = server.post(path, {"max_tokens": 1, **body})
        assert reply.status == 200, reply.body
        return reply.headers.get("x-prefix-hash")

    def expected(text):
        return fnv(b"".join(byte.to_bytes(4, "little") for byte in text.encode()))

    text = "".join(chr(33 + i % 90) for i in range(256))
    assert name(fake, prompt=text) == expected(text)
    assert name(fake, prompt=text + "more") == expected(text)
    assert name(fake, prompt=list(text.encode()) + [7]) == expected(text)
    assert name(fake, prompt=[text, "other"], n=2) == expected(text)
    assert name(fake, prompt=text, stream=True) == expected(text)
    assert name(fake, prompt="X" + text) == expected("X" + text[:-1]) != expected(text)
    assert name(fake, prompt=text[:-1]) is None
    turns = [{"role": "user", "content": text}]
    one = name(fake, "/v1/chat/completions", messages=turns)
    more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    assert one is not None and one == name(fake, "/v1/chat/completions", messages=turns + more)
    assert "x-prefix-hash" in fake.get("/health").headers["access-control-expose-headers"]
    assert "x-prefix-hash" not in fake.get("/health").headers
    short = start_server("--prefix-hash-tokens", 2, fake=True)
    assert name(short, prompt="ab") == name(short, prompt="abc") == expected("ab")
    assert name(short, prompt="a") is None
    assert name(start_server("--prefix-hash-tokens", 0, fake=True), prompt=text) is None
