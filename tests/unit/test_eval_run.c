/* SPDX-License-Identifier: Apache-2.0
 *
 * The evaluator on a tiny random model, against single sequences that are stepped one by one, with KL from whole rows
 * of logits in double; and against itself when the page pool or the batch is so small that variants run in many waves.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/eval/run.h"
#include "tests/unit/tiny_llama.h"

enum { PROMPT = 150, STEPS = 12, ASKED = 9, GOLD = 4, MOST = 10, VOCABULARY = 320, FIRST_LETTER = 3 + 'a' };

static const char *const policies[] = {"full", "h2o,minimum=8", "h2o,minimum=8", "streaming,minimum=8",
    "tova,minimum=8", "snapkv,window=8,minimum=16", "keydiff,interval=5,minimum=8", "random,minimum=8",
    "h2o,prefill_prune_every=48,minimum=8", "h2o,minimum=8"};
static const double ratios[] = {1, 0.5, 0.25, 0.3, 0.3, 0.4, 0.3, 0.3, 0.3, 1};
enum { VARIANTS = 10 };

struct bench {
    struct model *model;
    struct tokenizer *tokenizer;
    struct engine *engine;
    struct eval_variant variants[VARIANTS];
    struct eval_setup setup;
    uint32_t length;
    struct eval_question kl, asked;
    struct eval_item item;
    char *answers[1];
};

static void add_tokens(struct token_list *list, uint32_t count, uint32_t salt) {
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(token_list_append(list, FIRST_LETTER + (int32_t)((i * i * 31 + i * 7 + salt * 13) % 26)), 0);
}

static void make_variants(struct bench *bench) {
    struct error error = {0};
    for (int v = 0; v < VARIANTS; v++) {
        bench->variants[v].policy = (char *)policies[v];
        bench->variants[v].ratio = ratios[v];
        if (policy_settings_parse(policies[v], &bench->variants[v].settings, &error) != 0)
            fail_msg("%s", error.message);
        bench->variants[v].settings.ratio = ratios[v];
        bench->variants[v].settings.seed = 3;
    }
}

static struct engine *open_engine(const struct model *model, size_t bytes, uint32_t rows, bool sharing) {
    struct error error = {0};
    struct engine_options options = {.backend = {.threads = 1},
        .kv_bytes = bytes,
        .kv_format = KV_F32,
        .batch_rows = rows,
        .prefix_sharing = sharing,
        .poison_free = true};
    struct engine *engine = engine_open(model, &options, &error);
    if (engine == NULL)
        fail_msg("%s", error.message);
    return engine;
}

static void set_up_with(struct bench *bench, const struct tiny_llama *options) {
    struct error error = {0};
    char *path = tiny_llama_save(options);
    *bench = (struct bench){.model = model_open(path, &error), .length = PROMPT};
    assert_non_null(bench->model);
    unlink(path);
    free(path);
    bench->tokenizer = tokenizer_create(bench->model->file, &error);
    assert_non_null(bench->tokenizer);
    bench->engine = open_engine(bench->model, 64 << 20, 64, true);
    make_variants(bench);
    bench->setup = (struct eval_setup){.model = "tiny",
        .task = "kl",
        .layers = bench->model->shape.layers,
        .lengths = &bench->length,
        .lengths_count = 1,
        .variants = bench->variants,
        .variants_count = VARIANTS};
    add_tokens(&bench->kl.prompt, PROMPT, 1);
    add_tokens(&bench->kl.text, STEPS + 1, 2);
    add_tokens(&bench->asked.prompt, PROMPT, 3);
    add_tokens(&bench->asked.asked, ASKED, 4);
    add_tokens(&bench->asked.gold, GOLD, 5);
    bench->answers[0] = (char *)"zzz";
    bench->item = (struct eval_item){
        .answers = bench->answers, .answers_count = 1, .max_tokens = MOST, .metric = METRIC_CONTAINS};
}

static void set_up(struct bench *bench) {
    struct tiny_llama options = tiny_llama_default();
    set_up_with(bench, &options);
}

static void tear_down(struct bench *bench) {
    for (int v = 0; v < VARIANTS; v++)
        policy_settings_release(&bench->variants[v].settings);
    eval_question_free(&bench->kl);
    eval_question_free(&bench->asked);
    engine_close(bench->engine);
    tokenizer_free(bench->tokenizer);
    model_free(bench->model);
}

static int collect(void *context, struct eval_result *result, struct error *error) {
    (void)error;
    return eval_results_add(context, result);
}

/* The question under all variants, or under those in the mask; item number `index`. */
static int run(struct bench *bench, struct engine *engine, bool answers, uint32_t mask, struct eval_results *results,
    struct error *error) {
    bool wanted[VARIANTS];
    struct eval_run_options options = {
        .engine = engine, .tokenizer = bench->tokenizer, .setup = &bench->setup, .emit = collect, .context = results};
    struct eval_run *run = eval_run_create(&options, error);
    assert_non_null(run);
    for (int v = 0; v < VARIANTS; v++)
        wanted[v] = mask >> v & 1;
    struct eval_work work = {.question = answers ? &bench->asked : &bench->kl,
        .item = answers ? &bench->item : NULL,
        .index = 6,
        .wanted = wanted};
    int code = eval_run_question(run, &work, error);
    eval_run_free(run);
    return code;
}

