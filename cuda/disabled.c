/* SPDX-License-Identifier: Apache-2.0
 *
 * The backend's functions in a build without it.
 */
#include "cuda/cuda.h"

static int refuse(struct error *error) {
    return error_set(error, ERROR_UNSUPPORTED, "this build has no CUDA backend (meson option cuda)");
}

bool backend_cuda_built(void) {
    return false;
}

bool backend_cuda_offered(struct error *error) {
    return refuse(error) == 0;
}

struct backend *backend_cuda_open(const struct backend_options *options, struct error *error) {
    (void)options;
    refuse(error);
    return NULL;
}

struct communicator *backend_cuda_connect(
    struct backend *const *ranks, uint32_t count, const char *all_reduce, struct error *error) {
    (void)ranks;
    (void)count;
    (void)all_reduce;
    refuse(error);
    return NULL;
}
