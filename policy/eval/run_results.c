/* SPDX-License-Identifier: Apache-2.0
 *
 * From lanes to results: what a prune kept of the prompt, and what was measured.
 */
#include "policy/eval/run_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what is kept ---- */

/* Sliding layers keep their window, whatever the policy: they do not count. */
static bool counts_layer(const struct eval_run *run, uint32_t layer) {
    return engine_model(run->options.engine)->windows[layer] == 0;
}

/* Heads of each layer that keep the token: counts [layers][tokens]. NULL: no memory. */
static uint16_t *count_kept(struct eval_run *run, struct sequence *sequence, uint32_t tokens) {
    const struct model_shape *shape = &engine_model(run->options.engine)->shape;
    struct kv_sequence *kv = sequence_kv(sequence);
    uint16_t *counts = calloc((size_t)shape->layers * tokens, sizeof *counts);
    uint32_t *positions = calloc(tokens, sizeof *positions);
    for (uint32_t head = 0; counts != NULL && positions != NULL && head < run->heads; head++) {
        uint32_t layer = head / shape->kv_heads;
        if (!counts_layer(run, layer))
            continue;
        uint32_t slots = kv_sequence_slots(kv, layer, head % shape->kv_heads);
        kv_sequence_positions(kv, layer, head % shape->kv_heads, positions);
        for (uint32_t i = 0; i < slots; i++)
            if (positions[i] < tokens)
                counts[(size_t)layer * tokens + positions[i]]++;
    }
    if (positions == NULL) {
        free(counts);
        counts = NULL;
    }
    free(positions);
    return counts;
}

static void fill_map(const uint16_t *counts, uint32_t layers, uint32_t kv_heads, uint32_t tokens, char *map) {
    for (uint32_t layer = 0; layer < layers; layer++) {
        for (uint32_t bin = 0; bin < KEPT_BINS; bin++) {
            uint32_t first = (uint32_t)((uint64_t)tokens * bin / KEPT_BINS);
            uint32_t end = (uint32_t)((uint64_t)tokens * (bin + 1) / KEPT_BINS);
            double sum = 0;
            for (uint32_t i = first; i < end; i++)
                sum += counts[(size_t)layer * tokens + i];
            double part = end > first ? sum / ((double)kv_heads * (end - first)) : 0;
            map[layer * KEPT_BINS + bin] = (char)('0' + (int)(63 * part + 0.5));
        }
    }
}

/* Over all layers: sums [tokens]. */
static void sum_layers(const uint16_t *counts, uint32_t layers, uint32_t tokens, uint32_t *sums) {
    for (uint32_t i = 0; i < tokens; i++)
        for (uint32_t layer = 0; layer < layers; layer++)
            sums[i] += counts[(size_t)layer * tokens + i];
}

int record_kept(struct eval_run *run, struct lane *lane, struct error *error) {
    const struct model_shape *shape = &engine_model(run->options.engine)->shape;
    uint32_t tokens = sequence_length(lane->sequence);
    uint32_t heads = shape->global_layers > 0 ? shape->global_layers * shape->kv_heads : 1;
    uint8_t **shares = run->work->kept != NULL ? &run->work->kept[lane->variant] : NULL;
    uint16_t *counts = count_kept(run, lane->sequence, tokens);
    uint32_t *sums = calloc(tokens, sizeof *sums);
    lane->kept = calloc((size_t)shape->layers * KEPT_BINS + 1, 1);
    if (shares != NULL && *shares == NULL)
        *shares = calloc(tokens, 1);
    int code = 0;
    if (counts == NULL || sums == NULL || lane->kept == NULL || (shares != NULL && *shares == NULL)) {
        code = error_set(error, ERROR_MEMORY, "no memory for the positions kept of %u tokens", tokens);
    } else {
        fill_map(counts, shape->layers, shape->kv_heads, tokens, lane->kept);
        sum_layers(counts, shape->layers, tokens, sums);
        eval_positions_measure(sums, tokens, heads, &lane->positions);
        for (uint32_t i = 0; shares != NULL && i < tokens; i++)
            (*shares)[i] = (uint8_t)((255 * sums[i] + heads / 2) / heads);
    }
    free(counts);
    free(sums);
    return code;
}

