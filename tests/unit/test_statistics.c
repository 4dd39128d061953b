/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of a sequence follow their slots: every number written is a function of its token, its head and its place
 * in the arrays, and is looked up again by the positions that the KV cache shows.
 */
#include "engine/random.h"
#include "engine/statistics.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    LAYERS = 2,
    KV_HEADS = 2,
    HEADS = LAYERS * KV_HEADS,
    GROUP = 3,
    DIM = 8,
    WINDOW = 5,
    HISTORY = 40,
    TOKENS_MAX = 400,
    ALL = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS |
          STATISTIC_ABOVE | STATISTIC_ENTROPY | STATISTIC_NOISY | STATISTIC_OUTPUT_NORM | STATISTIC_CONTENT |
          STATISTIC_STANDARD,
    CONTENT = 4,
};

struct scene {
    struct backend *backend;
    struct kv_cache *cache;
    struct kv_sequence *kv;
    struct statistics *statistics;
    uint64_t seed, draws;
};

static const struct statistics_shape shape = {LAYERS, KV_HEADS, GROUP, DIM, WINDOW, HISTORY, 7, CONTENT, 1, NULL};

static uint32_t draw(struct scene *scene, uint32_t below) {
    uint32_t words[4];
    random_philox(scene->seed, 0, 0, scene->draws++, words);
    return words[0] % below;
}

static struct scene open_scene(uint64_t seed, uint32_t needs) {
    struct scene scene = {.seed = seed};
    struct error error = {0};
    struct kv_cache_options options = {.layout = {LAYERS, KV_HEADS, DIM, KV_F32}, .bytes = 4 << 20};
    scene.backend = backend_cpu_open(&(struct backend_options){.threads = 2}, &error);
    scene.cache = kv_cache_create(scene.backend, &options, &error);
    scene.kv = kv_sequence_create(scene.cache);
    scene.statistics = statistics_create(scene.backend, &shape, needs, &error);
    assert_non_null(scene.kv);
    assert_non_null(scene.statistics);
    assert_int_equal(scene.statistics->bytes, 0);
    return scene;
}

static void close_scene(struct scene *scene) {
    statistics_free(scene->statistics);
    kv_sequence_free(scene->kv);
    kv_cache_free(scene->cache);
    scene->backend->operations->close(scene->backend);
}

/* Never 0, so that a column that was cleared shows. */
static uint16_t number(uint32_t head, uint32_t position, uint32_t array, uint32_t row) {
    return (uint16_t)(1 + (head * 7919 + position * 104729 + array * 1299709 + row * 15485863) % 65521);
}

/* Calls each for every per-slot array: its start, the bytes of an element, rows. */
typedef void (*visit_array)(void *context, uint32_t array, void *start, size_t bytes, uint32_t rows);

static void visit(const struct kv_statistics *head, visit_array each, void *context) {
    each(context, 0, head->sum, sizeof *head->sum, 2);
    each(context, 1, head->squared, sizeof *head->squared, 2);
    each(context, 2, head->noisy, sizeof *head->noisy, 2);
    each(context, 3, head->window_rows, sizeof *head->window_rows, WINDOW);
    each(context, 4, head->window_sum, sizeof *head->window_sum, 1);
    each(context, 5, head->head_rows, sizeof *head->head_rows, WINDOW * GROUP);
    each(context, 6, head->above, STATISTIC_ABOVE_BITS / 8, 1);
    each(context, 7, head->entropy, sizeof *head->entropy, 1);
    each(context, 8, head->output_norm, sizeof *head->output_norm, 1);
    each(context, 9, head->content_rows, sizeof *head->content_rows, CONTENT + 2);
}

struct column {
    struct scene *scene;
    const struct kv_statistics *statistics;
    uint32_t head;
    uint32_t slot;
    uint32_t position; /* KV_NO_POSITION: all zero */
};

static void write_column(void *context, uint32_t array, void *start, size_t bytes, uint32_t rows) {
    const struct column *column = context;
    for (uint32_t row = 0; start != NULL && row < rows; row++) {
        char *at = (char *)start + ((size_t)row * column->statistics->capacity + column->slot) * bytes;
        uint16_t value = number(column->head, column->position, array, row);
        for (size_t i = 0; i < bytes; i += sizeof value)
            memcpy(at + i, &value, sizeof value);
    }
}

