/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing tokens: exact cases against sorting, random ones by a chi-square test of seeded draws (which therefore
 * cannot fail by chance), log-probabilities, limits of the filters, and logits that are not finite. And `kl`.
 */
#include "tests/parity/parity.h"
#include "tests/parity/parity_same.h"
#include "tests/parity/reference_sample.h"
#include "tests/sanitized.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct sample_params neutral = {.temperature = 1, .top_p = 1, .forced = -1};

static void sample_host(struct parity *parity, const float *logits, uint32_t rows, uint32_t vocabulary,
    const struct sample_params *params, struct sample_result *results) {
    float *device = parity_upload(parity, logits, (size_t)rows * vocabulary * sizeof *logits);
    memset(results, 0xa5, rows * sizeof *results);
    parity->operations->sample(parity->backend, device, rows, vocabulary, params, results);
    parity_release(parity, device);
}

static int32_t sample_one(
    struct parity *parity, const float *logits, uint32_t vocabulary, const struct sample_params *params) {
    struct sample_result result;
    sample_host(parity, logits, 1, vocabulary, params, &result);
    return result.token;
}

/* Logits with equal ones among them, sometimes some that are not finite. */
static void fill_logits(struct parity *parity, float *logits, size_t count) {
    uint32_t kind = parity_random(parity, 0, 3);
    for (size_t i = 0; i < count; i++) {
        logits[i] = 4 * parity_normal(parity);
        if (kind == 1)
            logits[i] = rintf(logits[i]);
        if (kind == 2 && parity_random(parity, 0, 9) == 0)
            logits[i] = parity_random(parity, 0, 1) == 0 ? NAN : -INFINITY;
    }
    if (kind == 2)
        logits[parity_random(parity, 0, (uint32_t)count - 1)] = 1;
}

static uint32_t draw_vocabulary(struct parity *parity) {
    static const uint32_t sizes[] = {1, 2, 15, 16, 17, 100, 2047, 2048, 2049, 5000};
    return sizes[parity_random(parity, 0, sizeof sizes / sizeof sizes[0] - 1)];
}

static void check_report(struct parity *parity, const float *logits, uint32_t vocabulary,
    const struct sample_params *params, const struct sample_result *result) {
    uint32_t *order = parity_host(vocabulary * sizeof *order), visible = 0;
    double *logprobs = parity_host(vocabulary * sizeof *logprobs), want[SAMPLE_TOP_MAX + 1];
    float got[SAMPLE_TOP_MAX + 1];
    reference_rank(logits, vocabulary, order);
    reference_log_softmax(logits, vocabulary, logprobs);
    for (uint32_t i = 0; i < vocabulary; i++) { /* what is no number is not reported */
        if (!isnan(logits[order[i]]))
            order[visible++] = order[i];
    }
    uint32_t count = params->top_count < visible ? params->top_count : visible;
    parity_check_true(parity, result->top_count == count, "%u most likely tokens, not %u", result->top_count, count);
    for (uint32_t i = 0; i < count && i < result->top_count; i++) {
        parity_check_true(parity, result->top[i].token == (int32_t)order[i], "top %u is %d, not %u (V=%u)", i,
            result->top[i].token, order[i], vocabulary);
        got[i] = result->top[i].logprob;
        want[i] = logprobs[order[i]];
    }
    got[count] = result->logprob;
    want[count] = logprobs[result->token];
    parity_check_close(parity, got, want, count + 1, 2e-6, 2e-7, "log-probabilities, V=%u", vocabulary);
    free(order);
    free(logprobs);
}

/* A mask that allows nothing, everything or some of 32 tokens at a time, and `sure` [4] at least (twice where there are
 * fewer). */