static struct eval_results run_all(struct bench *bench, struct engine *engine, bool answers) {
    struct eval_results results = {0};
    struct error error = {0};
    uint32_t free_pages = kv_cache_pages_free(engine_kv_cache(engine));
    if (run(bench, engine, answers, UINT32_MAX, &results, &error) != 0)
        fail_msg("%s", error.message);
    assert_int_equal(kv_cache_pages_free(engine_kv_cache(engine)), free_pages);
    assert_int_equal(results.count, VARIANTS * (answers ? 1 : 2));
    return results;
}

/* ---- one sequence, step by step ---- */

static struct sequence *start(struct bench *bench, int variant, const struct token_list *prompt, float *logits) {
    struct error error = {0};
    struct sequence *sequence = sequence_create(bench->engine);
    struct policy_settings settings = bench->variants[variant].settings;
    settings.seed += 6;
    if (variant > 0 && sequence_set_policy(sequence, &settings, (uint32_t)prompt->count, &error) != 0)
        fail_msg("%s", error.message);
    for (uint32_t i = 0; i < prompt->count; i++) { /* one by one */
        struct batch_item item = {.sequence = sequence, .tokens = &prompt->ids[i], .count = 1, .want = WANT_LAST};
        assert_int_equal(engine_forward(bench->engine, &item, 1, &error), 0);
        assert_int_equal(engine_prune(bench->engine, &sequence, 1, &error), 0);
    }
    assert_int_equal(engine_logits(bench->engine, 0, logits, &error), 0);
    return sequence;
}

static void feed(struct bench *bench, struct sequence *sequence, int32_t token, float *logits) {
    struct error error = {0};
    struct batch_item item = {.sequence = sequence, .tokens = &token, .count = 1, .want = WANT_LAST};
    assert_int_equal(engine_forward(bench->engine, &item, 1, &error), 0);
    assert_int_equal(engine_logits(bench->engine, 0, logits, &error), 0);
    assert_int_equal(engine_prune(bench->engine, &sequence, 1, &error), 0);
}

static int32_t most_likely(struct bench *bench, const float *logits, bool without_ends) {
    int32_t best = -1;
    for (int32_t i = 0; i < VOCABULARY; i++)
        if (!(without_ends && tokenizer_is_end(bench->tokenizer, i)) && (best < 0 || logits[i] > logits[best]))
            best = i;
    return best;
}

static double logprob(const float *logits, int32_t token) {
    double most = -INFINITY, sum = 0;
    for (int i = 0; i < VOCABULARY; i++)
        most = fmax(most, (double)logits[i]);
    for (int i = 0; i < VOCABULARY; i++)
        sum += exp((double)logits[i] - most);
    return (double)logits[token] - most - log(sum);
}

