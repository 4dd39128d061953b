# SPDX-License-Identifier: Apache-2.0
"""scripts/common.sh: setups take turns, and what one does under the lock may need another part of the same setup."""

import pathlib
import shutil
import subprocess

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
PATIENCE = 60  # until a hung script is ended


@pytest.fixture
def run(tmp_path):
    """Runs lines of bash beside common.sh, in a clone of its own; returns what they print."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "common.sh", tmp_path / "scripts")

    def go(lines):
        result = subprocess.run(["bash", "-euo", "pipefail", "-c", f". {tmp_path}/scripts/common.sh\n{lines}"],
                                capture_output=True, text=True, timeout=PATIENCE)
        return result.returncode, result.stdout.split()

    return go


def test_a_setup_does_not_wait_for_itself(run):
    """As where pip is installed for the model that is being fetched."""
    assert run("inner() { echo inner; }\nouter() { echo outer; with_lock inner; }\nwith_lock outer; with_lock inner") == (
        0, ["outer", "inner", "inner"])


def test_setups_take_turns(run):
    lines = "part() { echo $1; sleep 0.2; echo $1; }\nwith_lock part a & with_lock part b & wait"
    code, words = run(lines)
    assert code == 0 and words[0] == words[1] != words[2] == words[3]


def test_what_fails_under_the_lock_fails(run):
    assert run("inner() { return 3; }\nouter() { with_lock inner; echo on; }\nwith_lock outer; echo on") == (3, [])
