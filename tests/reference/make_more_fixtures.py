"""Writes fixtures/policy_schedules.json: what policy_scores.json leaves out (reference/schedules.py).

    python make_more_fixtures.py MODEL.gguf

Each case names its policy, its options as the server spells them, and its budget; then as in policy_scores.json: what is kept after the
prompt, the tokens fed, the top 5 after each, and what is kept in the end. `counts_by_step`: slots of (layer, head) 0,0 after each step.
"""
import sys

import numpy as np

import texts
from make_fixtures import B_MIN, MODEL_NAME, NOISE_SEED, STEPS, kept, top, write
from reference import policies as po
from reference.model import Model, log_softmax
from reference.schedules import MORE_POLICIES, ScheduledSequence
from reference.tokenizer import ByteLevelTokenizer

POLICIES = {**po.POLICIES, **MORE_POLICIES}


def gates(layers, heads):
    """A gate file: numbers in [0, 1], some equal."""
    return np.round(np.random.default_rng(7).random((layers, heads)), 1)


def cases(config):
    """(policy, budget, keyword arguments, options as the server spells them)."""
    some = gates(config.n_layers, config.n_kv_heads)
    tokens, ratio = po.Budget(tokens=64), po.Budget(ratio=0.25, b_min=B_MIN)
    yield "random", tokens, {}, {}
    yield "streaming", tokens, {"cache_positions": True}, {"positions": "cache"}
    yield "streaming", ratio, {"cache_positions": True}, {"positions": "cache"}
    yield "h2o", tokens, {"interval": 3}, {"interval": "3"}
    yield "h2o", ratio, {}, {}
    yield "snapkv", tokens, {"frozen_prompt": True}, {"decode": "keep"}
    yield "snapkv", ratio, {"interval": 4}, {"interval": "4"}
    for policy in ("streaming", "h2o", "snapkv", "tova", "cake", "random", "keydiff", "scissorhands"):
        yield policy, ratio, {"prefill_prune_every": 48}, {"prefill_prune_every": "48"}
    yield "snapkv", tokens, {"prefill_prune_every": 50}, {"prefill_prune_every": "50"}
    yield "h2o_mean", tokens, {"protect_recent": 12, "protect_sinks": 3}, {"protect_recent": "12", "protect_sinks": "3"}
    yield "keydiff", tokens, {"protect_recent": 20}, {"protect_recent": "20"}
    yield "rlkv", tokens, {"gates": some}, {"gates": some}
    yield "rlkv", tokens, {"gates": some, "sparsity": 0.3}, {"gates": some, "sparsity": "0.3"}
    yield "rlkv", tokens, {}, {}
    yield "hybrid", ratio, {"gates": some}, {"gates": some}
    yield "hybrid", tokens, {}, {}


def decode(sequence, logits):
    fed, tops, counts = [], [], []
    for _ in range(STEPS):
        fed.append(int(np.argmax(logits)))
        logits = sequence.step(fed[-1])
        tops.append(top(log_softmax(logits)))
        counts.append(len(sequence.cache.heads[0][0].positions))
    return {"fed": fed, "top5": tops, "counts_by_step": counts, "kept": kept(sequence)}


def run(model, ids, policy, budget, keywords, options):
    sequence = ScheduledSequence(model, POLICIES[policy], budget, seed=NOISE_SEED, **keywords)
    logits = sequence.read_prompt(ids)
    case = {"policy": policy, "tokens": budget.tokens, "ratio": budget.ratio, "options": options}
    print(policy, list(options), flush=True)
    case["kept"] = kept(sequence)
    case["gates_used"] = sequence.gates
    case["decode"] = decode(sequence, logits)
    return case


def main():
    model = Model(sys.argv[1])
    ids = ByteLevelTokenizer(model.reader).encode(texts.PROSE)[:200]
    write("policy_schedules", {
        "about": __doc__.split("\n\n")[2].replace("\n", " "), "model": MODEL_NAME, "b_min": B_MIN, "seed": NOISE_SEED, "ids": ids,
        "cases": [run(model, ids, *case) for case in cases(model.config)]})


if __name__ == "__main__":
    main()
