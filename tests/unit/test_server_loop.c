/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole server in this process, on the fake scheduler, with clients on many threads: for ASan (nothing leaks,
 * whoever leaves when) and TSan (loop, worker threads, scheduler thread, metrics).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/log.h"
#include "server/server.h"
#include "tests/unit/fake_scheduler.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct fixture {
    struct config config;
    struct server *server;
    struct scheduler *scheduler;
    struct tokenizer *tokenizer;
    pthread_t thread;
    uint16_t port;
    int status;
};

static int load(void *context, const struct server_hooks *hooks, struct server_model *model, struct error *error) {
    struct fixture *fixture = context;
    (void)error;
    struct fake_options options = {.step_us = 200,
        .max_running = 32,
        .max_waiting = 1000,
        .tokens_max = 100000,
        .wake = hooks->wake,
        .wake_context = hooks->context};
    fixture->scheduler = fake_scheduler_create(&options);
    fixture->tokenizer = fake_tokenizer_create(false);
    *model = (struct server_model){.scheduler = fixture->scheduler,
        .tokenizer = fixture->tokenizer,
        .fingerprint = "0123456789abcdef",
        .vocabulary = FAKE_VOCABULARY,
        .context = 100000,
        .tokens_max = 100000};
    policy_settings_default(policy_find("full"), &model->kv_policy);
    return 0;
}

static void *run(void *context) {
    struct fixture *fixture = context;
    struct error error;
    fixture->status = server_run(fixture->server, load, fixture, &error);
    return NULL;
}

static struct fixture *start(unsigned drain_timeout) {
    struct fixture *fixture = calloc(1, sizeof *fixture);
    struct error error;
    assert_non_null(fixture);
    assert_int_equal(config_set_defaults(&fixture->config, &error), 0);
    fixture->config.port = 0;
    fixture->config.drain_timeout = drain_timeout;
    fixture->server = server_create(&fixture->config, &error);
    assert_non_null(fixture->server);
    fixture->port = (uint16_t)loop_port(fixture->server->loop);
    assert_int_equal(pthread_create(&fixture->thread, NULL, run, fixture), 0);
    return fixture;
}

static void finish(struct fixture *fixture) {
    pthread_join(fixture->thread, NULL);
    assert_int_equal(fixture->status, 0);
    scheduler_free(fixture->scheduler);
    server_free(fixture->server);
    tokenizer_free(fixture->tokenizer);
    config_free(&fixture->config);
    free(fixture);
}

static void stop(struct fixture *fixture) {
    kill(getpid(), SIGTERM);
    finish(fixture);
}

/* --- A client --- */

static int client_connect(const struct fixture *fixture) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(fixture->port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        abort();
    return fd;
}

static void client_send(int fd, const struct buffer *data) {
    for (size_t sent = 0; sent < data->length;) {
        ssize_t count = send(fd, data->data + sent, data->length - sent, MSG_NOSIGNAL);
        if (count <= 0)
            return;
        sent += (size_t)count;
    }
}

static void client_write(struct buffer *out, const char *method, const char *path, const char *body) {
    buffer_format(out, "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s", method, path,
        strlen(body), body);
}

/* Sends a request and reads the answer to its end; NUL-terminated, to be freed with buffer_free. */
static struct buffer client_ask(const struct fixture *fixture, const char *method, const char *path, const char *body) {
    struct buffer request = {0}, reply = {0};
    char piece[4096];
    int fd = client_connect(fixture);
    client_write(&request, method, path, body);
    client_send(fd, &request);
    for (ssize_t count; (count = recv(fd, piece, sizeof piece, 0)) > 0;)
        buffer_append(&reply, piece, (size_t)count);
    buffer_append(&reply, "", 1);
    close(fd);
    buffer_free(&request);
    return reply;
}

static bool client_gets(
    const struct fixture *fixture, const char *method, const char *path, const char *body, const char *expected) {
    struct buffer reply = client_ask(fixture, method, path, body);
    bool found = strstr(reply.data, expected) != NULL;
    if (!found)
        fprintf(stderr, "%s %s: %s\nwithout: %s\n", method, path, reply.data, expected);
    buffer_free(&reply);
    return found;
}

static void wait_ready(const struct fixture *fixture) {
    for (;;) {
        struct buffer reply = client_ask(fixture, "GET", "/ready", "");
        bool ready = strstr(reply.data, " 200 OK") != NULL;
        buffer_free(&reply);
        if (ready)
            return;
        usleep(1000);
    }
}

/* Waits until the scheduler has nothing left. */
static void wait_idle(const struct fixture *fixture) {
    for (;;) {
        struct buffer reply = client_ask(fixture, "GET", "/metrics", "");
        bool idle = strstr(reply.data, "num_requests_running{model_name=\"model\"} 0\n") != NULL &&
                    strstr(reply.data, "num_requests_waiting{model_name=\"model\"} 0\n") != NULL;
        buffer_free(&reply);
        if (idle)
            return;
        usleep(1000);
    }
}

/* --- Threads of clients --- */

enum { THREADS = 8, ROUNDS = 12 };

struct client {
    const struct fixture *fixture;
    pthread_t thread;
    unsigned number;
    unsigned failures;
};

