/* SPDX-License-Identifier: Apache-2.0
 *
 * Grammars over bytes: expressions, and the pool that they live in.
 *
 * An expression describes a set of byte strings. It is built bottom-up by the functions here, never changed, and named
 * by its index in the pool; an expression may be part of many others. Recursion goes through rules, which are named
 * before they are defined.
 *
 * | kind    | strings                                                   |
 * |---------|-----------------------------------------------------------|
 * | none    | none at all                                               |
 * | empty   | the empty one                                             |
 * | class   | one byte of a set                                         |
 * | literal | given bytes                                               |
 * | pair    | one of first, then one of second                          |
 * | either  | one of any of the parts                                   |
 * | repeat  | low to high times one of the part                         |
 * | rule    | those of the rule's body                                  |
 *
 * A repeat whose part may be any byte of a set, alone, has that set as its run: so many bytes of the set are so many
 * times the part. (Sets of a few bytes are not worth it and count as none.)
 *
 * Failure sticks: when memory or the limit on expressions runs out, `failed` says so, and everything built afterwards
 * is EXPRESSION_NONE. Builders need to look once, at the end.
 */
#ifndef GRAMMAR_EXPRESSION_H
#define GRAMMAR_EXPRESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum expression_kind {
    KIND_NONE,
    KIND_EMPTY,
    KIND_CLASS,
    KIND_LITERAL,
    KIND_PAIR,
    KIND_EITHER,
    KIND_REPEAT,
    KIND_RULE,
};

enum {
    EXPRESSION_NONE = 0,
    EXPRESSION_EMPTY = 1,
    EXPRESSIONS_MAX = 1 << 18,      /* of a pool */
    EXPRESSION_BYTES_MAX = 4 << 20, /* of all literals of a pool */
    EXPRESSION_PARTS_MAX = 1 << 20, /* of all `either` of a pool */
    EXPRESSION_RULES_MAX = 2000,
    EXPRESSION_UNBOUNDED = 0xffffffff, /* high of a repeat: as often as wanted */
    EXPRESSION_NO_RUN = 0xffffffff,
    EXPRESSION_RUN_LEAST = 16, /* bytes of a run's set */
};

struct byte_set {
    uint64_t words[4]; /* bit b % 64 of word b / 64 */
};

struct expression {
    uint8_t kind;
    bool nullable;   /* has the empty string */
    bool productive; /* has any string; of rules and what contains them known after pool_finish */
    bool text;       /* at least every character that a JSON string may show as it is, one at a time, is in it */
    uint32_t a, b;   /* class: index of its set; literal: first byte, length; pair: first, second; either: first of its
                        parts, their number; repeat: the part, its run; rule: index of the rule */
    uint32_t low, high; /* repeat */
};

struct expression_pool {
    struct expression *expressions;
    uint32_t count, capacity;
    struct byte_set *sets;
    uint32_t sets_count, sets_capacity;
    uint8_t *bytes;
    uint32_t bytes_count, bytes_capacity;
    uint32_t *parts;
    uint32_t parts_count, parts_capacity;
    uint32_t *rules; /* their bodies; EXPRESSION_NONE until defined */
    uint32_t rules_count, rules_capacity;
    bool failed;    /* by memory, unless: */
    bool too_large; /* a limit above was met */
};

void pool_start(struct expression_pool *pool); /* of a zeroed pool */
void pool_release(struct expression_pool *pool);

uint32_t expression_class(struct expression_pool *pool, const struct byte_set *set);
uint32_t expression_range(struct expression_pool *pool, uint8_t low, uint8_t high);
uint32_t expression_bytes(struct expression_pool *pool, const char *bytes, size_t count);
uint32_t expression_word(struct expression_pool *pool, const char *text);
uint32_t expression_pair(struct expression_pool *pool, uint32_t first, uint32_t second);
uint32_t expression_either(struct expression_pool *pool, const uint32_t *parts, size_t count);
uint32_t expression_either_two(struct expression_pool *pool, uint32_t first, uint32_t second);
uint32_t expression_optional(struct expression_pool *pool, uint32_t part);
/* low <= high; a part that has the empty string may be left out low times, too. */
uint32_t expression_repeat(struct expression_pool *pool, uint32_t part, uint32_t low, uint32_t high);
/* Marks a part as `text`. Returns an expression for the same strings. */
uint32_t expression_mark_text(struct expression_pool *pool, uint32_t part);

/* A new rule; its number in *rule. To be defined once, by something that does not have the empty string. */
uint32_t expression_rule(struct expression_pool *pool, uint32_t *rule);
void expression_define(struct expression_pool *pool, uint32_t rule, uint32_t body);

/* Finds out which expressions have any string: call once, when all rules are defined. */
void pool_finish(struct expression_pool *pool);

static inline bool byte_set_has(const struct byte_set *set, uint8_t byte) {
    return (set->words[byte / 64] >> byte % 64 & 1) != 0;
}

static inline void byte_set_add(struct byte_set *set, uint8_t byte) {
    set->words[byte / 64] |= (uint64_t)1 << byte % 64;
}

#endif
