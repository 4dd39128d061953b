# SPDX-License-Identifier: Apache-2.0
"""Tests of the server from outside: the openai client, plain HTTP, and raw sockets.

DISTILLCACHE_TEST_SERVER  the program (default build/distillcache)
DISTILLCACHE_TEST_MODEL   the GGUF model it serves
DISTILLCACHE_TEST_FAKE    the server on a scheduler without a model (default: tests/unit/fake_server beside the program),
                          for what must happen at a given moment: see tests/unit/fake_scheduler.h
DISTILLCACHE_TEST_NETWORK_TOOL  what makes random networks (default: tests/model/network_tool beside the program)

No test asserts a time; `eventually` waits for a state, and its limit is only there to end a hung test.
"""

import functools
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = os.environ.get("DISTILLCACHE_TEST_SERVER", str(ROOT / "build/distillcache"))
FAKE = os.environ.get("DISTILLCACHE_TEST_FAKE", str(pathlib.Path(SERVER).parent / "tests/unit/fake_server"))
NETWORK_TOOL = os.environ.get("DISTILLCACHE_TEST_NETWORK_TOOL",
                              str(pathlib.Path(SERVER).parent / "tests/model/network_tool"))
PATIENCE = 120  # seconds until a hung test ends; sanitizers are slow


def eventually(condition, what="condition"):
    """Waits until condition() is true, and returns its value."""
    deadline = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.01)


@functools.cache
def inspect_model():
    return json.loads(subprocess.check_output([SERVER, "inspect", "--json", os.environ["DISTILLCACHE_TEST_MODEL"]]))


def memory_of(tokens):
    """For --kv-memory: what so many tokens of the model take in f16, so that as many fit whatever its layers are."""
    shape = inspect_model()["shape"]
    return tokens * shape["layers"] * shape["kv_heads"] * (2 * 2 * shape["head_dim"] + 4)


class Reply:
    """A whole HTTP response."""

    def __init__(self, response):
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body)

    def expect_error(self, status, type="invalid_request_error", code=None, param=None):
        assert self.status == status, self.body
        error = self.json["error"]
        assert set(self.json) == {"error"} and set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"], error["param"]) == (type, code, param), error
        assert error["message"]
        assert self.headers["x-request-id"]
        assert self.headers["access-control-allow-origin"] == "*"
        return error


class Server:
    """A running server process. key: sent with every request. tls: an ssl.SSLContext to reach it by."""

    key = tls = None

    def __init__(self, program, model, *options, log, env=None, key=None, tls=None):
        self.log_path = log
        self.key, self.tls = key, tls
        command = [program, "serve", "--model", model, "--port", "0", "--log-format", "json", *map(str, options)]
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(command, stderr=errors, env={**os.environ, **(env or {})})
        try:
            self.port = eventually(self._listening, "listening")
        except BaseException:
            self.kill()
            raise

    def _listening(self):
        assert self.process.poll() is None, self.log
        for event in self.events():
            if event["event"] == "listening":
                return event["port"]
        return None

    def wait_ready(self):
        eventually(lambda: self.get("/ready").status == 200, "ready")
        self.model = self.get("/v1/models").json["data"][0]["id"]
        return self

    @property
    def log(self):
        return pathlib.Path(self.log_path).read_text(errors="replace")

    def events(self):
        return [json.loads(line) for line in self.log.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]

    @property
    def url(self):
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def client(self, **options):
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE, **options)

    def request(self, method, path, body=None, headers=None):
        if self.tls:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=self.tls)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        headers = {} if headers is None else headers
        if self.key and "Authorization" not in headers:
            headers = {"Authorization": "Bearer " + self.key, **headers}
        try:
            connection.request(method, path, body, headers)
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def get(self, path, headers=None):
        return self.request("GET", path, None, headers)

    def post(self, path, body, headers=None):
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return self.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})

    def complete(self, **body):
        """One completion that must succeed."""
        reply = self.post("/v1/completions", body)
        assert reply.status == 200, reply.body
        return reply.json

    def tokenize(self, text):
        return self.post("/tokenize", {"prompt": text}).json["tokens"]

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        return self.tls.wrap_socket(connection, server_hostname="127.0.0.1") if self.tls else connection

    def exchange(self, data):
        """Sends raw bytes on a new connection and reads one response; the connection stays usable as .socket."""
        connection = self.connect()
        connection.sendall(data)
        return read_reply(connection)

    def metrics(self):
        """Samples by name, labels other than model_name kept: {'steps_total': 5.0, ...}"""
        samples = {}
        for line in self.get("/metrics").body.decode().splitlines():
            match = re.fullmatch(r'distillcache:(\w+)\{model_name="[^"]*"(?:,([^}]*))?\} (\S+)', line)
            if match:
                samples[match[1] + ("{" + match[2] + "}" if match[2] else "")] = float(match[3])
        return samples

    def idle(self):
        """Waits until nothing runs or waits, and returns the metrics then."""

        def none_left():
            metrics = self.metrics()
            return metrics if metrics["num_requests_running"] == 0 == metrics["num_requests_waiting"] else None

        return eventually(none_left, "idle")

    def stop(self):
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def read_reply(connection):
    response = http.client.HTTPResponse(connection)
    response.begin()
    reply = Reply(response)
    reply.socket = connection
    return reply


