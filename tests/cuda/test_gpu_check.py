# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.sh played through on the emulated device: its commands, its document. With DISTILLCACHE_TEST_FULL=1
(scripts/test.sh --full): tests/scripts/test_gpu_check.py has its document by default."""
import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.skipif(os.environ.get("DISTILLCACHE_TEST_DEVICE", "emulated") == "real", reason="is run by it"),
              pytest.mark.skipif(os.environ.get("DISTILLCACHE_TEST_FULL") != "1", reason="takes an emulated device long")]


def test_what_can_run_here_runs(tmp_path):
    out = tmp_path / "out.json"
    command = [ROOT / "scripts/gpu_check.sh", "--emulated", "yes", "--build", os.environ["DISTILLCACHE_TEST_BUILD"], "--model",
               os.environ["DISTILLCACHE_TEST_MODEL"], "--gpus", 3, "--out", out, "--seconds", "3000"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    statuses = {name: stage["status"] for name, stage in document["stages"].items()}
    assert statuses == {"build": "skipped", "parity": "passed", "golden": "passed", **dict.fromkeys(("sums", "ranks", "tokens"), "passed"), **dict.fromkeys(
        ("memcheck", "racecheck", "synccheck", "kernels", "bench", "scaling"), "skipped")}
    assert document["stages"]["memcheck"]["reason"] == "needs a GPU"
    assert document["parity"]["failures"] == 0 and "emulator" in document["parity"]["device"]
    assert document["device"]["name"] == "emulator" and document["achieved"] == []
    # A sum of each size in each way, on as many devices as share the model's 3 KV heads.
    assert [(s["way"], s["ranks"], s["rows"]) for s in document["sums"]] == [
        (way, 3, rows) for way in ("nccl", "host") for rows in (1, 4, 8)]
