# SPDX-License-Identifier: Apache-2.0
"""Eviction policies as clients see them: chosen by the server and by requests, what usage and metrics say, and that
neither batch mates nor preemption nor streaming change what a pruned sequence answers."""

import concurrent.futures
import json
import os
import random
import subprocess

import openai
import pytest

from conftest import PATIENCE, SERVER, Stream, inspect_model, memory_of

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
POLICIES = ["random", "streaming", "h2o", "h2o_mean", "scissorhands", "tova", "snapkv", "pyramidkv", "adakv", "criticalkv",
            "keydiff", "knorm", "keyformer", "expected_attention", "cake", "laprox", "restkv", "rlkv", "ranker", "distillcache",
            "hybrid"]
EVERY_16 = ["criticalkv", "expected_attention", "laprox", "restkv", "ranker", "distillcache"]  # interval 16: between prunes the cache grows
STORY = ("The lighthouse keeper wrote a letter every evening. He described the colour of the water, the number of ships "
         "that had passed, and the birds that rested on the rail. ")
LONG = "".join(f"Day {day}. {STORY}" for day in range(1, 13)) + "On the last day he wrote:"
SHORT = "Once upon a"


def answer(server, prompt=LONG, kv_cache=None, **options):
    body = dict(prompt=prompt, max_tokens=12, temperature=0, seed=5, ignore_eos=True, logprobs=0)
    return server.complete(**{**body, **options}, **({} if kv_cache is None else {"kv_cache": kv_cache}))


def tokens(reply):
    return [choice["logprobs"]["tokens"] for choice in reply["choices"]]


def logprobs(reply):
    return [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]]


@pytest.fixture(scope="module")
def full(shared):
    return answer(shared)


@pytest.fixture(scope="module")
def alone(shared):
    """alone(policy): the long prompt's answer with a quarter of its cache, computed once."""
    known = {}

    def get(policy):
        if policy not in known:
            known[policy] = answer(shared, kv_cache={"policy": policy, "ratio": 0.25})
        return known[policy]

    return get


# What is there


def test_models_list_the_policies(server):
    model = server.get("/v1/models").json["data"][0]
    assert model == server.get(f"/v1/models/{model['id']}").json
    assert model["kv_cache"] == {"policy": "full", "ratio": 1}
    assert model["kv_policies"][0] == "full"
    assert set(POLICIES) <= set(model["kv_policies"]) and len(set(model["kv_policies"])) == len(model["kv_policies"])


def test_every_listed_policy_answers(server):
    for policy in server.get("/v1/models").json["data"][0]["kv_policies"]:
        usage = answer(server, STORY * 4, {"policy": policy, "tokens": 48}, max_tokens=3)["usage"]
        assert usage["completion_tokens"] == 3 and (usage["kv_tokens_kept"] < usage["kv_tokens_seen"]) == (policy != "full")


def test_a_model_without_a_trained_policy_says_so(start_server, tmp_path):
    server = start_server(env={"DISTILLCACHE_POLICIES": str(tmp_path)})
    for kv_cache in ({"policy": "distillcache"}, {"policy": "ranker", "ratio": 0.5}, {"policy": "hybrid", "base": "ranker"}):
        error = server.post(COMPLETION, dict(prompt="a", kv_cache=kv_cache)).expect_error(400, param="kv_cache.policy")
        assert "is trained for this model" in error["message"] and "distillcache train" in error["message"]
    # Where nothing is evicted, nothing is scored.
    assert answer(server, SHORT, {"policy": "distillcache", "ratio": 1})["usage"]["completion_tokens"] == 12


def test_a_server_does_not_start_with_a_policy_that_is_not_trained(tmp_path):
    command = [SERVER, "serve", "--model", os.environ["DISTILLCACHE_TEST_MODEL"], "--port", "0"]
    for policy, words in (("distillcache", b"is trained for this model"), (f"ranker:{tmp_path}/none", b"none: No such file")):
        done = subprocess.run([*command, "--kv-policy", policy], stderr=subprocess.PIPE, timeout=PATIENCE,
                              env={**os.environ, "DISTILLCACHE_POLICIES": str(tmp_path)})
        assert done.returncode != 0 and words in done.stderr, done.stderr


