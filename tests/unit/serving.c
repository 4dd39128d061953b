/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/serving.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/random.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/tiny_llama.h"

struct serving {
    struct model *model;
    struct tokenizer *tokenizer;
    struct engine *engine;
    struct scheduler *scheduler;
    struct call *calls;
    uint32_t events;
    pthread_mutex_t mutex;
    pthread_cond_t woken;
    bool wake;
    bool lockstep;
    bool go_on; /* in lockstep: the client waits for the next step */
};

static void require(bool condition, const char *what) {
    if (!condition) {
        fprintf(stderr, "serving: %s failed\n", what);
        abort();
    }
}

static void on_wake(void *context) {
    struct serving *serving = context;
    pthread_mutex_lock(&serving->mutex);
    serving->wake = true;
    serving->go_on = false;
    pthread_cond_broadcast(&serving->woken);
    while (serving->lockstep && !serving->go_on)
        pthread_cond_wait(&serving->woken, &serving->mutex);
    pthread_mutex_unlock(&serving->mutex);
}

static uint32_t serving_window;

void serving_set_window(uint32_t window) {
    serving_window = window;
}

struct serving *serving_create(const struct serving_options *options) {
    struct error error = {0};
    struct serving *serving = calloc(1, sizeof *serving);
    require(serving != NULL, "calloc");
    struct tiny_llama tiny = tiny_llama_default();
    tiny.type = TENSOR_Q4_1;
    tiny.embedding_type = TENSOR_Q8_0;
    if (chosen_backend_ranks() > 1)
        tiny.ff_width = 128; /* whole blocks on each rank */
    tiny.broken = options->broken_model;
    tiny.window = serving_window;
    if (options->context > 0)
        tiny.context = options->context;
    if (options->head_dim > 0)
        tiny.head_dim = options->head_dim;
    char *path = tiny_llama_save(&tiny);
    serving->model = model_open(path, &error);
    require(serving->model != NULL, error.message);
    unlink(path);
    free(path);
    serving->tokenizer = tokenizer_create(serving->model->file, &error);
    require(serving->tokenizer != NULL, error.message);
    struct kv_layout layout = {
        .layers = tiny.layers, .kv_heads = tiny.kv_heads, .head_dim = tiny.head_dim, .format = KV_F16};
    struct engine_options engine = {
        .backend = {.cpu_features = "auto",
            .threads = options->threads == 0 ? 1 : options->threads,
            .name = chosen_backend(),
            .ranks = chosen_backend_ranks(),
            .all_reduce = chosen_backend_all_reduce()},
        .kv_bytes = (options->kv_pages == 0 ? 1 << 14 : options->kv_pages) * kv_page_bytes(&layout),
        .kv_format = KV_F16,
        .batch_rows = options->batch_rows,
        .prefix_sharing = !options->no_prefix_sharing,
        .poison_free = true,
    };
    serving->engine = engine_open(serving->model, &engine, &error);
    require(serving->engine != NULL, error.message);
    serving->lockstep = options->lockstep;
    pthread_mutex_init(&serving->mutex, NULL);
    pthread_cond_init(&serving->woken, NULL);
    struct scheduler_options scheduler = {
        .max_sequences = options->max_sequences,
        .max_waiting = options->max_waiting,
        .prefill_chunk = options->prefill_chunk,
        .swap_bytes = options->swap_bytes,
        .background = options->background,
        .wake = on_wake,
        .wake_context = serving,
    };
    if (options->kv_policy != NULL)
        require(policy_settings_parse(options->kv_policy, &scheduler.kv_policy, &error) == 0, error.message);
    serving->scheduler = scheduler_create(serving->engine, serving->tokenizer, &scheduler, &error);
    require(serving->scheduler != NULL, error.message);
    policy_settings_release(&scheduler.kv_policy);
    return serving;
}