static void run_clients(const struct fixture *fixture, void *(*work)(void *)) {
    struct client clients[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        clients[i] = (struct client){.fixture = fixture, .number = i};
        assert_int_equal(pthread_create(&clients[i].thread, NULL, work, &clients[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(clients[i].thread, NULL);
    for (unsigned i = 0; i < THREADS; i++)
        assert_int_equal(clients[i].failures, 0);
}

static void *ask_of_all_kinds(void *context) {
    struct client *client = context;
    for (unsigned round = 0; round < ROUNDS; round++) {
        char body[256], expected[64];
        snprintf(expected, sizeof expected, "\"text\":\"<%u.%u>\"", client->number, round);
        snprintf(body, sizeof body, "{\"prompt\":\"<%u.%u>\",\"max_tokens\":%zu,\"n\":2}", client->number, round,
            strlen(expected) - 9);
        client->failures += !client_gets(client->fixture, "POST", "/v1/completions", body, expected);
        snprintf(body, sizeof body,
            "{\"prompt\":\"<%u.%u>\",\"stream\":true,\"logprobs\":1,\"stream_options\":{\"include_usage\":true}}",
            client->number, round);
        client->failures += !client_gets(client->fixture, "POST", "/v1/completions", body, "data: [DONE]");
        client->failures += !client_gets(client->fixture, "POST", "/v1/completions", "{", "not valid JSON");
        client->failures += !client_gets(client->fixture, "POST", "/v1/completions", "{\"prompt\":\"!fail\"}", " 500 ");
        client->failures += !client_gets(client->fixture, "GET", "/metrics", "", "steps_total");
        client->failures += !client_gets(client->fixture, "GET", "/v1/models", "", "\"object\":\"list\"");
    }
    return NULL;
}

/* Bodies that are parsed on worker threads. */
static void *ask_with_large_bodies(void *context) {
    struct client *client = context;
    struct buffer body = {0};
    buffer_format(&body, "{\"unknown_field_%u\":1,\"max_tokens\":6,\"prompt\":\"", client->number);
    for (unsigned i = 0; i < 2000; i++)
        buffer_format(&body, "%05u,", i + client->number * 10000);
    buffer_append(&body, "\"}", 3);
    for (unsigned round = 0; round < ROUNDS; round++) {
        char expected[64];
        snprintf(expected, sizeof expected, "\"text\":\"%05u,\"", client->number * 10000);
        client->failures += !client_gets(client->fixture, "POST", "/v1/completions", body.data, expected);
        client->failures += !client_gets(client->fixture, "POST", "/tokenize", body.data, "\"count\":12000");
    }
    buffer_free(&body);
    return NULL;
}

static const char *const long_requests[] = {
    "{\"prompt\":\"abc\",\"max_tokens\":50000}",
    "{\"prompt\":\"abc\",\"max_tokens\":50000,\"stream\":true}",
    "{\"prompt\":\"!never\"}",
    "{\"prompt\":\"abc\",\"max_tokens\":50000,\"stream\":true,\"n\":3,\"echo\":true,\"logprobs\":2}",
};

/* Leaves at different moments: at once, after a while, after having read something. */
static void *leave_early(void *context) {
    struct client *client = context;
    for (unsigned round = 0; round < ROUNDS; round++) {
        struct buffer request = {0};
        char piece[64];
        int fd = client_connect(client->fixture);
        client_write(&request, "POST", "/v1/completions", long_requests[(client->number + round) % 4]);
        client_send(fd, &request);
        if (round % 3 == 1)
            usleep(3000);
        if (round % 3 == 2 && strstr(request.data, "stream") != NULL)
            client->failures += recv(fd, piece, sizeof piece, 0) <= 0;
        if (round % 2 == 1) {
            shutdown(fd, SHUT_WR);
            usleep(1000);
        }
        close(fd);
        buffer_free(&request);
    }
    return NULL;
}

/* --- Tests --- */

static void clients_get_their_own_answers(void **state) {
    (void)state;
    struct fixture *fixture = start(10);
    wait_ready(fixture);
    run_clients(fixture, ask_of_all_kinds);
    wait_idle(fixture);
    stop(fixture);
}

static void large_bodies_are_parsed_on_other_threads(void **state) {
    (void)state;
    struct fixture *fixture = start(10);
    wait_ready(fixture);
    run_clients(fixture, ask_with_large_bodies);
    stop(fixture);
}

static void clients_that_leave_are_cancelled(void **state) {
    (void)state;
    struct fixture *fixture = start(10);
    wait_ready(fixture);
    run_clients(fixture, leave_early);
    wait_idle(fixture);
    assert_true(client_gets(fixture, "GET", "/health", "", " 200 OK"));
    stop(fixture);
}

/* Connections that are suspended, writing, receiving or idle when the process ends. */
static void everything_is_closed_at_the_end(void **state) {
    (void)state;
    struct fixture *fixture = start(0);
    wait_ready(fixture);
    int sockets[32];
    for (unsigned i = 0; i < 32; i++) {
        struct buffer request = {0};
        sockets[i] = client_connect(fixture);
        client_write(&request, "POST", "/v1/completions", long_requests[i % 4]);
        if (i % 8 == 7)
            request.length = i % 16 == 7 ? 0 : request.length - 5;
        client_send(sockets[i], &request);
        buffer_free(&request);
    }
    usleep(20000);
    stop(fixture);
    for (unsigned i = 0; i < 32; i++)
        close(sockets[i]);
}

static void a_signal_while_loading_ends_the_server(void **state) {
    (void)state;
    struct fixture *fixture = start(10);
    stop(fixture);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clients_get_their_own_answers),
        cmocka_unit_test(large_bodies_are_parsed_on_other_threads),
        cmocka_unit_test(clients_that_leave_are_cancelled),
        cmocka_unit_test(everything_is_closed_at_the_end),
        cmocka_unit_test(a_signal_while_loading_ends_the_server),
    };
    struct error error;
    signal(SIGPIPE, SIG_IGN);
    if (log_open(LOG_ERROR, false, &error) != 0)
        return 1;
    int failed = cmocka_run_group_tests_name("server_loop", tests, NULL, NULL);
    log_close();
    return failed;
}
