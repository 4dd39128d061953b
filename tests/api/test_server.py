# SPDX-License-Identifier: Apache-2.0
"""Routes about the server, tokenisation, metrics, start and end."""

import json
import os
import pathlib
import signal
import subprocess

import pytest

from conftest import FAKE, SERVER, Stream, eventually, post_bytes, read_reply

COMPLETION = "/v1/completions"


def test_models(server):
    client = server.client()
    models = client.models.list().data
    assert [model.id for model in models] == [server.model]
    assert client.models.retrieve(server.model).object == "model"
    entry = server.get("/v1/models").json["data"][0]
    assert entry["owned_by"] == "distillcache" and entry["max_model_len"] == 8192


def test_model_alias(start_server):
    long = "x" * 300  # was once cut, so that the name that was configured did not exist
    assert start_server("--model-alias", long, fake=True).complete(prompt="x", model=long)["model"] == long
    server = start_server("--model-alias", "a/b c", fake=True)
    assert server.model == "a/b c"
    assert server.get("/v1/models/a/b%20c").json["id"] == "a/b c"
    assert server.post(COMPLETION, {"model": "a/b c", "prompt": "x"}).json["model"] == "a/b c"


def test_health_ready_version(server):
    assert server.get("/health").json == {"status": "ok"}
    assert server.get("/ready").json == {"status": "ready"}
    assert set(server.get("/version").json) == {"version", "model", "system_fingerprint"}
    assert server.get("/version").json["system_fingerprint"] == server.complete(prompt="a")["system_fingerprint"]


def test_tokenize_both_shapes(server):
    text = "Hello wörld 😀<|im_end|>"
    reply = server.post("/tokenize", {"prompt": text}).json
    assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == 8192
    assert server.post("/tokenize", {"content": text}).json["tokens"] == reply["tokens"]
    back = server.post("/detokenize", {"tokens": reply["tokens"]}).json
    assert back == {"prompt": text, "content": text}
    plain = server.post("/tokenize", {"prompt": text, "parse_special": False}).json
    assert plain["count"] > reply["count"]
    strings = server.post("/tokenize", {"prompt": "Hello world", "return_token_strs": True}).json["token_strs"]
    assert "".join(strings) == "Hello world"
    assert server.post("/tokenize", {"prompt": ""}).json["tokens"] == []
    assert server.post("/detokenize", {"tokens": []}).json["prompt"] == ""


def test_tokenizer_info(server):
    """Special tokens as text, of which /tokenize makes one token each."""
    info = server.get("/tokenizer_info").json
    assert (info["bos_token"], info["eos_token"], info["add_bos_token"]) == ("<|im_start|>", "<|im_end|>", False)
    assert info["model_max_length"] == 8192 and info["vocab_size"] == 49152
    assert len(server.tokenize(info["bos_token"])) == len(server.tokenize(info["eos_token"])) == 1


def test_tokenize_agrees_with_the_fixture(server):
    data = os.environ.get("DISTILLCACHE_TEST_DATA", os.path.join(os.path.dirname(__file__), "../data"))
    with open(os.path.join(data, "tokenizer_smollm2.json")) as file:
        fixture = json.load(file)
    for case in fixture["encode"][::7]:
        body = {"prompt": case["text"], "parse_special": case["parse_special"]}
        assert server.post("/tokenize", body).json["tokens"] == case["ids"], case
    for case in fixture["encode_nul"]:
        text = bytes.fromhex(case["text_hex"]).decode()
        body = {"content": text, "parse_special": case["parse_special"]}
        assert server.post("/tokenize", body).json["tokens"] == case["ids"], case


def test_large_bodies_are_tokenised_beside_the_loop(server):
    text = "word " * 200000
    reply = server.post("/tokenize", {"prompt": text}).json
    assert reply["count"] >= 200000
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json["prompt"] == text


@pytest.mark.parametrize("path, body, param", [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"content": ["a"]}, "content"),
    ("/tokenize", {"prompt": "a", "content": "b"}, "content"), ("/tokenize", {"prompt": "a", "parse_special": 1}, "parse_special"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**7]}, "tokens"), ("/detokenize", {"tokens": ["a"]}, "tokens")])
def test_tokenize_errors(server, path, body, param):
    server.post(path, body).expect_error(400, param=param)


