#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What structured output costs, by hand: the time of a decode step of one sequence, free and under schemas.

    tests/model/mask_steps.py [--rounds 20]

Starts the server, and asks in turns for an answer without a schema and for one of each of three, all of the same number of
tokens, each round with a seed of its own. A step's time is the server's own (request_decode_time_seconds of /metrics);
the client waits meanwhile. Prints for each kind the median over rounds, and the median of the ratios to the free answer
of the same round. mask_costs.py has the processor time of masks alone. The program and the model as in the tests'
environment (tests/README.md).
"""

import argparse
import http.client
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = os.environ.get("DISTILLCACHE_TEST_SERVER", str(ROOT / "build/distillcache"))
MODEL = os.environ["DISTILLCACHE_TEST_MODEL"]
TOKENS = 150


def long_list(items):
    return {"type": "array", "minItems": 60, "items": items}


SCHEMAS = {
    "free": None,
    "objects": long_list({"type": "object", "required": ["name", "age", "tags"], "additionalProperties": False, "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 4}}}),
    "strings": long_list({"type": "string", "minLength": 5, "maxLength": 60}),
    "patterns": long_list({"type": "string", "pattern": "^[A-Z][a-z]+ [0-9]{2,4}$"}),
}


def wait_for(log, process):
    """The port, once the model is there."""
    while True:
        events = [json.loads(line) for line in open(log) if line.startswith("{") and line.endswith("\n")]
        for event in events:
            if event["event"] == "ready":
                return event["port"]
        if process.poll() is not None:
            sys.exit(open(log).read())
        time.sleep(0.1)


def request(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    if reply.status != 200:
        sys.exit(text)
    return text


def decode_time(port):
    """Seconds of all answers so far, from their first token to their last."""
    return float(re.search(r"request_decode_time_seconds_sum\S* (\S+)", request(port, "GET", "/metrics"))[1])


def step_time(port, schema, seed):
    body = {"prompt": "A list of things in JSON:", "max_tokens": TOKENS, "temperature": 0.8, "seed": seed, "ignore_eos": True}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    before = decode_time(port)
    usage = json.loads(request(port, "POST", "/v1/completions", body))["usage"]
    return (decode_time(port) - before) / (usage["completion_tokens"] - 1)


def measure(port, rounds):
    steps = {name: [] for name in SCHEMAS}
    for seed in range(rounds + 1):
        for name, schema in SCHEMAS.items():
            step = step_time(port, schema, seed)
            if seed > 0:  # the first has tries, slices and pages to make
                steps[name].append(step)
    print("| answer | step | ratio to free |\n|---|---|---|")
    for name in SCHEMAS:
        ratios = sorted(one / free for one, free in zip(steps[name], steps["free"], strict=True))
        print(f"| {name} | {statistics.median(steps[name]) * 1e3:.2f} ms | {statistics.median(ratios):.3f} "
              f"({ratios[len(ratios) // 4]:.3f} to {ratios[len(ratios) * 3 // 4]:.3f}) |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.NamedTemporaryFile(prefix="mask_steps", suffix=".log") as log:
        server = subprocess.Popen([SERVER, "serve", "--model", MODEL, "--port", "0", "--log-format", "json"], stderr=log)
        try:
            measure(wait_for(log.name, server), rounds)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
