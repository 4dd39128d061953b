# SPDX-License-Identifier: Apache-2.0
"""Structured output with the model: response_format and vLLM's names, against `jsonschema` and the openai client.

DISTILLCACHE_TEST_FULL=1: 1,000 random schemas in place of 40.
"""

import concurrent.futures
import json
import os
import pathlib
import random
import sys
import typing

import pydantic
import pytest

from conftest import Stream, memory_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "model"))
import schemas  # noqa: E402
from test_grammar import validate  # noqa: E402

FULL = os.environ.get("DISTILLCACHE_TEST_FULL", "") == "1"
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                                           "kind": {"enum": ["red", "green"]}}, "required": ["name", "age", "kind"],
          "additionalProperties": False}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def answer(server, schema, **body):
    return server.complete(**{"prompt": "A person as JSON: ", "max_tokens": 200, "response_format": schema_format(schema), **body})["choices"]


def test_random_schemas_at_temperature_1_5(server):
    draw = random.Random(77)
    documents = [schemas.document(draw) for _ in range(1000 if FULL else 40)]

    def ask(numbered):
        number, schema = numbered
        reply = server.post("/v1/completions", {"prompt": "JSON: ", "max_tokens": 160, "temperature": 1.5, "seed": number,
                                                "response_format": schema_format(schema)})
        if reply.status == 400:
            assert "nothing that satisfies" in reply.json["error"]["message"], (schema, reply.body)
            return None
        assert reply.status == 200, reply.body
        choice = reply.json["choices"][0]
        if choice["finish_reason"] == "length":
            return False
        assert choice["finish_reason"] == "stop"
        validate(schema, choice["text"])
        return True

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = [result for result in pool.map(ask, enumerate(documents)) if result is not None]
    assert len(results) > 0.9 * len(documents) and results.count(True) > 0.7 * len(results)


def test_choices_seeds_and_streams(server):
    together = answer(server, PERSON, n=3, seed=5, temperature=1.2)
    assert [choice["finish_reason"] for choice in together] == ["stop"] * 3
    for choice in together:
        validate(PERSON, choice["text"])
    assert len({choice["text"] for choice in together}) > 1
    assert [choice["text"] for choice in answer(server, PERSON, n=3, seed=5, temperature=1.2)] == [choice["text"] for choice in together]
    stream = Stream(server, "/v1/completions", prompt="A person as JSON: ", max_tokens=200, n=3, seed=5, temperature=1.2,
                    response_format=schema_format(PERSON))
    texts = [""] * 3
    for event in stream:
        if event != "[DONE]":
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in together]


def test_cut_by_max_tokens(server):
    [choice] = answer(server, PERSON, max_tokens=3)
    assert choice["finish_reason"] == "length" and choice["text"].startswith("{")


def test_ignore_eos_ends_with_the_document(server):
    [choice] = answer(server, PERSON, ignore_eos=True)
    assert choice["finish_reason"] == "stop"
    validate(PERSON, choice["text"])


def test_logprobs_are_the_models(server):
    """A choice of one text is forced: its log-probability is what the model without a mask gives it, not 0."""
    forced = server.complete(prompt="The sky is", guided_choice=[" zebra"], logprobs=1, max_tokens=9)["choices"][0]
    assert forced["text"] == " zebra"
    echoed = server.complete(prompt="The sky is zebra", echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]
    count = len(forced["logprobs"]["tokens"])
    if echoed["tokens"][-count:] == forced["logprobs"]["tokens"]:
        assert forced["logprobs"]["token_logprobs"] == pytest.approx(echoed["token_logprobs"][-count:], abs=0.02)
    assert min(forced["logprobs"]["token_logprobs"]) < -1


def test_under_a_policy_and_preemption(start_server):
    server = start_server("--kv-memory", memory_of(540), "--context", "512")
    schema = {"type": "array", "items": PERSON, "minItems": 4, "maxItems": 5}
    for kv_cache in ({"policy": "full"}, {"policy": "h2o", "tokens": 48}):
        body = {"max_tokens": 300, "seed": 3, "temperature": 1.0, "kv_cache": kv_cache}
        alone = answer(server, schema, **body)[0]["text"]
        together = answer(server, schema, n=8, **body)
        assert together[0]["text"] == alone
        for choice in together:
            if choice["finish_reason"] == "stop":
                validate(schema, choice["text"])
    assert server.metrics()["num_preemptions_total"] > 0


@pytest.mark.parametrize("body, allowed", [
    ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
    ({"guided_json": {"type": "boolean"}}, lambda text: text in ("true", "false")),
    ({"guided_json": "{\"type\": \"boolean\"}"}, lambda text: text in ("true", "false")),
    ({"structured_outputs": {"json": {"type": "boolean"}}}, lambda text: text in ("true", "false")),
    ({"guided_regex": "[a-c]{3}"}, lambda text: len(text) == 3 and set(text) <= set("abc")),
    ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, lambda text: text == "a"),
])
def test_other_names(server, body, allowed):
    choice = server.complete(prompt="Answer: ", temperature=1.5, **body)["choices"][0]
    assert allowed(choice["text"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("body, parameter, message", [
    ({"response_format": schema_format({"type": "array", "uniqueItems": True})}, "response_format", "'uniqueItems' is not supported at #"),
    ({"response_format": schema_format({"properties": {"a": {"not": {}}}})}, "response_format", "'not' is not supported at #/properties/a"),
    ({"response_format": schema_format([])}, "response_format", "schema must be an object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema must be an object"),
    ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
    ({"response_format": "json_object"}, "response_format", "must be an object"),
    ({"guided_json": "{"}, "guided_json", "not a schema"),
    ({"guided_json": 3}, "guided_json", "must be an object or a boolean"),
    ({"guided_choice": []}, "guided_choice", "at least one string"),
    ({"guided_choice": "yes"}, "guided_choice", "at least one string"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "entry 1"),
    ({"guided_regex": "(a"}, "guided_regex", ") is missing"),
    ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "together with guided_json"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs", "grammar"),
    ({"guided_grammar": "x"}, "guided_grammar", "guided_grammar"),
])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_refusals(server, route, body, parameter, message):
    prompt = {"prompt": "a"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    error = server.post(route, {**prompt, **body}).expect_error(400, param=parameter)
    assert message in error["message"]


def test_a_schema_that_only_shows_its_ambiguity_later_ends_with_a_fault(server):
    reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 50,
                                            "guided_regex": "(((a|b?)*a(a|b){0,300}){0,300}){0,300}x{0,300}"})
    assert reply.status in (200, 400), reply.body
    assert server.complete(prompt="a", max_tokens=1)["choices"][0]["finish_reason"] == "length"


class Step(pydantic.BaseModel):
    explanation: str = pydantic.Field(max_length=30)
    output: float


class Colour(pydantic.BaseModel):
    name: typing.Literal["red", "green", "blue"]
    steps: list[Step] = pydantic.Field(max_length=2)
    note: str | None = pydantic.Field(max_length=10)


def test_openai_client_parses_pydantic(server):
    client = server.client()
    reply = client.chat.completions.parse(model=server.model, messages=[{"role": "user", "content": "A colour?"}], max_tokens=300,
                                          seed=3, temperature=0.7, response_format=Colour)
    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, Colour) and parsed.name in ("red", "green", "blue")


def test_openai_client_json_object_streams(server):
    client = server.client()
    chunks = client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": "A JSON object, please."}],
                                            max_tokens=300, seed=1, temperature=0, response_format={"type": "json_object"}, stream=True)
    text, finish = "", None
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    if finish == "stop":
        assert isinstance(json.loads(text), dict)
    assert text.startswith("{")
