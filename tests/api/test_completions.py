# SPDX-License-Identifier: Apache-2.0
"""/v1/completions with the model: every parameter, streamed and not. Trap numbers are those of the wire format notes."""

import pytest

from conftest import Stream

STORY = "Once upon a time there was a"
COUNT = "1, 2, 3, 4, 5, 6,"


def greedy(server, prompt=STORY, **body):
    return server.complete(prompt=prompt, temperature=0, **body)


def text(reply):
    return reply["choices"][0]["text"]


def test_shape(server):
    reply = greedy(server, max_tokens=4)
    assert set(reply) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert reply["model"] == server.model and reply["system_fingerprint"].startswith("fp_")
    assert set(reply["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    assert reply["choices"][0]["logprobs"] is None and reply["choices"][0]["finish_reason"] == "length"
    tokens = len(server.tokenize(STORY))
    usage = reply["usage"]
    assert usage["prompt_tokens"] == tokens and usage["completion_tokens"] == 4
    assert usage["total_tokens"] == tokens + 4 and usage["prompt_tokens_details"]["cached_tokens"] >= 0


@pytest.mark.speaks
def test_openai_client(server):
    client = server.client()
    reply = client.completions.create(model=server.model, prompt=COUNT, max_tokens=6, temperature=0)
    assert reply.choices[0].text.startswith(" 7")
    chunks = list(client.completions.create(model=server.model, prompt=COUNT, max_tokens=6, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_defaults(server):
    reply = server.complete(prompt=STORY)
    assert reply["usage"]["completion_tokens"] <= 16 and len(reply["choices"]) == 1
    assert greedy(server, max_tokens=None)["usage"]["completion_tokens"] == 16


def test_null_is_the_default(server):
    """Trap 10."""
    names = "n seed top_p top_k min_p stop max_tokens logprobs echo ignore_eos stream stream_options suffix logit_bias " \
        "presence_penalty frequency_penalty repetition_penalty min_tokens stop_token_ids best_of user model"
    assert text(greedy(server, **{name: None for name in names.split()})) == text(greedy(server))


def test_prompt_forms_agree(server):
    tokens = server.tokenize(STORY)
    expected = text(greedy(server))
    assert text(greedy(server, tokens)) == expected
    assert text(greedy(server, [STORY])) == expected
    assert text(greedy(server, [tokens])) == expected
    assert text(greedy(server, [float(token) for token in tokens])) == expected


@pytest.mark.parametrize("tokens", [False, True])
def test_list_of_prompts(server, tokens):
    prompts = [STORY, COUNT, "The"]
    reply = greedy(server, [server.tokenize(p) for p in prompts] if tokens else prompts, n=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = text(greedy(server, prompt))
        assert reply["choices"][2 * i]["text"] == alone == reply["choices"][2 * i + 1]["text"]
    assert reply["usage"]["prompt_tokens"] == sum(len(server.tokenize(p)) for p in prompts)
    assert reply["usage"]["completion_tokens"] == 6 * 16


def test_n_differ_and_repeat_by_seed(server):
    body = dict(prompt=STORY, n=4, seed=7, temperature=1.5, max_tokens=12)
    first, second = server.complete(**body), server.complete(**body)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 1
    assert texts != [choice["text"] for choice in server.complete(**{**body, "seed": 8})["choices"]]


def test_no_seed_is_random(server):
    texts = {text(server.complete(prompt=STORY, temperature=2, max_tokens=16)) for _ in range(4)}
    assert len(texts) > 1


def test_filters_that_leave_one_token_are_greedy(server):
    expected = text(greedy(server))
    for body in ({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-6}, {"min_p": 1}):
        assert text(server.complete(prompt=STORY, temperature=1.5, seed=3, **body)) == expected, body


def test_filters_that_leave_all_tokens_change_nothing(server):
    expected = text(server.complete(prompt=STORY, seed=3))
    for body in ({"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}, {"temperature": 1}):
        assert text(server.complete(prompt=STORY, seed=3, **body)) == expected, body


def streamed(server, **body):
    """(text of each choice, finish reasons, chunks) of a stream."""
    chunks = list(Stream(server, "/v1/completions", **body))
    assert chunks[-1] == "[DONE]"
    chunks = chunks[:-1]
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            assert choice["index"] not in reasons, "a chunk after the last"
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons, chunks


@pytest.mark.parametrize("body", [
    dict(prompt=STORY, temperature=0, max_tokens=24),
    dict(prompt=[STORY, COUNT], n=3, seed=1, temperature=1.2),
    dict(prompt=COUNT, temperature=0, stop="9"),
    dict(prompt=COUNT, temperature=0, stop=["no", ", 9, 10"], max_tokens=40),
    dict(prompt=STORY, temperature=0, echo=True, max_tokens=5),
    dict(prompt=STORY, echo=True, max_tokens=0),
    dict(prompt=STORY, max_tokens=0, n=2, logprobs=1),
    dict(prompt="Smile 😀 é 漢字 and", temperature=0, echo=True, max_tokens=3),
    dict(prompt="emoji: 😀😁😂🤣😃😄", temperature=0, max_tokens=24),
    dict(prompt="こんにちは、", temperature=0, max_tokens=24),
])
def test_streaming_equals_not_streaming(server, body):
    """Traps 1, 3, 5, 18: the same text, the right indices, nothing lost around stops and split characters."""
    whole = server.complete(**body)
    texts, reasons, chunks = streamed(server, **body)
    for choice in whole["choices"]:
        assert texts.get(choice["index"], "") == choice["text"]
        assert reasons[choice["index"]] == choice["finish_reason"]
    assert len(reasons) == len(whole["choices"])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_chunk_only_when_asked(server):
    """Trap 17."""
    body = dict(prompt=[STORY, COUNT], temperature=0, n=2, max_tokens=3)
    _, _, chunks = streamed(server, **body)
    assert all("usage" not in chunk for chunk in chunks)
    _, _, chunks = streamed(server, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    whole = server.complete(**body)["usage"]
    assert chunks[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole[name]


@pytest.mark.speaks
def test_stop_cuts_before_the_string(server):
    """Traps 3 and 4: the stop string spans tokens and does not appear."""
    full = text(greedy(server, COUNT, max_tokens=24))
    stop = full[7:13]
    reply = greedy(server, COUNT, max_tokens=24, stop=stop)
    assert text(reply) == full[: full.index(stop)]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert text(greedy(server, COUNT, max_tokens=24, stop=["zzz", stop, full[10:15]])) == full[: full.index(stop)]


@pytest.mark.speaks
def test_end_token_and_ignore_eos(server):
    prompt = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    reply = greedy(server, prompt, max_tokens=200)
    assert reply["choices"][0]["finish_reason"] == "stop"
    count = reply["usage"]["completion_tokens"]
    longer = greedy(server, prompt, max_tokens=count + 20, ignore_eos=True)
    assert longer["choices"][0]["finish_reason"] == "length"
    assert longer["usage"]["completion_tokens"] == count + 20
    assert text(longer).startswith(text(reply))


def test_logprobs(server):
    tokens = server.tokenize(STORY)
    reply = greedy(server, max_tokens=5, logprobs=3)
    part = reply["choices"][0]["logprobs"]
    assert set(part) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert [len(part[name]) for name in part] == [5] * 4
    assert "".join(part["tokens"]) == text(reply)
    offset = len(STORY)
    for token, logprob, top, start in zip(part["tokens"], part["token_logprobs"], part["top_logprobs"], part["text_offset"]):
        assert start == offset
        offset += len(token)
        assert len(top) == 3 and max(top, key=top.get) == token and top[token] == logprob <= 0
    assert len(tokens) > 1


def test_logprobs_zero(server):
    """Trap 9: the chosen token's only."""
    part = greedy(server, max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert part["top_logprobs"] is None and all(value <= 0 for value in part["token_logprobs"])


def test_chosen_token_is_among_the_top(server):
    part = server.complete(prompt=STORY, temperature=2, seed=5, max_tokens=16, logprobs=1)["choices"][0]["logprobs"]
    for token, logprob, top in zip(part["tokens"], part["token_logprobs"], part["top_logprobs"]):
        assert top[token] == logprob and len(top) in (1, 2)


def test_echo_with_logprobs(server):
    """Traps 6, 7, 8: the prompt's entries come first, the first is null, offsets start at the prompt."""
    tokens = server.tokenize(STORY)
    reply = greedy(server, echo=True, max_tokens=0, logprobs=1)
    part = reply["choices"][0]["logprobs"]
    assert text(reply) == STORY and reply["choices"][0]["finish_reason"] == "length"
    assert "".join(part["tokens"]) == STORY and len(part["tokens"]) == len(tokens)
    assert part["token_logprobs"][0] is None and part["top_logprobs"][0] is None
    assert all(value <= 0 for value in part["token_logprobs"][1:])
    assert part["text_offset"][0] == 0
    assert reply["usage"]["completion_tokens"] == 0
    longer = greedy(server, echo=True, max_tokens=4, logprobs=1)["choices"][0]
    assert longer["logprobs"]["token_logprobs"][: len(tokens)] == part["token_logprobs"]
    assert "".join(longer["logprobs"]["tokens"]) == longer["text"]
    assert longer["text"] == STORY + text(greedy(server, max_tokens=4))


@pytest.mark.speaks
def test_echoed_logprobs_are_those_of_generation(server):
    """A generated token scored again as part of a prompt has the same log-probability."""
    made = greedy(server, max_tokens=6, logprobs=0)["choices"][0]
    scored = greedy(server, STORY + made["text"], echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert scored["tokens"][-6:] == made["logprobs"]["tokens"]
    assert scored["token_logprobs"][-6:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("body", [dict(max_tokens=6), dict(max_tokens=0, echo=True), dict(max_tokens=4, echo=True)])
def test_streamed_logprobs_equal_whole(server, body):
    """Trap 8: offsets go on from chunk to chunk."""
    body = dict(prompt="naïve 😀 text", temperature=0, logprobs=2, **body)
    whole = server.complete(**body)["choices"][0]["logprobs"]
    _, _, chunks = streamed(server, **body)
    joined = {name: [] for name in whole}
    for chunk in chunks:
        part = chunk["choices"][0]["logprobs"]
        for name in joined:
            joined[name] += part[name] if part else []
    assert joined == whole


def test_tokens_inside_characters(server):
    """A token that is part of a character reads bytes:...; the text is whole."""
    reply = server.complete(prompt="🦄🧿", echo=True, max_tokens=0, logprobs=0)
    tokens = reply["choices"][0]["logprobs"]["tokens"]
    joined = b"".join(
        bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode() for token in tokens)
    assert joined.decode() == reply["choices"][0]["text"] == "🦄🧿"
    assert any(token.startswith("bytes:\\x") for token in tokens)


def test_empty_prompt(server):
    """Trap 11: generates from the beginning token; the server stays alive."""
    reply = greedy(server, "", max_tokens=4)
    assert reply["usage"]["prompt_tokens"] == 1 and reply["usage"]["completion_tokens"] == 4
    assert greedy(server, ["", STORY], max_tokens=4)["choices"][1]["text"] == text(greedy(server, max_tokens=4))


def test_context_is_a_limit(start_server):
    server = start_server("--context", 64, "--kv-memory", "64M")
    tokens = (server.tokenize(STORY) * 20)
    reply = server.complete(prompt=tokens[:60], max_tokens=1000, ignore_eos=True)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] <= 5
    for prompt in (tokens[:65], [tokens[:10], tokens[:65]]):
        for stream in (False, True):  # trap 16: before the headers
            server.post("/v1/completions", dict(prompt=prompt, stream=stream)).expect_error(
                400, code="context_length_exceeded", param="prompt")
    server.post("/v1/chat/completions", dict(messages=[dict(role="user", content=STORY * 20)])).expect_error(
        400, code="context_length_exceeded", param="messages")
    assert server.get("/v1/models").json["data"][0]["max_model_len"] == 64


def test_many_choices(server):
    reply = server.complete(prompt=STORY, n=128, max_tokens=2, seed=1)
    assert [choice["index"] for choice in reply["choices"]] == list(range(128))
    assert reply["usage"]["completion_tokens"] == 128 * 2
    assert reply["usage"]["prompt_tokens"] == len(server.tokenize(STORY))


def test_no_tokens_asked_for(server):
    """max_tokens 0 is in range: an empty answer, with or without log-probabilities."""
    for extra in ({}, dict(logprobs=2), dict(stream=False, n=3)):
        reply = server.complete(prompt=STORY, max_tokens=0, **extra)
        for choice in reply["choices"]:
            assert (choice["text"], choice["finish_reason"]) == ("", "length")
            assert choice["logprobs"] is None or choice["logprobs"]["tokens"] == []
        assert reply["usage"]["completion_tokens"] == 0
        assert reply["usage"]["prompt_tokens"] > 0