static uint32_t *draw_mask(struct parity *parity, uint32_t vocabulary, const uint32_t *sure) {
    uint32_t words = vocabulary / 32 + 1, *mask = parity_host(words * sizeof *mask);
    for (uint32_t i = 0; i < words; i++) {
        uint32_t kind = parity_random(parity, 0, 3);
        mask[i] = kind == 0 ? 0 : kind == 1 ? 0xffffffff : (uint32_t)parity_random_bits(parity);
    }
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t id = sure[i < vocabulary ? i : 0];
        mask[id / 32] |= 1u << id % 32;
    }
    return mask;
}

static bool is_allowed(const struct sample_params *params, uint32_t id) {
    for (uint32_t i = 0; i < params->banned_count; i++)
        if ((uint32_t)params->banned[i] == id)
            return false;
    return params->allowed == NULL || (params->allowed[id / 32] >> id % 32 & 1) != 0;
}

/* The most likely token, forced tokens, and the report on them. */
static void case_greedy(struct parity *parity) {
    uint32_t vocabulary = draw_vocabulary(parity), rows = parity_random(parity, 1, 6);
    float *logits = parity_host((size_t)rows * vocabulary * sizeof *logits);
    struct sample_params params[6];
    struct sample_result results[6], alone;
    int32_t banned[3];
    uint32_t *masks[6];
    for (uint32_t row = 0; row < rows; row++) {
        fill_logits(parity, logits + (size_t)row * vocabulary, vocabulary);
        params[row] = neutral;
        params[row].temperature = 0;
        params[row].want_logprob = true;
        params[row].top_count = parity_random(parity, 0, SAMPLE_TOP_MAX);
        if (parity_random(parity, 0, 3) == 0)
            params[row].forced = (int32_t)parity_random(parity, 0, vocabulary - 1);
        uint32_t *order = parity_host(vocabulary * sizeof *order);
        reference_rank(logits + (size_t)row * vocabulary, vocabulary, order);
        masks[row] = draw_mask(parity, vocabulary, order + (vocabulary > 40 ? parity_random(parity, 0, 30) : 0));
        params[row].allowed = parity_random(parity, 0, 1) == 0 ? masks[row] : NULL;
        free(order);
    }
    for (uint32_t i = 0; i < 3; i++)
        banned[i] = (int32_t)parity_random(parity, 0, vocabulary - 1);
    params[0].banned = banned;
    params[0].banned_count = vocabulary > 4 ? 3 : 0;
    sample_host(parity, logits, rows, vocabulary, params, results);
    for (uint32_t row = 0; row < rows; row++) {
        const float *own = logits + (size_t)row * vocabulary;
        uint32_t *order = parity_host(vocabulary * sizeof *order), best = 0;
        reference_rank(own, vocabulary, order);
        while (!is_allowed(&params[row], order[best]))
            best++;
        int32_t want = params[row].forced >= 0 ? params[row].forced : (int32_t)order[best];
        parity_check_true(parity, results[row].token == want, "row %u of %u is %d, not %d (V=%u)", row, rows,
            results[row].token, want, vocabulary);
        check_report(parity, own, vocabulary, &params[row], &results[row]);
        sample_host(parity, own, 1, vocabulary, &params[row], &alone);
        parity_check_bytes(parity, &alone, &results[row], sizeof alone, "row %u alone", row);
        free(order);
    }
    parity_check_same(parity, results, rows * sizeof *results);
    for (uint32_t row = 0; row < rows; row++)
        free(masks[row]);
    free(logits);
}

static struct sample_params draw_params(struct parity *parity) {
    static const float temperatures[] = {1, 1, 0.7f, 0.2f, 1.5f, 10};
    static const float top_ps[] = {1, 0.9f, 0.5f, 0.99f, 0.05f};
    static const float min_ps[] = {0, 0, 0.05f, 0.3f, 0.001f};
    static const uint32_t top_ks[] = {0, 0, 1, 5, 40, 200};
    struct sample_params params = neutral;
    params.temperature = temperatures[parity_random(parity, 0, 5)];
    params.top_p = top_ps[parity_random(parity, 0, 4)];
    params.min_p = min_ps[parity_random(parity, 0, 4)];
    params.top_k = top_ks[parity_random(parity, 0, 5)];
    params.seed = parity_random_bits(parity);
    params.stream = parity_random(parity, 0, 3);
    return params;
}

