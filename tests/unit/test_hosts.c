/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor parallel over processes (parallel/hosts.h), with workers that are threads: bit for bit what ranks of one
 * process give; who is let in at the rendezvous; a worker that is lost.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/engine_internal.h"
#include "parallel/internal.h"
#include "parallel/messages.h"
#include "parallel/remote.h"
#include "parallel/worker.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/hosts_worker.h"
#include "tests/unit/pruning.h"
#include "tests/unit/tiny_network.h"

enum { PATIENCE = 240, WORLD_MAX = 4 };

/* ---- a leader with its workers ---- */

struct hosts {
    char address[HOSTS_ADDRESS];
    uint32_t world;
    struct hosts_worker workers[WORLD_MAX];
    struct engine *engine;
};

static struct engine *open_leader(
    const struct model *model, const char *address, uint32_t world, const struct engine_options *like) {
    struct engine_options options = *like;
    options.backend = (struct backend_options){.cpu_features = "auto",
        .threads = 1,
        .name = chosen_backend(),
        .hosts = {.world = world, .rendezvous = address, .key = "of the test", .version = "1"}};
    return pruning_engine(model, &options);
}

static struct hosts *open_hosts(const struct model *model, uint32_t world, const struct engine_options *like) {
    struct hosts *hosts = calloc(1, sizeof *hosts);
    hosts_address(hosts->address);
    hosts->world = world;
    for (uint32_t rank = 1; rank < world; rank++) {
        const struct rendezvous options = hosts_options(hosts->address, rank);
        hosts_worker_start(&hosts->workers[rank], model, &options);
    }
    hosts->engine = open_leader(model, hosts->address, world, like);
    return hosts;
}

static void close_hosts(struct hosts *hosts) {
    pruning_engine_close(hosts->engine);
    for (uint32_t rank = 1; rank < hosts->world; rank++)
        if (hosts_worker_join(&hosts->workers[rank]) != 0)
            fail_msg("worker %u: %s", rank, hosts->workers[rank].error.message);
    free(hosts);
}

static struct engine *open_threads(const struct model *model, uint32_t ranks, const struct engine_options *like) {
    struct engine_options options = *like;
    options.backend = (struct backend_options){
        .cpu_features = "auto", .threads = 1, .name = chosen_backend(), .ranks = ranks, .all_reduce = "host"};
    return pruning_engine(model, &options);
}

/* ---- the same bits ---- */

static bool works(const char *policy) {
    return strncmp(policy, "laprox", strlen("laprox")) != 0;
}

static const char *const more_policies[] = {
    "distillcache,tokens=24,interval=1",
    "distillcache,ratio=0.3,minimum=16,prefill_prune_every=32,interval=3",
    "ranker,tokens=24,interval=2",
    "hybrid,base=distillcache,ratio=0.5,minimum=8",
};
enum { MORE = sizeof more_policies / sizeof more_policies[0], STREAMS = PRUNING_POLICIES + MORE };

static uint32_t run_policies(struct engine *engine, struct stream **streams) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < STREAMS; i += chosen_backend_share(1, 3)) {
        const char *policy = i < PRUNING_POLICIES ? pruning_policies[i] : more_policies[i - PRUNING_POLICIES];
        if (works(policy))
            streams[count++] = stream_create(engine, policy, i, 60, 76);
    }
    streams_run(streams, count, 23);
    return count;
}

static void every_policy_gives_the_same_bits(void **state) {
    struct tiny_llama shape = tiny_llama_for_ranks(2, TENSOR_Q4_1);
    struct model *model = pruning_model(&shape);
    const struct engine_options options = {.kv_format = KV_F16, .prefix_sharing = true};
    struct engine *threads = open_threads(model, 2, &options);
    struct stream *got[STREAMS], *want[STREAMS];
    char folder[64];
    (void)state;
    alarm(PATIENCE);
    tiny_folder_create(folder);
    pruning_ship_networks(threads, folder);
    struct hosts *hosts = open_hosts(model, 2, &options);
    uint32_t count = run_policies(threads, want);
    assert_int_equal(run_policies(hosts->engine, got), count);
    for (uint32_t i = 0; i < count; i++) {
        streams_require_same(got[i], want[i], 0, sequence_policy(want[i]->sequence)->policy->name);
        stream_free(got[i]);
        stream_free(want[i]);
    }
    assert_int_equal(engine_weight_bytes(hosts->engine), engine_weight_bytes(threads));
    close_hosts(hosts);
    pruning_engine_close(threads);
    unsetenv("DISTILLCACHE_POLICIES");
    tiny_folder_remove(folder);
    model_free(model);
}