static double divergence(const float *p, const float *q) {
    double sum = 0;
    for (int i = 0; i < VOCABULARY; i++)
        sum += exp(logprob(p, i)) * (logprob(p, i) - logprob(q, i));
    return sum;
}

static void kl_is_that_of_single_steps(void **state) {
    (void)state;
    struct bench bench;
    float full[VOCABULARY], pruned[VOCABULARY];
    set_up(&bench);
    struct eval_results results = run_all(&bench, bench.engine, false);
    double seen = 0;
    for (int v = 0; v < VARIANTS; v++) {
        for (int part = 0; part < 2; part++) {
            struct sequence *teacher = start(&bench, 0, &bench.kl.prompt, full);
            struct sequence *student = start(&bench, v, &bench.kl.prompt, pruned);
            int32_t token = part == 0 ? bench.kl.text.ids[0] : most_likely(&bench, full, true);
            double kl = 0, loss = 0, loss_full = 0, same = 0;
            for (int i = 0; i < STEPS; i++) {
                feed(&bench, student, token, pruned);
                feed(&bench, teacher, token, full);
                token = part == 0 ? bench.kl.text.ids[i + 1] : most_likely(&bench, full, true);
                kl += divergence(full, pruned) / STEPS;
                loss -= logprob(pruned, token) / STEPS;
                loss_full -= logprob(full, token) / STEPS;
                same += (most_likely(&bench, pruned, false) == most_likely(&bench, full, false)) / (double)STEPS;
            }
            const struct eval_result *result = eval_results_find(&results, 0, 6, (uint32_t)part, (uint32_t)v);
            assert_non_null(result);
            assert_int_equal(result->steps, STEPS);
            assert_float_equal(result->kl, kl, 1e-5 + 1e-4 * kl);
            assert_float_equal(result->loss, loss, 1e-4);
            assert_float_equal(result->loss_full, loss_full, 1e-4);
            assert_float_equal(result->top1, same, 1e-9);
            assert_int_equal(result->tokens_seen, PROMPT + STEPS);
            assert_string_equal(result->group, part == 0 ? "text" : "own");
            if (ratios[v] == 1)
                assert_true(result->kl == 0 && result->tokens_kept == PROMPT + STEPS);
            else
                seen = fmax(seen, kl);
            sequence_free(teacher);
            sequence_free(student);
        }
    }
    assert_true(seen > 1e-3); /* the policies do something, or the comparison says nothing */
    eval_results_free(&results);
    tear_down(&bench);
}

/* A line break after something that is not white space. */
static bool line_is_complete(const char *text) {
    text += strspn(text, " \t\r\n");
    return strchr(text, '\n') != NULL;
}

/* With bench->item and a model that likes line breaks or not. Returns how many answers ended at one. */
static int compare_answers(const struct tiny_llama *options, bool first_line) {
    struct bench bench;
    float logits[VOCABULARY];
    int lines = 0;
    set_up_with(&bench, options);
    bench.item.first_line = first_line;
    struct eval_results results = run_all(&bench, bench.engine, true);
    for (int v = 0; v < VARIANTS; v++) {
        char output[MOST * 8] = "";
        uint32_t generated = 0;
        struct sequence *sequence = start(&bench, v, &bench.asked.prompt, logits);
        for (int i = 0; i < ASKED; i++)
            feed(&bench, sequence, bench.asked.asked.ids[i], logits);
        struct sequence *gold = sequence_fork(sequence);
        double expected = logprob(logits, bench.asked.gold.ids[0]);
        float answer[VOCABULARY];
        memcpy(answer, logits, sizeof answer);
        for (int i = 0; i + 1 < GOLD; i++) {
            feed(&bench, gold, bench.asked.gold.ids[i], logits);
            expected += logprob(logits, bench.asked.gold.ids[i + 1]);
        }
        for (int32_t token; generated < MOST; feed(&bench, sequence, token, answer)) {
            token = most_likely(&bench, answer, false);
            if (tokenizer_is_end(bench.tokenizer, token))
                break;
            size_t bytes;
            const char *text = tokenizer_token_bytes(bench.tokenizer, token, &bytes);
            strncat(output, text, bytes);
            generated++;
            if (first_line && line_is_complete(output))
                break;
        }
        const struct eval_result *result = eval_results_find(&results, 0, 6, 0, (uint32_t)v);
        assert_non_null(result);
        assert_float_equal(result->gold_logprob, expected, 1e-3);
        assert_int_equal(result->output_tokens, generated);
        lines += generated < MOST && line_is_complete(output);
        if (strchr(output, '\x80') == NULL && strlen(result->output) == strlen(output)) /* whole characters */
            assert_string_equal(result->output, output);
        assert_int_equal(strlen(result->kept), bench.setup.layers * KEPT_BINS);
        sequence_free(gold);
        sequence_free(sequence);
    }
    eval_results_free(&results);
    tear_down(&bench);
    return lines;
}

