#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""paper_tables.py TABLE [--label POLICY=WORDS]... [--base POLICY --results FILE] DOCUMENT...

Markdown from what `distillcache eval --json`, `bench --json` and `train --json` print. TABLE is one of paper_tables.sh.
Policies with the same label share a row (one for each seed). --results is the file of `eval --resume`, from which
policies are compared with --base prompt by prompt. A document that was stopped before its end says so.
"""
import argparse
import json
import math
import random
import statistics

RESAMPLES = 2000
LEAST_KL = 1e-9  # as in distillcache eval


def percent(part):
    return f"{100 * part:g} %"


def slashes(values, form):
    return " / ".join("" if v is None else format(v, form) for v in values)


def markdown(head, rows):
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"] + ["| " + " | ".join(row) + " |" for row in rows]


def in_order(values):
    return list(dict.fromkeys(values))


def note(documents):
    """What the table was measured on."""
    first = documents[0]
    counts = ", ".join(f"{d['task']} {d['items']}" for d in documents)
    ends = "" if all(d["complete"] for d in documents) else "; stopped before the end"
    return (f"{first['model']}, context of {', '.join(map(str, first['lengths']))} tokens, seed {first['seed']}; "
            f"items: {counts}{ends}")


# budgets: absolute numbers, a column a task.


def task_cell(rows):
    """The values of one policy in one task, the largest budget first."""
    if "kl" in rows[0]:
        perplexity = slashes([r["perplexity"] for r in rows], ".1f")
        return slashes([r["kl_geometric"] for r in rows], ".3f") + "; " + perplexity
    scores = slashes([r["score"] for r in rows], ".2f") if "score" in rows[0] else ""
    if "claimed" in rows[0] and not rows[0]["claimed"]:
        scores = f"[{scores}]"
    return f"{scores} ({slashes([r['gold_logprob'] for r in rows], '.1f')})".strip()


def budgets(documents, _arguments):
    """KL and perplexity, or score and log-probability, by policy and task."""
    rows = [row for d in documents for row in d["rows"]]
    ratios = sorted({row["kv_ratio"] for row in rows if row["kv_policy"] != "full"}, reverse=True)
    tasks = [d["task"] for d in documents]
    lines = []
    for policy in in_order(row["kv_policy"] for row in rows):
        cells = [sorted((r for r in d["rows"] if r["kv_policy"] == policy), key=lambda r: -r["kv_ratio"])
                 for d in documents]
        lines.append([f"`{policy}`"] + [task_cell(c) if c else "" for c in cells])
    heads = ["kl; perplexity" if task == "kl" else task for task in tasks]
    return markdown(["tokens kept: " + " / ".join(map(percent, ratios))] + heads, lines) + [
        "", note(documents) + ". KL: geometric mean, nats. Tasks: score, and the mean log-probability of the right answer; "
        "a score in brackets says nothing, because full is not 15 points above chance."]


# Tables of KL beside the base's.


def mean_kl(items):
    return statistics.fmean(statistics.fmean(parts.values()) for parts in items.values())


def paired(results, document):
    """{(policy, ratio, length): {item: {part: kl}}} of the results that the document is made of.

    The file may hold those of other networks and continuations as well: the ones meant have the document's mean.
    """
    found = {}
    with open(results, encoding="utf-8") as lines:
        for line in lines:
            try:
                r = json.loads(line)
            except ValueError:
                continue  # torn
            run = (r["model"], r["continuation"], r.get("kv_network"), r["query_aware"])
            if r["task"] == "kl" and r["seed"] == document["seed"]:
                runs = found.setdefault((r["kv_policy"], r["kv_ratio"], r["length"]), {})
                runs.setdefault(run, {}).setdefault(r["item"], {})[r["part"]] = r["kl"]
    chosen = {}
    for row in document["rows"]:
        place = (row["kv_policy"], row["kv_ratio"], row["length"])
        for items in found.get(place, {}).values():
            if len(items) == row["n"] and math.isclose(mean_kl(items), row["kl"], rel_tol=1e-6, abs_tol=1e-9):
                chosen[place] = items
    return chosen


def log_ratios(own, base):
    """By item: ln of the KL as part of the base's, mean over its parts."""
    def of_item(item):
        return statistics.fmean(math.log(max(kl, LEAST_KL) / max(base[item][part], LEAST_KL))
                                for part, kl in own[item].items())
    return {item: of_item(item) for item in own if item in base}