/* A sequence that goes out and comes back, and one that is forked, with statistics. */
static void run_life(struct engine *engine, struct stream **first, struct stream **fork) {
    struct error error = {0};
    *first = stream_create(engine, "snapkv,tokens=24,window=8,summary=1", 5, 50, 70);
    while ((*first)->done < 55)
        streams_step(first, 1, 19);
    assert_int_equal(sequence_swap_out((*first)->sequence, &error), 0);
    assert_int_equal(sequence_swap_in((*first)->sequence, &error), 0);
    *fork = stream_fork(*first);
    stream_run(*first);
    stream_run(*fork);
}

static void sequences_live_as_in_one_process(void **state) {
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_Q8_0};
    (void)state;
    alarm(PATIENCE);
    for (uint32_t i = 0; i < 2; i++) {
        struct tiny_llama shape = tiny_llama_for_ranks(3, types[i]);
        struct model *model = pruning_model(&shape);
        const struct engine_options options = {.kv_format = i == 0 ? KV_F32 : KV_BF16, .exact = i == 0};
        struct engine *threads = open_threads(model, 3, &options);
        struct hosts *hosts = open_hosts(model, 3, &options);
        struct stream *want[2], *got[2];
        run_life(threads, &want[0], &want[1]);
        run_life(hosts->engine, &got[0], &got[1]);
        for (uint32_t k = 0; k < 2; k++) {
            streams_require_same(got[k], want[k], 0, "life");
            stream_free(got[k]);
            stream_free(want[k]);
        }
        close_hosts(hosts);
        pruning_engine_close(threads);
        model_free(model);
    }
}

/* ---- who is let in ---- */

/* A connection to the leader, as soon as it listens. */
static int connect_to(const char *address) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    to.sin_port = htons((uint16_t)strtoul(strrchr(address, ':') + 1, NULL, 10));
    for (;;) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0)
            return fd;
        close(fd);
        usleep(20 * 1000);
    }
}

/* Strangers of all kinds: some say nothing, some go at once, some talk nonsense. Then workers that do not fit, one
 * after the other, and at last the right one. */
struct visit {
    const char *address;
    const struct model *model, *other;
    char messages[6][512];
    int codes[6];
    int silent;
};

static void send_wrong(struct visit *visit, uint32_t which, const struct rendezvous *options) {
    struct hosts_worker worker;
    hosts_worker_start(&worker, which == 2 ? visit->other : visit->model, options);
    visit->codes[which] = hosts_worker_join(&worker);
    snprintf(visit->messages[which], sizeof visit->messages[which], "%s", worker.error.message);
}

static void *visit_leader(void *argument) {
    struct visit *visit = argument;
    char noise[4096];
    memset(noise, 0xa5, sizeof noise);
    visit->silent = connect_to(visit->address);
    close(connect_to(visit->address));
    for (uint32_t i = 0; i < 40; i++) { /* more than wait at once */
        int fd = connect_to(visit->address);
        if (send(fd, noise, i * 7 + 1, MSG_NOSIGNAL) < 0)
            assert_true(i > 0);
        close(fd);
    }
    struct rendezvous options = hosts_options(visit->address, 1);
    options.key = "another";
    send_wrong(visit, 0, &options);
    options = hosts_options(visit->address, 1);
    options.version = "2";
    send_wrong(visit, 1, &options);
    options = hosts_options(visit->address, 1);
    send_wrong(visit, 2, &options);
    options = hosts_options(visit->address, 3);
    send_wrong(visit, 3, &options);
    options = hosts_options(visit->address, 1);
    options.world = 2;
    send_wrong(visit, 4, &options);
    struct hosts_worker first;
    options = hosts_options(visit->address, 1);
    hosts_worker_start(&first, visit->model, &options);
    usleep(300 * 1000);
    send_wrong(visit, 5, &options);
    options = hosts_options(visit->address, 2);
    struct hosts_worker second;
    hosts_worker_start(&second, visit->model, &options);
    assert_int_equal(hosts_worker_join(&first), 0);
    assert_int_equal(hosts_worker_join(&second), 0);
    close(visit->silent);
    return NULL;
}

