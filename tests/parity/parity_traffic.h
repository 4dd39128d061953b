/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels move, counted by the emulator (tests/emulator/emulator.h): a kernel's traffic is at most 1.2 times what
 * its work needs at least, in 32-byte sectors, and its shared memory has hardly any bank conflicts. Cases of this kind
 * run on the emulated CUDA backend only. To add some: an array of cases in a file of the family, listed in parity.c.
 */
#ifndef TESTS_PARITY_PARITY_TRAFFIC_H
#define TESTS_PARITY_PARITY_TRAFFIC_H

#include "tests/parity/parity.h"

/* Counts from here on. */
void traffic_begin(struct parity *parity);

/* Checks what `kernel` (its name in the source, without template arguments) moved since: bytes is the least that it
 * must read and write. what names the shape, as printf. */
void traffic_check(struct parity *parity, const char *kernel, double bytes, const char *what, ...)
    __attribute__((format(printf, 4, 5)));

/* The same for kernels whose atomics in shared memory hit any bank: at most `passes` times the passes of shared memory
 * that would do without conflicts. */
void traffic_check_atomics(struct parity *parity, const char *kernel, double bytes, double passes, const char *what,
    ...) __attribute__((format(printf, 5, 6)));

/* The same for kernels that gather or scatter: the least is each sector once. */
void traffic_check_once(struct parity *parity, const char *kernel, const char *what, ...)
    __attribute__((format(printf, 3, 4)));

#endif