static void check_column(void *context, uint32_t array, void *start, size_t bytes, uint32_t rows) {
    const struct column *column = context;
    for (uint32_t row = 0; start != NULL && row < rows; row++) {
        const char *at = (const char *)start + ((size_t)row * column->statistics->capacity + column->slot) * bytes;
        uint16_t value,
            expected = column->position == KV_NO_POSITION ? 0 : number(column->head, column->position, array, row);
        for (size_t i = 0; i < bytes; i += sizeof value) {
            memcpy(&value, at + i, sizeof value);
            if (value != expected)
                fail_msg("head %u, slot %u, position %u, array %u, row %u: %u, not %u", column->head, column->slot,
                    column->position, array, row, value, expected);
        }
    }
}

static uint32_t slots_of(const struct kv_sequence *kv, uint32_t head) {
    return kv_sequence_slots(kv, head / KV_HEADS, head % KV_HEADS);
}

/* Every slot has its token's numbers, and every other column is zero; outputs are those that were written. */
static void check(const struct statistics *statistics, const struct kv_sequence *kv) {
    uint32_t positions[TOKENS_MAX];
    size_t bytes = statistics_moments_bytes(&shape, statistics->moments[0].count != NULL ? STATISTIC_MOMENTS : 0);
    for (uint32_t head = 0; head < HEADS; head++) {
        const struct kv_statistics *at = &statistics->heads[head];
        uint32_t slots = slots_of(kv, head);
        kv_sequence_positions(kv, head / KV_HEADS, head % KV_HEADS, positions);
        assert_true(at->capacity % 16 == 0 && (at->capacity >= slots || at->needs == 0));
        for (uint32_t slot = 0; slot < at->capacity; slot++) {
            struct column column = {NULL, at, head, slot, slot < slots ? positions[slot] : KV_NO_POSITION};
            visit(at, check_column, &column);
        }
        for (uint32_t i = 0; at->outputs != NULL && i < WINDOW * GROUP * DIM; i++)
            assert_true(at->outputs[i] == (float)(head * 1000 + i));
        for (uint32_t i = 0; at->standard != NULL && i < STATISTIC_STANDARD_NUMBERS; i++)
            assert_true(at->standard[i] == (float)(head * 10 + i + 1));
        assert_int_equal(at->content, CONTENT);
        bytes += statistics_head_bytes(&shape, at->needs, at->capacity);
    }
    assert_int_equal(statistics->bytes, bytes);
}

/* Appends tokens and writes their columns, as attend would. */
static void append(struct scene *scene, uint32_t count, uint32_t hint) {
    uint32_t length = kv_sequence_length(scene->kv);
    size_t more = statistics_reserve_bytes(scene->statistics, scene->kv, count, hint),
           before = scene->statistics->bytes;
    assert_int_equal(statistics_reserve(scene->statistics, scene->kv, count, hint, NULL), 0);
    assert_int_equal(scene->statistics->bytes, before + more);
    assert_int_equal(statistics_reserve_bytes(scene->statistics, scene->kv, count, hint), 0);
    assert_int_equal(kv_sequence_append(scene->kv, count, NULL), 0);
    for (uint32_t head = 0; head < HEADS; head++) {
        const struct kv_head_view view = kv_sequence_view(scene->kv, head / KV_HEADS, head % KV_HEADS);
        const struct kv_statistics *at = &scene->statistics->heads[head];
        for (uint32_t i = 0; i < count; i++) {
            struct column column = {scene, at, head, view.first_slot + i, KV_NO_POSITION};
            visit(at, check_column, &column); /* clean */
            column.position = length + i;
            visit(at, write_column, &column);
        }
        for (uint32_t i = 0; at->outputs != NULL && i < WINDOW * GROUP * DIM; i++)
            at->outputs[i] = (float)(head * 1000 + i);
        for (uint32_t i = 0; at->standard != NULL && i < STATISTIC_STANDARD_NUMBERS; i++)
            at->standard[i] = (float)(head * 10 + i + 1);
    }
}