/* Chi-square of drawn counts; tokens that are expected fewer than 8 times share bins. The limit is six standard
 * deviations above the mean of the statistic. */
static void check_counts(struct parity *parity, const uint32_t *counts, const double *wanted, uint32_t vocabulary,
    uint32_t draws, const char *what) {
    double statistic = 0, expected = 0, seen = 0;
    uint32_t bins = 0;
    for (uint32_t id = 0; id < vocabulary; id++) {
        expected += wanted[id] * draws;
        seen += counts[id];
        if (expected >= 8) {
            statistic += (seen - expected) * (seen - expected) / expected;
            bins++;
            expected = seen = 0;
        }
    }
    if (expected > 0)
        statistic += (seen - expected) * (seen - expected) / fmax(expected, 1);
    double limit = bins + 6 * sqrt(2.0 * bins) + 10;
    parity_check_true(
        parity, statistic < limit, "%s, V=%u: chi-square %.1f in %u bins", what, vocabulary, statistic, bins);
}

/* The CPU backend, which the chi-square test holds for, chooses the same tokens of all rows. */
static void check_choices(struct parity *parity, const float *logits, uint32_t rows, uint32_t vocabulary,
    const struct sample_params *params, const struct sample_result *results, const char *what) {
    struct sample_result *wanted = parity_host(rows * sizeof *wanted);
    struct backend *cpu = backend_cpu_open(&(struct backend_options){.threads = 1}, NULL);
    if (!parity_check_true(parity, cpu != NULL, "the CPU backend does not open"))
        return;
    size_t bytes = (size_t)rows * vocabulary * sizeof *logits;
    float *device = cpu->operations->allocate(cpu, bytes);
    cpu->operations->upload(cpu, device, logits, bytes);
    cpu->operations->sample(cpu, device, rows, vocabulary, params, wanted);
    for (uint32_t row = 0; row < rows; row++)
        parity_check_true(parity, results[row].token == wanted[row].token, "%s, step %u: %d, the CPU's choice is %d",
            what, params[row].step, results[row].token, wanted[row].token);
    cpu->operations->release(cpu, device);
    cpu->operations->close(cpu);
    free(wanted);
}

/* Random changes of some of the tokens, and of those at the edges of what is looked at together. Their number. */
static uint32_t draw_changes(struct parity *parity, uint32_t vocabulary, struct logit_change *changes) {
    static const float repetitions[] = {1, 1.3f, 0.7f, 2};
    uint32_t count = 0, one_in = 1 + parity_random(parity, 0, 9);
    for (uint32_t id = 0; id < vocabulary; id++) {
        if (id != 0 && id != 2047 && id != 2048 && id + 1 != vocabulary && parity_random(parity, 1, one_in) > 1)
            continue;
        float repetition = repetitions[parity_random(parity, 0, 3)];
        changes[count++] = (struct logit_change){.token = (int32_t)id,
            .positive = 1 / repetition,
            .negative = repetition,
            .add = parity_random(parity, 0, 2) == 0 ? 0 : 6 * parity_normal(parity)};
    }
    return count;
}

