/* SPDX-License-Identifier: Apache-2.0
 *
 * The content network: two slots a thread, inputs in shared memory, hidden units eight at a time in registers. The
 * network's weights are read once for SCORE_NETWORK_CHUNK slots.
 */
#include "cuda/network_device.h"

enum {
    NETWORK_THREADS = 128,
    NETWORK_PASS = 2 * NETWORK_THREADS, /* slots at a time */
    NETWORK_PASSES = 4,
    NETWORK_UNITS = 8, /* hidden units whose weights lie side by side */
};

/* A network's weights of one head in shared memory. */
struct network_shared {
    float *w1, *b1, *w2, *skip, *mean, *scale;
    float *inputs; /* [F][NETWORK_PASS] */
};

static __host__ __device__ uint32_t hidden8(uint32_t hidden) {
    return (hidden + NETWORK_UNITS - 1) / NETWORK_UNITS * NETWORK_UNITS;
}

SCORE_INLINE void copy_shared(const float *from, uint32_t count, float *to) {
    for (uint32_t i = threadIdx.x; i < count; i += NETWORK_THREADS)
        to[i] = from[i];
}

SCORE_INLINE struct network_shared network_open(
    const struct cuda_score_network *network, uint32_t head, float *memory) {
    uint32_t inputs = network->inputs, hidden = hidden8(network->hidden);
    struct network_shared shared;
    shared.w1 = memory;
    shared.b1 = shared.w1 + hidden * inputs;
    shared.w2 = shared.b1 + hidden;
    shared.inputs = shared.w2 + hidden;
    shared.skip = shared.inputs + inputs * NETWORK_PASS;
    shared.mean = shared.skip + inputs;
    shared.scale = shared.mean + inputs;
    copy_shared(network->w1, hidden * inputs, shared.w1);
    copy_shared(network->b1 + (size_t)head * hidden, hidden, shared.b1);
    copy_shared(network->w2, hidden, shared.w2);
    copy_shared(network->skip + (size_t)head * inputs, inputs, shared.skip);
    copy_shared(network->mean + (size_t)head * inputs, inputs, shared.mean);
    copy_shared(network->scale + (size_t)head * inputs, inputs, shared.scale);
    __syncthreads();
    return shared;
}

/* Normalised inputs of a slot, [f] at to[f * NETWORK_PASS]. */
SCORE_INLINE void gather_inputs(const struct cuda_score_unit *unit, const struct cuda_score_network *network,
    const struct network_shared *shared, uint32_t slot, int32_t position, float *to) {
    const struct kv_statistics *statistics = &unit->statistics;
    const struct network_sums sums = network_sums(unit, network->needs, slot);
    uint32_t f = 0;
#pragma unroll 4
    for (; f < network->content; f++)
        to[f * NETWORK_PASS] =
            normal_input(half_number(statistics->content_rows[(size_t)f * statistics->capacity + slot]),
                shared->mean[f], shared->scale[f], 6);
    for (uint32_t i = 0; i < network->list_count; i++, f++)
        to[f * NETWORK_PASS] =
            normal_input(network_input(unit, network->features, network->list[i], slot, position, sums),
                shared->mean[f], shared->scale[f], 6);
}