def relative_cell(owns, base):
    """KL of policies (one a seed) as part of the base's: geometric mean, interval over items, arithmetic mean."""
    logs = [log_ratios(own, base) for own in owns]
    items = sorted(set.intersection(*(set(l) for l in logs)))
    if not items:
        return ""
    means = [statistics.fmean(l[i] for l in logs) for i in items]
    draw = random.Random(1)
    drawn = sorted(statistics.fmean(draw.choices(means, k=len(means))) for _ in range(RESAMPLES))
    low, high = (math.exp(drawn[round(q * (RESAMPLES - 1))]) for q in (0.025, 0.975))
    base_kl = statistics.fmean(kl for i in items for kl in base[i].values())
    own_kl = statistics.fmean(kl for own in owns for i in items for kl in own[i].values())
    seeds = [math.exp(statistics.fmean(l[i] for i in items)) for l in logs]
    spread = f"; seeds {' '.join(f'{s:.2f}' for s in seeds)}" if len(seeds) > 1 else ""
    return f"{math.exp(statistics.fmean(means)):.2f} [{low:.2f}, {high:.2f}], {own_kl / base_kl:.2f}{spread}"


def mean_of(rows, policies, place, value):
    """Mean over policies (seeds) of a value of the document's rows at a place; None: there is none."""
    values = [value(r) for r in rows if r["kv_policy"] in policies and (r["kv_ratio"], r["length"]) == place]
    return statistics.fmean(values) if values else None


def part_of_bytes(row):
    return row["kv_bytes"] / row["kv_bytes_full"]


def place_names(places):
    """Budgets and lengths, as far as they differ."""
    if len({length for _, length in places}) == 1:
        return [percent(ratio) for ratio, _ in places]
    if len({ratio for ratio, _ in places}) == 1:
        return [f"{length} tokens" for _, length in places]
    return [f"{percent(ratio)} of {length}" for ratio, length in places]


def relative(documents, arguments):
    """KL as part of the base's by budget and length, perplexity, bytes."""
    document, base = documents[0], arguments.base
    labels = dict(text.rpartition("=")[::2] for text in arguments.label)
    rows, found = document["rows"], paired(arguments.results, document)
    places = [(r["kv_ratio"], r["length"]) for r in rows if r["kv_policy"] == base]
    places.sort(key=lambda p: (p[1], -p[0]))
    names = place_names(places)
    head = [f"policy ({' / '.join(names)})", *names, "perplexity", "bytes, part of full's"]
    groups = {}
    for policy in in_order(r["kv_policy"] for r in rows):
        groups.setdefault(labels.get(policy, f"`{policy}`"), []).append(policy)
    full_places = [(1, length) for _, length in places]
    full = slashes([mean_of(rows, ["full"], p, lambda r: r["perplexity"]) for p in full_places], ".1f")
    lines = [["`full`", *[""] * len(places), full, ""]]
    for label, policies in groups.items():
        if policies == ["full"]:
            continue
        if policies == [base]:
            cells = [f"1 (KL {mean_of(rows, policies, p, lambda r: r['kl_geometric']):.3f})" for p in places]
        else:
            cells = [relative_cell([found.get((policy, *p), {}) for policy in policies], found.get((base, *p), {}))
                     for p in places]
        ppl = slashes([mean_of(rows, policies, p, lambda r: r["perplexity"]) for p in places], ".1f")
        size = slashes([mean_of(rows, policies, p, part_of_bytes) for p in places], ".2f")
        lines.append([label, *cells, ppl, size])
    return markdown(head, lines) + [
        "", note(documents) + f". KL as part of that of `{base}`, paired by prompt: geometric mean, its 95 % bootstrap "
        "interval, arithmetic mean."]


# errors


def error_cell(row):
    kinds = slashes([row["errors"][k] for k in ("right", "repetitive", "over_length", "wrong")], "d")
    return f"{kinds}; {row['length_ratio']:.2f}"


def errors(documents, _arguments):
    """Kinds of errors over the items that full gets right, and the length of outputs."""
    rows = [row for d in documents for row in d["rows"]]
    lines = []
    for policy, ratio in in_order((r["kv_policy"], r["kv_ratio"]) for r in rows if r["kv_policy"] != "full"):
        own = [next((r for r in d["rows"] if (r["kv_policy"], r["kv_ratio"]) == (policy, ratio)), None)
               for d in documents]
        there = [r for r in own if r is not None]
        total = {"errors": {k: sum(r["errors"][k] for r in there) for k in there[0]["errors"]},
                 "length_ratio": statistics.fmean(r["length_ratio"] for r in there)}
        cells = ["" if r is None else error_cell(r) for r in own]
        lines.append([f"`{policy}`", percent(ratio), *cells, error_cell(total)])
    return markdown(["policy", "tokens kept"] + [d["task"] for d in documents] + ["all"], lines) + [
        "", note(documents) + ". Of the items that full gets right: right / ends in a loop / does not end where full did / "
        "wrong otherwise; mean tokens of the output against full's."]


