/* SPDX-License-Identifier: Apache-2.0
 *
 * Stages along original positions: pooling, protection, position itself.
 *
 * Pooling wants slots in order of position. Most heads are in that order but for slots that were reused since the last
 * compaction: an order from the host, or one that is sorted here, leads to a copy of positions and scores in order, in
 * which protected and unused slots are the two ends (they have the smallest and the largest positions).
 */
#include "engine/cpu/score.h"

#include <math.h>
#include <string.h>

/* Slots that may be pooled, in order of position: [first, end) of the order; order NULL: slots are in that order. */
struct pool_range {
    const int32_t *positions; /* by slot */
    const uint32_t *order;
    uint32_t first, end;
};

void score_position(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    (void)stage;
    unit->kernels->positions(unit->scratch->slots[head].positions, at->view.slots, at->scores);
}

void score_random(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    uint32_t stream = kv_layout_head_number(&unit->pool->layout, unit->layer->layer, head);
    (void)stage;
    unit->kernels->uniform(unit->scratch->slots[head].positions, unit->layer->seed, stream, at->view.slots, at->scores);
}

static int32_t limit_position(uint32_t position) {
    return position < KV_NO_POSITION ? (int32_t)position : KV_NO_POSITION;
}

void score_protect(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    (void)stage;
    unit->kernels->protect(unit->scratch->slots[head].positions, limit_position(at->sinks),
        limit_position(at->recent_from), at->view.slots, at->scores);
}

/* ---- order ---- */

static bool ascends(const int32_t *positions, uint32_t count) {
    uint32_t wrong = 0;
    for (uint32_t i = 1; i < count; i++)
        wrong |= positions[i] <= positions[i - 1];
    return wrong == 0;
}

enum { SORT_BITS = 11, SORT_DIGITS = 1 << SORT_BITS };

/* One pass of a radix sort, stable: keys are positions above slots. */
static void sort_by_digit(const uint64_t *from, uint32_t count, uint32_t shift, uint64_t *to) {
    uint32_t starts[SORT_DIGITS] = {0}, start = 0;
    for (uint32_t i = 0; i < count; i++)
        starts[from[i] >> shift & (SORT_DIGITS - 1)]++;
    for (uint32_t digit = 0; digit < SORT_DIGITS; digit++) {
        uint32_t next = start + starts[digit];
        starts[digit] = start;
        start = next;
    }
    for (uint32_t i = 0; i < count; i++)
        to[starts[from[i] >> shift & (SORT_DIGITS - 1)]++] = from[i];
}

/* Slots by position; unused ones last. */
static const uint32_t *sort_slots(const struct score_unit *unit, const int32_t *positions, uint32_t count) {
    uint64_t *keys = unit->scratch->keys, *space = (uint64_t *)unit->scratch->wide;
    uint32_t used = 0, *order = unit->scratch->order, last = 0;
    for (uint32_t slot = 0, unused = count; slot < count; slot++) {
        uint32_t position = (uint32_t)positions[slot];
        if (position == KV_NO_POSITION) {
            order[--unused] = slot;
            continue;
        }
        keys[used++] = (uint64_t)position << 32 | slot;
        last = position > last ? position : last;
    }
    for (uint32_t digit = 0; digit * SORT_BITS < 31 && last >> digit * SORT_BITS != 0; digit++) {
        sort_by_digit(keys, used, 32 + digit * SORT_BITS, space);
        uint64_t *sorted = space;
        space = keys;
        keys = sorted;
    }
    for (uint32_t i = 0; i < used; i++)
        order[i] = (uint32_t)keys[i];
    return order;
}

static int32_t ordered_position(const struct pool_range *range, uint32_t i) {
    return range->positions[range->order != NULL ? range->order[i] : i];
}

