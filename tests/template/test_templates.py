# SPDX-License-Identifier: Apache-2.0
"""Chat templates of published models, unmodified, byte by byte against Python's jinja2.

They come inside the source archive of llama-cpp-python (vendor/llama.cpp/models/templates), which is fetched once into
models/. DISTILLCACHE_TEST_FULL: a newer and larger archive with more of them.
"""

import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

import conversations
import reference

FULL = bool(os.environ.get("DISTILLCACHE_TEST_FULL"))
VERSION, FEWEST = ("0.3.36", 60) if FULL else ("0.3.16", 20)
FOLDER = reference.ROOT / "models" / f"llama-cpp-python-{VERSION}"
# What differs by design: lazy results of filters are lists here, and lists can be written as JSON.
LENIENT = ("Object of type generator is not JSON serializable",)


def fetch():
    """The templates' paths."""
    if not FOLDER.exists():
        new = FOLDER.with_suffix(".new")
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
                        "--no-cache-dir", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", new,
                        f"llama-cpp-python=={VERSION}"], check=True)
        with tarfile.open(next(new.glob("*.tar.gz"))) as archive:
            for member in archive:
                if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                    (new / pathlib.Path(member.name).name).write_bytes(archive.extractfile(member).read())
        for archive in new.glob("*.tar.gz"):
            archive.unlink()
        new.rename(FOLDER)
    return sorted(FOLDER.glob("*.jinja"))


@pytest.fixture(scope="session")
def ours():
    tool = reference.Ours()
    yield tool
    tool.close()


def check(ours, template, variables, name):
    text, error = reference.expected(template, variables)
    our_text, our_error = ours.render(template, variables)
    if error is not None and any(words in error for words in LENIENT):
        return False
    assert (our_text, our_error is None) == (text, error is None), (name, error, our_error, variables)
    return text is not None


def test_templates_of_models(ours):
    templates = fetch()
    assert len(templates) >= FEWEST
    rendered = cases = 0
    for path in templates:
        template = path.read_text()
        for variables in conversations.all_variables(FULL):
            rendered += check(ours, template, variables, path.name)
            cases += 1
    assert rendered > cases / 2, "most conversations must be such that templates take them"
