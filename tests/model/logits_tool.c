/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs the engine over given tokens and writes what it computes, for tests/model/test_logits.py.
 *
 *   logits_tool MODEL [--exact] [--kv f16|f32|bf16] [--chunk N] [--together] [--stride N]
 *               [--features TIER] [--threads N] [--top] [--quantize q8_0|q4_0]
 *               [--backend cpu|cuda] [--kv-memory MIB]
 *
 * Standard input: one sequence a line, token ids separated by blanks or commas (brackets are skipped, so that a JSON
 * list on a line is fine). Standard output: float32 logits [vocabulary] of every token of every sequence, in order; or
 * with --top one line a token: the log-probability of the next token ("-" at the end), then five times "id logprob".
 *   --chunk N    tokens of a sequence in one engine_forward (default 512)
 *   --stride N   only every Nth token's row, beginning with the first: all are computed, but logits cost most
 *   --together   all sequences advance in the same batches, `chunk` tokens each, not one after another
 */
#include "engine/engine.h"
#include "engine/quantise.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOP = 5, SEQUENCES_MAX = 64, TOKENS_MAX = 8192 };

struct options {
    const char *model;
    const char *kv;
    const char *features;
    const char *quantize;
    const char *backend;
    uint32_t kv_memory; /* MiB */
    uint32_t chunk;
    uint32_t stride;
    uint32_t threads;
    bool exact;
    bool together;
    bool top;
};

struct text { /* one sequence of the input */
    int32_t *tokens;
    uint32_t count;
    uint32_t done;
    struct sequence *sequence;
    char *output; /* [rows_wanted] records of record_bytes, until all are computed */
};

static int parse_arguments(int count, char **arguments, struct options *options) {
    *options = (struct options){.kv = "f16", .features = "auto", .chunk = 512, .stride = 1, .kv_memory = 256};
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i], *value = i + 1 < count ? arguments[i + 1] : NULL;
        if (strcmp(name, "--exact") == 0)
            options->exact = true;
        else if (strcmp(name, "--together") == 0)
            options->together = true;
        else if (strcmp(name, "--top") == 0)
            options->top = true;
        else if (name[0] != '-' && options->model == NULL)
            options->model = name;
        else if (value == NULL)
            return -1;
        else if (strcmp(name, "--backend") == 0)
            options->backend = arguments[++i];
        else if (strcmp(name, "--kv-memory") == 0)
            options->kv_memory = (uint32_t)strtoul(arguments[++i], NULL, 10);
        else if (strcmp(name, "--kv") == 0)
            options->kv = arguments[++i];
        else if (strcmp(name, "--features") == 0)
            options->features = arguments[++i];
        else if (strcmp(name, "--quantize") == 0)
            options->quantize = arguments[++i];
        else if (strcmp(name, "--chunk") == 0)
            options->chunk = (uint32_t)strtoul(arguments[++i], NULL, 10);
        else if (strcmp(name, "--stride") == 0)
            options->stride = (uint32_t)strtoul(arguments[++i], NULL, 10);
        else if (strcmp(name, "--threads") == 0)
            options->threads = (uint32_t)strtoul(arguments[++i], NULL, 10);
        else
            return -1;
    }
    return options->model != NULL && options->chunk > 0 && options->stride > 0 ? 0 : -1;
}

