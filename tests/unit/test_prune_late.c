/* SPDX-License-Identifier: Apache-2.0
 *
 * Prunes on a backend that does not wait for scores and selects by itself (late_backend.h): the same goes as on the
 * CPU, and no more is waited for than must be.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/engine_internal.h"
#include "tests/unit/late_backend.h"
#include "tests/unit/pruning.h"

enum { PROMPT = 90, TOTAL = 120, STREAMS = 3 };

struct fixture {
    struct model *model;
    struct engine *engine;
};

static struct fixture open_fixture(void) {
    struct tiny_llama shape = tiny_llama_default();
    struct fixture fixture = {.model = pruning_model(&shape)};
    fixture.engine = pruning_engine(fixture.model, &(struct engine_options){.kv_format = KV_F16});
    return fixture;
}

static void close_fixture(struct fixture *fixture) {
    pruning_engine_close(fixture->engine);
    model_free(fixture->model);
}

/* Each policy, with two others in its batches. */
static void the_same_goes(void **state) {
    (void)state;
    struct fixture fixture = open_fixture();
    for (uint32_t i = 0; i < PRUNING_POLICIES; i++) {
        struct stream *plain[STREAMS], *late[STREAMS];
        for (uint32_t k = 0; k < STREAMS; k++) {
            plain[k] = stream_create(
                fixture.engine, pruning_policies[(i + 7 * k) % PRUNING_POLICIES], k, PROMPT, TOTAL - 8 * k);
            stream_run(plain[k]);
        }
        late_backend_begin(fixture.engine->backend);
        for (uint32_t k = 0; k < STREAMS; k++)
            late[k] = stream_create(
                fixture.engine, pruning_policies[(i + 7 * k) % PRUNING_POLICIES], k, PROMPT, TOTAL - 8 * k);
        streams_run(late, STREAMS, 31);
        for (uint32_t k = 0; k < STREAMS; k++) {
            streams_require_same(plain[k], late[k], 0, pruning_policies[(i + 7 * k) % PRUNING_POLICIES]);
            stream_free(late[k]);
        }
        late_backend_end(fixture.engine->backend);
        for (uint32_t k = 0; k < STREAMS; k++)
            stream_free(plain[k]);
    }
    close_fixture(&fixture);
}

/* ---- what is waited for ---- */

/* One decode step of all streams. */
static struct late_counts decode(struct engine *engine, struct stream *const *streams, bool sample_first) {
    struct batch_item items[STREAMS];
    struct sequence *sequences[STREAMS];
    struct sample_params params[STREAMS];
    struct sample_result results[STREAMS];
    uint32_t rows[STREAMS];
    struct error error = {0};
    for (uint32_t k = 0; k < STREAMS; k++) {
        uint32_t at = sequence_length(streams[k]->sequence);
        sequences[k] = streams[k]->sequence;
        items[k] = (struct batch_item){
            .sequence = sequences[k], .tokens = &streams[k]->tokens[at], .count = 1, .want = WANT_LAST};
        params[k] = (struct sample_params){.top_p = 1, .forced = -1};
    }
    late_backend_counts();
    assert_int_equal(engine_forward(engine, items, STREAMS, &error), 0);
    for (uint32_t k = 0; k < STREAMS; k++)
        rows[k] = items[k].first_row;
    if (sample_first)
        assert_int_equal(engine_sample(engine, rows, params, STREAMS, results, &error), 0);
    assert_int_equal(engine_prune(engine, sequences, STREAMS, &error), 0);
    if (!sample_first)
        assert_int_equal(engine_sample(engine, rows, params, STREAMS, results, &error), 0);
    return late_backend_counts();
}

static void open_streams(struct engine *engine, const char *policy, struct stream **streams) {
    for (uint32_t k = 0; k < STREAMS; k++) {
        streams[k] = stream_create(engine, policy, k, PROMPT, TOTAL);
        while (streams[k]->done < PROMPT + 1)
            streams_step(&streams[k], 1, UINT32_MAX);
    }
}

static void require_same_kept(const struct stream *a, const struct stream *b, const struct model_shape *shape) {
    uint32_t x[TOTAL], y[TOTAL];
    for (uint32_t i = 0; i < shape->layers * shape->kv_heads; i++) {
        uint32_t count = stream_positions(a, i / shape->kv_heads, i % shape->kv_heads, x);
        assert_int_equal(stream_positions(b, i / shape->kv_heads, i % shape->kv_heads, y), count);
        assert_memory_equal(x, y, count * sizeof *x);
    }
}

/* Where a head loses the slot of a step, all that a step waits for are its tokens, if it is pruned after them. One call
 * moves the statistics of all sequences. */