/* First place in [low, high) of the order whose position is at least `from`. */
static uint32_t find_position(const struct pool_range *range, uint32_t low, uint32_t high, int32_t from) {
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (ordered_position(range, middle) < from)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The order without its holes. */
static const uint32_t *close_order(const struct score_unit *unit, const struct score_head *at) {
    unit->kernels->close(at->order, at->order_count, unit->scratch->order);
    return unit->scratch->order;
}

static struct pool_range pool_range(const struct score_unit *unit, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    struct pool_range range = {.positions = unit->scratch->slots[head].positions};
    uint32_t slots = at->view.slots;
    if (at->order != NULL && at->order_count == slots)
        range.order = at->order;
    else if (at->order != NULL)
        range.order = close_order(unit, at);
    else if (!ascends(range.positions, slots))
        range.order = sort_slots(unit, range.positions, slots);
    range.first = find_position(&range, 0, slots, limit_position(at->sinks));
    range.end = find_position(&range, range.first, slots, limit_position(at->recent_from));
    return range;
}

/* Copies the range's positions and scores in order, with far neighbours around them, and returns how many they are. */
static uint32_t copy_range(
    const struct score_unit *unit, uint32_t head, const struct pool_range *range, int32_t **positions, float **scores) {
    const float *from = unit->layer->heads[head].scores;
    uint32_t count = range->end - range->first;
    *positions = unit->scratch->near_positions + SCORE_PAD;
    *scores = unit->scratch->near_scores + SCORE_PAD;
    if (range->order != NULL) {
        unit->kernels->gather(range->positions, from, unit->layer->heads[head].view.slots, range->order + range->first,
            count, *positions, *scores);
    } else {
        memcpy(*positions, range->positions + range->first, count * sizeof **positions);
        memcpy(*scores, from + range->first, count * sizeof **scores);
    }
    for (uint32_t i = 0; i < SCORE_PAD; i++) {
        (*positions)[(int32_t)i - SCORE_PAD] = -SCORE_PAD; /* positions are at least 0 */
        (*positions)[count + i] = KV_NO_POSITION;
        (*scores)[(int32_t)i - SCORE_PAD] = -INFINITY;
        (*scores)[count + i] = -INFINITY;
    }
    return count;
}

static void store_range(
    const struct score_unit *unit, uint32_t head, const struct pool_range *range, const float *pooled) {
    float *scores = unit->layer->heads[head].scores;
    uint32_t count = range->end - range->first;
    if (range->order != NULL)
        unit->kernels->scatter(pooled, range->order + range->first, count, scores);
    else
        memcpy(scores + range->first, pooled, count * sizeof *scores);
}

/* ---- pooling ---- */

/* The largest score of every window by a queue of candidates, each smaller than the one before it. */
static void pool_far(
    const int32_t *positions, const float *scores, uint32_t count, uint32_t reach, uint32_t *queue, float *out) {
    uint32_t head = 0, tail = 0, next = 0;
    for (uint32_t i = 0; i < count; i++) {
        for (; next < count && (uint32_t)(positions[next] - positions[i]) <= reach; next++) {
            while (tail > head && scores[queue[tail - 1]] <= scores[next])
                tail--;
            queue[tail++] = next;
        }
        while ((uint32_t)(positions[i] - positions[queue[head]]) > reach && queue[head] < i)
            head++;
        out[i] = scores[queue[head]];
    }
}

static void pool_near_or_far(const struct score_unit *unit, uint32_t reach, const int32_t *positions,
    const float *scores, uint32_t count, float *pooled) {
    if (reach <= SCORE_POOL_FIXED)
        unit->kernels->pool_max(positions, scores, count, reach, pooled);
    else
        pool_far(positions, scores, count, reach, (uint32_t *)unit->scratch->keys, pooled);
}

void score_pool_max(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    struct pool_range range = pool_range(unit, head);
    int32_t *positions;
    float *scores, *pooled = (float *)unit->scratch->wide;
    uint32_t count = copy_range(unit, head, &range, &positions, &scores);
    pool_near_or_far(unit, stage->n / 2, positions, scores, count, pooled);
    store_range(unit, head, &range, pooled);
}

/* Protected slots neither go before others nor spread to them: they are the ends of the order, which is cut to the
 * rest. */
bool score_worst_pooled(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    struct pool_range range = pool_range(unit, head);
    int32_t *positions;
    float *scores, *pooled = (float *)unit->scratch->wide;
    if (range.first == range.end)
        return false;
    uint32_t count = copy_range(unit, head, &range, &positions, &scores);
    pool_near_or_far(unit, stage->n / 2, positions, scores, count, pooled);
    uint32_t place = range.first + unit->kernels->worst(pooled, positions, count);
    const struct score_head *at = &unit->layer->heads[head];
    *at->worst = range.order != NULL ? range.order[place] : place;
    if (at->worst_rank != NULL)
        *at->worst_rank = place;
    return true;
}

/* ---- the best ---- */

/* Larger is better: score, then position. NaN is worst. */
static uint64_t rank_key(float score, int32_t position) {
    uint32_t bits;
    if (isnan(score))
        score = -INFINITY;
    score += 0.0f; /* -0 equals 0 */
    memcpy(&bits, &score, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)position;
}

/* The count-th largest of keys [total], 1 <= count <= total, all distinct; keys are reordered. By bytes from the top:
 * those that share the bytes found so far are the first `total` of keys. bits: above them all keys are the same. */
static uint64_t find_key(uint64_t *keys, uint32_t total, uint32_t count, int bits) {
    for (int shift = bits - 8; shift >= 0 && total > 1; shift -= 8) {
        uint32_t histogram[256] = {0}, left = 0, digit = 255;
        for (uint32_t i = 0; i < total; i++)
            histogram[keys[i] >> shift & 255]++;
        while (histogram[digit] < count)
            count -= histogram[digit--];
        for (uint32_t i = 0; i < total; i++) {
            if ((keys[i] >> shift & 255) == digit)
                keys[left++] = keys[i];
        }
        total = left;
    }
    return keys[0];
}

void score_protect_best(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    const int32_t *positions = unit->scratch->slots[head].positions;
    uint32_t best = unit->layer->budget / 2, total = 0;
    (void)stage;
    for (uint32_t slot = 0; slot < at->view.slots; slot++) {
        if (positions[slot] != KV_NO_POSITION)
            unit->scratch->keys[total++] = rank_key(at->scores[slot], positions[slot]);
    }
    best = best < total ? best : total;
    if (best == 0)
        return;
    uint64_t lowest = find_key(unit->scratch->keys, total, best, 64);
    for (uint32_t slot = 0; slot < at->view.slots; slot++) {
        if (positions[slot] != KV_NO_POSITION && rank_key(at->scores[slot], positions[slot]) >= lowest)
            at->scores[slot] = INFINITY;
    }
}

/* ---- restkv's pooling ---- */

enum { ADAPTIVE_SCALE = 2000, ADAPTIVE_KERNEL = 5 };

static uint32_t ordered_slot(const struct pool_range *range, uint32_t i) {
    return range->order != NULL ? range->order[i] : i;
}

/* Sum of the positions of the `count` slots of the range with the largest numbers in row (f16, not negative, so that
 * their bits are in the order of their values); of equal ones the later slots. */
static uint64_t sum_of_best(
    const struct pool_range *range, const uint16_t *row, uint32_t count, uint64_t *keys, uint64_t *space) {
    uint32_t total = range->end - range->first;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < total; i++) {
        uint32_t slot = ordered_slot(range, range->first + i);
        keys[i] = space[i] = (uint64_t)row[slot] << 32 | (uint32_t)range->positions[slot];
    }
    uint64_t lowest = find_key(space, total, count, 48);
    for (uint32_t i = 0; i < total; i++)
        sum += keys[i] >= lowest ? (uint32_t)keys[i] : 0;
    return sum;
}

