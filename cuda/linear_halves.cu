/* SPDX-License-Identifier: Apache-2.0
 *
 * F16 and BF16 weights times activations of the same format on tensor cores, for numbers of rows where reading the
 * weights is what costs, and for any number when bits must not depend on it.
 *
 * A thread block multiplies 32 rows of weights, 8 a warp, with up to 64 of activations. Stages of 64 columns (128 bytes
 * a row) pass through a ring in shared memory; chunk c of 16 bytes of row r lies at c ^ (r % 8), so that the eight rows
 * of an 8x8 matrix that ldmatrix reads lie in different banks.
 */
#include "cuda/linear_device.cuh"

namespace {

constexpr uint32_t THREADS = 128;
constexpr uint32_t CHUNKS = 8; /* of 8 numbers: a row's part of a stage */
constexpr uint32_t ROW_BYTES = CHUNKS * 16;

template <int TILES> constexpr uint32_t STAGE = (LINEAR_STRIP + TILES * 16) * ROW_BYTES;
template <int TILES> constexpr uint32_t STAGES = TILES == 1 ? 6 : TILES == 2 ? 5 : 4;

/* Rows that are not there are not copied, and not read either: reads take the last one instead. */
__device__ inline void load_rows(
    const uint16_t *from, uint32_t rows, uint32_t most, uint32_t chunks, uint32_t first, unsigned char *to) {
    for (uint32_t i = threadIdx.x; i < most * CHUNKS; i += THREADS) {
        uint32_t row = i / CHUNKS, chunk = i % CHUNKS;
        if (row < rows && first + chunk < chunks)
            device_copy_async_16(
                to + row * ROW_BYTES + (chunk ^ (row & 7)) * 16, from + ((size_t)row * chunks + first + chunk) * 8);
    }
}

__device__ inline const unsigned char *chunk_of(const unsigned char *rows, uint32_t row, uint32_t chunk) {
    return rows + row * ROW_BYTES + (chunk ^ (row & 7)) * 16;
}

/* Two steps of 16 columns from `chunk` on, or one when only one is there: weights by one ldmatrix, whose lanes give the
 * addresses of 8 rows of 4 chunks; activations by one a tile of 16 and step. */
template <bool BFLOAT, int TILES>
__device__ inline void multiply_chunks(const unsigned char *weights, const unsigned char *x, uint32_t weight_row,
    const uint32_t *token_rows, uint32_t chunk, uint32_t end, uint32_t lane, float (*sums)[4]) {
    uint32_t b[4];
    device_ldmatrix_x4(b, chunk_of(weights, weight_row, linear_least(chunk + lane / 8, end - 1)));
#pragma unroll
    for (uint32_t step = 0; step < 2; step++) {
        if (chunk + 2 * step >= end)
            break;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint32_t a[4];
            device_ldmatrix_x4(a, chunk_of(x, token_rows[i], chunk + 2 * step + lane / 16));
            if (BFLOAT)
                device_mma_m16n8k16_bf16(sums[i], a, b + 2 * step, sums[i]);
            else
                device_mma_m16n8k16_f16(sums[i], a, b + 2 * step, sums[i]);
        }
    }
}

template <bool BFLOAT, int TILES>
__global__ void __launch_bounds__(THREADS) linear_multiply_halves(struct linear_call call) {
    KERNEL_SHARED(unsigned char, ring);
    constexpr uint32_t RING = STAGES<TILES>, BYTES = STAGE<TILES>, TOKENS = TILES * 16;
    constexpr uint32_t X = LINEAR_STRIP * ROW_BYTES; /* where a stage's activations lie */
    const struct linear_part part = linear_find_part(call, blockIdx.y);
    const uint32_t row = (blockIdx.y - part.first_block) * LINEAR_STRIP, token = blockIdx.x * TOKENS;
    const uint32_t rows = linear_least(LINEAR_STRIP, part.rows - row);
    const uint32_t tokens = linear_least(TOKENS, call.rows - token);
    const uint32_t chunks = call.pitch / 8, stages = (chunks + CHUNKS - 1) / CHUNKS;
    const uint16_t *weights = (const uint16_t *)part.data + (size_t)row * call.pitch;
    const uint16_t *x = call.halves + (size_t)token * call.pitch;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t weight_row = linear_least(warp * 8 + lane % 8, rows - 1);
    uint32_t token_rows[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++)
        token_rows[i] = linear_least(i * 16 + lane % 16, tokens - 1);
    float sums[TILES][4] = {};
    for (uint32_t next = 0; next < RING - 1; next++) {
        if (next < stages) {
            load_rows(weights, rows, LINEAR_STRIP, chunks, next * CHUNKS, ring + next * BYTES);
            load_rows(x, tokens, TOKENS, chunks, next * CHUNKS, ring + next * BYTES + X);
        }
        device_copy_commit();
    }
    for (uint32_t at = 0, slot = 0; at < stages; at++) {
        device_copy_wait<RING - 2>();
        __syncthreads();
        uint32_t next = at + RING - 1;
        if (next < stages) {
            unsigned char *to = ring + (slot == 0 ? RING - 1 : slot - 1) * BYTES;
            load_rows(weights, rows, LINEAR_STRIP, chunks, next * CHUNKS, to);
            load_rows(x, tokens, TOKENS, chunks, next * CHUNKS, to + X);
        }
        device_copy_commit();
        const unsigned char *stage = ring + slot * BYTES;
        const uint32_t end = linear_least(CHUNKS, chunks - at * CHUNKS);
#pragma unroll
        for (uint32_t chunk = 0; chunk < CHUNKS; chunk += 4)
            if (chunk < end)
                multiply_chunks<BFLOAT, TILES>(stage, stage + X, weight_row, token_rows, chunk, end, lane, sums);
        slot = slot == RING - 1 ? 0 : slot + 1;
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            uint32_t to = token + i * 16 + upper * 8 + lane / 4;
            if (to >= call.rows)
                continue;
            float scale = call.row_scales[to];
            linear_store_pair(call, part, to, row + warp * 8 + lane % 4 * 2, sums[i][2 * upper] * scale,
                sums[i][2 * upper + 1] * scale);
        }
    }
}

template <bool BFLOAT, int TILES> void launch(const struct linear_call *call, cudaStream_t stream) {
    struct linear_call cut = linear_cut(call, LINEAR_STRIP);
    dim3 grid((call->rows + TILES * 16 - 1) / (TILES * 16), cut.row_blocks);
    constexpr uint32_t SHARED = STAGES<TILES> * STAGE<TILES>;
    KERNEL_LAUNCH(linear_multiply_halves<BFLOAT, TILES>, grid, THREADS, SHARED, stream, cut);
}

template <bool BFLOAT> void launch_rows(const struct linear_call *call, cudaStream_t stream) {
    if (call->rows <= 16)
        launch<BFLOAT, 1>(call, stream);
    else if (call->rows <= 32)
        launch<BFLOAT, 2>(call, stream);
    else
        launch<BFLOAT, 4>(call, stream);
}

} // namespace

void launch_linear_halves(const struct linear_call *call, bool bfloat, cudaStream_t stream) {
    if (bfloat)
        launch_rows<true>(call, stream);
    else
        launch_rows<false>(call, stream);
}