static void answers_are_those_of_a_single_sequence(void **state) {
    (void)state;
    struct tiny_llama options = tiny_llama_default();
    compare_answers(&options, false);
}

static void answers_end_with_their_first_line(void **state) {
    (void)state;
    struct tiny_llama options = tiny_llama_default();
    options.newline_gain = 3;
    options.seed = 2; /* one answer goes from letters to line breaks */
    assert_int_equal(compare_answers(&options, false), 0);
    assert_true(compare_answers(&options, true) > 0);
    options.seed = 3; /* one is line breaks from the beginning: none ends a line */
    assert_int_equal(compare_answers(&options, true), 0);
}

static void compare_results(const struct eval_results *a, const struct eval_results *b) {
    for (size_t i = 0; i < a->count; i++) {
        const struct eval_result *x = &a->list[i];
        const struct eval_result *y = eval_results_find(b, 0, 6, x->part, x->variant);
        assert_non_null(y);
        assert_true(x->kl == y->kl && x->top1 == y->top1 && x->loss == y->loss && x->loss_full == y->loss_full);
        assert_true(x->score == y->score && x->gold_logprob == y->gold_logprob && x->kind == y->kind);
        assert_int_equal(x->output_tokens, y->output_tokens);
        assert_true(x->tokens_kept == y->tokens_kept && x->bytes_full == y->bytes_full);
        if (x->output != NULL)
            assert_string_equal(x->output, y->output);
        if (x->kept != NULL)
            assert_string_equal(x->kept, y->kept);
    }
}

/* A pool for little more than two sequences, batches of few rows, no shared prefixes: the same results, to the bit. */
static void waves_change_nothing(void **state) {
    (void)state;
    struct bench bench;
    set_up(&bench);
    const struct kv_pool *pool = kv_cache_pool(engine_kv_cache(bench.engine));
    size_t sequence_bytes = pool->page_bytes * 4 * ((PROMPT + STEPS + ASKED + MOST) / KV_PAGE_SLOTS + 2);
    for (int answers = 0; answers < 2; answers++) {
        struct eval_results plenty = run_all(&bench, bench.engine, answers == 1);
        for (int way = 0; way < 3; way++) {
            size_t bytes = way == 0 ? 64 << 20 : way == 1 ? 7 * sequence_bytes : 5 * sequence_bytes;
            struct engine *small = open_engine(bench.model, bytes, way == 0 ? 4 : 64, way == 2);
            struct eval_results few = run_all(&bench, small, answers == 1);
            compare_results(&plenty, &few);
            eval_results_free(&few);
            engine_close(small);
        }
        eval_results_free(&plenty);
    }
    tear_down(&bench);
}

static void what_is_not_wanted_is_not_emitted(void **state) {
    (void)state;
    struct bench bench;
    struct eval_results all, some = {0};
    struct error error = {0};
    set_up(&bench);
    all = run_all(&bench, bench.engine, true);
    assert_int_equal(run(&bench, bench.engine, true, 1 << 4 | 1 << 2, &some, &error), 0);
    assert_int_equal(some.count, 2);
    compare_results(&some, &all);
    eval_results_free(&all);
    eval_results_free(&some);
    tear_down(&bench);
}

