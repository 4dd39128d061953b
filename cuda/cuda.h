/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening the CUDA backend: what the program outside cuda/ needs to know of it. Plain C without CUDA's headers, and
 * there in every build: with -Dcuda=disabled the functions say that the build lacks it.
 *
 * The backend implements engine/backend.h on one device (compute capability 8.0 or later) and one stream. Its device
 * memory is not host memory (operations->host_memory is false).
 */
#ifndef CUDA_CUDA_H
#define CUDA_CUDA_H

#include "engine/backend.h"

#include <stdbool.h>

bool backend_cuda_built(void); /* whether the build has it */

/* Whether `auto` should take it: there is a device that it can use, and it is not emulated. Otherwise fills error with
 * why not: ERROR_UNSUPPORTED. */
bool backend_cuda_offered(struct error *error);

/* Takes device 0 of those that CUDA_VISIBLE_DEVICES leaves. The options for processors have no meaning here.
 * ERROR_UNSUPPORTED: the build lacks CUDA, there is no driver or no device, or the device is too old; ERROR_MEMORY. */
struct backend *backend_cuda_open(const struct backend_options *options, struct error *error);

#endif
