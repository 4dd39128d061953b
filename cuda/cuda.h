/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening the CUDA backend: what the program outside cuda/ needs to know of it. Plain C without CUDA's headers, and
 * there in every build: with -Dcuda=disabled the functions say that the build lacks it.
 *
 * The backend implements engine/backend.h on one device (compute capability 8.0 or later) and one stream. Its device
 * memory is not host memory (operations->host_memory is false). Several can be ranks of one model (parallel/).
 */
#ifndef CUDA_CUDA_H
#define CUDA_CUDA_H

#include "engine/backend.h"
#include "parallel/communicator.h"

#include <stdbool.h>

bool backend_cuda_built(void); /* whether the build has it */

/* Whether `auto` should take it: there is a device that it can use, and it is not emulated. Otherwise fills error with
 * why not: ERROR_UNSUPPORTED. */
bool backend_cuda_offered(struct error *error);

/* Takes device options->device of those that CUDA_VISIBLE_DEVICES leaves. The options for processors have no meaning
 * here. ERROR_UNSUPPORTED: the build lacks CUDA, there is no driver or no such device, or the device is too old;
 * ERROR_MEMORY. */
struct backend *backend_cuda_open(const struct backend_options *options, struct error *error);

/* Makes ranks of backends, each on a device of its own: what they add up by (parallel/communicator.h). Must be freed
 * after them. From then on a backend that fails fails the communicator, instead of ending the program.
 *   "nccl"  NCCL. Its library is looked for now: a machine with one device needs none. ERROR_UNSUPPORTED: the build
 *           lacks it (its header was not there), or the machine does
 *   "host"  through pinned host memory: less time for small sums between devices that cannot reach each other
 *   "auto", NULL  NCCL where it is, else "host", and a log line says why
 * ERROR_INVALID: another word; ERROR_MEMORY; ERROR_DEVICE: the devices cannot be connected. */
struct communicator *backend_cuda_connect(
    struct backend *const *ranks, uint32_t count, const char *all_reduce, struct error *error);

#endif
