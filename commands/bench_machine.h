/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine under `distillcache bench`: what it is, what this process takes of it, and how fast it reads memory.
 */
#ifndef COMMANDS_BENCH_MACHINE_H
#define COMMANDS_BENCH_MACHINE_H

#include "commands/bench_report.h"

/* Fills cpu, features, cores, memory_bytes, core_to_core_ns, load_average, os and compiler; what the system does not
 * tell stays empty, 0 or negative. */
void bench_machine_describe(struct bench_machine *machine);

/* Nanoseconds that a cache line takes from one to the other of the first two processors that this process may use: half
 * a round trip between two threads pinned to them, median of five times 100,000 rounds (fewer where those take longer
 * than half a second). 0 with one processor. The threads of a step wait for one another hundreds of times, so that
 * decode at small batches follows this number: processors without a common last-level cache need several times as long.
 */
double bench_core_to_core_ns(void);

/* VmRSS of this process in bytes; 0 when the system does not tell. */
uint64_t bench_resident_bytes(void);

/* Seconds that `threads` threads need for a plain read of `bytes` bytes: median over repetitions on one buffer, so that
 * whatever part of it fits into the caches is there, as it is for the weights from step to step. 0 when there is no
 * memory for the buffer, or no threads. */
double bench_read_seconds(uint64_t bytes, uint32_t threads);

#endif
