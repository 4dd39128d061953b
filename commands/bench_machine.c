/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/bench_machine.h"

#include "engine/clock.h"
#include "engine/cpu/memory.h"
#include "engine/cpu/threads.h"
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

enum {
    READ_CHUNK_BYTES = 256 * 1024, /* work is handed to threads in pieces of this size */
    READ_REPETITIONS = 15,
    READ_LANES = 4, /* sums that do not wait for one another */
};

static const char *const features_shown[] = {"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl",
    "avx512dq", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"};

/* Copies the text after "key : " of a line; false when the line has another key. */
static bool line_value(const char *line, const char *key, char *out, size_t bytes) {
    size_t length = strlen(key);
    if (strncmp(line, key, length) != 0)
        return false;
    const char *colon = strchr(line + length, ':');
    if (colon == NULL)
        return false;
    const char *text = colon + 1 + strspn(colon + 1, " \t");
    snprintf(out, bytes, "%.*s", (int)strcspn(text, "\n"), text);
    return true;
}

static bool has_word(const char *text, const char *word) {
    size_t length = strlen(word);
    for (const char *at = text; (at = strstr(at, word)) != NULL; at += length)
        if ((at == text || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0'))
            return true;
    return false;
}

static void append_features(const char *flags, char *out, size_t bytes) {
    for (size_t i = 0; i < sizeof features_shown / sizeof *features_shown; i++) {
        size_t used = strlen(out);
        if (has_word(flags, features_shown[i]))
            snprintf(out + used, bytes - used, "%s%s", used > 0 ? " " : "", features_shown[i]);
    }
}

static void read_cpuinfo(struct bench_machine *machine) {
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file == NULL)
        return;
    char line[8192], flags[8192];
    while (fgets(line, sizeof line, file) != NULL) {
        if (machine->cpu[0] == '\0' && line_value(line, "model name", machine->cpu, sizeof machine->cpu))
            continue;
        if (line_value(line, "flags", flags, sizeof flags)) { /* the same for every core */
            append_features(flags, machine->features, sizeof machine->features);
            break;
        }
    }
    fclose(file);
}

static void read_os(char *out, size_t bytes) {
    char line[256], name[128] = "";
    struct utsname system;
    FILE *file = fopen("/etc/os-release", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, "PRETTY_NAME=", 12) == 0)
            snprintf(name, sizeof name, "%.*s, ", (int)strcspn(line + 13, "\"\n"), line + 13);
    if (file != NULL)
        fclose(file);
    if (uname(&system) == 0)
        snprintf(out, bytes, "%s%s %s %s", name, system.sysname, system.release, system.machine);
}

void bench_machine_describe(struct bench_machine *machine) {
    read_cpuinfo(machine);
    read_os(machine->os, sizeof machine->os);
    machine->cores = thread_count_available();
    if (getloadavg(&machine->load_average, 1) != 1)
        machine->load_average = -1;
    machine->core_to_core_ns = bench_core_to_core_ns();
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page_bytes > 0)
        machine->memory_bytes = (uint64_t)pages * (uint64_t)page_bytes;
    snprintf(machine->compiler, sizeof machine->compiler, "%s", __VERSION__);
#if defined(__clang__)
    snprintf(machine->compiler, sizeof machine->compiler, "%s", "clang " __VERSION__);
#elif defined(__GNUC__)
    snprintf(machine->compiler, sizeof machine->compiler, "%s", "gcc " __VERSION__);
#endif
}

uint64_t bench_resident_bytes(void) {
    FILE *file = fopen("/proc/self/status", "r");
    if (file == NULL)
        return 0;
    char line[256];
    unsigned long long kilobytes = 0;
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "VmRSS: %llu", &kilobytes) == 1)
            break;
    fclose(file);
    return kilobytes * 1024;
}

/* Sums 64-bit words: four independent sums of 32-byte vectors, so that loads alone set the pace. count: vectors, a
 * multiple of READ_LANES. The body is compiled twice, for the AVX2 build of it to be taken where the machine has it. */
typedef uint64_t read_vector __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) uint64_t sum_body(const read_vector *data, size_t count) {
    read_vector sums[READ_LANES] = {{0}};
    for (size_t i = 0; i < count; i += READ_LANES)
        for (size_t lane = 0; lane < READ_LANES; lane++)
            sums[lane] += data[i + lane];
    read_vector sum = sums[0] + sums[1] + sums[2] + sums[3];
    return sum[0] + sum[1] + sum[2] + sum[3];
}

static uint64_t sum_plain(const read_vector *data, size_t count) {
    return sum_body(data, count);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint64_t sum_avx2(const read_vector *data, size_t count) {
    return sum_body(data, count);
}
#endif

struct read_work {
    const char *data;
    uint64_t (*sum)(const read_vector *data, size_t count);
    volatile uint64_t sink; /* keeps the sums alive; races on it do not matter, each store is one word */
};

static void read_chunk(void *context, uint32_t chunk, uint32_t thread) {
    (void)thread;
    struct read_work *work = context;
    const read_vector *data = (const read_vector *)(work->data + (size_t)chunk * READ_CHUNK_BYTES);
    uint64_t sum = work->sum(data, READ_CHUNK_BYTES / sizeof *data);
    if (sum == 1) /* never: the buffer is filled so that every sum is even; but the compiler cannot know */
        work->sink = sum;
}

double bench_read_seconds(uint64_t bytes, uint32_t threads) {
    uint64_t chunks = (bytes + READ_CHUNK_BYTES - 1) / READ_CHUNK_BYTES;
    double times[READ_REPETITIONS], median = 0;
    struct read_work work = {.sum = sum_plain};
    struct thread_pool *pool = NULL;
    void *data = NULL;
    if (chunks == 0 || chunks > UINT32_MAX)
        return 0;
    data = cpu_memory_allocate(chunks * READ_CHUNK_BYTES); /* huge pages where weights get them */
    pool = thread_pool_create(threads, NULL);
    if (data == NULL || pool == NULL)
        goto done;
    memset(data, 2, chunks * READ_CHUNK_BYTES);
    work.data = data;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        work.sum = sum_avx2;
#endif
    for (int i = -2; i < READ_REPETITIONS; i++) { /* two to warm up */
        double start = clock_seconds();
        thread_pool_run(pool, (uint32_t)chunks, read_chunk, &work);
        if (i >= 0)
            times[i] = clock_seconds() - start;
    }
    /* The last chunk is read whole: scale to the bytes that were asked for. */
    median = bench_median(times, READ_REPETITIONS) * (double)bytes / ((double)chunks * READ_CHUNK_BYTES);
done:
    thread_pool_free(pool);
    cpu_memory_release(data);
    return median;
}