def test_metrics(server):
    before = server.idle()
    reply = server.complete(prompt="The quick brown fox", max_tokens=5, n=2, ignore_eos=True)
    after = server.idle()
    delta = {name: after[name] - before.get(name, 0) for name in after}
    assert delta["prompt_tokens_total"] == reply["usage"]["prompt_tokens"]
    assert delta["generation_tokens_total"] == 10
    assert delta['request_success_total{finished_reason="length"}'] == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
                 "request_generation_tokens"):
        assert delta[name + "_count"] == 1, name
    assert delta["inter_token_latency_seconds_count"] == 8
    assert delta["request_generation_tokens_sum"] == 10
    names = "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total " \
        "prefix_cache_hits_total num_preemptions_total kv_tokens_seen kv_tokens_kept kv_bytes kv_bytes_full"
    assert set(names.split()) <= set(after)
    assert 0 <= after["kv_cache_usage_perc"] <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_first_token_is_measured_when_it_comes(fake, stream):
    """Not at the end of the request: here it is still running."""
    before = fake.metrics()["time_to_first_token_seconds_count"]
    connection = fake.connect()
    connection.sendall(post_bytes(COMPLETION, {"prompt": "!slow", "max_tokens": 8000, "stream": stream}))
    eventually(lambda: fake.metrics()["time_to_first_token_seconds_count"] == before + 1, "measured")
    assert fake.metrics()["num_requests_running"] == 1
    connection.close()


def test_no_first_token_is_measured_where_none_is_made(fake):
    before = fake.metrics()["time_to_first_token_seconds_count"]
    fake.complete(prompt="abc", echo=True, max_tokens=0)
    assert fake.metrics()["time_to_first_token_seconds_count"] == before


def test_metrics_are_well_formed(server):
    """Each sample follows a HELP and TYPE of its family, and families do not repeat."""
    families, current = set(), None
    for line in server.get("/metrics").body.decode().splitlines():
        if line.startswith("# HELP "):
            current = line.split()[2]
            assert current not in families
            families.add(current)
        elif line.startswith("# TYPE "):
            assert line.split()[2] == current
        else:
            name, _, value = line.partition("{")
            assert name in (current, current + "_bucket", current + "_sum", current + "_count")
            float(value.rsplit(" ", 1)[1])


# --- Start and end ---


def test_while_loading(start_server):
    server = start_server(fake=True, ready=False, env={"FAKE_LOAD_MS": "1500"})
    reply = server.get("/ready")
    reply.expect_error(503, "server_error", "loading")
    assert int(reply.headers["retry-after"]) > 0
    server.post(COMPLETION, {"prompt": "a"}).expect_error(503, "server_error", "loading")
    assert server.get("/health").status == 200 and server.get("/v1/models").status == 200
    assert server.get("/metrics").status == 200
    server.wait_ready()
    assert server.post(COMPLETION, {"prompt": "a"}).status == 200


def test_bad_model_ends_the_process(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    for model in (broken, tmp_path / "missing.gguf"):
        result = subprocess.run([SERVER, "serve", "--model", model, "--port", "0"], capture_output=True, text=True, timeout=60)
        assert result.returncode == 1
        assert str(model) in result.stderr


def damaged_model(path, old, new):
    """The model with one text of its head replaced by another of the same length."""
    data = pathlib.Path(os.environ["DISTILLCACHE_TEST_MODEL"]).read_bytes()
    assert len(old) == len(new) and old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


@pytest.mark.parametrize("old, new, reason", [
    (b"blk.3.ffn_up.weight", b"blk.3.ffn_xx.weight", "blk.3.ffn_up.weight"),
    (b"\xc4\xa0 t", b"\xc4\xa0 \xff", "merge"),
    (b"tokenizer.ggml.merges", b"tokenizer.ggml.merxes", "tokenizer.ggml.merges")])
def test_damaged_model_is_one_line_that_names_the_file(tmp_path, old, new, reason):
    """Whichever part of the program finds what is wrong with it."""
    model = damaged_model(tmp_path / "damaged.gguf", old, new)
    result = subprocess.run([SERVER, "serve", "--model", model, "--port", "0", "--log-level", "error"], capture_output=True,
                            text=True, timeout=60)
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith(f"distillcache: {model}: "), result.stderr
    assert reason in result.stderr and result.stderr.count(str(model)) == 1


def test_context_that_the_memory_cannot_hold_is_told(start_server):
    def warned(server):
        return [event for event in server.events() if event["event"].startswith("context cut")]

    small = start_server("--kv-memory", "1M")
    assert warned(small)[0]["wanted"] > warned(small)[0]["context"] == small.get("/v1/models").json["data"][0]["max_model_len"]
    assert warned(start_server("--kv-memory", "1M", "--context", 16)) == []


def test_port_in_use_ends_the_process(fake):
    result = subprocess.run([FAKE, "serve", "--model", "fake", "--port", str(fake.port)], capture_output=True, text=True,
                            timeout=60)
    assert result.returncode == 1 and str(fake.port) in result.stderr


def draining(server):
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: any(event["event"] == "draining" for event in server.events()), "draining")


