/* SPDX-License-Identifier: Apache-2.0
 *
 * The admin API, to the whole server (http_server.h) with a state directory and the runner of fake jobs beside it. An
 * input begins with a byte that says what the client does with the rest:
 *   'B'    a byte that chooses a route of BODIES, and a body: sends a good head and the body
 *   'J'    a byte that chooses a route of ENTRIES, and a text: asks for what was created last, the text as its query
 *   else   sends the rest as it is, in two pieces that are cut at this part of it (0: in one)
 * A '@' of a body is the id of an uploaded file. The first two must be answered, as JSON or events, by no 5xx; and
 * whatever was sent, the server must be rid of the client when it leaves. What is created runs while others come, so
 * that a run is not repeated to the last bit.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/http_server.h"

#include "server/admin/admin.h"
#include "tests/unit/fake_train.h"

#include <arpa/inet.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BOUNDARY "b0"

static const struct {
    const char *path, *type;
} BODIES[] = {
    {"/admin/v1/training/jobs", "application/json"},
    {"/admin/v1/evaluations", "application/json"},
    {"/admin/v1/files", "multipart/form-data; boundary=" BOUNDARY},
    {"/admin/v1/policies/distillcache/activate", "application/json"},
};

enum created { JOB, EVALUATION, FILE_ID, CREATED_KINDS };

static const struct {
    enum created of;
    const char *method, *path;
} ENTRIES[] = {
    {JOB, "GET", "/admin/v1/training/jobs/%s"},
    {JOB, "POST", "/admin/v1/training/jobs/%s/cancel"},
    {JOB, "POST", "/admin/v1/training/jobs/%s/pause"},
    {JOB, "POST", "/admin/v1/training/jobs/%s/resume"},
    {JOB, "GET", "/admin/v1/training/jobs/%s/events"},
    {JOB, "GET", "/admin/v1/training/jobs/%s/checkpoints"},
    {EVALUATION, "GET", "/admin/v1/evaluations/%s"},
    {EVALUATION, "POST", "/admin/v1/evaluations/%s/cancel"},
    {FILE_ID, "GET", "/admin/v1/files/%s"},
    {FILE_ID, "GET", "/admin/v1/files/%s/content"},
};

static struct {
    struct server *server;
    char directory[64];
    char ids[CREATED_KINDS][64]; /* created last */
    struct policy_settings own;
} admin;

/* ---- the server ---- */

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status;
    (void)kind;
    (void)walk;
    return remove(path);
}

static void stop_jobs(void) {
    admin_stop(admin.server->admin);
}

