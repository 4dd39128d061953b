/* SPDX-License-Identifier: Apache-2.0
 *
 * Queues of device work. Operations of a stream run in order; nothing runs before somebody waits, or chance says so.
 * All functions are called with the runtime's lock held.
 */
#ifndef EMULATOR_STREAMS_H
#define EMULATOR_STREAMS_H

#include "emulator.h"
#include "internal.h"

#include <deque>
#include <functional>
#include <memory>
#include <vector>

/* A point in a stream's queue: reached when the stream has run that many operations. */
struct stream_point {
    struct CUstream_st *stream;
    uint64_t count;
};

struct operation {
    std::function<void()> run; /* with device memory open; may be empty */
    std::vector<struct stream_point> after;
};

struct CUgraph_st {
    std::vector<std::function<void()>> operations; /* in an order that respects all dependencies */
};

struct CUgraphExec_st {
    std::shared_ptr<struct CUgraph_st> graph;
};

struct capture {
    struct CUstream_st *origin;
    std::shared_ptr<struct CUgraph_st> graph;
    enum cudaStreamCaptureMode mode;
    std::vector<struct CUstream_st *> streams; /* that take part */
    bool invalid;
};

struct CUstream_st {
    bool blocking;
    std::deque<struct operation> queue;
    uint64_t queued, done;
    std::shared_ptr<struct capture> capture;
    uint64_t capture_count; /* operations it added to a capture */
};

struct CUevent_st {
    struct stream_point point;
    std::shared_ptr<struct capture> capture; /* recorded in a stream that is being captured */
    std::shared_ptr<double> milliseconds;    /* when the record was reached */
};

/* Locks the runtime for a scope; creates it at first use. */
struct runtime_scope {
    runtime_scope();
    ~runtime_scope();
};

/* What emulator_calls_read returns. */
extern struct emulator_calls runtime_calls;
/* Whether calls on the stream count: not those that go to a graph. */
bool stream_counts(cudaStream_t stream);

/* NULL: the legacy default stream. */
struct CUstream_st *stream_get(cudaStream_t stream);
/* Queues work, or adds it to the graph that the stream is captured to. */
cudaError_t stream_add(cudaStream_t stream, std::function<void()> run);
/* Runs what the point needs. */
void stream_reach(struct stream_point point);
void stream_reach_end(struct CUstream_st *stream);
/* Everything. */
void streams_drain(void);
/* Whether a capture forbids calls that wait or allocate. */
bool capture_forbids(void);
/* The sticky error of kernels, and the last error of calls. */
cudaError_t runtime_return(cudaError_t error);
void runtime_set_sticky(cudaError_t error);
cudaError_t runtime_sticky(void);

#endif