def test_requests_change_what_a_network_was_trained_with(server):
    """The network's interval of 16 counts unless the request names another one."""
    kept = {}
    for interval in (None, 1):
        kv_cache = {"policy": "distillcache", "tokens": 64, **({} if interval is None else {"interval": interval})}
        kept[interval] = answer(server, kv_cache=kv_cache, max_tokens=11)["usage"]["kv_tokens_kept"]
    assert kept[None] > kept[1] + 8
    error = server.post(COMPLETION, dict(prompt="a", kv_cache={"policy": "distillcache", "tokens": 1}))
    assert "summary" in error.expect_error(400, param="kv_cache")["message"]


# Usage


def test_full_keeps_everything(full):
    usage = full["usage"]
    seen = usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["kv_tokens_seen"] in (seen - 1, seen)  # the last token need not be cached
    assert usage["kv_tokens_kept"] == usage["kv_tokens_seen"]
    assert usage["kv_bytes"] == usage["kv_bytes_full"] > 0


@pytest.mark.repeats
@pytest.mark.parametrize("policy", POLICIES)
def test_a_quarter_is_kept(alone, full, policy):
    usage = alone(policy)["usage"]
    seen = usage["kv_tokens_seen"]
    assert seen == full["usage"]["kv_tokens_seen"] and usage["completion_tokens"] == 12
    most = seen // 4 + (15 if policy in EVERY_16 else 1)
    if policy == "rlkv":  # whole heads: the nearest number of them that fits the budget
        assert 0.7 * most <= usage["kv_tokens_kept"] <= most
    else:
        assert seen // 4 - 1 <= usage["kv_tokens_kept"] <= most
    assert usage["kv_bytes_full"] == full["usage"]["kv_bytes_full"]
    # Statistics included. Those of some do not grow with the prompt, and weigh as much as some hundred tokens: the
    # outputs of a window's queries, the moments of all queries.
    part = {"laprox": 0.85, "restkv": 0.85, "expected_attention": 1.2}.get(policy, 0.65)
    assert usage["kv_bytes"] < part * usage["kv_bytes_full"]


@pytest.mark.parametrize("kv_cache, kept", [
    (dict(policy="streaming", tokens=100), 100), (dict(policy="h2o", ratio=0.5), 0.5), (dict(policy="h2o", ratio=1), 1.0),
    (dict(policy="knorm", ratio=0.01), 32), (dict(policy="knorm", ratio=0.01, minimum=8), 8),
    (dict(policy="streaming", ratio=0.1, sinks=2, positions="cache"), 0.1), (dict(policy="h2o", tokens=100000), 1.0),
    (dict(policy="full", ratio=0.25), 1.0), (dict(policy="snapkv", ratio=0.25, window=16, kernel=5), 0.25),
    (dict(policy="h2o", tokens=64, protect_recent=8, protect_sinks=4), 64),
    (dict(policy="knorm", tokens=64, scope="layer", floor=0.5), 64), (dict(policy="knorm", tokens=64, scope="model"), 64),
    (dict(policy="h2o", tokens=128, prefill_prune_every=100), 128)], ids=str)
def test_budgets(server, kv_cache, kept):
    usage = answer(server, kv_cache=kv_cache)["usage"]
    expected = int(kept * usage["kv_tokens_seen"]) if isinstance(kept, float) else kept
    assert abs(usage["kv_tokens_kept"] - expected) <= 1


def test_interval_lets_the_cache_grow(server):
    usage = answer(server, kv_cache=dict(policy="knorm", tokens=64, interval=16), max_tokens=11)["usage"]
    assert 64 + 9 <= usage["kv_tokens_kept"] <= 64 + 11