static void the_rendezvous_lets_in_who_fits(void **state) {
    static const char *const words[] = {"another rendezvous-key", "version", "its model is another", "rank 3 of 3",
        "world of 3 ranks", "rank 1 is taken"};
    struct tiny_llama shape = tiny_llama_for_ranks(3, TENSOR_F32), another = shape;
    char address[HOSTS_ADDRESS];
    pthread_t visitor;
    (void)state;
    alarm(PATIENCE);
    another.ff_width *= 2;
    struct visit visit = {.address = address, .model = pruning_model(&shape), .other = pruning_model(&another)};
    hosts_address(address);
    assert_int_equal(pthread_create(&visitor, NULL, visit_leader, &visit), 0);
    struct engine *engine = open_leader(visit.model, address, 3, &(struct engine_options){.kv_format = KV_F32});
    struct stream *stream = stream_create(engine, NULL, 1, 20, 24);
    stream_run(stream);
    stream_free(stream);
    pruning_engine_close(engine);
    pthread_join(visitor, NULL);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(visit.codes[i], ERROR_UNSUPPORTED);
        if (strstr(visit.messages[i], words[i]) == NULL)
            fail_msg("'%s' does not say '%s'", visit.messages[i], words[i]);
    }
    model_free((struct model *)visit.model);
    model_free((struct model *)visit.other);
}

static void nobody_waits_for_ever(void **state) {
    const struct backend_options plain = {.cpu_features = "auto", .threads = 1};
    char address[HOSTS_ADDRESS];
    struct error error = {0};
    struct link link;
    uint32_t world;
    (void)state;
    alarm(PATIENCE);
    hosts_address(address);
    struct rendezvous options = hosts_options(address, 1);
    options.patience = 0.3;
    options.fingerprint = "f";
    options.backend = "cpu";
    assert_int_equal(rendezvous_join(&options, &link, &world, &error), ERROR_IO);
    assert_non_null(strstr(error.message, "no leader at"));
    options.world = 2;
    assert_null(hosts_lead(backend_cpu_open(&plain, &error), &options, &error));
    assert_int_equal(error.code, ERROR_IO);
    assert_non_null(strstr(error.message, "rank 1 of 2 did not come"));
    static const char *const wrong[] = {"", "host", "host:", ":1", "host:0", "host:70000", "::1:80", "[::1]", "h:1x"};
    for (uint32_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        options.address = wrong[i];
        assert_int_equal(rendezvous_join(&options, &link, &world, &error), ERROR_INVALID);
    }
    char host[RENDEZVOUS_HOST_MAX], port[RENDEZVOUS_PORT_MAX];
    assert_int_equal(rendezvous_parse("[::1]:80", host, port, &error), 0);
    assert_string_equal(host, "::1");
    assert_string_equal(port, "80");
}

/* ---- a worker is lost ---- */

static void a_lost_worker_ends_in_an_error(void **state) {
    struct tiny_llama shape = tiny_llama_for_ranks(2, TENSOR_F32);
    struct model *model = pruning_model(&shape);
    (void)state;
    alarm(PATIENCE);
    for (uint32_t idle = 0; idle < 2; idle++) {
        struct hosts *hosts = open_hosts(model, 2, &(struct engine_options){.kv_format = KV_F32});
        struct sequence *sequence = sequence_create(hosts->engine);
        struct error error = {0};
        int32_t tokens[30];
        for (uint32_t i = 0; i < 30; i++)
            tokens[i] = pruning_token(model, 1, i);
        struct batch_item item = {.sequence = sequence, .tokens = tokens, .count = 30, .want = WANT_LAST};
        assert_int_equal(engine_forward(hosts->engine, &item, 1, &error), 0);
        remote_stop(parallel_of(hosts->engine->backend)->inner[1]); /* the connection is cut */
        if (idle == 1)
            assert_int_equal(engine_check(hosts->engine, &error), ERROR_DEVICE);
        item.count = 1;
        for (uint32_t again = 0; again < 2; again++) {
            error = (struct error){0};
            assert_int_equal(engine_forward(hosts->engine, &item, 1, &error), ERROR_DEVICE);
            assert_non_null(strstr(error.message, "rank 1 is lost"));
        }
        sequence_free(sequence);
        engine_close(hosts->engine);
        assert_int_equal(hosts_worker_join(&hosts->workers[1]), ERROR_IO);
        free(hosts);
    }
    model_free(model);
}

