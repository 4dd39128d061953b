/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor parallel on the chosen backend (chosen_backend.h): sums between threads, a model in parts against the whole
 * one, what cannot be cut, and ranks that fail. Policies on ranks: test_beside_cpu.c and the other tests of suite
 * ranks; sums between devices: tests/cuda/test_ranks.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine_internal.h"
#include "engine/kv_internal.h"
#include "engine/random.h"
#include "parallel/internal.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/pruning.h"
#include "tests/unit/serving.h"

enum { PATIENCE = 240 }; /* seconds until a test that hangs is ended */

/* ---- sums ---- */

enum { MOST = 40000, ROUNDS = 12 };

struct sums {
    struct communicator *communicator;
    float *parts[BACKEND_RANKS_MAX]; /* [MOST] */
    float *gathered;
    size_t count;
    uint32_t failing; /* rank that fails; BACKEND_RANKS_MAX: none */
    int codes[BACKEND_RANKS_MAX];
};

static float number(uint32_t round, uint32_t rank, size_t i) {
    return (float)random_uniform(round, rank, (uint32_t)i, 0) * 1000 - 500;
}

static void add_up(void *context, uint32_t rank) {
    struct sums *sums = context;
    struct communicator *communicator = sums->communicator;
    if (rank == sums->failing) {
        const struct error error = {.code = ERROR_DEVICE, .message = "rank is gone"};
        communicator_give_up(communicator, &error);
        sums->codes[rank] = ERROR_DEVICE;
        return;
    }
    const struct communicator_sum sum = {.x = sums->parts[rank], .rows = 1, .width = (uint32_t)sums->count};
    sums->codes[rank] = communicator->operations->all_reduce(communicator, rank, &sum);
}

static void sums_are_in_the_order_of_ranks(void **state) {
    static const size_t counts[] = {1, 7, 576, 16384, 16385, MOST};
    (void)state;
    alarm(PATIENCE);
    for (uint32_t ranks = 1; ranks <= 4; ranks++) {
        struct error error = {0};
        struct crew *crew = crew_create(ranks, &error);
        struct sums sums = {.communicator = communicator_host_create(ranks, &error), .failing = BACKEND_RANKS_MAX};
        for (uint32_t rank = 0; rank < ranks; rank++)
            sums.parts[rank] = malloc(MOST * sizeof(float));
        for (uint32_t round = 0; round < ROUNDS; round++) {
            sums.count = counts[round % (sizeof counts / sizeof counts[0])];
            for (uint32_t rank = 0; rank < ranks; rank++)
                for (size_t i = 0; i < sums.count; i++)
                    sums.parts[rank][i] = number(round, rank, i);
            crew_run(crew, add_up, &sums);
            for (size_t i = 0; i < sums.count; i++) {
                float expected = number(round, 0, i);
                for (uint32_t rank = 1; rank < ranks; rank++)
                    expected += number(round, rank, i);
                for (uint32_t rank = 0; rank < ranks; rank++)
                    assert_true(sums.parts[rank][i] == expected);
            }
        }
        for (uint32_t rank = 0; rank < ranks; rank++) {
            assert_int_equal(sums.codes[rank], 0);
            free(sums.parts[rank]);
        }
        sums.communicator->operations->free(sums.communicator);
        crew_free(crew);
    }
}

/* Whoever waits for a rank that fails, or comes later, gets its error. */
static void nobody_waits_for_a_rank_that_failed(void **state) {
    (void)state;
    alarm(PATIENCE);
    for (uint32_t failing = 0; failing < 4; failing++) {
        struct error error = {0};
        struct crew *crew = crew_create(4, &error);
        struct sums sums = {.communicator = communicator_host_create(4, &error), .count = MOST, .failing = failing};
        for (uint32_t rank = 0; rank < 4; rank++)
            sums.parts[rank] = calloc(MOST, sizeof(float));
        for (uint32_t round = 0; round < 3; round++) {
            crew_run(crew, add_up, &sums);
            for (uint32_t rank = 0; rank < 4; rank++)
                assert_int_equal(sums.codes[rank], ERROR_DEVICE);
        }
        assert_int_equal(communicator_check(sums.communicator, &error), ERROR_DEVICE);
        assert_string_equal(error.message, "rank is gone");
        for (uint32_t rank = 0; rank < 4; rank++)
            free(sums.parts[rank]);
        sums.communicator->operations->free(sums.communicator);
        crew_free(crew);
    }
}

