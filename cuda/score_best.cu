/* SPDX-License-Identifier: Apache-2.0
 *
 * The best slots of a head: one block a head, radix selection.
 */
#include "cuda/select_device.h"

struct score_keys_of {
    const struct kv_pool *pool;
    const struct cuda_score_unit *unit;
    const struct select_space *space;
    __device__ __forceinline__ uint64_t operator()(uint32_t slot) const {
        return slot_key(unit->scores[slot], held_position(pool, &unit->view, space, slot));
    }
};

static __global__ void __launch_bounds__(SELECT_THREADS)
    score_protect_best(const struct cuda_score_unit *units, struct kv_pool pool) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct select_space *space = (struct select_space *)(unit + 1);
    uint64_t held[SELECT_HELD];
    unit_load(units + blockIdx.x, unit);
    const struct score_keys_of keys = {&pool, unit, space};
    uint32_t slots = unit->view.slots, rank = unit->budget / 2;
    hold_pages(&unit->view, space);
    hold_keys(keys, slots, held);
    uint32_t present = count_keys(keys, held, slots, space);
    rank = rank < present ? rank : present;
    if (rank == 0)
        return;
    uint64_t least = select_least(keys, held, slots, rank, space);
    least = least > 0 ? least : 1; /* an empty slot is none of them */
#pragma unroll
    for (uint32_t i = 0; i < SELECT_HELD; i++)
        if (held[i] >= least)
            unit->scores[i * blockDim.x + threadIdx.x] = infinity();
    for (uint32_t slot = SELECT_HELD * blockDim.x + threadIdx.x; slot < slots; slot += blockDim.x)
        if (keys(slot) >= least)
            unit->scores[slot] = infinity();
}

void launch_score_protect_best(const struct cuda_score_call *call, cudaStream_t stream) {
    size_t shared = sizeof(struct cuda_score_unit) + sizeof(struct select_space);
    KERNEL_LAUNCH(score_protect_best, dim3(call->count), dim3(select_threads(call->slots_most)), shared, stream,
        call->units, call->pool);
}