def test_prompt_part_is_frozen_and_answers_are_kept(server):
    short = answer(server, kv_cache=dict(policy="snapkv", ratio=0.25, decode="keep"), max_tokens=1)["usage"]
    long = answer(server, kv_cache=dict(policy="snapkv", ratio=0.25, decode="keep"), max_tokens=41)["usage"]
    assert long["kv_tokens_kept"] == short["kv_tokens_kept"] + 40


def test_choices_are_added_up(server, alone):
    one, two = alone("h2o")["usage"], answer(server, kv_cache={"policy": "h2o", "ratio": 0.25}, n=2)["usage"]
    for name in ("kv_tokens_seen", "kv_bytes", "kv_bytes_full"):
        assert two[name] == 2 * one[name], name
    assert abs(two["kv_tokens_kept"] - 2 * one["kv_tokens_kept"]) <= 1


def test_openai_client_reads_them(server, alone):
    client = server.client()
    reply = client.completions.create(model=server.model, prompt=LONG, max_tokens=12, temperature=0, seed=5,
                                      extra_body={"ignore_eos": True, "kv_cache": {"policy": "tova", "ratio": 0.25}})
    expected = alone("tova")
    assert reply.choices[0].text == expected["choices"][0]["text"]
    for name in ("kv_tokens_seen", "kv_tokens_kept", "kv_bytes", "kv_bytes_full"):
        assert reply.usage.model_extra[name] == expected["usage"][name]


# Answers


@pytest.mark.repeats
@pytest.mark.parametrize("policy", POLICIES)
def test_short_prompts_are_as_full(server, policy):
    """Fewer tokens than the smallest budget: the very same numbers."""
    expected, pruned = answer(server, SHORT), answer(server, SHORT, {"policy": policy, "ratio": 0.25})
    assert pruned["usage"]["kv_tokens_kept"] == expected["usage"]["kv_tokens_kept"] <= 32
    assert (tokens(pruned), logprobs(pruned)) == (tokens(expected), logprobs(expected))


@pytest.mark.repeats
def test_budgets_make_a_difference(alone, full):
    different = [policy for policy in POLICIES if logprobs(alone(policy)) != logprobs(full)]
    assert different == POLICIES


def test_the_same_in_a_batch_of_different_policies(server, alone, full):
    """Some of each kind: tests/unit/test_scheduler_policy.c has all of them, on a small model."""
    some = ["random", "streaming", "h2o", "tova", "snapkv", "adakv", "keyformer", "laprox", "hybrid"]
    wanted = {policy: alone(policy) for policy in some}
    with concurrent.futures.ThreadPoolExecutor(len(some) + 1) as pool:
        replies = {policy: pool.submit(answer, server, kv_cache={"policy": policy, "ratio": 0.25}) for policy in some}
        plain = pool.submit(answer, server)
        for policy, reply in replies.items():
            assert tokens(reply.result()) == tokens(wanted[policy]), policy
            assert logprobs(reply.result()) == logprobs(wanted[policy]), policy
        assert tokens(plain.result()) == tokens(full)


@pytest.mark.repeats
@pytest.mark.parametrize("policy", ["random", "streaming", "h2o", "snapkv", "keyformer", "laprox"])
def test_the_same_again_and_on_another_server(server, start_server, alone, policy):
    """The first server may reuse prefixes; this one computes small chunks and shares nothing."""
    assert tokens(answer(server, kv_cache={"policy": policy, "ratio": 0.25})) == tokens(alone(policy))
    other = start_server("--no-prefix-sharing", "--prefill-chunk", 50, "--batch-tokens", 64)
    assert tokens(answer(other, kv_cache={"policy": policy, "ratio": 0.25})) == tokens(alone(policy))
    other.stop()


@pytest.mark.repeats
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "random"])
def test_choices_differ_only_by_their_seeds(server, policy):
    body = dict(kv_cache={"policy": policy, "ratio": 0.25}, temperature=1.0, max_tokens=16)
    both = tokens(answer(server, n=2, **body))
    assert both[0] != both[1]
    assert tokens(answer(server, n=2, **body)) == both
    assert tokens(answer(server, **body)) == both[:1]


