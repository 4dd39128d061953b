/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fuzz/http_server.h"

#include "engine/chat_template.h"
#include "engine/log.h"
#include "server/generation.h"
#include "tests/unit/fake_scheduler.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    ROUNDS = 6, /* of the loop: to accept, to read, to answer */
    WAIT_US = 50,
    PATIENCE = 200000, /* waits, of what must end */
    ANSWER_TURNS = 20, /* while something is generated */
    TOKENS = 512,
    OPTIONS_MAX = 32
};

static struct {
    struct config config;
    struct server *server;
    struct scheduler *scheduler;
    struct tokenizer *tokenizer;
    struct chat_template *chat_template;
    void (*before_end)(void);
    void (*after_end)(void);
} fuzz;

void fuzz_expect(bool condition) {
    if (!condition)
        abort();
}

static void turn(void) {
    uv_run(loop_uv(fuzz.server->loop), UV_RUN_NOWAIT);
}

static void take_outputs(void) {
    scheduler_poll(fuzz.scheduler, generation_output, fuzz.server);
}

static void wake(void *context) {
    (void)context;
    if (fuzz.server != NULL)
        loop_wake(fuzz.server->loop);
}

static void close_server(void) {
    if (fuzz.before_end != NULL)
        fuzz.before_end();
    generation_cancel_all(fuzz.server);
    while (fuzz.server->generations_active > 0)
        take_outputs();
    scheduler_free(fuzz.scheduler);
    server_free(fuzz.server);
    chat_template_free(fuzz.chat_template);
    tokenizer_free(fuzz.tokenizer);
    config_free(&fuzz.config);
    log_close();
    if (fuzz.after_end != NULL)
        fuzz.after_end();
}

void fuzz_server_at_end(void (*before)(void), void (*after)(void)) {
    fuzz.before_end = before;
    fuzz.after_end = after;
}

static void open_server(int count, char **options_given) {
    static char *options_always[] = {"--model", "model", "--port", "0", "--api-key", FUZZ_KEY};
    static char *no_environment[] = {NULL};
    char *all[OPTIONS_MAX];
    int always = sizeof options_always / sizeof options_always[0];
    fuzz_expect(always + count <= OPTIONS_MAX);
    memcpy(all, options_always, sizeof options_always);
    memcpy(all + always, options_given, (size_t)count * sizeof *all);
    struct error error;
    fuzz_expect(log_open(LOG_ERROR, false, &error) == 0);
    fuzz_expect(config_load(&fuzz.config, CONFIG_SERVE, always + count, all, no_environment, &error) == 0);
    fuzz.server = server_create(&fuzz.config, &error);
    fuzz_expect(fuzz.server != NULL);
    struct fake_options options = {
        .step_us = 1, .max_running = 8, .max_waiting = 8, .tokens_max = TOKENS, .wake = wake};
    fuzz.scheduler = fake_scheduler_create(&options);
    fuzz.tokenizer = fake_tokenizer_create(false);
    fuzz.chat_template = chat_template_create(FAKE_TEMPLATE, strlen(FAKE_TEMPLATE), fuzz.tokenizer, &error);
    fuzz_expect(fuzz.chat_template != NULL);
    fuzz.server->model = (struct server_model){.scheduler = fuzz.scheduler,
        .tokenizer = fuzz.tokenizer,
        .chat_template = fuzz.chat_template,
        .vocabulary = FAKE_VOCABULARY,
        .width = FAKE_WIDTH,
        .pooling = POOLING_MEAN,
        .context = TOKENS,
        .tokens_max = TOKENS};
    policy_settings_default(policy_find("full"), &fuzz.server->model.kv_policy);
    fuzz.server->loaded = true;
    atexit(close_server);
}

struct server *fuzz_server(int count, char **options) {
    if (fuzz.server == NULL)
        open_server(count, options);
    return fuzz.server;
}

/* --- A client --- */

void answer_free(struct answer *answer) {
    buffer_free(&answer->text);
}

