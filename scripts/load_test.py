#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load on a server: many open connections of which a few are active, among clients that behave badly.

Starts `distillcache serve` and holds this load from beginning to end:

  active     streams one completion after the other
  slow       sends a request byte by byte: some in time, which must be answered, some too late, which must be cut
  reader     reads a stream a few bytes at a time; must get all of it
  vanishing  asks for a stream, reads its beginning, and resets the connection

Beside it, in every second period, are idle connections: each asks for /health (who never asks is cut after the receive timeout),
stays open, and asks once more before it goes at the end of the period. Periods come in pairs, one without them and one with, in
an order drawn for each pair. A first period, and the first quarter of each, are not timed. Two times are taken: of a step, from
the server's count of steps, three times a period; and from token to token, the mean of each stream that began in the period.

Prints a table, and exits with 1 when a bound is broken: an error that is not the client's, memory that grows from period to
period, steps that are longer with the idle connections, or anything that runs, or a page that is held, at the end. Needs
nothing but Python. The clients take part of the same machine.
"""

import argparse
import asyncio
import collections
import json
import random
import resource
import statistics
import struct
import socket
import subprocess
import sys
import tempfile
import time

SLOW, READERS, VANISHING = 8, 8, 8
RECEIVE_TIMEOUT = 10  # of the server: what has not sent its request by then is cut
TOKENS = 64
PERIOD_LEAST = 2  # seconds


def fail(message):
    sys.exit(f"load_test.py: {message}")


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Everything after -- goes to the server.")
    parser.add_argument("--program", default="build/distillcache")
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=600, help="of all periods together [600]")
    parser.add_argument("--pairs", type=int, default=15, help="of periods without and with the idle connections [15]")
    parser.add_argument("--seed", type=int, default=1, help="of the order in each pair [1]")
    parser.add_argument("--connections", type=int, default=1000, help="open at once, idle ones included [1000]")
    parser.add_argument("--active", type=int, default=32, help="of them that stream completions [32]")
    parser.add_argument("--most-slowdown", type=float, default=2, help="percent, of the median step [2]")
    parser.add_argument("--most-growth", type=float, default=2, help="percent, of the server's memory after the second pair [2]")
    parser.add_argument("server", nargs="*", help="options of the server")
    options = parser.parse_args()
    options.idle = options.connections - options.active - SLOW - READERS - VANISHING
    if options.active < 1 or options.idle < 1:
        fail(f"--connections must be more than --active, at least 1, and {SLOW + READERS + VANISHING} others")
    options.period = options.seconds / (2 * options.pairs + 1)
    if options.pairs < 2 or options.period < PERIOD_LEAST:
        fail(f"there must be two pairs or more, and at least {PERIOD_LEAST} seconds for each period and one more")
    return options


class Server:
    def __init__(self, options):
        self.log = tempfile.NamedTemporaryFile(prefix="load_test", suffix=".log")
        command = [options.program, "serve", "--model", options.model, "--port", "0", "--log-format", "json",
                   "--max-connections", str(options.connections + 100), "--receive-timeout", str(RECEIVE_TIMEOUT), *options.server]
        self.process = subprocess.Popen(command, stderr=self.log)
        self.port = None

    async def start(self):
        while self.port is None:
            if self.process.poll() is not None:
                fail("the server ended:\n" + open(self.log.name).read()[-2000:])
            for line in open(self.log.name):
                if line.startswith("{") and line.endswith("\n") and json.loads(line)["event"] == "listening":
                    self.port = json.loads(line)["port"]
            await asyncio.sleep(0.1)
        while (await Connection.once(self, "GET", "/ready"))[0] != 200:
            await asyncio.sleep(0.1)

    def memory(self):
        """Resident bytes."""
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return fail("the server is gone")

    async def metrics(self):
        _, body = await Connection.once(self, "GET", "/metrics")
        lines = [line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#")]
        return {name.split("{")[0].removeprefix("distillcache:"): float(value) for name, value in lines}


def request_bytes(method, path, body=None):
    data = b"" if body is None else json.dumps(body).encode()
    return f"{method} {path} HTTP/1.1\r\nHost: load\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def completion(number, tokens=TOKENS, stream=True):
    return request_bytes("POST", "/v1/completions", {"prompt": f"Letter {number}. Dear keeper of the light,", "max_tokens": tokens,
                                                    "ignore_eos": True, "stream": stream, "seed": number})


class Broken(Exception):
    """What the server did is not what this client may expect."""


class Connection:
    """HTTP, as far as it is needed here."""

    @classmethod
    async def open(cls, server):
        self = cls()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", server.port)
        return self

    @classmethod
    async def once(cls, server, method, path):
        connection = await cls.open(server)
        try:
            return await connection.ask(request_bytes(method, path))
        finally:
            connection.close()

    async def ask(self, request):
        self.writer.write(request)
        await self.writer.drain()
        status, headers = await self.head()
        return status, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def head(self):
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def chunks(self):
        """The pieces of a chunked body."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def stream(self, number, heard):
        """A whole streamed completion. heard: is called with each piece."""
        self.writer.write(completion(number))
        await self.writer.drain()
        status, _ = await self.head()
        if status != 200:
            raise Broken(f"status {status}")
        text = b""
        async for piece in self.chunks():
            text += piece
            heard()
        if not text.endswith(b"data: [DONE]\n\n") or b'"error"' in text:
            raise Broken(f"a stream that ended with {text[-80:]!r}")

    def close(self):
        self.writer.close()

    def reset(self):
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Load:
    """The clients of one server."""

    def __init__(self, server):
        self.server = server
        self.counts = collections.Counter()  # by kind of client, and "done" or "errors"
        self.errors = []
        self.numbers = iter(range(1 << 40))
        self.idle_open = 0
        self.idle_tasks = []
        self.idle_end = asyncio.Event()
        self.tasks = []
        self.begin_period()

    def begin_period(self):
        self.since = time.perf_counter()
        self.paces = []  # seconds from token to token, one of each stream that began in this period

    def begin(self, active):
        self.tasks = [asyncio.create_task(self.active()) for _ in range(active)]
        for kind, life, count in (("slow", self.slow, SLOW), ("reader", self.reader, READERS), ("vanishing", self.vanishing, VANISHING)):
            self.tasks += [asyncio.create_task(self.repeat(kind, life)) for _ in range(count)]

    async def end(self):
        await cancel(self.tasks)
        await self.hold_idle(0)

    async def hold_idle(self, count):
        """Opens so many idle connections, each of which has been answered; 0: closes them."""
        if count == 0:
            self.idle_end.set()
            await asyncio.gather(*self.idle_tasks)
            self.idle_tasks = []
            self.idle_end = asyncio.Event()
            self.idle_open = 0
        while len(self.idle_tasks) < count:
            self.idle_tasks.append(asyncio.create_task(self.once("idle", self.idle)))
        while self.idle_open < count and not self.errors:
            await asyncio.sleep(0.05)

    async def once(self, kind, life):
        """What fails is an error."""
        try:
            await life(next(self.numbers))
            self.counts[kind, "done"] += 1
        except (Broken, OSError, EOFError, ValueError, asyncio.IncompleteReadError) as error:
            self.counts[kind, "errors"] += 1
            self.errors.append(f"{kind}: {type(error).__name__} {error}")
            await asyncio.sleep(0.1)

    async def repeat(self, kind, life):
        """One client after another, until it is cancelled."""
        while True:
            await self.once(kind, life)

    async def active(self):
        """Keeps its connection from one stream to the next."""
        kept = []

        async def one(number):
            connection = kept.pop() if kept else await Connection.open(self.server)
            times = []
            began = time.perf_counter()
            try:
                await connection.stream(number, lambda: times.append(time.perf_counter()))
            except BaseException:
                connection.close()
                raise
            kept.append(connection)
            if began >= self.since:
                self.paces.append((times[-1] - times[0]) / (TOKENS - 1))

        try:
            await self.repeat("active", one)
        finally:
            for connection in kept:
                connection.close()

    async def slow(self, number):
        in_time = number % 2 == 0
        request = completion(number, 8, stream=False)
        connection = await Connection.open(self.server)
        pause = RECEIVE_TIMEOUT * (0.4 if in_time else 3) / len(request)
        try:
            for i in range(len(request)):
                connection.writer.write(request[i:i + 1])
                await connection.writer.drain()
                await asyncio.sleep(pause)
            status, headers = await connection.head()
            await connection.reader.readexactly(int(headers["content-length"]))
            if not in_time:
                raise Broken("a request that took too long was answered")
            if status != 200:
                raise Broken(f"status {status}")
        except (OSError, asyncio.IncompleteReadError):
            if in_time:
                raise
        finally:
            connection.close()

    async def reader(self, number):
        connection = await Connection.open(self.server)
        try:
            connection.writer.write(completion(number))
            text = b""
            while not text.endswith(b"0\r\n\r\n"):
                piece = await connection.reader.read(512)
                if not piece:
                    raise Broken("a stream that was read slowly was cut")
                text += piece
                await asyncio.sleep(0.05)
            if b"data: [DONE]" not in text:
                raise Broken("a stream without an end")
        finally:
            connection.close()

    async def vanishing(self, number):
        connection = await Connection.open(self.server)
        connection.writer.write(completion(number, 500))
        if number % 3 > 0:
            await connection.reader.read(200 * (number % 3))
        connection.reset()
        await asyncio.sleep(0.2)

    async def idle(self, number):
        connection = None
        try:
            connection = await Connection.open(self.server)
            await self.ask_health(connection)
            self.idle_open += 1
            await self.idle_end.wait()
            await self.ask_health(connection)
        finally:
            if connection is not None:
                connection.close()

    async def ask_health(self, connection):
        status, _ = await connection.ask(request_bytes("GET", "/health"))
        if status != 200:
            raise Broken(f"status {status}")


