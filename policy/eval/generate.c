/* SPDX-License-Identifier: Apache-2.0
 *
 * An item is planned first: what introduces the text, the facts with their depths, the question. What is left of the
 * length is then filled with pieces (sentences, or pairs of the JSON object), and the facts are put between them.
 */
#include "policy/eval/generate.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "policy/eval/prose.h"

enum { FACTS_MAX = 16, PIECE_MAX = PROSE_SENTENCE_MAX, NEEDLES = 4, CHAINS = 3, HOPS = 4, DEPTHS = 5 };

/* Random numbers of one item. */
struct dice {
    uint64_t seed;
    uint32_t stream, step;
};

static uint32_t roll(struct dice *dice, uint32_t sides) {
    uint32_t words[4];
    random_philox(dice->seed, dice->stream, dice->step++, 0, words);
    return (uint32_t)(((uint64_t)words[0] * sides) >> 32);
}

struct plan {
    const char *intro;
    const char *close; /* after the last piece */
    char *question;
    char *facts[FACTS_MAX]; /* in ascending order of depth */
    double depths[FACTS_MAX];
    uint32_t facts_count;
    char *answers[FACTS_MAX];
    uint32_t answers_count;
    const char *stop;
    uint32_t max_tokens;
    enum eval_metric metric;
    /* Writes piece number `index`, what separates it from the next one included; returns its bytes. */
    size_t (*piece)(const struct plan *plan, uint32_t index, char out[static PIECE_MAX]);
    size_t separator; /* bytes of it, dropped after the last piece */
    uint64_t seed;
    uint32_t stream;
    bool failed; /* an allocation did */
};

static char *print(struct plan *plan, const char *format, ...) __attribute__((format(printf, 2, 3)));
static char *print(struct plan *plan, const char *format, ...) {
    va_list arguments;
    char *text = NULL;
    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) < 0) {
        plan->failed = true;
        text = NULL;
    }
    va_end(arguments);
    return text;
}

static void plan_free(struct plan *plan) {
    free(plan->question);
    for (uint32_t i = 0; i < FACTS_MAX; i++) {
        free(plan->facts[i]);
        free(plan->answers[i]);
    }
}

static void add_fact(struct plan *plan, double depth, char *text) {
    plan->facts[plan->facts_count] = text;
    plan->depths[plan->facts_count++] = depth;
}

static void add_answer(struct plan *plan, char *text) {
    plan->answers[plan->answers_count++] = text;
}

static size_t prose_piece(const struct plan *plan, uint32_t index, char out[static PIECE_MAX]) {
    size_t bytes = prose_sentence(plan->seed, plan->stream, index, out);
    out[bytes++] = ' ';
    out[bytes] = '\0';
    return bytes;
}

/* Distinct numbers below `sides`: out [count]. */
static void roll_distinct(struct dice *dice, uint32_t sides, uint32_t *out, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        bool again;
        do {
            again = false;
            out[i] = roll(dice, sides);
            for (uint32_t j = 0; j < i; j++)
                again = again || out[j] == out[i];
        } while (again);
    }
}

/* ---- needle, multi-needle ---- */

static const char *const cities[] = {"Lisbon", "Oslo", "Nairobi", "Lima", "Kyoto", "Dublin", "Cairo", "Vienna",
    "Jakarta", "Havana", "Warsaw", "Tunis", "Sofia", "Montreal", "Hanoi", "Quito", "Geneva", "Manila", "Accra",
    "Prague", "Denver", "Athens", "Dakar", "Zagreb", "Riga", "Naples", "Bogota", "Seoul", "Chicago", "Madrid"};
enum { CITIES = sizeof cities / sizeof cities[0] };

static void plan_needles(struct plan *plan, struct dice *dice, uint32_t count, double depth) {
    uint32_t city[NEEDLES], number[NEEDLES];
    roll_distinct(dice, CITIES, city, count);
    roll_distinct(dice, 90000, number, count);
    plan->intro = "Some special magic numbers are hidden in the following text. Remember them.\n\n";
    for (uint32_t i = 0; i < count; i++) {
        double at = count == 1 ? depth : (i + roll(dice, 1000) / 1000.0) / count;
        add_fact(plan, at, print(plan, "The special magic number for %s is %u. ", cities[city[i]], 10000 + number[i]));
        add_answer(plan, print(plan, "%u", 10000 + number[i]));
    }
    plan->metric = METRIC_CONTAINS;
    plan->stop = "\n";
}