static void a_pool_too_small_is_told(void **state) {
    (void)state;
    struct bench bench;
    struct eval_results results = {0};
    struct error error = {0};
    set_up(&bench);
    size_t page = kv_cache_pool(engine_kv_cache(bench.engine))->page_bytes;
    struct engine *small = open_engine(bench.model, page * 4 * (PROMPT / KV_PAGE_SLOTS + 1), 64, true);
    uint32_t pages = kv_cache_pages_free(engine_kv_cache(small));
    int code = run(&bench, small, false, UINT32_MAX, &results, &error);
    assert_true(code == ERROR_PAGES || code == ERROR_CONTEXT);
    assert_non_null(strstr(error.message, "--kv-memory"));
    assert_int_equal(kv_cache_pages_free(engine_kv_cache(small)), pages);
    engine_close(small);
    eval_results_free(&results);
    tear_down(&bench);
}

/* ---- what the evaluator asks of the engine ---- */

static void same_slots(struct bench *bench, struct sequence *a, struct sequence *b) {
    uint32_t x[PROMPT], y[PROMPT];
    const struct model_shape *shape = &bench->model->shape;
    for (uint32_t layer = 0; layer < shape->layers; layer++) {
        for (uint32_t head = 0; head < shape->kv_heads; head++) {
            uint32_t count = kv_sequence_slots(sequence_kv(a), layer, head);
            assert_int_equal(kv_sequence_slots(sequence_kv(b), layer, head), count);
            assert_true(count < PROMPT);
            kv_sequence_positions(sequence_kv(a), layer, head, x);
            kv_sequence_positions(sequence_kv(b), layer, head, y);
            assert_memory_equal(x, y, count * sizeof *x);
        }
    }
}

static void budget_may_change_before_the_first_prune(void **state) {
    (void)state;
    struct bench bench;
    struct error error = {0};
    float logits[VOCABULARY];
    set_up(&bench);
    struct sequence *expected = start(&bench, 2, &bench.kl.prompt, logits); /* ratio 0.25 from the beginning */
    struct sequence *sequence = sequence_create(bench.engine);
    struct policy_settings settings = bench.variants[1].settings;                    /* 0.5 */
    assert_int_equal(sequence_set_budget(sequence, 0.25, 0, &error), ERROR_INVALID); /* no policy */
    assert_int_equal(sequence_set_policy(sequence, &settings, PROMPT, &error), 0);
    for (uint32_t done = 0; done < PROMPT; done += 50) {
        struct batch_item item = {.sequence = sequence, .tokens = bench.kl.prompt.ids + done, .count = 50};
        assert_int_equal(engine_forward(bench.engine, &item, 1, &error), 0);
    }
    struct sequence *fork = sequence_fork(sequence);
    assert_int_equal(sequence_set_budget(fork, 1, 0, &error), ERROR_INVALID); /* everything is kept */
    assert_int_equal(sequence_set_budget(fork, 2, 0, &error), ERROR_INVALID);
    assert_int_equal(sequence_set_budget(fork, 0.25, 0, &error), 0);
    assert_int_equal(engine_prune(bench.engine, &fork, 1, &error), 0);
    same_slots(&bench, expected, fork);
    assert_int_equal(sequence_set_budget(fork, 0.5, 0, &error), ERROR_INVALID); /* a prune was done */
    sequence_free(fork);
    sequence_free(sequence);
    sequence_free(expected);
    tear_down(&bench);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kl_is_that_of_single_steps),
        cmocka_unit_test(answers_are_those_of_a_single_sequence),
        cmocka_unit_test(answers_end_with_their_first_line),
        cmocka_unit_test(waves_change_nothing),
        cmocka_unit_test(what_is_not_wanted_is_not_emitted),
        cmocka_unit_test(a_pool_too_small_is_told),
        cmocka_unit_test(budget_may_change_before_the_first_prune),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