/* ---- a leader that asks for what is not its own ---- */

/* A leader's end and a worker, joined by a pair of sockets. */
struct pair {
    struct model *model;
    struct backend *inner[2], *own; /* own: the worker's */
    struct worker *worker;
    struct link link;
    struct communicator *communicator;
    pthread_t thread;
    int code;
    float *memory; /* far [64] */
    char *pages;   /* far, 4 of them */
    struct kv_pool pool;
};

enum { FLOATS = 64, PAGES = 4 };

static void *work(void *argument) {
    struct pair *pair = argument;
    pair->code = worker_run(pair->worker, &pair->link, NULL);
    link_close(&pair->link);
    return NULL;
}

static void open_pair(struct pair *pair, struct model *model) {
    const struct backend_options options = {.cpu_features = "auto", .threads = 1};
    const struct model_shape *shape = &model->shape;
    struct link link;
    int sockets[2];
    *pair = (struct pair){.model = model};
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(link_prepare(sockets[i], COMMUNICATOR_PATIENCE, NULL), 0);
    link_init(&link, sockets[0], COMMUNICATOR_PATIENCE);
    link_init(&pair->link, sockets[1], COMMUNICATOR_PATIENCE);
    pair->own = backend_cpu_open(&options, NULL);
    pair->worker = worker_create(model, pair->own, 1, 2, 1 << 20, NULL);
    pair->inner[0] = backend_cpu_open(&options, NULL);
    pair->inner[1] = remote_open(&link, 1, NULL);
    pair->communicator = communicator_far_create(pair->inner, 2, NULL);
    remote_set_communicator(pair->inner[1], pair->communicator);
    assert_int_equal(pthread_create(&pair->thread, NULL, work, pair), 0);
    pair->pool = (struct kv_pool){.layout = {.layers = shape->layers,
                                      .kv_heads = 1,
                                      .head_dim = shape->head_dim,
                                      .format = KV_F32,
                                      .first_head = 1,
                                      .model_heads = 2}};
    pair->pool.page_bytes = kv_page_bytes(&pair->pool.layout);
    pair->memory = pair->inner[1]->operations->allocate(pair->inner[1], FLOATS * sizeof(float));
    pair->pages = pair->inner[1]->operations->allocate(pair->inner[1], PAGES * pair->pool.page_bytes);
    assert_non_null(pair->memory);
    assert_non_null(pair->pages);
    pair->pool.base = pair->pages;
}

/* The worker's code. */
static int close_pair(struct pair *pair) {
    for (int i = 0; i < 2; i++)
        pair->inner[i]->operations->close(pair->inner[i]);
    pthread_join(pair->thread, NULL);
    worker_free(pair->worker);
    pair->own->operations->close(pair->own);
    pair->communicator->operations->free(pair->communicator);
    return pair->code;
}

enum reach {
    NOTHING_WRONG,
    DOWNLOAD_PAST_THE_END,
    UPLOAD_BEFORE_THE_START,
    UPLOAD_TO_THIS_PROCESS,
    NORM_TOO_MANY_ROWS,
    GATHER_A_FAR_ROW,
    LINEAR_BEYOND_OUT,
    UNKNOWN_TENSOR,
    TENSOR_PAST_ITS_ROWS,
    RELEASE_TWICE,
    A_PAGE_TOO_MANY,
    A_PAGE_BEFORE_THE_FIRST,
    ANOTHER_LAYOUT,
    ROPE_BEYOND_THE_ROWS,
    ROPE_BEYOND_THE_SLOTS,
    STATISTICS_PAST_THE_CAPACITY,
    STATISTICS_OF_FEWER_NUMBERS,
    SUMMARY_OF_NO_SLOT,
    ORDER_OF_NO_SLOT,
    TOO_MANY_STAGES,
    REACHES,
};

