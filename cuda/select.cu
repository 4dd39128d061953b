/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/select.h"

#include "cuda/select_device.h"

enum { COUNT_SLOTS = 8192 /* slots a block counts the digits of */ };

static_assert(sizeof(((struct cuda_select_group_state *)0)->histogram) == SELECT_DIGITS * sizeof(uint32_t),
    "a counter for every digit");

#define SAFE_BIT ((uint64_t)1 << 63)
/* No score is higher than that of a protected slot. */
#define PROTECTED_KEY ((uint64_t)0xff800000u << KEY_POSITION_BITS)

struct row_keys {
    const struct kv_pool *pool;
    const struct cuda_select_row *row;
    const struct select_space *space; /* has the row's pages */
    uint64_t safe_from;               /* keys from here on are safe; ~0: none */
    __device__ __forceinline__ uint64_t operator()(uint32_t slot) const {
        uint64_t key = slot_key(row->scores[slot], held_position(pool, &row->view, space, slot));
        return key != 0 && key >= safe_from ? key | SAFE_BIT : key;
    }
};

/* Where a block of whole rows has its row and its space. */
struct row_shared {
    struct cuda_select_row row;
    struct select_space space;
};

SCORE_INLINE void row_load(const struct cuda_select_row *from, struct cuda_select_row *to) {
    for (uint32_t i = threadIdx.x; i < sizeof *to / sizeof(uint64_t); i += blockDim.x)
        ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
    __syncthreads();
}

static_assert(sizeof(struct cuda_select_row) % sizeof(uint64_t) == 0, "a row is read 8 bytes at a time");

/* The words of slots [first, end), gathered in the histogram, to the row's; first a multiple of 32. */
SCORE_INLINE void write_words(const struct cuda_select_row *row, uint32_t first, uint32_t end, const uint32_t *words) {
    __syncthreads();
    for (uint32_t i = threadIdx.x; first + i * WARP < end; i += blockDim.x)
        row->stays[first / WARP + i] = words[i];
    __syncthreads();
}

/* Writes which slots have keys that are at least `least`, or `tied`. The histogram is free. */
SCORE_INLINE void write_stays(const struct row_keys &keys, const uint64_t held[SELECT_HELD], uint64_t least,
    uint64_t tied, struct select_space *space) {
    const struct cuda_select_row *row = keys.row;
    uint32_t slots = row->view.slots, lane = threadIdx.x % WARP, *words = space->histogram;
    uint32_t warp = threadIdx.x / WARP, covered = SELECT_HELD * blockDim.x;
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < SELECT_HELD; i++) {
        bool stays = held[i] != 0 && (held[i] >= least || held[i] == tied);
        uint32_t word = __ballot_sync(0xffffffffu, stays);
        if (lane == 0)
            words[i * (blockDim.x / WARP) + warp] = word;
    }
    write_words(row, 0, slots < covered ? slots : covered, words);
    for (uint32_t first = covered; first < slots; first += SELECT_DIGITS * WARP) {
        uint32_t left = slots - first, end = left < SELECT_DIGITS * WARP ? slots : first + SELECT_DIGITS * WARP;
        for (uint32_t begin = first + warp * WARP; begin < end; begin += blockDim.x) {
            uint64_t key = begin + lane < end ? keys(begin + lane) : 0;
            uint32_t word = __ballot_sync(0xffffffffu, key != 0 && (key >= least || key == tied));
            if (lane == 0)
                words[(begin - first) / WARP] = word;
        }
        write_words(row, first, end, words);
    }
}

/* ---- rows ---- */

/* Rows that are alone; of others, what is present and what the floor makes safe. */
static __global__ void __launch_bounds__(SELECT_THREADS) select_rows(struct cuda_select_call call) {
    KERNEL_SHARED(struct row_shared, shared);
    uint64_t held[SELECT_HELD], least = 1;
    row_load(call.rows + blockIdx.x, &shared->row);
    const struct cuda_select_row *row = &shared->row;
    hold_pages(&row->view, &shared->space);
    const struct row_keys keys = {&call.pool, row, &shared->space, ~(uint64_t)0};
    uint32_t slots = row->view.slots;
    bool alone = row->group == SELECT_ALONE;
    hold_keys(keys, slots, held);
    uint32_t present = count_keys(keys, held, slots, &shared->space);
    uint32_t rank = alone ? row->budget : row->floor;
    if (rank == 0)
        least = ~(uint64_t)0;
    else if (rank < present)
        least = select_least(keys, held, slots, rank, &shared->space);
    least = least > 0 ? least : 1;
    if (alone) {
        write_stays(keys, held, least, 0, &shared->space);
        return;
    }
    if (threadIdx.x == 0) {
        call.row_states[blockIdx.x].safe_from = least < PROTECTED_KEY ? least : PROTECTED_KEY;
        call.row_states[blockIdx.x].present = present;
        atomicAdd(&call.group_states[row->group].present, present);
    }
}

/* ---- groups ---- */

/* Whether the group has more slots than may stay, and its last key is to be found. */
SCORE_INLINE bool is_contested(const struct cuda_select_group *group, const struct cuda_select_group_state *state) {
    return state->present > group->total && group->total > 0;
}

