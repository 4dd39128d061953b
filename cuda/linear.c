/* SPDX-License-Identifier: Apache-2.0
 *
 * The operation `linear`: prepares activations as the weights' formats want them, once a call, and launches the kernel
 * for the number of rows. Weights side by side that have the same format are multiplied by one launch.
 */
#include "cuda/linear.h"

#include <stdlib.h>

/* Dequantised weights that exist at once. */
static const size_t DEQUANTISED_BYTES = (size_t)32 << 20;

/* On devices of the 8.6 and 8.9 kind tensor cores multiply int8 four times as fast as f16 with float32 sums, so that
 * the kernel for blocks is ahead for any number of rows; elsewhere twice as fast, which is what its scaling costs. */
static uint32_t library_rows(uint32_t capability) {
    return capability == 86 || capability == 89 ? UINT32_MAX : 256;
}

struct linear_state *cuda_linear_state(struct cuda_backend *cuda) {
    if (cuda->linear != NULL || cuda->failed != cudaSuccess)
        return cuda->linear;
    struct linear_state *state = calloc(1, sizeof *state);
    if (state == NULL) {
        cuda_check(cuda, cudaErrorMemoryAllocation, "linear");
        return NULL;
    }
    state->limits = (struct linear_limits){
        .blocks_library = library_rows(cuda->capability), .dequantised_bytes = DEQUANTISED_BYTES};
    cuda->linear = state;
    return state;
}

void cuda_linear_free(struct cuda_backend *cuda) {
    struct linear_state *state = cuda->linear;
    if (state == NULL)
        return;
    cuda_scratch_free(&state->rounded);
    cuda_scratch_free(&state->halves);
    cuda_scratch_free(&state->padded);
    cuda_scratch_free(&state->dequantised);
    linear_library_free(state->library);
    free(state);
    cuda->linear = NULL;
}

enum method {
    METHOD_BLOCKS,  /* int8 activations */
    METHOD_STREAM,  /* float32 activations */
    METHOD_F32,     /* the same */
    METHOD_HALVES,  /* activations of the weights' format */
    METHOD_LIBRARY, /* the same; block formats: f16 */
};

static enum method choose_method(const struct linear_limits *limits, enum linear_format format, uint32_t rows) {
    if (format == LINEAR_F32)
        return rows <= LINEAR_STREAM_ROWS ? METHOD_STREAM : METHOD_F32;
    if (!linear_is_float(format))
        return !limits->deterministic && rows >= limits->blocks_library ? METHOD_LIBRARY : METHOD_BLOCKS;
    if (limits->deterministic)
        return METHOD_HALVES;
    if (rows <= LINEAR_STREAM_ROWS)
        return METHOD_STREAM;
    return rows < LINEAR_LIBRARY_ROWS ? METHOD_HALVES : METHOD_LIBRARY;
}

/* Some rows of a call. */
struct operation {
    struct cuda_backend *cuda;
    struct linear_state *state;
    const struct backend_weight *const *weights;
    uint32_t weights_count;
    const float *x;
    uint32_t rows, columns;
    float *out;
    uint32_t out_pitch;
    bool add;
    bool rounded, padded; /* activations that are prepared already: weights of several formats share them */
};

static uint32_t pitch_of(uint32_t columns) {
    return (columns + LINEAR_PITCH - 1) / LINEAR_PITCH * LINEAR_PITCH;
}