/* ---- a model in parts ---- */

static struct tiny_llama shape_of(uint32_t ranks, enum tensor_type type, bool tied) {
    struct tiny_llama shape = tiny_llama_for_ranks(ranks, type);
    shape.tied = tied;
    return shape;
}

static struct engine *open_ranks(const struct model *model, uint32_t ranks, bool exact) {
    return pruning_engine(model, &(struct engine_options){.kv_format = KV_F32,
                                     .exact = exact,
                                     .prefix_sharing = true,
                                     .backend = {.cpu_features = "auto",
                                         .threads = 1,
                                         .name = chosen_backend(),
                                         .ranks = ranks,
                                         .all_reduce = chosen_backend_all_reduce()}});
}

/* Rounded activations may fall to the other side where sums differ in their last bits: that moves a logit by a part of
 * a step of int8, of which there are 127. */
static void compare_logits(const struct stream *got, const struct stream *want, bool exact) {
    uint32_t vocabulary = engine_model(got->engine)->shape.vocabulary;
    double difference = 0, size = 0;
    for (size_t i = 0; i < (size_t)(got->total - got->prompt + 1) * vocabulary; i++) {
        difference += pow((double)got->logits[i] - (double)want->logits[i], 2);
        size += pow((double)want->logits[i], 2);
        assert_true(isfinite(got->logits[i]));
    }
    assert_true(size > 0);
    if (!(sqrt(difference / size) < (exact ? 1e-5 : 1e-2)))
        fail_msg("logits differ by %g of their size", sqrt(difference / size));
}

/* Emulated devices take long: each way in which they add up has half of the cases. */
static size_t first_of_share(void) {
    const char *all_reduce = chosen_backend_all_reduce();
    return all_reduce != NULL && strcmp(all_reduce, "host") == 0 ? 1 : 0;
}

static void parts_give_what_the_whole_does(void **state) {
    static const struct {
        enum tensor_type type;
        uint32_t ranks;
        bool tied, exact;
    } cases[] = {{TENSOR_F32, 2, true, false}, {TENSOR_F32, 3, false, false}, {TENSOR_F16, 4, true, false},
        {TENSOR_Q4_1, 2, false, false}, {TENSOR_Q4_0, 4, true, false}, {TENSOR_Q8_0, 2, true, true},
        {TENSOR_BF16, 2, true, true}};
    (void)state;
    alarm(PATIENCE);
    for (size_t i = first_of_share(); i < sizeof cases / sizeof cases[0]; i += chosen_backend_share(1, 2)) {
        if (cases[i].ranks > chosen_backend_devices())
            continue;
        struct tiny_llama shape = shape_of(cases[i].ranks, cases[i].type, cases[i].tied);
        struct model *model = pruning_model(&shape);
        struct engine *whole = open_ranks(model, 1, cases[i].exact);
        struct engine *parts = open_ranks(model, cases[i].ranks, cases[i].exact);
        struct stream *want = stream_create(whole, NULL, 3, 50, 60), *got = stream_create(parts, NULL, 3, 50, 60);
        stream_run(want);
        streams_run(&got, 1, 17);
        compare_logits(got, want, cases[i].exact || cases[i].type == TENSOR_F32);
        assert_int_equal(engine_weight_bytes(parts) >= engine_weight_bytes(whole), true); /* strips may be fuller */
        stream_free(want);
        stream_free(got);
        pruning_engine_close(whole);
        pruning_engine_close(parts);
        model_free(model);
    }
}

