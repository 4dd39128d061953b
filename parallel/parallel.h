/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor parallel: a backend made of several (its ranks), which compute one model together. Each has a part of every
 * matrix and of the KV heads with their pages, and its own thread (or its own process: hosts.h); engine/backend.h
 * (struct backend) says what is where. Sequences, page tables, the scheduler and policies stay one: an operation of
 * this backend is cut by heads, done by all ranks at once, and over when all have done their part.
 *
 *   x += W_o attention, x += W_down activated: each rank multiplies its columns; rank 0 adds x; the sum of all ranks is
 *                                              the new x on each of them
 *   embed                                      who has the token's row writes it, the others zeros; then the sum
 *   logits                                     each rank those of its tokens, gathered on rank 0, which samples
 *   selection                                  heads that do not compete: each rank; over a layer or the model scores
 *                                              come to the host, and policy/select.h decides
 *   a decode step that was met before          a graph of each rank, if all of them have it
 *   a mean over a layer's heads (tova)         the same between two calls of the ranks' score
 *
 * Sums are taken in the order of ranks: results do not depend on the batch, and differ from one rank's by rounding.
 *
 * A rank that fails makes the whole backend fail for good: operations do nothing from then on, and `check` has the
 * error (ERROR_DEVICE, or what the communicator says).
 */
#ifndef PARALLEL_PARALLEL_H
#define PARALLEL_PARALLEL_H

#include "engine/backend.h"
#include "parallel/communicator.h"

/* Takes inner [ranks] and the communicator over, also on an error. They must be of one kind, but may be in other
 * processes (remote.h). ERROR_MEMORY, ERROR_IO, ERROR_UNSUPPORTED: ranks of this kind cannot be put together. */
struct backend *parallel_backend_open(
    struct backend *const *inner, uint32_t ranks, struct communicator *communicator, struct error *error);

/* options->ranks of the CPU backend as one, which share out options->threads. For tests and for trying: one backend
 * with as many threads is faster. */
struct backend *parallel_cpu_open(const struct backend_options *options, struct error *error);

/* The first options->ranks CUDA devices as one, which add up as options->all_reduce says (cuda/cuda.h). */
struct backend *parallel_cuda_open(const struct backend_options *options, struct error *error);

#endif