static void free_calls(struct serving *serving) {
    for (struct call *call = serving->calls, *next; call != NULL; call = next) {
        next = call->next;
        for (uint32_t i = 0; i < call->answers_count; i++) {
            free(call->answers[i].tokens);
            free(call->answers[i].offsets);
            free(call->answers[i].logprobs);
            free(call->answers[i].vector);
            free(call->answers[i].text);
        }
        free(call->answers);
        free(call);
    }
}

void serving_run_free(struct serving *serving) {
    pthread_mutex_lock(&serving->mutex);
    serving->lockstep = false;
    pthread_cond_broadcast(&serving->woken);
    pthread_mutex_unlock(&serving->mutex);
}

void serving_free(struct serving *serving) {
    serving_run_free(serving);
    scheduler_free(serving->scheduler);
    require(
        kv_cache_pages_free(engine_kv_cache(serving->engine)) == kv_cache_pages_total(engine_kv_cache(serving->engine)),
        "every page free at the end");
    require(kv_cache_check(engine_kv_cache(serving->engine)), "kv_cache_check");
    engine_close(serving->engine);
    tokenizer_free(serving->tokenizer);
    model_free(serving->model);
    free_calls(serving);
    pthread_mutex_destroy(&serving->mutex);
    pthread_cond_destroy(&serving->woken);
    free(serving);
}

struct scheduler *serving_scheduler(struct serving *serving) {
    return serving->scheduler;
}

struct engine *serving_engine(struct serving *serving) {
    return serving->engine;
}

const struct tokenizer *serving_tokenizer(struct serving *serving) {
    return serving->tokenizer;
}

struct request *serving_request(uint32_t count, uint64_t seed, uint32_t max_tokens) {
    struct request *request = request_create();
    require(request != NULL, "request_create");
    request->prompts = calloc(1, sizeof *request->prompts);
    request->prompts_count = 1;
    request->prompts[0].tokens = malloc(count * sizeof(int32_t));
    request->prompts[0].count = count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t words[4];
        random_philox(seed, 0, 0, i, words);
        request->prompts[0].tokens[i] = (int32_t)(3 + words[0] % 300);
    }
    request->max_tokens = max_tokens;
    request->sampling.temperature = 5; /* the model is sure of itself, as random ones are */
    request->sampling.seed = seed;
    request->stream = true;
    request->logprobs = 2;
    return request;
}

void serving_set_policy(struct request *request, const char *policy) {
    struct error error = {0};
    policy_settings_release(&request->kv_policy);
    require(policy_settings_parse(policy, &request->kv_policy, &error) == 0, error.message);
}

struct call *serving_submit(struct serving *serving, struct request *request, struct error *error) {
    struct call *call = calloc(1, sizeof *call);
    call->request = request;
    call->answers_count = request->prompts_count * request->n;
    call->answers = calloc(call->answers_count, sizeof *call->answers);
    request->user = call;
    call->next = serving->calls;
    serving->calls = call;
    if (scheduler_submit(serving->scheduler, request, error) == 0)
        return call;
    request_free(request);
    call->request = NULL;
    call->ended = true;
    return NULL;
}

struct call *serving_must_submit(struct serving *serving, struct request *request) {
    struct error error = {0};
    struct call *call = serving_submit(serving, request, &error);
    if (call == NULL)
        fail_msg("refused: %s", error.message);
    return call;
}

static void add_text(struct answer *answer, const struct output *output) {
    answer->text = realloc(answer->text, answer->text_bytes + output->text_bytes + 1);
    if (output->text_bytes > 0)
        memcpy(answer->text + answer->text_bytes, output->text, output->text_bytes);
    answer->text_bytes += output->text_bytes;
    answer->text[answer->text_bytes] = '\0';
}