/* The same request gives the same bits, alone or with others, whatever its chunks. */
static void results_do_not_depend_on_the_batch(void **state) {
    struct tiny_llama shape = shape_of(2, TENSOR_Q4_1, true);
    struct model *model = pruning_model(&shape);
    struct engine *engine = open_ranks(model, 2, false);
    struct stream *alone = stream_create(engine, "h2o,tokens=24", 1, 60, 80), *others[3];
    (void)state;
    alarm(PATIENCE);
    stream_run(alone);
    others[0] = stream_create(engine, "snapkv,tokens=24,window=8", 2, 70, 90);
    others[1] = stream_create(engine, "h2o,tokens=24", 1, 60, 80);
    others[2] = stream_create(engine, "knorm,tokens=24,scope=model", 3, 50, 75);
    streams_run(others, 3, 13);
    streams_require_same(alone, others[1], 0, "h2o among others");
    stream_free(alone);
    for (uint32_t i = 0; i < 3; i++)
        stream_free(others[i]);
    pruning_engine_close(engine);
    model_free(model);
}

/* ---- pages ---- */

/* Heads of one rank may keep more than those of the other: what is free is what the fuller one has left, times two. */
static void the_fullest_rank_counts(void **state) {
    struct tiny_llama shape = shape_of(2, TENSOR_F32, true);
    struct model *model = pruning_model(&shape);
    struct engine *engine = open_ranks(model, 2, true);
    struct kv_cache *cache = engine_kv_cache(engine);
    struct error error = {0};
    struct sequence *sequence = sequence_create(engine);
    int32_t tokens[96];
    uint32_t first[16];
    (void)state;
    for (uint32_t i = 0; i < 96; i++)
        tokens[i] = pruning_token(model, 1, i);
    struct batch_item item = {.sequence = sequence, .tokens = tokens, .count = 96, .want = WANT_NONE};
    uint32_t total = kv_cache_pages_total(cache);
    assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
    assert_int_equal(kv_cache_pages_free(cache), total - 4 * 6);
    for (uint32_t i = 0; i < 16; i++)
        first[i] = i;
    for (uint32_t layer = 0; layer < 2; layer++) /* rank 0's heads keep a page each, rank 1's all of theirs */
        assert_int_equal(sequence_keep(sequence, layer, 0, first, 16, &error), 0);
    assert_true(kv_cache_check(cache));
    assert_int_equal(kv_sequence_pages_held(sequence_kv(sequence)), 2 * 6 + 2);
    assert_int_equal(kv_cache_pages_free(cache), total - 4 * 6);
    assert_int_equal(kv_sequence_pages_saved(sequence_kv(sequence)), 2 * 6 + 2);
    assert_int_equal(kv_sequence_pages_to_restore(sequence_kv(sequence)), 4 * 6);
    assert_int_equal(sequence_keep(sequence, 0, 1, first, 16, &error), 0);
    assert_int_equal(kv_cache_pages_free(cache), total - 2 * (6 + 1));
    assert_int_equal(sequence_swap_out(sequence, &error), 0);
    assert_int_equal(kv_cache_pages_free(cache), total);
    assert_int_equal(sequence_swap_in(sequence, &error), 0);
    assert_int_equal(kv_cache_pages_free(cache), total - 2 * (6 + 1));
    assert_true(kv_cache_check(cache));
    sequence_free(sequence);
    pruning_engine_close(engine);
    model_free(model);
}

/* ---- what cannot be cut ---- */

static void require_refusal(const struct tiny_llama *shape, uint32_t ranks, const char *name, const char *word) {
    struct model *model = pruning_model(shape);
    struct engine_options options = {
        .kv_bytes = 1 << 20, .backend = {.cpu_features = "auto", .threads = 1, .ranks = ranks, .name = name}};
    struct error error = {0};
    assert_null(engine_open(model, &options, &error));
    if (strstr(error.message, word) == NULL)
        fail_msg("'%s' does not say '%s'", error.message, word);
    model_free(model);
}

