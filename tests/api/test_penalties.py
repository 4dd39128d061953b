# SPDX-License-Identifier: Apache-2.0
"""What changes which tokens are chosen: biases, penalties, ends, candidates. What should be chosen is computed here from
the log-probabilities that the server reports, which are the model's own, whatever is done to them before the choice."""

import collections
import math

import pytest

from conftest import Stream

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Once upon a time, there was a little girl who lived in a village near the forest."
LOOP = "one two one two one two one two one two one two one two"


def greedy(server, prompt=STORY, **fields):
    return server.complete(prompt=prompt, **{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields})


def ids_of(server, choice):
    """The tokens that a choice's text came from."""
    ids = [server.tokenize(token) for token in choice["logprobs"]["tokens"]]
    assert all(len(one) == 1 for one in ids), choice
    return [one[0] for one in ids]


def chosen(server, prompt=STORY, **fields):
    return ids_of(server, greedy(server, prompt, logprobs=0, **fields)["choices"][0])


@pytest.mark.speaks
@pytest.mark.parametrize("prompt, presence, frequency", [(STORY, 2, 0), (LOOP, 0, 2), (STORY, -1, -0.5), (LOOP, 0.7, 0.3)])
def test_penalties_by_the_formula(server, prompt, presence, frequency):
    """Each step's choice is the largest of logit - presence - frequency * count; the prompt's tokens do not count."""
    plain = greedy(server, prompt, logprobs=5)["choices"][0]["logprobs"]
    choice = greedy(server, prompt, logprobs=5, max_tokens=40, presence_penalty=presence, frequency_penalty=frequency)["choices"][0]
    logprobs, counts, decided, changed = choice["logprobs"], collections.Counter(), 0, 0
    assert logprobs["token_logprobs"][0] == plain["token_logprobs"][0]  # of the model itself, and nothing is there yet
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"]):
        top = {name: value for name, value in top.items() if not name.startswith("<|")}  # never chosen: ignore_eos
        moved = {name: value - (presence + frequency * counts[name] if counts[name] else 0) for name, value in top.items()}
        # A token that is not reported has at most the lowest reported value, and its reward if penalties are that.
        lowest = min(top.values())
        unseen = max([lowest] + [lowest - presence - frequency * count for name, count in counts.items() if name not in top])
        ranked = sorted(moved.values(), reverse=True)
        if ranked[0] > unseen + 1e-3 and (len(ranked) == 1 or ranked[0] > ranked[1] + 1e-3):
            decided += 1
            changed += moved[max(top, key=top.get)] < ranked[0] - 1e-3
            assert token == max(moved, key=moved.get)
        counts[token] += 1
    assert decided >= 10
    assert presence + frequency < 0 or prompt == STORY or changed > 0


@pytest.mark.speaks
def test_repetition_penalty_counts_the_prompt(server):
    """Strong enough, it lets nothing come again, of the prompt or the answer."""
    ids = chosen(server, LOOP, repetition_penalty=10)
    assert len(set(ids)) == len(ids) and not set(ids) & set(server.tokenize(LOOP))
    assert set(chosen(server, LOOP)) & set(server.tokenize(LOOP))
    assert chosen(server, LOOP, repetition_penalty=1) == chosen(server, LOOP)


def test_logit_bias(server):
    best, second = chosen(server, max_tokens=1)[0], None
    top = greedy(server, max_tokens=1, logprobs=5)["choices"][0]["logprobs"]["top_logprobs"][0]
    order = [server.tokenize(token)[0] for token in sorted(top, key=top.get, reverse=True)]
    values = sorted(top.values(), reverse=True)
    assert order[0] == best
    second = order[1]
    gap = values[0] - values[1]
    for bias, expected in (({best: -100}, second), ({second: gap + 0.01}, second), ({second: gap - 0.01}, best),
                           ({best: -gap - 0.01}, second), ({best: -100, second: -100}, order[2]), ({best: 0}, best)):
        for path in ("whole", "stream"):
            fields = dict(prompt=STORY, temperature=0, max_tokens=1, logprobs=1, logit_bias={str(k): v for k, v in bias.items()})
            choice = server.complete(**fields)["choices"][0] if path == "whole" else \
                next(iter(Stream(server, COMPLETION, **fields)))["choices"][0]
            assert ids_of(server, choice) == [expected]
            assert math.isclose(choice["logprobs"]["token_logprobs"][0], values[order.index(expected)], abs_tol=1e-6)
    wanted = server.tokenize(" banana")[0]
    assert set(chosen(server, logit_bias={str(wanted): 100}, max_tokens=4)) == {wanted}
    assert set(chosen(server, logit_bias={str(wanted): 100}, max_tokens=4, temperature=2, seed=3)) == {wanted}


