/* SPDX-License-Identifier: Apache-2.0 */
#include "streams.h"

#include <pthread.h>
#include <set>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t runtime_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *legacy[DEVICES_MAX];
static std::set<struct CUstream_st *> streams;
static std::vector<struct CUstream_st *> destroyed; /* kept: events may still name them */
static uint64_t random_state;
static cudaError_t sticky[DEVICES_MAX];
static thread_local cudaError_t last_error;
static thread_local unsigned current_device;
static thread_local struct CUstream_st *running_stream;
enum { QUEUE_MAX = 4096, REST_MICROSECONDS = 50 };

runtime_scope::runtime_scope() {
    pthread_mutex_lock(&runtime_lock);
    if (legacy[0])
        return;
    settings_read();
    random_state = settings.seed;
    memory_create();
    if (settings.fast)
        memory_open();
    for (unsigned device = 0; device < DEVICES_MAX; device++) {
        legacy[device] = new struct CUstream_st();
        legacy[device]->device = device;
        legacy[device]->blocking = true;
        streams.insert(legacy[device]);
    }
}

runtime_scope::~runtime_scope() {
    pthread_mutex_unlock(&runtime_lock);
}

static uint64_t random_next(void) {
    random_state = random_state * 6364136223846793005 + 1442695040888963407; /* Knuth's linear congruences */
    return random_state >> 33;
}

/* ---- Devices ---- */

unsigned device_current(void) {
    return current_device;
}

unsigned runtime_device(void) {
    return running_stream ? running_stream->device : current_device;
}