static int parse_line(char *line, struct text *text, struct error *error) {
    text->tokens = malloc(TOKENS_MAX * sizeof *text->tokens);
    if (text->tokens == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for tokens");
    for (char *word = strtok(line, " ,[]\n"); word != NULL; word = strtok(NULL, " ,[]\n")) {
        char *end;
        long id = strtol(word, &end, 10);
        if (*end != '\0' || text->count == TOKENS_MAX)
            return error_set(error, ERROR_INVALID, "'%s' is no token id, or there are more than %d", word, TOKENS_MAX);
        text->tokens[text->count++] = (int32_t)id;
    }
    return 0;
}

static int read_texts(struct text *texts, uint32_t *count, struct error *error) {
    char *line = NULL;
    size_t capacity = 0;
    int code = 0;
    while (code == 0 && getline(&line, &capacity, stdin) > 0) {
        if (*count == SEQUENCES_MAX)
            code = error_set(error, ERROR_INVALID, "more than %d sequences", SEQUENCES_MAX);
        else
            code = parse_line(line, &texts[*count], error);
        if (code == 0 && texts[*count].count > 0)
            ++*count;
    }
    free(line);
    return code;
}

static size_t record_bytes(const struct engine *engine, const struct options *options) {
    return options->top ? sizeof(struct sample_result) : engine_model(engine)->shape.vocabulary * sizeof(float);
}

/* Rows that are written of the first `tokens` tokens of a sequence. */
static uint32_t rows_wanted(const struct options *options, uint32_t tokens) {
    return (tokens + options->stride - 1) / options->stride;
}

/* The most likely tokens of rows [count], and as `logprob` that of the token that follows in the text, if any. */
static int read_top(struct engine *engine, const int32_t *following, const uint32_t *rows, uint32_t count,
    struct sample_result *out, struct error *error) {
    struct sample_params *params = calloc(count, sizeof *params);
    if (params == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u rows", count);
    for (uint32_t i = 0; i < count; i++)
        params[i] = (struct sample_params){
            .temperature = 0, .top_p = 1, .top_count = TOP, .want_logprob = true, .forced = following[i]};
    int code = engine_sample(engine, rows, params, count, out, error);
    free(params);
    return code;
}

/* Fetches the wanted rows of the item's `count` tokens, which begin at text->done. */
static int fetch(struct engine *engine, const struct options *options, struct text *text, const struct batch_item *item,
    struct error *error) {
    uint32_t first = rows_wanted(options, text->done), count = 0, *rows = calloc(item->count, sizeof *rows);
    int32_t *following = calloc(item->count, sizeof *following);
    size_t bytes = record_bytes(engine, options);
    int code = rows == NULL || following == NULL ? error_set(error, ERROR_MEMORY, "no memory for rows") : 0;
    for (uint32_t i = 0; i < item->count && code == 0; i++) {
        uint32_t token = text->done + i;
        if (token % options->stride != 0)
            continue;
        rows[count] = item->first_row + i;
        following[count++] = token + 1 < text->count ? text->tokens[token + 1] : -1;
    }
    char *out = text->output + first * bytes;
    if (code == 0 && options->top && count > 0)
        code = read_top(engine, following, rows, count, (struct sample_result *)out, error);
    for (uint32_t i = 0; i < count && code == 0 && !options->top; i++)
        code = engine_logits(engine, rows[i], (float *)(out + i * bytes), error);
    text->done += item->count;
    free(rows);
    free(following);
    return code;
}

/* One batch: the next chunk of each of texts [count] that is not done. 1: there was nothing left to do. */
static int advance(
    struct engine *engine, const struct options *options, struct text *texts, uint32_t count, struct error *error) {
    struct batch_item items[SEQUENCES_MAX];
    struct text *owners[SEQUENCES_MAX];
    uint32_t items_count = 0, rows = engine_batch_rows(engine);
    for (uint32_t i = 0; i < count && rows > 0; i++) {
        struct text *text = &texts[i];
        uint32_t added = text->count - text->done;
        added = added < options->chunk ? added : options->chunk;
        added = added < rows ? added : rows;
        if (added == 0)
            continue;
        rows -= added;
        owners[items_count] = text;
        items[items_count++] = (struct batch_item){
            .sequence = text->sequence, .tokens = text->tokens + text->done, .count = added, .want = WANT_ALL};
    }
    if (items_count == 0)
        return 1;
    int code = engine_forward(engine, items, items_count, error);
    for (uint32_t i = 0; i < items_count && code == 0; i++)
        code = fetch(engine, options, owners[i], &items[i], error);
    return code;
}

static int run(
    struct engine *engine, const struct options *options, struct text *texts, uint32_t count, struct error *error) {
    int code = 0;
    for (uint32_t i = 0; i < count; i++) {
        texts[i].sequence = sequence_create(engine);
        texts[i].output = calloc(rows_wanted(options, texts[i].count), record_bytes(engine, options));
        if (texts[i].sequence == NULL || texts[i].output == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for sequence %u", i);
    }
    uint32_t at_once = options->together ? count : 1;
    for (uint32_t i = 0; i < count && code >= 0; i += at_once)
        while ((code = advance(engine, options, texts + i, at_once, error)) == 0)
            ;
    return code < 0 ? code : 0;
}

static void write_result(const struct sample_result *result, bool last) {
    if (last)
        fputs("-", stdout);
    else
        printf("%.9g", result->logprob);
    for (uint32_t i = 0; i < result->top_count; i++)
        printf(" %d %.9g", result->top[i].token, result->top[i].logprob);
    fputc('\n', stdout);
}

static int write_texts(const struct engine *engine, const struct options *options, const struct text *texts,
    uint32_t count, struct error *error) {
    size_t bytes = record_bytes(engine, options);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t rows = rows_wanted(options, texts[i].count);
        if (!options->top)
            fwrite(texts[i].output, bytes, rows, stdout);
        for (uint32_t row = 0; options->top && row < rows; row++)
            write_result((const struct sample_result *)(texts[i].output + row * bytes),
                row * options->stride + 1 == texts[i].count);
    }
    return fflush(stdout) == 0 ? 0 : error_set(error, ERROR_IO, "cannot write: %s", strerror(errno));
}

static int run_model(const struct options *options, struct text *texts, uint32_t count, struct error *error) {
    struct engine_options engine_options = {
        .backend = {.cpu_features = options->features, .threads = options->threads, .name = options->backend},
        .kv_bytes = (size_t)options->kv_memory << 20,
        .kv_format = strcmp(options->kv, "f32") == 0    ? KV_F32
                     : strcmp(options->kv, "bf16") == 0 ? KV_BF16
                                                        : KV_F16,
        .exact = options->exact,
        .poison_free = true,
    };
    struct model *model = model_open(options->model, error);
    if (model == NULL)
        return error->code;
    if (options->quantize != NULL && quantise_find_format(options->quantize, &model->quantise) != 0) {
        model_free(model);
        return error_set(error, ERROR_INVALID, "no format %s", options->quantize);
    }
    struct engine *engine = engine_open(model, &engine_options, error);
    int code = engine == NULL ? error->code : run(engine, options, texts, count, error);
    if (code == 0)
        code = write_texts(engine, options, texts, count, error);
    for (uint32_t i = 0; i < count; i++)
        sequence_free(texts[i].sequence);
    engine_close(engine);
    model_free(model);
    return code;
}

int main(int arguments_count, char **arguments) {
    struct options options;
    struct error error = {0};
    struct text texts[SEQUENCES_MAX] = {0};
    uint32_t count = 0;
    if (parse_arguments(arguments_count, arguments, &options) != 0) {
        fprintf(stderr, "usage: logits_tool MODEL [--exact] [--kv f16|f32|bf16] [--chunk N] [--together]\n"
                        "           [--stride N] [--features TIER] [--threads N] [--top]\n");
        return 2;
    }
    int code = read_texts(texts, &count, &error);
    if (code == 0)
        code = run_model(&options, texts, count, &error);
    for (uint32_t i = 0; i < SEQUENCES_MAX; i++) {
        free(texts[i].tokens);
        free(texts[i].output);
    }
    if (code != 0)
        fprintf(stderr, "logits_tool: %s\n", error.message);
    return code == 0 ? 0 : 1;
}
