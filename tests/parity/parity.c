/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/parity.h"
#include "tests/parity/parity_missing.h"
#include "tests/sanitized.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct parity_case *const families[] = {
    parity_linear_cases,
    parity_attend_cases,
    parity_statistics_cases,
    parity_summarise_cases,
    parity_statistics_timed,
    parity_linear_timed,
    parity_vector_cases,
    parity_traits_cases,
    parity_pages_cases,
    parity_move_cases,
    parity_sample_cases,
    parity_score_cases,
    parity_score_timed,
    parity_network_cases,
    parity_network_timed,
#ifdef PARITY_CUDA
    parity_select_cases,
    parity_score_long_cases,
#endif
};

/* Of the CUDA backend only; traffic is counted where it is emulated. */
static const struct parity_case *const cuda_families[] = {
#ifdef PARITY_CUDA
    parity_linear_paths_cases,
#endif
#ifdef PARITY_EMULATED
    parity_traffic_core_cases,
    parity_traffic_linear_cases,
    parity_traffic_attend_cases,
    parity_traffic_score_cases,
#endif
    NULL,
};

/* Instruction sets of the CPU, and the CUDA backend. */
static const char *const tiers[] = {"scalar", "avx2", "avx512", "cuda"};
static const uint32_t thread_counts[] = {1, 3};
enum { THREAD_COUNTS = sizeof thread_counts / sizeof thread_counts[0] };
static jmp_buf skip_point;
enum { FORMATS = 3 };

struct options {
    uint64_t seed;
    uint32_t rounds;
    const char *only;
    const char *tier;
    uint32_t part; /* every parts-th case, from this one on */
    uint32_t parts;
    bool time;
    uint32_t threads; /* 0: each of thread_counts; timed runs: 1 */
    double seconds;   /* a measurement */
};

