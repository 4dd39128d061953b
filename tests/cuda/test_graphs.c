/* SPDX-License-Identifier: Apache-2.0
 *
 * Decode steps of the CUDA backend as graphs, on the emulated device: a replayed step computes the bits of a step that
 * runs launch by launch, whoever joins and leaves and whatever is pruned between; and what a step asks of the runtime
 * is counted.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "emulator.h"
#include "tests/unit/pruning.h"

enum { STREAMS = 13, PROMPT = 9, ROUNDS = 400 };

/* What a stream is: its policy, when it joins, and how long it is. */
struct plan {
    const char *policy;
    uint32_t joins, prompt, total;
    bool forks; /* half of the way it is forked, and the fork goes on beside it */
};

/* How steps run. */
enum way { GRAPHS, LAUNCHES, ON_CPU };

/* Devices of the engines that are opened, and how they add up. */
static uint32_t ranks = 1;
static const char *all_reduce = "auto";

static struct engine *open_engine(const struct model *model, enum way way, enum kv_format format, uint32_t rows) {
    setenv("DISTILLCACHE_CUDA_GRAPHS", way == GRAPHS ? "on" : "off", 1);
    struct engine_options options = {.backend = {.cpu_features = "auto",
                                         .name = way == ON_CPU ? "cpu" : "cuda",
                                         .ranks = way == ON_CPU ? 1 : ranks,
                                         .all_reduce = all_reduce},
        .kv_format = format,
        .batch_rows = rows,
        .prefix_sharing = true};
    return pruning_engine(model, &options);
}

/* All streams of a plan, and their forks, step by step. */
struct play {
    struct engine *engine;
    struct stream *streams[2 * STREAMS];
    struct emulator_calls calls;
    uint32_t steps;
};

/* Streams that are in a round: those that joined, and are not done. */
static uint32_t present(
    struct play *play, const struct plan *plans, uint32_t count, uint32_t round, struct stream **in) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct plan *plan = &plans[i];
        if (round == plan->joins)
            play->streams[i] = stream_create(play->engine, plan->policy, i, plan->prompt, plan->total);
        struct stream *stream = play->streams[i];
        if (stream != NULL && plan->forks && play->streams[STREAMS + i] == NULL &&
            stream->done == (plan->prompt + plan->total) / 2) {
            play->streams[STREAMS + i] = stream_fork(stream);
            for (uint32_t t = stream->done; t < plan->total; t++)
                play->streams[STREAMS + i]->tokens[t] = pruning_token(engine_model(play->engine), STREAMS + i, t);
        }
        for (uint32_t half = 0; half < 2; half++) {
            stream = play->streams[half * STREAMS + i];
            if (stream != NULL && stream->done < stream->total)
                in[found++] = stream;
        }
    }
    return found;
}

/* Sequences go to host memory and back now and then. */
static void swap(struct stream *stream) {
    struct error error = {0};
    if (sequence_swap_out(stream->sequence, &error) != 0 || sequence_swap_in(stream->sequence, &error) != 0)
        fail_msg("%s", error.message);
}

static void play_run(struct play *play, const struct model *model, const struct plan *plans, uint32_t count,
    enum kv_format format, enum way way) {
    *play = (struct play){.engine = open_engine(model, way, format, 64)};
    emulator_calls_reset();
    bool left = true;
    for (uint32_t round = 0; left && round < ROUNDS; round++) {
        struct stream *in[2 * STREAMS];
        uint32_t found = present(play, plans, count, round, in);
        left = found > 0;
        for (uint32_t i = 0; i < count; i++)
            left |= plans[i].joins > round;
        if (found > 0 && round % 16 == 11)
            swap(in[round % found]);
        play->steps += found > 0 && streams_step(in, found, 64);
    }
    assert_false(left);
    play->calls = emulator_calls_read();
}

static void play_free(struct play *play) {
    for (uint32_t i = 0; i < 2 * STREAMS; i++)
        stream_free(play->streams[i]);
    assert_true(kv_cache_check(engine_kv_cache(play->engine)));
    engine_close(play->engine);
    assert_null(emulator_fault());
}

/* Logits of full caches are those of the CPU backend, but for the order of attention's sums. */
static void compare_cpu(const struct model *model, const struct plan *plans, uint32_t count, enum kv_format format,
    const struct play *cuda) {
    struct play cpu;
    play_run(&cpu, model, plans, count, format, ON_CPU);
    for (uint32_t i = 0; i < 2 * STREAMS; i++) {
        const struct stream *got = cuda->streams[i];
        if (got == NULL || plans[i % STREAMS].policy != NULL)
            continue;
        size_t numbers = (got->total - got->prompt + 1) * (size_t)model->shape.vocabulary;
        for (size_t k = 0; k < numbers; k++)
            assert_true(fabsf(got->logits[k] - cpu.streams[i]->logits[k]) < 1e-3f);
    }
    play_free(&cpu);
}

