#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a decode step of Mistral-7B has to move and compute on a CUDA device, and how fast that can be.

Computed from shapes; nothing is run. Operations and launches are those of cuda/*.c as they are, bytes are what each
launch reads and writes once (activations included, although most of them stay in the second-level cache), FLOPs what
the result needs. The limit of a launch is the larger of bytes / bandwidth and FLOPs / peak of the unit that computes it.

The expected time is a model, to be replaced by measurements (scripts/gpu_check.sh). A launch takes
    GAP + chain * LATENCY + max(bytes / rate, executed FLOPs / peak)
with chain the memory accesses that wait for one another before the block streams, and
    rate = min(MEMORY_SHARE * bandwidth, blocks on the device * bytes that a block has under way / LATENCY)
LATENCY is that of memory, or of the second-level cache for kernels that read what the kernel before them wrote.
Blocks on the device are those of the grid, as many as registers, shared memory and threads of a multiprocessor allow.
Between kernels of a graph GRAPH_GAP takes the place of GAP; the graph itself is started once a step.
"""
import argparse
import json
import math
import pathlib
import re
import sys
from dataclasses import dataclass, field

MEMORY_SHARE = 0.92  # of the bandwidth that long reads reach
LATENCY = 0.6e-6  # seconds from a load to its value, memory busy
CACHE_LATENCY = 0.25e-6  # the same from the second-level cache
GAP = 1.0e-6  # seconds between two kernels of a stream
GRAPH_GAP = 0.3e-6  # the same within a graph
GRAPH_START = 2.5e-6  # seconds of a stream until a graph's first kernel
COPY = 2.5e-6  # seconds of a stream for a small copy from pinned memory
LINK_SHARE = 0.8  # of the link that such copies reach

PAGE_SLOTS, SPLIT, GROUP_BYTES = 16, 256, 256 << 20  # engine/backend.h, cuda/attend.c
# Bytes of what is staged: struct kv_item and cuda_row, cuda_head_view, kv_statistics, cuda_score_unit, array_move,
# page_places, attend_tile, table_range and a page number, sample_row and sample_result.
ITEM, ROW, VIEW, STATISTICS, UNIT, MOVE, PLACES, TILE = 20, 8, 32, 128, 352, 64, 8, 16
RANGE, SAMPLE = 16 + 4, 64 + 176
SEGMENT = 1 << 20  # of the staging ring
CONTEXTS, BATCHES, KEPT = (4096, 32768), (1, 8, 32), (1.0, 0.25)


@dataclass(frozen=True)
class Device:
    title: str
    source: str
    bandwidth: float  # bytes/s
    half: float  # FLOP/s, dense, f16 with float32 sums
    int8: float  # operations/s, dense
    fp32: float  # FLOP/s
    link: float  # bytes/s from the host, one way
    memory: float  # bytes
    multiprocessors: int
    architecture: str
    shared: int  # bytes of a multiprocessor; a block takes 1024 more than it asks for
    threads: int
    blocks: int


DEVICES = {
    "rtx4090": Device("GeForce RTX 4090", "NVIDIA Ada GPU Architecture whitepaper, appendix A", 1008e9, 165.2e12, 660.6e12,
                      82.6e12, 31.5e9, 24 * 2**30, 128, "sm_89", 100 << 10, 1536, 24),
    "a100": Device("A100 80 GB SXM", "NVIDIA A100 data sheet", 2039e9, 312e12, 624e12, 19.5e12, 31.5e9, 80 * 2**30, 108,
                   "sm_80", 164 << 10, 2048, 32),
    "h100": Device("H100 SXM", "NVIDIA H100 data sheet", 3350e9, 989e12, 1979e12, 67e12, 63e9, 80 * 2**30, 132, "sm_90",
                   228 << 10, 2048, 32),
    "h200": Device("H200 SXM", "NVIDIA H200 data sheet", 4800e9, 989e12, 1979e12, 67e12, 63e9, 141e9, 132, "sm_90",
                   228 << 10, 2048, 32),
}
# Blocks, threads, shared memory and 65,536 registers of a multiprocessor: CUDA C++ Programming Guide, compute capabilities.
REGISTERS_MOST = 65536


@dataclass(frozen=True)
class Model:
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ff: int = 14336
    vocabulary: int = 32000


MISTRAL_7B = Model()
WEIGHT_BITS = {"F16": 16.0, "Q4_K": 4.5}


@dataclass(frozen=True)
class Kernel:
    """under_way: bytes that a block has asked for and not yet got, on average. registers: of a thread (ptxas, sm_89);
    None: not noted. symbol: of its mangled name. cached: reads the second-level cache."""

    threads: int
    shared: int
    under_way: int
    chain: int
    symbol: str
    registers: int | None = None
    why: str = ""
    cached: bool = False


def blocks_kernel(tokens, upper, tiles, blocks, stages, registers):
    """linear_multiply_blocks of Q4_0 (cuda/linear_blocks.cuh): a stage is `blocks` of 576 bytes of weights and, of each
    token, 32 bytes and 8 of scales."""
    stage = blocks * (576 + 40 * tokens)
    return Kernel(128, stages * stage, (stages - 1) * blocks * 576, 2,
                  rf"linear_multiply_blocks.*ILi4ELi{tiles}ELb{upper}ELi1ELi4ELi1ELi{blocks}ELi{stages}E", registers,
                  f"ring of {stages} stages by cp.async, {blocks} blocks of columns each")


def stream_kernel(tokens, registers):
    """linear_stream_floats of F16 (cuda/linear_floats.cu)."""
    return Kernel(128, 4 * (8192 + 512 * tokens), 3 * 8192, 2, rf"linear_stream_floatsILi1ELi{tokens}E", registers,
                  "ring of 4 stages by cp.async, 8 KiB of weights each")


def halves_kernel(tiles, stages, registers):
    """linear_multiply_halves of F16 (cuda/linear_halves.cu)."""
    return Kernel(128, stages * (32 + 16 * tiles) * 128, (stages - 1) * 4096, 2, rf"linear_multiply_halvesILb0ELi{tiles}E",
                  registers, f"ring of {stages} stages by cp.async, 4 KiB of weights each")


KERNELS = {
    "embed": Kernel(128, 0, 2048, 2, r"linear_embed_values", 14),
    "rms_norm": Kernel(256, 32, 16384, 3, r"norm_rowsILi4ELi1ELb0E", 36, "one block a row: most of the device idles", True),
    "rms_norm, 4 rows": Kernel(256, 128, 65536, 3, r"norm_rowsILi4ELi4ELb0E", 88, "one block for four rows", True),
    "round to int8": Kernel(128, 0, 2048, 1, r"linear_round_blocks", 25, "a launch of its own for little work", True),
    "round to f16": Kernel(128, 16, 1024, 2, r"linear_halve_rows", 22, "one block a row, 8 bytes a thread at a time", True),
    "Q4 product, 8 rows": blocks_kernel(8, 0, 1, 8, 6, 48),
    "Q4 product, 32 rows": blocks_kernel(32, 1, 2, 4, 4, 77),
    "F16 product, 1 row": stream_kernel(1, 58),
    "F16 product, 8 rows": stream_kernel(8, 54),
    "F16 product, 32 rows": halves_kernel(2, 5, 56),
    "rope, append": Kernel(128, 96 + 16 * 138 * 4, 2048, 4, r"rope_append", 52, "2 bytes of each sector of a key", True),
    "attend, splits": Kernel(128, 8192 + 4 * 2 * 4352 + 1024, 24576, 5, r"attend_split_kernelIL9kv_format1ELj16E", 122,
                             "4 warps a block, each up to two pages of 4 KiB; few splits leave multiprocessors idle"),
    "attend, merge": Kernel(32, 0, 8192, 5, r"attend_merge_kernelILj2ELj16E", 104, "16 splits of 512 bytes a row", True),
    "statistics": Kernel(128, 960, 1536, 6, r"statistics_sweep_kernelIL12sweep_source0ELb0E", 60,
                         "4 bytes a thread at a time, the heads of a group one after the other", True),
    "silu_mul": Kernel(256, 0, 8192, 1, r"gate_vectorsI4silu", 26, "32 bytes a thread", True),
    "sample": Kernel(1024, 33 << 10, 16384, 3, r"6samplePKf", 56, "one block a row", True),
    "score, worst": Kernel(256, 700, 8192, 5, r"score_chain_worst", 64,
                           "one block a head, sum and position of 4 slots a thread at a time"),
    "clear slots": Kernel(256, 0, 2048, 2, r"clear_places", 12),
    "move statistics": Kernel(256, 0, 2048, 3, r"move_arrays", 36),
    "write tables": Kernel(128, 0, 2048, 3, r"write_tables", 12),
}


@dataclass(frozen=True)
class Launch:
    """`count` launches of one kernel, each of `blocks` blocks. executed: FLOPs with the tiles' padding, a launch."""

    kernel: str
    count: int
    blocks: int
    bytes: float
    executed: float = 0.0
    unit: str = "fp32"


@dataclass
class Operation:
    name: str
    flops: float = 0.0
    unit: str = "fp32"
    launches: list = field(default_factory=list)
    copies: int = 0  # between host and device, and fills
    copied: float = 0.0  # bytes of them
    graph: bool = False  # launched as part of the step's graph

    @property
    def bytes(self):
        return sum(l.count * l.bytes for l in self.launches)

    @property
    def count(self):
        return sum(l.count for l in self.launches)


def ceil(a, b):
    return -(-a // b)


# ---- what a step does ----


def norm(model, rows, count):
    four = rows >= 16
    return Launch("rms_norm, 4 rows" if four else "rms_norm", count, ceil(rows, 4) if four else rows,
                  rows * model.width * 8 + model.width * 4)


def product_kernel(weights, rows):
    """Kernel, unit that computes, rows that it computes. The batches of the table are at most 32."""
    if weights == "F16":
        if rows <= 8:
            tokens = 1 if rows == 1 else 8
            return f"F16 product, {tokens} row{'s' * (tokens > 1)}", "fp32", tokens
        return "F16 product, 32 rows", "half", 32
    return ("Q4 product, 8 rows", "int8", 16) if rows <= 8 else ("Q4 product, 32 rows", "int8", 32)


def linear(model, weights, name, out, columns, rows, count, add):
    """One call of `linear`, its activations prepared before (cuda/linear.c, choose_method)."""
    kernel, unit, computed = product_kernel(weights, rows)
    launches, x_bytes = [], rows * columns * 4
    if weights != "F16":
        x_bytes = rows * columns * 1.25
        launches.append(Launch("round to int8", count, ceil(rows * columns // 32, 16), rows * columns * 5.25))
    elif rows > 8:
        x_bytes = rows * columns * 2
        launches.append(Launch("round to f16", count, rows, rows * columns * 6))
    moved = out * columns * WEIGHT_BITS[weights] / 8 + x_bytes + rows * out * (8 if add else 4)
    launches.append(Launch(kernel, count, ceil(out, 32), moved, 2 * computed * out * columns, unit))
    return Operation(name, 2 * rows * out * columns * count, unit, launches)


def sent(model, rows, statistics):
    """What cuda_step_begin copies (cuda/step.c), and the pages that begin: of one sequence in sixteen each step, at least
    of one. They are marked as unused, and their numbers go to the page tables."""
    views = rows * model.kv_heads * model.layers
    step = rows * (4 + ITEM + ROW + 2 * TILE) + views * (VIEW + (STATISTICS if statistics else 0))
    pages = ceil(rows, PAGE_SLOTS) * model.kv_heads * model.layers
    return [Operation("step", 0, "fp32", [], 1, step),
            Operation("new pages", 0, "fp32", [Launch("clear slots", 1, ceil(4 * pages, 256), pages * (PLACES + 64)),
                                               Launch("write tables", 1, ceil(pages, 16), pages * (RANGE + 4))],
                      2, pages * (PLACES + RANGE))]


def attention(model, slots, rows, statistics):
    """rope_and_append, attend with h2o's statistics or none."""
    m, heads, dim, layers = model, model.heads, model.head_dim, model.layers
    views, splits = rows * m.kv_heads, ceil(slots, SPLIT)
    scratch = heads * splits * (16 + 4 * (dim + (SPLIT if statistics else 0)))
    groups = ceil(rows, max(1, GROUP_BYTES // scratch))
    # A key's channels lie in as many sectors of 32 bytes.
    rope = Operation("rope_and_append", 6 * rows * (heads + m.kv_heads) * dim // 2 * layers, "fp32",
                     [Launch("rope, append", layers, rows * 9, rows * (2 * heads + 2 * m.kv_heads) * dim * 4 +
                             views * (dim * 32 + dim * 2 + 4))])
    partial = rows * heads * splits * (16 + 4 * dim)
    kept = rows * heads * slots * 4 if statistics else 0
    cache = views * slots * (2 * dim * 2 + 4)
    useful = 4 * rows * heads * dim * slots
    # Tiles have 16 rows, of which a group fills heads / kv_heads; queries are two numbers of f16.
    executed = useful * 16 / (heads / m.kv_heads) * 1.5
    split = Launch("attend, splits", layers * groups, ceil(rows, groups) * m.kv_heads * splits,
                   (cache + rows * heads * dim * 4 + partial + kept) / groups, executed / groups, "half")
    merge = Launch("attend, merge", layers * groups, ceil(rows, groups) * heads,
                   (partial + rows * heads * (4 * dim + 16)) / groups)
    attend = Operation("attend", useful * layers, "half", [split, merge])
    if not statistics:
        return [rope, attend]
    # Logits, positions, and plane 0 of the sums, read and written.
    sweep = Launch("statistics", layers * groups, ceil(rows, groups) * m.kv_heads * ceil(slots, 128),
                   (kept + views * slots * 12) / groups)
    return [rope, attend, Operation("statistics", 4 * rows * heads * slots * layers, "fp32", [sweep])]


def eviction(model, slots, rows):
    """h2o's prune of a step, one slot of each head: found on the device, told to the host with the tokens."""
    heads = rows * model.layers * model.kv_heads
    score = Operation("score", 0, "fp32", [Launch("score, worst", 1, heads, heads * slots * 8)],
                      2, heads * (UNIT + 4))
    # Of all sequences together, as far as the staging ring goes.
    moves = ceil(heads * MOVE, SEGMENT)
    compact = Operation("compact", 0, "fp32", [
        Launch("clear slots", 1, ceil(4 * heads, 256), heads * (PLACES + 4)),
        Launch("move statistics", moves, heads // moves, heads // moves * (MOVE + 8))], 1 + moves, heads * (PLACES + MOVE))
    return [score, compact]


def step(model, weights, context, kept, batch):
    """Operations of one decode step of `batch` sequences, each with `context` tokens seen. kept 1: no policy; less: h2o."""
    m, slots, statistics = model, int(context * kept), kept < 1
    qkv = (m.heads + 2 * m.kv_heads) * m.head_dim
    out = [Operation("embed", 0, "fp32", [Launch("embed", 1, batch, batch * m.width * (WEIGHT_BITS[weights] / 8 + 4))]),
           Operation("rms_norm", 3 * batch * m.width * (2 * m.layers + 1), "fp32", [norm(m, batch, 2 * m.layers + 1)]),
           linear(m, weights, "qkv", qkv, m.width, batch, m.layers, False)]
    out += attention(m, slots, batch, statistics)
    out += [linear(m, weights, "attn_output", m.width, m.heads * m.head_dim, batch, m.layers, True),
            linear(m, weights, "gate_up", 2 * m.ff, m.width, batch, m.layers, False),
            Operation("silu_mul", 5 * batch * m.ff * m.layers, "fp32",
                      [Launch("silu_mul", m.layers, batch * ceil(m.ff // 4, 256), batch * m.ff * 12)]),
            linear(m, weights, "down", m.width, m.ff, batch, m.layers, True)]
    for operation in out:
        operation.graph = True
    out = sent(m, batch, statistics) + out
    out += [linear(m, weights, "logits", m.vocabulary, m.width, batch, 1, False),
            Operation("sample", batch * m.vocabulary, "fp32", [Launch("sample", 1, batch, batch * m.vocabulary * 4)], 3,
                      batch * SAMPLE)]
    return out + eviction(m, slots, batch) if statistics else out


def resident(model, weights, context, kept, batch):
    """Bytes of weights (embeddings included), pages and statistics."""
    m = model
    layer = (m.heads + 2 * m.kv_heads) * m.head_dim * m.width + m.width * m.heads * m.head_dim + 3 * m.ff * m.width
    page = ceil(PAGE_SLOTS * (4 * m.head_dim + 4), 64) * 64
    slots = int(context * kept)
    cache = ceil(slots, PAGE_SLOTS) * page + (8 * slots if kept < 1 else 0)
    return (layer * m.layers + 2 * m.vocabulary * m.width) * WEIGHT_BITS[weights] / 8 + \
        batch * m.layers * m.kv_heads * cache


# ---- how fast that can be ----


def peak(device, unit):
    return getattr(device, unit)


def limit(device, operation):
    return max(operation.bytes / device.bandwidth, operation.flops / peak(device, operation.unit))


def blocks_resident(device, kernel):
    """Blocks of a kernel on one multiprocessor, and what limits them."""
    limits = {"threads": device.threads // kernel.threads, "blocks": device.blocks,
              "shared memory": device.shared // (kernel.shared + 1024)}
    if kernel.registers is not None:
        warp = ceil(kernel.registers * 32, 256) * 256
        limits["registers"] = REGISTERS_MOST // warp // (kernel.threads // 32)
    least = min(limits, key=limits.get)
    return limits[least], least


def launch_time(device, kernels, launch, gap=GAP):
    kernel = kernels[launch.kernel]
    blocks = min(launch.blocks, blocks_resident(device, kernel)[0] * device.multiprocessors)
    latency = CACHE_LATENCY if kernel.cached else LATENCY
    rate = min(MEMORY_SHARE * device.bandwidth, blocks * kernel.under_way / latency)
    return gap + kernel.chain * latency + max(launch.bytes / rate, launch.executed / peak(device, launch.unit))


def expected(device, kernels, operation):
    copies = operation.copies * COPY + operation.copied / (LINK_SHARE * device.link)
    gap = GRAPH_GAP if operation.graph else GAP
    return sum(l.count * launch_time(device, kernels, l, gap) for l in operation.launches) + copies


def read_registers(folder, architecture):
    """Kernels with the registers that a build's reports say (cuda/FILE.cu.ptxas.txt)."""
    text = "".join(path.read_text() for path in sorted(pathlib.Path(folder).glob("*.ptxas.txt")))
    found = re.findall(rf"Compiling entry function '(\S+)' for '{architecture}'.*?Used (\d+) registers", text, re.S)
    out = {}
    for name, kernel in KERNELS.items():
        most = [int(registers) for symbol, registers in found if re.search(kernel.symbol, symbol)]
        out[name] = Kernel(**{**kernel.__dict__, "registers": max(most)}) if most else kernel
    if not found:
        raise SystemExit(f"roofline.py: no report for {architecture} in {folder}")
    return out


def describe_operation(device, kernels, operation):
    at_limit, time = limit(device, operation), expected(device, kernels, operation)
    return {"name": operation.name, "bytes": round(operation.bytes), "flops": round(operation.flops), "unit": operation.unit,
            "launches": operation.count, "graph": operation.graph, "copies": operation.copies, "copied_bytes": round(operation.copied),
            "limit_s": at_limit, "expected_s": time, "expected_fraction": at_limit / time,
            "kernels": sorted({l.kernel for l in operation.launches})}


def describe_step(device, kernels, model, weights, context, kept, batch):
    operations = [describe_operation(device, kernels, o) for o in step(model, weights, context, kept, batch)]
    totals = {key: sum(o[key] for o in operations)
              for key in ("bytes", "flops", "launches", "copies", "copied_bytes", "limit_s", "expected_s")}
    totals["graph_launches"] = sum(o["launches"] for o in operations if o["graph"])
    totals["expected_s"] += GRAPH_START
    needed = resident(model, weights, context, kept, batch)
    return {"weights": weights, "context": context, "kept": kept, "batch": batch, **totals,
            "link_s": totals["copied_bytes"] / device.link, "expected_fraction": totals["limit_s"] / totals["expected_s"],
            "resident_bytes": round(needed), "fits": needed <= device.memory, "operations": operations}


def describe_kernel(device, kernels, name, launch):
    kernel = kernels[name]
    blocks, limited = blocks_resident(device, kernel)
    on_device = min(launch.blocks, blocks * device.multiprocessors)
    return {"name": name, "registers": kernel.registers, "shared_bytes": kernel.shared, "blocks_resident": blocks,
            "limited_by": limited, "warps_resident": blocks * kernel.threads // 32, "grid": launch.blocks,
            "under_way_bytes": round(on_device * kernel.under_way / device.multiprocessors), "bytes": round(launch.bytes),
            "limit_s": launch.bytes / device.bandwidth, "expected_s": launch_time(device, kernels, launch),
            "why": kernel.why}


def describe(device, kernels, model=MISTRAL_7B):
    steps = [describe_step(device, kernels, model, weights, context, kept, batch)
             for weights in WEIGHT_BITS for context in CONTEXTS for kept in KEPT for batch in BATCHES]
    shown = {}  # the largest launch of each kernel
    for weights in WEIGHT_BITS:
        for context in CONTEXTS:
            for kept in KEPT:
                for batch in BATCHES:
                    for operation in step(model, weights, context, kept, batch):
                        for launch in operation.launches:
                            shown.setdefault(launch.kernel, []).append(launch)
    rows = []
    for name, launches in shown.items():
        small, large = (pick(launches, key=lambda l: l.bytes) for pick in (min, max))
        low, high = (describe_kernel(device, kernels, name, l) for l in (small, large))
        rows.append({**high, "expected_fraction": high["limit_s"] / high["expected_s"], "smallest": {
            "grid": low["grid"], "bytes": low["bytes"], "under_way_bytes": low["under_way_bytes"],
            "expected_fraction": low["limit_s"] / low["expected_s"]}})
    return {"device": device.__dict__, "model": model.__dict__, "weight_bits": WEIGHT_BITS,
            "assumed": {"memory_share": MEMORY_SHARE, "latency_s": LATENCY, "cache_latency_s": CACHE_LATENCY, "gap_s": GAP, "graph_gap_s": GRAPH_GAP,
                        "graph_start_s": GRAPH_START, "copy_s": COPY, "link_share": LINK_SHARE},
            "needed_under_way_bytes": round(device.bandwidth * LATENCY / device.multiprocessors),
            "steps": steps, "kernels": rows}


# ---- tables ----


def size(number):
    """Three digits, SI."""
    for power, name in ((9, "G"), (6, "M"), (3, "k")):
        if abs(number) >= 0.9995 * 10**power:
            scaled = number / 10**power
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {name}"
    return f"{number:.0f} "


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def kept_name(kept):
    return "full" if kept == 1 else f"{100 * kept:.0f} %"


def step_table(found):
    rows = []
    for s in found["steps"]:
        rows.append([s["weights"], f"{s['context'] // 1024}K", kept_name(s["kept"]), s["batch"], size(s["bytes"]) + "B",
                     size(s["flops"]), f"{1e3 * s['limit_s']:.2f}", f"{s['batch'] / s['limit_s']:.0f}",
                     f"{s['graph_launches']} + {s['launches'] - s['graph_launches']} + {s['copies']}",
                     f"{size(s['copied_bytes'])}B, {1e3 * s['link_s']:.2f}", f"{1e3 * s['expected_s']:.2f}",
                     f"{100 * s['expected_fraction']:.0f} %", "" if s["fits"] else f"{s['resident_bytes'] / 2**30:.0f} GiB"])
    return table(["weights", "context", "cache", "batch", "bytes", "FLOP", "limit, ms", "tokens/s at it", "in the graph + beside it + copies",
                  "from the host, ms", "expected, ms", "of the limit", "does not fit"], rows)


def cell(o):
    return f"{size(o['bytes'])}B, {size(o['flops'])}FLOP, {1e3 * o['limit_s']:.3f} ms, {100 * o['expected_fraction']:.0f} %"


CACHE_OPERATIONS = ("attend", "statistics", "score", "compact")
SMALL_OPERATIONS = ("step", "new pages", "embed", "sample", "compact")  # left to --json
SMALL_KERNELS = ("embed", "clear slots", "move statistics", "write tables", "round to f16")


def operation_rows(found, weights, context, kept, shown):
    """Of steps of all batches: name, launches, cells."""
    steps = [s for s in found["steps"] if (s["weights"], s["context"], s["kept"]) == (weights, context, kept)]
    for of_batches in zip(*(s["operations"] for s in steps)):
        if shown(of_batches[0]["name"]):
            launches = " / ".join(dict.fromkeys(str(o["launches"]) for o in of_batches))
            yield [of_batches[0]["name"], launches, *map(cell, of_batches)]


def weight_table(found):
    """Operations that do not depend on the cache: of the first context, full."""
    formats = {}
    for weights in WEIGHT_BITS:
        for row in operation_rows(found, weights, CONTEXTS[0], 1.0,
                                  lambda name: name not in CACHE_OPERATIONS + SMALL_OPERATIONS):
            formats.setdefault(tuple(row), []).append(weights)
    rows = sorted(([", ".join(weights), *row] for row, weights in formats.items()), key=lambda row: list(WEIGHT_BITS).index(
        row[0]) if row[0] in WEIGHT_BITS else -1)
    return table(["weights", "operation", "launches", *(f"batch {b}" for b in BATCHES)], rows)


def cache_table(found):
    """Operations on the cache; the same for both formats."""
    rows = [[f"{context // 1024}K", kept_name(kept), *row] for context in CONTEXTS for kept in KEPT
            for row in operation_rows(found, "F16", context, kept,
                                      lambda name: name in CACHE_OPERATIONS and name not in SMALL_OPERATIONS)]
    return table(["context", "cache", "operation", "launches", *(f"batch {b}" for b in BATCHES)], rows)


def kernel_table(found):
    rows = []
    for k in found["kernels"]:
        low = k["smallest"]
        if k["name"] in SMALL_KERNELS:
            continue
        spans = [f"{a} to {b}" if a != b else a for a, b in (
            (f"{100 * low['expected_fraction']:.0f} %", f"{100 * k['expected_fraction']:.0f} %"),
            (size(low["bytes"]) + "B", size(k["bytes"]) + "B"), (low["grid"], k["grid"]),
            (f"{low['under_way_bytes'] / 1024:.1f}", f"{k['under_way_bytes'] / 1024:.1f}"))]
        registers = "" if k["registers"] is None else k["registers"]
        rows.append([k["name"], registers, k["shared_bytes"] or "", f"{k['blocks_resident']} ({k['limited_by']})",
                     k["warps_resident"], spans[2], spans[3], spans[1], spans[0], k["why"]])
    return table(["kernel", "registers", "shared, bytes", "blocks a multiprocessor", "warps", "grid",
                  "KiB under way a multiprocessor", "bytes a launch", "of the limit", "why"], rows)


def markdown(found):
    d, a = found["device"], found["assumed"]
    return f"""Mistral-7B on one {d['title']}: {d['bandwidth'] / 1e9:.0f} GB/s, {d['half'] / 1e12:.0f} TFLOP/s dense f16 with float32 sums,
{d['int8'] / 1e12:.0f} Tops int8, {d['fp32'] / 1e12:.1f} TFLOP/s float32, {d['link'] / 1e9:.1f} GB/s from the host ({d['source']}).
f16 cache; 25 %: h2o with its statistics, pruned at each step. All matrices of a model in one format. Q4_K: computed as Q4_0,
whose stages have as many bytes.
Expected: {100 * a['memory_share']:.0f} % of the bandwidth for long reads, {1e6 * a['latency_s']:.1f} us a memory access (so that \
{found['needed_under_way_bytes'] / 1024:.1f} KiB must be under way a
multiprocessor), {1e6 * a['cache_latency_s']:.2f} us one of the second-level cache, {1e6 * a['gap_s']:.1f} us between kernels, {1e6 * a['graph_gap_s']:.1f} us within a
graph, {1e6 * a['graph_start_s']:.1f} us to start one, {1e6 * a['copy_s']:.1f} us a copy from the host: assumptions, nothing was measured.

Steps:

{step_table(found)}

Operations that do not depend on the cache, all layers (bytes, FLOPs, time at the limit, expected part of the limit):

{weight_table(found)}

Operations on the cache:

{cache_table(found)}

Kernels, from their smallest to their largest launch in these steps:

{kernel_table(found)}"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(DEVICES), default="rtx4090")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of Markdown")
    parser.add_argument("--ptxas", metavar="FOLDER", help="registers from the reports of a build, e.g. build-cuda/cuda, "
                        "instead of those noted here")
    options = parser.parse_args()
    device = DEVICES[options.device]
    kernels = read_registers(options.ptxas, device.architecture) if options.ptxas else KERNELS
    found = describe(device, kernels)
    print(json.dumps(found, indent=1) if options.json else markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
