# SPDX-License-Identifier: Apache-2.0
"""Clients that people use beside OpenAI's own: langchain-openai and litellm, as they are installed."""

import json
import os

import pydantic
import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
os.environ["LANGSMITH_TRACING"] = "false"

pytestmark = [pytest.mark.repeats, pytest.mark.speaks]
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{# <tool_call> #}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Colour(pydantic.BaseModel):
    """A colour."""
    name: str = pydantic.Field(max_length=20)
    red: int = pydantic.Field(ge=0, le=255)


@pytest.fixture(scope="module")
def caller(start_server, tmp_path_factory):
    """The model with a template that has a place for tools."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    return start_server("--chat-template", path, "--kv-memory", "256M")


# --- langchain-openai ---


def langchain(server, **options):
    from langchain_openai import ChatOpenAI
    return ChatOpenAI(model=server.model, base_url=server.url + "/v1", api_key="none", max_retries=0, temperature=0,
                      max_completion_tokens=120, seed=1, **options)


def test_langchain_invokes_and_streams(server):
    chat = langchain(server)
    messages = [("system", "Answer in one word."), ("user", "What is the capital of France?")]
    whole = chat.invoke(messages)
    assert whole.content and whole.response_metadata["finish_reason"] in ("stop", "length")
    usage = whole.usage_metadata
    assert usage["input_tokens"] > 10 and usage["output_tokens"] > 0
    chunks = list(chat.stream(messages, stream_usage=True))
    assert len(chunks) > 1 and "".join(chunk.content for chunk in chunks) == whole.content
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["output_tokens"] == usage["output_tokens"]
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    batch = chat.batch([messages, messages])
    assert [message.content for message in batch] == [whole.content] * 2


def test_langchain_structured_output(caller):
    """By response_format and by a call that is forced."""
    for method in ("json_schema", "function_calling"):
        colour = langchain(caller).with_structured_output(Colour, method=method).invoke("Name a colour.")
        assert isinstance(colour, Colour) and 0 <= colour.red <= 255, method


def test_langchain_tools(caller):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    chat = langchain(caller)
    asked = [HumanMessage("What is 2 + 3?")]
    for forced in (True, "add"):
        message = chat.bind_tools([add], tool_choice=forced, parallel_tool_calls=False).invoke(asked)
        [call] = message.tool_calls
        assert call["name"] == "add" and {type(value) for value in call["args"].values()} == {int}
    merged = None
    for chunk in chat.bind_tools([add], tool_choice="required", parallel_tool_calls=False).stream(asked):
        merged = chunk if merged is None else merged + chunk
    assert [one["args"] for one in merged.tool_calls] == [call["args"]]
    result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
    answer = chat.bind_tools([add]).invoke([*asked, message, result])
    assert isinstance(answer.content, str)


def test_langchain_embeddings(server):
    """Texts are sent as token ids of OpenAI's own tokenizer unless that is turned off, as its manual says for others'
    servers."""
    from langchain_openai import OpenAIEmbeddings
    embeddings = OpenAIEmbeddings(model=server.model, base_url=server.url + "/v1", api_key="none", check_embedding_ctx_length=False)
    documents = embeddings.embed_documents(["A ship.", "A lighthouse."])
    assert len(documents) == 2 and len(documents[0]) == len(documents[1]) > 64
    assert embeddings.embed_query("A ship.") == documents[0]


# --- litellm ---


@pytest.fixture(scope="module")
def litellm():
    import litellm
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


def route(server):
    return dict(api_base=server.url + "/v1", api_key="none", num_retries=0, timeout=600)


def test_litellm_completes_and_streams(server, litellm):
    body = dict(model="openai/" + server.model, messages=[{"role": "user", "content": "Name a colour."}], temperature=0, max_tokens=12, seed=1)
    whole = litellm.completion(**body, **route(server))
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0 and whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(litellm.completion(**body, stream=True, stream_options={"include_usage": True}, **route(server)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    rebuilt = litellm.stream_chunk_builder(chunks, messages=body["messages"])
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    old = litellm.text_completion(model="text-completion-openai/" + server.model, prompt="The capital of France is", max_tokens=4,
                                  temperature=0, **route(server))
    assert old.choices[0].text == server.complete(prompt="The capital of France is", max_tokens=4, temperature=0)["choices"][0]["text"]


def test_litellm_tools_and_formats(caller, litellm):
    tool = {"type": "function", "function": {"name": "paint", "description": "d", "parameters": Colour.model_json_schema()}}
    body = dict(model="openai/" + caller.model, messages=[{"role": "user", "content": "Name a colour."}], temperature=0, max_tokens=120)
    reply = litellm.completion(**body, tools=[tool], tool_choice={"type": "function", "function": {"name": "paint"}}, **route(caller))
    [call] = reply.choices[0].message.tool_calls
    Colour(**json.loads(call.function.arguments))
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": Colour.model_json_schema(), "strict": True}}
    Colour(**json.loads(litellm.completion(**body, response_format=form, **route(caller)).choices[0].message.content))


def test_litellm_embeds(server, litellm):
    reply = litellm.embedding(model="openai/" + server.model, input=["A ship.", "A lighthouse."], **route(server))
    assert [entry["index"] for entry in reply.data] == [0, 1]
    plain = server.post("/v1/embeddings", {"input": "A lighthouse."}).json["data"][0]["embedding"]
    assert reply.data[1]["embedding"] == pytest.approx(plain, abs=1e-6)


def test_litellm_reads_our_errors(server, litellm):
    """As its own exceptions, by which its router chooses what to do."""
    body = dict(messages=[{"role": "user", "content": "a"}], **route(server))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", **body)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model="openai/" + server.model, temperature=3, **body)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model="openai/" + server.model, **{**body, "messages": [{"role": "user", "content": "a b " * 9000}]})