@pytest.mark.repeats
def test_randomness_follows_the_seed(server):
    kv_cache = {"policy": "random", "ratio": 0.1}
    first, second = (logprobs(answer(server, kv_cache=kv_cache, seed=seed)) for seed in (1, 2))
    assert first != second
    assert logprobs(answer(server, kv_cache={**kv_cache, "seed": 1}, seed=2)) == first


@pytest.mark.repeats
@pytest.mark.parametrize("policy", ["streaming", "snapkv", "hybrid"])
def test_streams_are_the_same(server, alone, policy):
    text, usage = "", None
    for event in Stream(server, COMPLETION, prompt=LONG, max_tokens=12, temperature=0, seed=5, ignore_eos=True,
                        kv_cache={"policy": policy, "ratio": 0.25}, stream_options={"include_usage": True}):
        if event != "[DONE]":
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event["usage"] or usage
    expected = alone(policy)
    assert text == expected["choices"][0]["text"]
    for name in ("kv_tokens_seen", "kv_tokens_kept", "kv_bytes", "kv_bytes_full", "completion_tokens"):
        assert usage[name] == expected["usage"][name], name


def test_chats_choose_too(server):
    client = server.client()
    messages = [{"role": "user", "content": LONG}]
    reply = client.chat.completions.create(model=server.model, messages=messages, max_tokens=8, temperature=0,
                                           extra_body={"kv_cache": {"policy": "snapkv", "ratio": 0.25}})
    usage = reply.usage.model_extra
    assert abs(usage["kv_tokens_kept"] - usage["kv_tokens_seen"] // 4) <= 1
    chunks = list(client.chat.completions.create(
        model=server.model, messages=messages, max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"kv_cache": {"policy": "snapkv", "ratio": 0.25}}))
    assert chunks[-1].usage.model_extra == usage
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == reply.choices[0].message.content


def test_limits_count_all_tokens(server, start_server):
    """Trap 28: what was evicted counts for max_tokens and the context."""
    reply = answer(server, kv_cache={"policy": "streaming", "tokens": 40}, max_tokens=100)
    assert reply["usage"]["completion_tokens"] == 100 and reply["choices"][0]["finish_reason"] == "length"
    small = start_server("--context", 520)
    reply = answer(small, kv_cache={"policy": "streaming", "tokens": 40}, max_tokens=100)
    assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["total_tokens"] <= 521
    error = small.post(COMPLETION, dict(prompt=LONG * 2, kv_cache={"policy": "streaming", "tokens": 40}))
    error.expect_error(400, code="context_length_exceeded", param="prompt")
    small.stop()


def test_early_prunes_take_prompts_that_the_cache_cannot_hold(start_server):
    small = start_server("--kv-memory", memory_of(360))
    most = small.get("/v1/models").json["data"][0]["max_model_len"]
    long = [20 + i % 500 for i in range(2 * most)]
    body = dict(prompt=long, max_tokens=5, ignore_eos=True)
    for stream in (False, True):
        reply = small.post(COMPLETION, dict(body, stream=stream))
        reply.expect_error(400, code="context_length_exceeded", param="prompt")
        assert f"is {most} tokens" in reply.json["error"]["message"]
        reply = small.post(COMPLETION, dict(body, stream=stream, kv_cache={"policy": "h2o", "tokens": 40}))
        reply.expect_error(400, code="context_length_exceeded", param="prompt")
        assert "prefill_prune_every" in reply.json["error"]["message"]
    usage = small.complete(**body, kv_cache={"policy": "h2o", "tokens": 40, "prefill_prune_every": 64})["usage"]
    assert usage["prompt_tokens"] == 2 * most and usage["completion_tokens"] == 5
    assert usage["kv_tokens_kept"] == 40
    small.idle()
    small.stop()


# Memory


