# SPDX-License-Identifier: Apache-2.0
"""OpenAI's asynchronous client: many requests of one process over pooled connections, each with its own answer."""

import asyncio

import openai
import pydantic
import pytest

from conftest import PATIENCE

USER = [{"role": "user", "content": "Name a colour, please."}]
SEEDS = range(12)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"], "additionalProperties": False}}}
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{# <tool_call> #}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Colour(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    red: int = pydantic.Field(ge=0, le=255)


def run(server, work):
    """work(client), with a client that is closed at the end."""
    async def whole():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
            return await work(client)
    return asyncio.run(whole())


async def read(stream):
    """The text of a stream of completions or of chat chunks, and its last reason."""
    text, finish = "", None
    async for chunk in stream:
        for choice in chunk.choices:
            text += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            finish = choice.finish_reason or finish
    return text, finish


def test_together_as_alone(server):
    """Whole and streamed, completions and chats at once: what each seed gives alone."""
    options = dict(model=server.model, max_tokens=16, temperature=1)
    sync = server.client()
    alone = [sync.completions.create(prompt=f"Ship {seed}", seed=seed, **options).choices[0].text for seed in SEEDS]
    chats = [sync.chat.completions.create(messages=USER, seed=seed, **options).choices[0].message.content for seed in SEEDS]

    async def work(client):
        async def completion(seed):
            return (await client.completions.create(prompt=f"Ship {seed}", seed=seed, **options)).choices[0].text

        async def streamed(seed):
            return (await read(await client.completions.create(prompt=f"Ship {seed}", seed=seed, stream=True, **options)))[0]

        async def chat(seed):
            return (await read(await client.chat.completions.create(messages=USER, seed=seed, stream=True, **options)))[0]

        kinds = (completion, streamed, chat)
        answers = await asyncio.gather(*(kind(seed) for kind in kinds for seed in SEEDS))
        return [list(answers[i * len(SEEDS):(i + 1) * len(SEEDS)]) for i in range(len(kinds))]

    assert run(server, work) == [alone, alone, chats]


def test_a_stream_that_is_left(server):
    """Leaving a stream ends its request alone."""
    async def work(client):
        options = dict(model=server.model, max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True})
        left, kept = [await client.completions.create(prompt="Once upon a time", **options) for _ in range(2)]
        async for _ in left:
            break
        await left.close()
        return await read(kept)

    text, finish = run(server, work)
    assert finish == "length" and len(text) > 200
    server.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output(server, stream):
    async def work(client):
        options = dict(model=server.model, messages=USER, response_format=Colour, seed=5, temperature=1.5, max_tokens=200)
        if not stream:
            return await client.chat.completions.parse(**options)
        async with client.chat.completions.stream(**options) as events:
            async for _ in events:
                pass
            return await events.get_final_completion()

    assert isinstance(run(server, work).choices[0].message.parsed, Colour)


def test_tools_and_embeddings(start_server, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    server = start_server("--chat-template", path, "--kv-memory", "256M")

    async def work(client):
        asked = client.chat.completions.create(model=server.model, messages=USER, tools=[TOOL], tool_choice="required", seed=2,
                                               parallel_tool_calls=False, max_tokens=100)
        vectors = client.embeddings.create(model=server.model, input=["A ship.", "A lighthouse."])
        return await asyncio.gather(asked, vectors)

    reply, vectors = run(server, work)
    [call] = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls" and call.function.name == "add"
    assert 99 >= pydantic.TypeAdapter(dict[str, int]).validate_json(call.function.arguments)["a"]
    assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == len(vectors.data[1].embedding) > 64
    assert server.stop() == 0


def test_faults(fake):
    """Statuses become the client's own exceptions, before and within streams."""
    async def work(client):
        raised = []
        for fields in ({"model": "other"}, {"max_tokens": -1}, {"prompt": "!fail"}, {"prompt": "!late"}):
            try:
                stream = await client.completions.create(**{"model": "fake", "prompt": "a", "stream": True, **fields})
                await read(stream)
            except openai.APIError as error:
                raised.append(type(error))
        return raised

    assert run(fake, work) == [openai.NotFoundError, openai.BadRequestError, openai.InternalServerError, openai.APIError]