static void a_decode_step_waits_once(void **state) {
    (void)state;
    static const struct {
        const char *policy;
        uint32_t before; /* waits when the prune comes first */
        bool selects, moves;
    } cases[] = {
        {"streaming,tokens=24", 2, false, false},
        {"h2o,tokens=24", 2, false, true},
        {"snapkv,tokens=24,window=8", 2, false, true},
        {"tova,tokens=20", 2, false, true},
        {"keydiff,tokens=24", 2, false, false},
        {"h2o,tokens=24,summary=1", 2, false, true},
        {"adakv,tokens=24,window=8", 2, true, true},
        {"knorm,tokens=24,scope=model", 2, true, false},
    };
    struct fixture fixture = open_fixture();
    const struct model_shape *shape = &fixture.model->shape;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct stream *first[STREAMS], *after[STREAMS];
        late_backend_begin(fixture.engine->backend);
        open_streams(fixture.engine, cases[i].policy, first);
        open_streams(fixture.engine, cases[i].policy, after);
        for (uint32_t step = 0; step < 12; step++) {
            struct late_counts counts = decode(fixture.engine, first, false);
            assert_int_equal(counts.waits, cases[i].before);
            counts = decode(fixture.engine, after, true);
            assert_int_equal(counts.waits, cases[i].selects ? 2 : 1);
            assert_int_equal(counts.scores, STREAMS * shape->layers);
            assert_int_equal(counts.selections, cases[i].selects ? STREAMS : 0);
            assert_int_equal(counts.moves, cases[i].moves ? 1 : 0);
            for (uint32_t k = 0; k < STREAMS; k++) {
                assert_false(sequence_prune_awaits_results(after[k]->sequence));
                require_same_kept(first[k], after[k], shape);
            }
        }
        for (uint32_t k = 0; k < STREAMS; k++) {
            stream_free(first[k]);
            stream_free(after[k]);
        }
        late_backend_end(fixture.engine->backend);
    }
    close_fixture(&fixture);
}

/* What a device is still to write must be there when it does. */
static void a_sequence_that_goes_waits_for_what_it_awaits(void **state) {
    (void)state;
    struct fixture fixture = open_fixture();
    struct stream *streams[STREAMS];
    struct error error = {0};
    late_backend_begin(fixture.engine->backend);
    open_streams(fixture.engine, "h2o,tokens=24", streams);
    for (uint32_t k = 0; k < STREAMS; k++) {
        struct batch_item item = {.sequence = streams[k]->sequence, .tokens = streams[k]->tokens, .count = 1};
        assert_int_equal(engine_forward(fixture.engine, &item, 1, &error), 0);
        assert_true(sequence_prune_awaits_results(streams[k]->sequence));
    }
    for (uint32_t k = 0; k < STREAMS; k++)
        stream_free(streams[k]);
    late_backend_end(fixture.engine->backend);
    close_fixture(&fixture);
}

/* A selection that fails changes nothing, and the prune is due until it succeeds. */
static void a_selection_that_fails_is_tried_again(void **state) {
    (void)state;
    struct fixture fixture = open_fixture();
    struct error error = {0};
    struct stream *plain = stream_create(fixture.engine, "adakv,tokens=24,window=8", 1, PROMPT, TOTAL);
    struct stream *late = stream_create(fixture.engine, "adakv,tokens=24,window=8", 1, PROMPT, TOTAL);
    while (plain->done < PROMPT)
        streams_step(&plain, 1, UINT32_MAX);
    late_backend_begin(fixture.engine->backend);
    struct batch_item item = {.sequence = late->sequence, .tokens = late->tokens, .count = PROMPT};
    assert_int_equal(engine_forward(fixture.engine, &item, 1, &error), 0);
    late_backend_fail_select(true);
    assert_int_equal(engine_prune(fixture.engine, &late->sequence, 1, &error), ERROR_MEMORY);
    assert_int_equal(kv_sequence_slots(late->sequence->kv, 0, 0), PROMPT);
    late_backend_fail_select(false);
    assert_int_equal(engine_prune(fixture.engine, &late->sequence, 1, &error), 0);
    require_same_kept(plain, late, &fixture.model->shape);
    stream_free(late);
    late_backend_end(fixture.engine->backend);
    stream_free(plain);
    close_fixture(&fixture);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_goes),
        cmocka_unit_test(a_decode_step_waits_once),
        cmocka_unit_test(a_sequence_that_goes_waits_for_what_it_awaits),
        cmocka_unit_test(a_selection_that_fails_is_tried_again),
    };
    return cmocka_run_group_tests_name("prune_late", tests, NULL, NULL);
}
