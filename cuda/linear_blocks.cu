/* SPDX-License-Identifier: Apache-2.0
 *
 * Block formats times int8 activations on tensor cores: one kernel, from one row to a whole prefill.
 *
 * A thread block streams strips of weights and the activations of its rows through a ring of stages in shared memory
 * (cp.async), a stage being a few blocks of 32 columns. mma.m16n8k32 spans exactly one block: 16 rows of activations
 * (the first operand) by 8 rows of weights, its integers exact; each result then takes one fma in ascending order of
 * columns, so that bits equal the CPU's. The integers start at the bits of 1.5 * 2^23 as a float, so that a
 * subtraction, exact below 2^22, converts them.
 */
#include "cuda/linear_device.cuh"

namespace {

constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

constexpr int words_bytes(int format) {
    return format == LINEAR_Q8_0 ? 32 * 32 : 32 * 16;
}

constexpr int step_bytes(int format) {
    return words_bytes(format) + (format == LINEAR_Q4_1 ? 128 : 64);
}

/* A thread block: warps along rows of weights and along rows of activations ("tokens"), and each warp's tiles: TILES_W
 * of 8 rows of weights, TILES_T of 16 tokens (of 8 without UPPER: the upper half of mma's rows is zero). */
template <int FORMAT_, int TILES_T_, bool UPPER_, int TILES_W_, int WARPS_W_, int WARPS_T_, int BLOCKS_, int STAGES_>
struct blocks_shape {
    static constexpr int FORMAT = FORMAT_, TILES_T = TILES_T_, TILES_W = TILES_W_, WARPS_W = WARPS_W_;
    static constexpr int BLOCKS = BLOCKS_, STAGES = STAGES_; /* blocks of columns a stage; stages of the ring */
    static constexpr bool UPPER = UPPER_;
    static constexpr int THREADS = WARPS_W_ * WARPS_T_ * 32;
    static constexpr int TILE_TOKENS = UPPER_ ? 16 : 8;
    static constexpr int WARP_TOKENS = TILES_T_ * TILE_TOKENS;
    static constexpr int TOKENS = WARPS_T_ * WARP_TOKENS;
    static constexpr int STRIPS = WARPS_W_ * TILES_W_ / 4;
    static constexpr int WORDS = words_bytes(FORMAT_);
    static constexpr int STEP = step_bytes(FORMAT_);
    static constexpr int STRIP_STAGE = BLOCKS_ * STEP; /* bytes of a strip in a stage */
    static constexpr int Q = STRIPS * STRIP_STAGE;     /* where a stage's activations lie */
    static constexpr int SCALES = Q + BLOCKS_ * TOKENS * 32;
    static constexpr int STAGE = SCALES + BLOCKS_ * TOKENS * 8;
    static constexpr int SHARED = STAGES_ * STAGE;
};

/* Where a thread block reads. */
struct source {
    const char *strips; /* the first strip */
    uint32_t strips_count;
    uint32_t token, tokens; /* first, count */
};

template <class S>
__device__ inline void load_stage(
    const struct linear_call &call, const struct source &from, uint32_t step, unsigned char *stage) {
    const uint32_t blocks = linear_least(S::BLOCKS, call.steps - step);
    constexpr uint32_t CHUNKS = S::STRIP_STAGE / 16;
    for (uint32_t i = threadIdx.x; i < S::STRIPS * CHUNKS; i += S::THREADS) {
        uint32_t strip = i / CHUNKS, chunk = i % CHUNKS;
        if (strip < from.strips_count && chunk < blocks * (S::STEP / 16))
            device_copy_async_16(stage + (size_t)i * 16,
                from.strips + strip * call.strip_bytes + (size_t)step * S::STEP + (size_t)chunk * 16);
    }
    constexpr uint32_t Q_CHUNKS = S::TOKENS * 2;
    for (uint32_t i = threadIdx.x; i < S::BLOCKS * Q_CHUNKS; i += S::THREADS) {
        uint32_t block = i / Q_CHUNKS, chunk = i % Q_CHUNKS;
        if (block < blocks && chunk < from.tokens * 2)
            device_copy_async_16(stage + S::Q + (size_t)i * 16,
                call.q + ((size_t)(step + block) * call.rows + from.token) * 32 + (size_t)chunk * 16);
    }
    constexpr uint32_t SCALE_CHUNKS = S::TOKENS / 2;
    const uint32_t pitch = (call.rows + 1) / 2 * 2;
    for (uint32_t i = threadIdx.x; i < S::BLOCKS * SCALE_CHUNKS; i += S::THREADS) {
        uint32_t block = i / SCALE_CHUNKS, chunk = i % SCALE_CHUNKS;
        if (block < blocks && chunk * 2 < from.tokens)
            device_copy_async_16(stage + S::SCALES + (size_t)i * 16,
                call.scales + ((size_t)(step + block) * pitch + from.token + chunk * 2) * 2);
    }
}

/* A warp's place in its thread block, and its sums. */
template <class S> struct tile {
    uint32_t strip; /* of the stage's strips */
    uint32_t first; /* first of its TILES_W tiles in the strip */
    uint32_t token; /* first token, counted in the thread block */
    uint32_t last;  /* last token of the thread block: what lies above reads that one and is dropped */
    float sums[S::TILES_T][S::TILES_W][4];
};

/* The two registers of mma's second operand: columns 4 t .. 4 t + 3 and 16 + 4 t .. of one row. */
template <int FORMAT>
__device__ inline void load_words(const unsigned char *words, uint32_t tile, uint32_t lane, uint32_t b[2]) {
    if (FORMAT == LINEAR_Q8_0) {
        uint2 pair = *(const uint2 *)(words + (tile * 32 + lane) * 8);
        b[0] = pair.x;
        b[1] = pair.y;
        return;
    }
    uint32_t word = *(const uint32_t *)(words + (tile * 32 + lane) * 4);
    if (FORMAT == LINEAR_Q4_0) { /* 16 times the value, as signed bytes */
        b[0] = word << 4 & 0xf0f0f0f0u;
        b[1] = word & 0xf0f0f0f0u;
    } else {
        b[0] = word & 0x0f0f0f0fu;
        b[1] = word >> 4 & 0x0f0f0f0fu;
    }
}

/* The f16 numbers of rows 2 t and 2 t + 1 of a tile. */
__device__ inline float2 load_halves(const unsigned char *halves, uint32_t tile, uint32_t t) {
    uint32_t pair = *(const uint32_t *)(halves + tile * 16 + t * 4);
    return make_float2(__half2float(__ushort_as_half((unsigned short)pair)),
        __half2float(__ushort_as_half((unsigned short)(pair >> 16))));
}

/* One block of 32 columns. */
template <class S>
__device__ inline void multiply_block(const unsigned char *stage, uint32_t block, uint32_t lane, struct tile<S> &tile) {
    const uint32_t g = lane / 4, t = lane % 4;
    const unsigned char *words = stage + tile.strip * S::STRIP_STAGE + block * S::STEP;
    const unsigned char *d_at = words + S::WORDS;
    uint32_t b[S::TILES_W][2];
    float2 d[S::TILES_W], m[S::TILES_W];
#pragma unroll
    for (int j = 0; j < S::TILES_W; j++) {
        load_words<S::FORMAT>(words, tile.first + j, lane, b[j]);
        d[j] = load_halves(d_at, tile.first + j, t);
        if (S::FORMAT == LINEAR_Q4_0)
            d[j] = make_float2(d[j].x * 0.0625f, d[j].y * 0.0625f);
        if (S::FORMAT == LINEAR_Q4_1)
            m[j] = load_halves(d_at + 64, tile.first + j, t);
    }
    const unsigned char *q = stage + S::Q + block * S::TOKENS * 32 + t * 8;
    const float2 *scales = (const float2 *)(stage + S::SCALES) + block * S::TOKENS;
#pragma unroll
    for (int i = 0; i < S::TILES_T; i++) {
        uint32_t token = linear_least(tile.token + i * S::TILE_TOKENS + g, tile.last);
        uint2 lower = *(const uint2 *)(q + token * 32), upper = make_uint2(0, 0);
        float2 s_lower = scales[token], s_upper = make_float2(0, 0);
        if (S::UPPER) {
            token = linear_least(tile.token + i * S::TILE_TOKENS + g + 8, tile.last);
            upper = *(const uint2 *)(q + token * 32);
            s_upper = scales[token];
        }
        const uint32_t a[4] = {lower.x, upper.x, lower.y, upper.y};
#pragma unroll
        for (int j = 0; j < S::TILES_W; j++) {
            const int start[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
            int dot[4];
            device_mma_m16n8k32_s8(dot, a, b[j], start);
            float *sums = tile.sums[i][j];
            sums[0] = fmaf(__int_as_float(dot[0]) - MAGIC, d[j].x * s_lower.x, sums[0]);
            sums[1] = fmaf(__int_as_float(dot[1]) - MAGIC, d[j].y * s_lower.x, sums[1]);
            if (S::FORMAT == LINEAR_Q4_1) {
                sums[0] = fmaf(m[j].x, s_lower.y, sums[0]);
                sums[1] = fmaf(m[j].y, s_lower.y, sums[1]);
            }
            if (!S::UPPER)
                continue;
            sums[2] = fmaf(__int_as_float(dot[2]) - MAGIC, d[j].x * s_upper.x, sums[2]);
            sums[3] = fmaf(__int_as_float(dot[3]) - MAGIC, d[j].y * s_upper.x, sums[3]);
            if (S::FORMAT == LINEAR_Q4_1) {
                sums[2] = fmaf(m[j].x, s_upper.y, sums[2]);
                sums[3] = fmaf(m[j].y, s_upper.y, sums[3]);
            }
        }
    }
}

template <class S>
__device__ inline void multiply_stage(
    const unsigned char *stage, uint32_t blocks, uint32_t lane, struct tile<S> &tile) {
    if (blocks >= S::BLOCKS) {
#pragma unroll
        for (int block = 0; block < S::BLOCKS; block++)
            multiply_block<S>(stage, block, lane, tile);
        return;
    }
#pragma unroll 1
    for (uint32_t block = 0; block < blocks; block++)
        multiply_block<S>(stage, block, lane, tile);
}

template <class S>
__device__ inline void store_tile(const struct linear_call &call, const struct linear_part &part, uint32_t row,
    uint32_t token, uint32_t lane, const struct tile<S> &tile) {
#pragma unroll
    for (int i = 0; i < S::TILES_T; i++) {
#pragma unroll
        for (int j = 0; j < S::TILES_W; j++) {
            uint32_t to = token + tile.token + i * S::TILE_TOKENS + lane / 4;
            uint32_t at = row + tile.strip * LINEAR_STRIP + (tile.first + j) * 8 + lane % 4 * 2;
            const float *sums = tile.sums[i][j];
            linear_store_pair(call, part, to, at, sums[0], sums[1]);
            if (S::UPPER)
                linear_store_pair(call, part, to + 8, at, sums[2], sums[3]);
        }
    }
}

/* Grid: x tokens, so that thread blocks that run together share weights; y rows of weights. */
template <class S> __global__ void __launch_bounds__(S::THREADS) linear_multiply_blocks(struct linear_call call) {
    KERNEL_SHARED(unsigned char, ring);
    const struct linear_part part = linear_find_part(call, blockIdx.y);
    const uint32_t strip = (blockIdx.y - part.first_block) * S::STRIPS;
    const uint32_t token = blockIdx.x * S::TOKENS;
    const struct source from = {part.data + strip * call.strip_bytes,
        linear_least(S::STRIPS, (part.rows - 1) / LINEAR_STRIP + 1 - strip), token,
        linear_least(S::TOKENS, call.rows - token)};
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct tile<S> tile = {};
    tile.strip = warp % S::WARPS_W * S::TILES_W / 4;
    tile.first = warp % S::WARPS_W * S::TILES_W % 4;
    tile.token = warp / S::WARPS_W * S::WARP_TOKENS;
    tile.last = from.tokens - 1;
    const bool idle = tile.strip >= from.strips_count || tile.token >= from.tokens;

    const uint32_t stages = (call.steps + S::BLOCKS - 1) / S::BLOCKS;
    for (uint32_t next = 0; next < S::STAGES - 1; next++) {
        if (next < stages)
            load_stage<S>(call, from, next * S::BLOCKS, ring + next * S::STAGE);
        device_copy_commit();
    }
    for (uint32_t at = 0, slot = 0; at < stages; at++) {
        device_copy_wait<S::STAGES - 2>();
        __syncthreads(); /* the stage is there for all, and all are done with the slot that is filled next */
        uint32_t next = at + S::STAGES - 1;
        if (next < stages)
            load_stage<S>(call, from, next * S::BLOCKS, ring + (slot == 0 ? S::STAGES - 1 : slot - 1) * S::STAGE);
        device_copy_commit();
        if (!idle)
            multiply_stage<S>(ring + slot * S::STAGE, call.steps - at * S::BLOCKS, lane, tile);
        slot = slot == S::STAGES - 1 ? 0 : slot + 1;
    }
    if (!idle)
        store_tile<S>(call, part, strip * LINEAR_STRIP, token, lane, tile);
}

/* One strip: rows of activations up to 8, 16, 32, and 64 or a grid of them. Stages of about 5 KB of weights. */
template <int FORMAT> constexpr int BLOCKS_OF = FORMAT == LINEAR_Q8_0 ? 4 : 8;
template <int FORMAT> using shape_8 = blocks_shape<FORMAT, 1, false, 1, 4, 1, BLOCKS_OF<FORMAT>, 6>;
template <int FORMAT> using shape_16 = blocks_shape<FORMAT, 1, true, 1, 4, 1, BLOCKS_OF<FORMAT>, 4>;
template <int FORMAT> using shape_32 = blocks_shape<FORMAT, 2, true, 1, 4, 1, 4, 4>;
template <int FORMAT> using shape_64 = blocks_shape<FORMAT, 4, true, 1, 4, 1, 4, 3>;
/* Four strips by 128 rows. */
template <int FORMAT> using shape_wide = blocks_shape<FORMAT, 4, true, 4, 4, 2, 2, 3>;

template <class S> void launch(const struct linear_call *call, cudaStream_t stream) {
    struct linear_call cut = linear_cut(call, S::STRIPS * LINEAR_STRIP);
    dim3 grid((call->rows + S::TOKENS - 1) / S::TOKENS, cut.row_blocks);
    KERNEL_LAUNCH(linear_multiply_blocks<S>, grid, S::THREADS, S::SHARED, stream, cut);
}

template <int FORMAT>
void launch_format(const struct linear_call *call, uint32_t multiprocessors, cudaStream_t stream) {
    using wide = shape_wide<FORMAT>;
    uint32_t strips = linear_cut(call, wide::STRIPS * LINEAR_STRIP).row_blocks;
    uint32_t wide_blocks = strips * ((call->rows + wide::TOKENS - 1) / wide::TOKENS);
    if (call->rows <= shape_8<FORMAT>::TOKENS)
        launch<shape_8<FORMAT>>(call, stream);
    else if (call->rows <= shape_16<FORMAT>::TOKENS)
        launch<shape_16<FORMAT>>(call, stream);
    else if (call->rows <= shape_32<FORMAT>::TOKENS)
        launch<shape_32<FORMAT>>(call, stream);
    else if (call->rows <= shape_64<FORMAT>::TOKENS || wide_blocks * 4 < multiprocessors * 3)
        launch<shape_64<FORMAT>>(call, stream);
    else
        launch<wide>(call, stream);
}

} // namespace

void launch_linear_blocks(
    const struct linear_call *call, enum linear_format format, uint32_t multiprocessors, cudaStream_t stream) {
    if (format == LINEAR_Q8_0)
        launch_format<LINEAR_Q8_0>(call, multiprocessors, stream);
    else if (format == LINEAR_Q4_0)
        launch_format<LINEAR_Q4_0>(call, multiprocessors, stream);
    else
        launch_format<LINEAR_Q4_1>(call, multiprocessors, stream);
}
