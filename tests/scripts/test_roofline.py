# SPDX-License-Identifier: Apache-2.0
"""scripts/roofline.py: some of its cells recomputed by hand, and its words."""
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import roofline  # noqa: E402


def run(*arguments):
    return subprocess.run([sys.executable, ROOT / "scripts/roofline.py", *map(str, arguments)], capture_output=True, text=True,
                          timeout=60)


@pytest.fixture(scope="module")
def found():
    done = run("--json")
    assert done.returncode == 0 and done.stderr == ""
    return json.loads(done.stdout)


def step(found, weights, context, kept, batch):
    one, = (s for s in found["steps"] if (s["weights"], s["context"], s["kept"], s["batch"]) == (weights, context, kept, batch))
    return one, {o["name"]: o for o in one["operations"]}


def test_every_step_is_there(found):
    cases = [(s["weights"], s["context"], s["kept"], s["batch"]) for s in found["steps"]]
    assert sorted(cases) == sorted((w, c, k, b) for w in ("F16", "Q4_K") for c in (4096, 32768) for k in (1, 0.25)
                                   for b in (1, 8, 32))


def test_products_in_f16(found):
    _, one = step(found, "F16", 4096, 1, 1)
    # 4096 rows of queries, 1024 of keys, 1024 of values; one row of float32 in, one out; 32 layers.
    assert one["qkv"]["bytes"] == 32 * (6144 * 4096 * 2 + 4096 * 4 + 6144 * 4)
    assert one["qkv"]["flops"] == 32 * 2 * 6144 * 4096 and one["qkv"]["launches"] == 32
    assert one["qkv"]["limit_s"] == pytest.approx(1_611_923_456 / 1008e9)
    # The residual is read and written.
    assert one["down"]["bytes"] == 32 * (4096 * 14336 * 2 + 14336 * 4 + 2 * 4096 * 4)
    # Above 8 rows x is rounded to f16 first: 4 bytes read, 2 written, 2 read.
    _, many = step(found, "F16", 4096, 1, 32)
    assert many["gate_up"]["bytes"] == 32 * (28672 * 4096 * 2 + 32 * 4096 * (4 + 2 + 2) + 32 * 28672 * 4)
    assert many["gate_up"]["launches"] == 64


def test_products_in_q4(found):
    _, of = step(found, "Q4_K", 32768, 1, 8)
    # 4.5 bits a weight. A block of 32 of x: 128 bytes read, 32 and two floats written, and read again.
    x = 8 * 14336 // 32 * (128 + 40 + 40)
    assert of["down"]["bytes"] == 32 * (4096 * 14336 * 18 // 32 + x + 8 * 4096 * 8)
    assert of["down"]["launches"] == 64 and of["logits"]["launches"] == 2


def test_attention(found):
    _, of = step(found, "F16", 4096, 1, 1)
    keys_values_positions = 8 * 4096 * (256 + 256 + 4)
    partial = 32 * 16 * (128 + 4) * 4  # heads, splits, o and (m, l, 1 / l, seen)
    assert of["attend"]["bytes"] == 32 * (keys_values_positions + 32 * 128 * 4 + 2 * partial + 32 * (128 + 4) * 4)
    assert of["attend"]["flops"] == 32 * 2 * (2 * 32 * 128 * 4096)
    assert of["attend"]["launches"] == 64 and "statistics" not in of
    assert of["attend"]["graph"] and of["attend"]["copies"] == of["rope_and_append"]["copies"] == 0


def test_what_is_sent(found):
    # A token, an item, a row, twice 16 bytes for the plan; a view of each head, and with h2o its statistics.
    assert step(found, "F16", 32768, 1, 8)[1]["step"]["copied_bytes"] == 8 * (4 + 20 + 8 + 32) + 8 * 256 * 32
    assert step(found, "Q4_K", 4096, 0.25, 1)[1]["step"]["copied_bytes"] == 64 + 256 * (32 + 128)
    # Pages of two of 32 sequences begin: places to mark; a range and a page number.
    pages = step(found, "F16", 4096, 1, 32)[1]["new pages"]
    assert pages["copied_bytes"] == 2 * 256 * (8 + 20) and pages["launches"] == pages["copies"] == 2


def test_statistics_of_h2o(found):
    _, of = step(found, "Q4_K", 32768, 0.25, 8)
    logits = 8 * 32 * 8192 * 4
    slots = 8 * 8 * 8192
    partial = 8 * 32 * 32 * (128 + 4) * 4
    attend = slots * 516 + 8 * 32 * 128 * 4 + 2 * partial + 8 * 32 * (128 + 4) * 4
    assert of["attend"]["bytes"] == 32 * (attend + logits)
    assert of["statistics"]["bytes"] == 32 * (logits + slots * (4 + 4 + 4))  # position; plane 0 read, written
    assert of["score"]["bytes"] == 32 * slots * (4 + 4)  # sum, position
    assert of["compact"]["launches"] == 2 and of["compact"]["copies"] == 2 and of["score"]["launches"] == 1


def test_launches_of_a_step(found):
    # rope, splits, merge, silu; embed, sample; two for new pages
    norms, products, others = 2 * 32 + 1, 4 * 32 + 1, 32 * 4 + 2 + 2
    assert step(found, "F16", 4096, 1, 1)[0]["graph_launches"] == norms + products + others - 4  # logits, sample, pages
    assert step(found, "F16", 4096, 1, 1)[0]["launches"] == norms + products + others
    assert step(found, "Q4_K", 4096, 1, 1)[0]["launches"] == norms + 2 * products + others
    assert step(found, "Q4_K", 4096, 0.25, 8)[0]["launches"] == norms + 2 * products + others + 32 + 1 + 2


def test_memory(found):
    parameters = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096) + 2 * 32000 * 4096
    one, _ = step(found, "F16", 4096, 1, 1)
    assert one["resident_bytes"] == parameters * 2 + 32 * 8 * 256 * 8256 and one["fits"]  # pages of 16 slots
    many, _ = step(found, "Q4_K", 32768, 0.25, 32)
    assert many["resident_bytes"] == parameters * 18 // 32 + 32 * 32 * 8 * (512 * 8256 + 8192 * 8) and not many["fits"]


