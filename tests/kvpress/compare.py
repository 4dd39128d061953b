#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Second opinion on policy scores: kvpress (transformers, torch) against tests/data/policy_scores.json.

    python -m venv v && v/bin/pip install kvpress==0.5.5 torch==2.8.0 'transformers>=4.56,<5' gguf
    v/bin/python tests/kvpress/compare.py MODEL.gguf

snapkv and criticalkv differ a little: kvpress pools each query head before it takes the mean over the group, here the mean
is pooled.

Not part of the tests: it takes gigabytes of packages. For each policy that has a press it prints, over the layers of the
fixture and all KV heads: the median and worst rank correlation (Spearman) of the unprotected slots' scores, and the share
of slots kept alike at B = 64. transformers computes in float32 from the dequantised weights, as the reference does.
"""
import argparse
import json
import os
import pathlib

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import kvpress
from kvpress.presses import snapkv_press

FIXTURE = pathlib.Path(__file__).parents[1] / "data" / "policy_scores.json"
BUDGET = 64


def presses(model):
    """Press and remark by policy, with the definitions' options."""
    def snapkv():
        return kvpress.SnapKVPress(window_size=32, kernel_size=7)
    critical = kvpress.CriticalKVPress(snapkv())
    critical.post_init_from_model(model)
    return {
        "streaming": (kvpress.StreamingLLMPress(n_sink=4), ""),
        "h2o_mean": (kvpress.ObservedAttentionPress(), ""),
        "tova": (kvpress.TOVAPress(), "per KV head there, per layer here"),
        "snapkv": (snapkv(), "with maximum pooling put in for its average"),
        "criticalkv": (critical, "scores of the second half; the same pooling"),
        "keydiff": (kvpress.KeyDiffPress(), ""),
        "knorm": (kvpress.KnormPress(), ""),
        "expected_attention": (kvpress.ExpectedAttentionPress(epsilon=0.01), ""),
    }


def record_scores(model, press, ids):
    """Scores [layer][KV head, slot] of one prefill; nothing is pruned."""
    scores = {}

    def compress(module, hidden_states, keys, values, attentions, kwargs):
        scores[module.layer_idx] = press.score(module, hidden_states, keys, values, attentions, kwargs)[0].float().numpy()
        return keys, values
    press.compress = compress
    press.compression_ratio = 1 - BUDGET / len(ids)
    with torch.no_grad(), press(model):
        model(torch.tensor([ids]), use_cache=True)
    return scores


def kept(scores, protected):
    """The BUDGET best; protected first, ties to the more recent."""
    ranked = np.where(protected, np.inf, np.nan_to_num(scores, nan=-np.inf))
    return set(np.lexsort((-np.arange(len(scores)), -ranked))[:BUDGET].tolist())


def spearman(a, b):
    rank = lambda x: np.argsort(np.argsort(x)).astype(float)
    return np.corrcoef(rank(a), rank(b))[0, 1] if len(a) > 2 else 1.0


def compare(ours, theirs):
    """Correlations and kept shares of all layers and heads of one policy of the fixture."""
    correlations, shares = [], []
    for layer, rows in ours["scores"].items():
        for head, row in enumerate(rows):
            row = np.array([np.nan if x is None else x for x in row])
            other = theirs[int(layer)][head]
            protected = np.zeros(len(row), bool)
            protected[ours["protected"][layer][head]] = True
            free = ~protected & ~np.isnan(row)
            correlations.append(spearman(row[free], other[free]))
            shares.append(len(kept(row, protected) & kept(other, protected)) / BUDGET)
    return correlations, shares


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file of the fixture's model")
    arguments = parser.parse_args()
    folder, name = os.path.split(os.path.abspath(arguments.model))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, attn_implementation="eager", dtype=torch.float32)
    snapkv_press.F.avg_pool1d = torch.nn.functional.max_pool1d
    fixture = json.loads(FIXTURE.read_text())
    prompt = max(fixture["prompts"], key=lambda p: len(p["ids"]))
    print(f"{'policy':20}{'correlation median':>20}{'worst':>8}{'kept alike':>12}{'worst':>8}")
    for policy, (press, remark) in presses(model).items():
        correlations, shares = compare(prompt["scores"][policy], record_scores(model, press, prompt["ids"]))
        print(f"{policy:20}{np.median(correlations):20.4f}{min(correlations):8.3f}{np.mean(shares):12.3f}{min(shares):8.3f}"
              f"  {remark}")


if __name__ == "__main__":
    main()