static void plan_needle(struct plan *plan, struct dice *dice, double depth) {
    plan_needles(plan, dice, 1, depth);
    if (plan->failed)
        return;
    int name = (int)strcspn(plan->facts[0] + strlen("The special magic number for "), " ");
    const char *city = plan->facts[0] + strlen("The special magic number for ");
    plan->question = print(plan,
        "\n\nQuestion: What is the special magic number for %.*s?\nAnswer: The special magic number for %.*s is", name,
        city, name, city);
    plan->max_tokens = 10;
}

static void plan_multi_needle(struct plan *plan, struct dice *dice, double depth) {
    plan_needles(plan, dice, NEEDLES, depth);
    if (plan->failed)
        return;
    char names[NEEDLES][16];
    for (uint32_t i = 0; i < NEEDLES; i++)
        sscanf(plan->facts[i], "The special magic number for %15[A-Za-z]", names[i]);
    plan->question = print(plan,
        "\n\nQuestion: What are the special magic numbers for %s, %s, %s and %s?\n"
        "Answer: The special magic numbers for %s, %s, %s and %s are",
        names[0], names[1], names[2], names[3], names[0], names[1], names[2], names[3]);
    plan->max_tokens = 40;
}

/* ---- kv-retrieval ---- */

/* A bijection of 16 bits, of the item: distinct numbers stay distinct. */
static uint32_t mix(uint64_t seed, uint32_t stream, uint32_t number) {
    uint32_t words[4], mixed = number & 0xffff;
    random_philox(seed, stream, 0, 3, words);
    for (int round = 0; round < 4; round++) {
        mixed = (mixed * 0x6a75 + (words[round] & 0xffff)) & 0xffff;
        mixed ^= mixed >> 7;
        mixed = (mixed * 0x2c1b) & 0xffff;
        mixed ^= mixed >> 9;
    }
    return mixed;
}

static void write_key(const struct plan *plan, uint32_t number, char out[static 16]) {
    static const char *const syllables[] = {
        "ba", "co", "du", "fe", "gi", "ha", "jo", "ku", "le", "mi", "na", "po", "ru", "se", "ti", "wo"};
    uint32_t mixed = mix(plan->seed, plan->stream, number);
    snprintf(out, 16, "%s%s%s%s", syllables[mixed & 15], syllables[mixed >> 4 & 15], syllables[mixed >> 8 & 15],
        syllables[mixed >> 12 & 15]);
}

static uint32_t pair_value(const struct plan *plan, uint32_t number) {
    return 10000 + mix(plan->seed + 1, plan->stream, number);
}

static size_t pair_text(const struct plan *plan, uint32_t number, char out[static PIECE_MAX]) {
    char key[16];
    write_key(plan, number, key);
    return (size_t)snprintf(out, PIECE_MAX, "\"%s\": \"%u\",\n", key, pair_value(plan, number));
}

static size_t pair_piece(const struct plan *plan, uint32_t index, char out[static PIECE_MAX]) {
    return pair_text(plan, index + 1, out);
}

static void plan_kv_retrieval(struct plan *plan, struct dice *dice, double depth) {
    char text[PIECE_MAX], key[16];
    (void)dice;
    plan->piece = pair_piece;
    plan->separator = 2;
    plan->intro = "JSON object with keys and values:\n{\n";
    plan->close = "\n}";
    pair_text(plan, 0, text);
    write_key(plan, 0, key);
    add_fact(plan, depth, print(plan, "%s", text));
    add_answer(plan, print(plan, "%u", pair_value(plan, 0)));
    plan->question =
        print(plan, "\n\nThe value that belongs to the key \"%s\" in the JSON object:\n\"%s\": \"", key, key);
    plan->metric = METRIC_CONTAINS;
    plan->stop = "\"";
    plan->max_tokens = 16;
}

/* ---- variable-tracking ---- */