def test_pages_come_back(server):
    before = server.idle()
    answer(server, kv_cache={"policy": "h2o", "ratio": 0.25})
    after = server.idle()
    assert after["kv_pages_freed_by_policy_total"] > before["kv_pages_freed_by_policy_total"]
    assert after["policy_seconds"] > before["policy_seconds"]
    assert after["kv_bytes"] == after["kv_tokens_seen"] == after["kv_tokens_kept"] == after["kv_swapped_bytes"] == 0


def test_gauges_show_what_running_sequences_keep(server):
    stream = Stream(server, COMPLETION, prompt=LONG, max_tokens=1000, ignore_eos=True, kv_cache={"policy": "h2o", "ratio": 0.25})
    events = iter(stream)
    for _ in range(8):
        next(events)
    metrics = server.metrics()
    assert metrics["kv_tokens_seen"] > 400
    assert abs(metrics["kv_tokens_kept"] - metrics["kv_tokens_seen"] / 4) <= 2
    assert 0 < metrics["kv_bytes"] < metrics["kv_bytes_full"] / 2
    stream.close()
    server.idle()


@pytest.mark.parametrize("swap", ["64M", "0"])
def test_the_same_after_preemption(start_server, alone, swap):
    """Short prompts let more sequences in than there is memory for when their answers have grown; with no memory to swap
    to, they are computed again."""
    server = start_server("--kv-memory", memory_of(360), "--kv-swap", swap, "--no-prefix-sharing")
    wanted = ["h2o", "snapkv", "streaming"]
    body = dict(prompt=STORY, max_tokens=120)
    expected = {policy: tokens(answer(server, kv_cache={"policy": policy, "ratio": 0.75}, **body)) for policy in wanted}
    assert server.idle()["num_preemptions_total"] == 0
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        replies = [(policy, pool.submit(answer, server, kv_cache={"policy": policy, "ratio": 0.75}, **body))
                   for policy in wanted * 2]
        for policy, reply in replies:
            assert tokens(reply.result()) == expected[policy], policy
    metrics = server.idle()
    assert metrics["num_preemptions_total"] > 0, "the test did not force any preemption"
    assert (metrics["kv_swaps_total"] > 0) == (swap != "0") and (metrics["kv_replays_total"] > 0) == (swap == "0")
    server.stop()


# The server's own policy


