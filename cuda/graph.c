/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/graph.h"

#include "engine/log.h"

#include <string.h>

/* A graph that may be running: rare, so that it may wait. */
static void graph_clear(struct cuda_backend *cuda, struct graph *graph) {
    if (graph->exec == NULL)
        return;
    cuda_check(cuda, cuda_wait_stream(cuda), "graph");
    cuda_check(cuda, cudaGraphExecDestroy(graph->exec), "graph");
    graph->exec = NULL;
}

void graphs_free(struct cuda_backend *cuda, struct graphs *graphs) {
    for (uint32_t i = 0; i < GRAPHS_MOST; i++)
        graph_clear(cuda, &graphs->list[i]);
}

struct graph *graph_find(struct cuda_backend *cuda, struct graphs *graphs, const struct graph_key *key) {
    struct graph *oldest = &graphs->list[0];
    graphs->clock++;
    for (uint32_t i = 0; i < GRAPHS_MOST; i++) {
        struct graph *graph = &graphs->list[i];
        if (graph->uses > 0 && memcmp(&graph->key, key, sizeof *key) == 0) {
            graph->last_use = graphs->clock;
            return graph;
        }
        oldest = graph->last_use < oldest->last_use ? graph : oldest;
    }
    graph_clear(cuda, oldest);
    *oldest = (struct graph){.last_use = graphs->clock};
    memcpy(&oldest->key, key, sizeof *key); /* with its padding */
    return oldest;
}

bool graph_capture_begin(struct cuda_backend *cuda, struct graph *graph) {
    graph_clear(cuda, graph);
    cuda->capturing = cuda->failed == cudaSuccess &&
                      cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    cuda->capture_broken = false;
    if (!cuda->capturing) {
        cudaGetLastError(); /* steps can do without */
        graph->refused = true;
    }
    return cuda->capturing;
}

static void log_capture(const struct graph *graph, size_t nodes) {
    log_event(LOG_DEBUG, NULL, "a decode step was captured", "rows", LOG_INT(graph->key.rows), "slots",
        LOG_INT(graph->key.slots_most), "statistics", LOG_INT(graph->key.needs), "nodes", LOG_INT(nodes), NULL);
}

bool graph_capture_end(struct cuda_backend *cuda, struct graph *graph) {
    cudaGraph_t captured = NULL;
    size_t nodes = 0;
    cuda->capturing = false;
    cudaError_t result = cudaStreamEndCapture(cuda->stream, &captured);
    if (result == cudaSuccess && !cuda->capture_broken)
        result = cudaGraphInstantiate(&graph->exec, captured, 0);
    if (result == cudaSuccess && graph->exec != NULL)
        result = cudaGraphGetNodes(captured, NULL, &nodes);
    if (captured != NULL)
        cudaGraphDestroy(captured);
    if (result != cudaSuccess) {
        cudaGetLastError();
        graph_clear(cuda, graph);
    }
    graph->refused = graph->exec == NULL;
    graph->generation = cuda->generation;
    if (!graph->refused)
        log_capture(graph, nodes);
    return !graph->refused;
}

void graph_run(struct cuda_backend *cuda, struct graph *graph) {
    cuda_check(cuda, cudaGraphLaunch(graph->exec, cuda->stream), "graph");
}
