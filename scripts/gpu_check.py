#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The part of gpu_check.sh that knows about cards and results; standard library only.

  gpu_check.py device N             the first CUDA device as JSON, by the driver; exit status 3 and a message without N
  gpu_check.py emulated-device N    what stands for it when devices are emulated
  gpu_check.py split MODEL N        exit status 1 and a message when N devices cannot share the model (`inspect --json`)
  gpu_check.py report WORK BUILD OUT   from what the stages left in WORK: the document OUT, and a summary on standard
                                    output; exit status 1 when a stage failed

The document: {"device", "limits", "toolkit", "passed", "stages": {NAME: {"status": "passed" | "failed" | "skipped", "seconds",
"reason", "log" (its end, of what failed), ...}}, "parity", "sanitizers", "kernels": [...], "bench", "achieved": [...],
"sums": [{"way": "nccl" | "host", "ranks", "rows", "width", "seconds"}], "scaling": [{"work", "batch", "depth", "all_reduce",
"tokens_per_second", "tokens_per_second_one", "ratio"}]}. device.peer_access: whether each of the devices reads the others'
memory directly; null with one.
"""
import ctypes
import json
import pathlib
import re
import sys

import roofline

STAGES = ("build", "parity", "golden", "memcheck", "racecheck", "synccheck", "kernels", "bench", "sums", "ranks", "tokens",
          "scaling")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
LOG_LINES = 60

# CUDA driver API, enum CUdevice_attribute.
ATTRIBUTES = {"clock_khz": 13, "multiprocessors": 16, "memory_clock_khz": 36, "memory_bus_bits": 37, "l2_bytes": 38,
              "major": 75, "minor": 76}
# FLOPs of a multiprocessor in a cycle, dense f16 with float32 sums, by compute capability. 8.9 is GeForce: cards for data
# centres have twice as many, so that their part of the limit reads too high.
HALF_FLOPS = {80: 2048, 86: 512, 89: 512, 90: 4096}


def fail(message):
    print(f"gpu_check.sh: {message}", file=sys.stderr)
    sys.exit(3)


def peer_access(cuda, count):
    """Of the first `count` devices, in all directions."""
    for a in range(count):
        for b in range(count):
            can = ctypes.c_int()
            if a != b and (cuda.cuDeviceCanAccessPeer(ctypes.byref(can), a, b) != 0 or not can.value):
                return False
    return True


def find_device(wanted):
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        fail("no GPU: there is no NVIDIA driver on this machine (libcuda.so.1)")
    count, device, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    code = cuda.cuInit(0)
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value == 0:
        fail(f"no GPU: the driver shows no CUDA device (error {code})")
    if count.value < wanted:
        fail(f"--gpus {wanted}: the driver shows {count.value} CUDA device{'s' if count.value > 1 else ''}")
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    found = {"name": name.value.decode(errors="replace"), "devices": count.value, "memory_bytes": total.value,
             "peer_access": peer_access(cuda, wanted) if wanted > 1 else None}
    for key, attribute in ATTRIBUTES.items():
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found[key] = value.value
    if found["major"] < 8:
        fail(f"no GPU that can be used: {found['name']} has compute capability {found['major']}.{found['minor']}, "
             "at least 8.0 is needed")
    return found


# Published limits count for cards of these names.
PUBLISHED = {"GeForce RTX 4090": "rtx4090", "A100-SXM4-80GB": "a100", "H100 80GB HBM3": "h100", "H200": "h200"}


def limits(device):
    """Published, else from clocks: memory transfers twice a cycle. None: not known."""
    for name, key in PUBLISHED.items():
        if device["name"].endswith(name):
            card = roofline.DEVICES[key]
            return {"source": card.source, "bytes_per_second": card.bandwidth, "half_flops_per_second": card.half}
    flops = HALF_FLOPS.get(10 * device["major"] + device["minor"], 0)
    return {"source": "clocks that the driver tells",
            "bytes_per_second": 2e3 * device["memory_clock_khz"] * device["memory_bus_bits"] / 8 or None,
            "half_flops_per_second": 1e3 * device["clock_khz"] * device["multiprocessors"] * flops or None}


def rates(limit, moved, flops, seconds):
    """bytes/s and FLOP/s, and their parts of the limits, where both are known."""
    out = {}
    for value, name, part in ((moved, "bytes_per_second", "of_bandwidth"), (flops, "half_flops_per_second", "of_half_flops")):
        if value:
            out[name.removeprefix("half_")] = value / seconds
            if limit[name]:
                out[part] = value / seconds / limit[name]
    return out


# ---- what stages left ----


def read_stage(work, name):
    log = work / f"{name}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    skipped, result = work / f"{name}.skipped", work / f"{name}.result"
    if skipped.exists():
        return {"status": "skipped", "reason": skipped.read_text().strip()}, text
    if not result.exists():
        return {"status": "skipped", "reason": "not asked for, or the build failed"}, text
    status, seconds = map(int, result.read_text().split())
    stage = {"status": "passed" if status == 0 else "failed", "seconds": seconds}
    if status == 124:
        stage["reason"] = "not done in time"
    if status != 0:
        stage["exit_status"], stage["log"] = status, text.splitlines()[-LOG_LINES:]
    return stage, text


def parity_result(text):
    found = re.search(r"^cuda: (\d+) failures, (\d+) cases skipped, ([\d.]+) s \((.*)\)$", text, re.M)
    return found and {"failures": int(found[1]), "cases_skipped": int(found[2]), "seconds": float(found[3]),
                      "device": found[4], "failed": re.findall(r"^FAIL (.*)$", text, re.M)[:LOG_LINES]}


def sanitizer_result(text):
    return {"cases": re.findall(r"^== (.*)$", text, re.M),
            "complete": "not reached in time" not in text,
            "errors": [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", text)] +
                      [int(n) for n in re.findall(r"RACECHECK SUMMARY: (\d+) hazard", text)]}


def kernel_results(text, limit):
    """Lines of parity --time: "cuda  1 threads  WHAT  12.3 us  45.6 GB/s  7.8 GMAC/s"."""
    out = []
    pattern = r"^cuda +\d+ threads +(.*?) +([\d.]+) us(?: +([\d.]+) GB/s)?(?: +([\d.]+) GMAC/s)?$"
    for what, us, gigabytes, macs in re.findall(pattern, text, re.M):
        entry = {"what": " ".join(what.split()), "seconds": float(us) * 1e-6}
        entry.update(rates(limit, float(gigabytes or 0) * 1e9, 2e9 * float(macs or 0), 1))
        out.append(entry)
    return out


# ---- several devices ----


def split_problem(model, count):
    heads = model["shape"]["kv_heads"]
    return f"{heads} KV heads cannot be shared out evenly over {count} devices" if heads % count else None


def sum_results(text):
    """Lines of tests/cuda/time_sums.c: "sums nccl  2 ranks     4 rows of  4096      38.10 us"."""
    pattern = r"^sums (\w+) +(\d+) ranks +(\d+) rows of +(\d+) +([\d.]+) us$"
    return [{"way": way, "ranks": int(ranks), "rows": int(rows), "width": int(width), "seconds": float(us) * 1e-6}
            for way, ranks, rows, width, us in re.findall(pattern, text, re.M)]


def scaling(one, several):
    """Runs of one device, and by name of all_reduce those of several."""
    def speeds(document):
        return {(run["work"], run["batch"], run["depth"]): run["tokens_per_second"] for run in document["runs"]
                if run["work"] in ("prefill", "decode")} if document else {}
    alone = speeds(one)
    return [{"work": key[0], "batch": key[1], "depth": key[2], "all_reduce": way, "tokens_per_second": speed,
             "tokens_per_second_one": alone[key], "ratio": speed / alone[key]}
            for way, document in several.items() for key, speed in speeds(document).items() if alone.get(key)]


# ---- bench ----


def model_of(document):
    return roofline.Model(*(document["shape"][key] for key in (
        "layers", "width", "heads", "kv_heads", "head_dim", "ff_width", "vocabulary")))


def matrix_flops(model):
    """Of one token, all layers, without logits."""
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    return 2 * model.layers * model.width * (qkv + model.heads * model.head_dim + 3 * model.ff)


def run_flops(model, run):
    """FLOPs of a step of a bench run; None where that is not a step of the model."""
    m, logits = model, 2 * model.width * model.vocabulary
    pairs = 4 * m.layers * m.heads * m.head_dim  # of one query and one slot
    if run["work"] == "prefill":
        return run["depth"] * matrix_flops(m) + logits + pairs * run["depth"] * (run["depth"] + 1) / 2
    if run["work"] != "decode":
        return None
    slots = run.get("kv_tokens_kept") or run["depth"] + 32  # the middle of 64 steps
    return run["batch"] * (matrix_flops(m) + logits + pairs * slots)


def achieved(model, bench, limit):
    out = []
    for run in bench["runs"]:
        flops, seconds = run_flops(model, run), run["step_ms"] / 1e3
        if flops is None or seconds <= 0:
            continue
        entry = {key: run.get(key) for key in ("work", "batch", "depth", "kv_policy", "kv_ratio", "tokens_per_second", "step_ms")}
        entry.update(rates(limit, run.get("bytes_per_step"), flops, seconds))
        entry["phases"] = {name: rates(limit, phase["bytes"], 0, phase["seconds"]) for name, phase in run["phases"].items()
                           if phase.get("bytes") and phase["seconds"] > 0}
        out.append(entry)
    return out


# ---- the document ----


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def report(work, build):
    device = read_json(work / "device.json")
    limit = limits(device)
    stages = {name: read_stage(work, name) for name in STAGES}
    texts = {name: text for name, (_, text) in stages.items()}
    toolkit = work / "nvcc.txt"
    document = {"device": device, "limits": limit,
                "toolkit": toolkit.read_text().strip().splitlines()[-2:] if toolkit.exists() else None,
                "passed": all(stage["status"] != "failed" for stage, _ in stages.values()),
                "stages": {name: stage for name, (stage, _) in stages.items()},
                "parity": parity_result(texts["parity"]),
                "sanitizers": {name: sanitizer_result(texts[name]) for name in SANITIZERS if texts[name]},
                "kernels": kernel_results(texts["kernels"], limit), "bench": read_json(work / "bench.json"), "achieved": [],
                "sums": sum_results(texts["sums"]),
                "scaling": scaling(read_json(work / "scaling_one.json"),
                                   {way: read_json(work / f"scaling_{way}.json") for way in ("auto", "host")})}
    model = read_json(work / "model.json")
    if model and document["bench"]:
        document["achieved"] = achieved(model_of(model), document["bench"], limit)
    reports = sorted(pathlib.Path(build, "cuda").glob("*.ptxas.txt"))
    document["registers_most"] = {path.name.removesuffix(".ptxas.txt"): max(
        map(int, re.findall(r"Used (\d+) registers", path.read_text())), default=0) for path in reports}
    return document


def percent(value):
    return "?" if value is None else f"{100 * value:.1f} %"


def summary(document):
    device, limit = document["device"], document["limits"]
    known = [f"{limit[key] / unit:.0f} {name}" for key, unit, name in (
        ("bytes_per_second", 1e9, "GB/s"), ("half_flops_per_second", 1e12, "TFLOP/s f16 with float32 sums")) if limit[key]]
    lines = [f"{device['name']}: {', '.join(known) or 'limits not known'} ({limit['source']})"]
    for name, stage in document["stages"].items():
        lines.append(f"{name:10} {stage['status']:8} {stage.get('seconds', ''):>4} {stage.get('reason', '')}".rstrip())
    for entry in document["achieved"]:
        lines.append(f"{entry['work']:8} {entry['kv_policy']:10} batch {entry['batch']:3} depth {entry['depth']:6} "
                     f"{entry['tokens_per_second']:10.1f} tokens/s, {percent(entry.get('of_bandwidth'))} of the bandwidth, "
                     f"{percent(entry.get('of_half_flops'))} of f16")
    for entry in document["sums"]:
        lines.append(f"sum by {entry['way']} over {entry['ranks']}: {entry['rows']:4} rows of {entry['width']:5} "
                     f"{1e6 * entry['seconds']:9.2f} us")
    for entry in document["scaling"]:
        lines.append(f"{entry['work']:8} batch {entry['batch']:3} depth {entry['depth']:6} {entry['all_reduce']:4} "
                     f"{entry['tokens_per_second']:10.1f} tokens/s, {entry['ratio']:.2f} of one device")
    return "\n".join(lines)


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "emulated-device":
        print(json.dumps({"name": "emulator", "devices": int(arguments[1]), "memory_bytes": 0, "peer_access": None,
                          **dict.fromkeys(ATTRIBUTES, 0)}))
        return 0
    if len(arguments) == 2 and arguments[0] == "device":
        print(json.dumps(find_device(int(arguments[1]))))
        return 0
    if len(arguments) == 3 and arguments[0] == "split":
        problem = split_problem(json.loads(pathlib.Path(arguments[1]).read_text()), int(arguments[2]))
        print(problem or "", end="")
        return 1 if problem else 0
    if len(arguments) != 4 or arguments[0] != "report":
        print(__doc__, file=sys.stderr)
        return 2
    document = report(pathlib.Path(arguments[1]), arguments[2])
    pathlib.Path(arguments[3]).write_text(json.dumps(document, indent=1) + "\n")
    print(summary(document))
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