/* With changes and bans the most likely token is that of the changed row, and the report is of the row as it was. */
static void case_changes(struct parity *parity) {
    uint32_t vocabulary = draw_vocabulary(parity);
    float *logits = parity_host(vocabulary * sizeof *logits), *changed = parity_host(vocabulary * sizeof *changed);
    struct logit_change *changes = parity_host(vocabulary * sizeof *changes);
    uint32_t *order = parity_host(vocabulary * sizeof *order);
    struct sample_params params = neutral;
    struct sample_result result;
    fill_logits(parity, logits, vocabulary);
    memcpy(changed, logits, vocabulary * sizeof *logits);
    params.temperature = 0;
    params.want_logprob = true;
    params.top_count = parity_random(parity, 0, SAMPLE_TOP_MAX);
    params.changes = changes;
    params.changes_count = draw_changes(parity, vocabulary, changes);
    for (uint32_t i = 0; i < params.changes_count; i++) {
        float *logit = &changed[changes[i].token],
              scaled = *logit * (*logit > 0 ? changes[i].positive : changes[i].negative);
        *logit = scaled + changes[i].add;
    }
    int32_t banned[2] = {changes[0].token, (int32_t)parity_random(parity, 0, vocabulary - 1)};
    params.banned = banned;
    params.banned_count = vocabulary > 4 ? parity->round % 3 : 0;
    for (uint32_t i = 0; i < params.banned_count; i++)
        changed[banned[i]] = -INFINITY;
    reference_rank(changed, vocabulary, order);
    sample_host(parity, logits, 1, vocabulary, &params, &result);
    if (!result.undefined)
        parity_check_true(parity, result.token == (int32_t)order[0], "%u changes, %u bans: %d, not %u (V=%u)",
            params.changes_count, params.banned_count, result.token, order[0], vocabulary);
    check_report(parity, logits, vocabulary, &params, &result);
    parity_check_same(parity, &result, sizeof result);
    free(logits);
    free(changed);
    free(changes);
    free(order);
}

/* Of other backends than the CPU fewer draws are looked at, but each is compared. With sanitizers there are fewer. */
static void case_distribution(struct parity *parity) {
    enum { BATCH = 50 };
    uint32_t vocabulary = parity->round % 4 == 3 ? 4500 : parity_random(parity, 2, 400);
    uint32_t batch = parity->cuda ? 12 : BATCH, draws = parity->round % 4 == 3 ? 3000 : 20000;
    draws = parity->cuda ? 2 * batch : sanitized() ? draws / 20 : draws;
    float *logits = parity_host((size_t)batch * vocabulary * sizeof *logits);
    fill_logits(parity, logits, vocabulary);
    for (uint32_t row = 1; row < batch; row++)
        memcpy(logits + (size_t)row * vocabulary, logits, vocabulary * sizeof *logits);
    struct sample_params params[BATCH], drawn = draw_params(parity);
    struct sample_result results[BATCH];
    int32_t banned[2] = {(int32_t)parity_random(parity, 0, vocabulary - 1), (int32_t)vocabulary - 1};
    uint32_t *order = parity_host(vocabulary * sizeof *order), *counts = parity_host(vocabulary * sizeof *counts);
    reference_rank(logits, vocabulary, order);
    if (parity->round % 3 == 0 && vocabulary > 10)
        banned[0] = (int32_t)order[1];
    drawn.banned = banned;
    drawn.banned_count = parity->round % 2 == 0 && vocabulary > 10 ? 2 : 0;
    uint32_t *mask = draw_mask(parity, vocabulary, order);
    drawn.allowed = parity->round % 3 == 1 ? mask : NULL;
    struct logit_change *changes = parity_host(vocabulary * sizeof *changes);
    drawn.changes = changes;
    drawn.changes_count = parity->round % 4 >= 2 ? draw_changes(parity, vocabulary, changes) : 0;
    char what[128];
    snprintf(what, sizeof what, "temperature %g, top_k %u, top_p %g, min_p %g, %u bans, %u changes%s",
        (double)drawn.temperature, drawn.top_k, (double)drawn.top_p, (double)drawn.min_p, drawn.banned_count,
        drawn.changes_count, drawn.allowed ? ", mask" : "");
    int32_t *tokens = parity_host(draws * sizeof *tokens);
    float *device = parity_upload(parity, logits, (size_t)batch * vocabulary * sizeof *logits);
    for (uint32_t draw = 0; draw < draws; draw += batch) {
        for (uint32_t row = 0; row < batch; row++) {
            params[row] = drawn;
            params[row].step = draw + row;
        }
        parity->operations->sample(parity->backend, device, batch, vocabulary, params, results);
        for (uint32_t row = 0; row < batch; row++)
            counts[tokens[draw + row] = results[row].token]++;
        if (parity->cuda)
            check_choices(parity, logits, batch, vocabulary, params, results, what);
    }
    double *narrow = parity_host(vocabulary * sizeof *narrow), *wide = parity_host(vocabulary * sizeof *wide);
    reference_distribution(logits, vocabulary, &drawn, -1e-6, narrow);
    reference_distribution(logits, vocabulary, &drawn, 1e-6, wide);
    for (uint32_t id = 0; id < vocabulary; id++)
        parity_check_true(parity, counts[id] == 0 || narrow[id] + wide[id] > 0, "%s: drew %u", what, id);
    check_counts(parity, counts, wide, vocabulary, draws, what);
    parity_check_same(parity, tokens, draws * sizeof *tokens);
    parity_release(parity, device);
    free(logits);
    free(order);
    free(counts);
    free(changes);
    free(tokens);
    free(narrow);
    free(wide);
    free(mask);
}