async def cancel(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_idle(server):
    """Waits until nothing runs any more: who was cut off must be seen to be gone."""
    for _ in range(600):
        metrics = await server.metrics()
        if metrics["num_requests_running"] == 0 == metrics["num_requests_waiting"]:
            return metrics
        await asyncio.sleep(0.1)
    return metrics


class Period:
    """What was measured in one."""

    def __init__(self, load, steps):
        self.step = statistics.median(steps) if steps else float("nan")
        self.pace = statistics.median(load.paces) if load.paces else float("nan")
        self.streams = len(load.paces)
        self.memory = load.server.memory()


async def run_period(load, idle, seconds):
    end = time.perf_counter() + seconds
    await load.hold_idle(idle)
    await asyncio.sleep(max(0, end - seconds * 0.75 - time.perf_counter()))
    load.begin_period()
    pause = max(1, seconds / 4)  # what is counted are whole steps: some 100 of them
    steps, last, count = [], time.perf_counter(), (await load.server.metrics())["steps_total"]
    while last < end:
        await asyncio.sleep(pause)
        metrics, now = await load.server.metrics(), time.perf_counter()
        if metrics["steps_total"] > count:
            steps.append((now - last) / (metrics["steps_total"] - count))
        last, count = now, metrics["steps_total"]
    return Period(load, steps)


def print_summary(options, periods, load):
    print("\n| connections | step, median | token to token, median | streams timed | resident, first to last |\n|---|---|---|---|---|")
    for idle, some in periods.items():
        print(f"| {options.connections if idle else options.connections - options.idle} | "
              f"{statistics.median(period.step for period in some) * 1e3:.2f} ms | "
              f"{statistics.median(period.pace for period in some) * 1e3:.2f} ms | {sum(period.streams for period in some)} | "
              f"{some[0].memory / 1e6:.1f} to {some[-1].memory / 1e6:.1f} MB |")
    print("\n| clients | done | errors |\n|---|---|---|")
    for kind in ("active", "slow", "reader", "vanishing", "idle"):
        print(f"| {kind} | {load.counts[kind, 'done']} | {load.counts[kind, 'errors']} |")


def slowdown(periods, time_of):
    """Percent by which a time is longer with the idle connections: the median of the pairs, and the quartiles."""
    ratios = [(time_of(b) / time_of(a) - 1) * 100 for a, b in zip(periods[False], periods[True], strict=True)]
    quarters = statistics.quantiles(ratios, n=4, method="inclusive")
    return quarters[1], f"{quarters[1]:+.2f} % ({quarters[0]:+.2f} to {quarters[2]:+.2f})"


async def run(options, server):
    draw = random.Random(options.seed)
    periods = {False: [], True: []}
    await server.start()
    load = Load(server)
    load.begin(options.active)
    await run_period(load, options.idle, options.period)
    print("| pair | connections | step | token to token | streams timed | resident |\n|---|---|---|---|---|---|")
    for pair in range(options.pairs):
        for idle in draw.sample([False, True], 2):
            period = await run_period(load, options.idle if idle else 0, options.period)
            periods[idle].append(period)
            print(f"| {pair + 1} | {options.connections if idle else options.connections - options.idle} | {period.step * 1e3:.2f} ms | "
                  f"{period.pace * 1e3:.2f} ms | {period.streams} | {period.memory / 1e6:.1f} MB |", flush=True)
    await load.end()
    metrics = await until_idle(server)
    print_summary(options, periods, load)
    slower, steps = slowdown(periods, lambda period: period.step)
    _, tokens = slowdown(periods, lambda period: period.pace)
    growth = (periods[True][-1].memory / periods[True][min(1, options.pairs - 2)].memory - 1) * 100
    print(f"\nWith the idle connections, median of the pairs and quartiles: step {steps}, token to token {tokens}. Memory {growth:+.2f} %.")
    return broken_bounds(options, load, metrics, slower, growth)


def broken_bounds(options, load, metrics, slower, growth):
    broken = load.errors[:10]
    if len(load.errors) > 0:
        broken.append(f"{len(load.errors)} errors that are not the client's")
    if not slower <= options.most_slowdown:
        broken.append(f"steps are {slower:.2f} % slower, more than {options.most_slowdown:g} %")
    if not growth <= options.most_growth:
        broken.append(f"memory grew by {growth:.2f} %, more than {options.most_growth:g} %")
    if load.counts["active", "done"] == 0:
        broken.append("no stream was completed")
    if metrics["num_requests_running"] > 0 or metrics["num_requests_waiting"] > 0 or metrics["kv_bytes"] > 0:
        broken.append("something still runs, though no client is left")
    return broken


def main():
    options = read_options()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < options.connections + 200:
        fail(f"{options.connections} connections need a limit of {options.connections + 200} open files, but it is {files}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    server = Server(options)
    try:
        broken = asyncio.run(run(options, server))
    finally:
        if server.process.poll() is None:
            server.process.terminate()
        code = server.process.wait(120)
    if code != 0:
        broken.append(f"the server ended with {code}:\n{open(server.log.name).read()[-2000:]}")
    for text in broken:
        print(f"broken: {text}", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