/* The same plan with and without graphs; in float32 on the CPU too. least: of the steps of the whole plan, as many as
 * must have been graphs. */
static void compare(
    const struct tiny_llama *shape, const struct plan *plans, uint32_t count, enum kv_format format, double least) {
    struct model *model = pruning_model(shape);
    struct play with, without;
    play_run(&with, model, plans, count, format, GRAPHS);
    play_run(&without, model, plans, count, format, LAUNCHES);
    for (uint32_t i = 0; i < 2 * STREAMS; i++) {
        assert_int_equal(with.streams[i] == NULL, without.streams[i] == NULL);
        if (with.streams[i] != NULL)
            streams_require_same(with.streams[i], without.streams[i], 0, plans[i % STREAMS].policy);
    }
    assert_int_equal(without.calls.graphs, 0);
    print_message("%llu of %u steps were graphs\n", (unsigned long long)with.calls.graphs, with.steps);
    assert_true((double)with.calls.graphs >= least * ranks * with.steps);
    assert_int_equal(with.calls.graphs % ranks, 0); /* all ranks do a step in the same way */
    play_free(&without);
    if (shape->type == TENSOR_F32 && format == KV_F32)
        compare_cpu(model, plans, count, format, &with);
    play_free(&with);
    model_free(model);
}

static struct tiny_llama small_shape(enum tensor_type type) {
    struct tiny_llama shape = tiny_llama_default();
    shape.type = shape.embedding_type = type;
    return shape;
}

/* What the emulator's checks find is seen in memory_moves_between, unless much is asked for. */
static void choose_fast(void) {
    const char *full = getenv("DISTILLCACHE_TEST_FULL");
    emulator_set_fast(full == NULL || full[0] == '\0');
}

/* Up to thirteen sequences and some forks at once: padded to sixteen. */
static void sequences_join_and_leave(void **state) {
    (void)state;
    static const struct plan plans[STREAMS] = {
        {NULL, 0, PROMPT, 36, false},
        {"h2o,tokens=12,minimum=4", 0, 20, 36, true},
        {"snapkv,tokens=12,minimum=4,window=4", 0, 20, 34, false},
        {NULL, 4, 33, 48, true},
        {"h2o,ratio=0.5,minimum=4,summary=true", 4, 12, 30, false},
        {"keyformer,tokens=12,minimum=4", 4, 14, 26, false},
        {NULL, 7, PROMPT, 20, false},
        {NULL, 7, PROMPT, 22, false},
        {NULL, 7, PROMPT, 24, false},
        {NULL, 9, PROMPT, 26, false},
        {NULL, 9, PROMPT, 28, false},
        {NULL, 9, PROMPT, 30, false},
        {NULL, 9, PROMPT, 32, false},
    };
    choose_fast();
    struct tiny_llama shape = small_shape(TENSOR_F16); /* whose products have other kernels for other numbers of rows */
    shape.embedding_type = TENSOR_Q4_1;
    compare(&shape, plans, STREAMS, KV_BF16, 0.4);
}

/* A full cache beside one with statistics, then with many, then with one alone, then beside statistics again: keys come
 * back after the memory that they were captured with has moved, and differ in what is recorded alone. */
static void memory_moves_between(void **state) {
    (void)state;
    static const struct plan plans[] = {
        {NULL, 0, PROMPT, 50, false},
        {"tova,tokens=12,minimum=4", 0, 20, 27, false},
        {NULL, 10, PROMPT, 12, false},
        {NULL, 10, PROMPT, 12, false},
        {NULL, 10, PROMPT, 12, false},
        {NULL, 10, PROMPT, 12, false},
        {NULL, 10, PROMPT, 12, false},
        {NULL, 16, PROMPT, 20, false},
        {"tova,tokens=12,minimum=4", 30, 20, 32, false},
    };
    struct tiny_llama shape = small_shape(TENSOR_F32);
    compare(&shape, plans, sizeof plans / sizeof plans[0], KV_F32, 0.4);
}

/* All statistics that kernels write, alone and beside each other. */
static void policies_beside_each_other(void **state) {
    (void)state;
    static const struct plan plans[] = {
        {"expected_attention,tokens=16,minimum=4,interval=4", 0, 20, 34, true},
        {"scissorhands,tokens=16,minimum=4", 1, 20, 34, false},
        {"keyformer,tokens=16,minimum=4", 2, 20, 32, true},
        {"cake,tokens=16,minimum=4,window=4", 3, 20, 34, false},
        {"laprox,tokens=16,minimum=4,window=4,interval=4", 4, 20, 34, false},
        {NULL, 4, 20, 32, false},
    };
    emulator_set_fast(true);
    struct tiny_llama shape = small_shape(TENSOR_F32);
    compare(&shape, plans, sizeof plans / sizeof plans[0], KV_F16, 0.3);
    compare(&shape, plans, 2, KV_F32, 0.3);
}