static void reach_for_rows(struct pair *pair, enum reach reach) {
    struct backend *far = pair->inner[1];
    const struct backend_operations *o = far->operations;
    const uint32_t rows[] = {0, reach == GATHER_A_FAR_ROW ? 8 : 7};
    float floats[FLOATS] = {0};
    o->upload(far, pair->memory, floats, sizeof floats);
    if (reach == UPLOAD_BEFORE_THE_START)
        o->upload(far, (char *)pair->memory - 4, floats, 8);
    if (reach == UPLOAD_TO_THIS_PROCESS)
        o->upload(far, floats, floats, 8);
    o->download(far, floats, pair->memory + 1, (FLOATS - 1 + (reach == DOWNLOAD_PAST_THE_END)) * sizeof *floats);
    o->rms_norm(far, pair->memory, pair->memory, 1e-5f, reach == NORM_TOO_MANY_ROWS ? 9 : 8, 8, pair->memory);
    o->gather_rows(far, pair->memory, rows, 2, 8, pair->memory);
}

static void reach_for_matrices(struct pair *pair, enum reach reach) {
    struct backend *far = pair->inner[1];
    const struct backend_operations *o = far->operations;
    struct tensor tensor = tensor_cut_rows(&pair->model->layers[0].attn_k, 0, 32);
    float *x = o->allocate(far, tensor.columns * sizeof *x);
    if (reach == UNKNOWN_TENSOR)
        tensor.name = "blk.9.attn_k.weight";
    tensor.first_row = reach == TENSOR_PAST_ITS_ROWS ? 33 : 0;
    struct backend_weight *weight = o->weight_create(far, &tensor, true, NULL);
    if (weight == NULL || x == NULL)
        return;
    const struct backend_weight *weights[] = {weight};
    o->linear(far, weights, 1, x, 1, false, pair->memory + (reach == LINEAR_BEYOND_OUT ? 33 : 32));
    o->weight_free(far, weight);
    o->release(far, x);
    if (reach == RELEASE_TWICE)
        o->release(far, x);
}

static void reach_for_pages(struct pair *pair, enum reach reach) {
    struct backend *far = pair->inner[1];
    const struct backend_operations *o = far->operations;
    struct kv_pool pool = pair->pool;
    uint32_t pages[] = {0, reach == A_PAGE_TOO_MANY ? PAGES : PAGES - 1}, heads = pair->model->shape.heads / 2;
    const uint32_t width = (heads + 2) * pool.layout.head_dim;
    float frequencies[64] = {0}, *qkv = o->allocate(far, 2 * width * sizeof *qkv);
    const struct rope_params rope = {.dim = pool.layout.head_dim, .inverse_freq = frequencies};
    const struct kv_item item = {.rows = reach == ROPE_BEYOND_THE_ROWS ? 3 : 2};
    const struct kv_head_view view = {
        .pages = pages, .slots = 20, .first_slot = reach == ROPE_BEYOND_THE_SLOTS ? 19 : 17};
    const struct kv_batch batch = {.pool = &pool, .items = &item, .items_count = 1, .views = &view};
    if (reach == A_PAGE_BEFORE_THE_FIRST)
        pool.base = (char *)pool.base - 1;
    pool.layout.head_dim += reach == ANOTHER_LAYOUT ? 2 : 0;
    o->rope_and_append(far, &batch, &rope, heads, qkv);
    o->clear_slots(far, &pool, pages, 3, 20);
}

