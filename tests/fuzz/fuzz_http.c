/* SPDX-License-Identifier: Apache-2.0
 *
 * Heads of HTTP requests: the whole server in this process, on the fake scheduler, driven step by step on one thread,
 * so that a run is repeated by its input. An input begins with a byte that says what the client does with the rest:
 *   'B'    a byte that chooses a route of ROUTES, and a body: sends a good head and the body. It must be answered, as
 *          JSON, by no 5xx.
 *   else   sends the rest as it is, in two pieces that are cut at this part of it (0: in one).
 * Then the client leaves: whatever it sent, the server must be rid of it at once. An answer's head has no byte that a
 * client could have smuggled in (line ends, controls), and what says that it is JSON is JSON.
 */
#include "tests/fuzz/fuzz.h"

#include "engine/chat_template.h"
#include "engine/log.h"
#include "server/generation.h"
#include "server/server.h"
#include "tests/unit/fake_scheduler.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    ROUNDS = 6,        /* of the loop: to accept, to read, to answer */
    PATIENCE = 5000,   /* milliseconds, of what must end */
    ANSWER_TURNS = 20, /* while something is generated */
    TOKENS = 512
};

static const char *const ROUTES[] = {"/tokenize", "/detokenize", "/apply-template"};

static struct {
    struct config config;
    struct server *server;
    struct scheduler *scheduler;
    struct tokenizer *tokenizer;
    struct chat_template *chat_template;
} fuzz;

static void expect(bool condition) {
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
    generation_cancel_all(fuzz.server);
    while (fuzz.server->generations_active > 0)
        take_outputs();
    scheduler_free(fuzz.scheduler);
    server_free(fuzz.server);
    chat_template_free(fuzz.chat_template);
    tokenizer_free(fuzz.tokenizer);
    config_free(&fuzz.config);
    log_close();
}