def test_sums_and_limits(found):
    for one in found["steps"]:
        for key in ("bytes", "flops", "launches", "copies", "limit_s"):
            assert one[key] == pytest.approx(sum(o[key] for o in one["operations"]))
        assert one["expected_s"] == pytest.approx(2.5e-6 + sum(o["expected_s"] for o in one["operations"]))  # a graph
        assert all(0 < o["limit_s"] <= o["expected_s"] for o in one["operations"] if o["launches"] > 0)
    slow = roofline.Operation("many rows", 165.2e12, "half", [roofline.Launch("silu_mul", 1, 1, 1008e9 / 2)])
    assert roofline.limit(roofline.DEVICES["rtx4090"], slow) == pytest.approx(1.0)  # arithmetic, not bytes


def test_occupancy():
    device = roofline.DEVICES["rtx4090"]
    kernel = roofline.Kernel(256, 0, 1, 1, "x", registers=120)
    assert roofline.blocks_resident(device, kernel) == (2, "registers")  # 17 warps of 3840 registers
    assert roofline.blocks_resident(device, roofline.Kernel(128, 44032, 1, 1, "x")) == (2, "shared memory")
    assert roofline.blocks_resident(device, roofline.Kernel(1024, 0, 1, 1, "x")) == (1, "threads")


def test_registers_come_from_reports(tmp_path):
    lines = "ptxas info    : Compiling entry function '{}' for '{}'\nptxas info    : Function properties for x\n" \
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used {} registers\n"
    (tmp_path / "vector.cu.ptxas.txt").write_text(lines.format("_Z12gate_vectorsI4siluEvPKfjPf", "sm_80", 99) +
                                                  lines.format("_Z12gate_vectorsI4siluEvPKfjPf", "sm_89", 77))
    kernels = {k["name"]: k for k in json.loads(run("--json", "--ptxas", tmp_path).stdout)["kernels"]}
    assert kernels["silu_mul"]["registers"] == 77
    assert kernels["silu_mul"]["blocks_resident"] == 65536 // (80 * 32) // 8 and kernels["silu_mul"]["limited_by"] == "registers"
    (tmp_path / "vector.cu.ptxas.txt").unlink()
    done = run("--ptxas", tmp_path)
    assert done.returncode != 0 and "no report for sm_89" in done.stderr


def test_words():
    assert "Q4_K: computed as Q4_0" in run().stdout
    assert "H200" in run("--device", "h200").stdout
    done = run("--device", "abacus")
    assert done.returncode == 2 and "rtx4090" in done.stderr


def test_readme_has_what_it_prints():
    assert run().stdout.strip() in (ROOT / "cuda/README.md").read_text()
