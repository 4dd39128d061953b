/* SPDX-License-Identifier: Apache-2.0
 *
 * The paper's network (policy/network.h): standardised inputs, two hidden layers with LayerNorm. A block takes 32 slots
 * and keeps both layers in shared memory.
 */
#include "cuda/network_device.h"
#include "cuda/score_product.h"

enum {
    STANDARD_THREADS = 512,
    PAPER_TILE = 32,
    PAPER_INPUTS = 8,
    PAPER_STANDARDISED = 3,
};

/* ---- the standard ---- */

/* What the inputs of a slot are made of: sums are floats by then (sum_input). */
struct standard_slot {
    int32_t position;
    float sum, squared;
};

SCORE_INLINE struct standard_slot standard_read(const struct cuda_score_unit *unit, const struct kv_pool *pool,
    const struct cuda_score_network *network, uint32_t slot) {
    struct standard_slot at = {KV_NO_POSITION, 0, 0};
    if (slot >= unit->view.slots)
        return at;
    struct network_sums sums = network_sums(unit, network->needs, slot);
    at.position = slot_position(pool, &unit->view, slot);
    at.sum = (float)sums.sum;
    at.squared = (float)sums.squared;
    return at;
}

SCORE_INLINE float standard_input(
    const struct cuda_score_unit *unit, uint32_t input, uint32_t slot, struct standard_slot at) {
    struct network_sums sums = {(double)at.sum, (double)at.squared};
    return network_input(unit, FEATURES_PAPER, input, slot, at.position, sums);
}

/* Of a block of the standard, after its unit. */
struct standard_space {
    double sums[WARP];
    double shifts[PAPER_STANDARDISED];
};

/* unit.standard: what was frozen, or that of the slots there are now, which is frozen then: mean and 1 / (deviation +
 * 1e-6) of each input. One pass: sums are of differences from the first slot's input, so that what is left of them when
 * the mean is taken out is exact where all inputs are equal. */
static __global__ void __launch_bounds__(STANDARD_THREADS)
    score_standard(const struct cuda_score_unit *units, struct kv_pool pool, const struct cuda_score_network network) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct standard_space *space = (struct standard_space *)(unit + 1);
    double sums[PAPER_STANDARDISED], squares[PAPER_STANDARDISED];
    unit_load(units + blockIdx.x, unit);
    float *frozen = unit->statistics.standard;
    if (frozen[1] != 0) {
        if (threadIdx.x < STATISTIC_STANDARD_NUMBERS)
            unit->standard[threadIdx.x] = frozen[threadIdx.x];
        return;
    }
    if (threadIdx.x < PAPER_STANDARDISED) {
        struct standard_slot at = standard_read(unit, &pool, &network, 0);
        bool there = threadIdx.x < network.standardised && at.position != KV_NO_POSITION;
        space->shifts[threadIdx.x] = there ? (double)standard_input(unit, network.list[threadIdx.x], 0, at) : 0;
    }
    __syncthreads();
#pragma unroll
    for (uint32_t f = 0; f < PAPER_STANDARDISED; f++)
        sums[f] = squares[f] = 0;
    uint32_t count = 0;
    for (uint32_t slot = threadIdx.x; slot < unit->view.slots; slot += STANDARD_THREADS) {
        struct standard_slot at = standard_read(unit, &pool, &network, slot);
        if (at.position == KV_NO_POSITION)
            continue;
        count++;
#pragma unroll
        for (uint32_t f = 0; f < PAPER_STANDARDISED; f++) {
            if (f >= network.standardised)
                break;
            double off = (double)standard_input(unit, network.list[f], slot, at) - space->shifts[f];
            sums[f] += off;
            squares[f] += off * off;
        }
    }
    count = block_sum(count, (uint32_t *)space->sums);
    __syncthreads();
