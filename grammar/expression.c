/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/expression.h"

#include <stdlib.h>
#include <string.h>

/* Room for `more` further elements of an array that never has more than `most`; NULL when there is none. */
static void *reserve(struct expression_pool *pool, void *array, uint32_t count, uint32_t *capacity, size_t more,
    uint32_t most, size_t size) {
    if (pool->failed)
        return NULL;
    if (more > most - count) {
        pool->failed = pool->too_large = true;
        return NULL;
    }
    if (count + more <= *capacity)
        return array;
    uint32_t grown = 2 * (count + (uint32_t)more) + 16;
    void *memory = realloc(array, (grown < most ? grown : most) * size);
    if (memory == NULL) {
        pool->failed = true;
        return NULL;
    }
    *capacity = grown < most ? grown : most;
    return memory;
}

static uint32_t add(struct expression_pool *pool, struct expression expression) {
    void *memory =
        reserve(pool, pool->expressions, pool->count, &pool->capacity, 1, EXPRESSIONS_MAX, sizeof *pool->expressions);
    if (memory == NULL)
        return EXPRESSION_NONE;
    pool->expressions = memory;
    pool->expressions[pool->count] = expression;
    return pool->count++;
}

void pool_start(struct expression_pool *pool) {
    add(pool, (struct expression){.kind = KIND_NONE});
    add(pool, (struct expression){.kind = KIND_EMPTY, .nullable = true, .productive = true});
}

void pool_release(struct expression_pool *pool) {
    free(pool->expressions);
    free(pool->sets);
    free(pool->bytes);
    free(pool->parts);
    free(pool->rules);
    *pool = (struct expression_pool){0};
}

static uint32_t add_set(struct expression_pool *pool, const struct byte_set *set) {
    for (uint32_t i = 0; i < pool->sets_count; i++)
        if (memcmp(&pool->sets[i], set, sizeof *set) == 0)
            return i;
    void *memory = reserve(pool, pool->sets, pool->sets_count, &pool->sets_capacity, 1, 4096, sizeof *pool->sets);
    if (memory == NULL)
        return 0;
    pool->sets = memory;
    pool->sets[pool->sets_count] = *set;
    return pool->sets_count++;
}

uint32_t expression_class(struct expression_pool *pool, const struct byte_set *set) {
    if ((set->words[0] | set->words[1] | set->words[2] | set->words[3]) == 0)
        return EXPRESSION_NONE;
    uint32_t index = add_set(pool, set);
    return add(pool, (struct expression){.kind = KIND_CLASS, .productive = true, .a = index});
}

uint32_t expression_range(struct expression_pool *pool, uint8_t low, uint8_t high) {
    struct byte_set set = {0};
    for (unsigned byte = low; byte <= high; byte++)
        byte_set_add(&set, (uint8_t)byte);
    return expression_class(pool, &set);
}

uint32_t expression_bytes(struct expression_pool *pool, const char *bytes, size_t count) {
    if (count == 0)
        return EXPRESSION_EMPTY;
    void *memory = reserve(pool, pool->bytes, pool->bytes_count, &pool->bytes_capacity, count, EXPRESSION_BYTES_MAX, 1);
    if (memory == NULL)
        return EXPRESSION_NONE;
    pool->bytes = memory;
    memcpy(pool->bytes + pool->bytes_count, bytes, count);
    uint32_t first = pool->bytes_count;
    pool->bytes_count += (uint32_t)count;
    return add(pool, (struct expression){.kind = KIND_LITERAL, .productive = true, .a = first, .b = (uint32_t)count});
}

uint32_t expression_word(struct expression_pool *pool, const char *text) {
    return expression_bytes(pool, text, strlen(text));
}

uint32_t expression_pair(struct expression_pool *pool, uint32_t first, uint32_t second) {
    if (first == EXPRESSION_NONE || second == EXPRESSION_NONE)
        return EXPRESSION_NONE;
    if (first == EXPRESSION_EMPTY)
        return second;
    if (second == EXPRESSION_EMPTY)
        return first;
    const struct expression *x = &pool->expressions[first], *y = &pool->expressions[second];
    return add(pool, (struct expression){.kind = KIND_PAIR,
                         .nullable = x->nullable && y->nullable,
                         .productive = x->productive && y->productive,
                         .a = first,
                         .b = second});
}

