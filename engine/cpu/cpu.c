/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/cpu.h"

#include "engine/cpu/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char *const tier_names[CPU_TIER_COUNT] = {"scalar", "avx2", "avx512"};
static const char *const tier_units[CPU_TIER_COUNT] = {"scalar", "avx2", "avx512-vnni"};

const char *cpu_tier_name(enum cpu_tier tier) {
    return tier_names[tier];
}

#if defined(__x86_64__)

static uint32_t basic_features(void) {
    uint32_t eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) ? ecx : 0;
}

/* Whether the operating system saves all the registers in mask (XCR0; Intel SDM volume 1, chapter 13). */
static bool system_saves(uint32_t mask) {
    if ((basic_features() & bit_OSXSAVE) == 0)
        return false;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & mask) == mask;
}

static bool has_avx2(void) {
    const uint32_t sse_and_avx = 0x06;
    return system_saves(sse_and_avx) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           (basic_features() & bit_F16C) != 0;
}

static bool has_avx512(void) {
    const uint32_t sse_avx_and_avx512 = 0xe6;
    return system_saves(sse_avx_and_avx512) && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

enum cpu_tier cpu_tier_detect(void) {
    __builtin_cpu_init();
    if (!has_avx2())
        return CPU_SCALAR;
    return has_avx512() ? CPU_AVX512 : CPU_AVX2;
}

#else

enum cpu_tier cpu_tier_detect(void) {
    return CPU_SCALAR;
}

#endif

static int choose_tier(const char *features, enum cpu_tier *tier, struct error *error) {
    enum cpu_tier highest = cpu_tier_detect();
    *tier = highest;
    if (features == NULL || strcmp(features, "auto") == 0)
        return 0;
    for (int candidate = 0; candidate < CPU_TIER_COUNT; candidate++) {
        if (strcmp(features, tier_names[candidate]) != 0)
            continue;
        if (candidate > (int)highest)
            return error_set(error, ERROR_UNSUPPORTED, "cpu features %s: this machine has no more than %s", features,
                tier_names[highest]);
        *tier = candidate;
        return 0;
    }
    return error_set(
        error, ERROR_INVALID, "cpu features '%s' are unknown, it must be auto, scalar, avx2 or avx512", features);
}

/* ---- rows ---- */

struct rows_work {
    uint32_t rows, chunk_rows;
    thread_part_work work;
    void *context;
};

static void do_chunk(void *context, uint32_t chunk, uint32_t thread) {
    const struct rows_work *of = context;
    uint32_t first = chunk * of->chunk_rows;
    of->work(of->context, first, of->rows - first < of->chunk_rows ? of->rows : first + of->chunk_rows, thread);
}

void cpu_run_rows(struct cpu_backend *cpu, uint32_t rows, uint32_t chunk_rows, thread_part_work work, void *context) {
    struct rows_work chunks = {rows, chunk_rows, work, context};
    if (cpu_shares_rows(cpu, rows))
        thread_pool_run_parts(cpu->threads, rows, work, context);
    else
        thread_pool_run(cpu->threads, rows / chunk_rows + (rows % chunk_rows != 0), do_chunk, &chunks);
}

/* ---- the backend ---- */

static const char *cpu_describe(struct backend *backend) {
    return cpu_backend(backend)->description;
}

static void cpu_close(struct backend *backend) {
    if (backend == NULL)
        return;
    struct cpu_backend *cpu = cpu_backend(backend);
    cpu_linear_scratch_free(cpu);
    cpu_attend_scratch_free(cpu);
    cpu_score_state_free(cpu);
    thread_pool_free(cpu->threads);
    cpu_blocks_free(&cpu->blocks);
    free(cpu);
}

static void *cpu_allocate(struct backend *backend, size_t bytes) {
    return cpu_block_allocate(&cpu_backend(backend)->blocks, bytes);
}

static void cpu_release(struct backend *backend, void *memory) {
    cpu_block_release(&cpu_backend(backend)->blocks, memory);
}

static void cpu_copy(struct backend *backend, void *to, const void *from, size_t bytes) {
    (void)backend;
    if (bytes > 0)
        memcpy(to, from, bytes);
}

static void cpu_synchronize(struct backend *backend) {
    (void)backend; /* every operation is done when it returns */
}

static const struct backend_operations operations = {
    .name = "cpu",
    .host_memory = true,
    .describe = cpu_describe,
    .close = cpu_close,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .upload = cpu_copy,
    .download = cpu_copy,
    .synchronize = cpu_synchronize,
    .weight_create = cpu_weight_create,
    .weight_free = cpu_weight_free,
    .weight_bytes = cpu_weight_bytes,
    .embed = cpu_embed,
    .rms_norm = cpu_rms_norm,
    .rms_norm_add = cpu_rms_norm_add,
    .head_norms = cpu_head_norms,
    .add_bias = cpu_add_bias,
    .scale = cpu_scale,
    .soft_cap = cpu_soft_cap,
    .linear = cpu_linear,
    .rope_and_append = cpu_rope_and_append,
    .attend_scores = cpu_attend_scores,
    .attend_variants = true,
    .attend = cpu_attend,
    .score = cpu_score,
    .summarise = cpu_summarise,
    .slot_norms = cpu_slot_norms,
    .window_preference = cpu_window_preference,
    .rotate_slots = cpu_rotate_slots,
    .unrotate_slots = cpu_unrotate_slots,
    .query_moments = cpu_query_moments,
    .silu_mul = cpu_silu_mul,
    .gelu_mul = cpu_gelu_mul,
    .gather_rows = cpu_gather_rows,
    .sample = cpu_sample,
    .kl = cpu_kl,
    .copy_pages = cpu_copy_pages,
    .move_slots = cpu_move_slots,
    .clear_slots = cpu_clear_slots,
    .move_statistics = cpu_move_statistics,
    .poison_pages = cpu_poison_pages,
};

struct backend *backend_cpu_open(const struct backend_options *options, struct error *error) {
    enum cpu_tier tier;
    if (choose_tier(options->cpu_features, &tier, error) != 0)
        return NULL;
    struct cpu_backend *cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the CPU backend");
        return NULL;
    }
    uint32_t threads = options->threads > 0 ? options->threads : thread_count_available();
    cpu->threads = thread_pool_create(threads, error);
    if (cpu->threads == NULL) {
        free(cpu);
        return NULL;
    }
    cpu->base.operations = &operations;
    cpu->tier = tier;
    cpu->linear = cpu_linear_kernels(tier);
    cpu->attend = cpu_attend_kernels(tier);
    cpu->statistics = cpu_statistics_kernels(tier);
    cpu->vector = cpu_vector_kernels(tier);
    cpu->score = cpu_score_kernels(tier);
    snprintf(cpu->description, sizeof cpu->description, "cpu, %s, %u thread%s", tier_units[tier], threads,
        threads == 1 ? "" : "s");
    return &cpu->base;
}