static void add_tokens(struct answer *answer, const struct output *output) {
    uint32_t count = answer->tokens_count + output->tokens_count;
    if (output->tokens_count == 0)
        return;
    answer->tokens = realloc(answer->tokens, count * sizeof *answer->tokens);
    answer->offsets = realloc(answer->offsets, count * sizeof *answer->offsets);
    answer->logprobs = realloc(answer->logprobs, count * sizeof *answer->logprobs);
    for (uint32_t i = 0; i < output->tokens_count; i++) {
        const struct output_token *token = &output->tokens[i];
        answer->prompt_entries += token->from_prompt;
        answer->tokens[answer->tokens_count + i] = token->token;
        answer->offsets[answer->tokens_count + i] = token->text_offset;
        answer->logprobs[answer->tokens_count + i] = token->has_logprob ? token->logprob : 1;
    }
    answer->tokens_count = count;
}

static void add_vector(struct answer *answer, const struct output *output) {
    if (output->vector == NULL)
        return;
    size_t bytes = output->vector_width * sizeof *output->vector;
    answer->vector = malloc(bytes);
    memcpy(answer->vector, output->vector, bytes);
    answer->vector_width = output->vector_width;
}

static void on_output(void *context, const struct output *output) {
    struct serving *serving = context;
    struct call *call = output->request->user;
    struct answer *answer = &call->answers[output->choice];
    require(!call->ended, "no output after the last one");
    require(answer->finish == FINISH_NONE, "no output of a choice after its end");
    serving->events++;
    if (call->first_event == 0)
        call->first_event = serving->events;
    if (answer->outputs == 0)
        answer->first_generated = output->generated;
    answer->outputs++;
    answer->generated += output->generated;
    add_text(answer, output);
    add_tokens(answer, output);
    answer->finish = output->finish;
    if (output->finish != FINISH_NONE) {
        answer->error = output->error;
        answer->prompt_tokens = output->prompt_tokens;
        answer->completion_tokens = output->completion_tokens;
        answer->cached_tokens = output->cached_tokens;
        answer->kv_tokens_seen = output->kv_tokens_seen;
        answer->kv_tokens_kept = output->kv_tokens_kept;
        answer->kv_bytes = output->kv_bytes;
        answer->kv_bytes_full = output->kv_bytes_full;
        add_vector(answer, output);
    }
    if (output->last) {
        call->last_event = serving->events;
        for (uint32_t i = 0; i < call->answers_count; i++)
            require(call->answers[i].finish != FINISH_NONE, "the last output comes after every choice's end");
        call->ended = true;
        request_free(call->request);
        call->request = NULL;
    }
}

static void wait_and_poll(struct serving *serving) {
    pthread_mutex_lock(&serving->mutex);
    if (!serving->wake) { /* else the engine thread stands still until what it said is polled */
        serving->go_on = true;
        pthread_cond_broadcast(&serving->woken);
    }
    while (!serving->wake)
        pthread_cond_wait(&serving->woken, &serving->mutex);
    serving->wake = false;
    pthread_mutex_unlock(&serving->mutex);
    scheduler_poll(serving->scheduler, on_output, serving);
}

void serving_wait_output(struct serving *serving, const struct call *call, uint32_t outputs) {
    while (!call->ended && call->answers[0].outputs < outputs)
        wait_and_poll(serving);
}

void serving_wait(struct serving *serving, const struct call *call) {
    while (!call->ended)
        wait_and_poll(serving);
}

void serving_wait_all(struct serving *serving) {
    for (const struct call *call = serving->calls; call != NULL; call = call->next)
        serving_wait(serving, call);
}

bool answers_equal(const struct answer *a, const struct answer *b) {
    return a->finish == b->finish && a->tokens_count == b->tokens_count && a->text_bytes == b->text_bytes &&
           a->completion_tokens == b->completion_tokens &&
           memcmp(a->tokens, b->tokens, a->tokens_count * sizeof *a->tokens) == 0 &&
           memcmp(a->logprobs, b->logprobs, a->tokens_count * sizeof *a->logprobs) == 0 &&
           memcmp(a->text, b->text, a->text_bytes) == 0;
}
