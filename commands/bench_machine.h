/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine under `distillcache bench`: what it is, what this process takes of it, and how fast it reads memory.
 */
#ifndef COMMANDS_BENCH_MACHINE_H
#define COMMANDS_BENCH_MACHINE_H

#include "commands/bench_report.h"

/* Fills cpu, features, cores, memory_bytes, load_average, os and compiler; what the system does not tell stays empty, 0
 * or negative. */
void bench_machine_describe(struct bench_machine *machine);

/* VmRSS of this process in bytes; 0 when the system does not tell. */
uint64_t bench_resident_bytes(void);

/* Seconds that `threads` threads need for a plain read of `bytes` bytes: median over repetitions on one buffer, so that
 * whatever part of it fits into the caches is there, as it is for the weights from step to step. 0 when there is no
 * memory for the buffer, or no threads. */
double bench_read_seconds(uint64_t bytes, uint32_t threads);

#endif
