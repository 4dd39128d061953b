/* SPDX-License-Identifier: Apache-2.0
 *
 * Merging against the definition: search all neighbours for the lowest rank, merge the leftmost, again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/bpe.h"
#include "engine/random.h"

#define LETTERS 4
#define MERGES 200
#define SYMBOLS 700

static int32_t merge_left[MERGES], merge_right[MERGES];    /* merge i makes id LETTERS + i */
static int naive_rank[LETTERS + MERGES][LETTERS + MERGES]; /* of the first merge of a pair; MERGES: there is none */

static uint32_t roll(uint64_t seed, uint32_t at, uint32_t sides) {
    uint32_t out[4];
    random_philox(seed, 3, at, 0, out);
    return out[0] % sides;
}

static size_t naive_merge(int32_t *ids, size_t count) {
    for (;;) {
        int lowest = MERGES;
        size_t best = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            int rank = naive_rank[ids[i]][ids[i + 1]];
            if (rank < lowest) {
                lowest = rank;
                best = i;
            }
        }
        if (lowest == MERGES)
            return count;
        ids[best] = LETTERS + lowest;
        memmove(ids + best + 1, ids + best + 2, (count - best - 2) * sizeof *ids);
        count--;
    }
}

static void rank_pairs(void) {
    for (int left = 0; left < LETTERS + MERGES; left++)
        for (int right = 0; right < LETTERS + MERGES; right++)
            naive_rank[left][right] = MERGES;
    for (int rank = MERGES - 1; rank >= 0; rank--)
        naive_rank[merge_left[rank]][merge_right[rank]] = rank;
}

/* A merge joins any two symbols that exist so far; some pairs come twice. */
static struct bpe *make_merges(uint64_t seed) {
    struct bpe *bpe = bpe_create(MERGES);
    assert_non_null(bpe);
    for (uint32_t i = 0; i < MERGES; i++) {
        uint32_t known = LETTERS + i < 12 ? LETTERS + i : 12; /* few symbols: pairs that occur */
        merge_left[i] = (int32_t)roll(seed, 2 * i, i % 3 == 0 ? LETTERS + i : known);
        merge_right[i] = (int32_t)roll(seed, 2 * i + 1, i % 3 == 1 ? LETTERS + i : known);
        bpe_add(bpe, merge_left[i], merge_right[i], (int32_t)(LETTERS + i), (uint32_t)i);
    }
    rank_pairs();
    return bpe;
}

static void equals_definition(void **state) {
    (void)state;
    size_t merged = 0;
    for (uint64_t seed = 0; seed < 300; seed++) {
        struct bpe *bpe = make_merges(seed);
        struct bpe_scratch scratch = {0};
        for (uint32_t round = 0; round < 8; round++) {
            int32_t ids[SYMBOLS], expected[SYMBOLS];
            size_t count = roll(seed, 1000 + round, round < 5 ? 100 : SYMBOLS), before = count;
            uint32_t letters = 1 + roll(seed, 1100 + round, LETTERS);
            for (size_t i = 0; i < count; i++)
                ids[i] = (int32_t)roll(seed, (uint32_t)(2000 + round * SYMBOLS + i), letters);
            memcpy(expected, ids, sizeof ids);
            size_t expected_count = naive_merge(expected, count);
            assert_int_equal(bpe_merge(bpe, &scratch, ids, &count), 0);
            assert_int_equal(count, expected_count);
            assert_memory_equal(ids, expected, count * sizeof *ids);
            merged += before - count;
        }
        bpe_scratch_free(&scratch);
        bpe_free(bpe);
    }
    assert_true(merged > 100000);
}

static void merges_nothing_without_merges(void **state) {
    (void)state;
    struct bpe *bpe = bpe_create(0);
    struct bpe_scratch scratch = {0};
    int32_t ids[100] = {0};
    for (size_t length = 0; length <= 100; length++) {
        size_t count = length;
        assert_int_equal(bpe_merge(bpe, &scratch, ids, &count), 0);
        assert_int_equal(count, length);
    }
    bpe_scratch_free(&scratch);
    bpe_free(bpe);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_definition),
        cmocka_unit_test(merges_nothing_without_merges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