/* Scores of the thread's two slots, whose inputs lie NETWORK_THREADS apart. */
SCORE_INLINE void score_pair(
    const struct network_shared *shared, const float *inputs, uint32_t count, uint32_t hidden, float scores[2]) {
    scores[0] = scores[1] = 0;
    for (uint32_t f = 0; f < count; f++) {
        scores[0] = fmaf(shared->skip[f], inputs[f * NETWORK_PASS], scores[0]);
        scores[1] = fmaf(shared->skip[f], inputs[f * NETWORK_PASS + NETWORK_THREADS], scores[1]);
    }
    for (uint32_t unit = 0; unit < hidden; unit += NETWORK_UNITS) {
        float sums[NETWORK_UNITS][2];
#pragma unroll
        for (uint32_t r = 0; r < NETWORK_UNITS; r++)
            sums[r][0] = sums[r][1] = shared->b1[unit + r];
#pragma unroll 4
        for (uint32_t f = 0; f < count; f++) {
            const float4 *w1 = (const float4 *)(shared->w1 + (unit * count + f * NETWORK_UNITS));
            float4 low = w1[0], high = w1[1];
            const float weights[NETWORK_UNITS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            float x = inputs[f * NETWORK_PASS], y = inputs[f * NETWORK_PASS + NETWORK_THREADS];
#pragma unroll
            for (uint32_t r = 0; r < NETWORK_UNITS; r++) {
                sums[r][0] = fmaf(weights[r], x, sums[r][0]);
                sums[r][1] = fmaf(weights[r], y, sums[r][1]);
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < NETWORK_UNITS; r++) {
            scores[0] = fmaf(shared->w2[unit + r], rectify(sums[r][0]), scores[0]);
            scores[1] = fmaf(shared->w2[unit + r], rectify(sums[r][1]), scores[1]);
        }
    }
}

static __global__ void __launch_bounds__(NETWORK_THREADS)
    score_network(const struct cuda_score_unit *units, struct kv_pool pool, const struct cuda_score_network *from) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct cuda_score_network *network = (struct cuda_score_network *)(unit + 1);
    const uint32_t chunk = NETWORK_PASS * NETWORK_PASSES;
    for (uint32_t i = threadIdx.x; i < sizeof *network / sizeof(uint64_t); i += NETWORK_THREADS)
        ((uint64_t *)network)[i] = ((const uint64_t *)from)[i];
    unit_load(units + blockIdx.y, unit);
    uint32_t slots = unit->view.slots, inputs = network->inputs, hidden = hidden8(network->hidden);
    if (blockIdx.x * chunk >= slots)
        return;
    const struct network_shared shared = network_open(network, unit->number, (float *)(network + 1));
    for (uint32_t pass = 0; pass < NETWORK_PASSES; pass++) {
        uint32_t first = blockIdx.x * chunk + pass * NETWORK_PASS + threadIdx.x;
        int32_t positions[2];
        float scores[2], *own = shared.inputs + threadIdx.x;
        if (first >= slots)
            return;
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t slot = first + i * NETWORK_THREADS;
            positions[i] = slot < slots ? slot_position(&pool, &unit->view, slot) : KV_NO_POSITION;
            if (slot < slots)
                gather_inputs(unit, network, &shared, slot, positions[i] == KV_NO_POSITION ? 0 : positions[i],
                    own + i * NETWORK_THREADS);
            else
                for (uint32_t f = 0; f < inputs; f++)
                    own[i * NETWORK_THREADS + f * NETWORK_PASS] = 0;
        }
        score_pair(&shared, own, inputs, hidden, scores);
        for (uint32_t i = 0; i < 2; i++)
            if (first + i * NETWORK_THREADS < slots)
                unit->scores[first + i * NETWORK_THREADS] = positions[i] == KV_NO_POSITION ? not_a_number() : scores[i];
    }
}

static_assert(sizeof(struct cuda_score_network) % 16 == 0, "weights after it are read 16 bytes at a time");

static size_t network_shared_bytes(uint32_t inputs, uint32_t hidden) {
    size_t floats = (size_t)hidden8(hidden) * (inputs + 2) + (size_t)inputs * (NETWORK_PASS + 3);
    return sizeof(struct cuda_score_unit) + sizeof(struct cuda_score_network) + floats * sizeof(float);
}

void launch_score_network(const struct cuda_score_call *call, const struct cuda_score_network *network,
    const struct cuda_score_network *device_network, cudaStream_t stream) {
    uint32_t chunk = NETWORK_PASS * NETWORK_PASSES, chunks = (call->slots_most + chunk - 1) / chunk;
    size_t shared = network_shared_bytes(network->inputs, network->hidden);
    for (uint32_t first = 0; chunks > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        uint32_t count = units_at_once(call->count - first);
        KERNEL_LAUNCH(score_network, dim3(chunks, count), dim3(NETWORK_THREADS), shared, stream, call->units + first,
            call->pool, device_network);
    }
}