uint32_t expression_either(struct expression_pool *pool, const uint32_t *parts, size_t count) {
    struct expression either = {.kind = KIND_EITHER, .a = pool->parts_count};
    void *memory = reserve(
        pool, pool->parts, pool->parts_count, &pool->parts_capacity, count, EXPRESSION_PARTS_MAX, sizeof *pool->parts);
    if (memory == NULL)
        return EXPRESSION_NONE;
    pool->parts = memory;
    for (size_t i = 0; i < count; i++) {
        if (parts[i] == EXPRESSION_NONE)
            continue;
        pool->parts[either.a + either.b++] = parts[i];
        either.nullable |= pool->expressions[parts[i]].nullable;
        either.productive |= pool->expressions[parts[i]].productive;
    }
    if (either.b == 0)
        return EXPRESSION_NONE;
    if (either.b == 1)
        return pool->parts[either.a];
    pool->parts_count += either.b;
    return add(pool, either);
}

uint32_t expression_either_two(struct expression_pool *pool, uint32_t first, uint32_t second) {
    return expression_either(pool, (const uint32_t[]){first, second}, 2);
}

uint32_t expression_optional(struct expression_pool *pool, uint32_t part) {
    return expression_either_two(pool, EXPRESSION_EMPTY, part);
}

static int set_count(const struct byte_set *set) {
    return __builtin_popcountll(set->words[0]) + __builtin_popcountll(set->words[1]) +
           __builtin_popcountll(set->words[2]) + __builtin_popcountll(set->words[3]);
}

/* The largest set that a part is, or that is one of its alternatives. */
static uint32_t find_run(const struct expression_pool *pool, uint32_t part) {
    const struct expression *x = &pool->expressions[part];
    uint32_t run = EXPRESSION_NO_RUN;
    int most = EXPRESSION_RUN_LEAST - 1;
    for (uint32_t i = 0; x->kind == KIND_EITHER && i < x->b; i++) {
        const struct expression *alternative = &pool->expressions[pool->parts[x->a + i]];
        if (alternative->kind != KIND_CLASS || set_count(&pool->sets[alternative->a]) <= most)
            continue;
        run = alternative->a;
        most = set_count(&pool->sets[run]);
    }
    return x->kind == KIND_CLASS && set_count(&pool->sets[x->a]) > most ? x->a : run;
}

uint32_t expression_repeat(struct expression_pool *pool, uint32_t part, uint32_t low, uint32_t high) {
    if (high == 0 || part == EXPRESSION_EMPTY)
        return EXPRESSION_EMPTY;
    if (part == EXPRESSION_NONE)
        return low == 0 ? EXPRESSION_EMPTY : EXPRESSION_NONE;
    if (low == 1 && high == 1)
        return part;
    const struct expression *x = &pool->expressions[part];
    if (x->nullable)
        low = 0;
    return add(pool, (struct expression){.kind = KIND_REPEAT,
                         .nullable = low == 0,
                         .productive = low == 0 || x->productive,
                         .a = part,
                         .b = find_run(pool, part),
                         .low = low,
                         .high = high});
}

uint32_t expression_mark_text(struct expression_pool *pool, uint32_t part) {
    if (pool->failed || part == EXPRESSION_NONE)
        return EXPRESSION_NONE;
    struct expression copy = pool->expressions[part];
    copy.text = true;
    return add(pool, copy);
}

uint32_t expression_rule(struct expression_pool *pool, uint32_t *rule) {
    void *memory = reserve(
        pool, pool->rules, pool->rules_count, &pool->rules_capacity, 1, EXPRESSION_RULES_MAX, sizeof *pool->rules);
    *rule = 0;
    if (memory == NULL)
        return EXPRESSION_NONE;
    pool->rules = memory;
    pool->rules[pool->rules_count] = EXPRESSION_NONE;
    *rule = pool->rules_count++;
    return add(pool, (struct expression){.kind = KIND_RULE, .a = *rule});
}

void expression_define(struct expression_pool *pool, uint32_t rule, uint32_t body) {
    if (!pool->failed)
        pool->rules[rule] = body;
}

static bool is_productive(const struct expression_pool *pool, const struct expression *x) {
    switch (x->kind) {
    case KIND_PAIR:
        return pool->expressions[x->a].productive && pool->expressions[x->b].productive;
    case KIND_EITHER:
        for (uint32_t i = 0; i < x->b; i++)
            if (pool->expressions[pool->parts[x->a + i]].productive)
                return true;
        return false;
    case KIND_REPEAT:
        return x->low == 0 || pool->expressions[x->a].productive;
    case KIND_RULE:
        return pool->expressions[pool->rules[x->a]].productive;
    default:
        return x->productive;
    }
}

/* Parts come before what they are part of, so that a pass settles all but what depends on rules defined later: of those
 * as many passes are needed as rules lie on the longest chain, mostly a few. */
void pool_finish(struct expression_pool *pool) {
    bool changed = !pool->failed;
    while (changed) {
        changed = false;
        for (uint32_t i = 0; i < pool->count; i++) {
            struct expression *x = &pool->expressions[i];
            if (!x->productive && is_productive(pool, x))
                x->productive = changed = true;
        }
    }
}