/* Statistics after kv_sequence_prune; `slots`: of all heads before. */
static void follow(struct scene *scene, const struct kv_removal *removals, const uint32_t *before, size_t slots,
    uint32_t needs, bool fit) {
    struct statistics_move moves[HEADS];
    struct statistics_prune prune = {
        .statistics = scene->statistics,
        .removals = removals,
        .slots_before = before,
        .needs = needs,
        .fit = fit,
        .work = malloc(statistics_prune_work(scene->statistics, slots)),
    };
    assert_non_null(prune.work);
    statistics_prune(&prune, 1, moves);
    free(prune.work);
}

static void prune(struct scene *scene, uint32_t needs) {
    static uint32_t list[HEADS][TOKENS_MAX];
    struct kv_removal removals[HEADS];
    uint32_t before[HEADS];
    size_t slots = 0;
    for (uint32_t head = 0; head < HEADS; head++) {
        uint32_t kind = draw(scene, 5), percent = draw(scene, 101);
        removals[head] = (struct kv_removal){.evict = KV_NO_SLOT};
        before[head] = slots_of(scene->kv, head);
        slots += before[head];
        if (kind == 0 && before[head] > 0 &&
            kv_sequence_tokens(scene->kv, head / KV_HEADS, head % KV_HEADS) == before[head])
            removals[head].evict = draw(scene, before[head]);
        if (kind < 2)
            continue;
        bool names = draw(scene, 2) == 0; /* those that go */
        uint32_t listed = 0;
        for (uint32_t i = 0; i < before[head]; i++)
            if (draw(scene, 100) < percent)
                list[head][listed++] = i;
        removals[head].count = names ? before[head] - listed : listed;
        *(names ? &removals[head].drop : &removals[head].keep) = list[head];
    }
    assert_int_equal(kv_sequence_prune(scene->kv, removals, NULL), 0);
    follow(scene, removals, before, slots, needs, draw(scene, 2) == 0);
}

static void keep_some(struct scene *scene) {
    uint32_t keep[TOKENS_MAX], count = 0, head = draw(scene, HEADS), before = slots_of(scene->kv, head);
    for (uint32_t i = 0; i < before; i++)
        if (draw(scene, 3) > 0)
            keep[count++] = i;
    assert_int_equal(kv_sequence_keep(scene->kv, head / KV_HEADS, head % KV_HEADS, keep, count, NULL), 0);
    statistics_keep(scene->statistics, head, keep, count, before);
}

/* The copy has the same numbers, and what happens to it changes nothing here. */
static void fork_and_go_on(struct scene *scene) {
    struct scene fork = *scene;
    fork.kv = kv_sequence_fork(scene->kv);
    fork.statistics = statistics_fork(scene->statistics, NULL);
    check(fork.statistics, fork.kv);
    prune(&fork, fork.statistics->needs);
    check(fork.statistics, fork.kv);
    check(scene->statistics, scene->kv);
    statistics_free(fork.statistics);
    kv_sequence_free(fork.kv);
}

static void swap(struct scene *scene) {
    size_t bytes = scene->statistics->bytes;
    char *host = malloc(bytes + 16);
    memset(host + bytes, 0x5a, 16);
    statistics_save(scene->statistics, host);
    assert_int_equal(scene->statistics->bytes, bytes);
    for (uint32_t i = 0; i < 16; i++)
        assert_int_equal(host[bytes + i], 0x5a);
    assert_int_equal(statistics_restore(scene->statistics, host, NULL), 0);
    free(host);
}

static void run(uint64_t seed, uint32_t needs) {
    struct scene scene = open_scene(seed, needs);
    for (uint32_t step = 0; step < 300; step++) {
        uint32_t choice = draw(&scene, 10);
        if (kv_sequence_length(scene.kv) + 70 > TOKENS_MAX)
            break;
        if (choice < 5)
            append(&scene, 1, 0);
        else if (choice < 6)
            append(&scene, 1 + draw(&scene, 70), draw(&scene, 200));
        else if (choice < 8)
            prune(&scene, needs);
        else if (choice < 9)
            keep_some(&scene);
        else if (step % 2 == 0)
            fork_and_go_on(&scene);
        else
            swap(&scene);
        check(scene.statistics, scene.kv);
    }
    close_scene(&scene);
}