static void what_does_not_divide_is_refused(void **state) {
    struct tiny_llama shape = shape_of(2, TENSOR_Q4_1, true);
    (void)state;
    require_refusal(&shape, 3, "cpu", "2 KV heads cannot be shared out evenly over 3");
    require_refusal(&shape, 4, "cpu", "KV heads");
    require_refusal(&shape, BACKEND_RANKS_MAX + 1, "cpu", "1 to 8");
    require_refusal(&shape, 2, "gpu", "'gpu' is unknown");
    shape.ff_width = 96; /* 48 columns are one block and a half */
    require_refusal(&shape, 2, "cpu", "ffn_down");
    shape.ff_width = 64;
    shape.head_dim = 24; /* so are 48 of W_o */
    shape.width = 96;
    require_refusal(&shape, 2, "cpu", "attn_output");
    shape = shape_of(2, TENSOR_F32, true);
    shape.ff_width = 63;
    require_refusal(&shape, 2, "cpu", "feed-forward");
}

static void policies_that_need_all_heads_are_refused(void **state) {
    static const char *const policies[] = {"laprox,tokens=24", "laprox_head,tokens=24"};
    struct tiny_llama shape = shape_of(2, TENSOR_F32, true);
    struct model *model = pruning_model(&shape);
    struct engine *engine = open_ranks(model, 2, true);
    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        struct policy_settings settings = pruning_settings(policies[i]);
        struct sequence *sequence = sequence_create(engine);
        struct error error = {0};
        assert_int_equal(sequence_set_policy(sequence, &settings, 10, &error), ERROR_UNSUPPORTED);
        assert_non_null(strstr(error.message, settings.policy->name));
        policy_settings_release(&settings);
        sequence_free(sequence);
    }
    pruning_engine_close(engine);
    model_free(model);
}

/* ---- faults ---- */

/* The host's communicator, of which one rank fails in its n-th operation from now on. */
static const struct communicator_operations *plain;
static uint32_t faulty_rank;
static _Atomic uint32_t operations_left, operations_seen;

static int fault(struct communicator *communicator, uint32_t rank) {
    if (rank != faulty_rank)
        return 0;
    atomic_fetch_add(&operations_seen, 1);
    if (atomic_fetch_sub(&operations_left, 1) != 1)
        return 0;
    const struct error error = {.code = ERROR_DEVICE, .message = "device 1 fell off the bus"};
    communicator_give_up(communicator, &error);
    return ERROR_DEVICE;
}

static int faulty_all_reduce(struct communicator *communicator, uint32_t rank, const struct communicator_sum *sum) {
    int code = fault(communicator, rank);
    return code != 0 ? code : plain->all_reduce(communicator, rank, sum);
}

static int faulty_gather(struct communicator *communicator, uint32_t rank, const struct communicator_part *part) {
    int code = fault(communicator, rank);
    return code != 0 ? code : plain->gather(communicator, rank, part);
}

static void make_faulty(struct engine *engine, uint32_t rank, uint32_t after) {
    static struct communicator_operations faulty;
    struct communicator *communicator = parallel_of(engine->backend)->communicator;
    plain = communicator->operations;
    faulty = *plain;
    faulty.all_reduce = faulty_all_reduce;
    faulty.gather = faulty_gather;
    communicator->operations = &faulty;
    faulty_rank = rank;
    atomic_store(&operations_left, after);
    atomic_store(&operations_seen, 0);
}

