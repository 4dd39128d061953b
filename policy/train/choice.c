/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/choice.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy/train/baseline.h"
#include "policy/train/subset.h"
#include "policy/train/top.h"

/* A draw at work: the slots that are neither safe nor lost, of all heads one after the other. */
struct draw {
    struct choice *choice;
    const struct choice_head *heads;
    uint32_t heads_count;
    uint32_t candidates;
    uint32_t *head_of, *slot_of; /* [slots] of each candidate */
    float *scores, *gradient;    /* [slots] */
    double *uniforms;            /* [slots] */
    double *work;                /* [2 slots] */
    uint32_t *order;             /* [slots] */
};

static bool is_protected(const struct choice *choice, uint32_t position) {
    return position < choice->sinks || position >= choice->recent_from;
}

/* ---- what is safe ---- */

static double finite_or_lowest(float score) {
    return isfinite(score) ? (double)score : -INFINITY;
}

/* Above every score; of protected slots the later one. */
static double rank_of(const struct choice *choice, const struct choice_head *head, uint32_t slot) {
    if (is_protected(choice, head->positions[slot]))
        return 0x1p200 * (1 + (double)head->positions[slot]);
    return finite_or_lowest(head->scores[slot]);
}

/* Marks what stays of a head in any case, and returns its number. */
static uint32_t mark_safe(struct draw *draw, const struct choice_head *head) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < head->slots; i++) {
        draw->work[i] = rank_of(draw->choice, head, i);
        count += is_protected(draw->choice, head->positions[i]);
    }
    count = count > head->floor ? count : head->floor;
    count = count < head->slots ? count : head->slots;
    top_of(draw->work, head->slots, count, draw->order);
    for (uint32_t i = 0; i < count; i++)
        head->keep[draw->order[i]] = 1;
    return count;
}

/* More is safe than may stay: the best of it does. */
static void cut_safe(struct draw *draw) {
    uint32_t count = 0, total = (uint32_t)draw->choice->total;
    for (uint32_t h = 0; h < draw->heads_count; h++)
        for (uint32_t i = 0; i < draw->heads[h].slots; i++)
            if (draw->heads[h].keep[i]) {
                draw->work[count] = rank_of(draw->choice, &draw->heads[h], i);
                draw->head_of[count] = h;
                draw->slot_of[count++] = i;
            }
    top_of(draw->work, count, total, draw->order);
    for (uint32_t i = 0; i < count; i++)
        draw->heads[draw->head_of[i]].keep[draw->slot_of[i]] = 0;
    for (uint32_t i = 0; i < total; i++)
        draw->heads[draw->head_of[draw->order[i]]].keep[draw->slot_of[draw->order[i]]] = 1;
}

/* ---- the draw ---- */

/* ln of the sum of e^score over a head's slots. */
static double log_sum(const struct choice_head *head) {
    double highest = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < head->slots; i++)
        highest = fmax(highest, finite_or_lowest(head->scores[i]));
    if (highest == -INFINITY)
        return 0;
    for (uint32_t i = 0; i < head->slots; i++)
        sum += exp(finite_or_lowest(head->scores[i]) - highest);
    return highest + log(sum);
}

static void list_candidates(struct draw *draw) {
    const struct choice *choice = draw->choice;
    draw->candidates = 0;
    for (uint32_t h = 0; h < draw->heads_count; h++) {
        const struct choice_head *head = &draw->heads[h];
        double all = choice->compare ? log_sum(head) : 0;
        for (uint32_t i = 0; i < head->slots; i++) {
            if (head->keep[i])
                continue;
            uint32_t at = draw->candidates++;
            draw->head_of[at] = h;
            draw->slot_of[at] = i;
            draw->scores[at] = (float)(finite_or_lowest(head->scores[i]) - all);
            draw->uniforms[at] = choice->uniform(choice->context, h, i);
            draw->gradient[at] = 0;
        }
    }
}