/* Thousands of logits close to each other, some of them equal: the end of a prefix is among many candidates. */
static void case_close_logits(struct parity *parity) {
    enum { V = 6000, ROWS = 16 };
    float *logits = parity_host((size_t)ROWS * V * sizeof *logits);
    float width = parity->round % 2 == 0 ? 1e-3f : 1e-6f; /* 1e-6: a dozen different numbers */
    for (uint32_t id = 0; id < V; id++)
        logits[id] = 1 + width * (float)parity_uniform(parity, 0, 1);
    for (uint32_t row = 1; row < ROWS; row++)
        memcpy(logits + (size_t)row * V, logits, V * sizeof *logits);
    uint32_t *order = parity_host(V * sizeof *order), *rank = parity_host(V * sizeof *rank);
    reference_rank(logits, V, order);
    for (uint32_t i = 0; i < V; i++)
        rank[order[i]] = i;
    struct sample_params params[ROWS];
    struct sample_result results[ROWS];
    for (uint32_t row = 0; row < ROWS; row++) {
        params[row] = neutral;
        params[row].seed = parity_random_bits(parity);
        params[row].step = row;
        params[row].top_k = row % 3 == 0 ? 0 : parity_random(parity, 1, V - 1);
        params[row].top_p = row % 3 == 1 ? 1 : (float)parity_uniform(parity, 0.01, 0.99);
    }
    sample_host(parity, logits, ROWS, V, params, results);
    for (uint32_t row = 0; row < ROWS; row++) {
        double kept = params[row].top_k > 0 ? params[row].top_k : V; /* all have nearly the same probability */
        kept = params[row].top_p < 1 ? (double)params[row].top_p * kept * 1.001 + 1 : kept;
        parity_check_true(parity, rank[results[row].token] <= kept, "top_k %u, top_p %g: drew rank %u",
            params[row].top_k, (double)params[row].top_p, rank[results[row].token]);
    }
    if (parity->cuda)
        check_choices(parity, logits, ROWS, V, params, results, "close logits");
    free(logits);
    free(order);
    free(rank);
}

/* Draws many times and reports which tokens came: bit id of the result for ids below 64. */
static uint64_t draw_support(
    struct parity *parity, const float *logits, uint32_t vocabulary, struct sample_params params, uint32_t *largest) {
    uint64_t seen = 0;
    *largest = 0;
    uint32_t draws = !parity->cuda && !sanitized() ? 300 : vocabulary <= 64 ? 16 : 40;
    for (params.step = 0; params.step < draws; params.step++) {
        uint32_t token = (uint32_t)sample_one(parity, logits, vocabulary, &params);
        seen |= token < 64 ? 1ull << token : 0;
        *largest = token > *largest ? token : *largest;
    }
    return seen;
}

