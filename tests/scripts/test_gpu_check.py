# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.sh without a GPU: its words, and its document from hand-made results."""
import ctypes
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = {"name": "Card 5", "devices": 1, "memory_bytes": 2**34, "clock_khz": 2_000_000, "multiprocessors": 100,
          "memory_clock_khz": 10_000_000, "memory_bus_bits": 256, "l2_bytes": 2**25, "major": 8, "minor": 9}
SHAPE = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ff_width": 128, "vocabulary": 1000}


def run(*arguments, script="gpu_check.sh", **environment):
    command = [ROOT / "scripts" / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
                          env={**os.environ, **environment})


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_help_says_that_no_gpu_has_run_it():
    done = run("--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "No GPU has run this script yet" in done.stdout
    for name in ("build", "parity", "golden", "memcheck", "racecheck", "synccheck", "kernels", "bench", "sums", "ranks", "tokens",
                 "scaling"):
        assert f"\n  {name}: " in done.stdout


@pytest.mark.skipif(has_driver(), reason="there is a driver here")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--out", tmp_path / "out.json")
    assert done.returncode == 3 and done.stdout == "" and "no GPU" in done.stderr and "driver" in done.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("arguments,words", [
    (("--parts", "parity knit"), '--parts: there is no "knit"'),
    (("--seconds", "soon"), '--seconds: "soon" is not a whole number above 0'),
    (("--size", "3"), "unknown option --size"),
    (("--gpus", "9"), '--gpus: "9" is not a number from 1 to 8'),
    (("--gpus", "two"), '--gpus: "two" is not a number from 1 to 8'),
])
def test_refusals_say_why(arguments, words):
    done = run(*arguments)
    assert done.returncode == 1 and done.stdout == "" and words in done.stderr


def leave(work, name, status, seconds, log=""):
    (work / f"{name}.result").write_text(f"{status} {seconds}\n")
    (work / f"{name}.log").write_text(log)


@pytest.fixture
def work(tmp_path):
    """What the stages leave when all goes well."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "device.json").write_text(json.dumps(DEVICE))
    (folder / "nvcc.txt").write_text("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0\nBuild x\n")
    leave(folder, "build", 0, 100)
    leave(folder, "parity", 0, 20, "cuda: 0 failures, 3 cases skipped, 19.5 s (cuda, Card 5, sm_89)\n")
    leave(folder, "golden", 0, 9)
    for name in ("memcheck", "racecheck"):
        leave(folder, name, 0, 30, "== any shape\n========= ERROR SUMMARY: 0 errors\n== append\n")
    (folder / "synccheck.skipped").write_text("compute-sanitizer is not installed\n")
    leave(folder, "kernels", 0, 10, "cuda     1 threads  layer products   R=  1,  66.0 MB  125.0 us  320.0 GB/s  10240.0 GMAC/s\n"
                                    "cuda     1 threads  sample 1 rows, greedy  7.5 us\n")
    leave(folder, "bench", 0, 50)
    (folder / "model.json").write_text(json.dumps({"shape": SHAPE}))
    runs = [{"work": "prefill", "batch": 1, "depth": 8, "kv_policy": "full", "kv_ratio": 1.0, "tokens_per_second": 8e3,
             "step_ms": 1.0, "phases": {}, "bytes_per_step": 6.4e7, "kv_tokens_kept": None},
            {"work": "decode", "batch": 4, "depth": 100, "kv_policy": "h2o", "kv_ratio": 0.25, "tokens_per_second": 2e3,
             "step_ms": 2.0, "phases": {"qkv": {"seconds": 1e-3, "bytes": 6.4e7}, "norm": {"seconds": 1e-3, "bytes": 0}},
             "bytes_per_step": 3.2e8, "kv_tokens_kept": 25.0},
            {"work": "request", "batch": 1, "depth": 0, "kv_policy": "full", "kv_ratio": 1.0, "tokens_per_second": 1.0,
             "step_ms": 1.0, "phases": {}, "bytes_per_step": None, "kv_tokens_kept": None}]
    (folder / "bench.json").write_text(json.dumps({"runs": runs}))
    return folder


def report(work):
    out = work.parent / "out.json"
    done = run("report", work, work.parent / "build", out, script="gpu_check.py")
    assert done.stderr == ""
    return done, json.loads(out.read_text())


def test_document(work):
    (work.parent / "build/cuda").mkdir(parents=True)
    (work.parent / "build/cuda/x.cu.ptxas.txt").write_text("Used 30 registers\nUsed 90 registers\n")
    done, document = report(work)
    assert done.returncode == 0 and document["passed"]
    # Two transfers a cycle of 32 bytes; 512 FLOPs a cycle and multiprocessor.
    assert document["limits"]["bytes_per_second"] == 640e9 and document["limits"]["half_flops_per_second"] == 102.4e12
    assert document["stages"]["parity"] == {"status": "passed", "seconds": 20}
    assert document["stages"]["synccheck"] == {"status": "skipped", "reason": "compute-sanitizer is not installed"}
    assert document["parity"]["failures"] == 0 and document["parity"]["cases_skipped"] == 3
    assert document["sanitizers"]["memcheck"] == {"cases": ["any shape", "append"], "complete": True, "errors": [0]}
    product, sample = document["kernels"]
    assert product["of_bandwidth"] == pytest.approx(0.5) and product["of_half_flops"] == pytest.approx(0.2)
    assert sample == {"what": "sample 1 rows, greedy", "seconds": pytest.approx(7.5e-6)}
    assert document["registers_most"] == {"x.cu": 90} and document["bench"]["runs"][0]["depth"] == 8
    assert "Card 5: 640 GB/s, 102 TFLOP/s" in done.stdout


def test_achieved(work):
    _, document = report(work)
    prefill, decode = document["achieved"]  # not the request
    matrices = 2 * 2 * 64 * ((4 + 2 * 2) * 16 + 4 * 16 + 3 * 128)
    logits, pair = 2 * 64 * 1000, 2 * 4 * 4 * 16  # a query and a slot: two products of 16 a head, in 2 layers
    assert prefill["flops_per_second"] == pytest.approx((8 * matrices + logits + 36 * pair) / 1e-3)
    assert prefill["of_bandwidth"] == pytest.approx(0.1)
    assert decode["flops_per_second"] == pytest.approx(4 * (matrices + logits + 25 * pair) / 2e-3)
    assert decode["bytes_per_second"] == pytest.approx(160e9) and decode["of_bandwidth"] == pytest.approx(0.25)
    assert decode["of_half_flops"] == pytest.approx(decode["flops_per_second"] / 102.4e12)
    assert set(decode["phases"]) == {"qkv"} and decode["phases"]["qkv"]["of_bandwidth"] == pytest.approx(0.1)


def test_failures_are_told(work):
    leave(work, "parity", 1, 20, "FAIL append, cuda, 1 threads, round 3: keys\ncuda: 1 failures, 0 cases skipped, 1.0 s (cuda)\n")
    leave(work, "racecheck", 86, 4, "== any shape\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n")
    leave(work, "bench", 124, 90)
    (work / "bench.json").write_text("{")
    done, document = report(work)
    assert done.returncode == 1 and not document["passed"]
    assert document["stages"]["parity"]["log"][0].startswith("FAIL append")
    assert document["parity"]["failed"] == ["append, cuda, 1 threads, round 3: keys"]
    assert document["sanitizers"]["racecheck"]["errors"] == [2] and document["stages"]["racecheck"]["exit_status"] == 86
    assert document["stages"]["bench"]["reason"] == "not done in time" and document["achieved"] == []
    assert "failed" in done.stdout


def test_a_failed_build_leaves_a_document(work):
    for path in work.iterdir():
        if path.name != "device.json":
            path.unlink()
    leave(work, "build", 1, 10, "nvcc: error\n")
    done, document = report(work)
    assert done.returncode == 1 and document["stages"]["build"]["log"] == ["nvcc: error"]
    assert {s["status"] for name, s in document["stages"].items() if name != "build"} == {"skipped"}


def test_published_limits_come_first(work):
    (work / "device.json").write_text(json.dumps({**DEVICE, "name": "NVIDIA GeForce RTX 4090"}))
    assert report(work)[1]["limits"]["bytes_per_second"] == 1008e9
    (work / "device.json").write_text(json.dumps({**DEVICE, "name": "Z", "memory_clock_khz": 0, "minor": 7}))
    done, document = report(work)  # neither is known
    assert document["limits"]["bytes_per_second"] is None and document["limits"]["half_flops_per_second"] is None
    assert "limits not known" in done.stdout and "of_bandwidth" not in document["achieved"][0]


# The whole script, with a driver, programs and a sanitizer that only play their parts.

# Of two cards, which do not reach each other.
DRIVER = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int room, int device) { (void)room, (void)device; strcpy(name, "Card 5"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)1 << 34; return 0; }
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return device == peer; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? MAJOR : attribute == 76 ? 9 : attribute == 36 ? 10000000 : attribute == 37 ? 256 : 2;
    return 0;
}
"""
PARITY = """#!/bin/sh
[ "$1 $2" = "--tier cuda" ] || exit 2
case "$*" in
*--time*) echo "cuda     1 threads  $7  2.0 us  320.0 GB/s" ;;
*"linear f16"*) sleep 30 ;;
*) echo "cuda: 0 failures, 0 cases skipped, 0.1 s (cuda, Card 5, sm_89)" ;;
esac
"""
# Several devices give bench ten times the tokens a second.
PROGRAM = """#!/bin/sh
case "$*" in
inspect*) cat "$(dirname "$0")/model.json" ;;
*"--tensor-parallel 2 --all-reduce "*) sed -E 's/("tokens_per_second": )([0-9]+)/\\1\\20/g' "$(dirname "$0")/bench.json" ;;
*) cat "$(dirname "$0")/bench.json" ;;
esac
"""
SUMS = """#!/bin/sh
[ "$*" = "2 200 512" ] || exit 2
echo "skipped nccl: there is no libnccl.so.2"
echo "sums host  $1 ranks     1 rows of  4096      12.50 us"
"""
RANKS = """#!/bin/sh
echo "$DISTILLCACHE_TEST_BACKEND $DISTILLCACHE_TEST_RANKS $DISTILLCACHE_TEST_DEVICES $DISTILLCACHE_TEST_ALL_REDUCE"
[ "$DISTILLCACHE_TEST_ALL_REDUCE" = auto ]
"""
SANITIZER = """#!/bin/sh
[ "$1" = --tool ] && tool=$2
while [ "${1#--}" != "$1" ]; do shift 2; done
"$@" || exit
echo "========= ERROR SUMMARY: 0 errors"
[ "$tool" != synccheck ] || exit 86
"""


@pytest.fixture
def played(tmp_path, work):
    def place(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    build = tmp_path / "build"
    place(build / "tests/parity/parity", PARITY)
    place(build / "distillcache", PROGRAM)
    place(build / "tests/cuda/time_sums", SUMS)
    place(build / "tests/unit/test_parallel", RANKS)
    place(tmp_path / "bin/compute-sanitizer", SANITIZER)
    for name in ("model.json", "bench.json"):
        (build / name).write_text((work / name).read_text())

    def driver(major):
        (tmp_path / "driver.c").write_text(DRIVER)
        subprocess.run(["cc", "-shared", "-fPIC", f"-DMAJOR={major}", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"],
                       check=True)

    def start(*arguments):
        return run("--build", build, "--model", build / "model.json", "--out", tmp_path / "out.json", *arguments,
                   LD_LIBRARY_PATH=str(tmp_path), PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return driver, start


def test_whole_script(played, tmp_path):
    driver, start = played
    driver(8)
    done = start("--seconds", "8", "--parts", "parity memcheck kernels bench")
    document = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 0 and document["passed"], done.stderr
    assert {name: s["status"] for name, s in document["stages"].items()} == {
        "build": "skipped", "parity": "passed", "golden": "skipped", "memcheck": "passed", "racecheck": "skipped",
        "synccheck": "skipped", "kernels": "skipped", "bench": "skipped", "sums": "skipped", "ranks": "skipped",
        "tokens": "skipped", "scaling": "skipped"}
    # One case hangs: what came before it counts, and what comes after it says why it was left out.
    assert document["sanitizers"]["memcheck"] == {
        "cases": ["any shape", "linear q4_1", "append", "linear f16"], "complete": False, "errors": [0, 0, 0]}
    assert document["stages"]["bench"]["reason"] == "no time left" and document["parity"]["failures"] == 0


def test_whole_script_measures(played, tmp_path):
    driver, start = played
    driver(8)
    done = start("--parts", "kernels bench")
    document = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 0 and document["stages"]["bench"]["status"] == "passed", done.stderr
    assert document["achieved"][1]["of_bandwidth"] == pytest.approx(0.25)
    assert [k["what"] for k in document["kernels"]][:2] == ["time linear q4_0", "time linear q4_1"]
    assert "decode   h2o" in done.stdout


def test_a_sanitizer_that_finds_something_fails(played, tmp_path):
    driver, start = played
    driver(8)
    done = start("--parts", "synccheck")
    assert done.returncode == 1
    assert json.loads((tmp_path / "out.json").read_text())["stages"]["synccheck"]["exit_status"] == 86


def test_an_old_card_is_refused(played):
    driver, start = played
    driver(7)
    done = start()
    assert done.returncode == 3 and "compute capability 7.9" in done.stderr


def test_two_devices(played, tmp_path):
    driver, start = played
    driver(8)
    done = start("--gpus", "2", "--parts", "sums ranks scaling")
    document = json.loads((tmp_path / "out.json").read_text())
    stages = document["stages"]
    assert {stages[name]["status"] for name in ("sums", "scaling")} == {"passed"}, done.stderr
    # The second way of adding up fails in the tests of ranks.
    assert done.returncode == 1 and stages["ranks"]["log"] == ["cuda 2 2 auto", "cuda 2 2 host"]
    assert document["device"]["peer_access"] is False
    assert document["sums"] == [{"way": "host", "ranks": 2, "rows": 1, "width": 4096, "seconds": pytest.approx(12.5e-6)}]
    assert [(run["work"], run["all_reduce"]) for run in document["scaling"]] == [
        ("prefill", "auto"), ("decode", "auto"), ("prefill", "host"), ("decode", "host")]  # not the request
    assert all(run["ratio"] == pytest.approx(10) for run in document["scaling"])
    assert "sum by host over 2:    1 rows of  4096     12.50 us" in done.stdout
    assert "decode   batch   4 depth    100 host" in done.stdout and "10.00 of one device" in done.stdout


def test_a_model_that_does_not_divide_is_skipped(played, tmp_path):
    driver, start = played
    driver(8)
    model = tmp_path / "build/model.json"
    model.write_text(json.dumps({"shape": {**SHAPE, "kv_heads": 3}}))
    done = start("--gpus", "2", "--parts", "tokens scaling")
    stages = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert done.returncode == 0
    for name in ("tokens", "scaling"):
        assert stages[name] == {"status": "skipped", "reason": "3 KV heads cannot be shared out evenly over 2 devices"}


def test_parts_of_several_devices_need_the_option(played, tmp_path):
    driver, start = played
    driver(8)
    assert start("--parts", "sums").returncode == 0
    assert json.loads((tmp_path / "out.json").read_text())["stages"]["sums"]["reason"] == "needs --gpus"


def test_too_few_devices_are_refused(played):
    driver, start = played
    driver(8)
    done = start("--gpus", "3")
    assert done.returncode == 3 and "--gpus 3: the driver shows 2 CUDA devices" in done.stderr
