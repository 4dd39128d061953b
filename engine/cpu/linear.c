/* SPDX-License-Identifier: Apache-2.0
 *
 * The operation `linear`: prepares activations and splits strips and panels over the threads. Rows are taken in tiles
 * whose prepared activations fit the scratch memory and so a core's second-level cache: weights are read from memory
 * once a tile, a strip stays in the first-level cache while the tile's panels pass.
 */
#include "engine/cpu/linear.h"

#include <stdatomic.h>
#include <stdlib.h>

static const size_t SCRATCH_BYTES = (size_t)1 << 20;
/* Below this many numbers the caller prepares them alone, which is faster than waking the others. */
static const size_t PREPARE_ALONE = 8192;
/* Chunks a thread should find, so that all end at about the same time; but a chunk of fewer products than this (about
 * a microsecond) costs more to take than it balances. */
static const uint32_t CHUNKS_PER_THREAD = 8;
static const uint64_t CHUNK_PRODUCTS = (uint64_t)1 << 17;

/* Weights of a call up to which every thread may read all of them (cpu_shares_rows). The results of larger ones do not
 * stay in a core's caches anyhow, and reading is what they cost. */
static const size_t ROWS_SHARED_BYTES = (size_t)4 << 20;

/* Prepared bytes of one row. */
static size_t row_bytes_of(bool is_float, uint32_t columns) {
    return is_float ? columns * sizeof(float) : columns / LINEAR_BLOCK * sizeof(struct linear_block);
}