/* Adds the digits of some of a row's keys to the group's histogram; the last block of the group takes the digit. */
static __global__ void __launch_bounds__(SELECT_THREADS)
    select_digit(struct cuda_select_call call, uint32_t first_row, int pass) {
    KERNEL_SHARED(struct row_shared, shared);
    struct select_space *space = &shared->space;
    uint32_t number = first_row + blockIdx.y;
    row_load(call.rows + number, &shared->row);
    const struct cuda_select_row *row = &shared->row;
    if (row->group == SELECT_ALONE)
        return;
    const struct cuda_select_group *group = &call.groups[row->group];
    struct cuda_select_group_state *state = &call.group_states[row->group];
    if (!is_contested(group, state) || state->complete != 0)
        return;
    hold_pages(&row->view, space);
    const struct row_keys keys = {&call.pool, row, &shared->space, call.row_states[number].safe_from};
    uint64_t found = state->found, above = bits_above(pass);
    for (uint32_t i = threadIdx.x; i < SELECT_DIGITS; i += blockDim.x)
        space->histogram[i] = 0;
    __syncthreads();
    uint32_t first = blockIdx.x * COUNT_SLOTS, slots = row->view.slots;
    uint32_t end = slots < first + COUNT_SLOTS ? slots : first + COUNT_SLOTS;
#pragma unroll 4
    for (uint32_t slot = first + threadIdx.x; slot < end; slot += blockDim.x) {
        uint64_t key = keys(slot);
        if (key != 0 && (key & above) == found)
            atomicAdd(&space->histogram[digit_of(key, pass)], 1u);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < SELECT_DIGITS; i += blockDim.x)
        if (space->histogram[i] != 0)
            atomicAdd(&state->histogram[i], space->histogram[i]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        space->count = atomicAdd(&state->arrived, 1u);
    __syncthreads();
    if (space->count + 1 != gridDim.x * group->count)
        return;
    __threadfence();
    for (uint32_t i = threadIdx.x; i < SELECT_DIGITS; i += blockDim.x)
        space->histogram[i] = atomicExch(&state->histogram[i], 0u);
    __syncthreads();
    find_digit(space, pass == 0 ? (uint32_t)group->total : state->rank);
    if (threadIdx.x == 0) {
        state->found = found | (uint64_t)space->digit << digit_shift(pass);
        state->rank = space->rank;
        state->complete = space->rank == space->count;
        state->arrived = 0;
    }
}

/* Whether a row has a key that ties with the group's last; keys of a row differ. */
static __global__ void __launch_bounds__(SELECT_THREADS) select_ties(struct cuda_select_call call) {
    KERNEL_SHARED(struct row_shared, shared);
    row_load(call.rows + blockIdx.x, &shared->row);
    const struct cuda_select_row *row = &shared->row;
    if (row->group == SELECT_ALONE)
        return;
    const struct cuda_select_group_state *state = &call.group_states[row->group];
    if (!is_contested(&call.groups[row->group], state) || state->complete != 0)
        return;
    hold_pages(&row->view, &shared->space);
    const struct row_keys keys = {&call.pool, row, &shared->space, call.row_states[blockIdx.x].safe_from};
    uint64_t found = state->found;
#pragma unroll 4
    for (uint32_t slot = threadIdx.x; slot < row->view.slots; slot += blockDim.x)
        if (keys(slot) == found)
            call.row_states[blockIdx.x].tie = 1;
}

static __global__ void __launch_bounds__(SELECT_THREADS) select_keep(struct cuda_select_call call) {
    KERNEL_SHARED(struct row_shared, shared);
    uint64_t held[SELECT_HELD], least = 1, tied = 0;
    row_load(call.rows + blockIdx.x, &shared->row);
    const struct cuda_select_row *row = &shared->row;
    if (row->group == SELECT_ALONE)
        return;
    const struct cuda_select_group *group = &call.groups[row->group];
    const struct cuda_select_group_state *state = &call.group_states[row->group];
    if (group->total == 0) {
        least = ~(uint64_t)0;
    } else if (is_contested(group, state)) {
        uint32_t before = 0; /* ties of rows before this one */
        for (uint32_t r = group->first + threadIdx.x; r < blockIdx.x; r += blockDim.x)
            before += call.row_states[r].tie;
        before = block_sum(before, shared->space.scan);
        least = state->complete != 0 ? state->found : state->found + 1;
        tied = state->complete == 0 && before < state->rank ? state->found : 0;
    }
    hold_pages(&row->view, &shared->space);
    const struct row_keys keys = {&call.pool, row, &shared->space, call.row_states[blockIdx.x].safe_from};
    hold_keys(keys, row->view.slots, held);
    write_stays(keys, held, least, tied, &shared->space);
}

void launch_select(const struct cuda_select_call *call, cudaStream_t stream) {
    size_t shared = sizeof(struct row_shared);
    uint32_t chunks = (call->slots_most + COUNT_SLOTS - 1) / COUNT_SLOTS, threads = select_threads(call->slots_most);
    KERNEL_LAUNCH(select_rows, dim3(call->rows_count), dim3(threads), shared, stream, *call);
    if (call->groups_count == 0)
        return;
    for (int pass = 0; chunks > 0 && pass < 6; pass++) {
        for (uint32_t first = 0; first < call->rows_count; first += SCORE_UNITS_GRID) {
            uint32_t left = call->rows_count - first, count = units_at_once(left);
            KERNEL_LAUNCH(select_digit, dim3(chunks, count), dim3(threads), shared, stream, *call, first, pass);
        }
    }
    KERNEL_LAUNCH(select_ties, dim3(call->rows_count), dim3(threads), shared, stream, *call);
    KERNEL_LAUNCH(select_keep, dim3(call->rows_count), dim3(threads), shared, stream, *call);
}
