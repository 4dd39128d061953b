"""The DistillCache network in float64: inputs of slots, their normalisation, scores, and budgets of layers.

Written from the definitions (policy/network.h) alone. `shape` is a dict: features ("content" or "paper"), inputs (names
in order, without the content), content, hidden, layers, kv_heads, head_dim. `p` holds the file's tensors by name.
"""
import numpy as np

from . import mlp

TINY = 1e-6
CONTENT_INPUTS = ["sum", "mean", "deviation", "entropy", "value_norm", "output_norm", "position", "age", "budget",
                  "recent_8", "recent_4", "recent_2"]
PAPER_INPUTS = ["mean", "value_norm", "deviation", "entropy", "position"]
STANDARDISED = ["mean", "value_norm", "deviation"]
LEVELS = ("layer_budgets", "layer_budget_slopes", "summary_offsets", "summary_slopes")


def columns(slots, paper):
    """Every input by name, [slots] each. slots: seen, budget, and arrays positions, sum, squared (accumulated attention
    and group mean of its square), entropy (nats), value_norm and output_norm (logarithms)."""
    seen, budget, position = slots["seen"], slots["budget"], slots["positions"]
    queries = seen - position
    age = queries - 1
    share = slots["sum"] / queries
    deviation = np.sqrt(np.maximum(0, slots["squared"] / queries - share ** 2))
    found = {"value_norm": slots["value_norm"], "position": position / seen}
    if paper:
        found |= {"mean": np.log(TINY + share), "deviation": np.log(TINY + deviation),
                  "entropy": slots["entropy"] / np.log(max(seen, 2))}
        return found
    found |= {"sum": np.log(TINY + slots["sum"]), "mean": np.log(TINY + share * seen),
              "deviation": np.log(TINY + seen * deviation), "entropy": slots["entropy"] / np.log(position + 2),
              "output_norm": slots["output_norm"], "age": np.log(1 + age) / 6,
              "budget": np.full(len(position), np.log(budget / seen) + 1.5)}
    return found | {f"recent_{n}": (age < budget / n).astype(float) for n in (8, 4, 2)}


def gather(shape, slots):
    """Inputs [slots, F] before normalisation."""
    found = columns(slots, shape["features"] == "paper")
    rows = [found[name] for name in shape["inputs"]]
    return np.concatenate([np.reshape(slots["content"], (len(slots["positions"]), shape["content"]))]
                          + [row[:, None] for row in rows], axis=1)


def standardise(shape, inputs):
    """(mean, 1 / (deviation + TINY)) of each input that the paper's features standardise."""
    return [(column.mean(), 1 / (column.std() + TINY))
            for name, column in zip(shape["inputs"], inputs.T) if name in STANDARDISED]


def normalise(shape, p, head, standard, inputs):
    """Normalised inputs, clamped."""
    if shape["features"] == "content":
        return np.clip((inputs - p["mean"][head]) * p["scale"][head], -6, 6)
    out = inputs.copy()
    for f, name in enumerate(shape["inputs"]):
        if name in STANDARDISED:
            out[:, f] = (inputs[:, f] - standard[f][0]) * standard[f][1]
        else:
            out[:, f] = 2 * inputs[:, f] - 1
    return np.clip(out, -8, 8)


def score(shape, p, head, inputs):
    """Scores [slots] of normalised inputs."""
    if shape["features"] == "paper":
        return mlp.forward(p, inputs)[0]
    units = np.maximum(0, inputs @ p["w1"].T + p["b1"][head])
    return units @ p["w2"] + inputs @ p["skip"][head]


def arrays(shape):
    """Dimensions of the file's tensors, by name."""
    heads, inputs, hidden = shape["layers"] * shape["kv_heads"], shape["content"] + len(shape["inputs"]), shape["hidden"]
    levels = {name: [shape["layers"]] for name in LEVELS}
    if shape["features"] == "paper":
        vectors = {name: [hidden] for name in ("b1", "g1", "o1", "b2", "g2", "o2")}
        return vectors | {"w1": [hidden, inputs], "w2": [hidden, hidden], "w3": [1, hidden], "b3": [1],
                          "skip": [1, inputs]} | levels
    content = {"content": [heads, shape["content"], shape["head_dim"]], "content_offset": [heads, shape["content"]]}
    return (content if shape["content"] else {}) | {
        "mean": [heads, inputs], "scale": [heads, inputs], "w1": [hidden, inputs], "b1": [heads, hidden],
        "w2": [hidden], "skip": [heads, inputs]} | levels


def level(budget, seen):
    """How much is kept: 0 where it is a quarter."""
    return float(np.clip(np.log(4 * budget / seen), -3, 3))


def layer_budgets(weights, slopes, seen, budget, summary, share_out):
    """Slots of each layer's heads: one (two with a summary slot), and beyond it shares in proportion to the weights at
    this level, none above what was seen. share_out: that of policies.py."""
    weights = weights * np.exp(slopes * level(budget, seen))
    least = min(budget, 2 if summary else 1)
    shares = share_out(weights, len(weights) * (budget - least), max(seen - least, 0))
    return [least + share for share in shares]