int client_connect(uint32_t port) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fuzz_expect(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

static void client_read(int fd, struct answer *answer) {
    char piece[4096];
    ssize_t count;
    while ((count = recv(fd, piece, sizeof piece, MSG_DONTWAIT)) > 0)
        buffer_append(&answer->text, piece, (size_t)count);
    answer->ended |= count == 0 || (errno != EAGAIN && errno != EINTR);
}

void client_turn(int fd, struct answer *answer) {
    for (unsigned i = 0; i < ROUNDS && !answer->ended; i++) {
        turn();
        client_read(fd, answer);
    }
}

void client_send(int fd, struct answer *answer, const void *data, size_t bytes) {
    for (size_t sent = 0; sent < bytes && !answer->ended;) {
        ssize_t count = send(fd, (const char *)data + sent, bytes - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count > 0)
            sent += (size_t)count;
        else if (errno != EAGAIN)
            return;
        else
            client_turn(fd, answer); /* the socket's buffer is full */
    }
    client_turn(fd, answer);
}

void client_wait(int fd, struct answer *answer) {
    for (unsigned i = 0; !answer->ended; i++) { /* other threads have a part in it */
        fuzz_expect(i < PATIENCE);
        usleep(WAIT_US);
        client_turn(fd, answer);
    }
}

void client_send_cut(int fd, struct answer *answer, uint8_t cut, const uint8_t *text, size_t bytes) {
    size_t first = bytes * cut / 256;
    client_send(fd, answer, text, first);
    client_send(fd, answer, text + first, bytes - first);
    for (unsigned i = 0; i < ANSWER_TURNS && fuzz.server->exchanges_active > 0 && !answer->ended; i++) {
        usleep(WAIT_US);
        client_turn(fd, answer);
    }
}

void client_leave(int fd) {
    struct linger linger = {.l_onoff = 1};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    close(fd);
    for (unsigned i = 0; fuzz.server->exchanges != NULL || fuzz.server->generations_active > 0; i++) {
        fuzz_expect(i < PATIENCE);
        if (i >= ROUNDS)
            usleep(WAIT_US);
        turn();
        take_outputs();
    }
}

/* --- Answers --- */

static bool is_plain(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == '\r' && i + 1 < bytes && text[i + 1] == '\n')
            i++;
        else if (text[i] < ' ' || text[i] > '~')
            return false;
    }
    return true;
}

/* Of the first answer: its status, and its body, which lies in the text; 0: there is no whole head. */
static unsigned read_head(const struct buffer *text, const char **body) {
    const char *end = text->length == 0 ? NULL : memmem(text->data, text->length, "\r\n\r\n", 4);
    if (end == NULL)
        return 0;
    unsigned status = 0;
    size_t bytes = (size_t)(end - text->data) + 4;
    fuzz_expect(sscanf(text->data, "HTTP/1.%*1[01] %3u ", &status) == 1 && status >= 100 && status < 600);
    fuzz_expect(is_plain(text->data, bytes));
    *body = end + 4;
    return status;
}

static const char *find_header(const struct buffer *text, const char *body, const char *line) {
    const char *found = memmem(text->data, (size_t)(body - text->data), line, strlen(line));
    return found == NULL ? NULL : found + strlen(line);
}

/* Whether the first answer has a body of JSON, all of which came. */
static bool check_json(const struct buffer *text, const char *body) {
    const char *length = find_header(text, body, "\r\nContent-Length: ");
    if (length == NULL || find_header(text, body, "\r\nContent-Type: application/json\r\n") == NULL)
        return false;
    size_t bytes = strtoul(length, NULL, 10);
    if (bytes == 0 || bytes > text->length - (size_t)(body - text->data))
        return false; /* an answer to HEAD, or one that a client did not wait for */
    json_t *value = json_loadb(body, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    fuzz_expect(value != NULL);
    json_decref(value);
    return true;
}

const char *answer_check(struct answer *answer, bool must_be_json) {
    const char *body = NULL;
    buffer_append(&answer->text, "", 1); /* for sscanf */
    fuzz_expect(!answer->text.failed);
    answer->text.length--;
    unsigned status = read_head(&answer->text, &body);
    if (status != 0 && check_json(&answer->text, body) && must_be_json)
        fuzz_expect(status < 500);
    else
        fuzz_expect(!must_be_json);
    return body;
}

uint8_t *fuzz_text_copy(const struct fuzz_text *seeds, size_t count, unsigned index, size_t *bytes) {
    if (index >= count)
        return NULL;
    *bytes = seeds[index].bytes;
    uint8_t *copy = malloc(*bytes);
    if (copy != NULL)
        memcpy(copy, seeds[index].text, *bytes);
    return copy;
}
