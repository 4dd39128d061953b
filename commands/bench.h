/* SPDX-License-Identifier: Apache-2.0
 *
 * `distillcache bench`: how fast this machine runs the model, by work:
 *   prefill      --prefill tokens into an empty sequence, and the first token
 *   decode       --decode steps for every batch of --batch and every depth of --depth: `batch` sequences, each with
 *                `depth` cached tokens before the first step
 *   first_token  a request of --prefill tokens through the idle scheduler, until its first token is delivered
 *   admission    a request of one token through the idle scheduler, until its end is delivered; its phases say how long
 *                it was queued and how long a cancellation takes
 * Each is run once to warm up and once with the engine's profile (bytes, and with --profile the phases), then --pairs
 * times for the figures, which are medians. With --peer every run of prefill and decode is paired with one of the peer,
 * in alternating order, and `ratio` is the median of peer seconds / own seconds. Own decode and prefill seconds contain
 * the logits and the choice of the most likely token; the peer's (scripts/peer_llama_cpp.py) the logits alone.
 *
 * read_bandwidth_fraction: bytes_per_step / step time, as a share of the bandwidth that a plain read of as many bytes
 * reaches with the same threads in the same process.
 *
 * Output: a table, or with --json the document of bench_report.h, on standard output; messages on standard error.
 */
#ifndef COMMANDS_BENCH_H
#define COMMANDS_BENCH_H

#include "config/config.h"

/* Exit code of the process: 0, or 1 after a message. */
int command_bench(const struct config *config);

#endif