#pragma unroll
    for (uint32_t f = 0; f < STATISTIC_STANDARD_NUMBERS / 2; f++) {
        float2 both = make_float2(0, 0);
        if (f < PAPER_STANDARDISED && f < network.standardised) {
            const uint32_t i = f < PAPER_STANDARDISED ? f : 0;
            double sum = block_sum(sums[i], space->sums), square = block_sum(squares[i], space->sums);
            double off = count > 0 ? sum / count : 0, variance = count > 0 ? square / count - off * off : 0;
            double deviation = variance > 0 ? sqrt(variance) : 0;
            both = make_float2((float)(off + (count > 0 ? space->shifts[i] : 0)), (float)(1 / (deviation + 1e-6)));
        }
        if (threadIdx.x == 0)
            ((float2 *)unit->standard)[f] = both;
        if (threadIdx.x == 0 && unit->freeze != 0)
            ((float2 *)frozen)[f] = both;
    }
}

/* ---- scores ---- */

/* Of network.mlp. */
static __host__ __device__ __forceinline__ uint32_t mlp_numbers(uint32_t hidden) {
    return 7 * hidden + 1;
}

struct paper_space {
    struct standard_slot slots[PAPER_TILE];
    float parts[PRODUCT_THREADS / PAPER_TILE][PAPER_TILE];
    float inputs[PAPER_INPUTS * PAPER_TILE];
    float slices[PRODUCT_SLICES_FLOATS];
};

/* A slot's sum over the eight threads that have parts of it. */
SCORE_INLINE float sum_slot(struct paper_space *space, float part) {
    uint32_t slot = threadIdx.x % PAPER_TILE;
    float sum = 0;
    __syncthreads();
    space->parts[threadIdx.x / PAPER_TILE][slot] = part;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PRODUCT_THREADS / PAPER_TILE; i++)
        sum += space->parts[i][slot];
    return sum;
}

/* layer = max(0, LayerNorm(layer + bias) gain + offset); numbers: bias, gain, offset [hidden] each, shared. */
SCORE_INLINE void normalise_layer(float *layer, uint32_t hidden, const float *numbers, struct paper_space *space) {
    uint32_t slot = threadIdx.x % PAPER_TILE, first = threadIdx.x / PAPER_TILE;
    const uint32_t step = PRODUCT_THREADS / PAPER_TILE;
    float sum = 0, squares = 0;
    __syncthreads();
    for (uint32_t j = first; j < hidden; j += step)
        sum += layer[tile_at<PAPER_TILE>(j, slot)] += numbers[j];
    float mean = sum_slot(space, sum) / (float)hidden;
    for (uint32_t j = first; j < hidden; j += step) {
        float off = layer[tile_at<PAPER_TILE>(j, slot)] - mean;
        squares = fmaf(off, off, squares);
    }
    float inverse = 1 / sqrtf(sum_slot(space, squares) / (float)hidden + 1e-5f);
    for (uint32_t j = first; j < hidden; j += step) {
        float *number = &layer[tile_at<PAPER_TILE>(j, slot)];
        *number = rectify(fmaf((*number - mean) * inverse, numbers[hidden + j], numbers[2 * hidden + j]));
    }
    __syncthreads();
}

/* to [hidden][32] = matrix times from [depth][32]. */
SCORE_INLINE void multiply_layer(
    const float *matrix, uint32_t depth, uint32_t hidden, const float *from, float *to, struct paper_space *space) {
    for (uint32_t row = 0; row < hidden; row += PRODUCT_ROWS) {
        float sums[4][PAPER_TILE / 16];
        product_rows<PAPER_TILE, false>(matrix + row, padded_rows(hidden), depth, from, space->slices, sums);
#pragma unroll
        for (uint32_t r = 0; r < 4; r++)
            if (row + product_row() + r < hidden)
                tile_write<PAPER_TILE>(to, row + product_row() + r, sums[r]);
    }
}