# positions


def name_distance(n):
    """The distances that one number of kept_distance is of."""
    return str(n + 1) if n < 2 else f"{2 ** (n - 1) + 1}-{2 ** n}"


def positions(documents, _arguments):
    """Which positions of the prompt stay."""
    lines, ends = [], []
    for row in documents[0]["rows"]:
        if row["kv_policy"] == "full":
            continue
        distances = row["kept_distance"]
        ends = [name_distance(n) for n in range(max(len(distances), len(ends)))]
        whole = [None if v is None else 100 * v for v in (row["kept_sinks"], row["kept_between"], row["kept_recent"])]
        lines.append([f"`{row['kv_policy']}`", percent(row["kv_ratio"]), *(slashes([v], ".0f") for v in whole),
                      slashes([100 * v for v in row["kept_first"] if v is not None], ".0f"),
                      slashes([None if v is None else 100 * v for v in distances], ".0f")])
    head = ["policy", "tokens kept", "first 4", "between", "last 32", "positions 0 / 1 / ... / 7",
            "distance from the end " + " / ".join(ends)]
    return markdown(head, lines) + [
        "", note(documents) + ". Percent of all layers and heads that keep a token after the prompt's prune."]


# curves


def curves(files, _arguments):
    """The comparisons of a run, by step; a column a seed."""
    runs = []
    for file in files:
        with open(file, encoding="utf-8") as lines:
            events = [json.loads(line) for line in lines]
        runs.append({e["step"]: e for e in events if "kl_valid" in e})
    head = ["step", "stage"]
    for i in range(len(runs)):
        mark = f" ({i + 1})" if len(runs) > 1 else ""
        head += [f"loss or reward{mark}", f"held-out KL{mark}", f"as part of h2o's{mark}"]
    lines = []
    for step in sorted(set().union(*runs)):
        events = [run.get(step, {}) for run in runs]
        line = [str(step), next(e["stage"] for e in events if e)]
        for event in events:
            gain = event.get("loss", event.get("reward"))
            line += [slashes([gain], ".3f"), slashes([event.get("kl_valid")], ".4f"),
                     slashes([event.get("kl_valid_relative")], ".3f")]
        lines.append(line)
    return markdown(head, lines)


# latency

MATRICES, LOGITS = ("embed", "norm", "qkv", "rope", "attn_output", "gate_up", "silu", "down"), ("logits", "sample")
OWN = ("statistics", "score", "select", "compact")


def latency(documents, _arguments):
    """A decode step by phase, in milliseconds."""
    document, lines = documents[0], []
    for run in document["runs"]:
        if run["work"] != "decode":
            continue
        ms = {name: 1e3 * phase["seconds"] for name, phase in run["phases"].items()}
        matrices, logits = (sum(ms.get(name, 0) for name in names) for names in (MATRICES, LOGITS))
        own = [ms.get(name, 0) for name in OWN]
        lines.append([run["kv_settings"] or run["kv_policy"], f"{run['step_ms']:.2f}", slashes([run["ratio_full"]], ".2f"),
                      f"{matrices:.2f}", f"{ms.get('attend', 0) - own[0]:.2f}",
                      *("" if run["kv_settings"] is None else f"{v:.2f}" for v in own),
                      f"{logits:.2f}", slashes([run["policy_percent"]], ".1f")])
    machine, first = document["machine"], next(r for r in document["runs"] if r["work"] == "decode")
    head = ["policy", "step, ms", "times full's speed", "matrices", "attention", *OWN, "logits", "policy's part, %"]
    return markdown(head, lines) + [
        "", f"{first['batch']} sequences with {first['depth']} tokens seen; {machine['cpu']}, {machine['threads']} threads, "
        f"core to core {machine.get('core_to_core_ns') or 0:.0f} ns, load before {machine.get('load_average', 0):.2f}. Phases "
        "are of one profiled run, which is slower than the step that is timed."]


TABLES = {"budgets": budgets, "trained": relative, "lengths": relative, "hybrid": relative, "rewards": relative,
          "features": relative, "paper": relative, "transfer": relative, "errors": errors, "positions": positions,
          "curves": curves, "latency": latency}


def load(file):
    with open(file, encoding="utf-8") as source:
        return json.load(source)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--base")
    parser.add_argument("--results")
    parser.add_argument("documents", nargs="+")
    arguments = parser.parse_args()
    table = TABLES[arguments.table]
    documents = arguments.documents if table is curves else [load(file) for file in arguments.documents]
    print("\n".join(table(documents, arguments)))


if __name__ == "__main__":
    main()