static void plan_variable_tracking(struct plan *plan, struct dice *dice, double depth) {
    uint32_t codes[CHAINS * HOPS], values[CHAINS];
    char names[CHAINS * HOPS][4];
    (void)depth;
    roll_distinct(dice, 26 * 26 * 26, codes, CHAINS * HOPS);
    roll_distinct(dice, 90000, values, CHAINS);
    for (uint32_t i = 0; i < CHAINS * HOPS; i++)
        snprintf(
            names[i], sizeof names[i], "%c%c%c", 'A' + codes[i] / 676, 'A' + codes[i] / 26 % 26, 'A' + codes[i] % 26);
    plan->intro = "Variables are assigned in the following text. Remember which value each has.\n\n";
    for (uint32_t i = 0; i < CHAINS * HOPS; i++) { /* variable i is hop i / CHAINS of chain i % CHAINS */
        double at = (i + roll(dice, 1000) / 1000.0) / (CHAINS * HOPS);
        if (i < CHAINS)
            add_fact(plan, at, print(plan, "VAR %s = %u. ", names[i], 10000 + values[i]));
        else
            add_fact(plan, at, print(plan, "VAR %s = VAR %s. ", names[i], names[i - CHAINS]));
    }
    uint32_t asked = roll(dice, CHAINS);
    for (uint32_t hop = 0; hop < HOPS; hop++)
        add_answer(plan, print(plan, "%s", names[hop * CHAINS + asked]));
    plan->question = print(plan,
        "\n\nQuestion: Which variables have the value %u?\nAnswer: The variables that have the value %u are VAR",
        10000 + values[asked], 10000 + values[asked]);
    plan->metric = METRIC_CONTAINS;
    plan->stop = "\n";
    plan->max_tokens = 32;
}

/* ---- arithmetic ---- */

static const char *const people[] = {"Mara", "Tom", "Ines", "Paul", "Ruth", "Oscar", "Nina", "Karl", "Dora", "Felix"};
static const char *const goods[] = {"apples", "coins", "books", "eggs", "pencils", "stamps", "plums", "buttons"};
enum { PEOPLE = sizeof people / sizeof people[0], GOODS = sizeof goods / sizeof goods[0] };

/* Four people have some; the first two, in the order of the text or the other one, are asked for. */
static void plan_arithmetic(struct plan *plan, struct dice *dice, double depth) {
    uint32_t person[4], amount[4], first = roll(dice, 4), second = (first + 1 + roll(dice, 3)) % 4;
    const char *good = goods[roll(dice, GOODS)];
    (void)depth;
    roll_distinct(dice, PEOPLE, person, 4);
    plan->intro = "The following text says how many things some people have. Remember the numbers.\n\n";
    for (uint32_t i = 0; i < 4; i++) {
        amount[i] = 2 + roll(dice, 8);
        add_fact(plan, (i + roll(dice, 1000) / 1000.0) / 4,
            print(plan, "%s has %u %s. ", people[person[i]], amount[i], good));
    }
    add_answer(plan, print(plan, "%u", amount[first] + amount[second]));
    plan->question = print(plan, "\n\nQuestion: How many %s do %s and %s have together?\nAnswer: Together they have",
        good, people[person[first]], people[person[second]]);
    plan->metric = METRIC_NUMBER;
    plan->stop = "\n";
    plan->max_tokens = 4; /* a number and a word: no second number */
}

/* ---- filling, composing ---- */

struct task {
    const char *name;
    void (*plan)(struct plan *plan, struct dice *dice, double depth);
    bool has_depth;
};

static const struct task tasks[] = {
    {"needle", plan_needle, true},
    {"multi-needle", plan_multi_needle, false},
    {"kv-retrieval", plan_kv_retrieval, true},
    {"variable-tracking", plan_variable_tracking, false},
    {"arithmetic", plan_arithmetic, false},
};
enum { TASKS = sizeof tasks / sizeof tasks[0] };

const char *eval_generated_tasks(void) {
    return "needle, multi-needle, kv-retrieval, variable-tracking, arithmetic";
}

static const struct task *find_task(const char *name) {
    for (size_t i = 0; i < TASKS; i++)
        if (strcmp(tasks[i].name, name) == 0)
            return &tasks[i];
    return NULL;
}

bool eval_is_generated(const char *task) {
    return find_task(task) != NULL;
}

/* The context with `pieces` pieces of filler; the facts stand before the piece that their depth falls on. NULL: no
 * memory. */
