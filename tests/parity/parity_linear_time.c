/* SPDX-License-Identifier: Apache-2.0
 *
 * Measures `linear` with the shapes of SmolLM2-135M: single products whose weights stay in the caches, and all products
 * of a forward pass with weights that come from memory, beside a plain read of as many bytes.
 */
#include "engine/cpu/threads.h"
#include "tests/parity/parity.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 30, WIDTH = 576, FEED_FORWARD = 1536, VOCABULARY = 49152, ROWS_MAX = 512 };

struct product {
    uint32_t weights;
    uint32_t weight_rows[LINEAR_WEIGHTS_MAX];
    uint32_t columns;
};

static const struct product layer_products[] = {
    {3, {576, 192, 192}, WIDTH},
    {1, {WIDTH}, WIDTH},
    {2, {FEED_FORWARD, FEED_FORWARD}, WIDTH},
    {1, {WIDTH}, FEED_FORWARD},
};
static const struct product output_product = {1, {VOCABULARY}, WIDTH};
enum { LAYER_PRODUCTS = sizeof layer_products / sizeof layer_products[0] };

/* One call of the operation: its weights and sizes. */
struct call {
    struct backend_weight *weights[LINEAR_WEIGHTS_MAX];
    uint32_t count;
    uint32_t sum_rows;
    uint32_t columns;
    double bytes;
};

/* Calls in a row on the same activations. */
struct pass {
    struct parity *parity;
    struct call calls[LAYERS * LAYER_PRODUCTS + 1];
    uint32_t calls_count;
    uint32_t rows;
    float *x;
    float *out;
    double bytes;
    double macs; /* a row */
};

