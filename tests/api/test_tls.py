# SPDX-License-Identifier: Apache-2.0
"""HTTPS: what holds over HTTP holds over it: streams, departures, deadlines, floods; and certificates."""

import functools
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess

import openai
import pytest

from admin import Admin, form
from conftest import FAKE, PATIENCE, Reply, Stream, eventually, post_bytes, read_reply

COMPLETION = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 5}
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def openssl(*arguments, cwd):
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True)


def certify(folder, name, *, key=("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"), password=()):
    """A certificate of its own for 127.0.0.1: NAME.pem and NAME.key."""
    openssl("req", "-x509", *key, *(password or ["-nodes"]), "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
            "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", cwd=folder)
    return folder / f"{name}.pem", folder / f"{name}.key"


def trusting(certificate):
    return ssl.create_default_context(cafile=str(certificate))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    certify(folder, "one")
    certify(folder, "two")
    certify(folder, "rsa", key=("-newkey", "rsa:2048"))
    certify(folder, "locked", password=("-passout", "pass:secret"))
    return folder


def files(folder, name):
    return "--tls-cert", folder / f"{name}.pem", "--tls-key", folder / f"{name}.key"


@pytest.fixture(scope="module")
def secure(start_server, folder):
    return start_server(*files(folder, "one"), "--max-body", 1 << 20, fake=True, tls=trusting(folder / "one.pem"))


@pytest.fixture(autouse=True)
def still_well(request):
    yield
    if "secure" in request.fixturenames:
        server = request.getfixturevalue("secure")
        assert server.process.poll() is None, server.log
        server.idle()


def test_requests(secure):
    assert secure.get("/health").status == 200
    assert secure.post(COMPLETION, BODY).json["choices"][0]["text"] == "hello"
    secure.post(COMPLETION, b"{").expect_error(400)
    secure.get("/nowhere").expect_error(404)


@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated")
def test_versions(secure, folder):
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = trusting(folder / "one.pem")
        context.minimum_version = context.maximum_version = version
        with socket.create_connection(("127.0.0.1", secure.port), PATIENCE) as plain:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
                connection.sendall(post_bytes(COMPLETION, BODY))
                assert read_reply(connection).status == 200
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(socket.create_connection(("127.0.0.1", secure.port), PATIENCE))


def test_large_bodies_come_whole(secure):
    """Sent in one go, so that decrypted data waits in the TLS library while nothing more arrives at the socket."""
    for size in (1, 1000, 16383, 16384, 16385, 40000, 65536, 300000, 1000000):
        connection = secure.connect()
        connection.sendall(post_bytes("/tokenize", {"content": "a" * size}))
        assert len(read_reply(connection).json["tokens"]) == size
        connection.sendall(post_bytes("/tokenize", {"content": "b" * 5}))
        assert read_reply(connection).json["tokens"] == [98] * 5
        connection.close()


def test_pipelining_and_chunks(secure):
    connection = secure.connect()
    body = json.dumps(BODY).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert read_reply(connection).status == 200
    # Requests in one TLS record: all but the first lie decrypted in the library while the first is suspended.
    connection.sendall((post_bytes(COMPLETION, BODY) + GET) * 10)
    reader = connection.makefile("rb")
    for i in range(20):
        status, length = reader.readline(), 0
        assert b" 200 " in status, (i, status)
        while line := reader.readline().strip():
            name, value = line.split(b": ", 1)
            length = int(value) if name.lower() == b"content-length" else length
        assert json.loads(reader.read(length))


def test_one_byte_a_record(secure):
    connection = secure.connect()
    for byte in post_bytes(COMPLETION, BODY):
        connection.sendall(bytes([byte]))
    assert read_reply(connection).json["choices"][0]["text"] == "hello"


def test_streams(secure):
    streams = [Stream(secure, COMPLETION, prompt="abc", max_tokens=200) for _ in range(8)]
    for stream in streams:
        events = list(stream)
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abc" * 66 + "ab"


def test_slow_reader_gets_everything(secure):
    stream = Stream(secure, COMPLETION, prompt="0123456789" * 50, max_tokens=1000)
    eventually(lambda: secure.metrics()["num_requests_running"] == 0 == secure.metrics()["num_requests_waiting"], "generated")
    events = list(stream)
    assert events[-1] == "[DONE]" and len(events) == 1001


def test_openai_client(secure, folder, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "one.pem"))
    client = openai.OpenAI(base_url=secure.url + "/v1", api_key="none", max_retries=0,
                           http_client=openai.DefaultHttpxClient(verify=trusting(folder / "one.pem")))
    stream = client.completions.create(model="fake", prompt="abc", max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc" * 10


@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("body", [{"prompt": "!never"}, {"prompt": "abc", "max_tokens": 8000},
                                  {"prompt": "abc", "max_tokens": 8000, "stream": True}])
def test_departures(secure, body, orderly):
    """Trap 14 over TLS, whether the client says goodbye or just goes."""
    before = secure.metrics()['request_success_total{finished_reason="abort"}']
    connection = secure.connect()
    connection.sendall(post_bytes(COMPLETION, body))
    eventually(lambda: sum(secure.metrics()[name] for name in ("num_requests_running", "num_requests_waiting")), "taken in")
    if orderly:
        connection.settimeout(0.01)
        try:
            connection.unwrap()
        except (TimeoutError, ssl.SSLError, OSError):
            pass
    connection.close()
    secure.idle()
    assert secure.metrics()['request_success_total{finished_reason="abort"}'] == before + 1


def test_garbage(secure):
    """Plain HTTP, a torn handshake, garbage within a record."""
    for data in (GET, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), b"\x00" * 5000, b"\x16\x03\x01"):
        with socket.create_connection(("127.0.0.1", secure.port), PATIENCE) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1000):
                    pass
            except OSError:  # cut already
                pass
    for data in (b"\r\n" * 1000, b"\x00" * 5000, b"GET\r\n\r\n", GET[:10]):
        connection = secure.connect()
        connection.sendall(data)
        connection.close()
    # Noise between the records of a good connection.
    connection = secure.connect()
    connection.sendall(GET)
    assert read_reply(connection).status == 200
    raw = socket.socket(fileno=connection.detach())
    raw.settimeout(PATIENCE)
    raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    try:
        while raw.recv(1000):
            pass
    except ConnectionResetError:
        pass
    raw.close()
    assert secure.get("/health").status == 200