static char *compose(const struct plan *plan, uint32_t pieces) {
    char *text = NULL, piece[PIECE_MAX];
    size_t bytes = 0, last = plan->separator;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL)
        return NULL;
    fputs(plan->intro, out);
    for (uint32_t i = 0, fact = 0; i <= pieces; i++) {
        while (fact < plan->facts_count && (i == pieces || plan->depths[fact] * pieces < i + 0.5))
            fputs(plan->facts[fact++], out);
        if (i < pieces) {
            plan->piece(plan, i, piece);
            fputs(piece, out);
        }
    }
    bool failed = ferror(out) != 0;
    if (fclose(out) != 0 || failed || text == NULL) {
        free(text);
        return NULL;
    }
    char *closed = malloc(bytes - last + strlen(plan->close) + 1);
    if (closed != NULL) {
        memcpy(closed, text, bytes - last);
        strcpy(closed + bytes - last, plan->close);
    }
    free(text);
    return closed;
}

static uint32_t count(const struct eval_generate_options *options, const char *text) {
    return options->count_tokens(options->count_context, text);
}

/* How many pieces fit. Pieces are counted one by one, so that a long text is not counted again and again; what that
 * misses at the joints is corrected on the composed text. */
static int fill(
    const struct eval_generate_options *options, const struct plan *plan, char **context, struct error *error) {
    char piece[PIECE_MAX];
    uint32_t question = count(options, plan->question);
    uint64_t used = question;
    *context = compose(plan, 0);
    if (*context == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for an item of %s", options->task);
    used += count(options, *context);
    if (used > options->length)
        return error_set(error, ERROR_INVALID, "length %u is too short for task %s: it needs at least %llu tokens",
            options->length, options->task, (unsigned long long)used);
    uint32_t pieces = 0;
    for (;; pieces++) {
        plan->piece(plan, pieces, piece);
        used += count(options, piece);
        if (used > options->length + (uint64_t)8)
            break;
    }
    for (;; pieces--) {
        free(*context);
        *context = compose(plan, pieces);
        if (*context == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for an item of %s", options->task);
        if (pieces == 0 || (uint64_t)count(options, *context) + question <= options->length)
            return 0;
    }
}

/* Moves what was planned into an item. */
static int finish_item(struct plan *plan, char *context, struct eval_item *item, struct error *error) {
    item->context = context;
    item->question = plan->question;
    plan->question = NULL;
    item->answers = calloc(plan->answers_count, sizeof *item->answers);
    item->stop = strdup(plan->stop);
    if (item->answers == NULL || item->stop == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for an item");
    for (; item->answers_count < plan->answers_count; item->answers_count++) {
        item->answers[item->answers_count] = plan->answers[item->answers_count];
        plan->answers[item->answers_count] = NULL;
    }
    item->max_tokens = plan->max_tokens;
    item->metric = plan->metric;
    return 0;
}

static int generate_item(const struct eval_generate_options *options, const struct task *task, uint32_t index,
    struct eval_items *items, struct error *error) {
    uint32_t id = (uint32_t)(task - tasks);
    struct dice dice = {.seed = options->seed, .stream = index * TASKS + id};
    double depth = options->depth >= 0 ? options->depth : (double)(index % DEPTHS) / (DEPTHS - 1);
    struct plan plan = {
        .close = "", .piece = prose_piece, .separator = 1, .seed = options->seed ^ 0x70726f7365, .stream = dice.stream};
    char *context = NULL;
    struct eval_item *item = NULL;
    task->plan(&plan, &dice, depth);
    int code = plan.failed ? error_set(error, ERROR_MEMORY, "no memory for an item of %s", options->task) : 0;
    if (code == 0)
        code = fill(options, &plan, &context, error);
    if (code == 0 && (item = eval_items_add(items)) == NULL)
        code = error_set(error, ERROR_MEMORY, "no memory for %u items", options->count);
    if (code == 0) {
        code = finish_item(&plan, context, item, error);
        context = NULL;
    }
    if (code == 0 && task->has_depth && asprintf(&item->group, "depth %.2f", depth) < 0) {
        item->group = NULL;
        code = error_set(error, ERROR_MEMORY, "no memory for an item");
    }
    free(context);
    plan_free(&plan);
    return code;
}

int eval_generate(const struct eval_generate_options *options, struct eval_items *items, struct error *error) {
    const struct task *task = find_task(options->task);
    if (task == NULL)
        return error_set(
            error, ERROR_INVALID, "no generated task '%s', there are: %s", options->task, eval_generated_tasks());
    int code = 0;
    for (uint32_t i = 0; i < options->count && code == 0; i++)
        code = generate_item(options, task, i, items, error);
    return code;
}