/* Longer bounds, page tables that move, and a group of query heads. */
static void sequences_grow(void **state) {
    (void)state;
    static const struct plan plans[] = {
        {NULL, 0, 246, 262, false},
        {"h2o,ratio=0.8,minimum=4", 0, 130, 142, false},
        {NULL, 5, 60, 70, true},
    };
    choose_fast();
    struct tiny_llama shape = small_shape(TENSOR_Q8_0);
    shape.heads = 8;
    shape.kv_heads = 1;
    compare(&shape, plans, sizeof plans / sizeof plans[0], KV_F16, 0.35);
}

/* The same on two devices: sums are captured with the rest. Heads that compete hold different numbers of slots. */
static void ranks_do_the_same(void **state) {
    (void)state;
    static const char *const kinds[] = {"nccl", "host"};
    static const struct plan plans[] = {
        {NULL, 0, PROMPT, 26, false},
        {"h2o,tokens=12,minimum=4", 0, 20, 34, true},
        {"tova,tokens=12,minimum=4", 3, 20, 28, false},
        {"h2o,tokens=12,minimum=4,scope=layer,floor=0.2", 5, 20, 34, false},
        {"expected_attention,tokens=16,minimum=4,interval=4", 6, 20, 30, false},
    };
    emulator_set_fast(true);
    ranks = 2;
    for (size_t kind = 0; kind < sizeof kinds / sizeof kinds[0]; kind++) {
        all_reduce = kinds[kind];
        struct tiny_llama shape = small_shape(TENSOR_F32);
        compare(&shape, plans, sizeof plans / sizeof plans[0], KV_F32, 0.3);
    }
    ranks = 1;
}

/* A rank that fails while graphs have its sums: steps end with the error, and the engine can be closed. */
static void ranks_fail_with_graphs(void **state) {
    (void)state;
    emulator_set_fast(true);
    alarm(240);
    ranks = 2;
    for (uint32_t failing = 0; failing < 4; failing++) {
        all_reduce = failing / 2 == 0 ? "nccl" : "host";
        struct tiny_llama shape = small_shape(TENSOR_F32);
        struct model *model = pruning_model(&shape);
        struct engine *engine = open_engine(model, GRAPHS, KV_F16, 64);
        struct stream *stream = stream_create(engine, NULL, 0, PROMPT, PROMPT + 8);
        struct error error = {0};
        emulator_calls_reset();
        while (stream->done < PROMPT + 4)
            streams_step(&stream, 1, 64);
        assert_true(emulator_calls_read().graphs > 0);
        emulator_fail_device((int)(failing % 2), cudaErrorIllegalAddress);
        struct batch_item item = {
            .sequence = stream->sequence, .tokens = stream->tokens + stream->done, .count = 1, .want = WANT_LAST};
        int code = engine_forward(engine, &item, 1, &error);
        const struct sample_params params = {.temperature = 1, .top_p = 1, .forced = -1};
        struct sample_result result;
        const uint32_t row = 0;
        if (code == 0)
            code = engine_sample(engine, &row, &params, 1, &result, &error);
        assert_int_equal(code, ERROR_DEVICE);
        assert_non_null(strstr(error.message, "illegal memory access"));
        stream_free(stream);
        engine_close(engine);
        model_free(model);
        emulator_fault_clear();
    }
    ranks = 1;
}

/* ---- counts ---- */

static struct emulator_calls forward_calls(struct stream *const *streams, uint32_t count) {
    struct batch_item items[STREAMS];
    struct error error = {0};
    for (uint32_t i = 0; i < count; i++)
        items[i] = (struct batch_item){.sequence = streams[i]->sequence,
            .tokens = streams[i]->tokens + streams[i]->done++,
            .count = 1,
            .want = WANT_LAST};
    emulator_calls_reset();
    if (engine_forward(streams[0]->engine, items, count, &error) != 0)
        fail_msg("%s", error.message);
    return emulator_calls_read();
}

static struct emulator_calls sample_calls(struct engine *engine, uint32_t count) {
    struct sample_params params[STREAMS];
    struct sample_result results[STREAMS];
    struct error error = {0};
    uint32_t rows[STREAMS];
    for (uint32_t i = 0; i < count; i++) {
        rows[i] = i;
        params[i] =
            (struct sample_params){.temperature = 1, .top_p = 1, .forced = -1, .seed = 3, .stream = i, .step = 5};
    }
    emulator_calls_reset();
    assert_int_equal(engine_sample(engine, rows, params, count, results, &error), 0);
    return emulator_calls_read();
}

