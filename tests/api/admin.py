# SPDX-License-Identifier: Apache-2.0
"""What the tests of the admin API share: a server with a state directory, and its other port."""

import http.client
import json
import pathlib
import sys

import openai

from conftest import PATIENCE, Reply, eventually

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ports import free_port  # noqa: E402

KEY = "the-admin-key"
API = "/admin/v1"
TINY = {"method": "ranker", "rank_steps": 4, "checkpoint_every": 2, "valid_prompts": 0}


def expect_error(reply, status, code=None, param=None, type="invalid_request_error"):
    """Errors have the API's shape, but no CORS headers."""
    assert reply.status == status, (reply.status, reply.body)
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (type, code, param), error
    assert error["message"] and reply.headers["x-request-id"]
    assert "access-control-allow-origin" not in reply.headers
    return error["message"]


def form(fields, boundary="XYZ"):
    """A multipart body. fields: (name, filename or None, bytes)."""
    parts = []
    for name, filename, data in fields:
        head = f'Content-Disposition: form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
        parts.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + data + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


class Admin:
    """A server with an admin port, which can be killed and started again on the same state."""

    def __init__(self, start_server, state, *options, fake=True, key=KEY, env=None):
        self.start_server, self.state, self.options = start_server, state, options
        self.fake, self.key, self.env = fake, key, env or {}
        self.start()

    def start(self, **env):
        environment = {**self.env, **env, **({"DISTILLCACHE_ADMIN_KEY": self.key} if self.key else {})}
        for attempt in range(5):
            self.port = free_port()
            options = ["--state-dir", self.state, "--admin-port", self.port, *self.options]
            try:
                self.server = self.start_server(*options, fake=self.fake, env=environment)
                return self
            except AssertionError as error:  # somebody else was given the port meanwhile
                if attempt == 4 or f"port {self.port}: Address already in use" not in str(error):
                    raise

    def kill(self):
        self.server.kill()

    def headers(self):
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def request(self, method, path, body=None, headers=None, raw=False):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            given = headers or {}
            connection.request(method, path if raw else API + path, body, {**self.headers(), **given})
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def get(self, path, headers=None):
        return self.request("GET", path, None, headers)

    def post(self, path, body=None, headers=None):
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        return self.request("POST", path, data, headers)

    def delete(self, path):
        return self.request("DELETE", path)

    def ok(self, method, path, body=None):
        reply = self.post(path, body) if method == "POST" else self.request(method, path)
        assert reply.status == 200, (path, reply.status, reply.body)
        return reply.json

    def client(self):
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}{API}", api_key=self.key or "none", max_retries=0,
                             timeout=PATIENCE)

    def upload(self, data=b'{"text": "words"}\n', name="data.jsonl", purpose="fine-tune"):
        body = form([("purpose", None, purpose.encode()), ("file", name, data)])
        reply = self.post("/files", body, {"Content-Type": "multipart/form-data; boundary=XYZ"})
        assert reply.status == 200, reply.body
        return reply.json["id"]

    def create(self, file=None, **fields):
        body = {"training_file": file or self.upload(), "hyperparameters": TINY, **fields}
        return self.ok("POST", "/training/jobs", body)["id"]

    def job(self, id):
        return self.ok("GET", f"/training/jobs/{id}")

    def wait(self, id, *statuses):
        """Waits for the job to have one of the statuses (default: to end), and returns it."""
        statuses = statuses or ("succeeded", "failed", "cancelled")

        def look():
            job = self.job(id)
            return job if job["status"] in statuses else None

        return eventually(look, f"{id} {statuses}")

    def messages(self, id):
        return [event["message"] for event in self.ok("GET", f"/training/jobs/{id}/events?limit=10000")["data"]][::-1]

    def steps(self, id):
        events = self.ok("GET", f"/training/jobs/{id}/events?limit=10000")["data"][::-1]
        return [event["data"]["step"] for event in events
                if event["type"] == "metrics" and not event["message"].startswith("checkpoint")]

    def stream(self, id, query="?stream=true", headers=None):
        return EventStream(self, f"/training/jobs/{id}/events{query}", headers or {})


class EventStream:
    """Server-sent events, read one by one."""

    def __init__(self, admin, path, headers):
        self.connection = http.client.HTTPConnection("127.0.0.1", admin.port, timeout=PATIENCE)
        self.connection.request("GET", API + path, None, {**admin.headers(), **headers})
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        assert self.response.getheader("content-type").startswith("text/event-stream")

    def __iter__(self):
        while line := self.response.readline():
            if line.startswith(b"id: "):
                self.id = line[4:].strip().decode()
            if line.startswith(b"data: "):
                payload = line[6:].strip().decode()
                yield payload if payload == "[DONE]" else json.loads(payload)

    def close(self):
        self.response.close()
        self.connection.close()
