/* SPDX-License-Identifier: Apache-2.0
 *
 * What is kept of an output matrix W_o [D][H * d]: computed once a layer. Sums over D are in double, since the factors
 * of a matrix without full rank come from what is left of differences.
 */
#include "cuda/score_device.h"
#include "engine/tensor.h"

enum { MATRIX_THREADS = 256, TURN_TILE = 32, PAIR_TILE = 64, PAIR_SLICE = 16, PAIR_STRIDE = 66, FACTOR_THREADS = 256 };

/* ---- turning ---- */

/* Value `column` of a row of F32, F16 or BF16. */
SCORE_INLINE float tensor_value(uint32_t type, const unsigned char *row, uint32_t column) {
    if (type == TENSOR_F32)
        return ((const float *)row)[column];
    uint16_t half = ((const unsigned short *)row)[column];
    return type == TENSOR_F16 ? half_number(half) : bfloat_number(half);
}

SCORE_INLINE void put(float *to, float value) {
    *to = value;
}

SCORE_INLINE void put(uint16_t *to, float value) { /* a number of f16: nothing is rounded */
    *to = __half_as_ushort(__float2half_rn(value));
}

/* dense [columns][stride] = the matrix turned, zeros from `rows` on. */
template <typename number>
static __global__ void __launch_bounds__(MATRIX_THREADS) score_turn(uint32_t type, const unsigned char *tensor,
    size_t row_bytes, uint32_t rows, uint32_t columns, number *dense, uint32_t stride) {
    KERNEL_SHARED(float, tile); /* [TURN_TILE][TURN_TILE + 1] */
    uint32_t first_row = blockIdx.x * TURN_TILE, first_column = blockIdx.y * TURN_TILE;
    for (uint32_t i = threadIdx.x; i < TURN_TILE * TURN_TILE; i += MATRIX_THREADS) {
        uint32_t row = first_row + i / TURN_TILE, column = first_column + i % TURN_TILE;
        tile[i / TURN_TILE * (TURN_TILE + 1) + i % TURN_TILE] =
            row < rows && column < columns ? tensor_value(type, tensor + row * row_bytes, column) : 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < TURN_TILE * TURN_TILE; i += MATRIX_THREADS) {
        uint32_t row = first_row + i % TURN_TILE, column = first_column + i / TURN_TILE;
        if (column < columns)
            put(dense + (size_t)column * stride + row, tile[i % TURN_TILE * (TURN_TILE + 1) + i / TURN_TILE]);
    }
}

