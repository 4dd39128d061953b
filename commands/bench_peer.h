/* SPDX-License-Identifier: Apache-2.0
 *
 * The peer of `bench --peer`: another engine that does the same work in its own process, for ratios taken in one run.
 *
 * A child process is started as `PYTHON SCRIPT --model FILE --threads N`; lines go both ways over its standard input
 * and output, its standard error is ours. It answers
 *   (after its start)              ready TEXT      TEXT: name, version and instruction sets
 *   prefill N                      seconds S       N tokens into an empty sequence, logits of the last one
 *   decode N depth D batch B       seconds S       N steps of B sequences, each with D tokens before; logits of all
 *   (what it cannot do)            error TEXT
 * and ends at the end of its input. It answers only when its threads are
 * idle again, so that our runs have the machine for themselves; ours are idle while it works.
 */
#ifndef COMMANDS_BENCH_PEER_H
#define COMMANDS_BENCH_PEER_H

#include "engine/error.h"

#include <stdint.h>

struct bench_peer; /* opaque */

struct bench_peer_options {
    const char *python; /* program, looked up in PATH */
    const char *script; /* NULL: scripts/peer_llama_cpp.py of the source tree */
    const char *model;
    uint32_t threads;
};

/* Starts the peer and waits until it is ready. ERROR_IO with a message that says whether it could not be started,
 * ended early (and how) or did not answer in time; ERROR_FORMAT for an answer that is none of the above. */
struct bench_peer *bench_peer_start(const struct bench_peer_options *options, struct error *error);
void bench_peer_stop(struct bench_peer *peer); /* NULL allowed; waits for the process, kills it when it hangs */

const char *bench_peer_description(const struct bench_peer *peer);

int bench_peer_prefill(struct bench_peer *peer, uint32_t tokens, double *seconds, struct error *error);
int bench_peer_decode(
    struct bench_peer *peer, uint32_t steps, uint32_t depth, uint32_t batch, double *seconds, struct error *error);

#endif