static void remove_directory(void) {
    policy_settings_release(&admin.own);
    nftw(admin.directory, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* One that was free. */
static unsigned find_port(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fuzz_expect(fd >= 0 && bind(fd, (struct sockaddr *)&address, size) == 0);
    fuzz_expect(getsockname(fd, (struct sockaddr *)&address, &size) == 0);
    close(fd);
    return ntohs(address.sin_port);
}

/* In memory where that can be: every answer waits until its records are on the disk. */
static void make_directory(void) {
    strcpy(admin.directory, "/dev/shm/fuzz_admin.XXXXXX");
    if (mkdtemp(admin.directory) != NULL)
        return;
    strcpy(admin.directory, "/tmp/fuzz_admin.XXXXXX");
    fuzz_expect(mkdtemp(admin.directory) != NULL);
}

static void start_jobs(void) {
    const struct policy_model model = FAKE_TRAIN_MODEL;
    const struct trained_policies *trained;
    struct error error;
    struct server *server = admin.server;
    server->model.policy_model = model;
    server->model.fingerprint = FAKE_FINGERPRINT;
    server->model.train = fake_train;
    server->model.evaluate = fake_evaluate;
    policy_settings_default(policy_find("full"), &admin.own);
    fuzz_expect(admin_open_policies(server->admin, &model, &trained, &error) == 0);
    fuzz_expect(admin_take_own_policy(server->admin, &admin.own, &error) == 0);
    fuzz_expect(admin_load(server->admin, &error) == 0 && admin_start(server->admin, &error) == 0);
}

static void upload_first(void);

static void open_server(void) {
    char port[8];
    make_directory();
    snprintf(port, sizeof port, "%u", find_port());
    char *options[] = {
        "--max-body", "64K", "--admin-key", FUZZ_KEY, "--state-dir", admin.directory, "--admin-port", port};
    setenv("FAKE_TRAIN_STEP_MS", "0", 1);
    fuzz_server_at_end(stop_jobs, remove_directory);
    admin.server = fuzz_server(sizeof options / sizeof options[0], options);
    start_jobs();
    upload_first();
}

/* ---- requests ---- */

/* The answer's id, if it has one, is that of what was created last. */
static void remember(const char *body) {
    static const char *const begins[] = {"{\"id\":\"ftjob-", "{\"id\":\"eval-", "{\"id\":\"file-"};
    for (unsigned kind = 0; kind < CREATED_KINDS; kind++)
        if (strncmp(body, begins[kind], strlen(begins[kind])) == 0)
            snprintf(admin.ids[kind], sizeof admin.ids[kind], "%.*s", (int)strcspn(body + 7, "\""), body + 7);
}

static void ask(const struct buffer *request, bool must_be_json) {
    struct answer answer = {0};
    int fd = client_connect(admin.server->admin->port);
    fuzz_expect(!request->failed);
    client_send(fd, &answer, request->data, request->length);
    if (must_be_json)
        client_wait(fd, &answer);
    const char *body = answer_check(&answer, must_be_json);
    if (body != NULL && must_be_json)
        remember(body);
    client_leave(fd);
    answer_free(&answer);
}

static void append_body(struct buffer *out, const uint8_t *body, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (body[i] == '@')
            buffer_append(out, admin.ids[FILE_ID], strlen(admin.ids[FILE_ID]));
        else
            buffer_append(out, (const char *)body + i, 1);
    }
}

static void try_body(unsigned choice, const uint8_t *data, size_t bytes) {
    struct buffer body = {0}, request = {0};
    append_body(&body, data, bytes);
    choice %= sizeof BODIES / sizeof BODIES[0];
    buffer_format(&request,
        "POST %s HTTP/1.1\r\nHost: a\r\nX-Api-Key: " FUZZ_KEY "\r\nConnection: close\r\nContent-Type: %s\r\n"
        "Content-Length: %zu\r\n\r\n",
        BODIES[choice].path, BODIES[choice].type, body.length);
    buffer_append(&request, body.data, body.length);
    ask(&request, true);
    buffer_free(&body);
    buffer_free(&request);
}

/* A file's content is not JSON; events may be a stream, which a client leaves. */
static void try_entry(unsigned choice, const uint8_t *query, size_t bytes) {
    struct buffer request = {0};
    choice %= sizeof ENTRIES / sizeof ENTRIES[0];
    char path[160];
    snprintf(path, sizeof path, ENTRIES[choice].path, admin.ids[ENTRIES[choice].of]);
    buffer_format(&request, "%s %s?", ENTRIES[choice].method, path);
    for (size_t i = 0; i < bytes && i < 1000; i++)
        buffer_format(&request, query[i] > ' ' && query[i] < 0x7f && query[i] != '#' ? "%c" : "%%%02x", query[i]);
    buffer_format(&request, " HTTP/1.1\r\nHost: a\r\nX-Api-Key: " FUZZ_KEY "\r\nConnection: close\r\n\r\n");
    bool events = strstr(path, "/events") != NULL && bytes > 0, content = strstr(path, "/content") != NULL;
    ask(&request, !events && !content);
    buffer_free(&request);
}

static void try_text(uint8_t cut, const uint8_t *text, size_t bytes) {
    struct answer answer = {0};
    int fd = client_connect(admin.server->admin->port);
    client_send_cut(fd, &answer, cut, text, bytes);
    answer_check(&answer, false);
    client_leave(fd);
    answer_free(&answer);
}

#define FORM(file)                                                                                                     \
    "--" BOUNDARY "\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nfine-tune\r\n--" BOUNDARY               \
    "\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\nContent-Type: text/plain\r\n\r\n" file \
    "\r\n--" BOUNDARY "--\r\n"

static void upload_first(void) {
    static const char form[] = FORM("{\"text\":\"a\"}");
    try_body(2, (const uint8_t *)form, sizeof form - 1);
    fuzz_expect(admin.ids[FILE_ID][0] != '\0');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (admin.server == NULL)
        open_server();
    if (bytes >= 2 && data[0] == 'B')
        try_body(data[1], data + 2, bytes - 2);
    else if (bytes >= 2 && data[0] == 'J')
        try_entry(data[1], data + 2, bytes - 2);
    else if (bytes >= 1)
        try_text(data[0], data + 1, bytes - 1);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
#define KEYED " HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " FUZZ_KEY "\r\n"
    static const struct fuzz_text seeds[] = {
        FUZZ_TEXT("B\0{\"training_file\":\"@\",\"seed\":3,\"suffix\":\"mine\",\"hyperparameters\":{\"rank_steps\":4,"
                  "\"kl_steps\":0,\"ratios\":[0.5,0.25],\"valid_every\":\"auto\"},\"metadata\":{\"a\":\"b\"}}"),
        FUZZ_TEXT("B\0{\"model\":\"model\",\"training_file\":\"@\",\"validation_file\":\"@\",\"method\":{\"type\":"
                  "\"reinforcement\",\"reinforcement\":{\"hyperparameters\":{\"recipe\":\"paper\",\"steps\":5}}}}"),
        FUZZ_TEXT(
            "B\0{\"training_file\":\"file-x\",\"hyperparameters\":{\"method\":\"rlkv\",\"floor\":1e99,\"x\":null}}"),
        FUZZ_TEXT("B\1{\"task\":\"kl\",\"policies\":[\"full\",\"h2o,interval=4\"],\"ratios\":[0.5,0.25],\"limit\":2}"),
        FUZZ_TEXT("B\1{\"task\":\"arithmetic\",\"policies\":[\"snapkv\"],\"data\":\"@\",\"seed\":1,\"metadata\":{}}"),
        FUZZ_TEXT("B\2" FORM("{\"prompt\":\"a\"}\n{\"text\":\"\\u0000\"}")),
        FUZZ_TEXT("B\2--b0\r\nContent-Disposition: form-data; name=\"file\"; filename=\"../x\"\r\n\r\n\r\n--b0--\r\n"),
        FUZZ_TEXT("B\3{}"),
        FUZZ_TEXT("J\0"),
        FUZZ_TEXT("J\1"),
        FUZZ_TEXT("J\2"),
        FUZZ_TEXT("J\3"),
        FUZZ_TEXT("J\4stream=true&after=1"),
        FUZZ_TEXT("J\4"),
        FUZZ_TEXT("J\5limit=3&after=x&order=asc"),
        FUZZ_TEXT("J\6"),
        FUZZ_TEXT("J\7"),
        FUZZ_TEXT("J\x08"),
        FUZZ_TEXT("J\x09"),
        FUZZ_TEXT("\0GET /admin/v1/training/jobs?limit=2&order=desc&metadata%5Ba%5D=b" KEYED "\r\n"),
        FUZZ_TEXT("\x80GET /admin/v1/files?purpose=fine-tune&limit=1&after=file-0" KEYED "\r\n"),
        FUZZ_TEXT("\0GET /admin/v1/policies" KEYED "\r\nGET /admin/v1/status" KEYED "Connection: close\r\n\r\n"),
        FUZZ_TEXT("\0DELETE /admin/v1/policies/distillcache" KEYED "\r\n"),
        FUZZ_TEXT("\x40POST /admin/v1/policies/distillcache/deactivate" KEYED "Content-Length: 0\r\n\r\n"),
        FUZZ_TEXT("\0GET /admin/v1/evaluations?limit=0" KEYED "\r\n"),
        FUZZ_TEXT("\0POST /admin/v1/files HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nContent-Type: multipart/form-data; "
                  "boundary=b0\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n--b0\r\nCon\r\n0\r\n\r\n"),
        FUZZ_TEXT("\0GET /admin/v1/status HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a.example\r\n\r\n"),
    };
    return fuzz_text_copy(seeds, sizeof seeds / sizeof seeds[0], index, bytes);
}
