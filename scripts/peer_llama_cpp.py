#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The peer of `distillcache bench --peer llama-cpp-python`: does the same work with llama.cpp and answers with seconds.

Started by the bench; the line protocol is described in commands/bench_peer.h. What is measured:

- llama_decode on a llama_batch and llama_synchronize, through llama-cpp-python's low-level bindings: a step costs one
  foreign call and one store per sequence in Python (some microseconds). Logits are computed for the same rows as ours;
  choosing a token from them is left out here, while our figure includes it.
- Same file, same number of threads, n_batch = n_ubatch = 512, everything else (flash attention, f16 cache, memory
  mapping, repacking of weights) at llama.cpp's defaults.
- Parallel sequences are sequence ids of one context, each with cells of its own.

A build of llama.cpp that uses OpenMP keeps its workers spinning for a while after each call (LLVM's runtime: 200 ms).
That is left as it is, because it is part of its speed; the answer is held back until the process uses no more processor time.
"""
import argparse
import ctypes
import sys
import time

BATCH_TOKENS = 512
IDLE_WINDOW_S = 0.05
IDLE_SHARE = 0.02
IDLE_TIMEOUT_S = 5.0


class Peer:
    """A model, and one context that is rebuilt when the work needs another shape."""

    def __init__(self, llama, path, threads):
        self.llama, self.threads = llama, threads
        self.quiet = llama.llama_log_callback(lambda level, text, data: None)  # must outlive every call
        llama.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.context, self.shape, self.filled = None, (0, 0), -1
        self.batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)

    def need(self, sequences, tokens):
        """A context for `sequences` sequences of up to `tokens` tokens each."""
        tokens = -(-tokens // 256) * 256
        if self.context and self.shape[0] == sequences and self.shape[1] >= tokens:
            return
        if self.context:
            self.llama.llama_free(self.context)
        params = self.llama.llama_context_default_params()
        params.n_ctx = sequences * tokens
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self.threads
        self.context = self.llama.llama_init_from_model(self.model, params)
        self.shape, self.filled = (sequences, tokens), -1
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context for {sequences} sequences of {tokens} tokens")
        self.memory = self.llama.llama_get_memory(self.context)

    def put(self, row, token, position, sequence, wanted):
        batch = self.batch
        batch.token[row], batch.pos[row], batch.logits[row] = token % self.vocabulary, position, wanted
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence

    def step(self, rows):
        self.batch.n_tokens = rows
        code = self.llama.llama_decode(self.context, self.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")
        self.llama.llama_synchronize(self.context)

    def fill(self, tokens):
        """Computes `tokens` tokens of sequence 0, logits of the last one; seconds in the engine."""
        seconds = 0.0
        for start in range(0, tokens, BATCH_TOKENS):
            rows = min(BATCH_TOKENS, tokens - start)
            for row in range(rows):
                self.put(row, 1000 + 7 * (start + row), start + row, 0, start + row == tokens - 1)
            began = time.perf_counter()
            self.step(rows)
            seconds += time.perf_counter() - began
        return seconds

    def prefill(self, tokens):
        self.need(1, tokens)
        self.llama.llama_memory_clear(self.memory, False)
        self.filled = -1
        return self.fill(tokens)

    def cache(self, depth, sequences):
        """Each sequence holds `depth` tokens, in cells of its own."""
        if self.filled != depth:
            self.llama.llama_memory_clear(self.memory, False)
            self.fill(depth)
            for sequence in range(1, sequences if depth else 0):
                self.llama.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
            self.filled = depth
        for sequence in range(sequences):
            self.llama.llama_memory_seq_rm(self.memory, sequence, depth, -1)

    def decode(self, steps, depth, sequences):
        self.need(sequences, depth + steps)
        self.cache(depth, sequences)
        for sequence in range(sequences):
            self.put(sequence, 2000 + 11 * sequence, depth, sequence, 1)
        token, position, vocabulary = self.batch.token, self.batch.pos, self.vocabulary
        began = time.perf_counter()
        for step in range(steps):
            for row in range(sequences):
                token[row] = (2000 + 11 * row + 13 * step) % vocabulary
                position[row] = depth + step
            self.step(sequences)
        return time.perf_counter() - began


def wait_until_idle():
    end = time.perf_counter() + IDLE_TIMEOUT_S
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(IDLE_WINDOW_S)
        if time.process_time() - before < IDLE_SHARE * IDLE_WINDOW_S:
            return


def answer(peer, words):
    if len(words) == 2 and words[0] == "prefill":
        return peer.prefill(int(words[1]))
    if len(words) == 6 and words[0] == "decode" and words[2] == "depth" and words[4] == "batch":
        return peer.decode(int(words[1]), int(words[3]), int(words[5]))
    raise ValueError("unknown request " + " ".join(words))


def say(text):
    sys.stdout.write(" ".join(text.split()) + "\n")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    try:
        import llama_cpp
    except ImportError as error:
        print(f"peer: {error}; --peer-python names an interpreter that has llama-cpp-python", file=sys.stderr)
        return 1
    try:
        peer = Peer(llama_cpp, options.model, options.threads)
    except RuntimeError as error:
        print(f"peer: {error}", file=sys.stderr)
        return 1
    info = llama_cpp.llama_print_system_info().decode(errors="replace")
    say(f"ready llama-cpp-python {llama_cpp.__version__}, {options.threads} threads, {info}")
    for line in sys.stdin:
        try:
            seconds = answer(peer, line.split())
            wait_until_idle()
            say(f"seconds {seconds:.9f}")
        except (RuntimeError, ValueError) as error:
            say(f"error {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
