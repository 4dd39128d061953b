# SPDX-License-Identifier: Apache-2.0
"""/openapi.json says what the server does: the same routes, fields, limits and open paths; and, behind
DISTILLCACHE_TEST_FULL=1, schemathesis finds no request whose answer is not as described."""

import json
import os
import pathlib
import re
import subprocess
import sys

import openai
import pytest

from conftest import PATIENCE, ROOT

SERVER_DIR = ROOT / "server"
SPEC = json.loads((SERVER_DIR / "openapi.json").read_text())
COMPLETION, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
BASE = {COMPLETION: {"prompt": "a", "max_tokens": 1},
        CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True},
        EMBEDDINGS: {"input": "a"}}
SCHEMAS = {COMPLETION: "CompletionRequest", CHAT: "ChatRequest", EMBEDDINGS: "EmbeddingRequest"}


def properties(path):
    return SPEC["components"]["schemas"][SCHEMAS[path]]["properties"]


def refused(server, path, **fields):
    """The field that a 400 names; None when the request is not refused for one of these."""
    reply = server.post(path, {**BASE[path], **fields})
    assert reply.status in (200, 400), (fields, reply.body)
    return reply.json["error"]["param"] if reply.status == 400 else None


def test_is_served(fake):
    assert fake.get("/openapi.json").json == SPEC
    assert SPEC["info"]["version"] == fake.get("/version").json["version"]


def test_routes(fake):
    """Those of the table, by name, and as the server tells them."""
    table = re.findall(r'^    \{"(\w+)", "([^"]+)"', (SERVER_DIR / "routes.c").read_text(), re.M)
    told = {(method.upper(), re.sub(r"\{\w+\}$", "*", path)) for path, methods in SPEC["paths"].items() for method in methods}
    assert len(table) > 8 and told == set(table)
    for path, methods in SPEC["paths"].items():
        allowed = fake.request("OPTIONS", path.replace("{model}", "fake")).headers["allow"].split(", ")
        assert set(allowed) == {method.upper() for method in methods} | {"OPTIONS"} | ({"HEAD"} if "get" in methods else set())


@pytest.mark.parametrize("path, source", [(COMPLETION, "completions.c"), (CHAT, "chat.c"), (EMBEDDINGS, "embeddings.c")])
def test_fields(path, source):
    """Those that the parsers know."""
    strings = lambda text: set(re.findall(r'"(\w+)"', text))  # noqa: E731
    shared = strings(re.search(r"#define PARAMS_KNOWN((?:.*\\\n)*.*\n)", (SERVER_DIR / "params.h").read_text())[1])
    own = strings(re.search(r"known\[\] = \{(.*?)\};", (SERVER_DIR / source).read_text(), re.S)[1])
    assert len(shared) > 20 and "PARAMS_KNOWN" not in own
    assert set(properties(path)) == (own if path == EMBEDDINGS else shared | own)


@pytest.mark.parametrize("path", BASE)
def test_null_and_limits(fake, path):
    """Null is taken where the description has it; numbers at their limits are, and beyond them refused by name."""
    checked = 0
    for name, schema in properties(path).items():
        types = schema.get("type", [])
        nullable = "null" in types or None in schema.get("enum", []) or {"type": "null"} in schema.get("anyOf", [])
        assert (refused(fake, path, **{name: None}) is None) == nullable, name
        if "integer" not in types and "number" not in types:
            continue
        step = 1 if "integer" in types else 0.001
        beside = {"min_tokens": {"max_tokens": 2**31 - 1}, "best_of": {"n": 1}}.get(name, {})
        if name == "best_of" and path == CHAT:
            continue
        for limit, beyond in (("minimum", -step), ("maximum", step)):
            if limit not in schema:
                continue
            value = schema[limit]
            small = {"max_tokens": 1} if value > 1000 and name in ("n",) else {}
            assert refused(fake, path, **{**beside, **small, "stop": "a", name: value}) != name, (name, value)
            if name != "seed":  # beyond 64 bits it is no JSON that the server reads
                assert refused(fake, path, **{**beside, name: value + beyond}) == name, (name, value + beyond)
            checked += 1
    assert checked > 16 or path == EMBEDDINGS  # which has none


@pytest.mark.parametrize("path, params", [
    (COMPLETION, openai.types.completion_create_params.CompletionCreateParamsBase),
    (CHAT, openai.types.chat.completion_create_params.CompletionCreateParamsBase),
    (EMBEDDINGS, openai.types.embedding_create_params.EmbeddingCreateParams)])
def test_every_field_of_openai(fake, path, params):
    """Trap 21: what openai's client can ask for is described here, or refused by name; nothing is silently ignored."""
    names = set(params.__annotations__) - {"stream"}
    assert len(names) > (15 if path != EMBEDDINGS else 4)
    for name in sorted(names - set(properties(path))):
        assert refused(fake, path, **{name: "x"}) == name, name
        assert refused(fake, path, **{name: None}) is None, name


def test_open_paths(start_server):
    server = start_server("--api-key", "a", fake=True, key="a")
    for path, methods in SPEC["paths"].items():
        for method, operation in methods.items():
            reply = server.request(method.upper(), path.replace("{model}", "fake"), headers={"Authorization": ""})
            assert (reply.status != 401) == (operation.get("security") == []), path


@pytest.mark.skipif(os.environ.get("DISTILLCACHE_TEST_FULL") != "1", reason="takes minutes: DISTILLCACHE_TEST_FULL=1")
def test_schemathesis(start_server, tmp_path):
    """Statuses, content types and bodies are as described, and what the description forbids is refused. That all it
    allows is taken cannot be asked: token ids end with the vocabulary, and some fields go only with others."""
    server = start_server(fake=True, env={"FAKE_STEP_US": "50"})
    program = pathlib.Path(sys.executable).parent / "schemathesis"
    result = subprocess.run([program, "run", server.url + "/openapi.json", "--max-examples", "50", "--no-color", "--seed", "8",
                             "--request-timeout", str(PATIENCE), "--exclude-checks", "positive_data_acceptance"],
                            cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:]
    assert re.search(r"\d{3,} generated, \d{3,} passed", result.stdout), result.stdout[-1000:]