static void columns_follow_their_slots(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++)
        run(seed, ALL);
    run(7, STATISTIC_SUM);
    run(8, STATISTIC_WINDOW | STATISTIC_OUTPUTS);
    run(9, STATISTIC_MOMENTS);
    run(10, STATISTIC_ABOVE | STATISTIC_MOMENTS);
    run(11, STATISTIC_CONTENT | STATISTIC_STANDARD);
}

/* Content rows are numbers of 2 bytes, content and 2 of them; `standard` is 8 floats in a cache line. */
static void the_networks_numbers_are_counted(void **state) {
    (void)state;
    const struct statistics_shape other = {LAYERS, KV_HEADS, GROUP, DIM, WINDOW, HISTORY, 7, 9, 1, NULL};
    assert_int_equal(statistics_head_bytes(&shape, STATISTIC_CONTENT, 320), (CONTENT + 2) * 2 * 320);
    assert_int_equal(statistics_head_bytes(&other, STATISTIC_CONTENT, 320), 11 * 2 * 320);
    assert_int_equal(statistics_head_bytes(&other, STATISTIC_STANDARD, 320), 64);
    assert_int_equal(statistics_head_bytes(&other, STATISTIC_SUM, 320), 8 * 320);
}

/* Sums whose second plane is not zero go where their slots go, from arrays of one capacity to those of another too. */
static void large_sums_follow_their_slots(void **state) {
    (void)state;
    struct scene scene = open_scene(1, STATISTIC_SUM);
    append(&scene, 40, 0);
    uint32_t keep[20], before[HEADS];
    struct kv_removal removals[HEADS];
    for (uint32_t i = 0; i < 20; i++)
        keep[i] = i * 2;
    for (uint32_t head = 0; head < HEADS; head++) {
        struct kv_statistics *at = &scene.statistics->heads[head];
        removals[head] = (struct kv_removal){.keep = keep, .count = 20, .evict = KV_NO_SLOT};
        before[head] = 40;
        for (uint32_t slot = 0; slot < 40; slot++) /* every third has a high part */
            kv_sum_set(at->sum, at->capacity, slot, (slot % 3 == 0 ? 0x123456789abull : 0x2345) + slot);
    }
    assert_int_equal(statistics_reserve(scene.statistics, scene.kv, 400, 0, NULL), 0);
    assert_int_equal(kv_sequence_prune(scene.kv, removals, NULL), 0);
    follow(&scene, removals, before, 40 * HEADS, STATISTIC_SUM, true);
    for (uint32_t head = 0; head < HEADS; head++) {
        const struct kv_statistics *at = &scene.statistics->heads[head];
        uint32_t positions[TOKENS_MAX];
        assert_int_equal(at->capacity, statistics_room_for(20));
        kv_sequence_positions(scene.kv, head / KV_HEADS, head % KV_HEADS, positions);
        for (uint32_t slot = 0; slot < at->capacity; slot++) {
            uint64_t want = slot >= 20                 ? 0
                            : positions[slot] % 3 == 0 ? 0x123456789abull + positions[slot]
                                                       : 0x2345ull + positions[slot];
            assert_true(kv_sum_get(at->sum, at->capacity, slot) == want);
            assert_int_equal(at->sum[at->capacity + slot], want >> 31);
        }
    }
    close_scene(&scene);
}

/* The low 31 bits, a bit that tells of others, and those. */
static void a_sum_lies_in_two_planes(void **state) {
    static const struct {
        uint64_t sum;
        uint32_t low, high;
    } cases[] = {{0, 0, 0}, {5, 5, 0}, {0x7fffffff, 0x7fffffff, 0}, {0x80000000, 0x80000000, 1},
        {0xffffffff, 0xffffffff, 1}, {0x100000000, 0x80000000, 2}, {0xfffffffffff, 0xffffffff, 0x1fff},
        {INT64_MAX, UINT32_MAX, UINT32_MAX}};
    uint32_t planes[2 * 16];
    (void)state;
    for (uint32_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memset(planes, 0xff, sizeof planes);
        kv_sum_set(planes, 16, 3, cases[i].sum);
        assert_int_equal(planes[3], cases[i].low);
        assert_int_equal(planes[16 + 3], cases[i].high);
        assert_true(kv_sum_get(planes, 16, 3) == cases[i].sum);
        planes[3] = planes[16 + 3] = UINT32_MAX;
        for (uint32_t word = 0; word < 32; word++)
            assert_int_equal(planes[word], UINT32_MAX);
    }
    memset(planes, 0, sizeof planes);
    assert_true(kv_sum_get(planes, 16, 15) == 0);
}

