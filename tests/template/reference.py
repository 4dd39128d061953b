# SPDX-License-Identifier: Apache-2.0
"""Python's jinja2 as transformers sets it up for chat templates, and ours beside it (template_tool).

The settings are those of transformers' utils/chat_template_utils.py: an immutable sandbox, trim_blocks, lstrip_blocks,
loop controls, generation blocks, a tojson that does not escape for HTML, raise_exception, strftime_now.
"""

import datetime
import functools
import json
import os
import pathlib
import subprocess

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build")) / "tests/template/template_tool"
NOW = 1722700000  # strftime_now's time in both


class Generation(Extension):
    """{% generation %}: what is in it, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

    def write(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.fromtimestamp(NOW).strftime(form)
    return environment


ENVIRONMENT = make_environment()


def expected(template, variables):
    """(text, None) or (None, what went wrong)."""
    try:
        return compiled(template).render(**variables), None
    except Exception as error:  # whatever Python says: ours must not render
        return None, f"{type(error).__name__}: {error}"


@functools.lru_cache(maxsize=None)
def compiled(template):
    return ENVIRONMENT.from_string(template)


class Ours:
    """A running template_tool."""

    def __init__(self):
        self.process = subprocess.Popen([TOOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def order(self, **order):
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"template_tool ended: {self.process.wait()}"
        return json.loads(line)

    def render(self, template, variables):
        reply = self.order(template=template, variables=variables, now=NOW)
        return reply.get("text"), reply.get("error")

    def close(self):
        self.process.stdin.close()
        assert self.process.wait() == 0