/* With a key, and an origin whose pages may ask. */
static void open_server(void) {
    static char *options_given[] = {"--model", "model", "--port", "0", "--max-body", "64K", "--api-key", "key",
        "--cors-origin", "https://a.example"};
    static char *no_environment[] = {NULL};
    struct error error;
    expect(log_open(LOG_ERROR, false, &error) == 0);
    expect(config_load(&fuzz.config, CONFIG_SERVE, sizeof options_given / sizeof options_given[0], options_given,
               no_environment, &error) == 0);
    fuzz.server = server_create(&fuzz.config, &error);
    expect(fuzz.server != NULL);
    struct fake_options options = {
        .step_us = 1, .max_running = 8, .max_waiting = 8, .tokens_max = TOKENS, .wake = wake};
    fuzz.scheduler = fake_scheduler_create(&options);
    fuzz.tokenizer = fake_tokenizer_create(false);
    fuzz.chat_template = chat_template_create(FAKE_TEMPLATE, strlen(FAKE_TEMPLATE), fuzz.tokenizer, &error);
    expect(fuzz.chat_template != NULL);
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

/* --- A client --- */

/* What it was answered so far. */
struct answer {
    struct buffer text;
    bool ended;
};

static int client_connect(void) {
    struct sockaddr_in address = {.sin_family = AF_INET,
        .sin_port = htons((uint16_t)loop_port(fuzz.server->loop)),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    expect(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

static void client_read(int fd, struct answer *answer) {
    char piece[4096];
    ssize_t count;
    while ((count = recv(fd, piece, sizeof piece, MSG_DONTWAIT)) > 0)
        buffer_append(&answer->text, piece, (size_t)count);
    answer->ended |= count == 0 || (errno != EAGAIN && errno != EINTR);
}

static void client_turn(int fd, struct answer *answer) {
    for (unsigned i = 0; i < ROUNDS && !answer->ended; i++) {
        turn();
        client_read(fd, answer);
    }
}

static void client_send(int fd, struct answer *answer, const void *data, size_t bytes) {
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

/* Leaves by a reset; the server must then be rid of its requests. */
static void client_leave(int fd) {
    struct linger linger = {.l_onoff = 1};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    close(fd);
    for (unsigned i = 0; fuzz.server->exchanges != NULL || fuzz.server->generations_active > 0; i++) {
        expect(i < PATIENCE);
        if (i >= ROUNDS)
            usleep(1000);
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
    expect(sscanf(text->data, "HTTP/1.%*1[01] %3u ", &status) == 1 && status >= 100 && status < 600);
    expect(is_plain(text->data, bytes));
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
    expect(value != NULL);
    json_decref(value);
    return true;
}

static void check_answer(struct answer *answer, bool must_be_json) {
    const char *body;
    buffer_append(&answer->text, "", 1); /* for sscanf */
    expect(!answer->text.failed);
    answer->text.length--;
    unsigned status = read_head(&answer->text, &body);
    if (status != 0 && check_json(&answer->text, body) && must_be_json)
        expect(status < 500);
    else
        expect(!must_be_json);
}

static void try_body(uint8_t choice, const uint8_t *body, size_t bytes) {
    struct buffer request = {0};
    struct answer answer = {0};
    buffer_format(&request,
        "POST %s HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n",
        ROUTES[choice % (sizeof ROUTES / sizeof ROUTES[0])], bytes);
    buffer_append(&request, (const char *)body, bytes);
    int fd = client_connect();
    client_send(fd, &answer, request.data, request.length);
    for (unsigned i = 0; !answer.ended; i++) { /* a long body is read on another thread */
        expect(i < PATIENCE);
        usleep(1000);
        client_turn(fd, &answer);
    }
    check_answer(&answer, true);
    client_leave(fd);
    buffer_free(&answer.text);
    buffer_free(&request);
}

static void try_text(uint8_t cut, const uint8_t *text, size_t bytes) {
    struct answer answer = {0};
    size_t first = bytes * cut / 256;
    int fd = client_connect();
    client_send(fd, &answer, text, first);
    client_send(fd, &answer, text + first, bytes - first);
    for (unsigned i = 0; i < ANSWER_TURNS && fuzz.server->generations_active > 0 && !answer.ended; i++) {
        usleep(50);
        client_turn(fd, &answer);
    }
    check_answer(&answer, false);
    client_leave(fd);
    buffer_free(&answer.text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (fuzz.server == NULL)
        open_server();
    if (bytes >= 2 && data[0] == 'B')
        try_body(data[1], data + 2, bytes - 2);
    else if (bytes >= 1)
        try_text(data[0], data + 1, bytes - 1);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
#define SEED(text)                                                                                                     \
    { text, sizeof text - 1 }
    static const struct {
        const char *text;
        size_t bytes;
    } seeds[] = {
        SEED("\0GET /health HTTP/1.1\r\nHost: a\r\n\r\n"),
        SEED("\x80GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nX-Request-Id: my-1\r\n\r\n"),
        SEED("\0GET http://a:80/v1/models/model?x=%20&y HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\n\r\n"
             "HEAD /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
        SEED("\x40POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nContent-Type: "
             "application/json\r\nContent-Length: 30\r\n\r\n{\"prompt\":\"ab\",\"max_tokens\":3}"),
        SEED(
            "\xc0POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nTransfer-Encoding: chunked\r\n\r\n"
            "2a\r\n{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}\r\n11;x=y\r\n],\"stream\":true} \r\n0\r\n\r\n"),
        SEED("\0POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nContent-Length: 13\r\nExpect: "
             "100-continue\r\n\r\n{\"input\":\"a\"}"),
        SEED("\0POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nContent-Length: 30\r\n\r\n"
             "{\"prompt\":\"ab\",\"max_tokens\":0}"),
        SEED("\0OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\nOrigin: https://a.example\r\n"
             "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n"),
        SEED("\0DELETE /v1/completions HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nOrigin: https://b.example\r\n\r\n"),
        SEED("\0POST /tokenize HTTP/1.0\r\nAuthorization: bearer  key\r\nContent-Length: 99999999999999999999\r\n\r\n"),
        SEED("\0POST /tokenize HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nContent-Length: 2\r\nTransfer-Encoding: "
             "chunked\r\n\r\n0\r\n\r\n"),
        SEED("\0GET /%2e%2e/%00%ff HTTP/1.1\r\nHost: a\r\nCookie: a=b; c\r\nX: 1\r\n folded\r\n\r\n"),
        SEED("\0GET /openapi.json HTTP/2.0\r\n\r\n"),
        SEED("B\0{\"prompt\":\"a<|im_start|>\\u00e9\",\"return_token_strs\":true,\"add_special_tokens\":null}"),
        SEED("B\0{\"content\":\"ab\",\"parse_special\":false,\"model\":\"model\"}"),
        SEED("B\1{\"tokens\":[97,195,169,256,258.0]}"),
        SEED("B\2{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"}]},{\"role\":"
             "\"assistant\","
             "\"content\":null}],\"add_generation_prompt\":false,\"chat_template_kwargs\":{\"x\":[1]}}"),
    };
#undef SEED
    if (index >= sizeof seeds / sizeof seeds[0])
        return NULL;
    *bytes = seeds[index].bytes;
    uint8_t *copy = malloc(*bytes);
    if (copy != NULL)
        memcpy(copy, seeds[index].text, *bytes);
    return copy;
}
