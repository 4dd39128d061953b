#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands in the place of the interpreter given by --peer-python: takes the peer's script as an argument, does not run
it, and speaks its protocol (commands/bench_peer.h). FAKE_PEER_LOG names a file that gets the arguments and every
question; FAKE_PEER_DIES_AT is the number of the question at which it exits with code 9.
"""
import os
import sys


def main():
    dies_at = int(os.environ.get("FAKE_PEER_DIES_AT", "-1"))
    with open(os.environ["FAKE_PEER_LOG"], "a", buffering=1) as log:
        print(*sys.argv[1:], file=log)
        print("ready fake peer, AVX = 0", flush=True)
        for number, line in enumerate(sys.stdin):
            if number == dies_at:
                return 9
            print(line.strip(), file=log)
            print("seconds", 1000 if line.startswith("prefill") else 2000, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