static size_t round_up_256(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

static bool prepare_rounded(struct operation *o, struct linear_call *call) {
    size_t steps = o->columns / LINEAR_BLOCK;
    size_t q_bytes = round_up_256(steps * o->rows * LINEAR_BLOCK);
    size_t scales_bytes = steps * ((o->rows + 1) / 2 * 2) * 2 * sizeof(float);
    char *memory = cuda_scratch_reserve(o->cuda, &o->state->rounded, q_bytes + scales_bytes);
    if (memory == NULL)
        return false;
    float *scales = (float *)(memory + q_bytes);
    call->q = (int8_t *)memory;
    call->scales = scales;
    if (!o->rounded)
        launch_linear_round(o->x, o->rows, o->columns, (int8_t *)memory, scales, o->cuda->stream);
    o->rounded = true;
    return true;
}

static bool prepare_halves(const struct operation *o, bool bfloat, bool spoil, struct linear_call *call) {
    uint32_t pitch = pitch_of(o->columns);
    size_t halves_bytes = round_up_256((size_t)o->rows * pitch * 2);
    char *memory = cuda_scratch_reserve(o->cuda, &o->state->halves, halves_bytes + o->rows * sizeof(float));
    if (memory == NULL)
        return false;
    uint16_t *halves = (uint16_t *)memory;
    float *row_scales = (float *)(memory + halves_bytes);
    call->halves = halves;
    call->row_scales = row_scales;
    launch_linear_halve(o->x, o->rows, o->columns, pitch, bfloat, spoil, halves, row_scales, o->cuda->stream);
    return true;
}

static bool prepare_floats(struct operation *o, struct linear_call *call) {
    uint32_t pitch = pitch_of(o->columns);
    call->x = o->x;
    if (pitch == o->columns)
        return true;
    float *padded = cuda_scratch_reserve(o->cuda, &o->state->padded, (size_t)o->rows * pitch * sizeof(float));
    call->x = padded;
    if (padded != NULL && !o->padded)
        launch_linear_pad(o->x, o->rows, o->columns, pitch, padded, o->cuda->stream);
    o->padded = padded != NULL;
    return padded != NULL;
}

static bool prepare(struct operation *o, enum method method, enum linear_format format, struct linear_call *call) {
    if (method == METHOD_BLOCKS)
        return prepare_rounded(o, call);
    if (method == METHOD_STREAM || method == METHOD_F32)
        return prepare_floats(o, call);
    return prepare_halves(o, format == LINEAR_BF16, !linear_is_float(format), call);
}

static void library_multiply(const struct operation *o, const struct backend_weight *weight,
    const struct linear_call *call, const uint16_t *weights, uint32_t first_row, uint32_t rows, uint32_t out_column) {
    const struct linear_product product = {.weights = weights,
        .halves = call->halves,
        .bfloat = weight->format == LINEAR_BF16,
        .columns = rows,
        .pitch = weight->pitch,
        .rows = o->rows,
        .out = o->out + out_column + first_row,
        .out_pitch = o->out_pitch,
        .add = o->add};
    linear_library_multiply(o->cuda, o->state->library, &product);
}

/* Weights in a block format through f16, a bounded number of strips at a time. */
static void library_multiply_blocks(const struct operation *o, const struct backend_weight *weight,
    const struct linear_call *call, uint32_t out_column) {
    size_t strip = (size_t)LINEAR_STRIP * weight->columns * 2;
    uint32_t strips = (weight->rows - 1) / LINEAR_STRIP + 1;
    size_t fit = o->state->limits.dequantised_bytes / strip;
    uint32_t most = fit > strips ? strips : fit > 0 ? (uint32_t)fit : 1;
    uint16_t *halves = cuda_scratch_reserve(o->cuda, &o->state->dequantised, most * strip);
    for (uint32_t first = 0; halves != NULL && first < strips; first += most) {
        uint32_t count = strips - first < most ? strips - first : most;
        uint32_t row = first * LINEAR_STRIP, rows = weight->rows - row;
        launch_linear_dequantise(
            weight->format, weight->data, weight->strip_bytes, first, count, weight->columns, halves, o->cuda->stream);
        library_multiply(
            o, weight, call, halves, row, rows < count * LINEAR_STRIP ? rows : count * LINEAR_STRIP, out_column);
    }
}

/* Rows that were divided by a scale add to results that are, too. */
static void run_library(const struct operation *o, const struct linear_call *call, uint32_t first_weight) {
    if (o->state->library == NULL)
        o->state->library = linear_library_create(o->cuda);
    if (o->state->library == NULL)
        return;
    for (uint32_t i = 0; i < call->parts_count; i++) {
        const struct backend_weight *weight = o->weights[first_weight + i];
        uint32_t column = call->parts[i].out_column;
        float *out = o->out + column;
        bool scaled = weight->format != LINEAR_BF16;
        if (scaled && o->add)
            launch_linear_scale_rows(out, o->rows, weight->rows, o->out_pitch, call->row_scales, true, o->cuda->stream);
        if (linear_is_float(weight->format))
            library_multiply(o, weight, call, (const uint16_t *)weight->data, 0, weight->rows, column);
        else
            library_multiply_blocks(o, weight, call, column);
        if (scaled)
            launch_linear_scale_rows(
                out, o->rows, weight->rows, o->out_pitch, call->row_scales, false, o->cuda->stream);
    }
}

static void run(const struct operation *o, const struct linear_call *call, enum method method,
    enum linear_format format, uint32_t first_weight) {
    if (method == METHOD_BLOCKS)
        launch_linear_blocks(call, format, o->cuda->multiprocessors, o->cuda->stream);
    else if (method == METHOD_STREAM)
        launch_linear_stream(call, format, o->cuda->stream);
    else if (method == METHOD_F32)
        launch_linear_f32(call, o->cuda->stream);
    else if (method == METHOD_HALVES)
        launch_linear_halves(call, format == LINEAR_BF16, o->cuda->stream);
    else
        run_library(o, call, first_weight);
}

/* Weights [first, end) of one format. out_column: where the first one's results start. */
static void multiply(struct operation *o, uint32_t first, uint32_t end, uint32_t out_column) {
    const struct backend_weight *weight = o->weights[first];
    enum method method = choose_method(&o->state->limits, weight->format, o->rows);
    struct linear_call call = {.steps = o->columns / LINEAR_BLOCK,
        .strip_bytes = weight->strip_bytes,
        .pitch = weight->pitch,
        .rows = o->rows,
        .out = o->out,
        .out_pitch = o->out_pitch,
        .add = o->add,
        .pairs = o->out_pitch % 2 == 0};
    for (uint32_t i = first; i < end; i++) {
        call.parts[call.parts_count++] =
            (struct linear_part){.data = o->weights[i]->data, .rows = o->weights[i]->rows, .out_column = out_column};
        out_column += o->weights[i]->rows;
    }
    if (prepare(o, method, weight->format, &call))
        run(o, &call, method, weight->format, first);
}

static void multiply_rows(struct operation *o) {
    uint32_t out_column = 0;
    for (uint32_t first = 0, end; first < o->weights_count; first = end) {
        uint32_t next_column = out_column;
        for (end = first; end < o->weights_count && o->weights[end]->format == o->weights[first]->format; end++)
            next_column += o->weights[end]->rows;
        multiply(o, first, end, out_column);
        out_column = next_column;
    }
}

void cuda_linear(struct backend *backend, const struct backend_weight *const *weights, uint32_t weights_count,
    const float *x, uint32_t rows, bool add, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct operation o = {.cuda = cuda,
        .state = cuda_linear_state(cuda),
        .weights = weights,
        .weights_count = weights_count,
        .columns = weights[0]->columns,
        .add = add};
    if (o.state == NULL || cuda->failed != cudaSuccess)
        return;
    for (uint32_t i = 0; i < weights_count; i++)
        o.out_pitch += weights[i]->rows;
    for (uint32_t first = 0; first < rows; first += o.rows) {
        o.rows = rows - first < LINEAR_ROWS_AT_ONCE ? rows - first : LINEAR_ROWS_AT_ONCE;
        o.x = x + (size_t)first * o.columns;
        o.out = out + (size_t)first * o.out_pitch;
        o.rounded = o.padded = false;
        multiply_rows(&o);
    }
    cuda_check_launch(cuda, "linear");
}
