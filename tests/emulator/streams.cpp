/* SPDX-License-Identifier: Apache-2.0 */
#include "streams.h"

#include <pthread.h>
#include <set>
#include <time.h>

static pthread_mutex_t runtime_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *legacy;
static std::set<struct CUstream_st *> streams;
static std::vector<struct CUstream_st *> destroyed; /* kept: events may still name them */
static uint64_t random_state;
static cudaError_t sticky;
static thread_local cudaError_t last_error;
enum { QUEUE_MAX = 4096 };

runtime_scope::runtime_scope() {
    pthread_mutex_lock(&runtime_lock);
    if (legacy)
        return;
    settings_read();
    random_state = settings.seed;
    memory_create();
    if (settings.fast)
        memory_open();
    legacy = new struct CUstream_st();
    legacy->blocking = true;
    streams.insert(legacy);
}

runtime_scope::~runtime_scope() {
    pthread_mutex_unlock(&runtime_lock);
}

static uint64_t random_next(void) {
    random_state = random_state * 6364136223846793005 + 1442695040888963407; /* Knuth's linear congruences */
    return random_state >> 33;
}

/* ---- Errors ---- */

cudaError_t runtime_return(cudaError_t error) {
    if (sticky != cudaSuccess)
        error = sticky;
    if (error != cudaSuccess && error != cudaErrorNotReady)
        last_error = error;
    return error;
}

void runtime_set_sticky(cudaError_t error) {
    if (sticky == cudaSuccess)
        sticky = error;
}

cudaError_t runtime_sticky(void) {
    return sticky;
}

extern "C" cudaError_t cudaGetLastError(void) {
    struct runtime_scope scope;
    cudaError_t error = sticky != cudaSuccess ? sticky : last_error;
    last_error = cudaSuccess;
    return error;
}

extern "C" cudaError_t cudaPeekAtLastError(void) {
    struct runtime_scope scope;
    return sticky != cudaSuccess ? sticky : last_error;
}

extern "C" void emulator_fault_clear(void) {
    struct runtime_scope scope;
    for (struct CUstream_st *stream : streams) {
        stream->done = stream->queued;
        stream->queue.clear();
    }
    sticky = last_error = cudaSuccess;
    fault_forget();
}

extern "C" uint64_t emulator_seed(void) {
    struct runtime_scope scope;
    return settings.seed;
}

extern "C" void emulator_set_seed(uint64_t seed) {
    struct runtime_scope scope;
    streams_drain();
    settings.seed = random_state = seed;
}

extern "C" bool emulator_fast(void) {
    struct runtime_scope scope;
    return settings.fast;
}

extern "C" void emulator_set_fast(bool fast) {
    struct runtime_scope scope;
    streams_drain();
    if (fast == settings.fast)
        return;
    if (fast)
        memory_open();
    settings.fast = fast;
    if (!fast)
        memory_close();
}

/* ---- Counts ---- */

struct emulator_calls runtime_calls;

bool stream_counts(cudaStream_t stream) {
    return stream_get(stream)->capture == NULL;
}

extern "C" void emulator_calls_reset(void) {
    struct runtime_scope scope;
    runtime_calls = {};
}

extern "C" struct emulator_calls emulator_calls_read(void) {
    struct runtime_scope scope;
    return runtime_calls;
}

/* ---- Queues ---- */

struct CUstream_st *stream_get(cudaStream_t stream) {
    return stream ? stream : legacy;
}

/* The legacy stream waits for all blocking streams, and they for it. */
static void add_legacy_order(struct CUstream_st *stream, std::vector<struct stream_point> *after) {
    if (!stream->blocking)
        return;
    if (stream != legacy) {
        if (legacy->queued > legacy->done)
            after->push_back({legacy, legacy->queued});
        return;
    }
    for (struct CUstream_st *other : streams)
        if (other != legacy && other->blocking && other->queued > other->done)
            after->push_back({other, other->queued});
}

static void run_first(struct CUstream_st *stream) {
    struct operation operation = std::move(stream->queue.front());
    for (struct stream_point point : operation.after)
        stream_reach(point);
    stream->queue.pop_front();
    if (operation.run && sticky == cudaSuccess)
        operation.run();
    stream->done++;
}

