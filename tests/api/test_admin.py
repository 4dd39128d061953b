# SPDX-License-Identifier: Apache-2.0
"""The admin API without a model: who is let in, files, policies, status, and what is not as it should be."""

import http.client
import json
import os
import pathlib
import socket
import subprocess

import openai
import pytest

from admin import API, KEY, TINY, Admin, expect_error, form, free_port
from conftest import FAKE, PATIENCE, SERVER, eventually, read_reply

MULTIPART = {"Content-Type": "multipart/form-data; boundary=XYZ"}


@pytest.fixture(scope="module")
def admin(start_server, tmp_path_factory):
    return Admin(start_server, tmp_path_factory.mktemp("state"), "--max-upload", "2M", "--max-body", "64K")


def files_of(admin):
    return sorted(os.listdir(pathlib.Path(admin.state) / "files"))


# --- Who is let in ---


def test_a_key_is_needed(admin):
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"},
                    {"Authorization": f"Bearer {KEY}x"}, {"Authorization": "Bearer "}, {"Authorization": KEY}):
        expect_error(admin.request("GET", "/status", headers=headers), 401, "invalid_api_key")
        expect_error(admin.request("POST", "/files", b"x" * 1000, headers=headers), 401, "invalid_api_key")
        expect_error(admin.request("GET", "/nowhere", headers=headers), 401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"http://127.0.0.1:{admin.port}{API}", api_key="wrong", max_retries=0).files.list()
    assert admin.get("/status", {"Authorization": f"bearer {KEY}"}).status == 200


def test_each_listener_has_its_own_routes(admin):
    for path in ("/v1/models", "/health", "/metrics", "/tokenize"):
        expect_error(admin.request("GET", path, raw=True), 404)
    for path in ("/status", "/files", "/training/jobs", "/policies"):
        admin.server.get(API + path, admin.headers()).expect_error(404)


def test_pages_of_other_origins_are_not_let_in(admin):
    reply = admin.request("OPTIONS", "/files", headers={"Origin": "http://evil.example"})
    assert reply.status == 204 and not [name for name in reply.headers if name.startswith("access-control")]


def test_without_a_key(start_server, tmp_path):
    admin = Admin(start_server, tmp_path / "state", key="")
    assert admin.get("/status").status == 200
    assert admin.get("/status", {"Host": "localhost:1"}).status == 200
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"},
                    {"Sec-Fetch-Site": "cross-site"}):
        expect_error(admin.get("/status", headers), 403)
        expect_error(admin.post("/files", form([("file", "a", b"x")]), {**MULTIPART, **headers}), 403)
    assert any(event["event"].startswith("the admin API has no key") for event in admin.server.events())


@pytest.mark.parametrize("options, words", [
    (["--admin-port", "1"], "state-dir"),
    (["--admin-port", "1", "--state-dir", "/tmp/x", "--admin-host", "0.0.0.0"], "admin-key"),
    (["--admin-port", "1", "--state-dir", "/tmp/x", "--admin-host", "127.0.0.1.example.org"], "admin-key"),
    (["--training-share", "0"], "training-share")])
def test_wrong_configurations_do_not_start(options, words):
    result = subprocess.run([FAKE, "serve", "--model", "fake", "--port", "0", *options], capture_output=True,
                            text=True, timeout=PATIENCE)
    assert result.returncode == 2 and words in result.stderr