static void case_filter_limits(struct parity *parity) {
    enum { MANY = 3000 };
    static float equal[MANY]; /* all zero */
    float logits[40];
    struct sample_params params = neutral;
    uint32_t largest;
    for (int i = 0; i < 40; i++)
        logits[i] = (float)(i * 7 % 40) / 4; /* the largest at 17 */
    params.top_k = 1;
    params.temperature = 100;
    parity_check_true(parity, draw_support(parity, logits, 40, params, &largest) == 1ull << 17, "top_k 1");
    params = neutral;
    params.top_p = 1e-6f;
    parity_check_true(parity, draw_support(parity, logits, 40, params, &largest) == 1ull << 17, "top_p 1e-6");
    params = neutral;
    params.min_p = 1;
    parity_check_true(parity, draw_support(parity, logits, 40, params, &largest) == 1ull << 17, "min_p 1");
    logits[3] = logits[17];
    parity_check_true(
        parity, draw_support(parity, logits, 40, params, &largest) == (1ull << 17 | 1ull << 3), "min_p 1, two largest");
    params.min_p = 0;
    params.top_k = 1;
    parity_check_true(parity, draw_support(parity, logits, 40, params, &largest) == 1ull << 3, "top_k 1, two largest");
    params = neutral;
    params.temperature = FLT_MIN / 4;
    parity_check_true(parity, draw_support(parity, logits, 40, params, &largest) == (1ull << 17 | 1ull << 3),
        "temperature near 0, two largest");
    params = neutral;
    params.top_k = 5;
    parity_check_true(parity, draw_support(parity, equal, MANY, params, &largest) == 31 && largest == 4, "5 of equals");
    params.top_k = 0;
    params.top_p = 0.01f;
    draw_support(parity, equal, MANY, params, &largest);
    parity_check_true(parity, largest < 30 && largest > 20, "top_p 0.01 of 3000 equals: largest %u", largest);
    params.top_p = 0.5f;
    draw_support(parity, equal, MANY, params, &largest);
    parity_check_true(parity, largest < 1500 && largest > 1400, "top_p 0.5 of 3000 equals: largest %u", largest);
    params.top_k = 100;
    draw_support(parity, equal, MANY, params, &largest);
    parity_check_true(parity, largest < 50 && largest > 40, "top_k 100, top_p 0.5 of equals: largest %u", largest);
}

static void case_not_finite(struct parity *parity) {
    enum { V = 2100 };
    static float logits[V];
    int32_t banned[V];
    for (int i = 0; i < V; i++)
        banned[i] = i;
    for (int kind = 0; kind < 4; kind++) { /* greedy, sampled, filtered, all reports */
        struct sample_params params = neutral;
        struct sample_result result;
        params.temperature = kind == 0 ? 0 : 1;
        params.top_p = kind >= 2 ? 0.9f : 1;
        params.top_k = kind >= 2 ? 50 : 0;
        params.top_count = kind == 3 ? SAMPLE_TOP_MAX : 0;
        params.want_logprob = kind == 3;
        for (int i = 0; i < V; i++)
            logits[i] = NAN;
        sample_host(parity, logits, 1, V, &params, &result);
        parity_check_true(parity, result.token == 0 && result.top_count == 0, "all NaN: token %d", result.token);
        parity_check_true(parity, result.undefined, "all NaN is undefined");
        logits[7] = -100;
        sample_host(parity, logits, 1, V, &params, &result);
        parity_check_true(parity, result.token == 7 && !result.undefined, "one number: token %d", result.token);
        logits[7] = NAN;
        params.banned = banned;
        params.banned_count = 2060;
        parity_check_true(parity, sample_one(parity, logits, V, &params) == 2060, "all NaN, 2060 banned");
        params.banned_count = V;
        parity_check_true(parity, sample_one(parity, logits, V, &params) == 0, "all NaN, all banned");
        params.banned_count = 0;
        logits[2099] = -1e30f;
        parity_check_true(parity, sample_one(parity, logits, V, &params) == 2099, "one number");
        for (int i = 0; i < V; i++)
            logits[i] = -INFINITY;
        parity_check_true(parity, sample_one(parity, logits, V, &params) == 0, "all -infinity");
        logits[70] = INFINITY;
        logits[80] = FLT_MAX / 2;
        parity_check_true(parity, sample_one(parity, logits, V, &params) == 70, "+infinity");
        for (int i = 0; i < V; i++)
            logits[i] = i % 2 == 0 ? INFINITY : -FLT_MAX;
        int32_t token = sample_one(parity, logits, V, &params);
        parity_check_true(parity, token % 2 == 0 && token >= 0 && token < V, "many +infinity: %d", token);
        params.forced = V; /* out of range: chooses */
        token = sample_one(parity, logits, V, &params);
        parity_check_true(parity, token >= 0 && token < V, "forced out of range: %d", token);
    }
}