static int grow(void **memory, size_t *have, size_t need, struct error *error) {
    if (need < SCRATCH_BYTES)
        need = SCRATCH_BYTES;
    if (need <= *have)
        return 0;
    void *grown = cpu_memory_allocate(need);
    if (grown == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for activations, %zu bytes", need);
    cpu_memory_release(*memory);
    *memory = grown;
    *have = need;
    return 0;
}

struct linear_scratch *linear_scratch_of(struct cpu_backend *cpu) {
    if (cpu->linear_scratch == NULL)
        cpu->linear_scratch = calloc(1, sizeof(struct linear_scratch));
    return cpu->linear_scratch;
}

int linear_scratch_reserve(struct linear_scratch *scratch, const struct backend_weight *weight, struct error *error) {
    bool is_float = linear_is_float(weight->format);
    size_t need = LINEAR_PANEL * row_bytes_of(is_float, weight->columns);
    if (is_float)
        return grow((void **)&scratch->floats, &scratch->floats_bytes, need, error);
    return grow((void **)&scratch->blocks, &scratch->blocks_bytes, need, error);
}

void cpu_linear_scratch_free(struct cpu_backend *cpu) {
    struct linear_scratch *scratch = cpu->linear_scratch;
    if (scratch == NULL)
        return;
    cpu_memory_release(scratch->blocks);
    cpu_memory_release(scratch->floats);
    cpu_slab_close(&scratch->open);
    free(scratch);
    cpu->linear_scratch = NULL;
}

/* Chunks that one thread does before it helps others. Neighbours in memory, so that a thread reads its weights as one
 * stream: the next chunk for whoever comes, here one and there the other, costs a fifth of the bandwidth. */
struct share {
    _Alignas(64) _Atomic uint32_t next;
    uint32_t end;
};

/* One tile of rows of one call. */
struct linear_call {
    const struct linear_kernels *kernels;
    const struct backend_weight *const *weights;
    uint32_t columns;
    bool add;
    const float *x; /* [rows][columns] */
    uint32_t rows;
    struct linear_block *blocks; /* NULL: no weight has blocks */
    float *floats;               /* NULL: no weight is float, or x itself is the panel */
    float *out;
    size_t out_stride;
    /* How the work is cut. */
    uint32_t strips; /* of all weights */
    uint32_t panel;  /* rows of a panel; the last one may have fewer */
    uint32_t panels;
    uint32_t strips_per_chunk;
    uint32_t panels_per_chunk;
    uint32_t strip_chunks;
    uint32_t chunks;
    uint32_t threads;
    struct share *shares; /* [threads] */
};

static uint32_t divide_up(uint32_t a, uint32_t b) {
    return (a + b - 1) / b;
}

static uint32_t panel_rows(const struct linear_call *call, uint32_t panel) {
    uint32_t left = call->rows - panel * call->panel;
    return left < call->panel ? left : call->panel;
}

static void transpose_panel(const float *x, uint32_t rows, uint32_t columns, float *panel) {
    for (size_t column = 0; column < columns; column++)
        for (size_t row = 0; row < rows; row++)
            panel[column * rows + row] = x[row * columns + column];
}

static void prepare_panel(void *context, uint32_t panel, uint32_t thread) {
    (void)thread;
    const struct linear_call *call = context;
    size_t first = (size_t)panel * call->panel;
    const float *x = call->x + first * call->columns;
    uint32_t rows = panel_rows(call, panel);
    if (call->blocks != NULL)
        call->kernels->round_panel(x, rows, call->columns, call->blocks + first * (call->columns / LINEAR_BLOCK));
    if (call->floats != NULL)
        transpose_panel(x, rows, call->columns, call->floats + first * call->columns);
}

static const void *panel_of(const struct linear_call *call, const struct backend_weight *weight, uint32_t panel) {
    size_t first = (size_t)panel * call->panel;
    if (!linear_is_float(weight->format))
        return call->blocks + first * weight->steps;
    return (call->floats != NULL ? call->floats : call->x) + first * call->columns;
}

/* A strip that has fewer rows than lanes: through a buffer. */
static void multiply_part(const struct linear_call *call, const struct backend_weight *weight,
    const struct linear_tile *tile, uint32_t lanes) {
    float results[LINEAR_PANEL * LINEAR_STRIP];
    struct linear_tile whole = *tile;
    whole.out = results;
    whole.out_stride = LINEAR_STRIP;
    whole.add = false;
    call->kernels->multiply[weight->format](&whole);
    for (uint32_t row = 0; row < tile->rows; row++) {
        float *out = tile->out + row * tile->out_stride;
        for (uint32_t lane = 0; lane < lanes; lane++)
            out[lane] = tile->add ? out[lane] + results[row * LINEAR_STRIP + lane] : results[row * LINEAR_STRIP + lane];
    }
}

static void multiply_strip(const struct linear_call *call, const struct backend_weight *weight, uint32_t strip,
    float *out, uint32_t first_panel, uint32_t end_panel) {
    uint32_t lanes = weight->rows - strip * LINEAR_STRIP;
    for (uint32_t panel = first_panel; panel < end_panel; panel++) {
        struct linear_tile tile = {
            .strip = weight->data + strip * weight->strip_bytes,
            .panel = panel_of(call, weight, panel),
            .rows = panel_rows(call, panel),
            .steps = weight->steps,
            .out = out + (size_t)panel * call->panel * call->out_stride + (size_t)strip * LINEAR_STRIP,
            .out_stride = call->out_stride,
            .add = call->add,
        };
        if (lanes >= LINEAR_STRIP)
            call->kernels->multiply[weight->format](&tile);
        else
            multiply_part(call, weight, &tile, lanes);
    }
}

static void multiply_chunk(const struct linear_call *call, uint32_t chunk) {
    uint32_t strip = chunk % call->strip_chunks * call->strips_per_chunk;
    uint32_t end = strip + call->strips_per_chunk < call->strips ? strip + call->strips_per_chunk : call->strips;
    uint32_t first_panel = chunk / call->strip_chunks * call->panels_per_chunk;
    uint32_t end_panel = first_panel + call->panels_per_chunk;
    if (end_panel > call->panels)
        end_panel = call->panels;
    float *out = call->out;
    uint32_t weight_first = 0;
    for (uint32_t i = 0; strip < end; i++) {
        const struct backend_weight *weight = call->weights[i];
        for (; strip < end && strip - weight_first < weight->strips; strip++)
            multiply_strip(call, weight, strip - weight_first, out, first_panel, end_panel);
        weight_first += weight->strips;
        out += weight->rows;
    }
}

/* Called as often as there are chunks, and each call does one: of the thread's own share, else of the next that has
 * any. */
static void multiply_some_chunk(void *context, uint32_t ignored, uint32_t thread) {
    (void)ignored;
    const struct linear_call *call = context;
    for (uint32_t i = 0; i < call->threads; i++) {
        struct share *share = &call->shares[(thread + i) % call->threads];
        if (atomic_load_explicit(&share->next, memory_order_relaxed) >= share->end)
            continue;
        uint32_t chunk = atomic_fetch_add_explicit(&share->next, 1, memory_order_relaxed);
        if (chunk >= share->end)
            continue;
        multiply_chunk(call, chunk);
        return;
    }
}

static uint32_t chunks_wanted(const struct linear_call *call, uint32_t threads) {
    uint64_t products = (uint64_t)call->strips * LINEAR_STRIP * call->columns * call->rows;
    uint64_t chunks = products / CHUNK_PRODUCTS / threads * threads;
    if (chunks < threads)
        return threads;
    return chunks < threads * CHUNKS_PER_THREAD ? (uint32_t)chunks : threads * CHUNKS_PER_THREAD;
}

/* Chunks of whole strips; only when there are too few of them are panels divided too. */
static void cut(struct linear_call *call) {
    uint32_t wanted = chunks_wanted(call, call->threads);
    call->panel = LINEAR_PANEL;
    call->panels = divide_up(call->rows, LINEAR_PANEL);
    call->strips_per_chunk = call->strips > wanted ? call->strips / wanted : 1;
    call->strip_chunks = divide_up(call->strips, call->strips_per_chunk);
    uint32_t parts = call->threads > 1 ? divide_up(wanted, call->strip_chunks) : 1;
    call->panels_per_chunk = divide_up(call->panels, parts < call->panels ? parts : call->panels);
    call->chunks = call->strip_chunks * divide_up(call->panels, call->panels_per_chunk);
}

/* Some rows with all weights, prepared and multiplied by one thread, in panels of about the same size. */
static void multiply_rows(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    struct linear_call part = *(const struct linear_call *)context;
    part.x += (size_t)first * part.columns;
    part.out += first * part.out_stride;
    if (part.blocks != NULL)
        part.blocks += (size_t)first * (part.columns / LINEAR_BLOCK);
    if (part.floats != NULL)
        part.floats += (size_t)first * part.columns;
    part.rows = end - first;
    part.panel = divide_up(part.rows, divide_up(part.rows, LINEAR_PANEL));
    part.panels = part.panels_per_chunk = divide_up(part.rows, part.panel);
    part.strips_per_chunk = part.strips;
    part.strip_chunks = part.chunks = 1;
    for (uint32_t panel = 0; panel < part.panels; panel++)
        prepare_panel(&part, panel, thread);
    multiply_chunk(&part, 0);
}

/* By strips, so that every weight is read once. */
static void run_tile(struct cpu_backend *cpu, struct linear_call *call) {
    cut(call);
    if ((size_t)call->rows * call->columns > PREPARE_ALONE)
        thread_pool_run(cpu->threads, call->panels, prepare_panel, call);
    else
        for (uint32_t panel = 0; panel < call->panels; panel++)
            prepare_panel(call, panel, 0);
    struct share shares[call->threads];
    for (uint32_t thread = 0; thread < call->threads; thread++) {
        atomic_init(&shares[thread].next, (uint32_t)((uint64_t)call->chunks * thread / call->threads));
        shares[thread].end = (uint32_t)((uint64_t)call->chunks * (thread + 1) / call->threads);
    }
    call->shares = shares;
    thread_pool_run(cpu->threads, call->chunks, multiply_some_chunk, call);
}

/* Rows whose prepared activations fit: whole panels, at least one, and tiles of about the same size. */
static uint32_t tile_rows(const struct linear_call *call, uint32_t rows) {
    size_t row_bytes = 0;
    if (call->blocks != NULL)
        row_bytes = row_bytes_of(false, call->columns);
    if (call->floats != NULL && row_bytes_of(true, call->columns) > row_bytes)
        row_bytes = row_bytes_of(true, call->columns);
    if (row_bytes == 0 || rows <= LINEAR_PANEL)
        return rows;
    size_t panels = SCRATCH_BYTES / (row_bytes * LINEAR_PANEL);
    uint32_t wanted = divide_up(rows, LINEAR_PANEL);
    if (panels >= wanted)
        return rows;
    uint32_t most = panels > 0 ? (uint32_t)panels : 1;
    return divide_up(wanted, divide_up(wanted, most)) * LINEAR_PANEL;
}

void cpu_linear(struct backend *backend, const struct backend_weight *const *weights, uint32_t weights_count,
    const float *x, uint32_t rows, bool add, float *out) {
    struct cpu_backend *cpu = cpu_backend(backend);
    struct linear_scratch *scratch = cpu->linear_scratch;
    struct linear_call call = {.kernels = cpu->linear,
        .weights = weights,
        .columns = weights[0]->columns,
        .add = add,
        .threads = thread_pool_size(cpu->threads)};
    size_t bytes = 0;
    for (uint32_t i = 0; i < weights_count; i++) {
        call.strips += weights[i]->strips;
        call.out_stride += weights[i]->rows;
        bytes += weights[i]->strips * weights[i]->strip_bytes;
        if (!linear_is_float(weights[i]->format))
            call.blocks = scratch->blocks;
        else if (rows > 1)
            call.floats = scratch->floats;
    }
    uint32_t step = tile_rows(&call, rows);
    if (step >= rows && bytes <= ROWS_SHARED_BYTES && cpu_shares_rows(cpu, rows)) {
        call.rows = rows;
        call.x = x;
        call.out = out;
        thread_pool_run_parts(cpu->threads, rows, multiply_rows, &call);
        return;
    }
    for (uint32_t row = 0; row < rows; row += step) {
        call.rows = rows - row < step ? rows - row : step;
        call.x = x + (size_t)row * call.columns;
        call.out = out + row * call.out_stride;
        run_tile(cpu, &call);
    }
}

const struct linear_kernels *cpu_linear_kernels(enum cpu_tier tier) {
#if defined(__x86_64__)
    if (tier == CPU_AVX512)
        return &linear_kernels_avx512;
    if (tier == CPU_AVX2)
        return &linear_kernels_avx2;
#endif
    (void)tier;
    return &linear_kernels_scalar;
}
