# SPDX-License-Identifier: Apache-2.0
"""A build by nvcc, on a machine that may have no GPU: ptxas's reports, and what the program says without a device."""
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from ports import free_port  # noqa: E402

BUILD = pathlib.Path(os.environ["DISTILLCACHE_TEST_BUILD"])
ARCHITECTURES = os.environ["DISTILLCACHE_TEST_ARCHITECTURES"].split()
KERNELS = sorted(path.name for path in (ROOT / "cuda").glob("*.cu"))
NO_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # hides what there may be
FUNCTION = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)'\n.*?\n +(\d+) bytes stack frame, (\d+) bytes spill stores, "
                      r"(\d+) bytes spill loads\n.*?Used (\d+) registers", re.S)


def functions(report):
    return [(name, architecture, *map(int, numbers)) for name, architecture, *numbers in FUNCTION.findall(report)]


def test_a_spill_would_be_seen():
    report = ("ptxas info    : Compiling entry function 'a' for 'sm_80'\nptxas info    : Function properties for a\n"
              "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nptxas info    : Used 255 registers, used 1 barriers\n")
    assert functions(report) == [("a", "80", 16, 8, 4, 255)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_spills(kernel):
    report = (BUILD / "cuda" / f"{kernel}.ptxas.txt").read_text()
    found = functions(report)
    assert len(found) == report.count("Compiling entry function"), "ptxas's report has lines that are not understood"
    assert {architecture for _, architecture, *_ in found} == set(ARCHITECTURES)
    spilled = [f"{name}, sm_{architecture}: {stores} bytes stored, {loads} loaded"
               for name, architecture, _, stores, loads, _ in found if stores or loads]
    assert not spilled, "\n".join(spilled)
    assert all(registers > 0 for *_, registers in found)


def start(*arguments):
    return [str(BUILD / "distillcache"), *arguments, "--model", os.environ["DISTILLCACHE_TEST_MODEL"]]


def test_cuda_without_a_device_ends_with_a_message():
    done = subprocess.run(start("serve", "--backend", "cuda", "--port", "0"), env=NO_DEVICE, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert "no CUDA device: " in done.stderr
    # The runtime's own words: without a driver, or with one that shows no device.
    assert re.search("CUDA driver version is insufficient|no CUDA-capable device", done.stderr), done.stderr


def test_operations_cannot_be_tested_without_a_device():
    done = subprocess.run([BUILD / "tests/parity/parity", "--tier", "cuda"], env=NO_DEVICE, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "no CUDA device: " in done.stdout + done.stderr


def test_auto_serves_on_the_cpu_and_says_why():
    port = free_port()
    server = subprocess.Popen(start("serve", "--backend", "auto", "--port", str(port)), env=NO_DEVICE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(server, port)
        body = json.dumps({"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"] == " Paris"
    finally:
        server.terminate()
        _, said = server.communicate(timeout=60)
    line = next(line for line in said.splitlines() if "the CPU computes" in line)
    assert "no CUDA device: " in line
    assert server.returncode == 0, said


def wait_until_ready(server, port):
    end = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).read()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < end
            time.sleep(0.1)
