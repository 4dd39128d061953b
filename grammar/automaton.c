/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/automaton.h"

#include "grammar/slice.h"

#include <stdlib.h>
#include <string.h>

enum {
    STACK_END = 0, /* nothing left to write */
    STATE_DEAD = 0,
    NOTHING = 0xffffffff, /* no stack, row or mask; a byte whose state is not known yet */
    RUN_MOST = SLICE_OTHERS - 1,
};

struct stack {
    uint32_t expression;
    uint32_t low;  /* literal: bytes written; repeat: how often it must still come */
    uint32_t high; /* repeat: how often it may still come */
    uint32_t below;
    uint32_t mark; /* number of the closure that met it last */
};

struct state {
    uint32_t first, count; /* stacks, ascending: in `lists` */
    uint32_t leaves;       /* in `lists`: stacks with a class or a literal on top, */
    uint32_t plain_count;  /* first those that need not be looked at when all shown tokens are known to fit, */
    uint32_t leaves_count; /* then those of characters of a string; of both together */
    uint32_t text;         /* shown characters that a string may still have; 0: not in a string */
    uint32_t run;          /* index of a set of bytes, */
    uint32_t run_most;     /* as many of which may follow; 0: none is known to */
    uint32_t mask;         /* in `masks` */
    bool may_end;
};

/* A node of the vocabulary's trie on the way of a walk. */
struct walked {
    const struct slice *slice; /* of the state's run; NULL: none */
    uint32_t state;
    uint8_t most; /* bytes of the run */
    bool known;   /* the bytes so far are of the run that the walk began in */
};

enum { HELD_MAX = 8 };

struct held {
    uint32_t run;
    const struct slice *slice; /* NULL: there was none to be had */
};

/* A growing array of numbers. */
struct numbers {
    uint32_t *items;
    uint32_t count, capacity;
};

/* Open addressing: indexes + 1 by hash, 0: free. */
struct table {
    uint32_t *slots;
    uint32_t capacity; /* a power of two */
};

struct automaton {
    const struct expression_pool *pool;
    uint32_t root;
    const struct grammar_vocabulary *vocabulary;
    struct stack *stacks;
    uint32_t stacks_count, stacks_capacity;
    struct table stacks_table;
    struct state *states;
    uint32_t states_count, states_capacity, row_of_capacity, most_of_capacity;
    uint8_t *most_of; /* [states_capacity] bytes of its run that a state surely goes on with, at most RUN_MOST */
    struct table states_table;
    struct numbers lists;
    uint32_t *row_of; /* [states_capacity] in `rows`: where the bytes of a state lead; NOTHING: not known of any */
    uint32_t (*rows)[256];
    uint32_t rows_count, rows_capacity;
    uint32_t *masks;
    uint32_t masks_count, masks_capacity;
    struct numbers work, later, kernel; /* of a closure; of a step */
    struct walked *walk;                /* [longest + 1] */
    struct held held[HELD_MAX];         /* slices, while a mask is made */
    uint32_t held_count;
    uint32_t closures, epoch, steps;
    size_t bytes; /* allocated */
    uint64_t masks_asked, masks_made;
    int failed; /* code of what went wrong; until the next call from outside */
};

/* ---- memory ---- */

static void fail(struct automaton *a, int code) {
    if (a->failed == 0)
        a->failed = code;
}

static int report(struct automaton *a, struct error *error) {
    int code = a->failed;
    a->failed = 0;
    return code == ERROR_MEMORY ? error_set(error, code, "no memory to follow the schema")
                                : error_set(error, code, "the schema is too ambiguous to be followed");
}

/* Doubles an array when it is full. Returns it, or NULL after a failure. */
static void *grow(struct automaton *a, void *array, uint32_t count, uint32_t *capacity, size_t size) {
    if (count < *capacity)
        return array;
    uint32_t grown = *capacity == 0 ? 16 : 2 * *capacity;
    size_t more = (grown - *capacity) * size;
    if (a->bytes + more > AUTOMATON_BYTES_MAX) {
        fail(a, ERROR_UNSUPPORTED);
        return NULL;
    }
    void *memory = realloc(array, grown * size);
    if (memory == NULL) {
        fail(a, ERROR_MEMORY);
        return NULL;
    }
    a->bytes += more;
    *capacity = grown;
    return memory;
}

