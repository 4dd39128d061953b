"""What `policies.py` leaves out: the policies random, rlkv and hybrid, StreamingLLM's positions in the cache, SnapKV's frozen
prompt, and when a sequence is pruned (interval, prefill_prune_every). NumPy, independent of the server.

Choices, beside those of policies.py:
 1. random: uniform number from Philox 4x32-10 (Salmon et al. 2011) with key = seed and counter = (index 0, step = position, stream =
    layer x NKV + head): ((first word >> 9) + 0.5) / 2^23. The highest stay.
 2. Decode steps are counted from the end of the prompt: a prune follows steps m, 2m, ... (interval m).
 3. prefill_prune_every N: a prune at positions N, 2N, ... of the prompt with the budget of that L, and one at its end.
 4. Gates from attention, at the first prune: of the attention of the last w queries, the share that lies on tokens at positions >= 16
    and before the last 64. Equal gates favour the lower layer, then the lower head.
 5. rlkv: round(sparsity x heads) heads with the lowest gates hold 16 sinks and the 64 most recent tokens; the others everything.
 6. hybrid: f = min(0.2, r / 2); floor(f x heads) heads keep everything, the others share what the total leaves equally (rounded down)
    and are scored by the base policy.
 7. Positions in the cache: a key's rotation is that of its slot's index by position, the query's that of the last index. Keys were
    computed at their original positions while the prompt was read.
"""
import math

import numpy as np

from .model import LayerTrace, rope
from .policies import POLICIES, Policy, Row, Sequence, best_of, nothing, streaming

GATE_SINKS, GATE_RECENT = 16, 64
MASK = 0xFFFFFFFF


def philox(seed, stream, step, index):
    """First word of Philox 4x32-10."""
    key = [seed & MASK, seed >> 32]
    c = [index & MASK, index >> 32, step, stream]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & MASK, (a >> 32) ^ c[3] ^ key[1], a & MASK]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return c[0]


def uniform(seed, stream, step, index):
    """In (0, 1)."""
    return ((philox(seed, stream, step, index) >> 9) + 0.5) * 2.0 ** -23


def head_gate(total, positions, seen):
    """Share of the window's attention outside sinks and recent tokens."""
    outside = (positions >= GATE_SINKS) & (positions < seen - GATE_RECENT)
    return total[outside].sum() / total.sum() if total.sum() > 0 else 0.0


class ScheduledSequence(Sequence):
    """A Sequence with the options of this file. gates: [layers][heads] or None (from attention)."""

    def __init__(self, model, policy, budget, *, interval=1, prefill_prune_every=0, frozen_prompt=False, cache_positions=False,
                 gates=None, sparsity=0.5, full_heads=0.2, base=None, **options):
        super().__init__(model, policy, budget, **options)
        self.interval, self.prefill_prune_every, self.frozen_prompt = interval, prefill_prune_every, frozen_prompt
        self.cache_positions, self.gates, self.sparsity, self.full_heads = cache_positions, gates, sparsity, full_heads
        self.base = base

    # When

    def read_prompt(self, ids):
        """Prompt with its prunes: logits [V] of the last token, which no prune at the end affects."""
        every = self.prefill_prune_every or len(ids)
        for start in range(0, len(ids), every):
            logits = self.extend(ids[start:start + every], decoding=False)[-1]
            self.prune()
        return logits

    def step(self, token):
        """One decode step and its prune, if one is due."""
        logits = self.extend([token])[-1]
        if not self.frozen_prompt and self.decoded % self.interval == 0:
            self.prune()
        return logits

    # Positions in the cache

    def extend(self, ids, decoding=True):
        held = len(self.cache.heads[0][0].positions)
        if not self.cache_positions or held == self.cache.seen:
            return super().extend(ids, decoding)
        return np.concatenate([self.extend_by_index(token, held + i) for i, token in enumerate(ids)])

    def extend_by_index(self, token, index):
        """One decoded token at place `index` of the cache."""
        model, c, position = self.model, self.model.config, np.array([self.cache.seen])
        x, traces = model.embed([token]), []
        places = np.arange(index + 1)
        for layer in range(c.n_layers):
            trace = LayerTrace(*model.project(layer, x, position))
            slots = []
            for k, head in enumerate(self.cache.heads[layer]):
                head.append(trace.keys[k], trace.values[k], position)
                turned = rope(head.keys[None], places - head.positions, c.rope_base)[0]
                slots.append((turned, head.values, places))
            model.attention(layer, trace, places[-1:], slots)
            x = x + trace.block_out
            x = x + model.feed_forward(layer, x)
            traces.append(trace)
        self.cache.seen += 1
        self.decoded += 1
        self.observe(traces, np.array([self.decoded]))
        return model.head(x)

    # Gates

    def head_gates(self):
        """[layers, heads], from the file or fixed at the first prune."""
        if self.gates is None:
            self.gates = [[head_gate(stats.window_mean().sum(0), head.positions, self.cache.seen) for head, stats in zip(heads, layer.heads)]
                          for heads, layer in zip(self.cache.heads, self.stats)]
        return np.asarray(self.gates, np.float32)

    def gated_budgets(self):
        """Slots per (layer, head); None keeps everything."""
        gates = self.head_gates()
        heads, budget = gates.size, self.budget.slots(self.cache.seen)
        if self.policy.name == "rlkv":
            full, rest = heads - math.floor(self.sparsity * heads + 0.5), GATE_SINKS + GATE_RECENT
        else:
            ratio = budget / self.cache.seen if self.budget.tokens else max(self.budget.ratio, budget / self.cache.seen)
            full = math.floor(min(self.full_heads, min(ratio, 1) / 2) * heads + 1e-9)
            rest = (heads * budget - full * self.cache.seen) // (heads - full)
        order = np.argsort(-gates.ravel(), kind="stable")
        out = np.full(heads, rest, object)
        out[order[:full]] = None
        return out.reshape(gates.shape)

    def prune(self):
        if self.policy.name not in ("rlkv", "hybrid"):
            return super().prune()
        budgets = self.gated_budgets()
        for l, heads in enumerate(self.cache.heads):
            for k, head in enumerate(heads):
                if budgets[l][k] is None or len(head.positions) <= budgets[l][k]:
                    continue
                view = self.views()[l]
                view.budget = int(budgets[l][k])
                scores, protected = self.policy.score(view, k)
                row = Row(l, k, scores, protected, head.positions)
                mask = best_of([row], view.budget, 0)[0]
                head.keep(mask)
                self.stats[l].heads[k].keep(mask)

    def score_row(self, layer, k, view):
        if self.policy.name == "random":
            stream = layer * self.model.config.n_kv_heads + k
            scores = np.array([uniform(self.seed, stream, int(p), 0) for p in view.positions(k)])
            return Row(layer, k, scores, nothing(view, k), view.positions(k))
        return super().score_row(layer, k, view)


def rlkv(view, k):
    """The heads that do not keep everything: 16 sinks, then the most recent."""
    return view.positions(k).astype(np.float64), view.positions(k) < GATE_SINKS


MORE_POLICIES = {
    "random": Policy("random", streaming),
    "rlkv": Policy("rlkv", rlkv),
    "hybrid": Policy("hybrid", POLICIES["h2o"].score),
}