static void prune(struct stream *const *streams, uint32_t count) {
    struct sequence *sequences[STREAMS];
    struct error error = {0};
    for (uint32_t i = 0; i < count; i++)
        sequences[i] = streams[i]->sequence;
    if (engine_prune(streams[0]->engine, sequences, count, &error) != 0)
        fail_msg("%s", error.message);
}

/* policy: one that has nothing to evict yet. What it records lies where it did in the step before, and is not sent. */
static void check_steady_step(const char *policy) {
    enum { COUNT = 3, START = 33, STEPS = 15 }; /* no page begins in these steps */
    struct tiny_llama shape = small_shape(TENSOR_Q4_1);
    struct model *model = pruning_model(&shape);
    struct engine *engine = open_engine(model, GRAPHS, KV_F16, 64);
    struct stream *streams[COUNT];
    for (uint32_t i = 0; i < COUNT; i++)
        streams[i] = stream_create(engine, policy, i, START, START + STEPS + 1);
    while (streams[0]->done < START)
        streams_step(streams, COUNT, START);
    for (uint32_t step = 0; step < STEPS; step++) {
        struct emulator_calls calls = forward_calls(streams, COUNT), sampled = sample_calls(engine, COUNT);
        prune(streams, COUNT);
        if (step < 3) /* met; captured; captured again, since memory for results was made meanwhile */
            continue;
        assert_int_equal(calls.graphs, 1);
        assert_int_equal(calls.copies, 1);
        assert_true(calls.copied_bytes < 2048);
        assert_int_equal(calls.launches + calls.fills + calls.waits + calls.allocations, 0);
        assert_int_equal(sampled.launches, 3); /* rounding, product, choice */
        assert_int_equal(sampled.copies, 2);   /* parameters, results */
        assert_int_equal(sampled.fills, 1);
        assert_int_equal(sampled.graphs + sampled.allocations, 0);
    }
    /* A page begins in each head: its slots are marked, its number goes to the tables. */
    struct emulator_calls calls = forward_calls(streams, COUNT);
    assert_int_equal(calls.graphs, 1);
    if (policy == NULL) {
        assert_int_equal(calls.copies, 3);
        assert_int_equal(calls.launches, 2);
        assert_int_equal(calls.fills + calls.waits + calls.allocations, 0);
    }
    for (uint32_t i = 0; i < COUNT; i++)
        stream_free(streams[i]);
    engine_close(engine);
    model_free(model);
    assert_null(emulator_fault());
}

static void a_steady_step_is_one_copy_and_one_graph(void **state) {
    (void)state;
    check_steady_step(NULL);
    check_steady_step("h2o,tokens=200,minimum=4");
    check_steady_step("keyformer,tokens=200,minimum=4");
}

/* Without graphs too, and in a prompt, one copy takes a batch to the device. */
static void any_batch_is_one_copy(void **state) {
    (void)state;
    struct tiny_llama shape = small_shape(TENSOR_Q4_1);
    struct model *model = pruning_model(&shape);
    struct engine *engine = open_engine(model, LAUNCHES, KV_F16, 64);
    struct stream *streams[] = {stream_create(engine, NULL, 0, 7, 15), stream_create(engine, NULL, 1, 30, 38)};
    struct batch_item items[2];
    struct error error = {0};
    for (uint32_t step = 0; step < 2; step++) {
        for (uint32_t i = 0; i < 2; i++)
            items[i] = (struct batch_item){.sequence = streams[i]->sequence,
                .tokens = streams[i]->tokens + step * 3,
                .count = i == 0 ? 1 : 3,
                .want = i == 0 ? WANT_NONE : WANT_LAST};
        emulator_calls_reset();
        assert_int_equal(engine_forward(engine, items, 2, &error), 0);
    }
    struct emulator_calls calls = emulator_calls_read();
    assert_int_equal(calls.copies, 1);
    assert_int_equal(calls.graphs + calls.fills + calls.waits + calls.allocations, 0);
    stream_free(streams[0]);
    stream_free(streams[1]);
    engine_close(engine);
    model_free(model);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_steady_step_is_one_copy_and_one_graph),
        cmocka_unit_test(any_batch_is_one_copy),
        cmocka_unit_test(memory_moves_between),
        cmocka_unit_test(sequences_join_and_leave),
        cmocka_unit_test(policies_beside_each_other),
        cmocka_unit_test(ranks_do_the_same),
        cmocka_unit_test(ranks_fail_with_graphs),
        cmocka_unit_test(sequences_grow),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("graphs", tests, NULL, NULL);
}