def test_a_damaged_state_does_not_start(tmp_path):
    (tmp_path / "state.sqlite").write_bytes(b"x" * 5000)
    command = [FAKE, "serve", "--model", "fake", "--port", "0", "--admin-port", str(free_port()), "--state-dir", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 1 and "state.sqlite: damaged, or not a database" in result.stderr


def test_a_state_directory_is_for_one_server(admin):
    command = [FAKE, "serve", "--model", "fake", "--port", "0", "--state-dir", str(admin.state)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 1 and "in use by another process" in result.stderr


def test_the_key_is_not_printed(tmp_path):
    command = [SERVER, "serve", "--admin-key", "hush-hush", "--print-config"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0 and "admin_key" in result.stdout and "hush" not in result.stdout + result.stderr


# --- Files ---


def test_files_of_the_client(admin):
    client = admin.client()
    data = b'{"text": "caf\xc3\xa9"}\n' * 30000  # more than a block
    file = client.files.create(file=("data.jsonl", data), purpose="fine-tune")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(data), "data.jsonl", "fine-tune")
    assert file.status == "processed" and file.created_at > 1.7e9
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    assert file.id in [entry.id for entry in client.files.list()]
    deleted = client.files.delete(file.id)
    assert deleted.deleted and deleted.id == file.id
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    eventually(lambda: not [name for name in files_of(admin) if name.startswith(file.id)], "the file is gone")


def test_file_lists(admin):
    ids = [admin.upload(name=f"{i}.jsonl", purpose="evals") for i in range(5)]
    listed = admin.ok("GET", "/files?purpose=evals")
    assert [entry["id"] for entry in listed["data"]][:5] == ids[::-1] and listed["has_more"] is False
    page = admin.ok("GET", f"/files?purpose=evals&limit=2&after={ids[3]}")
    assert [entry["id"] for entry in page["data"]] == [ids[2], ids[1]] and page["has_more"] is True
    oldest = admin.ok("GET", f"/files?purpose=evals&order=asc&limit=1&after={ids[1]}")
    assert [entry["id"] for entry in oldest["data"]] == [ids[2]]
    client = admin.client()
    assert [file.id for file in client.files.list(purpose="evals", limit=2)][:5] == ids[::-1]  # pages by itself
    for id in ids:
        admin.delete(f"/files/{id}")


@pytest.mark.parametrize("query, param", [("limit=0", "limit"), ("limit=x", "limit"), ("limit=10001", "limit"),
                                          ("order=up", "order"), ("after=file-none", "after")])
def test_wrong_pages(admin, query, param):
    expect_error(admin.get(f"/files?{query}"), 400, param=param)


@pytest.mark.parametrize("type, body, param", [
    (None, b"{}", None), ("application/json", b"{}", None), ("multipart/form-data", form([("file", "a", b"x")]), None),
    ("multipart/form-data; boundary=", form([("file", "a", b"x")]), None),
    ("multipart/form-data; boundary=XYZ", b"", "file"), ("multipart/form-data; boundary=XYZ", b"--ABC\r\nnothing", "file"),
    ("multipart/form-data; boundary=XYZ", form([("purpose", None, b"fine-tune"), ("file", "a", b"x")])[:-12], None),
    ("multipart/form-data; boundary=XYZ", form([("purpose", None, b"fine-tune")]), "file"),
    ("multipart/form-data; boundary=XYZ", form([("purpose", None, b"fine-tune"), ("file", None, b"x")]), "file"),
    ("multipart/form-data; boundary=XYZ", form([("purpose", None, b"fine-tune"), ("file", "a", b"")]), "file"),
    ("multipart/form-data; boundary=XYZ", form([("file", "a", b"x")]), "purpose"),
    ("multipart/form-data; boundary=XYZ", form([("purpose", None, b"batch"), ("file", "a", b"x")]), "purpose"),
    ("multipart/form-data; boundary=XYZ", form([("purpose", None, b"p" * 500), ("file", "a", b"x")]), "purpose"),
    ("multipart/form-data; boundary=XYZ",
     form([("purpose", None, b"fine-tune"), ("file", "a", b"x"), ("file", "b", b"y")]), "file"),
    ("multipart/form-data; boundary=XYZ",
     form([("purpose", None, b"fine-tune"), ("file", "n" * 300, b"x")]), "file"),
    ("multipart/form-data; boundary=XYZ",
     form([("expires_after[anchor]", None, b"created_at"), ("purpose", None, b"fine-tune"), ("file", "a", b"x")]),
     "expires_after")])
def test_wrong_uploads(admin, type, body, param):
    before = files_of(admin)
    reply = admin.post("/files", body, {"Content-Type": type} if type else {})
    expect_error(reply, 400, param=param)
    eventually(lambda: files_of(admin) == before, "nothing is left")


def test_names_of_files_are_only_names(admin):
    before = files_of(admin)
    for name in ("../../escape.jsonl", "/etc/passwd", "a/b.txt", "caf\u00e9.jsonl", ".upload-x", "..."):
        id = admin.upload(name=name)
        assert admin.ok("GET", f"/files/{id}")["filename"].endswith(name.split("/")[-1])
    new = set(files_of(admin)) - set(before)
    assert len(new) == 6 and all(name.startswith("file-") for name in new)
    assert len([name for name in new if name.endswith(".txt")]) == 1
    expect_error(admin.get("/files/..%2F..%2Fetc%2Fpasswd"), 404)
    expect_error(admin.get("/files/../../../etc/passwd/content"), 404)
    expect_error(admin.get("/files/%00/content"), 404)


def test_too_large_uploads(admin):
    before = files_of(admin)
    body = form([("purpose", None, b"fine-tune"), ("file", "a.jsonl", b"x" * (3 << 20))])
    expect_error(admin.post("/files", body, MULTIPART), 413, param="file")
    # Without an announced length it is found out on the way.
    connection = http.client.HTTPConnection("127.0.0.1", admin.port, timeout=PATIENCE)
    pieces = (body[i:i + 50000] for i in range(0, len(body), 50000))
    connection.request("POST", API + "/files", pieces, {**admin.headers(), **MULTIPART}, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413 and json.loads(response.read())["error"]["param"] == "file"
    connection.close()
    # A gigabyte that is only announced is refused at once.
    connection = socket.create_connection(("127.0.0.1", admin.port), timeout=PATIENCE)
    connection.sendall((f"POST {API}/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
                        "Content-Type: multipart/form-data; boundary=XYZ\r\nContent-Length: 1000000000\r\n\r\n").encode())
    assert read_reply(connection).status == 413
    connection.close()
    eventually(lambda: files_of(admin) == before, "nothing is left")


def test_clients_that_leave_during_an_upload(admin):
    before = files_of(admin)
    body = form([("purpose", None, b"fine-tune"), ("file", "a.jsonl", b"x" * (1 << 20))])
    for part in (100, 300000, 700000, len(body) - 3):
        connection = socket.create_connection(("127.0.0.1", admin.port), timeout=PATIENCE)
        connection.sendall((f"POST {API}/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: "
                            f"multipart/form-data; boundary=XYZ\r\nContent-Length: {len(body)}\r\n\r\n").encode())
        connection.sendall(body[:part])
        connection.close()
    eventually(lambda: files_of(admin) == before, "nothing is left")
    assert admin.get("/status").status == 200


def test_uploads_of_many_at_once(admin):
    import concurrent.futures

    def upload(i):
        data = bytes([65 + i]) * (300000 + i)
        id = admin.upload(data)
        return data == admin.get(f"/files/{id}/content").body

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(upload, range(16)))


# --- Requests for jobs and evaluations that are wrong ---


@pytest.mark.parametrize("body, status, param", [
    ("", 400, None), ("[]", 400, None), ("{", 400, None), ("[" * 100, 400, None),
    ({}, 400, "training_file"), ({"training_file": 5}, 400, "training_file"),
    ({"training_file": "file-none"}, 400, "training_file"), ({"training_file": "../../etc/passwd"}, 400, "training_file"),
    ({"training_file": "FILE", "validation_file": "file-none"}, 400, "validation_file"),
    ({"training_file": "FILE", "suffix": "a/b"}, 400, "suffix"), ({"training_file": "FILE", "suffix": ""}, 400, "suffix"),
    ({"training_file": "FILE", "suffix": ".."}, 400, "suffix"), ({"training_file": "FILE", "suffix": "x" * 65}, 400, "suffix"),
    ({"training_file": "FILE", "seed": -1}, 400, "seed"), ({"training_file": "FILE", "seed": "1"}, 400, "seed"),
    ({"training_file": "FILE", "method": "reinforcement"}, 400, "method"),
    ({"training_file": "FILE", "method": {"type": "dpo"}}, 400, "method"),
    ({"training_file": "FILE", "method": {}}, 400, "method"),
    ({"training_file": "FILE", "method": {"type": "reinforcement", "reinforcement": {"grader": {"type": "x"}}}}, 400, "method"),
    ({"training_file": "FILE", "hyperparameters": 5}, 400, "hyperparameters"),
    ({"training_file": "FILE", "hyperparameters": {"hidden": "many"}}, 400, "hidden"),
    ({"training_file": "FILE", "hyperparameters": {"hidden": [[1]]}}, 400, "hidden"),
    ({"training_file": "FILE", "hyperparameters": {"method": "magic"}}, 400, "method"),
    ({"training_file": "FILE", "hyperparameters": {"steps": 0}}, 400, "steps"),
    ({"training_file": "FILE", "hyperparameters": {"nonsense": None}}, 400, "nonsense"),
    ({"training_file": "FILE", "hyperparameters": {"nonsense": "auto"}}, 400, "nonsense"),
    ({"training_file": "FILE", "integrations": [{"type": "wandb"}]}, 400, "integrations"),
    ({"training_file": "FILE", "metadata": {"a": 1}}, 400, "metadata"),
    ({"training_file": "FILE", "metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
    ({"training_file": "FILE", "metadata": {"k" * 65: "x"}}, 400, "metadata"),
    ({"training_file": "FILE", "metadata": {"k": "x" * 513}}, 400, "metadata")])
def test_wrong_jobs(admin, body, status, param):
    if isinstance(body, dict) and body.get("training_file") == "FILE":
        body = {**body, "training_file": admin.upload()}
    for path in ("/training/jobs", "/fine_tuning/jobs"):
        expect_error(admin.post(path, body), status, param=param)


def test_a_wrong_hyperparameter_lists_the_right_ones(admin):
    body = {"training_file": admin.upload(), "hyperparameters": {"n_epochs": 3}}
    message = expect_error(admin.post("/training/jobs", body), 400, param="n_epochs")
    assert all(name in message for name in ("method", "recipe", "rank_steps"))
    assert message.endswith(", ...")  # there are more than fit, and none is cut in two


def test_a_wrong_model(admin):
    expect_error(admin.post("/training/jobs", {"training_file": admin.upload(), "model": "gpt-4"}), 404,
                 "model_not_found", "model")


def test_large_bodies_are_refused(admin):
    expect_error(admin.post("/training/jobs", {"training_file": "x" * 100000}), 413)


@pytest.mark.parametrize("method, path", [
    ("GET", "/training/jobs/ftjob-none"), ("POST", "/training/jobs/ftjob-none/cancel"),
    ("POST", "/training/jobs/ftjob-none/pause"), ("POST", "/fine_tuning/jobs/ftjob-none/resume"),
    ("GET", "/training/jobs/ftjob-none/events"), ("GET", "/training/jobs/ftjob-none/events?stream=true"),
    ("GET", "/training/jobs/ftjob-none/checkpoints"), ("GET", "/files/file-none"), ("GET", "/files/file-none/content"),
    ("DELETE", "/files/file-none"), ("GET", "/policies/none"), ("POST", "/policies/none/activate"),
    ("DELETE", "/policies/none"), ("GET", "/evaluations/eval-none"), ("POST", "/evaluations/eval-none/cancel"),
    ("GET", "/policies/a%2Fb"), ("POST", "/policies/..%2F..%2Fx/activate"), ("GET", "/nothing"), ("GET", "/training/jobs/"),
    ("DELETE", "/policies/" + "x" * 3000)])
def test_unknown_things(admin, method, path):
    expect_error(admin.request(method, path), 404)


@pytest.mark.parametrize("method, path", [("DELETE", "/files"), ("PUT", "/training/jobs"), ("POST", "/status"),
                                          ("DELETE", "/training/jobs/x"), ("GET", "/policies/x/activate")])
def test_methods_that_are_not_allowed(admin, method, path):
    reply = admin.request(method, path)
    expect_error(reply, 405)
    assert reply.headers["allow"]


@pytest.mark.parametrize("body, param", [
    ({}, "task"), ({"task": 5}, "task"), ({"task": "kl", "policies": "h2o"}, "policies"),
    ({"task": "kl", "policies": []}, "policies"), ({"task": "kl", "policies": ["nonsense"]}, "policies"),
    ({"task": "kl", "policies": ["distillcache:/etc/passwd"]}, "policies"),
    ({"task": "kl", "policies": ["rlkv:../../x"]}, "policies"),
    ({"task": "kl", "policies": ["h2o,network=/etc/passwd"]}, "policies"),
    ({"task": "kl", "policies": ["distillcache,network=/etc/passwd"]}, "policies"),
    ({"task": "kl", "policies": ["rlkv,gates=/etc/passwd"]}, "policies"),
    ({"task": "kl", "ratios": [2]}, "ratios"), ({"task": "kl", "ratios": ["x"]}, "ratios"),
    ({"task": "kl", "policies": ["h2o", "tova", "h2o"]}, "policies"), ({"task": "kl", "ratios": [0.5, 0.5]}, "ratios"),
    ({"task": "kl", "lengths": [64, 64]}, "lengths"), ({"task": "kl", "lengths": [-1]}, "lengths"), ({"task": "kl", "limit": "many"}, "limit"),
    ({"task": "kl", "query_aware": 3}, "query_aware"), ({"task": "kl", "data": "file-none"}, "data"),
    ({"task": "kl", "metadata": []}, "metadata")])
def test_wrong_evaluations(admin, body, param):
    if param == "task" and body.get("task") == 5:
        pytest.skip("a number is a text here; the evaluation fails")
    message = expect_error(admin.post("/evaluations", body), 400, param=param)
    assert "root:" not in message


# --- Status ---


def test_status(admin):
    status = admin.ok("GET", "/status")
    assert status["object"] == "status" and status["state"] == "ready" and status["model"] == "fake"
    assert {"requests", "memory", "jobs", "evaluations", "current", "policy", "training"} <= set(status)
    assert status["training"]["share"] == 0.25 and status["policy"]["default"] == "full"


def test_while_loading(start_server, tmp_path):
    admin = Admin.__new__(Admin)
    admin.key, port = KEY, free_port()
    server = start_server("--state-dir", tmp_path / "state", "--admin-port", port, fake=True, ready=False,
                          env={"FAKE_LOAD_MS": "1500", "DISTILLCACHE_ADMIN_KEY": KEY})
    admin.port = port
    file = admin.upload()  # files need no model
    assert admin.ok("GET", "/status")["state"] == "loading"
    for method, path, body in (("POST", "/training/jobs", {"training_file": file}), ("GET", "/policies", None),
                               ("POST", "/evaluations", {"task": "kl"})):
        reply = admin.request(method, path, json.dumps(body) if body else None)
        expect_error(reply, 503, "loading", type="server_error")
        assert int(reply.headers["retry-after"]) > 0
    server.wait_ready()
    assert admin.ok("POST", "/training/jobs", {"training_file": file, "hyperparameters": TINY})["status"] == "queued"
