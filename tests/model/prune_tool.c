/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs policies on the real model and writes what they do, for tests/model/test_prunes.py.
 *
 *   prune_tool MODEL [--exact] [--kv f16|f32|bf16] [--chunk N] [--threads N] [--swap]
 *
 * Standard input, one task a line, its fields separated by semicolons:
 *   scores;POLICY;PROMPT         scores after the prompt, before any prune
 *   run;POLICY;PROMPT;FED        a prune after the prompt, then a decode step with a prune for each token of FED
 * POLICY is as on the command line (policy_settings_parse), PROMPT and FED are token ids separated by blanks.
 * Standard output, one JSON document a line:
 *   {"positions": [layer][head][slot], "scores": [layer][head][slot]}    (null: NaN, "protected": +infinity)
 *   {"prompt": [layer][head] positions kept, "top": [step][5] of [id, logprob], "decode": [layer][head] positions kept}
 * --swap: the sequence is swapped out and in between all steps.
 */
#include "engine/engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOP = 5, TOKENS_MAX = 16384 };

struct options {
    const char *model;
    const char *kv;
    uint32_t chunk;
    uint32_t threads;
    bool exact;
    bool swap;
};

struct ids {
    int32_t tokens[TOKENS_MAX];
    uint32_t count;
};

static int parse_arguments(int count, char **arguments, struct options *options) {
    *options = (struct options){.kv = "f16", .chunk = 512};
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i], *value = i + 1 < count ? arguments[i + 1] : NULL;
        if (strcmp(name, "--exact") == 0)
            options->exact = true;
        else if (strcmp(name, "--swap") == 0)
            options->swap = true;
        else if (name[0] != '-' && options->model == NULL)
            options->model = name;
        else if (value == NULL)
            return -1;
        else if (strcmp(name, "--kv") == 0)
            options->kv = arguments[++i];
        else if (strcmp(name, "--chunk") == 0)
            options->chunk = (uint32_t)strtoul(arguments[++i], NULL, 10);
        else if (strcmp(name, "--threads") == 0)
            options->threads = (uint32_t)strtoul(arguments[++i], NULL, 10);
        else
            return -1;
    }
    return options->model != NULL && options->chunk > 0 ? 0 : -1;
}

static int parse_ids(char *text, struct ids *ids, struct error *error) {
    ids->count = 0;
    char *rest = NULL;
    for (char *word = strtok_r(text, " \n", &rest); word != NULL; word = strtok_r(NULL, " \n", &rest)) {
        if (ids->count == TOKENS_MAX)
            return error_set(error, ERROR_INVALID, "more than %d tokens", TOKENS_MAX);
        ids->tokens[ids->count++] = (int32_t)strtol(word, NULL, 10);
    }
    return 0;
}

/* By layer, head and slot; what is written of a slot is up to write. */
typedef void (*write_slot)(const float *scores, const uint32_t *positions, uint32_t slot);

static void write_position(const float *scores, const uint32_t *positions, uint32_t slot) {
    (void)scores;
    printf("%u", positions[slot]);
}

static void write_score(const float *scores, const uint32_t *positions, uint32_t slot) {
    (void)positions;
    if (isnan(scores[slot]))
        fputs("null", stdout);
    else if (isinf(scores[slot]) && scores[slot] > 0)
        fputs("\"protected\"", stdout);
    else
        printf("%.9g", scores[slot]);
}

/* In order of positions; empty slots are left out. */
static void write_head(struct kv_sequence *kv, uint32_t layer, uint32_t head, const float *scores, write_slot write) {
    uint32_t slots = kv_sequence_slots(kv, layer, head), tokens = kv_sequence_tokens(kv, layer, head);
    uint32_t *positions = calloc(2 * (size_t)slots + 1, sizeof *positions), *order = positions + slots;
    if (positions == NULL)
        abort();
    kv_sequence_positions(kv, layer, head, positions);
    kv_sequence_order(kv, layer, head, order);
    putchar('[');
    for (uint32_t i = 0; i < tokens; i++) {
        if (i > 0)
            putchar(',');
        write(scores, positions, order[i]);
    }
    putchar(']');
    free(positions);
}

static void write_all(
    struct sequence *sequence, const struct model_shape *shape, const float *scores, write_slot write) {
    struct kv_sequence *kv = sequence_kv(sequence);
    for (uint32_t layer = 0; layer < shape->layers; layer++) {
        fputs(layer == 0 ? "[" : ",", stdout);
        for (uint32_t head = 0; head < shape->kv_heads; head++) {
            fputs(head == 0 ? "[" : ",", stdout);
            write_head(kv, layer, head, scores, write);
            if (scores != NULL)
                scores += kv_sequence_slots(kv, layer, head);
        }
        putchar(']');
    }
    putchar(']');
}

static int prune(struct engine *engine, const struct options *options, struct sequence *sequence, struct error *error) {
    int code = engine_prune(engine, &sequence, 1, error);
    if (code == 0 && options->swap)
        code = sequence_swap_out(sequence, error);
    if (code == 0 && options->swap)
        code = sequence_swap_in(sequence, error);
    return code;
}

static int prefill(struct engine *engine, const struct options *options, struct sequence *sequence,
    const struct ids *prompt, bool prunes, struct error *error) {
    for (uint32_t done = 0, count; done < prompt->count; done += count) {
        count = prompt->count - done < options->chunk ? prompt->count - done : options->chunk;
        count = count < sequence_room(sequence) ? count : sequence_room(sequence);
        struct batch_item item = {.sequence = sequence, .tokens = prompt->tokens + done, .count = count};
        int code = engine_forward(engine, &item, 1, error);
        if (code == 0 && prunes)
            code = prune(engine, options, sequence, error);
        if (code != 0)
            return code;
    }
    return 0;
}

