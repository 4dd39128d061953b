# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions with the model."""

from conftest import Stream

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "Name one fruit."}


def chat(server, messages=(SYSTEM, USER), **body):
    reply = server.post("/v1/chat/completions", dict(messages=list(messages), temperature=0, **body))
    assert reply.status == 200, reply.body
    return reply.json


def test_shape(server):
    reply = chat(server, max_tokens=5)
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    choice = reply["choices"][0]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"]["role"] == "assistant" and choice["message"]["refusal"] is None
    assert choice["logprobs"] is None


def test_openai_client(server):
    client = server.client()
    body = dict(model=server.model, messages=[SYSTEM, USER], temperature=0, max_completion_tokens=12)
    whole = client.chat.completions.create(**body).choices[0]
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.message.content
    assert [choice.finish_reason for choice in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.finish_reason and not deltas[-1].delta.content


def test_is_the_completion_of_the_template(server):
    prompt = "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nName one fruit.<|im_end|>\n" \
        "<|im_start|>assistant\n"
    expected = server.complete(prompt=prompt, temperature=0, max_tokens=12)
    reply = chat(server, max_tokens=12)
    assert reply["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert reply["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


def test_forms_of_messages_agree(server):
    """Traps 19, 20."""
    expected = chat(server, max_tokens=8)["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": "Name one "}, {"type": "text", "text": "fruit."}]
    for messages in ([{"role": "developer", "content": "You are terse."}, USER],
                     [SYSTEM, {"role": "user", "content": parts}],
                     [SYSTEM, {**USER, "name": "someone", "weight": 1}]):
        assert chat(server, messages, max_tokens=8)["choices"][0]["message"]["content"] == expected
    chat(server, [SYSTEM, USER, {"role": "assistant", "content": None}, USER], max_tokens=2)


def test_max_completion_tokens_wins(server):
    assert chat(server, max_tokens=9, max_completion_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_logprobs(server):
    """Traps 2 and 9: the tokens' own bytes; logprobs without top_logprobs."""
    choice = chat(server, max_tokens=6, logprobs=True, ignore_eos=True)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6 and all(entry["top_logprobs"] == [] for entry in content)
    whole = bytes(byte for entry in content for byte in entry["bytes"])
    assert choice["message"]["content"] in whole.decode(errors="replace")
    content = chat(server, max_tokens=3, logprobs=True, top_logprobs=20)["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 20
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]


def test_stream_with_choices(server):
    body = dict(messages=[SYSTEM, USER], n=3, seed=4, max_tokens=8, stream_options={"include_usage": True})
    chunks = list(Stream(server, "/v1/chat/completions", **body))
    assert chunks[-1] == "[DONE]" and chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] <= 24
    texts, first, last = {}, {}, {}
    for chunk in chunks[:-2]:
        assert chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None
        choice = chunk["choices"][0]
        first.setdefault(choice["index"], choice["delta"])
        last[choice["index"]] = choice
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    del body["stream_options"]
    whole = server.post("/v1/chat/completions", body).json["choices"]
    assert [texts[i] for i in range(3)] == [choice["message"]["content"] for choice in whole]
    assert all(delta == {"role": "assistant", "content": ""} for delta in first.values())
    assert all(choice["delta"] == {} and choice["finish_reason"] for choice in last.values())