static void append(struct automaton *a, struct numbers *numbers, uint32_t number) {
    void *items = grow(a, numbers->items, numbers->count, &numbers->capacity, sizeof *numbers->items);
    if (items == NULL)
        return;
    numbers->items = items;
    numbers->items[numbers->count++] = number;
}

static uint64_t mix(uint64_t hash, uint32_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Makes room for one more of count entries. hash_of: of an entry. */
static bool table_reserve(
    struct automaton *a, struct table *table, uint32_t count, uint64_t (*hash_of)(const struct automaton *, uint32_t)) {
    if (2 * (count + 1) <= table->capacity)
        return true;
    uint32_t capacity = table->capacity == 0 ? 256 : 2 * table->capacity;
    uint32_t *slots = calloc(capacity, sizeof *slots);
    if (slots == NULL) {
        fail(a, ERROR_MEMORY);
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = (uint32_t)hash_of(a, i) & (capacity - 1);
        while (slots[at] != 0)
            at = (at + 1) & (capacity - 1);
        slots[at] = i + 1;
    }
    a->bytes += (capacity - table->capacity) * sizeof *slots;
    free(table->slots);
    *table = (struct table){slots, capacity};
    return true;
}

/* ---- stacks ---- */

static uint64_t hash_stack(uint32_t expression, uint32_t low, uint32_t high, uint32_t below) {
    return mix(mix(mix(mix(1, expression), low), high), below);
}

static uint64_t stack_hash(const struct automaton *a, uint32_t index) {
    const struct stack *stack = &a->stacks[index];
    return hash_stack(stack->expression, stack->low, stack->high, stack->below);
}

static uint32_t find_stack(struct automaton *a, uint32_t expression, uint32_t low, uint32_t high, uint32_t below) {
    if (!table_reserve(a, &a->stacks_table, a->stacks_count, stack_hash))
        return NOTHING;
    uint32_t last = a->stacks_table.capacity - 1, at = (uint32_t)hash_stack(expression, low, high, below) & last;
    for (; a->stacks_table.slots[at] != 0; at = (at + 1) & last) {
        const struct stack *stack = &a->stacks[a->stacks_table.slots[at] - 1];
        if (stack->expression == expression && stack->low == low && stack->high == high && stack->below == below)
            return a->stacks_table.slots[at] - 1;
    }
    void *stacks = grow(a, a->stacks, a->stacks_count, &a->stacks_capacity, sizeof *a->stacks);
    if (stacks == NULL)
        return NOTHING;
    a->stacks = stacks;
    a->stacks[a->stacks_count] = (struct stack){expression, low, high, below, 0};
    a->stacks_table.slots[at] = a->stacks_count + 1;
    return a->stacks_count++;
}

/* An expression on top of a stack; NOTHING where it has no string, or after a failure. */
static uint32_t put(struct automaton *a, uint32_t expression, uint32_t below) {
    const struct expression *x = &a->pool->expressions[expression];
    if (below == NOTHING || !x->productive)
        return NOTHING;
    if (x->kind == KIND_EMPTY)
        return below;
    return x->kind == KIND_REPEAT ? find_stack(a, expression, x->low, x->high, below)
                                  : find_stack(a, expression, 0, 0, below);
}

/* ---- states ---- */

static uint64_t hash_list(const uint32_t *list, uint32_t count) {
    uint64_t hash = 2;
    for (uint32_t i = 0; i < count; i++)
        hash = mix(hash, list[i]);
    return hash;
}

static uint64_t state_hash(const struct automaton *a, uint32_t index) {
    return hash_list(a->lists.items + a->states[index].first, a->states[index].count);
}

static void meet(struct automaton *a, struct numbers *list, uint32_t stack) {
    if (stack == NOTHING || a->stacks[stack].mark == a->closures)
        return;
    if (++a->steps > AUTOMATON_WORK_MAX)
        fail(a, ERROR_UNSUPPORTED);
    a->stacks[stack].mark = a->closures;
    append(a, list, stack);
}

/* Of several runs the first; of the same set the longest. */
static void note_run(struct state *state, const struct expression *repeat, uint32_t most) {
    if (repeat->b == EXPRESSION_NO_RUN || (state->run_most > 0 && state->run != repeat->b))
        return;
    state->run = repeat->b;
    state->run_most = most > state->run_most ? most : state->run_most;
}

/* Puts what the top of a stack may become in its place, or the stack among the leaves. */
static void expand(struct automaton *a, struct state *state, uint32_t index, bool later) {
    struct stack stack = a->stacks[index]; /* the array may move */
    if (index == STACK_END) {
        state->may_end = true;
        return;
    }
    const struct expression *x = &a->pool->expressions[stack.expression];
    uint32_t high;
    switch (x->kind) {
    case KIND_PAIR:
        meet(a, &a->work, put(a, x->a, put(a, x->b, stack.below)));
        return;
    case KIND_EITHER:
        for (uint32_t i = 0; i < x->b && a->failed == 0; i++)
            meet(a, &a->work, put(a, a->pool->parts[x->a + i], stack.below));
        return;
    case KIND_RULE:
        meet(a, &a->work, put(a, a->pool->rules[x->a], stack.below));
        return;
    case KIND_REPEAT:
        if (!later && stack.low == 0)
            meet(a, &a->work, stack.below);
        if (!later && a->pool->expressions[x->a].text) {
            append(a, &a->later, index);
            state->text = stack.high > state->text ? stack.high : state->text;
            return;
        }
        note_run(state, x, stack.high);
        high = stack.high == EXPRESSION_UNBOUNDED ? stack.high : stack.high - 1;
        meet(a, &a->work,
            put(a, x->a,
                high == 0 ? stack.below
                          : find_stack(a, stack.expression, stack.low > 0 ? stack.low - 1 : 0, high, stack.below)));
        return;
    default:
        append(a, &a->lists, index);
    }
}

static void close_state(struct automaton *a, struct state *state) {
    a->closures++;
    a->work.count = a->later.count = 0;
    for (uint32_t i = 0; i < state->count; i++)
        meet(a, &a->work, a->lists.items[state->first + i]);
    state->leaves = a->lists.count;
    while (a->work.count > 0 && a->failed == 0)
        expand(a, state, a->work.items[--a->work.count], false);
    state->plain_count = a->lists.count - state->leaves;
    for (uint32_t i = 0; i < a->later.count && a->failed == 0; i++) {
        expand(a, state, a->later.items[i], true);
        while (a->work.count > 0 && a->failed == 0)
            expand(a, state, a->work.items[--a->work.count], false);
    }
    state->leaves_count = a->lists.count - state->leaves;
}

static int compare_numbers(const void *x, const void *y) {
    uint32_t a = *(const uint32_t *)x, b = *(const uint32_t *)y;
    return a < b ? -1 : a > b;
}

/* Puts a state at the end of the array, without counting it. */
static bool add_state(struct automaton *a, const struct state *state) {
    void *states = grow(a, a->states, a->states_count, &a->states_capacity, sizeof *a->states);
    if (states == NULL)
        return false;
    a->states = states;
    void *row_of = grow(a, a->row_of, a->states_count, &a->row_of_capacity, sizeof *a->row_of);
    if (row_of == NULL)
        return false;
    a->row_of = row_of;
    void *most_of = grow(a, a->most_of, a->states_count, &a->most_of_capacity, sizeof *a->most_of);
    if (most_of == NULL)
        return false;
    a->most_of = most_of;
    a->most_of[a->states_count] = state->run_most < RUN_MOST ? (uint8_t)state->run_most : RUN_MOST;
    a->states[a->states_count] = *state;
    a->row_of[a->states_count] = NOTHING;
    return true;
}

/* The state of the stacks in `kernel`, which is sorted here. */
static uint32_t find_state(struct automaton *a) {
    struct numbers *kernel = &a->kernel;
    uint32_t count = 0;
    if (kernel->count == 0)
        return STATE_DEAD;
    if (kernel->count > 1)
        qsort(kernel->items, kernel->count, sizeof *kernel->items, compare_numbers);
    for (uint32_t i = 0; i < kernel->count; i++)
        if (count == 0 || kernel->items[count - 1] != kernel->items[i])
            kernel->items[count++] = kernel->items[i];
    if (!table_reserve(a, &a->states_table, a->states_count, state_hash))
        return STATE_DEAD;
    uint32_t last = a->states_table.capacity - 1, at = (uint32_t)hash_list(kernel->items, count) & last;
    for (; a->states_table.slots[at] != 0; at = (at + 1) & last) {
        const struct state *state = &a->states[a->states_table.slots[at] - 1];
        if (state->count == count &&
            memcmp(a->lists.items + state->first, kernel->items, count * sizeof *kernel->items) == 0)
            return a->states_table.slots[at] - 1;
    }
    struct state state = {.first = a->lists.count, .count = count, .mask = NOTHING};
    for (uint32_t i = 0; i < count; i++)
        append(a, &a->lists, kernel->items[i]);
    if (a->failed == 0)
        close_state(a, &state);
    if (!add_state(a, &state) || a->failed != 0)
        return STATE_DEAD;
    a->states_table.slots[at] = a->states_count + 1;
    return a->states_count++;
}

/* The bytes that a stack with a class or a literal on top goes on with. */
static struct byte_set leaf_bytes(const struct automaton *a, const struct stack *stack) {
    const struct expression *x = &a->pool->expressions[stack->expression];
    struct byte_set set = {0};
    if (x->kind == KIND_CLASS)
        return a->pool->sets[x->a];
    byte_set_add(&set, a->pool->bytes[x->a + stack->low]);
    return set;
}

static void make_row(struct automaton *a, uint32_t state) {
    void *rows = grow(a, a->rows, a->rows_count, &a->rows_capacity, sizeof *a->rows);
    if (rows == NULL)
        return;
    a->rows = rows;
    memset(a->rows[a->rows_count], 0xff, sizeof *a->rows);
    a->row_of[state] = a->rows_count++;
}

/* Where a byte leads that no row knows yet: and with it all bytes that the state's leaves do not tell from it. */
static uint32_t step_anew(struct automaton *a, uint32_t from, uint8_t byte) {
    struct state state = a->states[from];
    struct byte_set same = {{~0ull, ~0ull, ~0ull, ~0ull}};
    a->kernel.count = 0;
    for (uint32_t i = 0; i < state.leaves_count && a->failed == 0; i++) {
        struct stack stack = a->stacks[a->lists.items[state.leaves + i]];
        const struct expression *x = &a->pool->expressions[stack.expression];
        struct byte_set bytes = leaf_bytes(a, &stack);
        uint64_t flip = byte_set_has(&bytes, byte) ? 0 : ~0ull;
        for (int word = 0; word < 4; word++)
            same.words[word] &= bytes.words[word] ^ flip;
        if (flip != 0)
            continue;
        bool done = x->kind == KIND_CLASS || stack.low + 1 == x->b;
        uint32_t next = done ? stack.below : find_stack(a, stack.expression, stack.low + 1, 0, stack.below);
        append(a, &a->kernel, next);
    }
    a->steps += state.leaves_count;
    uint32_t to = a->failed == 0 ? find_state(a) : STATE_DEAD;
    if (a->row_of[from] == NOTHING)
        make_row(a, from);
    if (a->failed != 0)
        return STATE_DEAD;
    uint32_t *row = a->rows[a->row_of[from]];
    for (unsigned word = 0; word < 4; word++)
        for (uint64_t left = same.words[word]; left != 0; left &= left - 1)
            row[64 * word + (unsigned)__builtin_ctzll(left)] = to;
    return to;
}

static inline uint32_t step(struct automaton *a, uint32_t from, uint8_t byte) {
    uint32_t row = a->row_of[from], to = row == NOTHING ? NOTHING : a->rows[row][byte];
    return to != NOTHING ? to : step_anew(a, from, byte);
}

/* ---- life ---- */

static void release(struct automaton *a) {
    free(a->stacks);
    free(a->stacks_table.slots);
    free(a->states);
    free(a->states_table.slots);
    free(a->lists.items);
    free(a->row_of);
    free(a->most_of);
    free(a->rows);
    free(a->masks);
    free(a->work.items);
    free(a->later.items);
    free(a->kernel.items);
}

/* As new, without what it had allocated. */
static void forget(struct automaton *a) {
    *a = (struct automaton){.pool = a->pool,
        .root = a->root,
        .vocabulary = a->vocabulary,
        .walk = a->walk,
        .epoch = a->epoch,
        .masks_asked = a->masks_asked,
        .masks_made = a->masks_made};
}

/* The first stack and state: nothing left to write, and nowhere. */
static void prepare(struct automaton *a) {
    a->epoch++;
    find_stack(a, EXPRESSION_EMPTY, 0, 0, 0);
    const struct state dead = {.mask = NOTHING};
    if (table_reserve(a, &a->states_table, 0, state_hash) && add_state(a, &dead))
        a->states_count = 1;
}

struct automaton *automaton_create(
    const struct grammar *grammar, const struct grammar_vocabulary *vocabulary, struct error *error) {
    struct automaton *a = calloc(1, sizeof *a);
    if (a != NULL) {
        a->pool = &grammar->pool;
        a->root = grammar->root;
        a->vocabulary = vocabulary;
        a->walk = malloc(((vocabulary == NULL ? 0 : vocabulary->longest) + 1) * sizeof *a->walk);
        prepare(a);
        if (a->walk != NULL && a->failed == 0)
            return a;
    }
    automaton_free(a);
    error_set(error, ERROR_MEMORY, "no memory to follow the schema");
    return NULL;
}

void automaton_free(struct automaton *a) {
    if (a == NULL)
        return;
    release(a);
    free(a->walk);
    free(a);
}

/* A stack of another automaton, made here from its lowest entry up. */
static uint32_t move_stack(struct automaton *a, const struct automaton *from, uint32_t index) {
    uint32_t moved = STACK_END;
    a->work.count = 0;
    for (; index != STACK_END; index = from->stacks[index].below)
        append(a, &a->work, index);
    while (a->work.count > 0 && a->failed == 0) {
        const struct stack *stack = &from->stacks[a->work.items[--a->work.count]];
        moved = find_stack(a, stack->expression, stack->low, stack->high, moved);
    }
    return moved;
}

static void move_place(struct automaton *a, const struct automaton *from, struct automaton_place *place) {
    const struct state *state = &from->states[place->state];
    a->kernel.count = 0;
    for (uint32_t i = 0; i < state->count && a->failed == 0; i++)
        append(a, &a->kernel, move_stack(a, from, from->lists.items[state->first + i]));
    uint32_t moved = a->failed == 0 ? find_state(a) : STATE_DEAD;
    if (a->failed == 0)
        *place = (struct automaton_place){moved, a->epoch};
}

void automaton_trim(struct automaton *a, struct automaton_place *places, size_t stride, uint32_t count) {
    if (a->bytes <= AUTOMATON_BYTES_KEPT)
        return;
    struct automaton old = *a;
    forget(a);
    prepare(a); /* without memory: states_count stays 0, and automaton_start says so */
    for (uint32_t i = 0; i < count && a->failed == 0; i++) {
        struct automaton_place *place = (void *)((char *)places + i * stride);
        a->steps = 0;
        if (place->epoch == old.epoch)
            move_place(a, &old, place);
    }
    a->failed = 0; /* places that were not moved are lost */
    release(&old);
}

bool automaton_is_lost(const struct automaton *a, const struct automaton_place *place) {
    return place->epoch != a->epoch;
}

/* ---- following ---- */

int automaton_start(struct automaton *a, struct automaton_place *place, struct error *error) {
    a->steps = 0;
    if (a->states_count == 0)
        return error_set(error, ERROR_MEMORY, "no memory to follow the schema");
    a->kernel.count = 0;
    uint32_t stack = put(a, a->root, STACK_END);
    if (stack != NOTHING)
        append(a, &a->kernel, stack);
    uint32_t state = a->failed == 0 ? find_state(a) : STATE_DEAD;
    if (a->failed != 0)
        return report(a, error);
    *place = (struct automaton_place){state, a->epoch};
    return state != STATE_DEAD ? 0 : error_set(error, ERROR_INVALID, "there is nothing that satisfies the schema");
}

int automaton_advance(
    struct automaton *a, struct automaton_place *place, const void *bytes, size_t count, struct error *error) {
    const uint8_t *at = bytes;
    uint32_t state = place->state;
    a->steps = 0;
    for (size_t i = 0; i < count; i++) {
        state = step(a, state, at[i]);
        if (a->failed != 0)
            return report(a, error);
        if (state == STATE_DEAD)
            return error_set(error, ERROR_INVALID, "byte %zu is not allowed by the schema", i);
    }
    place->state = state;
    return 0;
}

bool automaton_may_end(const struct automaton *a, const struct automaton_place *place) {
    return a->states[place->state].may_end;
}

bool automaton_must_end(const struct automaton *a, const struct automaton_place *place) {
    const struct state *state = &a->states[place->state];
    return state->may_end && state->leaves_count == 0;
}

int automaton_bytes(
    struct automaton *a, const struct automaton_place *place, struct byte_set *bytes, struct error *error) {
    *bytes = (struct byte_set){0};
    a->steps = 0;
    for (unsigned byte = 0; byte < 256; byte++)
        if (step(a, place->state, (uint8_t)byte) != STATE_DEAD)
            byte_set_add(bytes, (uint8_t)byte);
    return a->failed == 0 ? 0 : report(a, error);
}

/* ---- masks ---- */

static inline void allow_token(uint32_t token, uint32_t *mask) {
    mask[token / 32] |= 1u << token % 32;
}

static void walk_trie(struct automaton *a, const struct trie *trie, uint32_t state, uint32_t *mask) {
    struct walked *walk = a->walk;
    walk[0].state = state;
    for (uint32_t i = 0; i < trie->count;) {
        const struct trie_node *node = &trie->nodes[i];
        uint32_t to = step(a, walk[node->depth].state, node->byte);
        if (to == STATE_DEAD) {
            if (a->failed != 0)
                return;
            i = node->skip;
            continue;
        }
        walk[node->depth + 1].state = to;
        for (uint32_t k = 0; k < node->tokens; k++)
            allow_token((uint32_t)trie->tokens[node->first + k], mask);
        i++;
    }
}

/* The slice of a run, held until the mask is made. NULL: there is none. */
static const struct slice *hold_slice(struct automaton *a, uint32_t run) {
    for (uint32_t i = 0; i < a->held_count; i++)
        if (a->held[i].run == run)
            return a->held[i].slice;
    if (a->held_count == HELD_MAX)
        return NULL;
    const struct slice *slice = slice_take(a->vocabulary, &a->pool->sets[run]);
    a->held[a->held_count++] = (struct held){run, slice};
    return slice;
}

static void release_slices(struct automaton *a) {
    while (a->held_count > 0) {
        const struct slice *slice = a->held[--a->held_count].slice;
        if (slice != NULL)
            slice_give_back(a->vocabulary, slice);
    }
}

static inline void enter(struct automaton *a, struct walked *walked, uint32_t state) {
    walked->state = state;
    walked->most = a->most_of[state];
    walked->slice = walked->most > 0 ? hold_slice(a, a->states[state].run) : NULL;
}

/* Like walk_trie over all tokens, but that branches are allowed as a whole where a run has all their bytes. Those of
 * the run that the text itself is in are in the mask from the beginning. */
static void walk_runs(struct automaton *a, uint32_t state, uint32_t *mask) {
    const struct trie *trie = &a->vocabulary->all;
    struct walked *walk = a->walk;
    enter(a, &walk[0], state);
    const struct slice *first = walk[0].slice;
    uint32_t known = first == NULL ? 0 : walk[0].most < SLICE_LENGTHS ? walk[0].most : SLICE_LENGTHS;
    walk[0].known = first != NULL;
    if (first != NULL)
        memcpy(mask, first->tokens + (size_t)known * a->vocabulary->words, a->vocabulary->words * sizeof *mask);
    for (uint32_t i = 0; i < trie->count;) {
        const struct trie_node *node = &trie->nodes[i];
        const struct walked *from = &walk[node->depth];
        if (from->known && node->depth + first->below[i] <= known) {
            i = node->skip;
            continue;
        }
        if (from->slice != NULL && from->slice->below[i] <= from->most) {
            for (uint32_t k = node->first; k < trie->nodes[node->skip].first; k++)
                allow_token((uint32_t)trie->tokens[k], mask);
            i = node->skip;
            continue;
        }
        uint32_t to = step(a, from->state, node->byte);
        if (to == STATE_DEAD) {
            if (a->failed != 0)
                return;
            i = node->skip;
            continue;
        }
        for (uint32_t k = 0; k < node->tokens; k++)
            allow_token((uint32_t)trie->tokens[node->first + k], mask);
        if (++i < node->skip) {
            enter(a, &walk[node->depth + 1], to);
            walk[node->depth + 1].known = from->known && byte_set_has(&first->set, node->byte);
        }
    }
}

/* Whether a shown token may begin by one of the state's leaves outside of strings. */
static bool plain_shows(const struct automaton *a, const struct state *state) {
    static const struct byte_set shown = {{~0xffffffffull & ~(1ull << '"'), ~(1ull << ('\\' - 64)), ~0ull, ~0ull}};
    uint64_t any = 0;
    for (uint32_t i = 0; i < state->plain_count; i++) {
        struct byte_set bytes = leaf_bytes(a, &a->stacks[a->lists.items[state->leaves + i]]);
        for (int word = 0; word < 4; word++)
            any |= bytes.words[word] & shown.words[word];
    }
    return any != 0;
}

static void compute_mask(struct automaton *a, uint32_t index, uint32_t *mask) {
    const struct grammar_vocabulary *vocabulary = a->vocabulary;
    struct state state = a->states[index];
    memset(mask, 0, vocabulary->words * sizeof *mask);
    if (state.text == 0) {
        walk_runs(a, index, mask);
    } else {
        uint32_t most = state.text < vocabulary->shown_longest ? state.text : vocabulary->shown_longest;
        memcpy(mask, vocabulary->shown + (size_t)most * vocabulary->words, vocabulary->words * sizeof *mask);
        walk_trie(a, &vocabulary->rest, index, mask);
        if (plain_shows(a, &state)) {
            a->kernel.count = 0;
            for (uint32_t i = 0; i < state.plain_count; i++)
                append(a, &a->kernel, a->lists.items[state.leaves + i]);
            walk_trie(a, &vocabulary->all, find_state(a), mask);
        }
    }
    release_slices(a);
    for (uint32_t i = 0; state.may_end && i < vocabulary->words; i++)
        mask[i] |= vocabulary->ends[i];
}

static uint32_t remember_mask(struct automaton *a, uint32_t state) {
    size_t words = a->vocabulary->words;
    void *masks = grow(a, a->masks, a->masks_count, &a->masks_capacity, words * sizeof *a->masks);
    if (masks == NULL)
        return NOTHING;
    a->masks = masks;
    compute_mask(a, state, a->masks + a->masks_count * words);
    a->masks_made++;
    if (a->failed != 0)
        return NOTHING;
    a->states[state].mask = a->masks_count;
    return a->masks_count++;
}

int automaton_mask(struct automaton *a, const struct automaton_place *place, uint32_t *mask, struct error *error) {
    size_t words = a->vocabulary->words;
    uint32_t index = a->states[place->state].mask, any = 0;
    a->steps = 0;
    a->masks_asked++;
    if (index == NOTHING)
        index = remember_mask(a, place->state);
    if (index == NOTHING)
        return report(a, error);
    memcpy(mask, a->masks + index * words, words * sizeof *mask);
    for (size_t i = 0; i < words; i++)
        any |= mask[i];
    return any != 0 ? 0 : error_set(error, ERROR_INVALID, "no token of the model goes on with what the schema allows");
}

void automaton_get_figures(const struct automaton *a, struct automaton_figures *out) {
    *out = (struct automaton_figures){.states = a->states_count,
        .stacks = a->stacks_count,
        .masks = a->masks_asked,
        .masks_made = a->masks_made,
        .bytes = a->bytes};
}