static void case_kl(struct parity *parity) {
    uint32_t rows = parity_random(parity, 1, 4), vocabulary = draw_vocabulary(parity);
    static const float distances[] = {1, 1e-2f, 1e-3f, 3, 0};
    float distance = distances[parity->round % 5], shift = (float)parity_uniform(parity, -20, 20);
    size_t count = (size_t)rows * vocabulary;
    float *p = parity_host(count * sizeof *p), *q = parity_host(count * sizeof *q);
    double want[4];
    uint32_t p_rows[4];
    for (size_t i = 0; i < count; i++) {
        p[i] = 4 * parity_normal(parity);
        if (parity->round % 3 == 0 && parity_random(parity, 0, 9) == 0 && i % vocabulary > 0)
            p[i] = -INFINITY;
    }
    for (uint32_t row = 0; row < rows; row++) {
        p_rows[row] = parity->round % 2 == 0 ? row : parity_random(parity, 0, rows - 1);
        const float *of = p + (size_t)p_rows[row] * vocabulary;
        float *to = q + (size_t)row * vocabulary;
        for (uint32_t i = 0; i < vocabulary; i++) {
            float finite = of[i] == -INFINITY ? 4 * parity_normal(parity) : of[i];
            to[i] = finite + distance * parity_normal(parity) + (distance > 0 ? shift : 0);
            if (of[i] == -INFINITY && parity_random(parity, 0, 1) == 0)
                to[i] = -INFINITY;
        }
        want[row] = reference_kl(of, to, vocabulary);
    }
    float *device_p = parity_upload(parity, p, count * sizeof *p), got[4];
    float *device_q = parity_upload(parity, q, count * sizeof *q);
    parity->operations->kl(parity->backend, device_p, p_rows, device_q, rows, vocabulary, got);
    parity_check_close(parity, got, want, rows, 1e-13, 1e-5, "kl V=%u, distance %g", vocabulary, (double)distance);
    parity_check_same(parity, got, rows * sizeof *got);
    p[0] = -INFINITY; /* a token of q alone is finite, one of p alone is not */
    q[vocabulary - 1] = -INFINITY;
    parity_release(parity, device_p);
    parity_release(parity, device_q);
    if (vocabulary > 2) {
        device_p = parity_upload(parity, p, count * sizeof *p);
        device_q = parity_upload(parity, q, count * sizeof *q);
        want[0] = reference_kl(p, q, vocabulary);
        parity->operations->kl(parity->backend, device_p, (const uint32_t[]){0}, device_q, 1, vocabulary, got);
        parity_check_close(parity, got, want, 1, 1e-13, 1e-5, "kl with infinities V=%u", vocabulary);
        parity_release(parity, device_p);
        parity_release(parity, device_q);
    }
    free(p);
    free(q);
}

struct timed {
    struct parity *parity;
    const float *logits;
    uint32_t rows;
    struct sample_params params[8];
    struct sample_result results[8];
    float kl[8];
};