extern "C" cudaError_t cudaSetDevice(int device) {
    struct runtime_scope scope;
    if (device < 0 || (unsigned)device >= settings.devices)
        return runtime_return(cudaErrorInvalidDevice);
    current_device = (unsigned)device;
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaGetDevice(int *device) {
    *device = (int)current_device;
    return cudaSuccess;
}

/* ---- Errors ---- */

cudaError_t runtime_return(cudaError_t error) {
    if (sticky[current_device] != cudaSuccess)
        error = sticky[current_device];
    if (error != cudaSuccess && error != cudaErrorNotReady)
        last_error = error;
    return error;
}

void runtime_set_sticky(cudaError_t error) {
    if (sticky[runtime_device()] == cudaSuccess)
        sticky[runtime_device()] = error;
}

extern "C" cudaError_t cudaPeekAtLastError(void) {
    struct runtime_scope scope;
    return sticky[current_device] != cudaSuccess ? sticky[current_device] : last_error;
}

extern "C" cudaError_t cudaGetLastError(void) {
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

extern "C" void emulator_fail_device(int device, int error) {
    struct runtime_scope scope;
    sticky[device] = (cudaError_t)error;
}

extern "C" void emulator_fault_clear(void) {
    struct runtime_scope scope;
    for (struct CUstream_st *stream : streams) {
        stream->done = stream->queued;
        stream->queue.clear();
    }
    for (cudaError_t &error : sticky)
        error = cudaSuccess;
    last_error = cudaSuccess;
    fault_forget();
}

static void drain_all(void) {
    for (unsigned device = 0; device < settings.devices; device++)
        streams_drain(device);
}

extern "C" uint64_t emulator_seed(void) {
    struct runtime_scope scope;
    return settings.seed;
}

extern "C" void emulator_set_seed(uint64_t seed) {
    struct runtime_scope scope;
    drain_all();
    settings.seed = random_state = seed;
}

extern "C" bool emulator_fast(void) {
    struct runtime_scope scope;
    return settings.fast;
}

extern "C" void emulator_set_fast(bool fast) {
    struct runtime_scope scope;
    drain_all();
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
    return stream ? stream : legacy[current_device];
}

/* The legacy stream waits for all blocking streams of its device, and they for it. */
static void add_legacy_order(struct CUstream_st *stream, std::vector<struct stream_point> *after) {
    struct CUstream_st *first = legacy[stream->device];
    if (!stream->blocking)
        return;
    if (stream != first) {
        if (first->queued > first->done)
            after->push_back({first, first->queued});
        return;
    }
    for (struct CUstream_st *other : streams)
        if (other != first && other->device == stream->device && other->blocking && other->queued > other->done)
            after->push_back({other, other->queued});
}

static bool try_first(struct CUstream_st *stream);

static bool try_reach(struct stream_point point) {
    while (point.stream->done < point.count)
        if (!try_first(point.stream))
            return false;
    return true;
}

/* The same, but not the work of another device. */
static bool try_point(struct stream_point point, unsigned device) {
    return point.stream->device == device ? try_reach(point) : point.stream->done >= point.count;
}

/* Runs a stream's first operation. False: it has to wait for others, or somebody is running it. */
static bool try_first(struct CUstream_st *stream) {
    if (stream->running)
        return false;
    stream->running = true;
    bool can = true;
    for (size_t i = 0; i < stream->queue.front().after.size() && can; i++)
        can = try_point(stream->queue.front().after[i], stream->device);
    const std::function<bool()> &ready = stream->queue.front().work.ready;
    can = can && (!ready || sticky[stream->device] != cudaSuccess || ready());
    if (can) {
        struct operation operation = std::move(stream->queue.front());
        struct CUstream_st *before = running_stream;
        stream->queue.pop_front();
        running_stream = stream;
        if (operation.work.run && sticky[stream->device] == cudaSuccess)
            operation.work.run();
        running_stream = before;
        stream->done++;
    }
    stream->running = false;
    return can;
}

/* A thread of each device goes on with its work when somebody waits for it. Whoever waits does not do that itself: what
 * it ran might have to wait, for what it is to queue next. */
static pthread_cond_t device_wanted = PTHREAD_COND_INITIALIZER;
static bool wanted[DEVICES_MAX];

static void *device_main(void *device_) {
    unsigned device = (unsigned)(uintptr_t)device_;
    fault_signal_stack();
    pthread_mutex_lock(&runtime_lock);
    current_device = device;
    for (;;) {
        while (!wanted[device])
            pthread_cond_wait(&device_wanted, &runtime_lock);
        wanted[device] = false;
        std::vector<struct CUstream_st *> all(streams.begin(), streams.end()); /* others may create streams meanwhile */
        memory_open();
        for (struct CUstream_st *stream : all)
            if (stream->device == device && stream->queued > stream->done)
                try_first(stream);
        memory_close();
    }
    return NULL;
}

static void want_devices(void) {
    static bool started;
    for (unsigned device = 0; device < settings.devices; device++) {
        pthread_t thread;
        if (!started && pthread_create(&thread, NULL, device_main, (void *)(uintptr_t)device) == 0)
            pthread_detach(thread);
        wanted[device] = true;
    }
    started = true;
    pthread_cond_broadcast(&device_wanted);
}

void streams_let_others(void) {
    want_devices();
    pthread_mutex_unlock(&runtime_lock);
    usleep(REST_MICROSECONDS);
    pthread_mutex_lock(&runtime_lock);
}

void stream_reach(struct stream_point point) {
    if (point.stream->done >= point.count)
        return;
    memory_open();
    while (point.stream->done < point.count)
        if (!try_first(point.stream))
            streams_let_others();
    memory_close();
}

void stream_reach_end(struct CUstream_st *stream) {
    stream_reach({stream, stream->queued});
}

void streams_drain(unsigned device) {
    std::vector<struct CUstream_st *> all(streams.begin(), streams.end());
    memory_open();
    for (struct CUstream_st *stream : all)
        if (stream->device == device)
            stream_reach_end(stream);
    memory_close();
}

/* The device may be ahead of or behind the host: in one of eight calls some stream of it goes on, if it can. */
static void go_on_by_chance(void) {
    if (settings.fast || random_next() % 8 != 0)
        return;
    std::vector<struct CUstream_st *> with_work;
    for (struct CUstream_st *stream : streams)
        if (stream->device == current_device && stream->queued > stream->done)
            with_work.push_back(stream);
    if (with_work.empty())
        return;
    struct CUstream_st *stream = with_work[random_next() % with_work.size()];
    memory_open();
    try_reach({stream, stream->done + 1 + random_next() % (stream->queued - stream->done)});
    memory_close();
}

static cudaError_t queue_add(struct CUstream_st *stream, struct operation operation) {
    add_legacy_order(stream, &operation.after);
    stream->queue.push_back(std::move(operation));
    stream->queued++;
    if (stream->queued - stream->done > QUEUE_MAX)
        stream_reach_end(stream);
    go_on_by_chance();
    return sticky[stream->device];
}

cudaError_t stream_add(cudaStream_t stream_, std::function<void()> run, std::function<bool()> ready) {
    struct CUstream_st *stream = stream_get(stream_);
    struct work work = {std::move(run), std::move(ready)};
    if (stream->capture) {
        stream->capture->graph->operations.push_back(std::move(work));
        return cudaSuccess;
    }
    return queue_add(stream, {std::move(work), {}});
}

/* ---- Streams ---- */

static cudaError_t create(cudaStream_t *stream, bool blocking) {
    *stream = new struct CUstream_st();
    (*stream)->device = current_device;
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

static void reach_blocking_of(unsigned device) {
    std::vector<struct CUstream_st *> all(streams.begin(), streams.end());
    for (struct CUstream_st *stream : all)
        if (stream->device == device && stream->blocking)
            stream_reach_end(stream);
}

extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    struct runtime_scope scope;
    if (stream_get(stream)->capture) {
        stream_get(stream)->capture->invalid = true;
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    }
    runtime_calls.waits++;
    if (!stream)
        reach_blocking_of(current_device);
    stream_reach_end(stream_get(stream));
    return runtime_return(cudaSuccess);
}

/* A step of the stream, or where it has to wait, of others. */
static void go_on(struct CUstream_st *stream) {
    memory_open();
    if (!try_first(stream))
        want_devices();
    memory_close();
}

/* Whoever asks again and again gets further. */
extern "C" cudaError_t cudaStreamQuery(cudaStream_t stream_) {
    struct runtime_scope scope;
    struct CUstream_st *stream = stream_get(stream_);
    if (stream->capture)
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    if (stream->queued == stream->done)
        return runtime_return(cudaSuccess);
    go_on(stream);
    return runtime_return(cudaErrorNotReady);
}

extern "C" cudaError_t cudaDeviceSynchronize(void) {
    struct runtime_scope scope;
    if (capture_forbids())
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    runtime_calls.waits++;
    streams_drain(current_device);
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
    (*event)->device = current_device;
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
    if (event->device != stream->device) {
        fault_host(
            "cudaEventRecord: the event is of device %u, the stream of device %u", event->device, stream->device);
        return runtime_return(cudaErrorInvalidResourceHandle);
    }
    event->capture = stream->capture;
    if (stream->capture)
        return runtime_return(cudaSuccess);
    auto reached = std::make_shared<double>(0.0);
    event->milliseconds = reached;
    struct operation record = {{[=] { *reached = now_milliseconds(); }, nullptr}, {}};
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
    go_on(event->point.stream);
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
    struct operation wait = {{nullptr, nullptr}, {}};
    if (!event_reached(event))
        wait.after.push_back(event->point);
    return runtime_return(queue_add(stream, std::move(wait)));
}

/* ---- Graphs ---- */

static std::set<struct capture *> captures;

bool capture_forbids(void) {
    bool forbids = false;
    for (struct capture *capture : captures)
        if (capture->mode == cudaStreamCaptureModeGlobal ||
            (capture->mode == cudaStreamCaptureModeThreadLocal && pthread_equal(capture->thread, pthread_self()))) {
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
    stream->capture->thread = pthread_self();
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
    cudaError_t error = cudaSuccess;
    for (const struct work &work : graph->operations)
        error = stream_add(stream, work.run, work.ready);
    return runtime_return(error);
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