/* A prompt, a prune, a decode step and two samples; the first error. */
static int run_sequence(struct engine *engine, struct error *error) {
    struct sequence *sequence = sequence_create(engine);
    struct policy_settings settings = pruning_settings("adakv,tokens=24,window=8");
    const struct sample_params params = {.temperature = 0, .top_p = 1, .forced = -1};
    struct sample_result result;
    int32_t tokens[40];
    uint32_t row = 0;
    for (uint32_t i = 0; i < 40; i++)
        tokens[i] = pruning_token(engine_model(engine), 1, i);
    int code = sequence_set_policy(sequence, &settings, 40, error);
    for (uint32_t step = 0; step < 2 && code == 0; step++) {
        struct batch_item item = {
            .sequence = sequence, .tokens = tokens, .count = step == 0 ? 40 : 1, .want = WANT_LAST};
        code = engine_forward(engine, &item, 1, error);
        if (code == 0)
            code = engine_prune(engine, &sequence, 1, error);
        if (code == 0)
            code = engine_sample(engine, &row, &params, 1, &result, error);
    }
    policy_settings_release(&settings);
    sequence_free(sequence);
    return code;
}

static void a_fault_anywhere_ends_in_an_error(void **state) {
    struct tiny_llama shape = shape_of(2, TENSOR_F32, true);
    struct model *model = pruning_model(&shape);
    struct engine *engine = open_ranks(model, 2, true);
    struct error error = {0};
    (void)state;
    alarm(PATIENCE);
    make_faulty(engine, 1, UINT32_MAX);
    assert_int_equal(run_sequence(engine, &error), 0);
    uint32_t all = atomic_load(&operations_seen);
    assert_int_equal(all, 2 * (1 + 2 * 2 + 1)); /* embed, two sums a layer, logits */
    assert_int_equal(engine_check(engine, &error), 0);
    pruning_engine_close(engine);
    for (uint32_t at = 1; at <= all; at += chosen_backend_share(1, 6))
        for (uint32_t rank = 0; rank < 2; rank++) {
            engine = open_ranks(model, 2, true);
            make_faulty(engine, rank, at);
            for (uint32_t again = 0; again < 2; again++) { /* nor does it ever work again */
                error = (struct error){0};
                assert_int_equal(run_sequence(engine, &error), ERROR_DEVICE);
                assert_string_equal(error.message, "device 1 fell off the bus");
            }
            assert_int_equal(engine_check(engine, &error), ERROR_DEVICE);
            pruning_engine_close(engine);
        }
    model_free(model);
}

static void requests_end_with_the_error(void **state) {
    (void)state;
    alarm(PATIENCE);
    setenv("DISTILLCACHE_TEST_RANKS", "2", 1);
    struct serving *serving =
        serving_create(&(struct serving_options){.max_sequences = 3, .kv_policy = "h2o,tokens=40"});
    unsetenv("DISTILLCACHE_TEST_RANKS");
    struct call *calls[6];
    struct error error = {0};
    make_faulty(serving_engine(serving), 1, 40); /* in some decode step */
    for (uint32_t i = 0; i < 6; i++) {
        calls[i] = serving_submit(serving, serving_request(50 + i, i, 60), &error);
        assert_non_null(calls[i]);
    }
    serving_wait_all(serving);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(calls[i]->answers[0].finish, FINISH_ERROR);
        assert_string_equal(calls[i]->answers[0].error.message, "device 1 fell off the bus");
    }
    serving_free(serving); /* sees that all pages are free */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_in_the_order_of_ranks),
        cmocka_unit_test(nobody_waits_for_a_rank_that_failed),
        cmocka_unit_test(parts_give_what_the_whole_does),
        cmocka_unit_test(results_do_not_depend_on_the_batch),
        cmocka_unit_test(the_fullest_rank_counts),
        cmocka_unit_test(what_does_not_divide_is_refused),
        cmocka_unit_test(policies_that_need_all_heads_are_refused),
        cmocka_unit_test(a_fault_anywhere_ends_in_an_error),
        cmocka_unit_test(requests_end_with_the_error),
    };
    return cmocka_run_group_tests_name("parallel", tests, NULL, NULL);
}