/* Normalised inputs: a warp has one of them, of slots that the first warp has read for all. */
SCORE_INLINE void paper_inputs(const struct cuda_score_unit *unit, const struct kv_pool *pool,
    const struct cuda_score_network *network, struct paper_space *space) {
    uint32_t column = threadIdx.x % PAPER_TILE, slot = blockIdx.x * PAPER_TILE + column, f = threadIdx.x / PAPER_TILE;
    bool own = f < network->standardised;
    float x = 0;
    if (f == 0)
        space->slots[column] = standard_read(unit, pool, network, slot);
    __syncthreads();
    struct standard_slot at = space->slots[column];
    if (f < network->inputs && at.position != KV_NO_POSITION)
        x = normal_input(standard_input(unit, network->list[f], slot, at), own ? unit->standard[2 * f] : 0.5f,
            own ? unit->standard[2 * f + 1] : 2, 8);
    space->inputs[tile_at<PAPER_TILE>(f, column)] = x;
}

static_assert(PRODUCT_THREADS / PAPER_TILE == PAPER_INPUTS, "a warp an input");

static __global__ void __launch_bounds__(PRODUCT_THREADS)
    score_paper(const struct cuda_score_unit *units, struct kv_pool pool, struct cuda_score_network network) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct paper_space *space = (struct paper_space *)(unit + 1);
    uint32_t hidden = network.hidden, column = threadIdx.x % PAPER_TILE, slot = blockIdx.x * PAPER_TILE + column;
    float *first = (float *)(space + 1), *second = first + hidden * PAPER_TILE, part = 0;
    float *numbers = second + hidden * PAPER_TILE; /* network.mlp */
    for (uint32_t i = threadIdx.x; i < mlp_numbers(hidden); i += PRODUCT_THREADS)
        numbers[i] = network.mlp[i];
    unit_load(units + blockIdx.y, unit);
    if (blockIdx.x * PAPER_TILE >= unit->view.slots)
        return;
    paper_inputs(unit, &pool, &network, space);
    multiply_layer(network.w1, network.inputs, hidden, space->inputs, first, space);
    normalise_layer(first, hidden, numbers, space);
    multiply_layer(network.w2, hidden, hidden, first, second, space);
    normalise_layer(second, hidden, numbers + 3 * hidden, space);
    for (uint32_t j = threadIdx.x / PAPER_TILE; j < hidden; j += PRODUCT_THREADS / PAPER_TILE)
        part = fmaf(numbers[6 * hidden + j], second[tile_at<PAPER_TILE>(j, column)], part);
    float score = sum_slot(space, part) + numbers[7 * hidden];
    if (threadIdx.x >= PAPER_TILE || slot >= unit->view.slots)
        return;
    for (uint32_t f = 0; f < network.inputs; f++)
        score = fmaf(network.skip[f], space->inputs[tile_at<PAPER_TILE>(f, column)], score);
    unit->scores[slot] = space->slots[column].position == KV_NO_POSITION ? not_a_number() : score;
}

static size_t paper_shared(uint32_t hidden) {
    return sizeof(struct cuda_score_unit) + sizeof(struct paper_space) +
           (2 * (size_t)hidden * PAPER_TILE + mlp_numbers(hidden)) * sizeof(float);
}

void launch_score_paper(
    const struct cuda_score_call *call, const struct cuda_score_network *network, cudaStream_t stream) {
    uint32_t tiles = (call->slots_most + PAPER_TILE - 1) / PAPER_TILE;
    size_t space = sizeof(struct cuda_score_unit) + sizeof(struct standard_space),
           shared = paper_shared(network->hidden);
    if (network->standardised > 0)
        KERNEL_LAUNCH(score_standard, dim3(call->count), dim3(STANDARD_THREADS), space, stream, call->units, call->pool,
            *network);
    for (uint32_t first = 0; tiles > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        uint32_t count = units_at_once(call->count - first);
        KERNEL_LAUNCH(score_paper, dim3(tiles, count), dim3(PRODUCT_THREADS), shared, stream, call->units + first,
            call->pool, *network);
    }
}
