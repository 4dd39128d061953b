/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cuda_backend.h"
#include "cuda/weights.h"

const struct backend_operations cuda_operations = {
    .name = "cuda",
    .host_memory = false,
    .describe = cuda_describe,
    .close = cuda_close,

    /* memory.c */
    .allocate = cuda_allocate,
    .release = cuda_release,
    .upload = cuda_upload,
    .download = cuda_download,
    .synchronize = cuda_synchronize,

    /* linear */
    .weight_create = cuda_weight_create,
    .weight_free = cuda_weight_free,
    .weight_bytes = cuda_weight_bytes,
    .embed = cuda_embed,
    .linear = cuda_linear,

    /* attend.c, moments.c, summarise.c, preference.c */
    .attend_variants = true,
    .attend = cuda_attend,
    .query_moments = cuda_query_moments,
    .summarise = cuda_summarise,
    .window_preference = cuda_window_preference,

    /* score.c */
    .score = cuda_score,
    .slot_norms = cuda_slot_norms,

    /* select.c */
    .select = cuda_select,

    /* vector.c */
    .rms_norm = cuda_rms_norm,
    .rms_norm_add = cuda_rms_norm_add,
    .head_norms = cuda_head_norms,
    .add_bias = cuda_add_bias,
    .scale = cuda_scale,
    .soft_cap = cuda_soft_cap,
    .silu_mul = cuda_silu_mul,
    .gelu_mul = cuda_gelu_mul,
    .gather_rows = cuda_gather_rows,

    /* rope.c */
    .rope_and_append = cuda_rope_and_append,
    .rotate_slots = cuda_rotate_slots,
    .unrotate_slots = cuda_unrotate_slots,

    /* step.c, tables.c */
    .step_begin = cuda_step_begin,
    .step_start = cuda_step_start,
    .step_end = cuda_step_end,
    .write_tables = cuda_write_tables,

    /* pages.c */
    .copy_pages = cuda_copy_pages,
    .move_slots = cuda_move_slots,
    .clear_slots = cuda_clear_slots,
    .poison_pages = cuda_poison_pages,
    .move_statistics = cuda_move_statistics,

    /* sample.c */
    .sample = cuda_sample,
    .kl = cuda_kl,
};

void (*const cuda_family_frees[])(struct cuda_backend *cuda) = {
    cuda_step_free,

    cuda_rope_free,

    cuda_linear_free,

    cuda_attend_free,

    cuda_score_free,

    cuda_select_free,

    NULL,
};