def test_server_default(start_server, alone, full):
    server = start_server("--kv-policy", "snapkv", "--kv-ratio", "0.25")
    assert server.get("/v1/models").json["data"][0]["kv_cache"] == {"policy": "snapkv", "ratio": 0.25}
    assert tokens(answer(server)) == tokens(alone("snapkv"))
    assert tokens(answer(server, kv_cache={"policy": "full"})) == tokens(full)
    assert tokens(answer(server, kv_cache={"policy": "h2o"})) == tokens(alone("h2o"))
    usage = answer(server, kv_cache={"ratio": 0.5, "window": 16})["usage"]
    assert abs(usage["kv_tokens_kept"] - usage["kv_tokens_seen"] // 2) <= 1
    server.post(COMPLETION, dict(prompt="a", kv_cache={"sinks": 4})).expect_error(400, param="kv_cache.sinks")
    ended = [event for event in server.events() if event["event"] == "generation ended"]
    assert ended[0]["kv_policy"].startswith("snapkv, ratio 0.25") and ended[1]["kv_policy"].startswith("full")
    assert ended[2]["kv_policy"].startswith("h2o, ratio 0.25") and "0.5" in ended[3]["kv_policy"]
    server.stop()


def test_server_default_by_tokens_and_file(start_server, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("kv_policy: h2o,recent=0.25\nkv_tokens: 80\n")
    server = start_server("--config", file)
    assert server.get("/v1/models").json["data"][0]["kv_cache"] == {"policy": "h2o", "tokens": 80}
    assert answer(server)["usage"]["kv_tokens_kept"] == 80
    usage = answer(server, kv_cache={"ratio": 0.5})["usage"]
    assert abs(usage["kv_tokens_kept"] - usage["kv_tokens_seen"] // 2) <= 1
    server.stop()


def write_gates(path, layers, kv_heads):
    """Heads of even number keep everything."""
    numbers = [[float((layer * kv_heads + head) % 2 == 0) for head in range(kv_heads)] for layer in range(layers)]
    path.write_text(json.dumps({"gates": numbers}))
    return path


def heads():
    shape = inspect_model()["shape"]
    return {name: shape[name] for name in ("layers", "kv_heads")}


def test_gate_files(start_server, tmp_path):
    """Half of the heads keep everything, the others 16 sinks and 64 recent tokens. Requests use the server's gates."""
    server = start_server("--kv-policy", f"rlkv:{write_gates(tmp_path / 'gates.json', **heads())}")
    assert server.get("/v1/models").json["data"][0]["kv_cache"] == {"policy": "rlkv", "sparsity": 0.5}
    for kv_cache in (None, {"policy": "rlkv"}, {"sinks": 16}):
        usage = answer(server, kv_cache=kv_cache)["usage"]
        assert abs(usage["kv_tokens_kept"] - (usage["kv_tokens_seen"] + 80) / 2) <= 1
    assert answer(server, kv_cache={"sparsity": 1})["usage"]["kv_tokens_kept"] == 80
    assert answer(server, kv_cache={"sparsity": 0})["usage"]["kv_tokens_kept"] == usage["kv_tokens_seen"]
    server.stop()


def test_gates_of_another_model(tmp_path):
    own = heads()
    other = dict(own, layers=own["layers"] + 17)
    done = serve("--kv-policy", f"hybrid:{write_gates(tmp_path / 'gates.json', **other)}")
    assert done.returncode == 1
    assert f"for {other['layers']} layers" in done.stderr and f"model has {own['layers']} of" in done.stderr, done.stderr


def serve(*options):
    """A server that cannot start."""
    return subprocess.run([SERVER, "serve", "--model", os.environ["DISTILLCACHE_TEST_MODEL"], "--port", "0", *options],
                          capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("options, words", [
    (("--kv-policy", "h3o"), "--kv-policy h3o full h2o snapkv"), (("--kv-policy", "snapkv,windw=1"), "--kv-policy windw window"),
    (("--kv-ratio", "0"), "--kv-ratio above"), (("--kv-ratio", "1.5"), "--kv-ratio 1.5"), (("--kv-tokens", "-1"), "--kv-tokens"),
    (("--kv-policy", "h2o", "--kv-ratio", "0.5", "--kv-tokens", "9"), "kv-ratio kv-tokens exclude"),
    (("--kv-policy", "h2o", "--kv-policy", "tova"), "one policy"), (("--kv-policy", "rlkv:/nowhere.json"), "/nowhere.json"),
    (("--kv-swap", "many"), "--kv-swap")], ids=str)
def test_wrong_options(options, words):
    done = serve(*options)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert [word for word in words.split() if word not in done.stderr] == [], done.stderr


# What is refused


WRONG = [
    ("h2o", "kv_cache"), ([], "kv_cache"), (0.5, "kv_cache"), ({"policy": "h3o"}, "kv_cache.policy"),
    ({"policy": 1}, "kv_cache.policy"), ({"policy": "H2O"}, "kv_cache.policy"), ({"policy": "rlkv:/etc/passwd"}, "kv_cache.policy"),
    ({"policy": "h2o", "ratio": 0}, "kv_cache.ratio"), ({"policy": "h2o", "ratio": 1.01}, "kv_cache.ratio"),
    ({"policy": "h2o", "ratio": "0.5"}, "kv_cache.ratio"), ({"policy": "h2o", "ratio": [0.5]}, "kv_cache.ratio"),
    ({"policy": "h2o", "ratio": True}, "kv_cache.ratio"), ({"policy": "h2o", "tokens": 0}, "kv_cache.tokens"),
    ({"policy": "h2o", "tokens": 1.5}, "kv_cache.tokens"), ({"policy": "h2o", "tokens": 2**40}, "kv_cache.tokens"),
    ({"policy": "h2o", "ratio": 0.5, "tokens": 64}, "kv_cache.tokens"), ({"policy": "h2o", "window": 8}, "kv_cache.window"),
    ({"policy": "snapkv", "window": 0}, "kv_cache.window"), ({"policy": "snapkv", "decode": "stop"}, "kv_cache.decode"),
    ({"policy": "streaming", "positions": 1}, "kv_cache.positions"), ({"policy": "h2o", "scope": "all"}, "kv_cache.scope"),
    ({"policy": "rlkv", "gates": "/etc/passwd"}, "kv_cache.gates"), ({"policy": "h2o", "nonsense": 1}, "kv_cache.nonsense"),
    ({"window": 8}, "kv_cache.window"), ({"nonsense": None}, "kv_cache.nonsense"),
    ({"policy": "h2o", "nonsense": None}, "kv_cache.nonsense")]


@pytest.mark.parametrize("kv_cache, param", WRONG, ids=lambda value: json.dumps(value)[:40])
def test_wrong_requests(server, kv_cache, param):
    before = server.metrics()["prompt_tokens_total"]
    for stream in (False, True):
        server.post(COMPLETION, dict(prompt="a", kv_cache=kv_cache, stream=stream)).expect_error(400, param=param)
    server.post(CHAT, dict(messages=[{"role": "user", "content": "a"}], kv_cache=kv_cache)).expect_error(400, param=param)
    assert server.metrics()["prompt_tokens_total"] == before


def test_wrong_policies_are_told_the_right_ones(server):
    message = server.post(COMPLETION, dict(prompt="a", kv_cache={"policy": "lru"})).json["error"]["message"]
    assert "lru" in message
    for policy in server.get("/v1/models").json["data"][0]["kv_policies"]:
        assert policy in message
    with pytest.raises(openai.BadRequestError) as raised:
        server.client().completions.create(model=server.model, prompt="a", extra_body={"kv_cache": {"policy": "snapkv", "sinks": 1}})
    assert raised.value.param == "kv_cache.sinks" and "window" in str(raised.value)


def test_any_object_is_answered(fake):
    """Whatever kv_cache holds, the answer is a result or a 400 that names a part of it."""
    draw = random.Random(7)
    names = ["policy", "summary", "network", "ratio", "tokens", "minimum", "interval", "window", "kernel", "sinks", "recent", "scope", "floor", "decode",
             "seed", "gates", "x", "", "\u00e4"]
    values = [*POLICIES, "full", None, True, False, 0, 1, -1, 0.5, 0.25, 3.0, 16, 64, 1e300, -1e300, 1e-300, 2**31, 2**63 - 1, "head",
              "layer", "keep", "", "16", "0.5", "\u00e4\u0000", [], {}, [1], {"policy": "h2o"}]
    answered = 0
    for _ in range(600):
        kv_cache = {draw.choice(names): draw.choice(values) for _ in range(draw.randint(0, 4))}
        if draw.random() < 0.5:
            kv_cache["policy"] = draw.choice(POLICIES)
        reply = fake.post(COMPLETION, dict(prompt="a", max_tokens=1, kv_cache=kv_cache))
        assert reply.status in (200, 400), (kv_cache, reply.body)
        if reply.status == 400:
            assert reply.json["error"]["param"].startswith("kv_cache"), (kv_cache, reply.body)
        answered += reply.status == 200
    assert answered > 50


def test_usage_is_added_up_over_choices_and_rounded(fake):
    """The fake scheduler keeps a quarter of a token beyond the budget, at 100 bytes a token."""
    usage = fake.complete(prompt=["a" * 400, "b" * 1000], n=2, max_tokens=10, kv_cache={"policy": "knorm", "ratio": 0.5})["usage"]
    assert usage["kv_tokens_seen"] == 2 * (410 + 1010)
    assert usage["kv_tokens_kept"] == 2 * (205 + 505) + 1
    assert usage["kv_bytes"] == 2 * (205 + 505) * 100 and usage["kv_bytes_full"] == 2 * (410 + 1010) * 100
