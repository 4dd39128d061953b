/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/moments.h"
#include "cuda/device.h"

enum {
    POSITIONS_LEFT_OUT = 4, /* the first tokens draw attention for no reason of their content (kvpress) */
    TILE = 32,              /* rows and columns of a block's part of the outer product */
    TILE_THREADS = 256,     /* a thread has 4 rows of one column */
    QUEUE_ROWS = 16,        /* queries in shared memory at a time */
};

/* The first row of an item that counts. */
static __device__ __forceinline__ uint32_t first_row(const struct kv_item &item) {
    uint32_t left_out = item.position < POSITIONS_LEFT_OUT ? POSITIONS_LEFT_OUT - item.position : 0;
    return left_out < item.rows ? left_out : item.rows;
}

/* Number of the tile (i, j), i <= j, in order of j, back to i and j. */
static __device__ __forceinline__ void tile_of(uint32_t number, uint32_t *i, uint32_t *j) {
    uint32_t column = 0;
    while (number > column)
        number -= ++column;
    *i = number;
    *j = column;
}

/* Some queries' channels [from, from + TILE): to [QUEUE_ROWS][TILE]. */
static __device__ __forceinline__ void load_channels(
    const float *queries, size_t stride, uint32_t count, uint32_t from, uint32_t dim, float *to) {
    for (uint32_t i = threadIdx.x; i < QUEUE_ROWS * TILE; i += TILE_THREADS) {
        uint32_t row = i / TILE, channel = from + i % TILE;
        to[i] = row < count && channel < dim ? queries[row * stride + channel] : 0;
    }
}

/* A block has one head's tile of 32 x 32 numbers of the upper triangle. Those on the diagonal add the sums too. */
static __global__ void __launch_bounds__(TILE_THREADS, 2) moments_kernel(
    const struct cuda_batch batch, uint32_t heads, const float *qkv, const struct query_moments *moments) {
    KERNEL_SHARED(float, left);
    float *right = left + QUEUE_ROWS * TILE;
    const struct kv_item item = batch.items[blockIdx.z];
    const struct query_moments to = moments[blockIdx.z];
    uint32_t head = blockIdx.y, dim = batch.pool.layout.head_dim, first = first_row(item), tile_i, tile_j;
    if (to.sum == NULL)
        return;
    if (blockIdx.x == 0 && head == 0 && threadIdx.x == 0)
        *to.count += item.rows - first;
    tile_of(blockIdx.x, &tile_i, &tile_j);
    uint32_t i = tile_i * TILE + threadIdx.x / TILE * 4, j = tile_j * TILE + threadIdx.x % TILE;
    double *outer = to.outer + (size_t)head * dim * dim, products[4] = {0, 0, 0, 0}, sum = 0;
    bool sums = tile_i == tile_j && threadIdx.x < TILE && j < dim;
    for (uint32_t k = 0; k < 4; k++) {
        if (i + k <= j && j < dim)
            products[k] = outer[(size_t)(i + k) * dim + j];
    }
    if (sums)
        sum = to.sum[(size_t)head * dim + j];
    size_t stride = (size_t)(heads + 2 * batch.pool.layout.kv_heads) * dim;
    for (uint32_t row = first; row < item.rows; row += QUEUE_ROWS) {
        uint32_t count = item.rows - row < QUEUE_ROWS ? item.rows - row : (uint32_t)QUEUE_ROWS;
        const float *queries = qkv + (item.first_row + row) * stride + (size_t)head * dim;
        load_channels(queries, stride, count, tile_i * TILE, dim, left);
        load_channels(queries, stride, count, tile_j * TILE, dim, right);
        __syncthreads();
        for (uint32_t query = 0; query < count; query++) {
            double x = (double)right[query * TILE + threadIdx.x % TILE];
            float4 four = *(const float4 *)(left + query * TILE + threadIdx.x / TILE * 4);
            products[0] = fma((double)four.x, x, products[0]);
            products[1] = fma((double)four.y, x, products[1]);
            products[2] = fma((double)four.z, x, products[2]);
            products[3] = fma((double)four.w, x, products[3]);
            sum += x;
        }
        __syncthreads();
    }
    for (uint32_t k = 0; k < 4; k++) {
        if (i + k <= j && j < dim)
            outer[(size_t)(i + k) * dim + j] = products[k];
    }
    if (sums)
        to.sum[(size_t)head * dim + j] = sum;
}

extern "C" void moments_launch(const struct cuda_batch *batch, uint32_t heads, const float *qkv,
    const struct query_moments *moments, cudaStream_t stream) {
    uint32_t tiles = (batch->pool.layout.head_dim + TILE - 1) / TILE;
    KERNEL_LAUNCH(moments_kernel, dim3(tiles * (tiles + 1) / 2, heads, batch->items_count), dim3(TILE_THREADS),
        2 * QUEUE_ROWS * TILE * sizeof(float), stream, *batch, heads, qkv, moments);
}
