# SPDX-License-Identifier: Apache-2.0
"""Summary slots: one of a head's B slots stands for all tokens that were evicted from it. NumPy, independent of the server.

Per (layer, KV head), over evicted tokens, with w = max(A / c, 2^-24), A the attention a token has had, c = L - its position the queries
that could see it: sums of w, w k (rotated), w v and w ln w. A query sees one more slot: key sum(w k) / W, value sum(w v) / W, W = sum(w),
and an additive logit ln W - sum(w ln w) / W. It sees it at every position.

Choices:
 1. Tokens get B - 1 slots where there is a summary. Scopes layer and model: of every head. Scope head: of a head that has one, or that
    holds more than its budget.
 2. A prune takes place when some head holds more than B, and more than B - 1 once a token of the sequence was evicted.
 3. What is protected follows from B, not from B - 1.
 4. Statistics are those of the tokens in the presence of the summary: a row's probabilities add up to 1 together with the summary's.
"""
import math

import numpy as np

from .model import LayerTrace, rope
from .policies import best_of, select
from .schedules import ScheduledSequence

LEAST_WEIGHT = 2.0 ** -24


class HeadSummary:
    """Sums over the evicted tokens of one (layer, KV head)."""

    def __init__(self, head_dim):
        self.key, self.value = np.zeros(head_dim), np.zeros(head_dim)
        self.weight = self.weighted = 0.0

    def add(self, keys, values, weights):
        """Evicted tokens: keys and values [m, d], weights [m]."""
        weights = np.maximum(weights, LEAST_WEIGHT)
        self.key += weights @ keys.astype(np.float64)
        self.value += weights @ values.astype(np.float64)
        self.weight += weights.sum()
        self.weighted += (weights * np.log(weights)).sum()

    @property
    def logit(self):
        return math.log(self.weight) - self.weighted / self.weight


def attend(query, keys, values, visible, summary):
    """As model.attend, in float64: probabilities [G, T, m] are those of the slots, the rest to 1 is the summary's."""
    query, root = query.astype(np.float64), math.sqrt(query.shape[-1])
    logits = np.where(visible, query @ keys.astype(np.float64).T / root, -np.inf)
    if summary is None or summary.weight == 0:
        extra, value = np.full(logits.shape[:2], -np.inf), np.zeros(values.shape[1])
    else:
        extra, value = query @ (summary.key / summary.weight) / root + summary.logit, summary.value / summary.weight
    most = np.maximum(logits.max(-1), extra)
    e, e_extra = np.exp(logits - most[..., None]), np.exp(extra - most)
    total = e.sum(-1) + e_extra
    probs, p_extra = e / total[..., None], e_extra / total
    return logits, probs, probs @ values.astype(np.float64) + p_extra[..., None] * value


class SummarySequence(ScheduledSequence):
    """A ScheduledSequence whose heads have summary slots. Not for the policies of gates, nor for positions in the cache."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        c = self.model.config
        self.summaries = [[HeadSummary(c.head_dim) for _ in range(c.n_kv_heads)] for _ in range(c.n_layers)]

    def attention(self, layer, trace, positions):
        """As Model.attention."""
        model, c = self.model, self.model.config
        query, outs = rope(trace.query, positions, c.rope_base), []
        for k, head in enumerate(self.cache.heads[layer]):
            visible = head.positions[None, :] <= positions[:, None]
            group = query[k * c.group:(k + 1) * c.group]
            logits, probs, out = attend(group, head.keys, head.values, visible, self.summaries[layer][k])
            trace.logits.append(logits.astype(np.float32))
            trace.probs.append(probs.astype(np.float32))
            outs.append(out.astype(np.float32))
        trace.head_out = np.concatenate(outs)
        flat = trace.head_out.transpose(1, 0, 2).reshape(len(positions), -1)
        trace.block_out = model.linear(flat, model.weight(layer, "attn_output"))

    def extend(self, ids, decoding=True):
        model, c = self.model, self.model.config
        positions = np.arange(self.cache.seen, self.cache.seen + len(ids))
        x, traces = model.embed(ids), []
        for layer in range(c.n_layers):
            trace = LayerTrace(*model.project(layer, x, positions))
            for k, head in enumerate(self.cache.heads[layer]):
                head.append(trace.keys[k], trace.values[k], positions)
            self.attention(layer, trace, positions)
            x = x + trace.block_out
            x = x + model.feed_forward(layer, x)
            traces.append(trace)
        self.cache.seen += len(ids)
        steps = self.decoded + 1 + np.arange(len(ids)) if decoding else np.zeros(len(ids))
        self.decoded += len(ids) if decoding else 0
        self.observe(traces, steps)
        return model.head(x)

    # Prunes

    def evicted_before(self):
        return any(summary.weight > 0 for layer in self.summaries for summary in layer)

    def over_budget(self):
        budget = self.budget.slots(self.cache.seen) - self.evicted_before()
        return any(len(head.positions) > budget for layer in self.cache.heads for head in layer)

    def tokens_of(self, layer, k, budget):
        """Slots for tokens of a head with this budget; scope head."""
        over = len(self.cache.heads[layer][k].positions) > budget
        return budget - 1 if over or self.summaries[layer][k].weight > 0 else budget

    def masks(self):
        """Keep masks [layer][KV head] of a prune now."""
        views = self.views()
        budgets, rows = self.policy.budgets(views, self.state), self.score_rows(views)
        if self.scope == "head":
            masks = [[best_of([row], self.tokens_of(l, row.head, budgets[l]), 0)[0] for row in layer]
                     for l, layer in enumerate(rows)]
        else:
            masks = select(rows, [budget - 1 for budget in budgets], self.scope)
        return [mask * self.model.config.n_kv_heads for mask in masks] if self.policy.shared else masks

    def prune(self):
        if self.policy.score is None or not self.over_budget():
            return
        for l, layer in enumerate(self.masks()):
            for k, mask in enumerate(layer):
                head, stats = self.cache.heads[l][k], self.stats[l].heads[k]
                gone = ~mask
                weights = stats.total[gone] / (self.cache.seen - head.positions[gone])
                self.summaries[l][k].add(head.keys[gone], head.values[gone], weights)
                head.keep(mask)
                stats.keep(mask)