static void reach_for_prunes(struct pair *pair, enum reach reach) {
    struct backend *far = pair->inner[1];
    const struct backend_operations *o = far->operations;
    const uint32_t group = pair->model->shape.heads / 2, pages[] = {2};
    uint32_t slots[16], positions[16], worst;
    for (uint32_t i = 0; i < 16; i++)
        slots[i] = positions[i] = i;
    uint32_t *sum = o->allocate(far, 2 * 16 * sizeof *sum);
    float *summary = o->allocate(far, SUMMARY_NUMBERS(32) * sizeof *summary);
    struct kv_statistics statistics = {.needs = STATISTIC_SUM, .capacity = 16, .sum = sum};
    slots[15] += reach == STATISTICS_PAST_THE_CAPACITY;
    const struct statistics_move move = {
        .from = &statistics, .to = &statistics, .from_slots = slots, .to_slots = slots, .count = 16};
    statistics.capacity = reach == STATISTICS_OF_FEWER_NUMBERS ? 32 : 16;
    o->move_statistics(far, &move, 1, group, 32);
    slots[15] = 15;
    const struct kv_head_view view = {.pages = pages, .slots = 16};
    slots[0] = reach == SUMMARY_OF_NO_SLOT ? 16 : 0;
    const struct summary_update update = {.view = view,
        .sum = sum,
        .capacity = 16,
        .positions = positions,
        .slots = slots,
        .count = 2,
        .seen = 20,
        .summary = summary};
    o->summarise(far, &pair->pool, &update, 1);
    slots[0] = reach == ORDER_OF_NO_SLOT ? 16 : 0;
    const struct score_head head = {.view = view,
        .statistics = statistics,
        .worst = &worst,
        .positions = positions,
        .order = slots,
        .order_count = 16};
    struct score_stage stages[SCORE_STAGES_MAX + 1] = {{.kind = STAGE_POSITION}};
    const struct score_layer layer = {.heads = &head,
        .seen = 20,
        .budget = 8,
        .stages = stages,
        .stages_count = reach == TOO_MANY_STAGES ? SCORE_STAGES_MAX + 1 : 1};
    o->score(far, &pair->pool, &layer, 1, group * 1, NULL);
}

static void a_leader_stays_within_its_memory(void **state) {
    struct tiny_llama shape = tiny_llama_for_ranks(2, TENSOR_F32);
    struct model *model = pruning_model(&shape);
    (void)state;
    alarm(PATIENCE);
    for (enum reach reach = NOTHING_WRONG; reach < REACHES; reach++) {
        struct pair pair;
        struct error error = {0};
        open_pair(&pair, model);
        reach_for_rows(&pair, reach);
        reach_for_matrices(&pair, reach);
        reach_for_pages(&pair, reach);
        reach_for_prunes(&pair, reach);
        pair.inner[1]->operations->synchronize(pair.inner[1]);
        int failed = communicator_check(pair.communicator, &error), code = close_pair(&pair);
        if (code != (reach == NOTHING_WRONG ? 0 : ERROR_FORMAT))
            fail_msg("the worker ends with %d where the leader does number %d", code, (int)reach);
        assert_int_equal(failed, reach == NOTHING_WRONG ? 0 : ERROR_DEVICE);
    }
    model_free(model);
}

/* A worker takes matrices from its own file, as they are there. */
static void other_forms_of_matrices_are_refused(void **state) {
    struct tiny_llama shape = tiny_llama_for_ranks(2, TENSOR_F16);
    struct model *model = pruning_model(&shape);
    struct model smaller = *model, ordered = *model;
    const struct model *const refused[] = {&smaller, &ordered};
    (void)state;
    alarm(PATIENCE);
    smaller.quantise = TENSOR_Q8_0;
    ordered.shape.rope_halves = true;
    for (uint32_t i = 0; i < 2; i++) {
        char address[HOSTS_ADDRESS];
        struct hosts_worker worker;
        struct error error = {0};
        hosts_address(address);
        const struct rendezvous joining = hosts_options(address, 1);
        hosts_worker_start(&worker, model, &joining);
        const struct engine_options options = {.kv_bytes = (size_t)1 << 20,
            .kv_format = KV_F16,
            .backend = {.cpu_features = "auto",
                .threads = 1,
                .name = chosen_backend(),
                .hosts = {.world = 2, .rendezvous = address, .key = "of the test", .version = "1"}}};
        assert_null(engine_open(refused[i], &options, &error));
        assert_int_equal(error.code, ERROR_UNSUPPORTED);
        assert_non_null(strstr(error.message, "another form than its file's"));
        hosts_worker_join(&worker);
    }
    model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(other_forms_of_matrices_are_refused),
        cmocka_unit_test(every_policy_gives_the_same_bits),
        cmocka_unit_test(sequences_live_as_in_one_process),
        cmocka_unit_test(the_rendezvous_lets_in_who_fits),
        cmocka_unit_test(nobody_waits_for_ever),
        cmocka_unit_test(a_lost_worker_ends_in_an_error),
        cmocka_unit_test(a_leader_stays_within_its_memory),
    };
    return cmocka_run_group_tests_name("hosts", tests, NULL, NULL);
}
