#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether the tests of the CUDA kernels find faults: puts one fault after another into a copy of the sources, builds it
against the emulator, and runs the case of tests/parity that should fail.

  mutations.py [--only WORDS] [--folder FOLDER] [--list]

A copy and its build (some minutes) go to FOLDER (default: a temporary one, removed at the end; one that is there is used
again). Prints a Markdown table: what finds each fault, the emulator (and in which words) or a comparison with the
reference, or that it survives. Exit status 1 when one survives, or does not apply to the sources any more.

To add one: a Mutation below. `before` must stand exactly once in the file; the fault is `after` in its place.
"""
import argparse
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU_SECONDS = 300  # of a case; a fault may well wait for ever


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str  # of cuda/
    before: str
    after: str
    case: str  # parity --only


MUTATIONS = [
    # Matrix products.
    Mutation("missing barrier before a stage is read", "linear_blocks.cuh",
             "__syncthreads(); /* the stage is there for all, and all are done with the slot that is filled next */", "",
             "linear q4_1"),
    Mutation("cp.async: one group too few is waited for", "linear_blocks.cuh",
             "device_copy_wait<S::STAGES - 2>();", "device_copy_wait<S::STAGES - 1>();", "linear q8_0"),
    Mutation("halves of a fragment swapped (weights)", "linear_format.cuh",
             "b[0] = word & 0x0f0f0f0fu;\n        b[1] = word >> 4 & 0x0f0f0f0fu;",
             "b[1] = word & 0x0f0f0f0fu;\n        b[0] = word >> 4 & 0x0f0f0f0fu;", "linear q4_1"),
    Mutation("elements of a fragment swapped (activations)", "linear_blocks.cuh",
             "{lower.x, upper.x, lower.y, upper.y}", "{lower.x, lower.y, upper.x, upper.y}", "linear q8_0"),
    Mutation("unguarded tail of columns", "linear_blocks.cuh",
             "chunk >= first && chunk < HEAD_CHUNKS + blocks * (F::STEP / 16))", "chunk >= first)",
             "linear q4_0"),
    Mutation("last token of an odd number is not guarded", "linear_blocks.cuh",
             "linear_least(tile.token + i * S::TILE_TOKENS + g, tile.last)", "tile.token + i * S::TILE_TOKENS + g",
             "linear q8_0"),
    Mutation("wrong swizzle of a row in shared memory", "linear_floats.cu",
             "chunk_place(read_row, chunk)) * 16, w);", "chunk) * 16, w);", "linear f16"),
    Mutation("missing barrier between partial sums and their total", "linear_floats.cu",
             "    __syncthreads();\n    for (uint32_t token = warp; token < TOKENS; token += STREAM_WARPS) {",
             "    for (uint32_t token = warp; token < TOKENS; token += STREAM_WARPS) {", "linear f16"),
    Mutation("wrong quarter of a fragment (ldmatrix)", "linear_halves.cu",
             "chunk + 2 * step + lane / 16", "chunk + 2 * step + lane / 8 % 2", "linear paths, deterministic f16"),
    Mutation("stage of the ring one too far", "linear_halves.cu",
             "ring + (slot == 0 ? RING - 1 : slot - 1) * BYTES", "ring + slot * BYTES", "linear paths, long rows"),
    Mutation("ties are rounded up instead of to even", "linear_prepare.cu",
             "(int)rintf(values[i] * inverse)", "(int)floorf(values[i] * inverse + 0.5f)", "linear q8_0"),
    Mutation("shuffle of too few lanes", "linear_prepare.cu",
             "    for (int distance = 2; distance > 0; distance /= 2)\n        sum +=",
             "    for (int distance = 1; distance > 0; distance /= 2)\n        sum +=", "linear q4_1"),
    Mutation("sums of the two halves of 32 swapped", "linear_prepare.cu",
             "(sum & 0xffff) | other << 16", "(other & 0xffff) | sum << 16", "linear q2_k"),
    Mutation("both parts of 16 times the first activations", "linear_blocks.cuh", "a + 2 * part", "a", "linear q6_k"),
    Mutation("head of the first 256 columns for all", "linear_blocks.cuh",
             "first % LINEAR_SUPER_STEPS == 0)", "first == 0)", "linear paths, long rows"),
    Mutation("second part scaled as the first", "linear_format.cuh",
             "s.d[LAST] = make_float2(d.x * (float)(signed char)(word >> 8)",
             "s.d[LAST] = make_float2(d.x * (float)(signed char)word", "linear q6_k"),
    Mutation("half of a table", "linear_format.cuh", "(nibbles >> 1 & 0x4444u)", "(nibbles >> 1 & 0x0444u)", "linear iq4_nl"),
    Mutation("fifth bits of the wrong half", "linear_format.cuh",
             "b[1] |= block_spread_bits(bits >> 4)", "b[1] |= block_spread_bits(bits & 15)", "linear q5_k"),
    # Attention.
    Mutation("missing __syncwarp after a wait", "attend.cu",
             "device_copy_wait<1>();\n    __syncwarp();", "device_copy_wait<1>();", "attend any shape"),
    Mutation("missing __syncwarp before a stage is filled again", "attend.cu",
             "s + page);\n            __syncwarp();", "s + page);", "attend any shape"),
    Mutation("page table read one page too far", "attend.cu",
             "queue.own = view.pages[first_page + lane / 8];", "queue.own = view.pages[first_page + lane / 8 + 1];",
             "attend any shape"),
    Mutation("missing barrier before chunks are folded", "attend.cu",
             "    device_copy_wait<0>();\n    __syncthreads();\n    split_fold", "    device_copy_wait<0>();\n    split_fold",
             "attend any shape"),
    Mutation("splits merged with another split's maximum", "attend.cu",
             "float next_m = __shfl_sync(ATTEND_ALL, mine.m, (int)(i + ahead));",
             "float next_m = __shfl_sync(ATTEND_ALL, mine.m, (int)i);", "attend long"),
    Mutation("wrong mask: a token does not see itself", "attend.cuh",
             "return (uint32_t)row - (uint32_t)slot < span;", "return (uint32_t)row - (uint32_t)slot - 1 < span;",
             "attend any shape"),
    Mutation("window one position too long", "attend.cuh",
             "return (uint32_t)row - (uint32_t)slot < span;", "return (uint32_t)row - (uint32_t)slot <= span;",
             "attend variants"),
    Mutation("all rows of a tile see what the first one does", "attend.cuh",
             "span > later ? span - later : 0;", "span;", "attend variants"),
    Mutation("pages that are gone are read", "attend.cu",
             "queue.first = pages_gone > first_page ? pages_gone - first_page : 0;", "queue.first = 0;",
             "attend variants"),
    Mutation("pages that are gone are looked at (prefill)", "attend_prefill.cu",
             "if (page < pages && page >= attend_first_page(view)) {", "if (page < pages) {", "attend variants"),
    Mutation("no soft cap", "attend.cuh",
             "    if (cap == 0)\n        return;", "    if (cap != -1)\n        return;", "attend variants"),
    Mutation("sums of a fold are not scaled down", "attend.cuh",
             "*l = fmaf(next_l, *add, *l * *keep);", "*l = fmaf(next_l, *add, *l);", "attend long"),
    Mutation("what nobody sees is not taken out", "attend.cuh",
             "if (__any_sync(ATTEND_ALL, bad != 0))", "if (__any_sync(ATTEND_ALL, bad > 0xffffffffu - 1))",
             "attend hidden infinity"),
    Mutation("values are weighed before they have come", "attend_prefill.cu",
             "device_copy_wait<1>();\n        __syncthreads(); /* values are there */",
             "device_copy_wait<2>();\n        __syncthreads(); /* values are there */", "attend any shape"),
    Mutation("keys are written while others read them", "attend_prefill.cu",
             "__syncthreads(); /* nobody needs the keys, and the next pages are known */", "", "attend any shape"),
    Mutation("stale page numbers of the chunk before", "attend_prefill.cu",
             "shared.numbers[turn * ATTEND_CHUNK_PAGES + threadIdx.x] = number;",
             "shared.numbers[turn * ATTEND_CHUNK_PAGES + threadIdx.x] = whole_number(view, chunk);", "attend long"),
    Mutation("splits of 256 slots folded at other places", "attend_prefill.cu",
             "if (next / ATTEND_SPLIT_CHUNKS != chunk / ATTEND_SPLIT_CHUNKS || next >= chunks)", "if (next >= chunks)",
             "attend long"),
    # Statistics.
    Mutation("plain add instead of an atomic", "sums.cuh",
             "before = atomicCAS(&planes[slot], seen, sum_next(seen, value, &high));",
             "before = seen;\n        planes[slot] = sum_next(seen, value, &high);", "statistics many rows"),
    Mutation("plain add instead of an atomic (bits of scissorhands)", "statistics.cu",
             "        atomicAdd((unsigned long long *)to, value);", "        *to += value;", "statistics many rows"),
    Mutation("wrong stride of the window's rows", "statistics.cu",
             "size_t at = (size_t)(position % sweep.to->window) * sweep.to->capacity + sweep.slot;",
             "size_t at = (size_t)(position % sweep.to->window) * (sweep.to->capacity - 16) + sweep.slot;",
             "statistics any shape"),
    Mutation("queries are replaced while others read them", "statistics.cu",
             "                    sweep, token_sums, rows[token * place.group].total.seen, position, tile.token + token, sums, alone);\n"
             "        }\n        __syncthreads();",
             "                    sweep, token_sums, rows[token * place.group].total.seen, position, tile.token + token, sums, alone);\n"
             "        }", "statistics any shape"),
    # Rotation, pages.
    Mutation("keys are stored before all are turned", "rope.cu",
             "    append_values(batch, turns, plan, tile, first_head, heads, qkv, keys);\n    __syncthreads();",
             "    append_values(batch, turns, plan, tile, first_head, heads, qkv, keys);", "append"),
    Mutation("second page of a tile is the first", "rope.cu",
             "last > page ? page_at(batch.pool, view.pages[last]) : NULL", "last > page ? page_at(batch.pool, view.pages[page]) : NULL",
             "append"),
    Mutation("place in a page from another head", "rope.cu",
             "place = tile->places[head] + token;\n            char *page", "place = tile->places[0] + token;\n            char *page",
             "append"),
    Mutation("columns are written before all are read", "pages.cu",
             "kept[r] = mine && r < rows.count ? rows.from[r][from] : 0;\n        __syncthreads();",
             "kept[r] = mine && r < rows.count ? rows.from[r][from] : 0;", "move_statistics"),
    Mutation("four places are cleared where one was to be", "pages.cu", "if (bits == 15) {", "if (bits != 0) {", "clear_slots"),
    Mutation("value goes to the place that it came from", "pages.cu",
             "to[target % KV_PAGE_SLOTS * words + i % words]", "to[source % KV_PAGE_SLOTS * words + i % words]", "move_slots"),
    Mutation("unguarded tail of a block's moves", "pages.cu",
             "    else if (mine < some)\n        move_numbers<uint16_t>", "    else\n        move_numbers<uint16_t>", "move_slots"),
    # Vectors.
    Mutation("missing barrier in a sum over the block", "vector.cuh",
             "        sums[threadIdx.x / 32] = sum;\n    __syncthreads();", "        sums[threadIdx.x / 32] = sum;", "rms_norm"),
    Mutation("rows beyond the last are written", "vector.cu",
             "            if (first + r >= rows)\n                continue;\n", "", "rms_norm"),
    Mutation("norm takes the place of what it is added to", "vector.cu",
             "*to = ADD ? vector_sum(*to, scaled) : scaled;", "*to = scaled;", "rms_norm_add"),
    Mutation("keys have the weights of queries", "vector.cu",
             "((const float4 *)plan.weights[kind])[at]", "((const float4 *)plan.weights[0])[at]", "head_norms"),
    Mutation("bias of the first columns for all", "vector.cu",
             "((const vector *)bias)[at]", "((const vector *)bias)[threadIdx.x]", "add_bias"),
    Mutation("last numbers of all rows are left out", "vector.cu",
             "at < vectors + count % 4", "at < vectors", "soft_cap"),
    # Sampling.
    Mutation("plain add of masses", "sample.cuh",
             "atomicAdd(&shared->masses[i], weight_of(row, x));", "shared->masses[i] += weight_of(row, x);", "sample distribution"),
    Mutation("scan adds the first warp twice", "sample.cuh",
             "return inclusive - x + (warp == 0 ? 0 : before);", "return inclusive - x + before;", "sample distribution"),
    Mutation("of equal logits the last is taken", "row.cuh",
             "(wide)key_of(x) << 32 | (0xffffffffu - id);", "(wide)key_of(x) << 32 | id;", "sample close logits"),
    Mutation("total is read before all have written", "kl.cu",
             "        totals[threadIdx.x / 32] = x;\n    __syncthreads();", "        totals[threadIdx.x / 32] = x;", "kl"),
    # Summary slots, moments, preference.
    Mutation("queue is filled again while others read it", "summarise.cu",
             "        __syncthreads();\n        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)\n            queue[i] =",
             "        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)\n            queue[i] =", "summarise"),
    Mutation("slots beyond the first queue are those of the first", "summarise.cu",
             "update.slots[first + i]", "update.slots[i]", "summarise"),
    Mutation("queries are replaced while others read them", "moments.cu",
             "            sum += x;\n        }\n        __syncthreads();", "            sum += x;\n        }", "query moments"),
    Mutation("last warp's part is left out", "preference.cu",
             "warp < PREFERENCE_SLOTS / 32; warp++", "warp < PREFERENCE_SLOTS / 32 - 1; warp++", "score preference"),
    # Scores, selection.
    Mutation("empty slots get a score", "score_keys.cu",
             "unit->scores[slot] = position == KV_NO_POSITION ? not_a_number() : score;\n    }\n}\n\n/* ---- the anchor",
             "unit->scores[slot] = position == KV_NO_POSITION ? score : score;\n    }\n}\n\n/* ---- the anchor", "score key norm"),
    Mutation("wrong lane of the sums over a page's slots", "score_keys.cu",
             "(int)part_lane<SLOTS>(lane % LANES * SLOTS + s)", "(int)part_lane<SLOTS>(s)", "score key difference"),
    Mutation("neighbours before the first position", "score_pool.cu",
             "if (step <= position && is_set(order, position - step)) {", "if (is_set(order, position - step)) {",
             "score window pool"),
    Mutation("sums of a pass are replaced while others read them", "score_pool.cu",
             "            sums[i + 1] = base + sum;\n        __syncthreads();", "            sums[i + 1] = base + sum;",
             "score long adaptive"),
    Mutation("another head's bias", "score_network.cu",
             "network->b1 + (size_t)head * hidden", "network->b1", "network content"),
    Mutation("parts are replaced while others read them", "score_paper.cu",
             "    float sum = 0;\n    __syncthreads();\n    space->parts", "    float sum = 0;\n    space->parts", "network paper"),
    Mutation("middle row of a factor taken off twice", "score_matrix.cu",
             "if (2 * i + 1 == j) /* the middle row is there once */\n                    continue;", ";", "score drop error"),
    Mutation("rounding of a large share is not taken off", "score_drop.cu",
             "float others = 1 - p + rounding;", "float others = 1 - p;", "score drop error"),
    Mutation("off the diagonal counted once", "score_expect.cu", "(channel > column ? 2 : 1)", "1", "score expected attention"),
    Mutation("numbers of slots in another order", "score_numbers.cu",
             "* unit->statistics.capacity + space->slots[slot]] =", "* unit->statistics.capacity + slot] =", "network content"),
    Mutation("plain add to a counter that blocks share", "select.cu",
             "atomicAdd(&state->histogram[i], space->histogram[i]);", "state->histogram[i] += space->histogram[i];",
             "select rows"),
    Mutation("one tie too many stays", "select.cu", "before < state->rank", "before <= state->rank", "select ties"),
]


def run(command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", **options)


def copy_sources(folder):
    names = run(["git", "-C", ROOT, "ls-files", "-z"]).stdout.split("\0")
    for name in filter(None, names):
        to = folder / name
        if name.startswith("tests/data/") or not (ROOT / name).is_file():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists() or to.read_bytes() != (ROOT / name).read_bytes():
            shutil.copy2(ROOT / name, to)


def build(folder):
    done = run(["ninja", "-C", folder / "build", "tests/parity/parity"])
    return done.returncode == 0, done.stdout


def test(folder, case):
    """None: it passes; else what says that it does not."""
    command = [folder / "build/tests/parity/parity", "--tier", "cuda", "--only", case]
    done = run(command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1)))
    if done.returncode == -signal.SIGXCPU:
        return "no end"
    said = done.stdout + done.stderr
    if done.returncode == 0 and "cuda: 0 failures" in said:
        return None
    told = re.search(r"^emulator: (.*)$|^(FAIL .*)$", said, re.M)
    return (told[1] or told[2])[:110] if told else f"exit status {done.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="faults whose file or name have these words")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.only in f"{m.file} {m.what}"]
    if options.list:
        print("\n".join(f"{m.file}: {m.what} ({m.case})" for m in chosen))
        return 0
    folder = options.folder or pathlib.Path(tempfile.mkdtemp())
    try:
        return check(folder, chosen)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


def check(folder, chosen):
    copy_sources(folder)
    if not (folder / "build/build.ninja").exists():
        done = run(["meson", "setup", folder / "build", folder, "--buildtype=release", "-Dtests=true", "-Dcuda=emulated"])
        if done.returncode != 0:
            sys.exit(done.stdout)
    built, said = build(folder)
    if not built:
        sys.exit(said)
    for case in sorted({m.case for m in chosen}):
        if test(folder, case) is not None:
            sys.exit(f"mutations.py: \"{case}\" fails without any fault")
    print("| file | fault | case | found by |\n| --- | --- | --- | --- |", flush=True)
    left = 0
    for mutation in chosen:
        found = one(folder, mutation)
        left += found.startswith("**")
        print(f"| {mutation.file} | {mutation.what} | {mutation.case} | {found} |", flush=True)
    print(f"\n{len(chosen) - left} found, {left} not")
    return left > 0


def objects_of(folder, name):
    """Objects in which a file's code lies: its own, or, of a header, of all kernels."""
    stem = name if name.endswith(".cu") else ""
    return [path for path in (folder / "build/cuda").rglob("*.o") if f"_{stem}" in path.name and ".cu" in path.name]


def one(folder, mutation):
    path = folder / "cuda" / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        return "**does not apply**"
    # What was built without the fault is kept, and put back with its times, so that it is not compiled again.
    with tempfile.TemporaryDirectory() as kept:
        files = [path, *objects_of(folder, mutation.file)]
        for i, file in enumerate(files):
            shutil.copy2(file, f"{kept}/{i}")
        path.write_text(text.replace(mutation.before, mutation.after))
        try:
            built, said = build(folder)
            if not built:
                return "**does not compile**: " + next((line for line in said.splitlines() if "error" in line), "")[:100]
            return test(folder, mutation.case) or "**survives**"
        finally:
            for i, file in enumerate(files):
                shutil.copy2(f"{kept}/{i}", file)
            (folder / "build/cuda/libcuda_kernels.a").unlink(missing_ok=True)  # it has the fault


if __name__ == "__main__":
    sys.exit(main())