static void a_hint_is_room_at_once(void **state) {
    (void)state;
    struct scene scene = open_scene(1, STATISTIC_SUM);
    append(&scene, 10, 100);
    assert_int_equal(scene.statistics->heads[3].capacity, 112);
    append(&scene, 90, 100);
    assert_int_equal(scene.statistics->heads[3].capacity, 112);
    append(&scene, 13, 100); /* beyond it: with some to spare */
    assert_int_equal(scene.statistics->heads[3].capacity, statistics_room_for(113));
    assert_true(statistics_room_for(113) > 113 && statistics_room_for(113) < 150);
    check(scene.statistics, scene.kv);
    close_scene(&scene);
}

static void a_large_prune_gives_memory_back(void **state) {
    (void)state;
    struct scene scene = open_scene(1, ALL | STATISTIC_MOMENTS);
    append(&scene, 300, 0);
    size_t full = scene.statistics->bytes;
    uint32_t keep[20], before[HEADS];
    struct kv_removal removals[HEADS];
    for (uint32_t i = 0; i < 20; i++)
        keep[i] = i * 15 + 2;
    for (uint32_t head = 0; head < HEADS; head++) {
        removals[head] = (struct kv_removal){.keep = keep, .count = 20, .evict = KV_NO_SLOT};
        before[head] = 300;
    }
    assert_int_equal(kv_sequence_prune(scene.kv, removals, NULL), 0);
    follow(&scene, removals, before, 300 * HEADS, STATISTIC_SUM | STATISTIC_WINDOW, true);
    assert_true(scene.statistics->bytes < full / 10);
    assert_int_equal(scene.statistics->heads[0].capacity, statistics_room_for(20));
    assert_int_equal(scene.statistics->heads[0].needs, STATISTIC_SUM | STATISTIC_WINDOW);
    assert_null(scene.statistics->heads[0].head_rows);
    assert_null(scene.statistics->moments[0].sum);
    check(scene.statistics, scene.kv);
    append(&scene, 100, 0);
    check(scene.statistics, scene.kv);
    close_scene(&scene);
}

static void moments_survive_copies(void **state) {
    (void)state;
    struct scene scene = open_scene(1, STATISTIC_MOMENTS);
    append(&scene, 20, 0);
    const size_t outer = (size_t)KV_HEADS * GROUP * DIM * DIM;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct query_moments *moments = &scene.statistics->moments[layer];
        assert_int_equal(*moments->count, 0);
        *moments->count = 3 + layer;
        moments->sum[KV_HEADS * GROUP * DIM - 1] = 0.5 + layer;
        moments->outer[outer - 1] = 0.25 + layer;
    }
    struct statistics *fork = statistics_fork(scene.statistics, NULL);
    swap(&scene);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const struct query_moments *copies[] = {&scene.statistics->moments[layer], &fork->moments[layer]};
        for (uint32_t i = 0; i < 2; i++) {
            assert_int_equal(*copies[i]->count, 3 + layer);
            assert_true(copies[i]->sum[KV_HEADS * GROUP * DIM - 1] == 0.5 + layer);
            assert_true(copies[i]->outer[outer - 1] == 0.25 + layer);
        }
    }
    statistics_free(fork);
    close_scene(&scene);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(columns_follow_their_slots),
        cmocka_unit_test(the_networks_numbers_are_counted),
        cmocka_unit_test(large_sums_follow_their_slots),
        cmocka_unit_test(a_sum_lies_in_two_planes),
        cmocka_unit_test(a_hint_is_room_at_once),
        cmocka_unit_test(a_large_prune_gives_memory_back),
        cmocka_unit_test(moments_survive_copies),
    };
    return cmocka_run_group_tests_name("statistics", tests, NULL, NULL);
}
