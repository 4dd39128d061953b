/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing tokens, log-probabilities, and the divergence of two distributions.
 *
 * The filters apply in this order: changes, bans and mask, temperature, top_k, top_p, min_p. Tokens are ranked by
 * logit, equal logits by lower id; the rank order does not depend on the temperature. Then every filter keeps a prefix
 * of the ranks: top_k   the first k top_p   the shortest prefix whose probability reaches top_p, where what top_k kept
 * sums to 1 min_p   the tokens whose probability is at least min_p times the first one's The choice is by the inverse
 * of the cumulative distribution of what is left, tokens in ascending order of id, at random_uniform(seed, stream,
 * step, 0) times their mass. So it is a function of the row and its parameters.
 *
 * Nothing is sorted and no memory is needed. A prefix is described by its last member (struct cut), which is found by
 * bisection on the logit: a pass over the row sums the weights above a limit, and is cheap where few are above.
 *
 * NaN counts as -infinity, +infinity as the largest finite number. When all logits are -infinity the lowest id that is
 * not banned is chosen (0 when all are banned).
 */
#include "engine/cpu/vector.h"
#include "engine/random.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    PIECE = 2048, /* logits whose weights are summed together; a multiple of 32 */
    BAND = 32,    /* logits that are ranked by sorting */
    VALUE_STEPS = 16,
};

/* One row and what its weights are relative to (vector.h). */
struct row {
    const struct vector_kernels *kernels;
    const float *logits;
    uint32_t vocabulary;
    const int32_t *banned;
    uint32_t banned_count;
    const struct logit_change *changes;
    uint32_t changes_count;
    const uint32_t *allowed;
    float maximum;
    float scale;
};

/* A prefix of the ranks: logits above value, and those equal to it with an id below tie_end. */
struct cut {
    float value;
    uint32_t tie_end;
};

enum measure { MEASURE_COUNT, MEASURE_MASS };

/* piece [count], which belongs to the tokens from first on, with mask and bans applied: itself when none concerns it,
 * else buffer [PIECE]. */
static const float *apply_bans(
    const struct row *row, const float *piece, uint32_t first, uint32_t count, float *buffer) {
    if (row->allowed != NULL) {
        row->kernels->allow(piece, row->allowed + first / 32, count, buffer); /* first: a multiple of PIECE */
        piece = buffer;
    }
    for (uint32_t i = 0; i < row->banned_count; i++) {
        int64_t place = (int64_t)row->banned[i] - first;
        if (place < 0 || place >= count)
            continue;
        if (piece != buffer)
            memcpy(buffer, piece, count * sizeof(float));
        piece = buffer;
        buffer[place] = -INFINITY;
    }
    return piece;
}