/* SplitMix64 (Steele et al. 2014): small and good enough to draw shapes. */
uint64_t parity_random_bits(struct parity *parity) {
    uint64_t z = parity->random += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

uint32_t parity_random(struct parity *parity, uint32_t low, uint32_t high) {
    uint64_t range = (uint64_t)high - low + 1;
    return low + (uint32_t)(parity_random_bits(parity) % range);
}

double parity_uniform(struct parity *parity, double low, double high) {
    double unit = (double)(parity_random_bits(parity) >> 11) * 0x1p-53;
    return low + (high - low) * unit;
}

float parity_normal(struct parity *parity) {
    double radius = sqrt(-2 * log(1 - parity_uniform(parity, 0, 1)));
    return (float)(radius * cos(2 * M_PI * parity_uniform(parity, 0, 1)));
}

void parity_fill_normal(struct parity *parity, float *out, size_t count, float scale) {
    for (size_t i = 0; i < count; i++)
        out[i] = scale * parity_normal(parity);
}

void parity_fill_sums(struct parity *parity, uint32_t bits, uint32_t slots, uint64_t *sums) {
    uint32_t kind = 0;
    for (uint32_t slot = 0; slot < slots; slot++) {
        if (slot % KV_PAGE_SLOTS == 0)
            kind = parity_random(parity, 0, 3);
        uint32_t width = parity_random(parity, kind == 2 ? 32 : 4, kind == 0 ? 31 : bits);
        sums[slot] = parity_random_bits(parity) >> (64 - width);
        if (kind == 2)
            sums[slot] |= 1ull << (width - 1);
        if (kind == 3) /* half of them below 2^31 */
            sums[slot] = (parity_random(parity, 0, 1) == 0 ? 0 : sums[slot] >> 31 << 31) + 0x7fffffff -
                         parity_random(parity, 0, 1 << 24);
    }
}

static void end_without_memory(size_t bytes) {
    fprintf(stderr, "parity: no memory for %zu bytes\n", bytes);
    exit(2);
}

void *parity_host(size_t bytes) {
    void *memory = calloc(bytes > 0 ? bytes : 1, 1);
    if (memory == NULL)
        end_without_memory(bytes);
    return memory;
}

void *parity_upload(struct parity *parity, const void *from, size_t bytes) {
    void *device = parity->operations->allocate(parity->backend, bytes);
    if (device == NULL)
        end_without_memory(bytes);
    if (from != NULL)
        parity->operations->upload(parity->backend, device, from, bytes);
    return device;
}

void *parity_download(struct parity *parity, const void *device, size_t bytes) {
    void *host = parity_host(bytes);
    parity->operations->download(parity->backend, host, device, bytes);
    return host;
}

uint32_t *parity_upload_sums(struct parity *parity, const uint64_t *sums, uint32_t slots, uint32_t capacity) {
    uint32_t *planes = parity_host((size_t)2 * capacity * sizeof *planes);
    for (uint32_t slot = 0; slot < slots; slot++)
        kv_sum_set(planes, capacity, slot, sums[slot]);
    uint32_t *device = parity_upload(parity, planes, (size_t)2 * capacity * sizeof *planes);
    free(planes);
    return device;
}

void parity_release(struct parity *parity, void *device) {
    parity->operations->release(parity->backend, device);
}

void parity_skip(struct parity *parity, const char *why) {
    if (parity->round == 0)
        printf("skipped %s, %s: %s\n", parity->entry->name, parity->tier, why);
    parity->skipped = true;
}

static void print_failure(struct parity *parity, const char *what, va_list arguments) {
    parity->failures++;
    printf("FAIL %s, %s, %u threads, round %u: ", parity->entry->name, parity->tier, parity->threads, parity->round);
    vprintf(what, arguments);
}

bool parity_check_bits(
    struct parity *parity, const float *got, const float *want, size_t count, const char *what, ...) {
    for (size_t i = 0; i < count; i++) {
        if (memcmp(&got[i], &want[i], sizeof got[i]) == 0 || (isnan(got[i]) && isnan(want[i])))
            continue;
        va_list arguments;
        va_start(arguments, what);
        print_failure(parity, what, arguments);
        va_end(arguments);
        printf(": element %zu of %zu is %a, not %a\n", i, count, (double)got[i], (double)want[i]);
        return false;
    }
    return true;
}

bool parity_check_bytes(struct parity *parity, const void *got, const void *want, size_t bytes, const char *what, ...) {
    const unsigned char *a = got;
    const unsigned char *b = want;
    for (size_t i = 0; i < bytes; i++) {
        if (a[i] == b[i])
            continue;
        va_list arguments;
        va_start(arguments, what);
        print_failure(parity, what, arguments);
        va_end(arguments);
        printf(": byte %zu of %zu is 0x%02x, not 0x%02x\n", i, bytes, a[i], b[i]);
        return false;
    }
    return true;
}

static bool is_close(double got, double want, double absolute, double relative) {
    if (isnan(want) || isinf(want))
        return isnan(want) ? isnan(got) : got == want;
    return fabs(got - want) <= absolute + relative * fabs(want);
}

bool parity_check_close(struct parity *parity, const float *got, const double *want, size_t count, double absolute,
    double relative, const char *what, ...) {
    for (size_t i = 0; i < count; i++) {
        if (is_close(got[i], want[i], absolute, relative))
            continue;
        va_list arguments;
        va_start(arguments, what);
        print_failure(parity, what, arguments);
        va_end(arguments);
        printf(": element %zu of %zu is %.9g, not %.9g\n", i, count, (double)got[i], want[i]);
        return false;
    }
    return true;
}

bool parity_check_true(struct parity *parity, bool condition, const char *what, ...) {
    if (condition)
        return true;
    va_list arguments;
    va_start(arguments, what);
    print_failure(parity, what, arguments);
    va_end(arguments);
    printf("\n");
    return false;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double parity_time(struct parity *parity, void (*work)(void *context), void *context, double bytes, double macs,
    const char *what, ...) {
    work(context); /* warms caches and grows scratch memory */
    double best = INFINITY;
    double end = now() + parity->seconds;
    do {
        double start = now();
        work(context);
        parity->operations->synchronize(parity->backend);
        double seconds = now() - start;
        if (seconds < best)
            best = seconds;
    } while (now() < end);
    printf("%-7s %2u threads  ", parity->tier, parity->threads);
    va_list arguments;
    va_start(arguments, what);
    vprintf(what, arguments);
    va_end(arguments);
    printf("  %.1f us", 1e6 * best);
    if (bytes > 0)
        printf("  %.1f GB/s", 1e-9 * bytes / best);
    if (macs > 0)
        printf("  %.1f GMAC/s", 1e-9 * macs / best);
    printf("\n");
    return best;
}

/* The same inputs for every tier and thread count. */
static uint64_t seed_of(uint64_t seed, const char *name, uint32_t index, uint32_t round) {
    uint64_t hash = 0xcbf29ce484222325ull ^ seed; /* FNV-1a */
    for (const char *at = name; *at != '\0'; at++)
        hash = (hash ^ (unsigned char)*at) * 0x100000001b3ull;
    hash = (hash ^ index) * 0x100000001b3ull;
    return (hash ^ round) * 0x100000001b3ull;
}

static void run_round(struct parity *parity) {
    char why[128];
    if (setjmp(skip_point) == 0) {
        parity->entry->run(parity);
        return;
    }
    snprintf(why, sizeof why, "the backend has no %s", parity_missing_name());
    parity_skip(parity, why);
}

bool parity_is_full(void) {
    const char *full = getenv("DISTILLCACHE_TEST_FULL");
    return full != NULL && strcmp(full, "1") == 0;
}

/* A build with sanitizers, to which sizes are alike, takes its time: a quarter of the rounds. So does an emulated
 * device: an eighth of them, or a quarter when much is asked for. But as many as there are KV formats. */
static uint32_t rounds_of(const struct parity *parity, const struct parity_case *entry) {
    uint32_t rounds = entry->rounds > 0 ? entry->rounds : 1, part = sanitized() ? 4 : 1;
#ifdef PARITY_EMULATED
    if (parity->cuda)
        part = parity_is_full() ? 4 : 8;
#endif
    (void)parity;
    if (part > 1 && rounds > FORMATS)
        rounds = rounds / part > FORMATS ? rounds / part : FORMATS;
    return rounds;
}

static uint32_t run_case(struct parity *parity, const struct options *options) {
    const struct parity_case *entry = parity->entry;
    if (options->time) {
        parity->random = seed_of(options->seed, entry->name, entry->index, 0);
        if (entry->time != NULL)
            entry->time(parity);
        return 0;
    }
    if (entry->run == NULL)
        return 0;
    uint32_t rounds = rounds_of(parity, entry) * options->rounds;
    parity->failures = 0;
    for (parity->round = 0; parity->round < rounds && parity->failures < 5 && !parity->skipped; parity->round++) {
        parity->random = seed_of(options->seed, entry->name, entry->index, parity->round);
        run_round(parity);
    }
    return parity->failures;
}

static uint32_t run_family(struct parity *parity, const struct options *options, const struct parity_case *family) {
    uint32_t failures = 0;
    for (const struct parity_case *entry = family; entry->name != NULL; entry++) {
        if (parity->cases_seen++ % options->parts != options->part)
            continue;
        if (options->only != NULL && strstr(entry->name, options->only) == NULL)
            continue;
        parity->entry = entry;
        parity->skipped = false;
        clock_t start = clock();
        failures += run_case(parity, options);
        parity->cases_skipped += parity->skipped;
        if (getenv("PARITY_TIMES") != NULL)
            printf("%7.2f s of CPU: %s\n", (double)(clock() - start) / CLOCKS_PER_SEC, entry->name);
    }
    return failures;
}

static uint32_t run_families(struct parity *parity, const struct options *options) {
    uint32_t failures = 0;
    parity->cases_seen = 0;
    parity->cases_skipped = 0;
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
        failures += run_family(parity, options, families[i]);
    for (size_t i = 0; parity->cuda && cuda_families[i] != NULL; i++)
        failures += run_family(parity, options, cuda_families[i]);
    return failures;
}

/* Failures of one tier; -1 when the machine lacks it. */
static int run_tier(const char *tier, uint32_t threads, const struct options *options) {
    struct error error;
    bool cuda = strcmp(tier, "cuda") == 0;
    struct backend_options backend_options = {
        .cpu_features = cuda ? NULL : tier, .threads = threads, .name = cuda ? "cuda" : "cpu"};
    struct backend *backend = backend_open(&backend_options, &error);
    if (backend == NULL) {
        printf("skipped %s: %s\n", tier, error.message);
        return -1;
    }
    struct parity parity = {.backend = backend,
        .operations = parity_fill_missing(backend->operations, &skip_point),
        .tier = tier,
        .threads = threads,
        .cuda = cuda,
        .leads = cuda || (strcmp(tier, "scalar") == 0 && threads == 1),
        .seconds = options->seconds};
    double start = now();
    uint32_t failures = run_families(&parity, options);
    if (!options->time)
        printf("%s: %u failures, %u cases skipped, %.1f s (%s)\n", tier, failures, parity.cases_skipped, now() - start,
            backend->operations->describe(backend));
    backend->operations->close(backend);
    return (int)failures;
}

static bool is_chosen(const char *tier, const struct options *options) {
    if (options->tier != NULL && strcmp(options->tier, "cpu") == 0)
        return strcmp(tier, "cuda") != 0;
    return options->tier == NULL || strcmp(options->tier, tier) == 0;
}

/* How many of thread_counts: how work is shared out is the same code in all tiers, so that the slow one needs no second
 * run. Its several threads are seen with --threads 3, under sanitizers. */
static size_t counts_of(const char *tier, const struct options *options) {
    bool one = options->time || options->threads > 0 || strcmp(tier, "cuda") == 0 || strcmp(tier, "scalar") == 0;
    return one ? 1 : THREAD_COUNTS;
}

static int run_all(const struct options *options) {
    int failures = 0;
    uint32_t tiers_run = 0;
    for (size_t tier = 0; tier < sizeof tiers / sizeof tiers[0]; tier++) {
        if (!is_chosen(tiers[tier], options))
            continue;
        for (size_t count = 0; count < counts_of(tiers[tier], options); count++) {
            uint32_t threads = options->threads > 0 ? options->threads : thread_counts[count];
            int result = run_tier(tiers[tier], threads, options);
            if (result < 0)
                break;
            tiers_run++;
            failures += result;
        }
    }
    if (tiers_run == 0)
        printf("no tier was run\n");
    return failures > 0 || tiers_run == 0 ? 1 : 0;
}

static int parse_options(int count, char **arguments, struct options *options) {
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i];
        if (strcmp(name, "--time") == 0) {
            options->time = true;
            continue;
        }
        const char *value = i + 1 < count ? arguments[++i] : NULL;
        if (value == NULL)
            return -1;
        if (strcmp(name, "--seed") == 0)
            options->seed = strtoull(value, NULL, 10);
        else if (strcmp(name, "--rounds") == 0)
            options->rounds = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--threads") == 0)
            options->threads = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--seconds") == 0)
            options->seconds = strtod(value, NULL);
        else if (strcmp(name, "--only") == 0)
            options->only = value;
        else if (strcmp(name, "--tier") == 0)
            options->tier = value;
        else if (strcmp(name, "--part") == 0 && sscanf(value, "%u/%u", &options->part, &options->parts) == 2 &&
                 options->part < options->parts)
            continue;
        else
            return -1;
    }
    return 0;
}

int main(int count, char **arguments) {
    struct options options = {.seed = 1, .rounds = 1, .parts = 1, .seconds = 0.3};
    if (parse_options(count, arguments, &options) != 0) {
        fprintf(stderr,
            "usage: %s [--seed N] [--rounds N] [--only TEXT] [--tier NAME] [--threads N] [--part K/N] "
            "[--time [--seconds S]]\n",
            arguments[0]);
        return 2;
    }
    return run_all(&options);
}