def post_bytes(path, body, *headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Stream:
    """A streamed reply read event by event from a raw connection, which can be dropped at any moment."""

    def __init__(self, server, path, **body):
        self.connection = server.connect()
        self.connection.sendall(post_bytes(path, {**body, "stream": True}))
        self.response = None

    def start(self):
        self.response = http.client.HTTPResponse(self.connection)
        self.response.begin()
        return self

    def __iter__(self):
        if self.response is None:
            self.start()
        assert self.response.status == 200, self.response.read()
        while line := self.response.readline():
            if line.startswith(b"data: "):
                payload = line[6:].strip()
                yield payload.decode() if payload == b"[DONE]" else json.loads(payload)

    def close(self):
        if self.response is not None:
            self.response.close()
        self.connection.close()


@pytest.fixture(scope="session")
def policies_folder(tmp_path_factory):
    """A folder with random networks of the policies distillcache and ranker for the model."""
    folder = tmp_path_factory.mktemp("policies")
    model = inspect_model()
    shape = {name: model["shape"][name] for name in ("layers", "kv_heads", "head_dim")}
    requests = [dict(op="create", file=str(folder / f"{model['fingerprint']}{end}.safetensors"), method=method,
                     features=features, fingerprint=model["fingerprint"], seed=7, **shape)
                for method, end, features in (("distillcache", "", "content"), ("ranker", "-ranker", "paper"))]
    subprocess.run([NETWORK_TOOL], input="".join(json.dumps(request) + "\n" for request in requests).encode(), check=True)
    return folder


@pytest.fixture(scope="session")
def start_server(tmp_path_factory, policies_folder):
    """start_server(*options): another server with the model, stopped at the end; its exit code must be 0."""
    servers = []

    def start(*options, fake=False, ready=True, env=None, **how):
        log = tmp_path_factory.mktemp("server") / "log"
        env = {"DISTILLCACHE_POLICIES": str(policies_folder), **(env or {})}
        if fake:
            server = Server(FAKE, "fake", *options, log=log, env=env, **how)
        else:
            server = Server(SERVER, os.environ["DISTILLCACHE_TEST_MODEL"], *options, log=log, env=env, **how)
        servers.append(server)
        return server.wait_ready() if ready else server

    yield start
    for server in servers:
        if server.process.poll() is None:
            code = server.stop()
            assert code == 0, server.log
        assert "Sanitizer" not in server.log, server.log


@pytest.fixture(scope="session")
def shared(start_server):
    return start_server("--kv-memory", "512M")


@pytest.fixture
def server(shared):
    """The server with the model that most tests share. It must be alive and idle after each of them."""
    yield shared
    assert shared.process.poll() is None, shared.log
    shared.idle()


@pytest.fixture(scope="session")
def shared_fake(start_server):
    return start_server("--max-waiting", 4, "--max-body", 65536, fake=True)


@pytest.fixture
def fake(shared_fake):
    yield shared_fake
    assert shared_fake.process.poll() is None, shared_fake.log
    shared_fake.idle()