def test_deadlines(start_server, folder):
    """Neither a handshake that stops nor one that never begins, nor a request that stops, holds a connection."""
    server = start_server(*files(folder, "one"), "--receive-timeout", 1, "--keep-alive", 1, fake=True,
                          tls=trusting(folder / "one.pem"), env={"FAKE_STEP_US": "2000"})
    silent = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    torn = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    torn.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    half, used = server.connect(), server.connect()
    half.sendall(post_bytes(COMPLETION, BODY)[:-5])
    used.sendall(GET)
    assert read_reply(used).status == 200
    for connection in (silent, torn, half, used):
        try:
            while connection.recv(1000):
                pass
        except (ConnectionResetError, ssl.SSLError):
            pass
    events = list(Stream(server, COMPLETION, prompt="abc", max_tokens=1200))  # longer than both
    assert len(events) == 1201
    assert server.get("/health").status == 200


def test_drain(start_server, folder):
    server = start_server(*files(folder, "rsa"), fake=True, tls=trusting(folder / "rsa.pem"))
    stream = iter(Stream(server, COMPLETION, prompt="abc", max_tokens=300))
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1] == "[DONE]"
    assert server.process.wait(PATIENCE) == 0


def test_admin_port_too(start_server, folder, tmp_path):
    """Uploads suspend their connection around each write, while what follows lies decrypted in the library."""
    context = trusting(folder / "one.pem")
    admin = Admin(functools.partial(start_server, tls=context), tmp_path / "state", *files(folder, "one"))

    def ask(method, path, body=None, headers=None):
        connection = http.client.HTTPSConnection("127.0.0.1", admin.port, timeout=PATIENCE, context=context)
        connection.request(method, "/admin/v1" + path, body, {**admin.headers(), **(headers or {})})
        reply = Reply(connection.getresponse())
        connection.close()
        return reply

    assert ask("GET", "/status").status == 200
    assert ask("GET", "/status", headers={"Authorization": "Bearer wrong"}).status == 401
    data = b'{"text": "words"}\n' * 200000
    body = form([("purpose", None, b"fine-tune"), ("file", "data.jsonl", data)])
    reply = ask("POST", "/files", body, {"Content-Type": "multipart/form-data; boundary=XYZ"})
    assert reply.status == 200 and reply.json["bytes"] == len(data)
    assert ask("GET", f"/files/{reply.json['id']}/content").body == data


# --- Certificates ---


def served(server):
    """The common name of the certificate that a new connection gets."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as plain:
        with context.wrap_socket(plain) as connection:
            der = connection.getpeercert(binary_form=True)
    return "one" if b"\x0c\x03one" in der else "two" if b"\x0c\x03two" in der else None


def test_reload(start_server, folder, tmp_path):
    """SIGHUP: new connections get the new certificate, old ones go on; one that is wrong changes nothing."""
    for end in ("pem", "key"):
        shutil.copy(folder / f"one.{end}", tmp_path / f"used.{end}")
    server = start_server(*files(tmp_path, "used"), fake=True, tls=trusting(folder / "one.pem"))
    old = server.connect()
    old.sendall(GET)
    assert read_reply(old).status == 200 and served(server) == "one"

    def reload(name):
        for end, source in zip(("pem", "key"), name):
            shutil.copy(folder / f"{source}.{end}", tmp_path / f"used.{end}")
        before = len(server.events())
        server.process.send_signal(signal.SIGHUP)
        return eventually(lambda: [event for event in server.events()[before:] if "certificate" in event["event"]], "reloaded")[0]

    assert reload(("two", "two"))["event"] == "certificate read again" and served(server) == "two"
    assert "cannot be used" in reload(("one", "two"))["event"] and served(server) == "two"
    assert reload(("one", "one"))["event"] == "certificate read again" and served(server) == "one"
    old.sendall(post_bytes(COMPLETION, BODY))
    assert read_reply(old).status == 200


@pytest.mark.parametrize("certificate, key, words", [
    ("missing.pem", "one.key", "tls-cert missing.pem"), ("one.pem", "missing.key", "tls-key missing.key"),
    ("one.key", "one.key", "tls-cert one.key PEM"), ("one.pem", "one.pem", "tls-key one.pem private key"),
    ("one.pem", "two.key", "two.key one.pem not"), ("one.pem", "locked.key", "locked.key password"),
    ("empty", "one.key", "tls-cert empty"), ("one.pem", "empty", "tls-key empty"), (".", "one.key", "tls-cert file"),
    ("torn.pem", "one.key", "tls-cert torn.pem")])
def test_bad_files(folder, certificate, key, words):
    (folder / "empty").write_bytes(b"")
    (folder / "torn.pem").write_bytes((folder / "one.pem").read_bytes()[:200])
    result = subprocess.run([FAKE, "serve", "--model", "fake", "--port", "0", "--tls-cert", folder / certificate,
                             "--tls-key", folder / key], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and [word for word in words.split() if word not in result.stderr] == [], result.stderr
