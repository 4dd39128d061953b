/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fuzz/fuzz.h"

#include "engine/random.h"

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MUTATIONS_MAX = 4, INSERT_MAX = 16, START_BYTES = 2048 };

struct input {
    uint8_t *data;
    size_t bytes;
};

struct corpus {
    struct input *inputs;
    size_t count;
};

/* Random numbers of one run. */
struct dice {
    uint64_t seed;
    uint32_t run;
    uint32_t thrown;
};

static const char *program;
static struct input current; /* what is being tried, for the report of a crash */

/* Present when the program is built with a sanitizer, which ends it without a signal. */
extern void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void *check_memory(void *memory) {
    if (memory == NULL) {
        fputs("no memory\n", stderr);
        exit(2);
    }
    return memory;
}

static void save_current(void) {
    char path[256];
    const char *slash = strrchr(program, '/');
    snprintf(path, sizeof path, "crash-%s", slash == NULL ? program : slash + 1);
    FILE *file = fopen(path, "wb");
    if (file == NULL)
        return;
    if (current.bytes > 0)
        fwrite(current.data, 1, current.bytes, file);
    fclose(file);
    fprintf(stderr, "the input that failed is in %s\n", path);
}

static void on_signal(int number) {
    signal(number, SIG_DFL);
    save_current();
    raise(number);
}

/* SIGTERM is what a test that hangs is ended by. */
static void catch_crashes(void) {
    signal(SIGTERM, on_signal);
    if (__sanitizer_set_death_callback != NULL) {
        __sanitizer_set_death_callback(save_current);
        signal(SIGABRT, on_signal);
        return;
    }
    const int signals[] = {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE};
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++)
        signal(signals[i], on_signal);
}

static void add_input(struct corpus *corpus, uint8_t *data, size_t bytes) {
    corpus->inputs = check_memory(realloc(corpus->inputs, (corpus->count + 1) * sizeof *corpus->inputs));
    corpus->inputs[corpus->count++] = (struct input){data, bytes};
}

static void add_file(struct corpus *corpus, const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        exit(2);
    }
    size_t bytes = (size_t)ftell(file);
    uint8_t *data = check_memory(malloc(bytes + 1));
    rewind(file);
    bytes = fread(data, 1, bytes, file);
    fclose(file);
    add_input(corpus, data, bytes);
}

static void write_seeds(const struct corpus *corpus, const char *folder) {
    for (size_t i = 0; i < corpus->count; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/seed-%zu", folder, i);
        FILE *file = fopen(path, "wb");
        if (file == NULL ||
            fwrite(corpus->inputs[i].data, 1, corpus->inputs[i].bytes, file) != corpus->inputs[i].bytes) {
            perror(path);
            exit(2);
        }
        fclose(file);
    }
}

static uint32_t throw_dice(struct dice *dice) {
    uint32_t words[4];
    random_philox(dice->seed, dice->run, dice->thrown++, 0, words);
    return words[0];
}

/* 0 to limit - 1; 0 when limit is 0. */
static size_t throw_below(struct dice *dice, size_t limit) {
    return limit == 0 ? 0 : throw_dice(dice) % limit;
}

/* A place in the input. Half of them are near the start, since that is where formats keep what the rest depends on. */
static size_t throw_place(struct dice *dice, size_t limit) {
    bool near = throw_below(dice, 2) == 0;
    return throw_below(dice, near && limit > START_BYTES ? START_BYTES : limit);
}

/* Overwrites 1, 2, 4 or 8 bytes by a number that lies at some limit. */
static void put_number(struct dice *dice, struct input *input) {
    static const uint64_t numbers[] = {0, 1, 2, 15, 16, 31, 32, 33, 127, 128, 255, 256, 0x7fff, 0x8000, 0xffff, 0x10000,
        0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, 0x3fffffffffffffff, 0x7fffffffffffffff, 0x8000000000000000,
        0xfffffffffffffff0, 0xffffffffffffffff};
    uint64_t number = numbers[throw_below(dice, sizeof numbers / sizeof numbers[0])];
    size_t width = (size_t)1 << throw_below(dice, 4);
    if (width > input->bytes)
        return;
    size_t at = throw_place(dice, input->bytes - width + 1);
    for (size_t i = 0; i < width; i++)
        input->data[at + i] = (uint8_t)(number >> (8 * i));
}

static void insert_bytes(struct dice *dice, struct input *input) {
    size_t at = throw_place(dice, input->bytes + 1);
    size_t count = 1 + throw_below(dice, INSERT_MAX);
    uint8_t byte = (uint8_t)throw_dice(dice);
    input->data = check_memory(realloc(input->data, input->bytes + count + 1));
    memmove(input->data + at + count, input->data + at, input->bytes - at);
    memset(input->data + at, byte, count);
    input->bytes += count;
}

