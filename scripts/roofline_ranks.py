#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What two CUDA devices make of a decode step of Mistral-7B (tensor parallel), beside one.

Computed as scripts/roofline.py does, of a rank's part of the model: half of the heads, of the feed-forward columns and of
the vocabulary, and its sums with the other rank: one for the embedding and two a layer, of batch * 4096 float32, and a
gather of half of the logits. A rank's steps are graphs, as those of one device, with their sums in them.

    NCCL                NCCL_CALL + bytes / (LINK_SHARE * link)
    host memory         HOST_CALL + 2 * bytes / (LINK_SHARE * link)    copied out, and the other's read; with it the norm
                        up to 4 rows one launch, else two more and the norm's own

Sums of few bytes cost what the devices wait for each other. Both figures are of others' machines with two RTX 4090, which
reach each other through the host only; nothing was measured here.
"""
import argparse
import dataclasses
import json
import sys

import roofline
from roofline import BATCHES, CONTEXTS, DEVICES, GAP, GRAPH_GAP, GRAPH_START, KEPT, KERNELS, LINK_SHARE, MISTRAL_7B, WEIGHT_BITS

RANKS = 2
NCCL_CALL = 38e-6  # seconds of a sum of few bytes: a report of one user
HOST_CALL = 12e-6  # the same: 10 to 15 us in what llama.cpp reports of its path over host memory
ALONE_ROWS = 4  # EXCHANGE_ALONE_ROWS
PAPER = ("F16", 4096, 0.25, 1)
PAPER_FULL, PAPER_PRUNED = 18.0, 38.0  # tokens/s that the paper has for Mistral-7B in F16 on two RTX 4090


def part(model):
    """A rank's model. The stream stays as wide as it is."""
    return dataclasses.replace(model, heads=model.heads // RANKS, kv_heads=model.kv_heads // RANKS, ff=model.ff // RANKS,
                               vocabulary=model.vocabulary // RANKS)


def sums(model, batch):
    """How many, and bytes of each: one for the embedding, two a layer."""
    return 2 * model.layers + 1, batch * model.width * 4


def gathered(model, batch):
    """Bytes of logits that come to rank 0."""
    return batch * model.vocabulary * 4 // RANKS


def sum_time(device, way, size, rows, gap=GRAPH_GAP):
    link = LINK_SHARE * device.link
    if way == "nccl":
        return NCCL_CALL + size / link
    return HOST_CALL + 2 * size / link + (0 if rows <= ALONE_ROWS else 2 * gap)


def exchange_time(device, model, way, batch):
    count, size = sums(model, batch)
    return count * sum_time(device, way, size, batch) + sum_time(device, way, gathered(model, batch), ALONE_ROWS + 1, GAP)


def rank_time(device, model, way, weights, context, kept, batch):
    """Of a rank, without its exchanges. Norms that are taken with a sum are no launches."""
    own = roofline.step(part(model), weights, context, kept, batch)
    return GRAPH_START + sum(roofline.expected(device, KERNELS, operation) for operation in own
                             if operation.name != "rms_norm" or way != "host")


def describe_step(device, model, weights, context, kept, batch):
    one = roofline.describe_step(device, KERNELS, model, weights, context, kept, batch)
    bytes_each = sum(o.bytes for o in roofline.step(part(model), weights, context, kept, batch))
    needed = roofline.resident(part(model), weights, context, kept, batch)
    out = {"weights": weights, "context": context, "kept": kept, "batch": batch, "bytes_each": round(bytes_each),
           "resident_bytes_each": round(needed), "fits": needed <= device.memory,
           "one_expected_s": one["expected_s"], "one_fits": one["fits"], "sum_bytes": sums(model, batch)[1], "ways": {}}
    for way in ("nccl", "host"):
        exchange = exchange_time(device, model, way, batch)
        total = rank_time(device, model, way, weights, context, kept, batch) + exchange
        out["ways"][way] = {"exchange_s": exchange, "expected_s": total, "tokens_per_second": batch / total,
                            "speed_up": one["expected_s"] / total}
    return out


def describe(device, model=MISTRAL_7B):
    return {"device": device.__dict__, "ranks": RANKS,
            "assumed": {"nccl_call_s": NCCL_CALL, "host_call_s": HOST_CALL, "gap_s": GAP, "graph_gap_s": GRAPH_GAP, "graph_start_s": GRAPH_START},
            "steps": [describe_step(device, model, weights, context, kept, batch) for weights in WEIGHT_BITS
                      for context in CONTEXTS for kept in KEPT for batch in BATCHES]}


def find(found, weights, context, kept, batch):
    one, = (s for s in found["steps"] if (s["weights"], s["context"], s["kept"], s["batch"]) == (weights, context, kept, batch))
    return one


def markdown(found):
    rows = []
    for s in found["steps"]:
        cells = [s["weights"], f"{s['context'] // 1024}K", roofline.kept_name(s["kept"]), s["batch"],
                 roofline.size(s["bytes_each"]) + "B", f"{1e3 * s['one_expected_s']:.2f}"]
        for way in ("nccl", "host"):
            w = s["ways"][way]
            cells += [f"{1e3 * w['exchange_s']:.2f}", f"{1e3 * w['expected_s']:.2f}", f"{w['speed_up']:.2f}"]
        fits = "" if s["fits"] and s["one_fits"] else "one" if s["fits"] else f"{s['resident_bytes_each'] / 2**30:.0f} GiB"
        rows.append([*cells, fits])
    head = ["weights", "context", "cache", "batch", "bytes a card", "one card, ms", "NCCL: sums, ms", "step, ms", "speed-up",
            "host: sums, ms", "step, ms", "speed-up", "does not fit"]
    full = find(found, PAPER[0], PAPER[1], 1.0, PAPER[3])["ways"]
    pruned = find(found, *PAPER)["ways"]
    speed = lambda ways: f"{ways['nccl']['tokens_per_second']:.0f} (NCCL), {ways['host']['tokens_per_second']:.0f} (host)"
    return f"""Mistral-7B on two {found['device']['title']}, a sum {1e6 * NCCL_CALL:.0f} us by NCCL, {1e6 * HOST_CALL:.0f} us \
through host memory, and its bytes over the link:

{roofline.table(head, rows)}

The paper has {PAPER_FULL} and {PAPER_PRUNED} tokens/s for Mistral-7B in F16 (full cache, 25 %). Expected here, tokens/s of one sequence at
4K: {speed(full)} with the full cache, {speed(pruned)} with 25 %."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(DEVICES), default="rtx4090")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of Markdown")
    options = parser.parse_args()
    found = describe(DEVICES[options.device])
    print(json.dumps(found, indent=1) if options.json else markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
