/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/nccl_library.h"

#include <dlfcn.h>
#include <string.h>

static struct nccl_library library;

#ifdef CUDA_EMULATED

const struct nccl_library *nccl_library_load(struct error *error) {
    (void)error;
    library = (struct nccl_library){ncclGetVersion, ncclGetErrorString, ncclCommInitAll, ncclCommDestroy, ncclCommAbort,
        ncclCommGetAsyncError, ncclAllReduce, ncclAllGather, ncclGroupStart, ncclGroupEnd};
    return &library;
}

#else

static const char *const names[] = {"ncclGetVersion", "ncclGetErrorString", "ncclCommInitAll", "ncclCommDestroy",
    "ncclCommAbort", "ncclCommGetAsyncError", "ncclAllReduce", "ncclAllGather", "ncclGroupStart", "ncclGroupEnd"};

_Static_assert(sizeof library == sizeof names / sizeof names[0] * sizeof(void *), "a name for each function");

const struct nccl_library *nccl_library_load(struct error *error) {
    static void *handle;
    void *functions[sizeof names / sizeof names[0]];
    if (handle == NULL)
        handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        error_set(error, ERROR_UNSUPPORTED, "NCCL is not there: %s", dlerror());
        return NULL;
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        functions[i] = dlsym(handle, names[i]);
        if (functions[i] == NULL) {
            error_set(error, ERROR_UNSUPPORTED, "libnccl.so.2 has no %s: it is too old", names[i]);
            return NULL;
        }
    }
    memcpy(&library, functions, sizeof library); /* in the order of its fields */
    return &library;
}

#endif