static void erase_bytes(struct dice *dice, struct input *input) {
    size_t at = throw_place(dice, input->bytes);
    size_t count = throw_below(dice, INSERT_MAX);
    if (count > input->bytes - at)
        count = input->bytes - at;
    memmove(input->data + at, input->data + at + count, input->bytes - at - count);
    input->bytes -= count;
}

/* Overwrites a stretch by one from elsewhere in the same input or in another. */
static void copy_stretch(struct dice *dice, struct input *input, const struct input *other) {
    size_t length = throw_below(dice, 64);
    if (length > other->bytes || length > input->bytes)
        return;
    size_t from = throw_below(dice, other->bytes - length + 1);
    size_t to = throw_place(dice, input->bytes - length + 1);
    memmove(input->data + to, other->data + from, length);
}

static void mutate(struct dice *dice, struct input *input, const struct corpus *corpus) {
    switch (throw_below(dice, 8)) {
    case 0:
    case 1:
        if (input->bytes > 0)
            input->data[throw_place(dice, input->bytes)] ^= (uint8_t)(1 << throw_below(dice, 8));
        break;
    case 2:
        if (input->bytes > 0)
            input->data[throw_place(dice, input->bytes)] = (uint8_t)throw_dice(dice);
        break;
    case 3:
    case 4:
        put_number(dice, input);
        break;
    case 5:
        insert_bytes(dice, input);
        break;
    case 6:
        if (throw_below(dice, 4) == 0)
            input->bytes = throw_place(dice, input->bytes + 1);
        else
            erase_bytes(dice, input);
        break;
    default:
        copy_stretch(dice, input, &corpus->inputs[throw_below(dice, corpus->count)]);
    }
}

/* A block of exactly its size, so that a sanitizer sees the first byte read past the end. */
static void try_input(const struct input *input) {
    current.data = check_memory(malloc(input->bytes == 0 ? 1 : input->bytes));
    current.bytes = input->bytes;
    memcpy(current.data, input->data, input->bytes);
    LLVMFuzzerTestOneInput(current.data, current.bytes);
    free(current.data);
    current = (struct input){NULL, 0};
}

static void run_mutation(const struct corpus *corpus, uint64_t seed, uint32_t run) {
    struct dice dice = {.seed = seed, .run = run};
    const struct input *origin = &corpus->inputs[throw_below(&dice, corpus->count)];
    struct input input = {check_memory(malloc(origin->bytes + 1)), origin->bytes};
    memcpy(input.data, origin->data, origin->bytes);
    for (size_t left = 1 + throw_below(&dice, MUTATIONS_MAX); left > 0; left--)
        mutate(&dice, &input, corpus);
    try_input(&input);
    free(input.data);
}

static double now_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Mutations 0, 1, ... of the seed, up to runs of them or, where seconds > 0, until so much time has passed. Returns how
 * many. */
static uint32_t run_mutations(const struct corpus *corpus, uint64_t seed, uint32_t runs, double seconds) {
    double start = now_seconds();
    uint32_t run = 0;
    while (run < runs && (seconds <= 0 || now_seconds() - start < seconds))
        run_mutation(corpus, seed, run++);
    return run;
}

int main(int argc, char **argv) {
    struct corpus corpus = {NULL, 0};
    const char *seeds_folder = NULL;
    uint64_t seed = 1;
    uint32_t runs = 10000;
    double seconds = 0;
    size_t bytes;
    uint8_t *data;
    program = argv[0];
    for (unsigned i = 0; (data = fuzz_seed(i, &bytes)) != NULL; i++)
        add_input(&corpus, data, bytes);
    for (int i = 1; i < argc; i++) {
        bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--runs") == 0 && has_value)
            runs = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--seconds") == 0 && has_value)
            seconds = strtod(argv[++i], NULL);
        else if (strcmp(argv[i], "--seed") == 0 && has_value)
            seed = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--write-seeds") == 0 && has_value)
            seeds_folder = argv[++i];
        else
            add_file(&corpus, argv[i]);
    }
    if (seeds_folder != NULL)
        write_seeds(&corpus, seeds_folder);
    catch_crashes();
    for (size_t i = 0; i < corpus.count; i++)
        try_input(&corpus.inputs[i]);
    if (corpus.count > 0)
        runs = run_mutations(&corpus, seed, seconds > 0 ? UINT32_MAX : runs, seconds);
    printf("%zu inputs, %u mutations: no fault\n", corpus.count, corpus.count > 0 ? runs : 0);
    for (size_t i = 0; i < corpus.count; i++)
        free(corpus.inputs[i].data);
    free(corpus.inputs);
    return 0;
}
