# SPDX-License-Identifier: Apache-2.0
"""Selection, budgets and protection of policy/ against the NumPy reference, and policy/README.md against the tables.

Needs the built policy_tool in DISTILLCACHE_TEST_BUILD (default: build/ of the repository); no model. Floats of the
reference are float32 here, so that ties are the same.
"""
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
sys.path.insert(0, str(ROOT / "tests/reference"))
from reference import policies as reference  # noqa: E402

LOWEST = float(np.finfo(np.float64).min)  # what stands for a score that is not there
SEED = 20240711


def run_tool(requests):
    """The tool's replies to requests, one each."""
    text = "".join(json.dumps(request, allow_nan=False) + "\n" for request in requests)
    done = subprocess.run([BUILD / "tests/model/policy_tool"], input=text.encode(), timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(replies) == len(requests)
    return replies


# Selection


def random_row(rng, layer, head, slots):
    """A head's slots in any order: scores with ties, some protected, some without a score."""
    scores = rng.choice([rng.normal(size=slots), rng.integers(-2, 3, slots) * 0.5], axis=0).astype(np.float32)
    scores[rng.random(slots) < rng.choice([0, 0.1])] = np.nan
    scores[rng.random(slots) < rng.choice([0, 0.02])] = -0.0
    scores[rng.random(slots) < rng.choice([0, 0, 0.02])] = -np.inf
    positions = rng.choice(3 * slots, slots, replace=False) if rng.random() < 0.5 else np.arange(slots)
    protected = rng.random(slots) < rng.choice([0, 0.05, 0.5])
    if rng.random() < 0.5:
        protected |= positions >= positions.max() - rng.integers(0, slots)
    lowest = np.where(np.isnan(scores) | (scores == -np.inf), LOWEST, scores.astype(np.float64))
    return reference.Row(layer, head, lowest, protected, positions), scores


def write_row(row, scores, budget, empty):
    """A row for the tool, with empty slots [count] between."""
    values = [None if math.isnan(s) else str(float(s)) if math.isinf(s) else float(s) for s in scores]
    values = ["inf" if p else v for v, p in zip(values, row.protected)]
    slots = list(zip(values, row.positions.tolist()))
    for place in empty:
        slots.insert(place, (3.0, None))
    return {"layer": row.layer, "head": row.head, "budget": budget,
            "scores": [s for s, _ in slots], "positions": [p for _, p in slots]}


def random_selection(rng):
    """(request, kept slots per row by the reference)."""
    layers, heads = rng.integers(1, 5), rng.integers(1, 5)
    scope = str(rng.choice(["head", "layer", "model"]))
    floor = float(rng.choice([0, 0.2, 0.3, 0.7, 1, round(rng.random(), 3)]))
    size = int(rng.choice([6, 40, 300]))
    rows, texts, empties = [], [], []
    mean = int(rng.integers(1, size + 3))
    budgets = [max(1, mean + int(rng.integers(-2, 3)) * int(rng.integers(0, 2))) for _ in range(layers)]
    for layer in range(layers):
        rows.append([])
        for head in range(heads):
            slots = int(rng.integers(1, size + 1)) if rng.random() < 0.5 else min(size, budgets[layer] + 1)
            row, scores = random_row(rng, layer, head, slots)
            empty = sorted(rng.integers(0, slots + 1, rng.choice([0, 0, 3])).tolist())
            rows[-1].append(row)
            empties.append(empty)
            texts.append(write_row(row, scores, budgets[layer], empty))
    kept = []
    masks = [mask for layer in reference.select(rows, budgets, scope, floor) for mask in layer]
    for mask, empty in zip(masks, empties):
        mask = list(mask)
        for place in empty:
            mask.insert(place, False)
        kept.append(np.flatnonzero(mask).tolist())
    return {"op": "select", "scope": scope, "floor": floor, "rows": texts}, kept


def test_selection_keeps_what_the_reference_keeps():
    rng = np.random.default_rng(SEED)
    requests, expected = zip(*[random_selection(rng) for _ in range(1500)])
    evicted = 0
    for request, ours, theirs in zip(requests, run_tool(requests), expected):
        assert ours == theirs, request
        evicted += sum(len(row["scores"]) for row in request["rows"]) - sum(map(len, ours))
    assert evicted > 50000


def test_order_of_rows_does_not_matter():
    rng = np.random.default_rng(SEED + 1)
    requests, shuffled, orders = [], [], []
    for _ in range(300):
        request, _ = random_selection(rng)
        order = rng.permutation(len(request["rows"]))
        requests.append(request)
        shuffled.append({**request, "rows": [request["rows"][i] for i in order]})
        orders.append(order)
    replies = run_tool(requests + shuffled)
    for one, other, order in zip(replies, replies[len(requests):], orders):
        assert [one[i] for i in order] == other


def test_rows_that_keep_everything_do_not_compete():
    rng = np.random.default_rng(SEED + 2)
    requests, reduced, kept_all = [], [], []
    for _ in range(300):
        request, _ = random_selection(rng)
        whole = [bool(rng.random() < 0.3) for _ in request["rows"]]
        rows = [{**row, "budget": None if all_of_it else row["budget"]} for row, all_of_it in zip(request["rows"], whole)]
        requests.append({**request, "rows": rows})
        reduced.append({**request, "rows": [row for row in rows if row["budget"] is not None]})
        kept_all.append(whole)
    replies = run_tool(requests + reduced)
    for request, mine, rest, whole in zip(requests, replies, replies[len(requests):], kept_all):
        rest = iter(rest)
        for row, kept, all_of_it in zip(request["rows"], mine, whole):
            present = [i for i, position in enumerate(row["positions"]) if position is not None]
            assert kept == (present if all_of_it else next(rest))


# Budgets


def test_shares_are_those_of_the_reference():
    rng = np.random.default_rng(SEED + 3)
    requests = []
    for _ in range(3000):
        count = int(rng.integers(1, 40))
        weights = rng.choice([rng.random(count), rng.random(count) ** 8, rng.integers(1, 4, count) / 1.0], axis=0)
        if rng.random() < 0.05:
            weights = np.zeros(count)
        cap = int(rng.integers(0, 200))
        requests.append({"op": "share", "weights": weights.tolist(), "total": int(rng.integers(0, count * 220)),
                         "cap": cap})
    for request, shares in zip(requests, run_tool(requests)):
        assert shares == reference.share_out(request["weights"], request["total"], request["cap"]), request


def test_what_no_weight_wants_goes_to_the_others():
    """The reference gives it to the first ones, past their cap; the total and the cap hold here."""
    requests = [{"op": "share", "weights": [1, 0, 0], "total": 10, "cap": 5},
                {"op": "share", "weights": [0, 3, 0, 0], "total": 8, "cap": 3}]
    assert run_tool(requests) == [[5, 3, 2], [2, 3, 2, 1]]


def layers_view(layers, seen, budget):
    return [SimpleNamespace(seen=seen, budget=budget)] * layers


def random_allocation(rng, policy, **more):
    layers, heads = int(rng.integers(1, 33)), int(rng.integers(1, 5))
    seen = int(rng.integers(1, 3000))
    tokens = int(rng.integers(5, 1500))
    return {"op": "allocate", "policy": f"{policy},tokens={tokens}", "layers": layers, "kv_heads": heads, "seen": seen,
            **more}, layers, heads, seen, tokens


def test_pyramid_budgets():
    rng = np.random.default_rng(SEED + 4)
    cases = [random_allocation(rng, "pyramidkv") for _ in range(1000)]
    for (request, layers, heads, seen, tokens), budgets in zip(cases, run_tool([case[0] for case in cases])):
        expected = reference.pyramid_budgets(layers_view(layers, seen, tokens), {})
        assert budgets == [budget for budget in expected for _ in range(heads)], request
        if tokens >= seen:  # nothing is over the budget, so nothing may go
            assert min(budgets) >= seen


def test_pyramid_budgets_that_rise():
    """Below 1, beta turns the pyramid of 1 / (2 - 1 / beta) over; with 1 there is none."""
    for seen, tokens in ((3000, 200), (1000, 600), (1000, 999), (40, 100)):
        upright, over, level = run_tool([{"op": "allocate", "policy": f"pyramidkv,tokens={tokens},beta={beta}",
                                          "layers": 30, "kv_heads": 1, "seen": seen} for beta in (2.5, 0.625, 1)])
        assert sum(over) == sum(level) == 30 * tokens and set(level) == {tokens}
        assert over == sorted(over) and all(abs(a - b) <= 1 for a, b in zip(over, reversed(upright)))
        assert max(over) <= max(seen, tokens) and (over[0] < over[-1] or tokens >= seen)


def test_cake_budgets():
    rng = np.random.default_rng(SEED + 5)
    cases = []
    for _ in range(1000):
        case = random_allocation(rng, "cake")
        case[0]["preferences"] = (rng.random(case[1]) ** rng.choice([1, 6]) * 100).tolist()
        cases.append(case)
    for (request, layers, heads, seen, tokens), budgets in zip(cases, run_tool([case[0] for case in cases])):
        expected = reference.cake_budgets(layers_view(layers, seen, tokens), {"cake": request["preferences"]})
        assert budgets == [budget for budget in expected for _ in range(heads)], request
        if tokens >= seen:
            assert min(budgets) >= seen


def by_gate(gates):
    """Heads from the highest gate down; equal ones from the lower index."""
    return sorted(range(len(gates)), key=lambda i: (-np.float32(gates[i]), i))


def test_gates_choose_the_heads_that_keep_everything():
    """rlkv with a sparsity, rlkv by the budget, hybrid: plain Python of policy/README.md."""
    rng = np.random.default_rng(SEED + 6)
    requests, expected = [], []
    for _ in range(1500):
        kind = rng.choice(["sparsity", "budget", "hybrid"])
        layers, heads, seen = int(rng.integers(1, 20)), int(rng.integers(1, 6)), int(rng.integers(1, 3000))
        n = layers * heads
        gates = rng.choice([rng.random(n), rng.integers(0, 3, n) / 2], axis=0)
        ratio = float(rng.choice([0.5, 0.25, 0.125, 0.05]))
        budget = max(math.floor(ratio * seen), 32)
        if kind == "sparsity":
            sparsity = float(rng.choice([0, 0.25, 0.5, 1]))
            policy, full, rest = f"rlkv,sparsity={sparsity}", n - math.floor(sparsity * n + 0.5), 80
        elif kind == "budget":
            policy, rest = f"rlkv,ratio={ratio}", 80
            full = max((f for f in range(n + 1) if f * seen + (n - f) * min(80, seen) <= n * budget), default=0)
        else:
            policy = f"hybrid,ratio={ratio}"
            full = math.floor(min(0.2, min(max(ratio, budget / seen), 1) / 2) * n + 1e-9)
            rest = (n * budget - full * seen) // (n - full)
        keep = set(by_gate(gates)[:full])
        requests.append({"op": "allocate", "policy": policy, "layers": layers, "kv_heads": heads, "seen": seen,
                         "gates": gates.tolist()})
        expected.append([None if i in keep else rest for i in range(n)])
        if kind != "sparsity" and (kind == "hybrid" or budget >= min(80, seen)):
            assert sum(min(seen, seen if i in keep else rest) for i in range(n)) <= n * min(budget, seen)
    for request, ours, theirs in zip(requests, run_tool(requests), expected):
        assert ours == theirs, request


# Protection


@pytest.mark.parametrize("name", [name for name in reference.POLICIES if name != "full"])
def test_protection(name):
    """The positions that the reference's score functions protect, from the fixture's own choices."""
    expected_recent = {
        "streaming": lambda b: 0, "h2o": lambda b: b - b // 2, "h2o_mean": lambda b: 0, "scissorhands": lambda b: 10,
        "tova": lambda b: 1, "keydiff": lambda b: 0, "knorm": lambda b: 0, "keyformer": lambda b: 3 * b // 10,
        "expected_attention": lambda b: 0, "laprox": lambda b: 0, "laprox_head": lambda b: 0,
    }.get(name, lambda b: min(reference.WINDOW, b // 2))
    sinks = 4 if name in ("streaming", "expected_attention") else 0
    cases = [(seen, budget) for seen in (1, 9, 40, 700) for budget in (*range(1, 80), 255, 600)]
    requests = [{"op": "protect", "policy": name, "seen": seen, "budget": budget} for seen, budget in cases]
    for (seen, budget), ours in zip(cases, run_tool(requests)):
        assert ours == [sinks, max(0, seen - expected_recent(budget))], (seen, budget)


# policy/README.md

README = (ROOT / "policy/README.md").read_text()


def table_rows(first_heading):
    """Cells of the README's tables whose heading row begins with these words."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", README, re.M)
    found = [block.splitlines() for block in blocks if block.startswith(f"| {first_heading} |")]
    assert len(found) == 1, first_heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0][2:]]


def table():
    return run_tool([{"op": "table"}])[0]


def words(cell):
    """`name value` pairs of a cell."""
    return dict(text.split(" ", 1) for text in re.findall(r"`([^`]*)`", cell))


def test_readme_lists_the_policies():
    """Names in order, their own options with defaults, common options that differ, sources."""
    code = table()["policies"]
    usual = next(policy for policy in code if policy["name"] == "snapkv")["common"]
    rows = table_rows("policy | options | common ones | source")
    assert [row[0].strip("`") for row in rows] == [policy["name"] for policy in code]
    for (_, options, common, source), policy in zip(rows, code):
        name = policy["name"]
        assert words(options) == policy["options"], name
        assert ("shared" in common) == policy["shared"], name
        differing = {key: value for key, value in policy["common"].items() if value != usual[key]}
        assert words(common) == differing, name
        assert source == policy["source"], name


def test_readme_lists_the_options():
    code = table()
    common = next(policy for policy in code["policies"] if policy["name"] == "snapkv")["common"]
    rows = table_rows("option | default | allowed | meaning")
    assert {row[0].strip("`"): row[1] for row in rows} == common
    rows = [[name, allowed, meaning] for name, _, allowed, meaning in rows] + table_rows("option | allowed | meaning")
    assert [[name.strip("`"), allowed, meaning] for name, allowed, meaning in rows] == [
        [option["name"], option["allowed"], option["help"]] for option in code["options"]]


def test_readme_defines_every_policy():
    for policy in table()["policies"]:
        assert f"**{policy['name']}** " in README
