# SPDX-License-Identifier: Apache-2.0
"""Calls that must come: tool_choice "required" and by name, with the model, in each format that calls are written in."""

import json

import jsonschema
import openai
import pydantic
import pytest

pytestmark = pytest.mark.speaks  # others may never end a list of calls
TEMPLATE = """{%% for m in messages %%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{%% endfor %%}{%% if tools %%}{{ tools | tojson }}{%% endif %%}{%% if add_generation_prompt %%}<|im_start|>assistant
{%% endif %%}%s"""
FORMATS = {"hermes": ("{# <tool_call> #}", "<tool_call>"), "llama3": ('{# ipython "parameters": #}', ""),
           "mistral": ("{# [TOOL_CALLS] #}", "[TOOL_CALLS]")}
SCHEMAS = {
    "get_weather": {"type": "object", "properties": {"place": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]},
                                                     "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                    "required": ["place", "unit", "days"], "additionalProperties": False},
    "move": {"properties": {"to": {"$ref": "#/$defs/point"}}, "required": ["to"], "additionalProperties": False,
             "$defs": {"point": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 2}}},
    "stop": None,
}
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", **({"parameters": schema} if schema else {})}}
         for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module", params=FORMATS)
def caller(request, start_server, tmp_path_factory):
    """A server with the model and a template of each format."""
    marker, opening = FORMATS[request.param]
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE % marker)
    server = start_server("--chat-template", path, "--kv-memory", "256M")
    server.opening = opening
    return server


def ask(server, **more):
    return dict(model=server.model, messages=[{"role": "user", "content": "Do something."}], **{"tools": TOOLS, "max_tokens": 300, **more})


def check(call, names=tuple(SCHEMAS)):
    assert call.type == "function" and call.function.name in names and call.id
    arguments = json.loads(call.function.arguments)
    if SCHEMAS[call.function.name] is None:
        assert arguments == {}
    else:
        jsonschema.Draft202012Validator(SCHEMAS[call.function.name]).validate(arguments)
        assert isinstance(arguments, dict)


def test_calls_are_valid(caller):
    """However hot: each answer is calls and nothing else; one, where only one is asked for."""
    client = caller.client()
    for choice, parallel, names in (("required", True, tuple(SCHEMAS)), ("required", False, tuple(SCHEMAS)),
                                    ({"type": "function", "function": {"name": "move"}}, True, ("move",))):
        whole = 0
        reply = client.chat.completions.create(
            **ask(caller, tool_choice=choice, parallel_tool_calls=parallel, n=3, seed=7, temperature=1.5))
        for one in reply.choices:
            assert not one.message.content and one.message.tool_calls
            if one.finish_reason == "length":
                continue
            whole += 1
            assert one.finish_reason == "tool_calls"
            assert len(one.message.tool_calls) == 1 or (choice == "required" and parallel)
            for call in one.message.tool_calls:
                check(call, names)
        assert whole > 0, reply


def test_streamed_calls_are_the_same(caller):
    body = ask(caller, tool_choice="required", seed=11, temperature=1.2, parallel_tool_calls=False)
    [call] = caller.client().chat.completions.create(**body).choices[0].message.tool_calls
    name, arguments, pieces, content = "", "", 0, ""
    for chunk in caller.client().chat.completions.create(**body, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or []:
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
            pieces += 1
    assert (name, arguments, content) == (call.function.name, call.function.arguments, "")
    assert pieces > 1 and chunk.choices[0].finish_reason == "tool_calls"


def test_the_opening_is_in_the_prompt(caller):
    auto = caller.post("/apply-template", ask(caller)).json["prompt"]
    assert caller.post("/apply-template", ask(caller, tool_choice="required")).json["prompt"] == auto + caller.opening
    reply = caller.post("/v1/chat/completions", ask(caller, tool_choice="required", max_tokens=2)).json["choices"][0]
    assert reply["finish_reason"] == "length" and reply["message"]["content"] == "" and "tool_calls" not in reply["message"]


def test_openais_strict_functions(caller):
    """What openai's client makes of pydantic, and what it reads of the answer."""
    class Move(pydantic.BaseModel):
        """Moves there."""
        x: int = pydantic.Field(ge=0, le=99)
        note: str | None

    tool = openai.pydantic_function_tool(Move)
    assert tool["function"]["strict"]
    message = caller.client().chat.completions.parse(
        **ask(caller, tools=[tool], tool_choice={"type": "function", "function": {"name": "Move"}}, temperature=0.7, seed=2)).choices[0].message
    assert 0 <= message.tool_calls[0].function.parsed_arguments.x <= 99


def test_what_is_refused(caller):
    unsupported = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"contains": {}}}}}}
    error = caller.post("/v1/chat/completions", ask(caller, tools=[*TOOLS, unsupported], tool_choice="required")).expect_error(400, param="tools")
    assert "parameters of f" in error["message"] and "contains" in error["message"]
    body = ask(caller, tool_choice="required", response_format={"type": "json_object"})
    caller.post("/v1/chat/completions", body).expect_error(400, param="tool_choice")