void stream_reach(struct stream_point point) {
    if (point.stream->done >= point.count)
        return;
    memory_open();
    while (point.stream->done < point.count)
        run_first(point.stream);
    memory_close();
}

void stream_reach_end(struct CUstream_st *stream) {
    stream_reach({stream, stream->queued});
}

void streams_drain(void) {
    memory_open();
    for (struct CUstream_st *stream : streams)
        stream_reach_end(stream);
    memory_close();
}

/* The device may be ahead of or behind the host: in one of eight calls some stream goes on. */
static void go_on_by_chance(void) {
    if (settings.fast || random_next() % 8 != 0)
        return;
    unsigned chosen = (unsigned)(random_next() % streams.size());
    for (struct CUstream_st *stream : streams)
        if (chosen-- == 0 && stream->queued > stream->done) {
            stream_reach({stream, stream->done + 1 + random_next() % (stream->queued - stream->done)});
            break;
        }
}

static cudaError_t queue_add(struct CUstream_st *stream, struct operation operation) {
    add_legacy_order(stream, &operation.after);
    stream->queue.push_back(std::move(operation));
    stream->queued++;
    if (stream->queued - stream->done > QUEUE_MAX)
        stream_reach_end(stream);
    go_on_by_chance();
    return sticky;
}

cudaError_t stream_add(cudaStream_t stream_, std::function<void()> run) {
    struct CUstream_st *stream = stream_get(stream_);
    if (stream->capture) {
        stream->capture->graph->operations.push_back(std::move(run));
        return cudaSuccess;
    }
    return queue_add(stream, {std::move(run), {}});
}

/* ---- Streams ---- */

static cudaError_t create(cudaStream_t *stream, bool blocking) {
    *stream = new struct CUstream_st();
    (*stream)->blocking = blocking;
    streams.insert(*stream);
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    struct runtime_scope scope;
    return runtime_return(create(stream, true));
}

extern "C" cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    struct runtime_scope scope;
    return runtime_return(create(stream, !(flags & cudaStreamNonBlocking)));
}

extern "C" cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}

extern "C" cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    struct runtime_scope scope;
    if (!stream || !streams.count(stream))
        return runtime_return(cudaErrorInvalidResourceHandle);
    stream_reach_end(stream);
    streams.erase(stream);
    destroyed.push_back(stream);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    struct runtime_scope scope;
    if (stream_get(stream)->capture) {
        stream_get(stream)->capture->invalid = true;
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    }
    runtime_calls.waits++;
    if (!stream)
        for (struct CUstream_st *other : streams)
            if (other->blocking)
                stream_reach_end(other);
    stream_reach_end(stream_get(stream));
    return runtime_return(cudaSuccess);
}

/* Whoever asks again and again gets further. */
extern "C" cudaError_t cudaStreamQuery(cudaStream_t stream_) {
    struct runtime_scope scope;
    struct CUstream_st *stream = stream_get(stream_);
    if (stream->capture)
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    if (stream->queued == stream->done)
        return runtime_return(cudaSuccess);
    stream_reach({stream, stream->done + 1});
    return runtime_return(cudaErrorNotReady);
}

extern "C" cudaError_t cudaDeviceSynchronize(void) {
    struct runtime_scope scope;
    if (capture_forbids())
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    runtime_calls.waits++;
    streams_drain();
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user) {
    struct runtime_scope scope;
    return runtime_return(stream_add(stream, [=] { function(user); }));
}

/* ---- Events ---- */

static double now_milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    struct runtime_scope scope;
    *event = new struct CUevent_st();
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

