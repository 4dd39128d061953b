/* SPDX-License-Identifier: Apache-2.0
 *
 * Float weights with activations that are not rounded: up to 8 rows of any format, where weights are only streamed
 * past, and any number of rows of float32.
 *
 * In shared memory a row's part of a stage is a whole number of 128-byte lines, and chunk c of 16 bytes of row r lies
 * at c ^ (r % 8): eight lanes that read the same chunk of eight rows touch all banks once.
 */
#include "cuda/linear_device.cuh"

namespace {

__device__ inline uint32_t chunk_place(uint32_t row, uint32_t chunk) {
    return chunk ^ (row & 7);
}

/* ---- up to 8 rows ---- */

constexpr uint32_t STREAM_THREADS = 128, STREAM_WARPS = 4;
constexpr uint32_t STREAM_CHUNKS = 16; /* of 16 bytes: a row's part of a stage */
constexpr uint32_t STREAM_STAGES = 4;

template <int FORMAT> constexpr uint32_t CHUNK_VALUES = FORMAT == LINEAR_F32 ? 4 : 8;
template <int FORMAT> constexpr uint32_t X_CHUNKS = STREAM_CHUNKS *CHUNK_VALUES<FORMAT> / 4; /* a row of x */
template <int FORMAT, int TOKENS>
constexpr uint32_t STREAM_STAGE = (LINEAR_STRIP * STREAM_CHUNKS + TOKENS * X_CHUNKS<FORMAT>)*16;

/* Stage: weights [32 rows][16 chunks], x [TOKENS][X_CHUNKS]. Rows and columns that are not there are not copied. */
template <int FORMAT, int TOKENS>
__device__ inline void load_stream(
    const struct linear_call &call, const char *weights, uint32_t rows, uint32_t stage, unsigned char *shared) {
    const uint32_t first = stage * STREAM_CHUNKS, chunks = call.pitch / CHUNK_VALUES<FORMAT>;
    for (uint32_t i = threadIdx.x; i < LINEAR_STRIP * STREAM_CHUNKS; i += STREAM_THREADS) {
        uint32_t row = i / STREAM_CHUNKS, chunk = i % STREAM_CHUNKS;
        if (row < rows && first + chunk < chunks)
            device_copy_async_16(shared + (row * STREAM_CHUNKS + chunk_place(row, chunk)) * 16,
                weights + ((size_t)row * chunks + first + chunk) * 16);
    }
    constexpr uint32_t X = X_CHUNKS<FORMAT>;
    unsigned char *x = shared + LINEAR_STRIP * STREAM_CHUNKS * 16;
    for (uint32_t i = threadIdx.x; i < TOKENS * X; i += STREAM_THREADS) {
        uint32_t token = i / X, column = (stage * X + i % X) * 4;
        if (token < call.rows && column < call.pitch)
            device_copy_async_16(x + i * 16, call.x + (size_t)token * call.pitch + column);
    }
}

template <int FORMAT> __device__ inline void load_values(const unsigned char *at, float *values) {
    const uint4 packed = *(const uint4 *)at;
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (FORMAT == LINEAR_F32) {
            values[i] = __uint_as_float(words[i]);
        } else if (FORMAT == LINEAR_F16) {
            values[2 * i] = __half2float(__ushort_as_half((unsigned short)words[i]));
            values[2 * i + 1] = __half2float(__ushort_as_half((unsigned short)(words[i] >> 16)));
        } else {
            values[2 * i] = __uint_as_float(words[i] << 16);
            values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}

/* A lane a row of weights. F32: a warp takes every fourth token and all columns, so that a sum is one chain in
 * ascending order. 16 bit: a warp takes every fourth chunk of columns for all tokens, and the four sums are added in
 * order of warps. */
template <int FORMAT, int TOKENS>
__global__ void __launch_bounds__(STREAM_THREADS) linear_stream_floats(struct linear_call call) {
    KERNEL_SHARED(unsigned char, ring);
    constexpr bool CHAIN = FORMAT == LINEAR_F32;
    constexpr int SUMS = CHAIN ? (TOKENS + 3) / 4 : TOKENS, VALUES = CHUNK_VALUES<FORMAT>;
    constexpr uint32_t STAGE = STREAM_STAGE<FORMAT, TOKENS>;
    const struct linear_part part = linear_find_part(call, blockIdx.x);
    const uint32_t row = (blockIdx.x - part.first_block) * LINEAR_STRIP;
    const uint32_t rows = linear_least(LINEAR_STRIP, part.rows - row);
    const uint32_t chunks = call.pitch / VALUES, stages = (chunks + STREAM_CHUNKS - 1) / STREAM_CHUNKS;
    const char *weights = part.data + (size_t)row * chunks * 16;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t read_row = linear_least(lane, rows - 1);
    float sums[SUMS] = {};
    for (uint32_t next = 0; next < STREAM_STAGES - 1; next++) {
        if (next < stages)
            load_stream<FORMAT, TOKENS>(call, weights, rows, next, ring + next * STAGE);
        device_copy_commit();
    }
    for (uint32_t at = 0; at < stages; at++) {
        device_copy_wait<STREAM_STAGES - 2>();
        __syncthreads();
        uint32_t next = at + STREAM_STAGES - 1;
        if (next < stages)
            load_stream<FORMAT, TOKENS>(call, weights, rows, next, ring + next % STREAM_STAGES * STAGE);
        device_copy_commit();
        const unsigned char *stage = ring + at % STREAM_STAGES * STAGE;
        const float *x = (const float *)(stage + LINEAR_STRIP * STREAM_CHUNKS * 16);
        const uint32_t end = linear_least(STREAM_CHUNKS, chunks - at * STREAM_CHUNKS);
#pragma unroll 4
        for (uint32_t chunk = CHAIN ? 0 : warp; chunk < end; chunk += CHAIN ? 1 : STREAM_WARPS) {
            float w[VALUES];
            load_values<FORMAT>(stage + (read_row * STREAM_CHUNKS + chunk_place(read_row, chunk)) * 16, w);
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                uint32_t token = CHAIN ? warp + i * STREAM_WARPS : i;
                if (token >= call.rows)
                    break;
                const float4 *from = (const float4 *)(x + token * (X_CHUNKS<FORMAT> * 4) + chunk * VALUES);
#pragma unroll
                for (int k = 0; k < VALUES; k += 4) {
                    float4 v = from[k / 4];
                    sums[i] = fmaf(w[k], v.x, sums[i]);
                    sums[i] = fmaf(w[k + 1], v.y, sums[i]);
                    sums[i] = fmaf(w[k + 2], v.z, sums[i]);
                    sums[i] = fmaf(w[k + 3], v.w, sums[i]);
                }
            }
        }
    }
    if (CHAIN) {
        for (int i = 0; i < SUMS; i++)
            linear_store(call, part, warp + i * STREAM_WARPS, row + lane, sums[i]);
        return;
    }
    __syncthreads(); /* the ring's first bytes are free for partial sums [warp][token][row] */
    float *partial = (float *)ring;
    for (int i = 0; i < TOKENS; i++)
        partial[(warp * TOKENS + i) * 32 + lane] = sums[i];
    __syncthreads();
    for (uint32_t token = warp; token < TOKENS; token += STREAM_WARPS) {
        float sum = partial[token * 32 + lane];
        for (uint32_t other = 1; other < STREAM_WARPS; other++)
            sum += partial[(other * TOKENS + token) * 32 + lane];
        linear_store(call, part, token, row + lane, sum);
    }
}

template <int FORMAT, int TOKENS> void launch_tokens(const struct linear_call *cut, cudaStream_t stream) {
    constexpr uint32_t SHARED = STREAM_STAGES * STREAM_STAGE<FORMAT, TOKENS>;
    KERNEL_LAUNCH(linear_stream_floats<FORMAT, TOKENS>, cut->row_blocks, STREAM_THREADS, SHARED, stream, *cut);
}

template <int FORMAT> void launch_stream(const struct linear_call *call, cudaStream_t stream) {
    struct linear_call cut = linear_cut(call, LINEAR_STRIP);
    if (call->rows == 1)
        launch_tokens<FORMAT, 1>(&cut, stream);
    else if (call->rows == 2)
        launch_tokens<FORMAT, 2>(&cut, stream);
    else if (call->rows <= 4)
        launch_tokens<FORMAT, 4>(&cut, stream);
    else
        launch_tokens<FORMAT, 8>(&cut, stream);
}

/* ---- float32, any number of rows ---- */

/* 64 rows of weights by 64 of activations, 4 by 4 a thread; a stage is 32 columns. */
constexpr uint32_t TILE = 64, TILE_THREADS = 256, TILE_STAGES = 3, TILE_CHUNKS = 8;
constexpr uint32_t TILE_BYTES = TILE * TILE_CHUNKS * 16, TILE_STAGE = 2 * TILE_BYTES;

/* [64][8 chunks] of a matrix with `chunks` of them a row. */
__device__ inline void load_tile(const float *from, uint32_t rows, uint32_t chunks, uint32_t first, unsigned char *to) {
    for (uint32_t i = threadIdx.x; i < TILE * TILE_CHUNKS; i += TILE_THREADS) {
        uint32_t row = i / TILE_CHUNKS, chunk = i % TILE_CHUNKS;
        if (row < rows && first + chunk < chunks)
            device_copy_async_16(to + (row * TILE_CHUNKS + chunk_place(row, chunk)) * 16,
                from + ((size_t)row * chunks + first + chunk) * 4);
    }
}

__device__ inline float4 tile_chunk(const unsigned char *tile, uint32_t row, uint32_t chunk) {
    return *(const float4 *)(tile + (row * TILE_CHUNKS + chunk_place(row, chunk)) * 16);
}

__global__ void __launch_bounds__(TILE_THREADS) linear_multiply_f32(struct linear_call call) {
    KERNEL_SHARED(unsigned char, ring);
    const struct linear_part part = linear_find_part(call, blockIdx.y);
    const uint32_t row = (blockIdx.y - part.first_block) * TILE, token = blockIdx.x * TILE;
    const uint32_t rows = linear_least(TILE, part.rows - row), tokens = linear_least(TILE, call.rows - token);
    const uint32_t chunks = call.pitch / 4, stages = (chunks + TILE_CHUNKS - 1) / TILE_CHUNKS;
    const float *weights = (const float *)part.data + (size_t)row * call.pitch;
    const float *x = call.x + (size_t)token * call.pitch;
    const uint32_t across = threadIdx.x % 16, down = threadIdx.x / 16; /* rows of weights, of activations */
    uint32_t read_row[4], read_token[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        read_row[i] = linear_least(across + 16 * i, rows - 1);
        read_token[i] = linear_least(down + 16 * i, tokens - 1);
    }
    float sums[4][4] = {};
    for (uint32_t next = 0; next < TILE_STAGES - 1; next++) {
        if (next < stages) {
            load_tile(weights, rows, chunks, next * TILE_CHUNKS, ring + next * TILE_STAGE);
            load_tile(x, tokens, chunks, next * TILE_CHUNKS, ring + next * TILE_STAGE + TILE_BYTES);
        }
        device_copy_commit();
    }
    for (uint32_t at = 0; at < stages; at++) {
        device_copy_wait<TILE_STAGES - 2>();
        __syncthreads();
        uint32_t next = at + TILE_STAGES - 1;
        unsigned char *to = ring + next % TILE_STAGES * TILE_STAGE;
        if (next < stages) {
            load_tile(weights, rows, chunks, next * TILE_CHUNKS, to);
            load_tile(x, tokens, chunks, next * TILE_CHUNKS, to + TILE_BYTES);
        }
        device_copy_commit();
        const unsigned char *stage = ring + at % TILE_STAGES * TILE_STAGE;
        const uint32_t end = linear_least(TILE_CHUNKS, chunks - at * TILE_CHUNKS);
#pragma unroll 2
        for (uint32_t chunk = 0; chunk < end; chunk++) {
            float4 w[4], v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w[i] = tile_chunk(stage, read_row[i], chunk);
                v[i] = tile_chunk(stage + TILE_BYTES, read_token[i], chunk);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sums[i][j] = fmaf(w[j].x, v[i].x, sums[i][j]);
                    sums[i][j] = fmaf(w[j].y, v[i].y, sums[i][j]);
                    sums[i][j] = fmaf(w[j].z, v[i].z, sums[i][j]);
                    sums[i][j] = fmaf(w[j].w, v[i].w, sums[i][j]);
                }
            }
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            linear_store(call, part, token + down + 16 * i, row + across + 16 * j, sums[i][j]);
}

} // namespace

void launch_linear_stream(const struct linear_call *call, enum linear_format format, cudaStream_t stream) {
    if (format == LINEAR_F32)
        launch_stream<LINEAR_F32>(call, stream);
    else if (format == LINEAR_F16)
        launch_stream<LINEAR_F16>(call, stream);
    else
        launch_stream<LINEAR_BF16>(call, stream);
}

void launch_linear_f32(const struct linear_call *call, cudaStream_t stream) {
    struct linear_call cut = linear_cut(call, TILE);
    dim3 grid((call->rows + TILE - 1) / TILE, cut.row_blocks);
    KERNEL_LAUNCH(linear_multiply_f32, grid, TILE_THREADS, TILE_STAGES * TILE_STAGE, stream, cut);
}
