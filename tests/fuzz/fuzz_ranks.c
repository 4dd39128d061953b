/* SPDX-License-Identifier: Apache-2.0
 *
 * What a worker is told by its leader: a message is refused, or done without a look beyond the memory that the leader
 * has. A real leader's messages to a worker, over a real connection, are recorded once; an input says how many of them
 * come first (4 bytes), and then has messages of its own, which seeds take from the recording.
 */
#include "tests/fuzz/fuzz.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/engine.h"
#include "parallel/communicator.h"
#include "parallel/messages.h"
#include "parallel/rendezvous.h"
#include "parallel/worker.h"
#include "tests/unit/tiny_llama.h"
#include "tests/unit/tiny_network.h"

enum { MESSAGES_MAX = 8192, BYTES_MAX = 8 << 20, PROMPT = 40, STEPS = 3, SEEDS_EACH = 3 };

struct recorded {
    uint32_t operation;
    size_t bytes;
    uint8_t *data;
};

static struct model *model;
static struct backend *backend; /* of the worker */
static struct recorded recording[MESSAGES_MAX];
static uint32_t recorded_count;
static char address[32];

static void expect(bool condition) {
    if (!condition)
        abort();
}

/* ---- the recording ---- */

static struct backend *open_backend(void) {
    const struct backend_options options = {.cpu_features = "scalar", .threads = 1};
    struct backend *opened = backend_cpu_open(&options, NULL);
    expect(opened != NULL);
    return opened;
}

static void record(uint32_t operation, const void *bytes, size_t size) {
    expect(recorded_count < MESSAGES_MAX);
    struct recorded *to = &recording[recorded_count++];
    *to = (struct recorded){.operation = operation, .bytes = size, .data = malloc(size + 1)};
    expect(to->data != NULL);
    memcpy(to->data, bytes, size);
}

/* A worker as worker_run, which keeps what it hears. */
static void *listen_and_work(void *unused) {
    const struct rendezvous options = {.address = address,
        .key = "",
        .version = "1",
        .fingerprint = model->fingerprint,
        .backend = "cpu",
        .rank = 1,
        .patience = COMMUNICATOR_PATIENCE};
    struct link link;
    struct wire answer = {0};
    uint32_t world, operation;
    (void)unused;
    expect(rendezvous_join(&options, &link, &world, NULL) == 0);
    struct worker *worker = worker_create(model, backend, 1, world, BYTES_MAX, NULL);
    for (;;) {
        void *bytes;
        size_t size;
        bool answers = false;
        expect(link_receive(&link, BYTES_MAX, true, &operation, &bytes, &size, NULL) == 0);
        if (operation == MESSAGE_GOODBYE)
            break;
        record(operation, bytes, size);
        wire_begin_writing(&answer);
        expect(worker_take(worker, operation, bytes, size, &answer, &answers, NULL) == 0);
        if (answers)
            expect(link_send(&link, operation, answer.bytes, answer.at, NULL, 0, NULL) == 0);
    }
    wire_free(&answer);
    worker_free(worker);
    link_close(&link);
    return NULL;
}

/* A prompt and some steps under a policy, with prunes. */
static void run_policy(struct engine *engine, const char *policy, const struct policy_network *network) {
    struct policy_settings settings;
    struct error error = {0};
    int32_t tokens[PROMPT];
    struct sequence *sequence = sequence_create(engine);
    expect(policy_settings_parse(policy, &settings, &error) == 0);
    if (network != NULL)
        policy_settings_use_network(&settings, network);
    expect(sequence_set_policy(sequence, &settings, PROMPT, &error) == 0);
    for (uint32_t i = 0; i < PROMPT; i++)
        tokens[i] = (int32_t)(i * 7 % model->shape.vocabulary);
    for (uint32_t step = 0; step < STEPS; step++) {
        struct batch_item item = {
            .sequence = sequence, .tokens = tokens, .count = step == 0 ? PROMPT : 1, .want = WANT_LAST};
        expect(engine_forward(engine, &item, 1, &error) == 0);
        expect(engine_prune(engine, &sequence, 1, &error) == 0);
    }
    uint32_t positions[2 * PROMPT];
    float keys[2 * PROMPT * 16], values[2 * PROMPT], outputs[2 * PROMPT]; /* 16: head_dim */
    struct head_features features = {
        .capacity = 2 * PROMPT, .positions = positions, .keys = keys, .value_norm = values, .output_norm = outputs};
    expect(sequence_features(sequence, 0, 1, &features, &error) == 0); /* of the worker's head */
    struct sequence *fork = sequence_fork(sequence);
    expect(fork != NULL && sequence_swap_out(fork, &error) == 0 && sequence_swap_in(fork, &error) == 0);
    sequence_free(fork);
    sequence_free(sequence);
    policy_settings_release(&settings);
}

