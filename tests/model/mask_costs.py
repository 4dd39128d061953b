#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What grammars cost a decode step, by hand: 32 sequences with a schema or a pattern each, no two alike.

    tests/model/mask_costs.py [--step-ms 1=2.3,8=6.1,32=19]

Prints the processor time of a token's mask and step through the automaton (grammar_tool --time: other programs and stops
do not count), for every kind of grammar and over all, and which part of a decode step that is. Without --step-ms the
steps are measured by `distillcache bench` first. The answers are written here: what models write has fewer new masks
where they repeat themselves. All programs and the model as in the tests' environment (tests/README.md).
"""

import argparse
import collections
import json
import os
import pathlib
import random
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build"))
MODEL = os.environ["DISTILLCACHE_TEST_MODEL"]
WORDS = ("the keeper counted ships before fog came over harbour and wrote their number into a large book while his brother "
         "painted boats green red or blue every summer near old stone bridge").split()
NAMES = "title name city colour reason comment summary status owner street product label".split()


def phrase(draw, least, most):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def record(draw):
    names = draw.sample(NAMES, 4)
    schema = {"type": "object", "required": names, "additionalProperties": False, "properties": {
        names[0]: {"type": "string"}, names[1]: {"type": "integer"},
        names[2]: {"type": "array", "items": {"type": "string", "maxLength": 40}}, names[3]: {"type": "boolean"}}}
    return {"schema": schema}, {names[0]: phrase(draw, 5, 12), names[1]: draw.randint(0, 9999),
                                names[2]: [phrase(draw, 1, 3) for _ in range(3)], names[3]: draw.random() < 0.5}


def nested(draw):
    names = draw.sample(NAMES, 3)
    schema = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "required": names[:2], "properties": {
        names[0]: {"type": "string", "minLength": 1}, names[1]: {"type": "array", "items": {"$ref": "#/$defs/node"}},
        names[2]: {"type": "number"}}, "additionalProperties": False}}}
    def node(depth):
        return {names[0]: phrase(draw, 1, 4), names[1]: [node(depth - 1) for _ in range(depth)], names[2]: round(draw.random(), 3)}
    return {"schema": schema}, node(2)


def choice(draw):
    names, kinds = draw.sample(NAMES, 2), draw.sample(WORDS, 8)
    schema = {"type": "object", "required": names, "additionalProperties": False,
              "properties": {names[0]: {"enum": kinds}, names[1]: {"type": "string", "maxLength": 120}}}
    return {"schema": schema}, {names[0]: draw.choice(kinds), names[1]: phrase(draw, 8, 14)}


def formats(draw):
    names = draw.sample(NAMES, 3)
    schema = {"type": "object", "required": names, "additionalProperties": False, "properties": {
        names[0]: {"type": "string", "format": "date-time"}, names[1]: {"type": "string", "format": "email"},
        names[2]: {"type": "string", "format": "uuid"}}}
    uuid = "-".join("%0*x" % (n, draw.getrandbits(4 * n)) for n in (8, 4, 4, 4, 12))
    return {"schema": schema}, {names[0]: "2024-0%d-1%dT12:30:0%dZ" % (draw.randint(1, 9), draw.randint(0, 9), draw.randint(0, 9)),
                                names[1]: "%s.%s@%s.com" % tuple(draw.sample(WORDS, 3)), names[2]: uuid}


def patterned(draw):
    names = draw.sample(NAMES, 2)
    schema = {"type": "object", "required": names, "additionalProperties": False, "properties": {
        names[0]: {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{3,6}$"},
        names[1]: {"type": "string", "pattern": draw.choice(["^[A-Za-z ,.]+$", "^[a-z ]{1,200}$", r"^\w+( \w+)*$"])}}}
    return {"schema": schema}, {names[0]: "AB-%d" % draw.randint(100, 999999), names[1]: phrase(draw, 6, 12)}


def regex(draw):
    patterns = ["^[A-Za-z0-9 .,]+$", "^[a-z]{1,12}( [a-z]{1,12}){1,30}$", "^([A-Za-z]+ ?)+[.!?]?$", "^[^0-9]{1,300}$"]
    return {"pattern": draw.choice(patterns)}, phrase(draw, 10, 20)


KINDS = (record, nested, choice, formats, patterned, regex, record, nested)


def measure_steps():
    command = [BUILD / "distillcache", "bench", "--model", MODEL, "--json", "--prefill", "16", "--decode", "32", "--batch", "1,8,32",
               "--depth", "256", "--kv-memory", "1G"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {run["batch"]: run["step_ms"] for run in report["runs"] if run["work"] == "decode"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", help="batch=milliseconds,... instead of measuring")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    steps = ({int(batch): float(ms) for batch, ms in (pair.split("=") for pair in options.step_ms.split(","))}
             if options.step_ms else measure_steps())
    draw = random.Random(options.seed)
    names, requests = [], []
    for i in range(32):
        kind = KINDS[i % len(KINDS)]
        request, answer = kind(draw)
        names.append(kind.__name__)
        requests.append({**request, "accept": [answer if isinstance(answer, str) else json.dumps(answer)]})
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([BUILD / "tests/model/grammar_tool", MODEL, "--time"], input=lines.encode(), capture_output=True, check=True)
    kinds = collections.defaultdict(list)
    for name, request, line in zip(names, requests, done.stdout.splitlines(), strict=True):
        reply = json.loads(line)
        assert reply["accepted"] == [True], request
        kinds[name].append(reply)
    print(f"{'':12}{'tokens':>8}{'new':>7}{'mean us':>9}{'median':>8}{'new, median':>13}{'new, most':>11}")
    everything = []
    for name, replies in [*kinds.items(), ("all", sum(kinds.values(), []))]:
        tokens, new = sum((r["token_us"] for r in replies), []), sum((r["mask_us"] for r in replies), [])
        print(f"{name:12}{len(tokens):8}{len(new):7}{statistics.mean(tokens):9.1f}{statistics.median(tokens):8.1f}"
              f"{statistics.median(new):13.1f}{max(new):11.1f}")
        everything = tokens
    for batch, ms in sorted(steps.items()):
        print(f"batch {batch:2}: a step of {ms:.2f} ms, masks {batch * statistics.mean(everything) / ms / 10:.1f} % of it")


if __name__ == "__main__":
    main()