static struct backend_weight *create_weight(
    struct parity *parity, enum tensor_type type, uint32_t rows, uint32_t columns) {
    size_t bytes = rows * tensor_row_bytes(type, columns);
    unsigned char *data = parity_host(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (unsigned char)(i % 2 ? 0x11 : i); /* small finite numbers in every format */
    struct tensor tensor = {
        .name = "timed", .type = type, .rows = rows, .columns = columns, .data = data, .bytes = bytes};
    struct error error;
    struct backend_weight *weight = parity->operations->weight_create(parity->backend, &tensor, false, &error);
    if (weight == NULL) {
        fprintf(stderr, "parity: %s\n", error.message);
        exit(2);
    }
    free(data);
    return weight;
}

static void add_call(struct pass *pass, enum tensor_type type, const struct product *product) {
    struct call *call = &pass->calls[pass->calls_count++];
    *call = (struct call){.count = product->weights, .columns = product->columns};
    for (uint32_t i = 0; i < product->weights; i++) {
        call->weights[i] = create_weight(pass->parity, type, product->weight_rows[i], product->columns);
        call->sum_rows += product->weight_rows[i];
        call->bytes += (double)pass->parity->operations->weight_bytes(call->weights[i]);
    }
    pass->bytes += call->bytes;
    pass->macs += (double)call->sum_rows * call->columns;
}

/* Activations and room for results of the largest call. */
static void make_room(struct pass *pass, uint32_t rows) {
    size_t columns = 0;
    size_t results = 0;
    for (uint32_t i = 0; i < pass->calls_count; i++) {
        columns = pass->calls[i].columns > columns ? pass->calls[i].columns : columns;
        results = pass->calls[i].sum_rows > results ? pass->calls[i].sum_rows : results;
    }
    float *x = parity_host(rows * columns * sizeof *x);
    parity_fill_normal(pass->parity, x, rows * columns, 1);
    pass->x = parity_upload(pass->parity, x, rows * columns * sizeof *x);
    pass->out = parity_upload(pass->parity, NULL, rows * results * sizeof *pass->out);
    free(x);
}

static void pass_end(struct pass *pass) {
    for (uint32_t i = 0; i < pass->calls_count; i++)
        for (uint32_t weight = 0; weight < pass->calls[i].count; weight++)
            pass->parity->operations->weight_free(pass->parity->backend, pass->calls[i].weights[weight]);
    parity_release(pass->parity, pass->x);
    parity_release(pass->parity, pass->out);
}

static void work_pass(void *context) {
    const struct pass *pass = context;
    for (uint32_t i = 0; i < pass->calls_count; i++) {
        const struct call *call = &pass->calls[i];
        pass->parity->operations->linear(pass->parity->backend, (const struct backend_weight *const *)call->weights,
            call->count, pass->x, pass->rows, false, pass->out);
    }
}

static void time_rows(struct pass *pass, const char *name, uint32_t rows) {
    pass->rows = rows;
    parity_time(pass->parity, work_pass, pass, pass->bytes, pass->macs * rows, "%-16s R=%3u, %5.1f MB", name, rows,
        1e-6 * pass->bytes);
}

static void time_products(struct parity *parity) {
    enum tensor_type type = (enum tensor_type)parity->entry->index;
    static const uint32_t row_counts[] = {1, 2, 4, 8, ROWS_MAX};
    for (size_t i = 0; i < LAYER_PRODUCTS; i++) {
        struct pass pass = {.parity = parity};
        add_call(&pass, type, &layer_products[i]);
        make_room(&pass, ROWS_MAX);
        char name[32];
        snprintf(name, sizeof name, "%s %ux%u", tensor_type_name(type), pass.calls[0].sum_rows, pass.calls[0].columns);
        for (size_t row = 0; row < sizeof row_counts / sizeof row_counts[0]; row++)
            time_rows(&pass, name, row_counts[row]);
        pass_end(&pass);
    }
}

/* A plain read by all threads. */
struct read {
    struct thread_pool *pool;
    const uint64_t *words;
    size_t words_per_chunk;
    _Atomic uint64_t sum;
};

enum { READ_CHUNKS = 64 };

static void read_chunk(void *context, uint32_t chunk, uint32_t thread) {
    (void)thread;
    struct read *read = context;
    const uint64_t *words = read->words + chunk * read->words_per_chunk;
    uint64_t sums[16] = {0};
    for (size_t i = 0; i + 16 <= read->words_per_chunk; i += 16)
        for (size_t lane = 0; lane < 16; lane++)
            sums[lane] += words[i + lane];
    for (size_t lane = 0; lane < 16; lane++)
        read->sum += sums[lane];
}

static void work_read(void *context) {
    struct read *read = context;
    thread_pool_run(read->pool, READ_CHUNKS, read_chunk, read);
}

static void time_read(struct parity *parity, size_t bytes) {
    if (!parity->operations->host_memory)
        return;
    uint64_t *words = parity_upload(parity, NULL, bytes);
    memset(words, 1, bytes);
    struct read read = {.pool = thread_pool_create(parity->threads, NULL),
        .words = words,
        .words_per_chunk = bytes / sizeof *words / READ_CHUNKS};
    if (read.pool != NULL)
        parity_time(
            parity, work_read, &read, (double)bytes, 0, "plain read              %5.1f MB", 1e-6 * (double)bytes);
    parity_check_true(parity, read.sum != 0, "nothing was read");
    thread_pool_free(read.pool);
    parity_release(parity, words);
}

/* All products of a decode step; Q8_0 output as in the default model. */
static void time_decode(struct parity *parity) {
    struct pass pass = {.parity = parity};
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (size_t i = 0; i < LAYER_PRODUCTS; i++)
            add_call(&pass, (enum tensor_type)parity->entry->index, &layer_products[i]);
    add_call(&pass, TENSOR_Q8_0, &output_product);
    make_room(&pass, 8);
    for (uint32_t rows = 1; rows <= 8; rows *= 2)
        time_rows(&pass, "decode step", rows);
    time_read(parity, (size_t)pass.bytes);
    pass_end(&pass);
}

const struct parity_case parity_linear_timed[] = {
    {.name = "time linear f32", .index = TENSOR_F32, .time = time_products},
    {.name = "time linear f16", .index = TENSOR_F16, .time = time_products},
    {.name = "time linear bf16", .index = TENSOR_BF16, .time = time_products},
    {.name = "time linear q8_0", .index = TENSOR_Q8_0, .time = time_products},
    {.name = "time linear q4_0", .index = TENSOR_Q4_0, .time = time_products},
    {.name = "time linear q4_1", .index = TENSOR_Q4_1, .time = time_products},
    {.name = "time linear q4_k", .index = TENSOR_Q4_K, .time = time_products},
    {.name = "time linear q6_k", .index = TENSOR_Q6_K, .time = time_products},
    {.name = "time linear q5_0", .index = TENSOR_Q5_0, .time = time_products},
    {.name = "time decode q4_1", .index = TENSOR_Q4_1, .time = time_decode},
    {.name = "time decode q8_0", .index = TENSOR_Q8_0, .time = time_decode},
    {.name = "time decode f16", .index = TENSOR_F16, .time = time_decode},
    {.name = NULL},
};