static int draw_set(struct draw *draw, uint32_t drawn, double *logprob) {
    const struct choice *choice = draw->choice;
    struct subset_table *table =
        subset_table_create(draw->scores, draw->candidates, drawn, (double)choice->temperature);
    if (table == NULL)
        return ERROR_MEMORY;
    subset_sample(table, draw->uniforms, draw->order);
    *logprob = subset_logprob(table, draw->order);
    int code = subset_gradient(table, draw->order, 1.0 / drawn, draw->gradient);
    subset_table_free(table);
    return code;
}

static int draw_order(struct draw *draw, uint32_t drawn, double *logprob) {
    gumbel_top(draw->scores, draw->candidates, draw->uniforms, drawn, draw->order, draw->work);
    *logprob = plackett_luce_logprob(draw->scores, draw->candidates, draw->order, drawn, draw->work);
    plackett_luce_gradient(draw->scores, draw->candidates, draw->order, drawn, 1.0 / drawn, draw->gradient, draw->work);
    return 0;
}

/* From the gradient by log-softmax to that by scores: what the head's candidates get together is taken off all of its
 * slots by their softmax. */
static void through_log_softmax(const struct choice_head *head) {
    double all = log_sum(head), sum = 0;
    for (uint32_t i = 0; i < head->slots; i++)
        sum += (double)head->gradient[i];
    for (uint32_t i = 0; i < head->slots; i++)
        head->gradient[i] -= (float)(sum * exp(finite_or_lowest(head->scores[i]) - all));
}

static int draw_rest(struct draw *draw, uint32_t drawn) {
    struct choice *choice = draw->choice;
    double logprob = 0;
    list_candidates(draw);
    int code = choice->sampler == SAMPLER_SUBSET ? draw_set(draw, drawn, &logprob) : draw_order(draw, drawn, &logprob);
    if (code != 0)
        return code;
    for (uint32_t i = 0; i < drawn; i++)
        draw->heads[draw->head_of[draw->order[i]]].keep[draw->slot_of[draw->order[i]]] = 1;
    for (uint32_t i = 0; i < draw->candidates; i++)
        draw->heads[draw->head_of[i]].gradient[draw->slot_of[i]] = draw->gradient[i];
    for (uint32_t h = 0; choice->compare && h < draw->heads_count; h++)
        through_log_softmax(&draw->heads[h]);
    choice->drawn = drawn;
    choice->entropy = entropy_surrogate(logprob, drawn);
    return 0;
}

/* One memory for all arrays. */
static void *open_draw(struct draw *draw, size_t slots) {
    char *memory = malloc(slots * (3 * sizeof(double) + 2 * sizeof(float) + 3 * sizeof(uint32_t)) + 1);
    if (memory == NULL)
        return NULL;
    draw->work = (double *)memory;
    draw->uniforms = draw->work + 2 * slots;
    draw->scores = (float *)(draw->uniforms + slots);
    draw->gradient = draw->scores + slots;
    draw->head_of = (uint32_t *)(draw->gradient + slots);
    draw->slot_of = draw->head_of + slots;
    draw->order = draw->slot_of + slots;
    return memory;
}

int choice_draw(struct choice *choice, const struct choice_head *heads, uint32_t count, struct error *error) {
    struct draw draw = {.choice = choice, .heads = heads, .heads_count = count};
    uint64_t slots = 0, safe = 0;
    choice->drawn = 0;
    choice->entropy = 0;
    for (uint32_t h = 0; h < count; h++)
        slots += heads[h].slots;
    for (uint32_t h = 0; h < count; h++) {
        memset(heads[h].keep, slots <= choice->total, heads[h].slots);
        memset(heads[h].gradient, 0, heads[h].slots * sizeof *heads[h].gradient);
    }
    if (slots <= choice->total)
        return 0;
    void *memory = open_draw(&draw, slots);
    if (memory == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to choose among %llu slots", (unsigned long long)slots);
    for (uint32_t h = 0; h < count; h++)
        safe += mark_safe(&draw, &heads[h]);
    int code = 0;
    if (safe > choice->total)
        cut_safe(&draw);
    else if (safe < choice->total)
        code = draw_rest(&draw, (uint32_t)(choice->total - safe));
    free(memory);
    return code == 0 ? 0 : error_set(error, code, "no memory to choose among %llu slots", (unsigned long long)slots);
}