def test_chats_have_them_too(server):
    wanted = server.tokenize(" banana")[0]
    message = server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Say something."}], max_tokens=3, temperature=0,
        logit_bias={str(wanted): 100}).choices[0].message
    assert message.content == " banana banana banana"
    plain, penalised = (server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Say one one one one one."}], max_tokens=40, temperature=0,
        frequency_penalty=penalty, presence_penalty=penalty, extra_body={"ignore_eos": True}).choices[0].message.content
        for penalty in (0, 2))
    assert plain != penalised
    assert server.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "best_of": 2}).status == 400


@pytest.mark.speaks
def test_min_tokens_and_stop_token_ids(server):
    ids = chosen(server)
    stop = next(token for i, token in enumerate(ids) if i >= 4 and token not in ids[:i])
    at = ids.index(stop)
    choice = greedy(server, logprobs=0, stop_token_ids=[stop])["choices"][0]
    assert choice["finish_reason"] == "stop" and ids_of(server, choice) == ids[:at]
    assert greedy(server, stop_token_ids=[stop])["usage"]["completion_tokens"] == at + 1
    held = greedy(server, logprobs=0, stop_token_ids=[stop], min_tokens=at + 1)["choices"][0]
    assert ids_of(server, held)[:at] == ids[:at] and ids_of(server, held)[at] != stop
    exact = greedy(server, logprobs=0, stop_token_ids=[stop], min_tokens=at)["choices"][0]
    assert ids_of(server, exact) == ids[:at]
    # End tokens are held back in the same way, here one that is wanted very much.
    end = next(token for token in range(3) if not greedy(server, ignore_eos=False, logit_bias={str(token): 100})["choices"][0]["text"])
    short = greedy(server, ignore_eos=False, logit_bias={str(end): 100}, min_tokens=6)
    assert short["choices"][0]["finish_reason"] == "stop" and short["usage"]["completion_tokens"] == 7
    assert chosen(server, ignore_eos=False, logit_bias={str(end): 100}, min_tokens=6) == ids[:6]


def test_best_of(server):
    """The candidates are those of n = best_of; the best by mean log-probability come first."""
    fields = dict(prompt=[STORY, LOOP], seed=11, temperature=1.3, max_tokens=8, ignore_eos=True)
    every = server.complete(**fields, n=6, logprobs=0)["choices"]

    def mean(choice):
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    for n in (1, 2, 5):
        for logprobs in (None, 2):
            reply = server.complete(**fields, n=n, best_of=6, logprobs=logprobs)
            assert [choice["index"] for choice in reply["choices"]] == list(range(2 * n))
            for prompt in range(2):
                best = sorted(every[6 * prompt:6 * prompt + 6], key=mean, reverse=True)[:n]
                got = reply["choices"][n * prompt:n * prompt + n]
                assert [choice["text"] for choice in got] == [choice["text"] for choice in best]
                assert all((choice["logprobs"] is None) == (logprobs is None) for choice in got)
            assert reply["usage"]["completion_tokens"] == 2 * 6 * 8
    server.post(COMPLETION, {**fields, "best_of": 6, "stream": True}).expect_error(400, param="best_of")


def test_same_alone_and_among_others(server):
    """Penalties are of the request, whoever shares its steps."""
    fields = dict(seed=5, temperature=0.9, max_tokens=20, frequency_penalty=1, presence_penalty=0.5, repetition_penalty=1.2,
                  logit_bias={"30": 3, "500": -5})
    alone = server.complete(prompt=STORY, **fields)["choices"][0]["text"]
    others = [Stream(server, COMPLETION, prompt=LOOP, max_tokens=30, temperature=1, frequency_penalty=-2, ignore_eos=True)
              for _ in range(4)]
    assert server.complete(prompt=STORY, n=2, **fields)["choices"][0]["text"] == alone
    for stream in others:
        assert list(stream)[-1] == "[DONE]"
