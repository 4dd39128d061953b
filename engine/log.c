/* SPDX-License-Identifier: Apache-2.0
 *
 * The ring and its writer. A caller formats its line on its own stack and holds the lock only while it copies the line
 * into the ring; the writer holds it only while it copies lines out. The writer polls before it writes, and writes at
 * most PIPE_BUF bytes then, so that a reader which stopped reading cannot keep log_close from ending.
 */
#include "engine/log.h"

#include "engine/log_line.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    RING_SIZE = 256 * 1024,
    POLL_MS = 100,           /* how often a blocked writer looks whether it should end */
    CLOSE_PATIENCE_MS = 2000 /* how long log_close waits for a reader that does not read */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t filled; /* lines came, or closing was set */
    pthread_t writer;
    bool open;    /* lines go to the ring */
    bool closing; /* the writer is to end when the ring is empty */
    size_t begin, used;
    uint64_t dropped; /* lines, since the writer last told */
    char ring[RING_SIZE];
} state = {.lock = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER};

static atomic_int least_level = LOG_INFO;
static atomic_bool as_json;
static atomic_llong close_deadline; /* milliseconds of the monotonic clock; 0: none */

static int64_t clock_milliseconds(clockid_t clock) {
    struct timespec now = {0};
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Writing. */

static bool past_deadline(void) {
    long long deadline = atomic_load(&close_deadline);
    return deadline != 0 && clock_milliseconds(CLOCK_MONOTONIC) >= deadline;
}

/* Waits until standard error takes PIPE_BUF bytes. False: give up. */
static bool wait_writable(void) {
    for (;;) {
        struct pollfd poll_fd = {.fd = STDERR_FILENO, .events = POLLOUT};
        bool last_try = past_deadline();
        int ready = poll(&poll_fd, 1, last_try ? 0 : POLL_MS);
        if (ready > 0)
            return (poll_fd.revents & POLLOUT) != 0;
        if (last_try || (ready < 0 && errno != EINTR && errno != EAGAIN))
            return false;
    }
}

/* What cannot be written is lost: there is nowhere to report it. */
static void write_all(const char *bytes, size_t length) {
    while (length > 0 && wait_writable()) {
        ssize_t written = write(STDERR_FILENO, bytes, length < LOG_LINE_MAX ? length : LOG_LINE_MAX);
        if (written < 0 && errno != EINTR && errno != EAGAIN)
            return;
        if (written > 0) {
            bytes += written;
            length -= (size_t)written;
        }
    }
}

static void format_now(struct log_line *line, enum log_level level, const char *id, const char *event, va_list pairs) {
    log_line_format(line, atomic_load(&as_json), clock_milliseconds(CLOCK_REALTIME), level, id, event, pairs);
}

static void write_event(enum log_level level, const char *event, ...) __attribute__((sentinel));
static void write_event(enum log_level level, const char *event, ...) {
    struct log_line line;
    va_list pairs;
    va_start(pairs, event);
    format_now(&line, level, NULL, event, pairs);
    va_end(pairs);
    write_all(line.text, line.length);
}

/* Ring. The lock is held. */

static void ring_append(const char *bytes, size_t length) {
    size_t end = (state.begin + state.used) % RING_SIZE;
    size_t first = length < RING_SIZE - end ? length : RING_SIZE - end;
    memcpy(state.ring + end, bytes, first);
    memcpy(state.ring, bytes + first, length - first);
    state.used += length;
}

/* Takes as many whole lines as fit into LOG_LINE_MAX bytes. */
static size_t ring_take(char lines[static LOG_LINE_MAX]) {
    size_t length = state.used < LOG_LINE_MAX ? state.used : LOG_LINE_MAX;
    size_t first = length < RING_SIZE - state.begin ? length : RING_SIZE - state.begin;
    memcpy(lines, state.ring + state.begin, first);
    memcpy(lines + first, state.ring, length - first);
    while (length > 0 && lines[length - 1] != '\n')
        length--;
    state.begin = (state.begin + length) % RING_SIZE;
    state.used -= length;
    return length;
}

static void *writer_run(void *unused) {
    (void)unused;
    char lines[LOG_LINE_MAX];
    pthread_mutex_lock(&state.lock);
    for (;;) {
        while (state.used == 0 && state.dropped == 0 && !state.closing)
            pthread_cond_wait(&state.filled, &state.lock);
        if (state.used == 0 && state.dropped == 0)
            break;
        size_t length = ring_take(lines);
        uint64_t dropped = state.used == 0 ? state.dropped : 0; /* told after the lines that had come before */
        state.dropped -= dropped;
        pthread_mutex_unlock(&state.lock);
        write_all(lines, length);
        if (dropped > 0)
            write_event(LOG_WARNING, "log lines dropped", "count", LOG_INT(dropped), NULL);
        pthread_mutex_lock(&state.lock);
    }
    pthread_mutex_unlock(&state.lock);
    return NULL;
}

/* Starts the writer with all signals blocked: they are the other threads' business. */
static int start_writer(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&state.writer, NULL, writer_run, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure;
}

int log_open(enum log_level level, bool json, struct error *error) {
    int code = 0;
    pthread_mutex_lock(&state.lock);
    if (state.open) {
        code = error_set(error, ERROR_INVALID, "the log is open already");
        goto out;
    }
    atomic_store(&least_level, (int)level);
    atomic_store(&as_json, json);
    atomic_store(&close_deadline, 0);
    state.closing = false;
    int failure = start_writer();
    if (failure != 0) {
        code = error_set(error, ERROR_IO, "cannot start the log's thread: %s", strerror(failure));
        goto out;
    }
    state.open = true;
out:
    pthread_mutex_unlock(&state.lock);
    return code;
}

void log_close(void) {
    pthread_mutex_lock(&state.lock);
    bool was_open = state.open;
    pthread_t writer = state.writer;
    if (was_open) {
        state.open = false;
        state.closing = true;
        atomic_store(&close_deadline, clock_milliseconds(CLOCK_MONOTONIC) + CLOSE_PATIENCE_MS);
        pthread_cond_signal(&state.filled);
    }
    pthread_mutex_unlock(&state.lock);
    if (was_open)
        pthread_join(writer, NULL);
}

void log_event(enum log_level level, const char *id, const char *event, ...) {
    if ((int)level < atomic_load(&least_level))
        return;
    struct log_line line;
    va_list pairs;
    va_start(pairs, event);
    format_now(&line, level, id, event, pairs);
    va_end(pairs);

    pthread_mutex_lock(&state.lock);
    bool direct = !state.open;
    if (!direct) {
        if (state.dropped > 0 || state.used + line.length > RING_SIZE) {
            state.dropped++;
        } else {
            ring_append(line.text, line.length);
        }
        pthread_cond_signal(&state.filled);
    }
    pthread_mutex_unlock(&state.lock);
    if (direct)
        write_all(line.text, line.length);
}