struct pool_kernel {
    int64_t reach; /* half the kernel */
    int64_t shift;
};

static struct pool_kernel adapt_kernel(const struct score_unit *unit, uint32_t head, const struct pool_range *range) {
    const struct score_head *at = &unit->layer->heads[head];
    const struct kv_statistics *statistics = &at->statistics;
    uint32_t queries = score_window_rows(unit, statistics), half = queries / 2, protected = 0;
    uint32_t usable = range->end - range->first;
    struct pool_kernel kernel = {ADAPTIVE_KERNEL / 2, 0};
    for (uint32_t slot = 0; slot < at->view.slots; slot++)
    protected += range->positions[slot] != KV_NO_POSITION;
    protected -= usable;
    if (half == 0 || usable == 0 || unit->layer->budget <= protected)
        return kernel;
    uint32_t left = unit->layer->budget - protected, count = left < usable ? left : usable;
    uint64_t sums[2] = {0, 0};
    uint64_t *space = (uint64_t *)unit->scratch->wide;
    for (uint32_t t = 0; t < 2 * half; t++) { /* oldest first */
        const uint16_t *row = statistics->window_rows +
                              (size_t)((unit->layer->seen - queries + t) % statistics->window) * statistics->capacity;
        sums[t / half] += sum_of_best(range, row, count, unit->scratch->keys, space);
    }
    double move = ((double)sums[0] - (double)sums[1]) / ((double)half * (double)count);
    kernel.shift = (int64_t)floor(move / ADAPTIVE_SCALE) + (move > 0 ? 0 : 1);
    int64_t steps = 2 * (int64_t)floor(fabs(move) / ADAPTIVE_SCALE) + 1;
    kernel.reach = (steps > ADAPTIVE_KERNEL ? steps : ADAPTIVE_KERNEL) / 2;
    return kernel;
}

/* Mean over the slots at most reach away from a slot's position less shift, and the slot itself. */
static void pool_mean(
    const int32_t *positions, const float *scores, uint32_t count, struct pool_kernel kernel, float *out) {
    uint32_t first = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t low = positions[i] - kernel.shift - kernel.reach, high = positions[i] - kernel.shift + kernel.reach;
        while (first < count && positions[first] < low)
            first++;
        bool inside = false;
        double sum = 0;
        uint32_t end = first;
        for (; end < count && positions[end] <= high; end++) {
            sum += (double)scores[end];
            inside = inside || end == i;
        }
        sum += inside ? 0 : (double)scores[i];
        out[i] = (float)(sum / (end - first + (inside ? 0 : 1)));
    }
}

void score_pool_adaptive(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    struct pool_range range = pool_range(unit, head);
    struct pool_kernel kernel = adapt_kernel(unit, head, &range);
    int32_t *positions;
    float *scores, *pooled = (float *)unit->scratch->wide;
    uint32_t count = copy_range(unit, head, &range, &positions, &scores);
    (void)stage;
    pool_mean(positions, scores, count, kernel, pooled);
    store_range(unit, head, &range, pooled);
}