extern "C" cudaError_t cudaEventDestroy(cudaEvent_t event) {
    struct runtime_scope scope;
    delete event;
    return runtime_return(event ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

extern "C" cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream_) {
    struct runtime_scope scope;
    struct CUstream_st *stream = stream_get(stream_);
    event->capture = stream->capture;
    if (stream->capture)
        return runtime_return(cudaSuccess);
    auto reached = std::make_shared<double>(0.0);
    event->milliseconds = reached;
    struct operation record = {[=] { *reached = now_milliseconds(); }, {}};
    event->point = {stream, stream->queued + 1};
    return runtime_return(queue_add(stream, std::move(record)));
}

static bool event_reached(const struct CUevent_st *event) {
    return !event->point.stream || event->point.stream->done >= event->point.count;
}

extern "C" cudaError_t cudaEventQuery(cudaEvent_t event) {
    struct runtime_scope scope;
    if (event->capture)
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    if (event_reached(event))
        return runtime_return(cudaSuccess);
    stream_reach({event->point.stream, event->point.stream->done + 1});
    return runtime_return(cudaErrorNotReady);
}

extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    struct runtime_scope scope;
    if (event->capture)
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    runtime_calls.waits++;
    if (event->point.stream)
        stream_reach(event->point);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    struct runtime_scope scope;
    if (!start->milliseconds || !end->milliseconds)
        return runtime_return(cudaErrorInvalidResourceHandle);
    if (!event_reached(start) || !event_reached(end))
        return runtime_return(cudaErrorNotReady);
    *milliseconds = (float)(*end->milliseconds - *start->milliseconds);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t stream_, cudaEvent_t event, unsigned) {
    struct runtime_scope scope;
    struct CUstream_st *stream = stream_get(stream_);
    if (event->capture) { /* the stream joins the capture */
        if (stream->capture && stream->capture != event->capture)
            return runtime_return(cudaErrorStreamCaptureUnsupported);
        if (!stream->capture)
            event->capture->streams.push_back(stream);
        stream->capture = event->capture;
        return runtime_return(cudaSuccess);
    }
    if (stream->capture)
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    struct operation wait = {nullptr, {}};
    if (!event_reached(event))
        wait.after.push_back(event->point);
    return runtime_return(queue_add(stream, std::move(wait)));
}

/* ---- Graphs ---- */

static std::set<struct capture *> captures;

bool capture_forbids(void) {
    bool forbids = false;
    for (struct capture *capture : captures)
        if (capture->mode != cudaStreamCaptureModeRelaxed) {
            capture->invalid = true;
            forbids = true;
        }
    return forbids;
}

extern "C" cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    struct runtime_scope scope;
    if (!stream || stream->capture)
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    stream->capture = std::make_shared<struct capture>();
    stream->capture->origin = stream;
    stream->capture->graph = std::make_shared<struct CUgraph_st>();
    stream->capture->mode = mode;
    stream->capture->streams.push_back(stream);
    captures.insert(stream->capture.get());
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    struct runtime_scope scope;
    *graph = NULL;
    if (!stream || !stream->capture || stream->capture->origin != stream)
        return runtime_return(cudaErrorStreamCaptureUnmatched);
    std::shared_ptr<struct capture> capture = stream->capture;
    for (struct CUstream_st *other : capture->streams)
        other->capture.reset();
    captures.erase(capture.get());
    if (capture->invalid)
        return runtime_return(cudaErrorStreamCaptureInvalidated);
    *graph = new struct CUgraph_st(*capture->graph);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    struct runtime_scope scope;
    const struct CUstream_st *s = stream_get(stream);
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    struct runtime_scope scope;
    *exec = new struct CUgraphExec_st();
    (*exec)->graph = std::make_shared<struct CUgraph_st>(*graph);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaGraphExecUpdate(
    cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *result) {
    struct runtime_scope scope;
    bool same = exec->graph->operations.size() == graph->operations.size();
    result->result = same ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
    result->errorNode = result->errorFromNode = NULL;
    if (!same)
        return runtime_return(cudaErrorGraphExecUpdateFailure);
    exec->graph = std::make_shared<struct CUgraph_st>(*graph);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    struct runtime_scope scope;
    std::shared_ptr<struct CUgraph_st> graph = exec->graph;
    runtime_calls.graphs += stream_counts(stream);
    return runtime_return(stream_add(stream, [graph] {
        for (const std::function<void()> &run : graph->operations)
            if (run && sticky == cudaSuccess)
                run();
    }));
}

extern "C" cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    struct runtime_scope scope;
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    struct runtime_scope scope;
    *count = graph->operations.size();
    return runtime_return(nodes ? cudaErrorNotSupported : cudaSuccess);
}

extern "C" cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    struct runtime_scope scope;
    delete graph;
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    struct runtime_scope scope;
    delete exec;
    return runtime_return(cudaSuccess);
}