static int write_step(struct engine *engine, uint32_t row, struct error *error) {
    struct sample_params params = {.top_p = 1, .top_count = TOP, .want_logprob = true, .forced = -1};
    struct sample_result result;
    int code = engine_sample(engine, &row, &params, 1, &result, error);
    for (uint32_t i = 0; i < result.top_count && code == 0; i++)
        printf("%s[%d,%.9g]", i == 0 ? "[" : ",", result.top[i].token, result.top[i].logprob);
    putchar(']');
    return code;
}

static int decode(struct engine *engine, const struct options *options, struct sequence *sequence,
    const struct ids *fed, struct error *error) {
    fputs(",\"top\":[", stdout);
    for (uint32_t i = 0; i < fed->count; i++) {
        if (i > 0)
            putchar(',');
        struct batch_item item = {.sequence = sequence, .tokens = &fed->tokens[i], .count = 1, .want = WANT_LAST};
        int code = engine_forward(engine, &item, 1, error);
        if (code == 0)
            code = write_step(engine, item.first_row, error);
        if (code == 0)
            code = prune(engine, options, sequence, error);
        if (code != 0)
            return code;
    }
    putchar(']');
    return 0;
}

static int write_scores(struct engine *engine, struct sequence *sequence, struct error *error) {
    const struct model_shape *shape = &engine_model(engine)->shape;
    uint64_t slots = kv_sequence_slots_held(sequence_kv(sequence));
    float *scores = malloc(slots * sizeof *scores + 1);
    if (scores == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for scores");
    int code = sequence_scores(sequence, scores, error);
    if (code == 0) {
        fputs("{\"positions\":", stdout);
        write_all(sequence, shape, NULL, write_position);
        fputs(",\"scores\":", stdout);
        write_all(sequence, shape, scores, write_score);
        puts("}");
    }
    free(scores);
    return code;
}

static int run_case(struct engine *engine, const struct options *options, struct sequence *sequence,
    const struct ids *prompt, const struct ids *fed, struct error *error) {
    const struct model_shape *shape = &engine_model(engine)->shape;
    int code = prefill(engine, options, sequence, prompt, true, error);
    if (code != 0)
        return code;
    fputs("{\"prompt\":", stdout);
    write_all(sequence, shape, NULL, write_position);
    code = decode(engine, options, sequence, fed, error);
    fputs(",\"decode\":", stdout);
    write_all(sequence, shape, NULL, write_position);
    puts("}");
    return code;
}

static int run_line(struct engine *engine, const struct options *options, char *line, struct error *error) {
    static struct ids prompt, fed;
    char *fields[4] = {0}, *rest = NULL;
    uint32_t count = 0;
    for (char *field = strtok_r(line, ";", &rest); field != NULL && count < 4; field = strtok_r(NULL, ";", &rest))
        fields[count++] = field;
    if (count < 3)
        return error_set(error, ERROR_INVALID, "a line without its fields");
    struct policy_settings settings;
    int code = policy_settings_parse(fields[1], &settings, error);
    if (code != 0)
        return code;
    struct sequence *sequence = sequence_create(engine);
    code = sequence == NULL ? error_set(error, ERROR_MEMORY, "no memory for a sequence") : 0;
    if (code == 0)
        code = parse_ids(fields[2], &prompt, error);
    if (code == 0 && count > 3)
        code = parse_ids(fields[3], &fed, error);
    if (code == 0)
        code = sequence_set_policy(sequence, &settings, prompt.count, error);
    if (code == 0 && count > 3)
        code = run_case(engine, options, sequence, &prompt, &fed, error);
    else if (code == 0) {
        code = prefill(engine, options, sequence, &prompt, false, error);
        if (code == 0)
            code = write_scores(engine, sequence, error);
    }
    sequence_free(sequence);
    policy_settings_release(&settings);
    if (code == 0 && !kv_cache_check(engine_kv_cache(engine)))
        code = error_set(error, ERROR_INVALID, "the KV cache is not consistent");
    return code;
}

static int run_all(const struct options *options, struct error *error) {
    struct engine_options engine_options = {
        .backend = {.threads = options->threads},
        .kv_bytes = (size_t)512 << 20,
        .kv_format = strcmp(options->kv, "f32") == 0    ? KV_F32
                     : strcmp(options->kv, "bf16") == 0 ? KV_BF16
                                                        : KV_F16,
        .exact = options->exact,
        .poison_free = true,
    };
    struct model *model = model_open(options->model, error);
    if (model == NULL)
        return error->code;
    struct engine *engine = engine_open(model, &engine_options, error);
    int code = engine == NULL ? error->code : 0;
    char *line = NULL;
    size_t capacity = 0;
    while (code == 0 && getline(&line, &capacity, stdin) > 0)
        code = run_line(engine, options, line, error);
    free(line);
    engine_close(engine);
    model_free(model);
    return code;
}

int main(int arguments_count, char **arguments) {
    struct options options;
    struct error error = {0};
    if (parse_arguments(arguments_count, arguments, &options) != 0) {
        fprintf(stderr, "usage: prune_tool MODEL [--exact] [--kv f16|f32|bf16] [--chunk N] [--threads N] [--swap]\n");
        return 2;
    }
    int code = run_all(&options, &error);
    if (code != 0)
        fprintf(stderr, "prune_tool: %s\n", error.message);
    return code == 0 ? 0 : 1;
}