/* ---- results ---- */

static double mean(double sum, uint32_t count) {
    return count > 0 ? sum / count : 0;
}

static void fill_common(
    const struct eval_run *run, const struct lane *lane, uint32_t part, struct eval_result *result) {
    *result = (struct eval_result){.length = run->work->length,
        .item = run->work->index,
        .part = part,
        .variant = lane->variant,
        .digest = run->work->question->digest,
        .tokens_kept = lane->memory.kept,
        .tokens_seen = lane->memory.seen,
        .bytes = (double)lane->memory.bytes,
        .bytes_full = (double)lane->memory.bytes_full,
        .tokens = lane->tokens,
        .seconds = lane->seconds};
}

static void take_kept(struct lane *lane, struct eval_result *result) {
    result->positions = lane->positions;
    result->kept = lane->kept;
    lane->kept = NULL;
}

static int emit_kl(struct eval_run *run, struct lane *lane, struct error *error) {
    int code = 0;
    for (uint32_t part = 0; part < BRANCHES && code == 0; part++) {
        const struct branch *branch = &lane->branches[part];
        struct eval_result result;
        fill_common(run, lane, part, &result);
        strcpy(result.group, branch->kind == BRANCH_TEXT ? "text" : "own");
        result.steps = branch->steps;
        result.kl = mean(branch->kl, branch->steps);
        result.top1 = mean(branch->same, branch->steps);
        result.loss = mean(branch->loss, branch->steps);
        result.loss_full = mean(run->full_loss[part], branch->steps);
        if (part == 0)
            take_kept(lane, &result);
        code = run->options.emit(run->options.context, &result, error);
    }
    return code;
}

static void score_answer(const struct eval_run *run, const struct branch *answer, struct eval_result *result) {
    const struct eval_item *item = run->work->item;
    result->has_score = item->metric != METRIC_NONE;
    if (!result->has_score)
        return;
    result->score = eval_score(item, result->output);
    result->kind =
        eval_classify(result->score, answer->output, answer->generated, item->max_tokens, run->full_generated);
    result->chance = item->classes_count > 0 ? 1.0 / item->classes_count : 0;
}

static int emit_answer(struct eval_run *run, struct lane *lane, struct error *error) {
    const struct eval_item *item = run->work->item;
    const struct branch *answer = &lane->branches[0], *gold = &lane->branches[1];
    struct eval_result result;
    size_t bytes;
    fill_common(run, lane, 0, &result);
    if (text_stream_finish(answer->stream) != 0)
        return error_set(error, ERROR_MEMORY, "no memory for an answer");
    const char *text = text_stream_take(answer->stream, &bytes);
    result.output = strndup(text, bytes);
    if (result.output == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for an answer");
    take_kept(lane, &result);
    snprintf(result.group, sizeof result.group, "%s", item->group != NULL ? item->group : "");
    snprintf(result.gold, sizeof result.gold, "%s", item->answers_count > 0 ? item->answers[0] : "");
    result.output_tokens = answer->generated;
    result.max_tokens = item->max_tokens;
    result.has_gold = run->work->question->gold.count > 0;
    result.gold_tokens = (uint32_t)run->work->question->gold.count;
    result.gold_logprob = -gold->loss;
    score_answer(run, answer, &result);
    return run->options.emit(run->options.context, &result, error);
}

int emit_wave(struct eval_run *run, struct error *error) {
    int code = 0;
    for (uint32_t i = 0; i < run->lanes_count && code == 0; i++) {
        struct lane *lane = &run->lanes[i];
        if (lane->variant == 0 && !lane->silent) {
            run->full_generated = lane->branches[0].generated;
            for (int b = 0; b < BRANCHES; b++)
                run->full_loss[b] = lane->branches[b].loss;
        }
        if (!lane->silent && run->work->wanted[lane->variant])
            code = run->work->item == NULL ? emit_kl(run, lane, error) : emit_answer(run, lane, error);
    }
    return code;
}
