/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor core products and ldmatrix, by the fragment layouts of the PTX ISA ("Matrix Fragments for mma.m16n8k16 with
 * floating point type", "mma.m16n8k32", "mma.m16n8k16 with integer type", "ldmatrix"; cuda/device.h repeats them). Sums
 * are in float32, in ascending k: the device's own order and rounding inside a product are not documented.
 */
#include "internal.h"
#include "check.h"

#include <string.h>

static float half_value(uint32_t bits) {
    uint16_t low = (uint16_t)bits;
    _Float16 value;
    memcpy(&value, &low, sizeof(value));
    return (float)value;
}

static float bfloat16_value(uint32_t bits) {
    uint32_t wide = bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

static float float_value(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Register r of a lane holds `each` elements of the given row, from the given column on. */
static unsigned a_row(unsigned lane, unsigned r) {
    return lane / 4 + r % 2 * 8;
}

static unsigned a_column(unsigned lane, unsigned r, unsigned each) {
    return lane % 4 * each + r / 2 * 4 * each;
}

static unsigned d_row(unsigned lane, unsigned r) {
    return lane / 4 + r / 2 * 8;
}

static unsigned d_column(unsigned lane, unsigned r) {
    return lane % 4 * 2 + r % 2;
}

static void multiply_floats(struct warp *warp, float (*value)(uint32_t)) {
    float a[16][16], b[16][8], d[16][8]; /* b [k][column] */
    for (unsigned lane = 0; lane < WARP_LANES; lane++) {
        const struct meeting *m = warp->lanes[lane]->meeting;
        for (unsigned r = 0; r < 4; r++) {
            unsigned row = a_row(lane, r), column = a_column(lane, r, 2);
            a[row][column] = value(m->fragment_a[r] & 0xffff);
            a[row][column + 1] = value(m->fragment_a[r] >> 16);
            d[d_row(lane, r)][d_column(lane, r)] = float_value(m->fragment_c[r]);
        }
        for (unsigned r = 0; r < 2; r++) {
            unsigned k = lane % 4 * 2 + r * 8;
            b[k][lane / 4] = value(m->fragment_b[r] & 0xffff);
            b[k + 1][lane / 4] = value(m->fragment_b[r] >> 16);
        }
    }
    for (unsigned row = 0; row < 16; row++)
        for (unsigned k = 0; k < 16; k++)
            for (unsigned column = 0; column < 8; column++)
                d[row][column] += a[row][k] * b[k][column];
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        for (unsigned r = 0; r < 4; r++)
            memcpy(&warp->lanes[lane]->meeting->fragment_d[r], &d[d_row(lane, r)][d_column(lane, r)], 4);
}

/* k32 has k16's columns in its first registers, and 16 more behind them. */
static void multiply_bytes(struct warp *warp, unsigned columns) {
    int32_t a[16][32], b[32][8];
    uint32_t d[16][8];
    for (unsigned lane = 0; lane < WARP_LANES; lane++) {
        const struct meeting *m = warp->lanes[lane]->meeting;
        for (unsigned r = 0; r < 4; r++)
            d[d_row(lane, r)][d_column(lane, r)] = m->fragment_c[r];
        for (unsigned r = 0; r < columns / 8; r++)
            for (unsigned i = 0; i < 4; i++)
                a[a_row(lane, r)][a_column(lane, r, 4) + i] = (int8_t)(m->fragment_a[r] >> 8 * i);
        for (unsigned r = 0; r < columns / 16; r++)
            for (unsigned i = 0; i < 4; i++)
                b[lane % 4 * 4 + r * 16 + i][lane / 4] = (int8_t)(m->fragment_b[r] >> 8 * i);
    }
    for (unsigned row = 0; row < 16; row++)
        for (unsigned k = 0; k < columns; k++)
            for (unsigned column = 0; column < 8; column++)
                d[row][column] += (uint32_t)(a[row][k] * b[k][column]);
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        for (unsigned r = 0; r < 4; r++)
            warp->lanes[lane]->meeting->fragment_d[r] = d[d_row(lane, r)][d_column(lane, r)];
}

static void whole_warp(struct warp *warp) {
    if (warp->exists != 0xffffffff)
        fault_raise(&warp->lanes[0]->meeting->place, "needs a whole warp; this one has lanes 0x%08x", warp->exists);
}

void mma_compute(struct warp *warp, enum emulator_warp_kind kind) {
    whole_warp(warp);
    if (kind == EMULATOR_MMA_S8 || kind == EMULATOR_MMA_S8_K16)
        multiply_bytes(warp, kind == EMULATOR_MMA_S8 ? 32 : 16);
    else
        multiply_floats(warp, kind == EMULATOR_MMA_F16 ? half_value : bfloat16_value);
}

void ldmatrix_compute(struct worker *worker, struct warp *warp, enum emulator_warp_kind kind) {
    uint16_t matrices[4][8][8];
    whole_warp(warp);
    for (unsigned lane = 0; lane < WARP_LANES; lane++) {
        const struct meeting *m = warp->lanes[lane]->meeting;
        size_t offset = (size_t)((const char *)m->row - worker->shared);
        if (offset >= BLOCK_SHARED_SPACE || offset % 16 != 0 || offset + 16 > worker->launch->shared_bytes)
            fault_raise(&m->place, "ldmatrix: row of lane %u is not 16 aligned bytes of shared memory (offset %td)",
                lane, (const char *)m->row - worker->shared);
        if (worker->checked)
            check_access(warp->lanes[lane], m->row, 16, ACCESS_READ, true, m->place.address);
        memcpy(matrices[lane / 8][lane % 8], m->row, 16);
    }
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        for (unsigned j = 0; j < 4; j++) {
            unsigned g = lane / 4, t = lane % 4 * 2;
            uint32_t low = kind == EMULATOR_LDMATRIX ? matrices[j][g][t] : matrices[j][t][g];
            uint32_t high = kind == EMULATOR_LDMATRIX ? matrices[j][g][t + 1] : matrices[j][t + 1][g];
            warp->lanes[lane]->meeting->fragment_d[j] = low | high << 16;
        }
}
