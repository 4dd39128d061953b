# SPDX-License-Identifier: Apache-2.0
"""scripts/roofline_ranks.py: some of its cells recomputed by hand, and that cuda/README.md has its table."""
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import roofline  # noqa: E402
import roofline_ranks  # noqa: E402


def run(*arguments):
    done = subprocess.run([sys.executable, "-B", ROOT / "scripts/roofline_ranks.py", *arguments], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def found():
    return json.loads(run("--json"))


def test_a_rank_has_half_of_the_weights_and_of_the_cache(found):
    one = roofline_ranks.find(found, "F16", 4096, 1, 1)
    layer = 3072 * 4096 + 4096 * 2048 + 3 * 7168 * 4096
    vocabulary = 2 * 16000 * 4096
    assert one["resident_bytes_each"] == (32 * layer + vocabulary) * 2 + 32 * 4 * 256 * 8256
    # Of what is read, all but norms, residuals and embeddings is half.
    whole = sum(o.bytes for o in roofline.step(roofline.MISTRAL_7B, "F16", 4096, 1, 1))
    assert 0.5 < one["bytes_each"] / whole < 0.502


def test_sums(found):
    link = 0.8 * 31.5e9
    for batch in (1, 8, 32):
        ways = roofline_ranks.find(found, "Q4_K", 32768, 0.25, batch)["ways"]
        size, logits = batch * 4096 * 4, batch * 16000 * 4
        assert ways["nccl"]["exchange_s"] == pytest.approx(65 * (38e-6 + size / link) + 38e-6 + logits / link)
        launches = 0 if batch <= 4 else 2 * 0.3e-6
        assert ways["host"]["exchange_s"] == pytest.approx(
            65 * (12e-6 + 2 * size / link + launches) + 12e-6 + 2e-6 + 2 * logits / link)


def test_steps_are_graphs(found):
    device, kernels = roofline.DEVICES["rtx4090"], roofline.KERNELS
    half = roofline_ranks.part(roofline.MISTRAL_7B)
    operations = {o.name: o for o in roofline.step(half, "F16", 4096, 1, 8)}
    time = 2.5e-6  # the graph's start
    for operation in operations.values():
        gap = 0.3e-6 if operation.graph else 1e-6
        time += sum(l.count * roofline.launch_time(device, kernels, l, gap) for l in operation.launches)
        time += operation.copies * 2.5e-6 + operation.copied / (0.8 * 31.5e9)
    ways = roofline_ranks.find(found, "F16", 4096, 1, 8)["ways"]
    assert ways["nccl"]["expected_s"] == pytest.approx(time + ways["nccl"]["exchange_s"])
    norms = sum(l.count * roofline.launch_time(device, kernels, l, 0.3e-6) for l in operations["rms_norm"].launches)
    assert ways["host"]["expected_s"] == pytest.approx(time - norms + ways["host"]["exchange_s"])
    assert ways["host"]["speed_up"] == pytest.approx(
        roofline_ranks.find(found, "F16", 4096, 1, 8)["one_expected_s"] / ways["host"]["expected_s"])


def test_the_readme_has_the_table():
    assert run() in (ROOT / "cuda/README.md").read_text()
