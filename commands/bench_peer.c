/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/bench_peer.h"

#include "engine/clock.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

enum { ANSWER_TIMEOUT_S = 600, STOP_TIMEOUT_MS = 5000, LINE_MAX_BYTES = 1024 };

struct bench_peer {
    pid_t pid; /* 0: already waited for */
    int socket;
    char line[LINE_MAX_BYTES]; /* the last answer */
    char description[LINE_MAX_BYTES];
};

/* One socket is both standard input and output of the child: sends on it can be told not to raise SIGPIPE. */
static int spawn_child(const struct bench_peer_options *options, int child_end, pid_t *pid) {
    char threads[16];
    snprintf(threads, sizeof threads, "%u", options->threads);
    const char *script = options->script != NULL ? options->script : BENCH_PEER_SCRIPT;
    char *arguments[] = {
        (char *)options->python, (char *)script, "--model", (char *)options->model, "--threads", threads, NULL};
    posix_spawn_file_actions_t actions;
    int code = posix_spawn_file_actions_init(&actions);
    if (code != 0)
        return code;
    code = posix_spawn_file_actions_adddup2(&actions, child_end, STDIN_FILENO);
    if (code == 0)
        code = posix_spawn_file_actions_adddup2(&actions, child_end, STDOUT_FILENO);
    if (code == 0)
        code = posix_spawnp(pid, options->python, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    return code;
}

static int64_t now_ms(void) {
    return (int64_t)(clock_seconds() * 1e3);
}

/* Waits for the child; a child that does not end is killed. The wait status, or 0 when there is none. */
static int wait_for_end(struct bench_peer *peer) {
    int status = 0;
    pid_t pid = peer->pid;
    peer->pid = 0;
    int64_t deadline = now_ms() + STOP_TIMEOUT_MS;
    pid_t ended;
    while ((ended = waitpid(pid, &status, WNOHANG)) == 0 && now_ms() < deadline)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    if (ended == 0) {
        kill(pid, SIGKILL);
        ended = waitpid(pid, &status, 0);
    }
    return ended == pid ? status : 0;
}

/* The peer closed its end: says how it ended. */
static int report_end(struct bench_peer *peer, const char *question, struct error *error) {
    int status = wait_for_end(peer);
    if (WIFSIGNALED(status))
        return error_set(error, ERROR_IO, "the peer was killed by signal %d (%s) while it was to answer '%s'",
            WTERMSIG(status), strsignal(WTERMSIG(status)), question);
    return error_set(error, ERROR_IO,
        "the peer ended with exit code %d while it was to answer '%s'; its own messages are on standard error",
        WEXITSTATUS(status), question);
}

/* Reads one line into peer->line, without its end. A peer speaks only when asked, so nothing follows the line. */
static int read_line(struct bench_peer *peer, const char *question, struct error *error) {
    size_t used = 0;
    int64_t deadline = now_ms() + ANSWER_TIMEOUT_S * 1000;
    for (;;) {
        struct pollfd descriptor = {.fd = peer->socket, .events = POLLIN};
        int64_t left = deadline - now_ms();
        int ready = left > 0 ? poll(&descriptor, 1, (int)left) : 0;
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready == 0)
            return error_set(error, ERROR_IO, "the peer did not answer '%s' within %d s", question, ANSWER_TIMEOUT_S);
        ssize_t got = ready < 0 ? -1 : recv(peer->socket, peer->line + used, sizeof peer->line - 1 - used, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0 || (got < 0 && errno == ECONNRESET))
            return report_end(peer, question, error);
        if (got < 0)
            return error_set(error, ERROR_IO, "cannot read from the peer: %s", strerror(errno));
        used += (size_t)got;
        peer->line[used] = '\0';
        char *end = strchr(peer->line, '\n');
        if (end != NULL) {
            *end = '\0';
            return 0;
        }
        if (used == sizeof peer->line - 1)
            return error_set(error, ERROR_FORMAT, "the peer's answer to '%s' is longer than %zu bytes: '%.80s...'",
                question, sizeof peer->line - 1, peer->line);
    }
}

/* Waits for "KEYWORD TEXT" and points *text at TEXT. */
static int expect(
    struct bench_peer *peer, const char *question, const char *keyword, const char **text, struct error *error) {
    int code = read_line(peer, question, error);
    if (code != 0)
        return code;
    size_t length = strlen(keyword);
    if (strncmp(peer->line, keyword, length) == 0 && peer->line[length] == ' ') {
        *text = peer->line + length + 1;
        return 0;
    }
    if (strncmp(peer->line, "error ", 6) == 0)
        return error_set(error, ERROR_IO, "the peer cannot do '%s': %.400s", question, peer->line + 6);
    return error_set(error, ERROR_FORMAT, "the peer answered '%.200s' to '%s', where '%s ...' was expected", peer->line,
        question, keyword);
}

struct bench_peer *bench_peer_start(const struct bench_peer_options *options, struct error *error) {
    int ends[2] = {-1, -1};
    struct bench_peer *peer = calloc(1, sizeof *peer);
    if (peer == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the peer");
        return NULL;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        error_set(error, ERROR_IO, "cannot make a socket pair for the peer: %s", strerror(errno));
        free(peer);
        return NULL;
    }
    peer->socket = ends[0];
    int code = spawn_child(options, ends[1], &peer->pid);
    close(ends[1]);
    if (code != 0) {
        peer->pid = 0;
        error_set(error, ERROR_IO, "cannot start the peer's interpreter '%s': %s", options->python, strerror(code));
        goto fail;
    }
    const char *text = NULL;
    if (expect(peer, "start", "ready", &text, error) != 0)
        goto fail;
    snprintf(peer->description, sizeof peer->description, "%s", text);
    return peer;
fail:
    bench_peer_stop(peer);
    return NULL;
}

void bench_peer_stop(struct bench_peer *peer) {
    if (peer == NULL)
        return;
    close(peer->socket);
    if (peer->pid > 0)
        wait_for_end(peer);
    free(peer);
}

const char *bench_peer_description(const struct bench_peer *peer) {
    return peer->description;
}

/* Sends question and a line end, and reads "seconds S". */
static int ask_seconds(struct bench_peer *peer, const char *question, double *seconds, struct error *error) {
    char line[128];
    size_t bytes = (size_t)snprintf(line, sizeof line, "%s\n", question);
    for (size_t sent = 0; sent < bytes;) {
        ssize_t got = send(peer->socket, line + sent, bytes - sent, MSG_NOSIGNAL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EPIPE || errno == ECONNRESET))
            return report_end(peer, question, error);
        if (got < 0)
            return error_set(error, ERROR_IO, "cannot write to the peer: %s", strerror(errno));
        sent += (size_t)got;
    }
    const char *text = NULL;
    int code = expect(peer, question, "seconds", &text, error);
    if (code != 0)
        return code;
    char *end = NULL;
    *seconds = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(*seconds) || *seconds <= 0)
        return error_set(
            error, ERROR_FORMAT, "the peer answered 'seconds %.100s' to '%s': not a time above 0", text, question);
    return 0;
}

int bench_peer_prefill(struct bench_peer *peer, uint32_t tokens, double *seconds, struct error *error) {
    char question[64];
    snprintf(question, sizeof question, "prefill %u", tokens);
    return ask_seconds(peer, question, seconds, error);
}

int bench_peer_decode(
    struct bench_peer *peer, uint32_t steps, uint32_t depth, uint32_t batch, double *seconds, struct error *error) {
    char question[96];
    snprintf(question, sizeof question, "decode %u depth %u batch %u", steps, depth, batch);
    return ask_seconds(peer, question, seconds, error);
}