/* The first change of a token that is not below id. */
static uint32_t change_from(const struct row *row, uint32_t id) {
    uint32_t low = 0, high = row->changes_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if ((uint32_t)row->changes[middle].token < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The same for changes. */
static const float *apply_changes(
    const struct row *row, const float *piece, uint32_t first, uint32_t count, float *buffer) {
    uint32_t i = change_from(row, first);
    if (i == row->changes_count || (uint32_t)row->changes[i].token >= first + count)
        return piece;
    memcpy(buffer, piece, count * sizeof(float));
    for (; i < row->changes_count && (uint32_t)row->changes[i].token < first + count; i++) {
        const struct logit_change *change = &row->changes[i];
        float *logit = &buffer[(uint32_t)change->token - first];
        float scaled = *logit * (*logit > 0 ? change->positive : change->negative);
        *logit = scaled + change->add;
    }
    return buffer;
}

static const float *row_piece(const struct row *row, uint32_t first, uint32_t count, float *buffer) {
    const float *piece = apply_changes(row, row->logits + first, first, count, buffer);
    return apply_bans(row, piece, first, count, buffer);
}

static uint32_t piece_length(uint32_t first, uint32_t end) {
    return end - first < PIECE ? end - first : PIECE;
}

static float row_maximum(const struct row *row) {
    float buffer[PIECE], maximum = -INFINITY;
    for (uint32_t first = 0; first < row->vocabulary; first += PIECE) {
        uint32_t count = piece_length(first, row->vocabulary);
        float most = row->kernels->maximum(row_piece(row, first, count, buffer), count);
        maximum = most > maximum ? most : maximum;
    }
    return maximum;
}

/* Mass and number of the logits that are >= low and < high. */
static struct vector_tail row_tail(const struct row *row, float low, float high) {
    float buffer[PIECE];
    struct vector_tail sum = {0, 0};
    for (uint32_t first = 0; first < row->vocabulary; first += PIECE) {
        uint32_t count = piece_length(first, row->vocabulary);
        const float *piece = row_piece(row, first, count, buffer);
        struct vector_tail tail = row->kernels->tail(piece, count, row->maximum, row->scale, low, high);
        sum.mass += tail.mass;
        sum.count += tail.count;
    }
    return sum;
}

/* The first token in [from, vocabulary) with low <= logit < high, its logit in *value; vocabulary when none is left. */
static uint32_t row_find(const struct row *row, uint32_t from, float low, float high, float *value) {
    float buffer[PIECE];
    for (uint32_t first = from / PIECE * PIECE; first < row->vocabulary; first += PIECE) {
        uint32_t count = piece_length(first, row->vocabulary);
        const float *piece = row_piece(row, first, count, buffer);
        uint32_t place = row->kernels->find(piece, from > first ? from - first : 0, count, low, high);
        if (place < count) {
            *value = piece[place] > FLT_MAX ? FLT_MAX : piece[place];
            return first + place;
        }
    }
    return row->vocabulary;
}

static float next_above(float value) {
    return nextafterf(value, INFINITY);
}

static double measured(enum measure measure, struct vector_tail tail) {
    return measure == MEASURE_MASS ? tail.mass : tail.count;
}

/* Halfway between two finite numbers: by value first, which suits logits, then by pattern, which cannot take more than
 * 32 steps. */
static float middle(float low, float high, uint32_t step) {
    if (step < VALUE_STEPS)
        return low / 2 + high / 2;
    int32_t a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, &high, sizeof b);
    /* Patterns of negative numbers descend; this makes them ascend, and is its own inverse. */
    int64_t ordered_a = a < 0 ? INT32_MIN - (int64_t)a : a, ordered_b = b < 0 ? INT32_MIN - (int64_t)b : b;
    int64_t ordered = ordered_a + (ordered_b - ordered_a) / 2;
    int32_t bits = (int32_t)(ordered < 0 ? INT32_MIN - ordered : ordered);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A part of the ranks that holds the last member of a prefix: low <= logit < high. */
struct band {
    float low, high;
    struct vector_tail above; /* of the logits >= high */
    struct vector_tail all;   /* of the logits >= low */
};

static struct vector_tail tail_join(struct vector_tail a, struct vector_tail b) {
    return (struct vector_tail){a.mass + b.mass, a.count + b.count};
}

/* Finds limits around the member at which the measure of the ranks reaches goal. Returns false when it never does. */
static bool band_find(const struct row *row, enum measure measure, double goal, struct band *band) {
    float step = measure == MEASURE_MASS ? 1 / row->scale : 1;
    *band = (struct band){.low = row->maximum, .high = next_above(row->maximum)};
    for (;; step *= 2) {
        band->all = tail_join(band->above, row_tail(row, band->low, band->high));
        if (measured(measure, band->all) >= goal)
            break;
        if (band->low == -FLT_MAX)
            return false;
        band->high = band->low;
        band->above = band->all;
        band->low = row->maximum - step;
        if (!(band->low > -FLT_MAX))
            band->low = -FLT_MAX;
    }
    for (uint32_t i = 0; band->all.count - band->above.count > BAND; i++) {
        float limit = middle(band->low, band->high > FLT_MAX ? FLT_MAX : band->high, i);
        if (i < VALUE_STEPS && !(limit > band->low && limit < band->high))
            continue;
        if (!(limit > band->low && limit < band->high))
            break; /* neighbours: all logits of the band are equal */
        struct vector_tail tail = tail_join(band->above, row_tail(row, limit, band->high));
        if (measured(measure, tail) >= goal) {
            band->low = limit;
            band->all = tail;
        } else {
            band->high = limit;
            band->above = tail;
        }
    }
    return true;
}

/* The tokens of a band in order of rank, at most BAND. */
static uint32_t band_rank(const struct row *row, const struct band *band, uint32_t ids[BAND], float values[BAND]) {
    uint32_t count = 0;
    float value;
    for (uint32_t id = row_find(row, 0, band->low, band->high, &value); id < row->vocabulary && count < BAND;
         id = row_find(row, id + 1, band->low, band->high, &value)) {
        uint32_t place = count++;
        for (; place > 0 && values[place - 1] < value; place--) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = value;
        ids[place] = id;
    }
    return count;
}

/* The shortest prefix whose measure reaches goal; everything when none does. */
static struct cut cut_find(const struct row *row, enum measure measure, double goal) {
    struct band band;
    struct cut cut = {-FLT_MAX, row->vocabulary};
    if (!band_find(row, measure, goal, &band))
        return cut;
    double reached = measured(measure, band.above);
    if (band.all.count - band.above.count > BAND) { /* equal logits: ranked by id */
        float value = band.low;
        double each =
            measure == MEASURE_MASS ? row->kernels->tail(&value, 1, row->maximum, row->scale, value, INFINITY).mass : 1;
        for (uint32_t id = 0; reached < goal; reached += each) {
            id = row_find(row, id, band.low, band.high, &value);
            if (id == row->vocabulary)
                break;
            cut = (struct cut){value, ++id};
        }
        return cut;
    }
    uint32_t ids[BAND];
    float values[BAND], weights[BAND];
    uint32_t count = band_rank(row, &band, ids, values);
    row->kernels->weights(values, count, row->maximum, row->scale, -FLT_MAX, weights);
    for (uint32_t i = 0; i < count && (i == 0 || reached < goal); i++) {
        reached += measure == MEASURE_MASS ? (double)weights[i] : 1;
        cut = (struct cut){values[i], ids[i] + 1};
    }
    return cut;
}

static struct cut cut_shorter(struct cut a, struct cut b) {
    if (a.value != b.value)
        return a.value > b.value ? a : b;
    return a.tie_end < b.tie_end ? a : b;
}

/* Adds up the weights of a prefix in order of id until the sum exceeds goal. Returns the token at which it does, and
 * vocabulary when it does not; *sum is what was added up then. */
static uint32_t cut_walk(const struct row *row, struct cut cut, double goal, double *sum) {
    float buffer[PIECE], weights[PIECE];
    *sum = 0;
    uint32_t first = 0;
    while (first < row->vocabulary) {
        bool ties = first < cut.tie_end;
        uint32_t count = piece_length(first, ties ? cut.tie_end : row->vocabulary);
        float lowest = ties ? cut.value : next_above(cut.value);
        const float *piece = row_piece(row, first, count, buffer);
        double mass = row->kernels->tail(piece, count, row->maximum, row->scale, lowest, INFINITY).mass;
        if (*sum + mass > goal) {
            row->kernels->weights(piece, count, row->maximum, row->scale, lowest, weights);
            uint32_t chosen = 0;
            for (uint32_t i = 0; i < count && *sum <= goal; i++) {
                *sum += (double)weights[i];
                chosen = weights[i] > 0 ? i : chosen; /* also right when rounding keeps the sum at the goal */
            }
            return first + chosen;
        }
        *sum += mass;
        first += count;
    }
    return row->vocabulary;
}

static struct cut cut_min_p(const struct row *row, const struct sample_params *params) {
    double value = (double)row->maximum + log((double)params->min_p) / (double)row->scale;
    float limit = value < (double)-FLT_MAX ? -FLT_MAX : (float)value;
    return (struct cut){limit < row->maximum ? limit : row->maximum, row->vocabulary};
}

static int32_t choose_random(struct row *row, const struct sample_params *params) {
    float scale = 1 / params->temperature;
    row->scale = scale < FLT_MAX ? scale : FLT_MAX;
    struct cut cut = {-FLT_MAX, row->vocabulary};
    double mass;
    if (params->top_k > 0 && params->top_k < row->vocabulary)
        cut = cut_find(row, MEASURE_COUNT, params->top_k);
    if (params->top_p < 1) {
        cut_walk(row, cut, INFINITY, &mass);
        cut = cut_shorter(cut, cut_find(row, MEASURE_MASS, (double)params->top_p * mass));
    }
    if (params->min_p > 0)
        cut = cut_shorter(cut, cut_min_p(row, params));
    cut_walk(row, cut, INFINITY, &mass);
    double u = (double)random_uniform(params->seed, params->stream, params->step, 0);
    return (int32_t)cut_walk(row, cut, u * mass, &mass);
}

/* The lowest id that is not banned; 0 when all are. */
static int32_t choose_first(const struct row *row) {
    float zeros[PIECE] = {0}, buffer[PIECE];
    for (uint32_t first = 0; first < row->vocabulary; first += PIECE) {
        uint32_t count = piece_length(first, row->vocabulary);
        uint32_t place = row->kernels->find(apply_bans(row, zeros, first, count, buffer), 0, count, 0, INFINITY);
        if (place < count)
            return (int32_t)(first + place);
    }
    return 0;
}

static int32_t choose(const struct vector_kernels *kernels, const float *logits, uint32_t vocabulary,
    const struct sample_params *params, bool *undefined) {
    struct row row = {
        .kernels = kernels,
        .logits = logits,
        .vocabulary = vocabulary,
        .banned = params->banned,
        .banned_count = params->banned_count,
        .changes = params->changes,
        .changes_count = params->changes_count,
        .allowed = params->allowed,
        .scale = 1,
    };
    row.maximum = row_maximum(&row);
    *undefined = row.maximum == -INFINITY;
    if (*undefined)
        return choose_first(&row);
    float value;
    if (!(params->temperature > 0))
        return (int32_t)row_find(&row, 0, row.maximum, INFINITY, &value);
    return choose_random(&row, params);
}

static float log_probability(const struct row *row, double log_sum, uint32_t token) {
    float logit = row->logits[token] > FLT_MAX ? FLT_MAX : row->logits[token];
    return logit >= -FLT_MAX ? (float)((double)logit - log_sum) : -INFINITY;
}

/* The most likely tokens: a short list kept in order, into which every larger logit is inserted. */
static void report_top(const struct row *row, double log_sum, uint32_t wanted, struct sample_result *result) {
    float values[SAMPLE_TOP_MAX], limit = -INFINITY, value;
    uint32_t count = 0;
    wanted = wanted < SAMPLE_TOP_MAX ? wanted : SAMPLE_TOP_MAX;
    for (uint32_t id = row_find(row, 0, limit, INFINITY, &value); id < row->vocabulary && wanted > 0;
         id = row_find(row, id + 1, limit, INFINITY, &value)) {
        uint32_t place = count < wanted ? count++ : count - 1;
        for (; place > 0 && values[place - 1] < value; place--) {
            values[place] = values[place - 1];
            result->top[place].token = result->top[place - 1].token;
        }
        values[place] = value;
        result->top[place].token = (int32_t)id;
        if (count == wanted)
            limit = next_above(values[count - 1]);
    }
    for (uint32_t i = 0; i < count; i++)
        result->top[i].logprob = log_probability(row, log_sum, (uint32_t)result->top[i].token);
    result->top_count = count;
}

/* log(sum(e^logits)); sets the row's maximum. */
static double row_log_sum(struct row *row) {
    row->maximum = row_maximum(row);
    if (row->maximum == -INFINITY)
        return -INFINITY;
    return (double)row->maximum + log(row_tail(row, -FLT_MAX, INFINITY).mass);
}

struct sample_job {
    const struct vector_kernels *kernels;
    const float *logits;
    uint32_t vocabulary;
    const struct sample_params *params;
    struct sample_result *results;
};

static void sample_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct sample_job *job = context;
    const struct sample_params *params = &job->params[chunk];
    struct sample_result *result = &job->results[chunk];
    const float *logits = job->logits + (size_t)chunk * job->vocabulary;
    (void)thread;
    memset(result, 0, sizeof *result);
    bool forced = params->forced >= 0 && (uint32_t)params->forced < job->vocabulary;
    result->token = forced ? params->forced : choose(job->kernels, logits, job->vocabulary, params, &result->undefined);
    if (!params->want_logprob && params->top_count == 0)
        return;
    struct row row = {.kernels = job->kernels, .logits = logits, .vocabulary = job->vocabulary, .scale = 1};
    double log_sum = row_log_sum(&row);
    result->logprob = log_probability(&row, log_sum, (uint32_t)result->token);
    report_top(&row, log_sum, params->top_count, result);
}

void cpu_sample(struct backend *backend, const float *logits, uint32_t rows, uint32_t vocabulary,
    const struct sample_params *params, struct sample_result *results) {
    struct cpu_backend *cpu = cpu_backend(backend);
    struct sample_job job = {cpu->vector, logits, vocabulary, params, results};
    thread_pool_run(cpu->threads, rows, sample_work, &job);
}

struct kl_job {
    const struct vector_kernels *kernels;
    const float *p;
    const uint32_t *p_rows;
    const float *q;
    uint32_t vocabulary;
    float *out;
};

static void kl_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct kl_job *job = context;
    struct row p = {.kernels = job->kernels, .vocabulary = job->vocabulary, .scale = 1}, q = p;
    p.logits = job->p + (size_t)job->p_rows[chunk] * job->vocabulary;
    q.logits = job->q + (size_t)chunk * job->vocabulary;
    (void)thread;
    double p_log_sum = row_log_sum(&p), q_log_sum = row_log_sum(&q);
    double kl = job->kernels->divergence(p.logits, q.logits, job->vocabulary, p_log_sum, q_log_sum);
    job->out[chunk] = kl < 0 ? 0 : (float)kl;
}

void cpu_kl(struct backend *backend, const float *p, const uint32_t *p_rows, const float *q, uint32_t rows,
    uint32_t vocabulary, float *out) {
    struct cpu_backend *cpu = cpu_backend(backend);
    struct kl_job job = {cpu->vector, p, p_rows, q, vocabulary, out};
    thread_pool_run(cpu->threads, rows, kl_work, &job);
}