enum { TIMED_V = 49152 };

static void work_sample(void *context) {
    struct timed *timed = context;
    for (uint32_t row = 0; row < timed->rows; row++)
        timed->params[row].step++;
    timed->parity->operations->sample(
        timed->parity->backend, timed->logits, timed->rows, TIMED_V, timed->params, timed->results);
}

static void work_kl(void *context) {
    struct timed *timed = context;
    static const uint32_t p_rows[] = {0, 1, 2, 3};
    timed->parity->operations->kl(timed->parity->backend, timed->logits, p_rows, timed->logits + (size_t)4 * TIMED_V,
        timed->rows < 4 ? timed->rows : 4, TIMED_V, timed->kl);
}

static void time_params(struct timed *timed, struct sample_params params, const char *what) {
    for (uint32_t row = 0; row < 8; row++)
        timed->params[row] = params;
    for (timed->rows = 1; timed->rows <= 8; timed->rows += 7)
        parity_time(timed->parity, work_sample, timed, 0, 0, "sample %u rows, %s", timed->rows, what);
}

/* Masks of grammars: inside a string most tokens are allowed, between values a few. */
static void time_masks(struct timed *timed) {
    static uint32_t allowed[TIMED_V / 32];
    for (int few = 0; few <= 1; few++) {
        struct sample_params params = neutral;
        for (uint32_t i = 0; i < TIMED_V / 32; i++)
            allowed[i] = few ? (i % 100 == 0 ? 0x10u : 0) : ~(1u << i % 32) & ~(1u << i * 7 % 32);
        params.allowed = allowed;
        time_params(timed, params, few ? "temperature 1, few allowed" : "temperature 1, most allowed");
        params.temperature = 0;
        time_params(timed, params, few ? "greedy, few allowed" : "greedy, most allowed");
    }
}

static void time_sample(struct parity *parity) {
    struct timed timed = {.parity = parity};
    size_t count = (size_t)8 * TIMED_V;
    float *logits = parity_host(count * sizeof *logits);
    for (int flat = 0; flat <= 1; flat++) {
        parity_fill_normal(parity, logits, count, flat ? 1 : 3);
        for (uint32_t i = 0; i < 8 * 100 && !flat; i++) /* like a language model: a few stand out */
            logits[parity_random(parity, 0, (uint32_t)count - 1)] += 12;
        float *device = parity_upload(parity, logits, count * sizeof *logits);
        timed.logits = device;
        struct sample_params params = neutral;
        printf("%s distribution\n", flat ? "flat" : "peaked");
        params.temperature = 0;
        time_params(&timed, params, "greedy");
        params.want_logprob = true;
        params.top_count = 20;
        time_params(&timed, params, "greedy, 20 log-probabilities");
        params = neutral;
        time_params(&timed, params, "temperature 1");
        params.top_p = 0.9f;
        time_params(&timed, params, "temperature 1, top_p 0.9");
        params.top_k = 40;
        time_params(&timed, params, "temperature 1, top_k 40, top_p 0.9");
        params = neutral;
        params.min_p = 0.05f;
        time_params(&timed, params, "temperature 1, min_p 0.05");
        time_masks(&timed);
        timed.rows = 1;
        parity_time(parity, work_kl, &timed, 0, 0, "kl 1 row");
        parity_release(parity, device);
    }
    free(logits);
}

const struct parity_case parity_sample_cases[] = {
    {.name = "sample greedy", .run = case_greedy, .rounds = 60, .time = time_sample},
    {.name = "sample changes", .run = case_changes, .rounds = 60},
    {.name = "sample distribution", .run = case_distribution, .rounds = 12},
    {.name = "sample close logits", .run = case_close_logits, .rounds = 4},
    {.name = "sample filter limits", .run = case_filter_limits},
    {.name = "sample not finite", .run = case_not_finite},
    {.name = "kl", .run = case_kl, .rounds = 30},
    {.name = NULL},
};
