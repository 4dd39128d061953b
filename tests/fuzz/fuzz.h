/* SPDX-License-Identifier: Apache-2.0
 *
 * A fuzz target is a file fuzz_NAME.c with the two functions below. It is built in one of two ways:
 *   - with tests/fuzz/driver.c, by any compiler: replays the seeds and files given, then seeded mutations of them.
 *     fuzz_NAME [--runs N | --seconds N] [--seed N] [--write-seeds DIR] [FILE...]
 *     Mutations are the same for the same seed and files: N of them, or as many as fit into N seconds.
 *     An input that crashes, or hangs until SIGTERM, is written to ./crash-NAME, and `fuzz_NAME --runs 0 crash-NAME`
 *     repeats it.
 *   - with clang's libFuzzer (meson option fuzz): explores by coverage. tests/fuzz/explore.sh builds and runs these.
 */
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* Feeds bytes, which may be anything, to the code under test; crashes (or abort()s) on a fault. Returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Good inputs to start from, by index from 0: allocated bytes, NULL past the last. */
uint8_t *fuzz_seed(unsigned index, size_t *bytes);

#endif
