#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""policy_table.py DOCUMENT...: one Markdown table from documents of `distillcache eval --json`, a task each.

A cell has the values of all budgets, the largest first. kl: geometric mean of the KL per step, in nats (0: as the full
cache). Other tasks: score, and in parentheses the mean log-probability of the right answer; in brackets where `full` is
not 15 points above chance, so that the score says nothing. A document that was stopped before its end says so.
"""
import json
import sys


def cell(rows):
    """The values of one policy in one task."""
    if "kl" in rows[0]:
        return " / ".join(f"{row['kl_geometric']:.3f}" for row in rows)
    scores = " / ".join(f"{row['score']:.2f}" for row in rows) if "score" in rows[0] else ""
    if "claimed" in rows[0] and not rows[0]["claimed"]:
        scores = f"[{scores}]"
    return f"{scores} ({' / '.join(format(row['gold_logprob'], '.1f') for row in rows)})".strip()


def table(documents):
    """Lines of the table."""
    policies, cells = [], {}
    for document in documents:
        for row in document["rows"]:
            if row["kv_policy"] not in policies:
                policies.append(row["kv_policy"])
            cells.setdefault((row["kv_policy"], document["task"]), []).append(row)
    ratios = sorted({row["kv_ratio"] for d in documents for row in d["rows"] if row["kv_policy"] != "full"}, reverse=True)
    tasks = [document["task"] for document in documents]
    lines = ["| tokens kept: " + " / ".join(f"{100 * r:g} %" for r in ratios) + " | " + " | ".join(tasks) + " |",
             "|---" * (1 + len(tasks)) + "|"]
    for policy in policies:
        rows = [sorted(cells.get((policy, task), []), key=lambda row: -row["kv_ratio"]) for task in tasks]
        lines.append(f"| `{policy}` | " + " | ".join(cell(r) if r else "" for r in rows) + " |")
    return lines


def main(files):
    documents = []
    for file in files:
        with open(file, encoding="utf-8") as source:
            documents.append(json.load(source))
    print("\n".join(table(documents)))
    first = documents[0]
    counts = ", ".join(f"{d['task']} {d['items']}" for d in documents)
    print(f"\n{first['model']}, context of {', '.join(map(str, first['lengths']))} tokens, seed {first['seed']}; "
          f"items: {counts}" + ("" if all(d["complete"] for d in documents) else "; stopped before the end"))


if __name__ == "__main__":
    main(sys.argv[1:])
