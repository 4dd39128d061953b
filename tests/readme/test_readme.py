# SPDX-License-Identifier: Apache-2.0
"""The examples of README.md, run as printed against a server.

Every ```sh block that calls curl and every ```python block is run; the only changes are the ports, where free ones take
the places of 8080 and 8081 (of the admin API). An example passes when it exits with 0 and prints something, and curl gets no error status.
"""
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from ports import free_port  # noqa: E402

PROGRAM = Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build")) / "distillcache"
MODEL = os.environ.get("DISTILLCACHE_TEST_MODEL", "")
START_S = 60
EXAMPLE_S = 120


def examples():
    """(line, language, code) of each example that can be run."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    for match in re.finditer(r"^```(sh|bash|python)\n(.*?)^```$", text, re.M | re.S):
        language, code = match[1].replace("bash", "sh"), match[2]
        if language == "python" or re.search(r"^curl ", code, re.M):
            yield text.count("\n", 0, match.start()) + 1, language, code


EXAMPLES = list(examples())


def wait_for_port(process):
    """The port that the server says it is ready on, in its log."""
    log, deadline = b"", time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if select.select([process.stderr], [], [], 1)[0]:
            log += os.read(process.stderr.fileno(), 65536)
        if match := re.search(rb" ready .*port=(\d+)", log):
            return int(match[1])
    raise AssertionError("the server did not start: " + log.decode(errors="replace"))


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """What stands for 8080 and 8081."""
    assert MODEL, "DISTILLCACHE_TEST_MODEL names no model"
    admin_port = free_port()
    command = [PROGRAM, "serve", "--model", MODEL, "--port", "0", "--admin-port", str(admin_port), "--state-dir",
               tmp_path_factory.mktemp("state")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, env={**os.environ, "DISTILLCACHE_ADMIN_KEY": "secret"})
    try:
        yield wait_for_port(process), admin_port
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_readme_has_examples():
    languages = {language for _, language, _ in EXAMPLES}
    assert languages == {"sh", "python"}


@pytest.mark.parametrize("line,language,code", EXAMPLES, ids=[f"line{line}" for line, _, _ in EXAMPLES])
def test_example(ports, line, language, code):
    code = code.replace(":8080", f":{ports[0]}").replace(":8081", f":{ports[1]}")
    if language == "sh":
        code = re.sub(r"^curl ", "curl --fail-with-body --silent --show-error ", code, flags=re.M)
        command = ["bash", "-euo", "pipefail", "-c", code]
    else:
        command = [sys.executable, "-c", code]
    done = subprocess.run(command, timeout=EXAMPLE_S, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"README.md line {line}: {done.stdout}{done.stderr}"
    assert done.stdout.strip(), f"README.md line {line} printed nothing"