template <typename number>
static void launch_turned(const struct cuda_score_tensor *tensor, number *dense, cudaStream_t stream) {
    uint32_t stride = (tensor->rows + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
    dim3 grid(stride / TURN_TILE, (tensor->columns + TURN_TILE - 1) / TURN_TILE);
    KERNEL_LAUNCH(score_turn<number>, grid, dim3(MATRIX_THREADS), TURN_TILE * (TURN_TILE + 1) * sizeof(float), stream,
        tensor->type, (const unsigned char *)tensor->data, tensor->row_bytes, tensor->rows, tensor->columns, dense,
        stride);
}

void launch_score_turn(const struct cuda_score_tensor *tensor, float *dense, cudaStream_t stream) {
    launch_turned(tensor, dense, stream);
}

void launch_score_turn_halves(const struct cuda_score_tensor *tensor, uint16_t *halves, cudaStream_t stream) {
    launch_turned(tensor, halves, stream);
}

/* ---- products of pairs of heads ---- */

/* Four numbers of a row of a head's part of dense, from n on, into column `row` of a slice [PAIR_SLICE][PAIR_STRIDE].
 */
SCORE_INLINE void slice_load(
    const float *dense, uint32_t stride, uint32_t channel, uint32_t dim, uint32_t first, float *slice) {
    uint32_t row = threadIdx.x / 4, n = threadIdx.x % 4 * 4;
    float4 four = make_float4(0, 0, 0, 0);
    if (channel + row < dim)
        four = *(const float4 *)(dense + (size_t)(channel + row) * stride + first + n);
    slice[n * PAIR_STRIDE + row] = four.x;
    slice[(n + 1) * PAIR_STRIDE + row] = four.y;
    slice[(n + 2) * PAIR_STRIDE + row] = four.z;
    slice[(n + 3) * PAIR_STRIDE + row] = four.w;
}

/* squares [pair][d][d]: W_h W_g^T of the pairs (h, g), element (i, j) of channels i of h and j of g. A thread has four
 * rows and every 16th column, so that lanes write side by side. */
static __global__ void __launch_bounds__(MATRIX_THREADS)
    score_pairs(const float *dense, uint32_t stride, uint32_t dim, const uint32_t *pairs, double *squares) {
    KERNEL_SHARED(float, slices); /* [2][PAIR_SLICE][PAIR_STRIDE] */
    float *of_h = slices, *of_g = slices + PAIR_SLICE * PAIR_STRIDE;
    uint32_t h = pairs[2 * blockIdx.z], g = pairs[2 * blockIdx.z + 1], i0 = blockIdx.x * PAIR_TILE,
             j0 = blockIdx.y * PAIR_TILE, ti = threadIdx.x / 16 * 4, tj = threadIdx.x % 16;
    double sums[4][4] = {{0}};
    for (uint32_t first = 0; first < stride; first += PAIR_SLICE) {
        __syncthreads();
        slice_load(dense + (size_t)h * dim * stride, stride, i0, dim, first, of_h);
        slice_load(dense + (size_t)g * dim * stride, stride, j0, dim, first, of_g);
        __syncthreads();
#pragma unroll 4
        for (uint32_t n = 0; n < PAIR_SLICE; n++) {
            const float2 *a = (const float2 *)(of_h + n * PAIR_STRIDE + ti);
            const float *b = of_g + n * PAIR_STRIDE + tj;
            const double x[4] = {a[0].x, a[0].y, a[1].x, a[1].y}, y[4] = {b[0], b[16], b[32], b[48]};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sums[i][j] = fma(x[i], y[j], sums[i][j]);
        }
    }
    double *square = squares + (size_t)blockIdx.z * dim * dim;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            if (i0 + ti + i < dim && j0 + tj + 16 * j < dim)
                square[(size_t)(i0 + ti + i) * dim + j0 + tj + 16 * j] = sums[i][j];
}

void launch_score_pairs(const float *dense, uint32_t rows, uint32_t dim, const uint32_t *pairs, uint32_t count,
    double *squares, cudaStream_t stream) {
    uint32_t tiles = (dim + PAIR_TILE - 1) / PAIR_TILE, stride = (rows + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
    KERNEL_LAUNCH(score_pairs, dim3(tiles, tiles, count), dim3(MATRIX_THREADS),
        2 * PAIR_SLICE * PAIR_STRIDE * sizeof(float), stream, dense, stride, dim, pairs, squares);
}

/* ---- factors ---- */

/* F, lower triangular, with F^T F = square, by Cholesky's method from the last channel on, in place; factors
 * [d][stride] turned, zero before. A matrix without full rank has pivots of zero but for rounding: those channels add
 * nothing. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    score_factor(double *squares, uint32_t dim, float *factors, uint32_t stride) {
    KERNEL_SHARED(double, whole); /* [d] pivots before anything was taken off; then [d] the row of the step */
    double *square = squares + (size_t)blockIdx.x * dim * dim, *row = whole + dim;
    factors += (size_t)blockIdx.x * dim * stride;
    for (uint32_t i = threadIdx.x; i < dim; i += FACTOR_THREADS)
        whole[i] = square[(size_t)i * dim + i];
    __syncthreads();
    for (uint32_t j = dim; j-- > 0;) {
        const double *from = square + (size_t)j * dim, pivot = from[j];
        double root = pivot > whole[j] * 1e-11 ? sqrt(pivot) : 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i <= j; i += FACTOR_THREADS) {
            double value = i == j ? root : root > 0 ? from[i] / root : 0;
            row[i] = value;
            factors[(size_t)i * stride + j] = (float)value;
        }
        __syncthreads();
        /* What is left of the lower triangle, two of its rows as one of j + 1: i and j - 1 - i. */
        for (uint32_t e = threadIdx.x; root > 0 && e < (j + 1) / 2 * (j + 1); e += FACTOR_THREADS) {
            uint32_t i = e / (j + 1), k = e % (j + 1);
            if (k > i) {
                k -= i + 1;
                i = j - 1 - i;
                if (2 * i + 1 == j) /* the middle row is there once */
                    continue;
            }
            square[(size_t)i * dim + k] -= row[i] * row[k];
        }
        __syncthreads();
    }
}

void launch_score_factor(double *squares, uint32_t count, uint32_t dim, float *factors, cudaStream_t stream) {
    uint32_t stride = (dim + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
    KERNEL_LAUNCH(score_factor, dim3(count), dim3(FACTOR_THREADS), 2 * dim * sizeof(double), stream, squares, dim,
        factors, stride);
}

/* ---- grams ---- */

/* grams at (h, g): [j of g][i of h] floats, zero beyond i = d. */
static __global__ void __launch_bounds__(MATRIX_THREADS) score_gram(
    const double *squares, uint32_t dim, const uint32_t *pairs, uint32_t heads, float *grams, uint32_t stride) {
    KERNEL_SHARED(float, tile); /* [TURN_TILE][TURN_TILE + 1] */
    const double *square = squares + (size_t)blockIdx.z * dim * dim;
    float *gram = grams + ((size_t)pairs[2 * blockIdx.z] * heads + pairs[2 * blockIdx.z + 1]) * dim * stride;
    uint32_t i0 = blockIdx.x * TURN_TILE, j0 = blockIdx.y * TURN_TILE;
    for (uint32_t e = threadIdx.x; e < TURN_TILE * TURN_TILE; e += MATRIX_THREADS) {
        uint32_t i = e / TURN_TILE, j = e % TURN_TILE;
        tile[i * (TURN_TILE + 1) + j] =
            i0 + i < dim && j0 + j < dim ? (float)square[(size_t)(i0 + i) * dim + j0 + j] : 0;
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < TURN_TILE * TURN_TILE; e += MATRIX_THREADS) {
        uint32_t i = e % TURN_TILE, j = e / TURN_TILE;
        if (j0 + j < dim)
            gram[(size_t)(j0 + j) * stride + i0 + i] = tile[i * (TURN_TILE + 1) + j];
    }
}

void launch_score_gram(const double *squares, uint32_t dim, const uint32_t *pairs, uint32_t count, uint32_t heads,
    float *grams, cudaStream_t stream) {
    uint32_t stride = (dim + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
    KERNEL_LAUNCH(score_gram, dim3(stride / TURN_TILE, (dim + TURN_TILE - 1) / TURN_TILE, count), dim3(MATRIX_THREADS),
        TURN_TILE * (TURN_TILE + 1) * sizeof(float), stream, squares, dim, pairs, heads, grams, stride);
}
