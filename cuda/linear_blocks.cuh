/* SPDX-License-Identifier: Apache-2.0
 *
 * Block formats times int8 activations on tensor cores: one kernel, from one row to a whole prefill. Included by the
 * files that compile it, for some formats each.
 *
 * A thread block streams strips of weights and the activations of its rows through a ring of stages in shared memory
 * (cp.async), a stage being a few blocks of 32 columns. mma.m16n8k32 spans exactly one block: 16 rows of activations
 * (the first operand) by 8 rows of weights, its integers exact; formats with two scales a block take two m16n8k16. Each
 * result then takes one fma in ascending order of columns, and one for the minimum, so that bits equal the CPU's. The
 * integers start at the bits of 1.5 * 2^23 as a float, so that a subtraction, exact below 2^22, converts them.
 */
#ifndef CUDA_LINEAR_BLOCKS_CUH
#define CUDA_LINEAR_BLOCKS_CUH

#include "cuda/linear_format.cuh"

namespace {

constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

/* A thread block: warps along rows of weights and along rows of activations ("tokens"), and each warp's tiles: TILES_W
 * of 8 rows of weights, TILES_T of 16 tokens (of 8 without UPPER: the upper half of mma's rows is zero). */
template <int FORMAT_, int TILES_T_, bool UPPER_, int TILES_W_, int WARPS_W_, int WARPS_T_, int BLOCKS_, int STAGES_>
struct blocks_shape {
    using F = block_format<FORMAT_>;
    static constexpr int TILES_T = TILES_T_, TILES_W = TILES_W_, WARPS_W = WARPS_W_;
    static constexpr int BLOCKS = BLOCKS_, STAGES = STAGES_; /* blocks of columns a stage; stages of the ring */
    static constexpr bool UPPER = UPPER_;
    static constexpr int THREADS = WARPS_W_ * WARPS_T_ * 32;
    static constexpr int TILE_TOKENS = UPPER_ ? 16 : 8;
    static constexpr int WARP_TOKENS = TILES_T_ * TILE_TOKENS;
    static constexpr int TOKENS = WARPS_T_ * WARP_TOKENS;
    static constexpr int STRIPS = WARPS_W_ * TILES_W_ / 4;
    static constexpr int STRIP_STAGE = F::HEAD + BLOCKS_ * F::STEP; /* bytes of a strip in a stage */
    static constexpr int Q = STRIPS * STRIP_STAGE;                  /* where a stage's activations lie */
    static constexpr int SCALES = Q + BLOCKS_ * TOKENS * 32;
    static constexpr int STAGE = SCALES + BLOCKS_ * TOKENS * 8;
    static constexpr int SHARED = STAGES_ * STAGE;
    static constexpr int UNROLL = F::HEAD != 0 && TILES_T_ == 4 ? 1 : BLOCKS_; /* else registers spill */
    static constexpr int RESIDENT = 256 / THREADS; /* of a multiprocessor, at least: as many registers as that leaves */
    static_assert(LINEAR_SUPER_STEPS % BLOCKS_ == 0, "a stage lies behind one head");
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
    using F = typename S::F;
    const uint32_t blocks = linear_least(S::BLOCKS, call.steps - step);
    constexpr uint32_t CHUNKS = S::STRIP_STAGE / 16, HEAD_CHUNKS = F::HEAD / 16;
    const uint32_t first = step % LINEAR_SUPER_STEPS == 0 ? 0 : HEAD_CHUNKS;
    /* What is not a head's lies behind the place of one, in the stage as in the strip. */
    const char *strips = from.strips + block_step_at<F>(step) - F::HEAD;
    for (uint32_t i = threadIdx.x; i < S::STRIPS * CHUNKS; i += S::THREADS) {
        uint32_t strip = i / CHUNKS, chunk = i % CHUNKS;
        if (strip < from.strips_count && chunk >= first && chunk < HEAD_CHUNKS + blocks * (F::STEP / 16))
            device_copy_async_16(stage + (size_t)i * 16, strips + strip * call.strip_bytes + (size_t)chunk * 16);
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
    uint2 heads[S::TILES_W];
    float sums[S::TILES_T][S::TILES_W][4];
};

/* The dot products of one part with 16 tokens and 8 rows of weights, as floats on top of MAGIC. */
template <int PARTS>
__device__ inline void multiply_part(int dot[4], const uint32_t a[4], const uint32_t b[2], uint32_t part) {
    const int start[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
    if (PARTS == 1)
        device_mma_m16n8k32_s8(dot, a, b, start);
    else
        device_mma_m16n8k16_s8(dot, a + 2 * part, b + part, start);
}

/* What a token's sums of a part are multiplied by: s, and s * sum(q) of it. */
template <int PARTS> __device__ inline float2 token_scales(float2 scales, uint32_t part) {
    const int sums = __float_as_int(scales.y), first = (short)sums, last = sums >> 16;
    return make_float2(scales.x, scales.x * (float)(PARTS == 1 ? first + last : part == 0 ? first : last));
}

template <class F> __device__ inline void add_part(float sums[2], const int dot[2], float2 token, float2 d, float2 m) {
    sums[0] = fmaf(__int_as_float(dot[0]) - MAGIC, d.x * token.x, sums[0]);
    sums[1] = fmaf(__int_as_float(dot[1]) - MAGIC, d.y * token.x, sums[1]);
    if (F::MINIMA) {
        sums[0] = fmaf(m.x, token.y, sums[0]);
        sums[1] = fmaf(m.y, token.y, sums[1]);
    }
}

/* One block of 32 columns. */
template <class S>
__device__ inline void multiply_block(const unsigned char *stage, uint32_t block, uint32_t lane, struct tile<S> &tile) {
    using F = typename S::F;
    const uint32_t g = lane / 4, t = lane % 4;
    const unsigned char *step = stage + tile.strip * S::STRIP_STAGE + F::HEAD + block * F::STEP;
    uint32_t b[S::TILES_W][2];
    struct block_scales<F::PARTS> weights[S::TILES_W];
#pragma unroll
    for (int j = 0; j < S::TILES_W; j++) {
        block_load_codes<F>(step, tile.first + j, lane, b[j]);
        weights[j] = block_load_scales<F>(step, tile.heads[j], (tile.first + j) * 4 + t);
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
        for (int part = 0; part < F::PARTS; part++) {
            const float2 by_lower = token_scales<F::PARTS>(s_lower, part),
                         by_upper = token_scales<F::PARTS>(s_upper, part);
#pragma unroll
            for (int j = 0; j < S::TILES_W; j++) {
                int dot[4];
                float *sums = tile.sums[i][j];
                multiply_part<F::PARTS>(dot, a, b[j], part);
                add_part<F>(sums, dot, by_lower, weights[j].d[part], weights[j].m[part]);
                if (S::UPPER)
                    add_part<F>(sums + 2, dot + 2, by_upper, weights[j].d[part], weights[j].m[part]);
            }
        }
    }
}

/* A stage that begins with a head: d and m of the tiles' rows, for it and the stages behind it. */
template <class S> __device__ inline void load_heads(const unsigned char *stage, uint32_t lane, struct tile<S> &tile) {
#pragma unroll
    for (int j = 0; j < S::TILES_W; j++)
        tile.heads[j] =
            block_load_head<typename S::F>(stage + tile.strip * S::STRIP_STAGE, (tile.first + j) * 4 + lane % 4);
}

/* blocks: those that there are from its first one on. */
template <class S>
__device__ inline void multiply_stage(
    const unsigned char *stage, uint32_t first, uint32_t blocks, uint32_t lane, struct tile<S> &tile) {
    if (S::F::HEAD != 0 && first % LINEAR_SUPER_STEPS == 0)
        load_heads<S>(stage, lane, tile);
    if (blocks >= S::BLOCKS) {
#pragma unroll(S::UNROLL)
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
template <class S>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT) linear_multiply_blocks(struct linear_call call) {
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
            multiply_stage<S>(ring + slot * S::STAGE, at * S::BLOCKS, call.steps - at * S::BLOCKS, lane, tile);
        slot = slot == S::STAGES - 1 ? 0 : slot + 1;
    }
    if (!idle)
        store_tile<S>(call, part, strip * LINEAR_STRIP, token, lane, tile);
}

/* One strip: rows of activations up to 8, 16, 32, and 64 or a grid of them. Stages of 2.5 to 5.5 KB of weights, so that
 * a multiprocessor has room for two thread blocks at least. */
template <int FORMAT> constexpr int BLOCKS_OF = block_format<FORMAT>::STEP > 704 ? 4 : 8;
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

/* For any number of rows. */
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

#endif