def test_drain(start_server):
    """Running requests end well, new work is refused, then the process ends with 0."""
    server = start_server(fake=True, env={"FAKE_STEP_US": "3000"})
    stream = Stream(server, COMPLETION, prompt="abc", max_tokens=600)
    events = iter(stream)
    next(events)
    whole = server.connect()
    whole.sendall(post_bytes(COMPLETION, {"prompt": "xyz", "max_tokens": 600}))
    eventually(lambda: server.metrics()["num_requests_running"] == 2, "both running")
    idle = server.connect()
    draining(server)
    for path in (COMPLETION, "/v1/chat/completions", "/tokenize"):
        reply = server.post(path, {"prompt": "a", "messages": []})
        reply.expect_error(503, "server_error", "draining")
        assert int(reply.headers["retry-after"]) > 0 and reply.headers["connection"].lower() == "close"
    assert server.get("/health").status == 200
    server.get("/ready").expect_error(503, "server_error", "draining")
    assert list(events)[-1] == "[DONE]"
    assert read_reply(whole).json["usage"]["completion_tokens"] == 600
    assert server.process.wait(60) == 0
    idle.close()


def test_drain_timeout_cancels(start_server):
    server = start_server("--drain-timeout", 1, fake=True, env={"FAKE_STEP_US": "3000"})
    events = iter(Stream(server, COMPLETION, prompt="abc", max_tokens=8000))
    next(events)
    whole, queued = server.connect(), server.connect()
    whole.sendall(post_bytes(COMPLETION, {"prompt": "xyz", "max_tokens": 8000}))
    queued.sendall(post_bytes(COMPLETION, {"prompt": "!never"}))
    eventually(lambda: server.metrics()["num_requests_waiting"] == 1, "queued")
    draining(server)
    rest = list(events)
    assert rest[-1] == "[DONE]" and rest[-2]["error"]["code"] == "draining"
    for connection in (whole, queued):
        read_reply(connection).expect_error(503, "server_error", "draining")
    assert server.process.wait(60) == 0


def test_idle_server_ends_at_once(start_server):
    for number in (signal.SIGTERM, signal.SIGINT):
        server = start_server(fake=True)
        connection = server.connect()
        server.process.send_signal(number)
        assert server.process.wait(60) == 0
        connection.close()


def test_second_signal_ends_at_once(start_server):
    server = start_server(fake=True, env={"FAKE_STEP_US": "3000"})
    events = iter(Stream(server, COMPLETION, prompt="abc", max_tokens=8000))
    next(events)
    draining(server)

    def ended():  # those that come right after the first belong to it
        server.process.send_signal(signal.SIGTERM)
        return server.process.poll() is not None

    eventually(ended, "ended")
    assert server.process.wait(60) == 128 + signal.SIGTERM


def test_signals_that_come_together_are_one(start_server):
    """timeout(1), terminals and wrapper scripts send one wish to end several times."""
    server = start_server(fake=True)
    events = iter(Stream(server, COMPLETION, prompt="abc", max_tokens=100))
    next(events)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        server.process.send_signal(number)
    assert list(events)[-1] == "[DONE]"
    assert server.process.wait(60) == 0


def test_drain_with_the_model(start_server):
    server = start_server("--kv-memory", "64M")
    events = iter(Stream(server, COMPLETION, prompt="Once", max_tokens=60, ignore_eos=True))
    next(events)
    draining(server)
    server.post(COMPLETION, {"prompt": "a"}).expect_error(503, "server_error", "draining")
    rest = list(events)
    assert rest[-1] == "[DONE]" and rest[-2]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0


def test_drain_while_loading(start_server):
    server = start_server(fake=True, ready=False, env={"FAKE_LOAD_MS": "500"})
    assert server.stop() == 0
