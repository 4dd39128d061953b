/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/top.h"

/* Whether slot a comes before slot b. */
static int before(const double *values, uint32_t a, uint32_t b) {
    return values[a] != values[b] ? values[a] > values[b] : a > b;
}

/* heap [count]: a parent comes after its children, but for the one at `at`, which sinks to its place. */
static void sink(const double *values, uint32_t *heap, uint32_t count, uint32_t at) {
    uint32_t moved = heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && before(values, heap[child], heap[child + 1]))
            child++;
        if (!before(values, moved, heap[child]))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

void top_of(const double *values, uint32_t slots, uint32_t count, uint32_t *order) {
    if (count == 0)
        return;
    for (uint32_t i = 0; i < count; i++)
        order[i] = i;
    for (uint32_t i = count / 2; i-- > 0;)
        sink(values, order, count, i);
    for (uint32_t i = count; i < slots; i++) {
        if (!before(values, i, order[0]))
            continue;
        order[0] = i;
        sink(values, order, count, 0);
    }
    for (uint32_t end = count - 1; end > 0; end--) {
        uint32_t last = order[0];
        order[0] = order[end];
        order[end] = last;
        sink(values, order, end, 0);
    }
}