static void run_leader(void) {
    static const char *const policies[] = {"cake,tokens=16,window=4", "streaming,tokens=12,positions=cache",
        "expected_attention,tokens=16,interval=1", "tova,tokens=12,summary=1", "restkv,tokens=16,window=4,interval=1",
        "scissorhands,tokens=16,recent_tokens=4"};
    const struct engine_options options = {.kv_bytes = 1 << 20,
        .kv_format = KV_F16,
        .batch_rows = PROMPT,
        .context = 128,
        .poison_free = true,
        .backend = {.cpu_features = "scalar",
            .threads = 1,
            .hosts = {.world = 2, .rendezvous = address, .key = "", .version = "1"}}};
    struct error error = {0};
    struct engine *engine = engine_open(model, &options, &error);
    expect(engine != NULL);
    for (uint32_t i = 0; i < sizeof policies / sizeof policies[0]; i++)
        run_policy(engine, policies[i], NULL);
    for (int i = 0; i < 2; i++) {
        const struct network_shape shape = tiny_network_shape(i == 0 ? FEATURES_CONTENT : FEATURES_PAPER,
            model->shape.layers, model->shape.kv_heads, model->shape.head_dim);
        struct policy_network *network = tiny_network_create(&shape, 1);
        run_policy(engine, i == 0 ? "distillcache,tokens=12,interval=1" : "ranker,tokens=12,interval=1", network);
        network_release(network);
    }
    engine_close(engine);
}

static void choose_address(void) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof any;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    expect(fd >= 0 && bind(fd, (struct sockaddr *)&any, sizeof any) == 0);
    expect(getsockname(fd, (struct sockaddr *)&any, &size) == 0);
    close(fd);
    snprintf(address, sizeof address, "127.0.0.1:%u", ntohs(any.sin_port));
}

static void make_recording(void) {
    struct tiny_llama shape = tiny_llama_default();
    pthread_t worker;
    if (recorded_count > 0)
        return;
    shape.layers = 1;
    shape.vocabulary = 64;
    shape.ff_width = 64;
    char *path = tiny_llama_save(&shape);
    model = model_open(path, NULL);
    expect(model != NULL);
    unlink(path);
    free(path);
    backend = open_backend();
    choose_address();
    expect(pthread_create(&worker, NULL, listen_and_work, NULL) == 0);
    run_leader();
    pthread_join(worker, NULL);
}

/* ---- inputs ---- */

static bool take(struct worker *worker, struct wire *answer, uint32_t operation, const void *bytes, size_t size) {
    struct error error = {0};
    void *copy = aligned_alloc(16, (size + 15) / 16 * 16 + 16); /* aligned, and it is overwritten */
    bool answers = false;
    expect(copy != NULL);
    if (size > 0)
        memcpy(copy, bytes, size);
    wire_begin_writing(answer);
    int code = worker_take(worker, operation, copy, size, answer, &answers, &error);
    expect(code == 0 || ((code == ERROR_FORMAT || code == ERROR_MEMORY) && error.message[0] != '\0'));
    free(copy);
    return code == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    uint32_t before, operation;
    uint64_t size;
    struct wire answer = {0};
    make_recording();
    if (bytes < sizeof before)
        return 0;
    memcpy(&before, data, sizeof before);
    size_t at = sizeof before;
    struct worker *worker = worker_create(model, backend, 1, 2, BYTES_MAX, NULL);
    for (uint32_t i = 0; i < before % recorded_count; i++)
        expect(take(worker, &answer, recording[i].operation, recording[i].data, recording[i].bytes));
    while (bytes - at >= MESSAGE_HEADER_BYTES &&
           message_read_header(data + at, bytes - at - MESSAGE_HEADER_BYTES, &operation, &size)) {
        at += MESSAGE_HEADER_BYTES;
        if (!take(worker, &answer, operation, data + at, size))
            break;
        at += size;
    }
    worker_free(worker);
    wire_free(&answer);
    return 0;
}

/* The n-th message of a kind; *at: how many come before it. */
static const struct recorded *find(uint32_t operation, uint32_t number, uint32_t *at) {
    for (*at = 0; *at < recorded_count; (*at)++)
        if (recording[*at].operation == operation && number-- == 0)
            return &recording[*at];
    return NULL;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    uint32_t at;
    make_recording();
    if (index / SEEDS_EACH + MESSAGE_ALLOCATE >= MESSAGE_OPERATIONS)
        return NULL;
    uint32_t operation = index / SEEDS_EACH + MESSAGE_ALLOCATE;
    const struct recorded *message = find(operation, index % SEEDS_EACH * 5, &at);
    size_t size = message != NULL ? message->bytes : 0;
    uint8_t *seed = malloc(sizeof at + MESSAGE_HEADER_BYTES + size);
    expect(seed != NULL);
    *bytes = sizeof at + MESSAGE_HEADER_BYTES + size;
    memcpy(seed, &at, sizeof at);
    message_write_header(seed + sizeof at, operation, size);
    if (size > 0)
        memcpy(seed + sizeof at + MESSAGE_HEADER_BYTES, message->data, size);
    return seed;
}
