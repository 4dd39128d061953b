/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/sample.h"
#include "cuda/cuda_backend.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t mark_words(uint32_t vocabulary) {
    return ((size_t)vocabulary + 31) / 32;
}

static bool is_marked(const uint32_t *words, uint32_t id) {
    return (words[id / 32] >> id % 32 & 1) != 0;
}

static bool has_marks(const struct sample_params *params) {
    return params->banned_count > 0 || params->changes_count > 0 || params->allowed != NULL;
}

/* The changes of tokens that are not banned. */
static void stage_changes(
    struct cuda_stage *stage, const struct sample_params *params, const uint32_t *banned, struct sample_row *row) {
    const void *device;
    struct logit_change *changes = cuda_stage_add(stage, params->changes_count * sizeof *changes, &device);
    row->changes_count = 0;
    for (uint32_t i = 0; i < params->changes_count; i++)
        if (!is_marked(banned, (uint32_t)params->changes[i].token))
            changes[row->changes_count++] = params->changes[i];
    row->changes = device;
}

/* Bans and changes of one row, on the device. The host side of a stage is not read: the bits are made in words
 * [mark_words]. */
static void stage_marks(struct cuda_stage *stage, const struct sample_params *params, uint32_t vocabulary,
    uint32_t *words, struct sample_row *row) {
    if (!has_marks(params))
        return;
    size_t count = mark_words(vocabulary);
    uint32_t allowed = 0;
    memset(words, 0, count * sizeof *words);
    for (size_t i = 0; params->allowed != NULL && i < count; i++)
        words[i] = ~params->allowed[i];
    for (uint32_t i = 0; i < params->banned_count; i++) {
        uint32_t id = (uint32_t)params->banned[i];
        if (params->banned[i] >= 0 && id < vocabulary)
            words[id / 32] |= 1u << id % 32;
    }
    while (allowed < vocabulary && is_marked(words, allowed))
        allowed++;
    row->first_allowed = allowed == vocabulary ? 0 : allowed;
    if (params->changes_count > 0)
        stage_changes(stage, params, words, row);
    for (uint32_t i = 0; i < params->changes_count; i++) {
        uint32_t id = (uint32_t)params->changes[i].token;
        words[id / 32] |= 1u << id % 32;
    }
    row->marks = cuda_stage_copy(stage, words, count * sizeof *words);
}

static struct sample_row row_of(const struct sample_params *params, uint32_t vocabulary) {
    float scale = 1 / params->temperature;
    return (struct sample_row){
        .log_min_p = params->min_p > 0 ? log((double)params->min_p) : -INFINITY,
        .scale = scale < FLT_MAX ? scale : FLT_MAX,
        .top_p = params->top_p,
        .seed = params->seed,
        .stream = params->stream,
        .step = params->step,
        .top_k = params->top_k,
        .forced = params->forced >= 0 && (uint32_t)params->forced < vocabulary ? params->forced : -1,
        .top_count = params->top_count < SAMPLE_TOP_MAX ? params->top_count : SAMPLE_TOP_MAX,
        .greedy = !(params->temperature > 0),
        .want_logprob = params->want_logprob,
    };
}

/* Rows with their bans and changes. words: room for bits. NULL when there was an error. */
static const struct sample_row *stage_rows(struct cuda_backend *cuda, const struct sample_params *params, uint32_t rows,
    uint32_t vocabulary, uint32_t *words) {
    size_t bytes = cuda_stage_size(rows * sizeof(struct sample_row));
    for (uint32_t i = 0; i < rows; i++) {
        bytes += has_marks(&params[i]) ? cuda_stage_size(mark_words(vocabulary) * sizeof(uint32_t)) : 0;
        bytes += cuda_stage_size(params[i].changes_count * sizeof(struct logit_change));
    }
    struct cuda_stage stage;
    const void *device;
    if (!cuda_stage_begin(cuda, bytes, &stage))
        return NULL;
    struct sample_row *row = cuda_stage_add(&stage, rows * sizeof *row, &device);
    for (uint32_t i = 0; i < rows; i++) {
        struct sample_row own = row_of(&params[i], vocabulary);
        stage_marks(&stage, &params[i], vocabulary, words, &own);
        row[i] = own;
    }
    return cuda_stage_send(cuda, &stage) ? device : NULL;
}

void cuda_sample(struct backend *backend, const float *logits, uint32_t rows, uint32_t vocabulary,
    const struct sample_params *params, struct sample_result *results) {
    struct cuda_backend *cuda = cuda_backend(backend);
    size_t bytes = rows * sizeof *results;
    if (rows == 0)
        return;
    struct sample_result *device = cuda_scratch_reserve(cuda, &cuda->results, bytes);
    uint32_t *words = malloc(mark_words(vocabulary) * sizeof *words);
    const struct sample_row *staged = NULL;
    if (words == NULL)
        cuda_check(cuda, cudaErrorMemoryAllocation, "sample");
    else if (device != NULL)
        staged = stage_rows(cuda, params, rows, vocabulary, words);
    free(words);
    if (staged != NULL && cuda_check(cuda, cudaMemsetAsync(device, 0, bytes, cuda->stream), "sample")) {
        launch_sample(logits, rows, vocabulary, staged, device, cuda->stream);
        cuda_check_launch(cuda, "sample");
    }
    cuda_download(backend, results, device, bytes); /* waits, and ends the program after an error */
}

void cuda_kl(struct backend *backend, const float *p, const uint32_t *p_rows, const float *q, uint32_t rows,
    uint32_t vocabulary, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct cuda_stage stage;
    if (rows == 0)
        return;
    float *device = cuda_scratch_reserve(cuda, &cuda->results, rows * sizeof *out);
    if (device != NULL && cuda_stage_begin(cuda, rows * sizeof *p_rows, &stage)) {
        const uint32_t *device_rows = cuda_stage_copy(&stage, p_rows, rows * sizeof *p_rows);
        if (cuda_stage_send(cuda, &stage)) {
            launch_kl(p, device_rows, q, rows, vocabulary, device, cuda->stream);
            cuda_check_launch(cuda, "kl");
        }
    }
    cuda_download(backend, out, device, rows * sizeof *out);
}
