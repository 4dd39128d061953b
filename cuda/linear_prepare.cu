/* SPDX-License-Identifier: Apache-2.0
 *
 * Around the products: rounding of activations, weights back to f16 for cuBLASLt, rows of weights as embeddings.
 */
#include "cuda/linear_format.cuh"
#include "cuda/warp.cuh"

namespace {

constexpr uint32_t THREADS = 128;
constexpr uint32_t ALL = 0xffffffffu;
constexpr uint32_t INFINITE = 0x7f800000u;

/* Eight lanes a block of 32 numbers; blocks in the order in which they are written. */
__global__ void __launch_bounds__(THREADS)
    linear_round_blocks(const float *x, uint32_t rows, uint32_t steps, int8_t *q, float2 *scales) {
    const uint32_t blocks = rows * steps;
    const uint32_t block = (blockIdx.x * THREADS + threadIdx.x) / 8;
    const uint32_t at = linear_least(block, blocks - 1); /* lanes without work stay for the shuffles */
    const uint32_t row = at % rows, step = at / rows, lane = threadIdx.x % 8;
    const float4 v = *(const float4 *)(x + ((size_t)row * steps + step) * LINEAR_BLOCK + lane * 4);
    const float values[4] = {v.x, v.y, v.z, v.w};
    uint32_t largest = 0; /* by bit patterns, so that a NaN counts as the largest */
    for (int i = 0; i < 4; i++) {
        uint32_t bits = __float_as_uint(values[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    for (int distance = 4; distance > 0; distance /= 2) {
        uint32_t other = __shfl_xor_sync(ALL, largest, distance);
        largest = other > largest ? other : largest;
    }
    const float most = __uint_as_float(largest);
    const bool finite = largest < INFINITE;
    const float scale = finite ? __half2float(__float2half_rn(most / 127.0f)) : __uint_as_float(0x7fc00000u);
    const bool zero = !finite || !(scale > 0);
    const float inverse = 127.0f / most;
    uint32_t word = 0;
    int sum = 0;
    for (int i = 0; i < 4; i++) {
        int rounded = zero ? 0 : (int)rintf(values[i] * inverse);
        word |= ((uint32_t)rounded & 255u) << (8 * i);
        sum += rounded;
    }
    for (int distance = 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(ALL, sum, distance);
    const int other = __shfl_xor_sync(ALL, sum, 4); /* lane 0 has the first half's, this is the last one's */
    if (block >= blocks)
        return;
    uint32_t place = lane % 4 * 2 + lane / 4; /* columns 4 t and 16 + 4 t side by side */
    ((uint32_t *)q)[((size_t)step * rows + row) * 8 + place] = word;
    const bool last = row + 1 == rows && rows % 2 != 0; /* zeroes the unused place beside it, too */
    if (lane == 0 || (lane == 1 && last))
        scales[(size_t)step * ((rows + 1) / 2 * 2) + row + lane] =
            lane == 0 ? make_float2(scale, __int_as_float((sum & 0xffff) | other << 16)) : make_float2(0, 0);
}

__device__ inline uint32_t to_half(float value, bool bfloat) {
    return bfloat ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : __half_as_ushort(__float2half_rn(value));
}

/* One row a thread block, two numbers a thread at a time. Returns the largest magnitude's bits that this thread saw. */
__device__ inline uint32_t halve_row(
    const float *x, uint32_t columns, uint32_t pitch, float factor, bool bfloat, uint32_t *out) {
    uint32_t largest = 0;
    for (uint32_t column = threadIdx.x * 2; column < pitch; column += THREADS * 2) {
        float2 v;
        if (columns % 2 == 0) {
            v = column < columns ? *(const float2 *)(x + column) : make_float2(0, 0);
        } else {
            v.x = column < columns ? x[column] : 0;
            v.y = column + 1 < columns ? x[column + 1] : 0;
        }
        uint32_t first_bits = __float_as_uint(v.x) & 0x7fffffffu, second_bits = __float_as_uint(v.y) & 0x7fffffffu;
        largest = first_bits > largest ? first_bits : largest;
        largest = second_bits > largest ? second_bits : largest;
        out[column / 2] = to_half(v.x * factor, bfloat) | to_half(v.y * factor, bfloat) << 16;
    }
    return largest;
}

/* The largest of all threads' values; shared: a number a warp. */
__device__ inline uint32_t block_largest(uint32_t value, uint32_t *shared) {
    value = warp_most(value);
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = value;
    __syncthreads();
    for (uint32_t warp = 0; warp < THREADS / 32; warp++)
        value = shared[warp] > value ? shared[warp] : value;
    return value;
}

/* Rows that f16 cannot hold are the exception: they are read a second time. */
__global__ void __launch_bounds__(THREADS) linear_halve_rows(
    const float *x, uint32_t columns, uint32_t pitch, bool bfloat, bool spoil, uint32_t *halves, float *row_scales) {
    KERNEL_SHARED(uint32_t, shared);
    const float *row = x + (size_t)blockIdx.x * columns;
    uint32_t *out = halves + (size_t)blockIdx.x * (pitch / 2);
    uint32_t largest = block_largest(halve_row(row, columns, pitch, 1, bfloat, out), shared);
    float factor = 1, scale = 1;
    if (largest >= INFINITE && spoil) {
        factor = __uint_as_float(0x7fc00000u);
    } else if (largest < INFINITE && !bfloat && __uint_as_float(largest) > (float)LINEAR_HALF_MOST) {
        uint32_t exponent = (largest >> 23) - 14; /* of the scale: the largest becomes at least 2^14, below 2^15 */
        scale = __uint_as_float(exponent << 23);
        factor = __uint_as_float((254 - exponent) << 23);
    }
    if (factor != 1) /* NaN included; each thread overwrites what it wrote itself */
        halve_row(row, columns, pitch, factor, bfloat, out);
    if (threadIdx.x == 0)
        row_scales[blockIdx.x] = scale;
}

__global__ void __launch_bounds__(THREADS)
    linear_pad_rows(const float *x, uint32_t columns, uint32_t pitch, float *out) {
    for (uint32_t column = threadIdx.x; column < pitch; column += THREADS)
        out[(size_t)blockIdx.x * pitch + column] = column < columns ? x[(size_t)blockIdx.x * columns + column] : 0;
}

__global__ void __launch_bounds__(THREADS)
    linear_rescale_rows(float *out, uint32_t columns, uint32_t out_pitch, const float *row_scales, bool inverse) {
    float scale = row_scales[blockIdx.x];
    if (scale == 1)
        return;
    if (inverse)
        scale = 1 / scale; /* a power of two */
    for (uint32_t column = threadIdx.x; column < columns; column += THREADS)
        out[(size_t)blockIdx.x * out_pitch + column] *= scale;
}

/* ---- weights of block formats ---- */

__device__ inline float half_at(const char *at) {
    return __half2float(__ushort_as_half(*(const unsigned short *)at));
}

/* Four consecutive columns. */
struct four {
    float value[4];
};

/* What a row's codes are multiplied by, and what is added, in each part of a step. */
template <class F> struct row_scales { float d[F::PARTS], m[F::PARTS]; };

template <class F>
__device__ inline struct row_scales<F> load_row_scales(
    const unsigned char *step, const unsigned char *head, uint32_t row) {
    const struct block_scales<F::PARTS> pair = block_load_scales<F>(step, block_load_head<F>(head, row / 2), row / 2);
    struct row_scales<F> scales;
#pragma unroll
    for (int part = 0; part < F::PARTS; part++) {
        scales.d[part] = row % 2 != 0 ? pair.d[part].y : pair.d[part].x;
        scales.m[part] = !F::MINIMA ? 0 : row % 2 != 0 ? pair.m[part].y : pair.m[part].x;
    }
    return scales;
}

/* The scales that another lane has. */
template <class F>
__device__ inline struct row_scales<F> take_row_scales(const struct row_scales<F> &own, uint32_t lane) {
    struct row_scales<F> scales;
#pragma unroll
    for (int part = 0; part < F::PARTS; part++) {
        scales.d[part] = __shfl_sync(ALL, own.d[part], (int)lane);
        scales.m[part] = F::MINIMA ? __shfl_sync(ALL, own.m[part], (int)lane) : 0;
    }
    return scales;
}

/* codes: a register of block_load_codes. */
template <class F>
__device__ inline struct four to_floats(uint32_t codes, const struct row_scales<F> &scales, uint32_t part) {
    struct four four;
    for (int i = 0; i < 4; i++) {
        const float code = (float)(signed char)(codes >> (8 * i));
        four.value[i] = F::MINIMA ? fmaf(scales.d[part], code, scales.m[part]) : scales.d[part] * code;
    }
    return four;
}

__device__ inline uint32_t to_half_in_range(float value) {
    return to_half(fminf(fmaxf(value, -65504.0f), 65504.0f), false);
}

__device__ inline void store_floats(const struct four &four, float *to) {
    *(float4 *)to = make_float4(four.value[0], four.value[1], four.value[2], four.value[3]);
}

/* The head before a step. */
template <class F> __device__ inline const unsigned char *head_of(const unsigned char *strip, uint32_t step) {
    return strip + block_step_at<F>(step / LINEAR_SUPER_STEPS * LINEAR_SUPER_STEPS) - F::HEAD;
}

__device__ inline void store_halves(const struct four &four, uint16_t *to) {
    *(uint2 *)to = make_uint2(to_half_in_range(four.value[0]) | to_half_in_range(four.value[1]) << 16,
        to_half_in_range(four.value[2]) | to_half_in_range(four.value[3]) << 16);
}

/* A thread block a strip and four blocks of columns, one a warp: lane 4 g + t takes columns of rows g, g + 8, ... */
template <class F>
__global__ void __launch_bounds__(THREADS)
    linear_dequantise_strips(const char *data, size_t strip_bytes, uint32_t steps, uint16_t *out) {
    const uint32_t step = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (step >= steps)
        return;
    const unsigned char *strip = (const unsigned char *)data + blockIdx.y * strip_bytes;
    const unsigned char *codes = strip + block_step_at<F>(step);
    const struct row_scales<F> own = load_row_scales<F>(codes, head_of<F>(strip, step), lane); /* each lane a row's */
    for (uint32_t tile = 0; tile < LINEAR_STRIP / 8; tile++) {
        const uint32_t row = tile * 8 + lane / 4;
        const struct row_scales<F> scales = take_row_scales<F>(own, row);
        uint32_t b[2];
        block_load_codes<F>(codes, tile, lane, b);
        uint16_t *to = out + ((size_t)blockIdx.y * LINEAR_STRIP + row) * steps * LINEAR_BLOCK + step * LINEAR_BLOCK;
        store_halves(to_floats<F>(b[0], scales, 0), to + lane % 4 * 4);
        store_halves(to_floats<F>(b[1], scales, F::PARTS - 1), to + 16 + lane % 4 * 4);
    }
}

__device__ __forceinline__ void zero_row(uint32_t columns, float *out) {
    for (uint32_t column = threadIdx.x; column < columns; column += THREADS)
        out[column] = 0;
}

/* A thread block a token; zeros for one that is no row. A thread takes what a lane of a product does. */
template <class F>
__global__ void __launch_bounds__(THREADS) linear_embed_blocks(
    const char *data, uint32_t weight_rows, size_t strip_bytes, uint32_t columns, const int32_t *tokens, float *out) {
    const uint32_t token = (uint32_t)tokens[blockIdx.x];
    out += (size_t)blockIdx.x * columns;
    if (token >= weight_rows) {
        zero_row(columns, out);
        return;
    }
    const unsigned char *strip = (const unsigned char *)data + token / LINEAR_STRIP * strip_bytes;
    const uint32_t row = token % LINEAR_STRIP;
    for (uint32_t i = threadIdx.x; i < columns / LINEAR_BLOCK * 4; i += THREADS) {
        const uint32_t step = i / 4, t = i % 4;
        const unsigned char *codes = strip + block_step_at<F>(step);
        const struct row_scales<F> scales = load_row_scales<F>(codes, head_of<F>(strip, step), row);
        uint32_t b[2];
        block_load_codes<F>(codes, row / 8, row % 8 * 4 + t, b);
        float *to = out + step * LINEAR_BLOCK + t * 4;
        store_floats(to_floats<F>(b[0], scales, 0), to);
        store_floats(to_floats<F>(b[1], scales, F::PARTS - 1), to + 16);
    }
}

template <int FORMAT>
__global__ void __launch_bounds__(THREADS) linear_embed_values(
    const char *data, uint32_t weight_rows, uint32_t pitch, uint32_t columns, const int32_t *tokens, float *out) {
    const uint32_t token = (uint32_t)tokens[blockIdx.x];
    if (token >= weight_rows) {
        zero_row(columns, out + (size_t)blockIdx.x * columns);
        return;
    }
    const size_t row = (size_t)token * pitch;
    for (uint32_t column = threadIdx.x; column < columns; column += THREADS) {
        float value;
        if (FORMAT == LINEAR_F32)
            value = ((const float *)data)[row + column];
        else if (FORMAT == LINEAR_F16)
            value = half_at(data + (row + column) * 2);
        else
            value = __uint_as_float((uint32_t)((const unsigned short *)data)[row + column] << 16);
        out[(size_t)blockIdx.x * columns + column] = value;
    }
}

uint32_t divide_up(uint32_t a, uint32_t b) {
    return (a + b - 1) / b;
}

template <int FORMAT>
void embed(const struct backend_weight *weight, const int32_t *tokens, uint32_t rows, float *out, cudaStream_t stream) {
    if (FORMAT < LINEAR_Q8_0)
        KERNEL_LAUNCH(linear_embed_values<FORMAT>, rows, THREADS, 0, stream, weight->data, weight->rows, weight->pitch,
            weight->columns, tokens, out);
    else
        KERNEL_LAUNCH(linear_embed_blocks<block_format<FORMAT>>, rows, THREADS, 0, stream, weight->data, weight->rows,
            weight->strip_bytes, weight->columns, tokens, out);
}

template <int FORMAT>
void dequantise(const char *data, size_t strip_bytes, dim3 grid, uint32_t steps, uint16_t *out, cudaStream_t stream) {
    KERNEL_LAUNCH(
        linear_dequantise_strips<block_format<FORMAT>>, grid, THREADS, 0, stream, data, strip_bytes, steps, out);
}

} // namespace

void launch_linear_round(
    const float *x, uint32_t rows, uint32_t columns, int8_t *q, float *scales, cudaStream_t stream) {
    const uint32_t steps = columns / LINEAR_BLOCK;
    KERNEL_LAUNCH(linear_round_blocks, divide_up(rows * steps, THREADS / 8), THREADS, 0, stream, x, rows, steps, q,
        (float2 *)scales);
}

void launch_linear_halve(const float *x, uint32_t rows, uint32_t columns, uint32_t pitch, bool bfloat, bool spoil,
    uint16_t *halves, float *row_scales, cudaStream_t stream) {
    KERNEL_LAUNCH(linear_halve_rows, rows, THREADS, THREADS / 32 * sizeof(uint32_t), stream, x, columns, pitch, bfloat,
        spoil, (uint32_t *)halves, row_scales);
}

void launch_linear_pad(
    const float *x, uint32_t rows, uint32_t columns, uint32_t pitch, float *out, cudaStream_t stream) {
    KERNEL_LAUNCH(linear_pad_rows, rows, THREADS, 0, stream, x, columns, pitch, out);
}

void launch_linear_scale_rows(float *out, uint32_t rows, uint32_t columns, uint32_t out_pitch, const float *row_scales,
    bool inverse, cudaStream_t stream) {
    KERNEL_LAUNCH(linear_rescale_rows, rows, THREADS, 0, stream, out, columns, out_pitch, row_scales, inverse);
}

void launch_linear_dequantise(enum linear_format format, const char *data, size_t strip_bytes, uint32_t first,
    uint32_t count, uint32_t columns, uint16_t *out, cudaStream_t stream) {
    static void (*const of_format[LINEAR_FORMATS])(const char *, size_t, dim3, uint32_t, uint16_t *, cudaStream_t) = {
        NULL, NULL, NULL, dequantise<LINEAR_Q8_0>, dequantise<LINEAR_Q4_0>, dequantise<LINEAR_Q4_1>,
        dequantise<LINEAR_Q5_0>, dequantise<LINEAR_Q5_1>, dequantise<LINEAR_IQ4_NL>, dequantise<LINEAR_MXFP4>,
        dequantise<LINEAR_Q2_K>, dequantise<LINEAR_Q3_K>, dequantise<LINEAR_Q4_K>, dequantise<LINEAR_Q5_K>,
        dequantise<LINEAR_Q6_K>};
    const uint32_t steps = columns / LINEAR_BLOCK;
    of_format[format](data + first * strip_bytes, strip_bytes, dim3(divide_up(steps, 4), count), steps, out, stream);
}

void launch_linear_embed(
    const struct backend_weight *weight, const int32_t *tokens, uint32_t rows, float *out, cudaStream_t stream) {
    static void (*const of_format[LINEAR_FORMATS])(
        const struct backend_weight *, const int32_t *, uint32_t, float *, cudaStream_t) = {embed<LINEAR_F32>,
        embed<LINEAR_F16>, embed<LINEAR_BF16>, embed<LINEAR_Q8_0>, embed<LINEAR_Q4_0>, embed<LINEAR_Q4_1>,
        embed<LINEAR_Q5_0>, embed<LINEAR_Q5_1>, embed<LINEAR_IQ4_NL>, embed<LINEAR_MXFP4>, embed<LINEAR_Q2_K>,
        embed<LINEAR_Q3_K>, embed<LINEAR_Q4_K>, embed<LINEAR_Q5_K>, embed<LINEAR_Q6_K>};
    of_format[weight->format](weight, tokens, rows, out, stream);
}
