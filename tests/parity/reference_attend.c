/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/reference_attend.h"

#include "tests/parity/reference_linear.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

size_t reference_number_bytes(enum kv_format format) {
    return format == KV_F32 ? 4 : 2;
}

double reference_number(enum kv_format format, const unsigned char *at) {
    float single;
    uint16_t bits;
    if (format == KV_F32) {
        memcpy(&single, at, sizeof single);
        return single;
    }
    memcpy(&bits, at, sizeof bits);
    if (format == KV_F16)
        return reference_half(bits);
    uint32_t wide = (uint32_t)bits << 16;
    memcpy(&single, &wide, sizeof single);
    return single;
}

/* The bit pattern of the 16-bit format whose value is nearest: there are few enough to bisect them. */
static uint16_t round_to_16(enum kv_format format, double value) {
    uint32_t low = 0, high = format == KV_F16 ? 0x7c00 : 0x7f80; /* zero and infinity */
    double magnitude = fabs(value);
    while (high - low > 1) {
        uint16_t middle = (uint16_t)((low + high) / 2);
        if (reference_number(format, (const unsigned char *)&middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    uint16_t below = (uint16_t)low, above = (uint16_t)high;
    double down = reference_number(format, (const unsigned char *)&below);
    double up = reference_number(format, (const unsigned char *)&above);
    if (isinf(up)) { /* the number that would follow the largest one decides */
        uint16_t before = (uint16_t)(low - 1);
        up = 2 * down - reference_number(format, (const unsigned char *)&before);
    }
    uint32_t nearest = magnitude - down < up - magnitude ? low : high;
    if (magnitude - down == up - magnitude)
        nearest = low % 2 == 0 ? low : high;
    return (uint16_t)(nearest | (signbit(value) ? 0x8000 : 0));
}

size_t reference_round(enum kv_format format, double value, unsigned char *to) {
    if (format == KV_F32) {
        float single = (float)value;
        memcpy(to, &single, sizeof single);
        return sizeof single;
    }
    uint16_t bits = round_to_16(format, value);
    memcpy(to, &bits, sizeof bits);
    return sizeof bits;
}

unsigned char *reference_key(const struct reference_pool *pool, uint32_t page, uint32_t place, uint32_t channel) {
    size_t index = (size_t)channel * KV_PAGE_SLOTS + place;
    return pool->image + page * pool->page_bytes + index * reference_number_bytes(pool->layout.format);
}

unsigned char *reference_value(const struct reference_pool *pool, uint32_t page, uint32_t place, uint32_t channel) {
    size_t index = (size_t)(KV_PAGE_SLOTS + place) * pool->layout.head_dim + channel;
    return pool->image + page * pool->page_bytes + index * reference_number_bytes(pool->layout.format);
}

int32_t *reference_position(const struct reference_pool *pool, uint32_t page, uint32_t place) {
    return (int32_t *)reference_value(pool, page, KV_PAGE_SLOTS, 0) + place;
}

void reference_rope(const struct rope_params *rope, uint32_t position, const float *x, uint32_t dim, double *out) {
    for (uint32_t i = 0; i < dim; i++)
        out[i] = x[i];
    for (uint32_t pair = 0; pair < rope->dim / 2; pair++) {
        double angle = (double)position * (double)rope->inverse_freq[pair];
        double a = x[2 * pair], b = x[2 * pair + 1];
        out[2 * pair] = a * cos(angle) - b * sin(angle);
        out[2 * pair + 1] = a * sin(angle) + b * cos(angle);
    }
}

/* The slots of one head as numbers. */
struct head {
    uint32_t slots;
    int64_t *positions; /* INT64_MAX: unused */
    double *keys;       /* [slots][d] */
    double *values;     /* [slots][d] */
    double *logits;     /* [slots] what is added to scores */
};

static void *memory(size_t count, size_t bytes) {
    void *result = calloc(count + 1, bytes);
    if (result == NULL)
        abort();
    return result;
}

/* A summary is one slot more, at a position that every row sees. */
static struct head head_read(const struct reference_pool *pool, const struct kv_head_view *view, const float *summary) {
    uint32_t dim = pool->layout.head_dim;
    enum kv_format format = pool->layout.format;
    size_t slots = (size_t)view->slots + 1;
    struct head head = {.slots = view->slots + (summary != NULL),
        .positions = memory(slots, sizeof(int64_t)),
        .keys = memory(slots * dim, sizeof(double)),
        .values = memory(slots * dim, sizeof(double)),
        .logits = memory(slots, sizeof(double))};
    for (uint32_t i = 0; summary != NULL && i < dim; i++) {
        head.keys[(size_t)view->slots * dim + i] = (double)summary[i];
        head.values[(size_t)view->slots * dim + i] = (double)summary[dim + i];
    }
    if (summary != NULL) {
        head.positions[view->slots] = -1;
        head.logits[view->slots] = (double)summary[2 * dim];
    }
    for (uint32_t slot = 0; slot < view->from_slot; slot++)
        head.positions[slot] = INT64_MAX;
    for (uint32_t slot = view->from_slot; slot < view->slots; slot++) {
        uint32_t page = view->pages[slot / KV_PAGE_SLOTS], place = slot % KV_PAGE_SLOTS;
        int32_t position = *reference_position(pool, page, place);
        head.positions[slot] = position == KV_NO_POSITION ? INT64_MAX : position;
        for (uint32_t channel = 0; channel < dim; channel++) {
            size_t index = (size_t)slot * dim + channel;
            head.keys[index] = reference_number(format, reference_key(pool, page, place, channel));
            head.values[index] = reference_number(format, reference_value(pool, page, place, channel));
        }
    }
    return head;
}

static void head_free(struct head *head) {
    free(head->positions);
    free(head->keys);
    free(head->values);
    free(head->logits);
}

/* A summary is seen by all. */
static bool sees(int64_t position, int64_t slot_position, uint32_t window) {
    return slot_position <= position && (window == 0 || slot_position == -1 || slot_position > position - window);
}

/* One query head of one token. */
static void attend_one(const struct head *head, struct reference_variant variant, uint32_t dim, int64_t position,
    const float *query, double *out) {
    double scale = variant.scale != 0 ? variant.scale : 1 / sqrt(dim);
    double *scores = memory(head->slots, sizeof *scores), most = -INFINITY, sum = 0;
    memset(out, 0, dim * sizeof *out);
    for (uint32_t slot = 0; slot < head->slots; slot++) {
        if (!sees(position, head->positions[slot], variant.window))
            continue;
        for (uint32_t channel = 0; channel < dim; channel++)
            scores[slot] += (double)query[channel] * head->keys[(size_t)slot * dim + channel];
        scores[slot] *= scale;
        if (variant.cap != 0)
            scores[slot] = variant.cap * tanh(scores[slot] / variant.cap);
        scores[slot] += head->logits[slot];
        most = fmax(most, scores[slot]);
    }
    for (uint32_t slot = 0; slot < head->slots; slot++)
        sum += sees(position, head->positions[slot], variant.window) ? exp(scores[slot] - most) : 0;
    for (uint32_t slot = 0; slot < head->slots; slot++) {
        if (!sees(position, head->positions[slot], variant.window))
            continue;
        double share = exp(scores[slot] - most) / sum;
        for (uint32_t channel = 0; channel < dim; channel++)
            out[channel] += share * head->values[(size_t)slot * dim + channel];
    }
    free(scores);
}

void reference_attend(const struct reference_pool *pool, const struct kv_item *items, uint32_t items_count,
    const struct kv_head_view *views, const float *const *summaries, struct reference_variant variant, uint32_t heads,
    const float *qkv, double *out) {
    uint32_t kv_heads = pool->layout.kv_heads, dim = pool->layout.head_dim, group = heads / kv_heads;
    size_t stride = (size_t)(heads + 2 * kv_heads) * dim;
    for (uint32_t view = 0; view < items_count * kv_heads; view++) {
        const struct kv_item *item = &items[view / kv_heads];
        struct head head = head_read(pool, &views[view], summaries[view]);
        for (uint32_t token = 0; token < item->rows; token++) {
            size_t row = item->first_row + token;
            for (uint32_t query = view % kv_heads * group; query < (view % kv_heads + 1) * group; query++) {
                attend_one(&head, variant, dim, (int64_t)item->position + token,
                    qkv + row * stride + (size_t)query * dim, out + (row * heads + query) * dim);
            }
        }
        head_free(&head);
    }
}

/* By sums, where the operation keeps means. */
void reference_summarise(const struct reference_pool *pool, const struct summary_update *update, const uint64_t *sum,
    const float *before, double *summary) {
    uint32_t dim = pool->layout.head_dim;
    struct head head = head_read(pool, &update->view, NULL);
    double total = (double)before[2 * dim + 1], weighted = (double)before[2 * dim + 2];
    for (uint32_t i = 0; i < 2 * dim; i++)
        summary[i] = (double)before[i] * total;
    for (uint32_t i = 0; i < update->count; i++) {
        uint32_t slot = update->slots[i];
        double weight = fmax((double)sum[slot] / 16777216 / (update->seen - update->positions[slot]), 1 / 16777216.0);
        for (uint32_t channel = 0; channel < dim; channel++) {
            summary[channel] += weight * head.keys[(size_t)slot * dim + channel];
            summary[dim + channel] += weight * head.values[(size_t)slot * dim + channel];
        }
        total += weight;
        weighted += weight * log(weight);
    }
    for (uint32_t i = 0; i < 2 * dim; i++)
        summary[i] /= total;
    summary[2 * dim] = log(total) - weighted / total + (double)update->offset;
    summary[2 * dim + 1] = total;
    summary[2 * dim + 2] = weighted;
    head_free(&head);
}
