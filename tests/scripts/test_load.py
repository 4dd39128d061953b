# SPDX-License-Identifier: Apache-2.0
"""scripts/load_test.py on the server without a model: what it counts, and that a broken bound is a failure. With
DISTILLCACHE_TEST_FULL=1."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/load_test.py"
FAKE = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", str(ROOT / "build"))) / "tests/unit/fake_server"
slow = pytest.mark.skipif(os.environ.get("DISTILLCACHE_TEST_FULL") != "1", reason="takes a minute: DISTILLCACHE_TEST_FULL=1")


def load(seconds, *options, env=None):
    command = [sys.executable, SCRIPT, "--program", FAKE, "--model", "fake", "--seconds", seconds, "--pairs", 2, "--connections", 120,
               "--active", 8, *options]
    return subprocess.run(list(map(str, command)), env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=240)


def test_options():
    assert load(12, "--active", 119).returncode == 1
    assert load(12, "--pairs", 1).returncode == 1
    assert load(9).returncode == 1
    assert "--most-slowdown" in load(12, "--help").stdout


@slow
def test_all_kinds_of_clients():
    result = load(28, "--most-slowdown", 100, "--most-growth", 100)
    assert result.returncode == 0, result.stdout + result.stderr
    done = dict(re.findall(r"\| (\w+) \| (\d+) \| 0 \|", result.stdout))
    assert set(done) == {"active", "slow", "reader", "vanishing", "idle"}, result.stdout
    assert all(int(done[kind]) > 0 for kind in ("active", "slow", "reader", "vanishing")), result.stdout
    periods = re.findall(r"\| (\d) \| (\d+) \| ([\d.]+) ms \| ([\d.]+) ms \| (\d+) \| ([\d.]+) MB \|", result.stdout)
    assert sorted((period[0], period[1]) for period in periods) == [("1", "120"), ("1", "32"), ("2", "120"), ("2", "32")]
    assert all(float(period[2]) > 0 and float(period[3]) > 0 and int(period[4]) > 10 for period in periods)


@slow
@pytest.mark.parametrize("options, env, word", [
    (("--most-growth", -100), {}, "memory grew"),
    (("--most-slowdown", -100, "--most-growth", 100), {}, "slower"),
    (("--most-slowdown", 100, "--most-growth", 100), {"FAKE_TOKENS_MAX": "10"}, "errors that are not the client's"),
])
def test_broken_bounds(options, env, word):
    result = load(12, *options, env=env)
    assert result.returncode == 1
    assert word in result.stderr, result.stdout + result.stderr
