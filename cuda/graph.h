/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA graphs of steps that repeat (struct kv_step). A step whose key was met once before is captured: its launches go
 * to a graph instead of the device, and the graph runs; from then on the graph alone runs. What kernels take by value,
 * grids included, follows from the key; everything else they read from device memory that stays where it is. Where such
 * memory moved meanwhile (cuda->generation), the step is captured anew.
 *
 * The environment variable DISTILLCACHE_CUDA_GRAPHS=off runs every step launch by launch.
 */
#ifndef CUDA_GRAPH_H
#define CUDA_GRAPH_H

#include "cuda/cuda_backend.h"

enum { GRAPHS_MOST = 32 }; /* beyond that the one that was not used for longest goes */

/* Compared by bytes: set to zero before it is filled. */
struct graph_key {
    const void *owner; /* of the step */
    const void *pool;  /* its base */
    struct kv_layout layout;
    uint32_t rows, slots_most; /* padded, and rounded up */
    uint32_t needs;
    bool moments;
};

struct graph {
    struct graph_key key;
    uint64_t uses, last_use;
    uint64_t generation; /* of the backend, when it was captured */
    bool refused;        /* capturing was tried in vain */
    cudaGraphExec_t exec;
};

struct graphs {
    struct graph list[GRAPHS_MOST];
    uint64_t clock;
};

/* The one with this key, or the place of a new one. */
struct graph *graph_find(struct cuda_backend *cuda, struct graphs *graphs, const struct graph_key *key);

static inline bool graph_is_current(const struct cuda_backend *cuda, const struct graph *graph) {
    return graph->exec != NULL && graph->generation == cuda->generation;
}

/* From here on launches are captured. False: they are not, and the graph is refused. */
bool graph_capture_begin(struct cuda_backend *cuda, struct graph *graph);
/* Ends the capture; the graph can be run. False: what was captured cannot be part of a graph, and did not run. */
bool graph_capture_end(struct cuda_backend *cuda, struct graph *graph);
void graph_run(struct cuda_backend *cuda, struct graph *graph);

void graphs_free(struct cuda_backend *cuda, struct graphs *graphs);

#endif
