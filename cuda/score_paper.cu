/* SPDX-License-Identifier: Apache-2.0
 *
 * The paper's network (policy/network.h): standardised inputs, two hidden layers with LayerNorm. A block takes 32 slots
 * and keeps both layers in shared memory.
 */
#include "cuda/network_device.h"
#include "cuda/score_product.h"

enum { STANDARD_THREADS = 256, PAPER_TILE = 32, PAPER_INPUTS = 8, PAPER_STANDARDISED = 3 };

/* ---- the standard ---- */

/* Mean and 1 / (deviation + 1e-6) of an input over the slots that are there. */
SCORE_INLINE float2 standard_of(const struct cuda_score_unit *unit, const struct kv_pool *pool,
    const struct cuda_score_network *network, uint32_t input, uint32_t count, double *space) {
    double sum = 0, squares = 0;
    for (uint32_t slot = threadIdx.x; slot < unit->view.slots; slot += STANDARD_THREADS) {
        int32_t position = slot_position(pool, &unit->view, slot);
        sum += position != KV_NO_POSITION ? (double)network_input(unit, FEATURES_PAPER, input, slot, position,
                                                network_sums(unit, network, slot))
                                          : 0;
    }
    double mean = count > 0 ? block_sum(sum, space) / count : 0;
    for (uint32_t slot = threadIdx.x; slot < unit->view.slots; slot += STANDARD_THREADS) {
        int32_t position = slot_position(pool, &unit->view, slot);
        double off = position != KV_NO_POSITION ? (double)network_input(unit, FEATURES_PAPER, input, slot, position,
                                                      network_sums(unit, network, slot)) -
                                                      mean
                                                : 0;
        squares += off * off;
    }
    double variance = count > 0 ? block_sum(squares, space) / count : 0;
    return make_float2((float)mean, (float)(1 / (sqrt(variance) + 1e-6)));
}

/* unit.standard: what was frozen, or that of the slots there are now, which is frozen then. */
static __global__ void __launch_bounds__(STANDARD_THREADS)
    score_standard(const struct cuda_score_unit *units, struct kv_pool pool, const struct cuda_score_network *network) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    double *space = (double *)(unit + 1);
    unit_load(units + blockIdx.x, unit);
    float *frozen = unit->statistics.standard;
    if (frozen[1] != 0) {
        if (threadIdx.x < STATISTIC_STANDARD_NUMBERS)
            unit->standard[threadIdx.x] = frozen[threadIdx.x];
        return;
    }
    uint32_t count = 0;
    for (uint32_t slot = threadIdx.x; slot < unit->view.slots; slot += STANDARD_THREADS)
        count += slot_position(&pool, &unit->view, slot) != KV_NO_POSITION;
    count = block_sum(count, (uint32_t *)space);
    __syncthreads();
    for (uint32_t f = 0; f < STATISTIC_STANDARD_NUMBERS / 2; f++) {
        float2 both = make_float2(0, 0);
        if (f < network->standardised)
            both = standard_of(unit, &pool, network, network->list[f], count, space);
        if (threadIdx.x == 0)
            ((float2 *)unit->standard)[f] = both;
        if (threadIdx.x == 0 && unit->freeze != 0)
            ((float2 *)frozen)[f] = both;
    }
}

/* ---- scores ---- */

struct paper_space {
    int32_t positions[PAPER_TILE];
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

/* layer = max(0, LayerNorm(layer + bias) gain + offset); numbers: bias, gain, offset [hidden] each. */
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

/* Normalised inputs: a warp has one of them. */
SCORE_INLINE void paper_inputs(const struct cuda_score_unit *unit, const struct kv_pool *pool,
    const struct cuda_score_network *network, struct paper_space *space) {
    uint32_t slot = blockIdx.x * PAPER_TILE + threadIdx.x % PAPER_TILE, f = threadIdx.x / PAPER_TILE;
    bool there = slot < unit->view.slots, own = f < network->standardised;
    int32_t position = there ? slot_position(pool, &unit->view, slot) : KV_NO_POSITION;
    float x = 0;
    if (f >= PAPER_INPUTS)
        return;
    if (f < network->inputs && position != KV_NO_POSITION)
        x = normal_input(
            network_input(unit, FEATURES_PAPER, network->list[f], slot, position, network_sums(unit, network, slot)),
            own ? unit->standard[2 * f] : 0.5f, own ? unit->standard[2 * f + 1] : 2, 8);
    space->inputs[tile_at<PAPER_TILE>(f, threadIdx.x % PAPER_TILE)] = x;
    if (f == 0)
        space->positions[threadIdx.x % PAPER_TILE] = position;
}

static __global__ void __launch_bounds__(PRODUCT_THREADS)
    score_paper(const struct cuda_score_unit *units, struct kv_pool pool, struct cuda_score_network network) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct paper_space *space = (struct paper_space *)(unit + 1);
    uint32_t hidden = network.hidden, column = threadIdx.x % PAPER_TILE, slot = blockIdx.x * PAPER_TILE + column;
    float *first = (float *)(space + 1), *second = first + hidden * PAPER_TILE, part = 0;
    unit_load(units + blockIdx.y, unit);
    if (blockIdx.x * PAPER_TILE >= unit->view.slots)
        return;
    paper_inputs(unit, &pool, &network, space);
    multiply_layer(network.w1, network.inputs, hidden, space->inputs, first, space);
    normalise_layer(first, hidden, network.mlp, space);
    multiply_layer(network.w2, hidden, hidden, first, second, space);
    normalise_layer(second, hidden, network.mlp + 3 * hidden, space);
    for (uint32_t j = threadIdx.x / PAPER_TILE; j < hidden; j += PRODUCT_THREADS / PAPER_TILE)
        part = fmaf(network.mlp[6 * hidden + j], second[tile_at<PAPER_TILE>(j, column)], part);
    float score = sum_slot(space, part) + network.mlp[7 * hidden];
    if (threadIdx.x >= PAPER_TILE || slot >= unit->view.slots)
        return;
    for (uint32_t f = 0; f < network.inputs; f++)
        score = fmaf(network.skip[f], space->inputs[tile_at<PAPER_TILE>(f, column)], score);
    unit->scores[slot] = space->positions[column] == KV_NO_POSITION ? not_a_number() : score;
}

static size_t paper_shared(uint32_t hidden) {
    return sizeof(struct cuda_score_unit) + sizeof(struct paper_space) +
           2 * (size_t)hidden * PAPER_TILE * sizeof(float);
}

void launch_score_paper(const struct cuda_score_call *call, const struct cuda_score_network *network,
    const struct cuda_score_network *device_network, cudaStream_t stream) {
    uint32_t tiles = (call->slots_most + PAPER_TILE - 1) / PAPER_TILE;
    size_t space = sizeof(struct cuda_score_unit) + WARP * sizeof(double), shared = paper_shared(network->hidden);
    if (network->standardised > 0)
        KERNEL_LAUNCH(score_standard, dim3(call->count), dim3(STANDARD_THREADS), space, stream, call->units, call->pool,
            device_network);
    for (uint32_t first = 0; tiles > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        uint32_t count = units_at_once(call->count - first);
        KERNEL_LAUNCH(score_paper, dim3(tiles, count), dim3(PRODUCT_THREADS), shared, stream, call->units + first,
            call->pool, *network);
    }
}
