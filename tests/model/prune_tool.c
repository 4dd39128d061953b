/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs policies on the real model and writes what they do, for tests/model/test_prunes.py.
 *
 *   prune_tool MODEL [--exact] [--kv f16|f32|bf16] [--chunk N] [--threads N] [--group N] [--swap] [--share] [--fork]
 *              [--backend cpu|cuda] [--kv-memory MIB]
 *
 * Standard input, one task a line, its fields separated by semicolons:
 *   scores;POLICY;PROMPT         scores after the prompt, before any prune
 *   run;POLICY;PROMPT;FED        prunes in and after the prompt, then a decode step and a prune for each token of FED
 * POLICY is as on the command line (policy_settings_parse), PROMPT and FED are token ids separated by blanks.
 * Standard output, one JSON document a line:
 *   {"positions": [layer][head][slot], "scores": [layer][head][slot]}    (null: NaN; "protected": +infinity)
 *   {"prompt": [layer][head] positions kept, "top": [step][5] of [id, logprob], "counts": [step] of layer 0, head 0,
 *    "decode": [layer][head] positions kept}
 * --group N: N tasks advance in the same batches and prunes. --swap: sequences are swapped out and in after each prune.
 * --kv-memory MIB: of the page pool (default 1024), all of which is written to before the first task.
 * --share: prefixes are shared. --fork: tasks of a group that have a policy and a prompt in common, whatever its
 * options, compute the prompt once.
 */
#include "engine/engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOP = 5, TOKENS_MAX = 16384, GROUP_MAX = 64 };

struct options {
    const char *model;
    const char *kv, *backend;
    uint32_t chunk;
    uint32_t threads;
    uint32_t group;
    uint32_t kv_memory; /* MiB */
    bool exact;
    bool swap;
    bool share;
    bool fork;
};

struct ids {
    int32_t *tokens;
    uint32_t count;
};

struct task {
    bool scores;
    struct ids prompt, fed;
    uint32_t done; /* tokens of both */
    struct policy_settings settings;
    struct task *leader; /* --fork: whose sequence this one's is forked from after the prompt; NULL: none */
    struct sequence *sequence;
    char *text;
    size_t text_bytes;
    FILE *out;
    FILE *counts; /* of decode steps */
    char *counts_text;
    size_t counts_bytes;
};

static int parse_arguments(int count, char **arguments, struct options *options) {
    *options = (struct options){.kv = "f16", .chunk = 512, .group = 1, .kv_memory = 1024};
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i], *value = i + 1 < count ? arguments[i + 1] : NULL;
        uint32_t *number = strcmp(name, "--chunk") == 0       ? &options->chunk
                           : strcmp(name, "--threads") == 0   ? &options->threads
                           : strcmp(name, "--group") == 0     ? &options->group
                           : strcmp(name, "--kv-memory") == 0 ? &options->kv_memory
                                                              : NULL;
        if (strcmp(name, "--exact") == 0)
            options->exact = true;
        else if (strcmp(name, "--swap") == 0)
            options->swap = true;
        else if (strcmp(name, "--share") == 0)
            options->share = true;
        else if (strcmp(name, "--fork") == 0)
            options->fork = true;
        else if (name[0] != '-' && options->model == NULL)
            options->model = name;
        else if (value == NULL)
            return -1;
        else if (strcmp(name, "--kv") == 0)
            options->kv = arguments[++i];
        else if (strcmp(name, "--backend") == 0)
            options->backend = arguments[++i];
        else if (number != NULL)
            *number = (uint32_t)strtoul(arguments[++i], NULL, 10);
        else
            return -1;
    }
    return options->model != NULL && options->chunk > 0 && options->group > 0 && options->group <= GROUP_MAX ? 0 : -1;
}

static int parse_ids(char *text, struct ids *ids, struct error *error) {
    ids->tokens = malloc(TOKENS_MAX * sizeof *ids->tokens);
    if (ids->tokens == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for tokens");
    char *rest = NULL;
    for (char *word = strtok_r(text, " \n", &rest); word != NULL; word = strtok_r(NULL, " \n", &rest)) {
        if (ids->count == TOKENS_MAX)
            return error_set(error, ERROR_INVALID, "more than %d tokens", TOKENS_MAX);
        ids->tokens[ids->count++] = (int32_t)strtol(word, NULL, 10);
    }
    return 0;
}

/* By layer, head and slot; what is written of a slot is up to write. */
typedef void (*write_slot)(FILE *out, const float *scores, const uint32_t *positions, uint32_t slot);

static void write_position(FILE *out, const float *scores, const uint32_t *positions, uint32_t slot) {
    (void)scores;
    fprintf(out, "%u", positions[slot]);
}

static void write_score(FILE *out, const float *scores, const uint32_t *positions, uint32_t slot) {
    (void)positions;
    if (isnan(scores[slot]))
        fputs("null", out);
    else if (isinf(scores[slot]) && scores[slot] > 0)
        fputs("\"protected\"", out);
    else
        fprintf(out, "%.9g", scores[slot]);
}

/* In order of positions; empty slots are left out. */
static void write_head(const struct task *task, uint32_t layer, uint32_t head, const float *scores, write_slot write) {
    struct kv_sequence *kv = sequence_kv(task->sequence);
    uint32_t slots = kv_sequence_slots(kv, layer, head), tokens = kv_sequence_tokens(kv, layer, head);
    uint32_t *positions = calloc(2 * (size_t)slots + 1, sizeof *positions), *order = positions + slots;
    if (positions == NULL)
        abort();
    kv_sequence_positions(kv, layer, head, positions);
    kv_sequence_order(kv, layer, head, order);
    fputc('[', task->out);
    for (uint32_t i = 0; i < tokens; i++) {
        if (i > 0)
            fputc(',', task->out);
        write(task->out, scores, positions, order[i]);
    }
    fputc(']', task->out);
    free(positions);
}

static void write_all(
    const struct engine *engine, const struct task *task, const char *name, const float *scores, write_slot write) {
    const struct model_shape *shape = &engine_model(engine)->shape;
    struct kv_sequence *kv = sequence_kv(task->sequence);
    fprintf(task->out, "\"%s\":", name);
    for (uint32_t layer = 0; layer < shape->layers; layer++) {
        fputs(layer == 0 ? "[" : ",", task->out);
        for (uint32_t head = 0; head < shape->kv_heads; head++) {
            fputs(head == 0 ? "[" : ",", task->out);
            if (engine_model(engine)->windows[layer] != 0) { /* sliding layers have no scores, and keep their window */
                fputs("[]", task->out);
                continue;
            }
            write_head(task, layer, head, scores, write);
            if (scores != NULL)
                scores += kv_sequence_slots(kv, layer, head);
        }
        fputc(']', task->out);
    }
    fputc(']', task->out);
}

static int write_scores(struct engine *engine, struct task *task, struct error *error) {
    uint64_t slots = kv_sequence_slots_held(sequence_kv(task->sequence));
    float *scores = malloc(slots * sizeof *scores + 1);
    if (scores == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for scores");
    int code = sequence_scores(task->sequence, scores, error);
    if (code == 0) {
        write_all(engine, task, "positions", NULL, write_position);
        fputc(',', task->out);
        write_all(engine, task, "scores", scores, write_score);
    }
    free(scores);
    return code;
}

static int write_step(struct engine *engine, const struct task *task, uint32_t row, struct error *error) {
    struct sample_params params = {.top_p = 1, .top_count = TOP, .want_logprob = true, .forced = -1};
    struct sample_result result;
    int code = engine_sample(engine, &row, &params, 1, &result, error);
    fputs(task->done == task->prompt.count + 1 ? ",\"top\":[" : ",", task->out);
    for (uint32_t i = 0; i < result.top_count && code == 0; i++)
        fprintf(task->out, "%s[%d,%.9g]", i == 0 ? "[" : ",", result.top[i].token, result.top[i].logprob);
    fputc(']', task->out);
    return code;
}

/* The next tokens of a task: a part of the prompt, or one to feed. */
static bool next_item(const struct task *task, const struct options *options, uint32_t rows, struct batch_item *item) {
    *item = (struct batch_item){.sequence = task->sequence};
    if (task->sequence == NULL)
        return false;
    if (task->done >= task->prompt.count + task->fed.count || rows == 0)
        return false;
    if (task->done >= task->prompt.count) {
        item->tokens = task->fed.tokens + (task->done - task->prompt.count);
        item->count = 1;
        item->want = WANT_LAST;
        return true;
    }
    uint32_t most = task->prompt.count - task->done, room = sequence_room(task->sequence);
    most = most < options->chunk ? most : options->chunk;
    most = most < room ? most : room;
    item->tokens = task->prompt.tokens + task->done;
    item->count = most < rows ? most : rows;
    return true;
}

static int prune_and_swap(struct engine *engine, const struct options *options, struct sequence **sequences,
    uint32_t count, struct error *error) {
    int code = engine_prune(engine, sequences, count, error);
    for (uint32_t i = 0; i < count && options->swap && code == 0; i++)
        code = sequence_swap_out(sequences[i], error);
    for (uint32_t i = 0; i < count && options->swap && code == 0; i++)
        code = sequence_swap_in(sequences[i], error);
    return code;
}

/* What a task writes after its step and prune. */
static int report(struct engine *engine, struct task *task, struct error *error) {
    if (task->done < task->prompt.count)
        return 0;
    if (task->done == task->prompt.count && task->scores)
        return write_scores(engine, task, error);
    if (task->done == task->prompt.count)
        write_all(engine, task, "prompt", NULL, write_position);
    else
        fprintf(task->counts, "%s%u", task->done == task->prompt.count + 1 ? "" : ",",
            kv_sequence_tokens(sequence_kv(task->sequence), 0, 0));
    if (task->done < task->prompt.count + task->fed.count || task->fed.count == 0)
        return 0;
    fflush(task->counts);
    fprintf(task->out, "],\"counts\":[%s],", task->counts_text);
    write_all(engine, task, "decode", NULL, write_position);
    return 0;
}

/* A task whose leader has computed the prompt, and not pruned it yet, goes on from there. */
static int fork_task(struct task *task, struct error *error) {
    task->sequence = sequence_fork(task->leader->sequence);
    if (task->sequence == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    task->done = task->prompt.count;
    return sequence_change_policy(task->sequence, &task->settings, error);
}

/* One batch and its prune. 1: nothing was left to do. */
static int advance(
    struct engine *engine, const struct options *options, struct task *tasks, uint32_t count, struct error *error) {
    struct batch_item items[GROUP_MAX];
    struct task *owners[GROUP_MAX];
    struct sequence *sequences[GROUP_MAX];
    uint32_t items_count = 0, pruned = 0, rows = engine_batch_rows(engine);
    for (uint32_t i = 0; i < count; i++)
        if (next_item(&tasks[i], options, rows, &items[items_count])) {
            rows -= items[items_count].count;
            owners[items_count++] = &tasks[i];
        }
    if (items_count == 0)
        return 1;
    int code = engine_forward(engine, items, items_count, error);
    for (uint32_t i = 0; i < items_count && code == 0; i++) {
        owners[i]->done += items[i].count;
        if (items[i].want == WANT_LAST)
            code = write_step(engine, owners[i], items[i].first_row, error);
    }
    for (uint32_t i = 0; i < count && code == 0; i++)
        if (tasks[i].sequence == NULL && tasks[i].leader->done == tasks[i].leader->prompt.count) {
            code = fork_task(&tasks[i], error);
            owners[items_count++] = &tasks[i];
        }
    for (uint32_t i = 0; i < items_count; i++)
        if (!owners[i]->scores)
            sequences[pruned++] = owners[i]->sequence;
    if (code == 0)
        code = prune_and_swap(engine, options, sequences, pruned, error);
    if (code == 0 && !kv_cache_check(engine_kv_cache(engine)))
        code = error_set(error, ERROR_INVALID, "the cache is not consistent");
    for (uint32_t i = 0; i < items_count && code == 0; i++)
        code = report(engine, owners[i], error);
    return code;
}

static bool same_prompt(const struct task *a, const struct task *b) {
    size_t bytes = a->prompt.count * sizeof *a->prompt.tokens;
    return a->prompt.count == b->prompt.count && memcmp(a->prompt.tokens, b->prompt.tokens, bytes) == 0;
}

/* The task of those before that computes this one's prompt too; NULL: none. */
static struct task *find_leader(struct task *tasks, const struct task *task) {
    for (struct task *leader = tasks; leader < task; leader++)
        if (leader->leader == NULL && leader->settings.policy == task->settings.policy && same_prompt(leader, task))
            return leader;
    return NULL;
}

static int task_open_sequence(struct engine *engine, struct task *task, struct error *error) {
    task->sequence = sequence_create(engine);
    if (task->sequence == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    int code = sequence_set_policy(task->sequence, &task->settings, task->prompt.count, error);
    if (code == 0)
        task->done = sequence_reuse_prefix(task->sequence, task->prompt.tokens, task->prompt.count);
    return code;
}

/* Reads a line into *task, of the group that begins at tasks. */
static int task_create(struct engine *engine, const struct options *options, struct task *tasks, struct task *task,
    char *line, struct error *error) {
    char *fields[4] = {0}, *rest = NULL;
    uint32_t count = 0;
    for (char *field = strtok_r(line, ";", &rest); field != NULL && count < 4; field = strtok_r(NULL, ";", &rest))
        fields[count++] = field;
    if (count < 3)
        return error_set(error, ERROR_INVALID, "a line without its fields");
    int code = policy_settings_parse(fields[1], &task->settings, error);
    if (code != 0)
        return code;
    task->scores = strcmp(fields[0], "scores") == 0;
    task->out = open_memstream(&task->text, &task->text_bytes);
    task->counts = open_memstream(&task->counts_text, &task->counts_bytes);
    if (task->out == NULL || task->counts == NULL)
        code = error_set(error, ERROR_MEMORY, "no memory for what a task writes");
    if (code == 0)
        code = parse_ids(fields[2], &task->prompt, error);
    if (code == 0 && count > 3)
        code = parse_ids(fields[3], &task->fed, error);
    if (code == 0 && options->fork)
        task->leader = find_leader(tasks, task);
    if (code == 0 && task->leader == NULL)
        code = task_open_sequence(engine, task, error);
    return code;
}

static void task_free(struct task *task, bool print) {
    if (task->out != NULL)
        fclose(task->out);
    if (task->counts != NULL)
        fclose(task->counts);
    if (print)
        printf("{%s}\n", task->text);
    sequence_free(task->sequence);
    policy_settings_release(&task->settings);
    free(task->text);
    free(task->counts_text);
    free(task->prompt.tokens);
    free(task->fed.tokens);
}

/* Reads a group of tasks and runs it. 1: there was none. */
static int run_group(struct engine *engine, const struct options *options, struct error *error) {
    struct task tasks[GROUP_MAX] = {0};
    uint32_t count = 0;
    char *line = NULL;
    size_t capacity = 0;
    int code = 0;
    while (code == 0 && count < options->group && getline(&line, &capacity, stdin) > 0)
        code = task_create(engine, options, tasks, &tasks[count++], line, error);
    free(line);
    bool any = count > 0;
    while (code == 0)
        code = advance(engine, options, tasks, count, error);
    if (code == 1 && any)
        code = 0;
    if (code == 0 && !kv_cache_check(engine_kv_cache(engine)))
        code = error_set(error, ERROR_INVALID, "the KV cache is not consistent");
    for (uint32_t i = 0; i < count; i++)
        task_free(&tasks[i], code == 0);
    return code;
}

static int run_all(const struct options *options, struct error *error) {
    struct engine_options engine_options = {
        .backend = {.threads = options->threads, .name = options->backend},
        .kv_bytes = (size_t)options->kv_memory << 20,
        .kv_format = strcmp(options->kv, "f32") == 0    ? KV_F32
                     : strcmp(options->kv, "bf16") == 0 ? KV_BF16
                                                        : KV_F16,
        .exact = options->exact,
        .prefix_sharing = options->share,
        .poison_free = true,
    };
    struct model *model = model_open(options->model, error);
    if (model == NULL)
        return error->code;
    struct engine *engine = engine_open(model, &engine_options, error);
    int code = engine == NULL ? error->code : 0;
    while (code == 0)
        code = run_group(engine, options, error);
    engine_close(engine);
    model_free(model);
    return code == 1 ? 0 : code;
}

int main(int arguments_count, char **arguments) {
    struct options options;
    struct error error = {0};
    if (parse_arguments(arguments_count, arguments, &options) != 0) {
        fprintf(stderr, "usage: prune_tool MODEL [--exact] [--kv f16|f32|bf16] [--chunk N] [--threads N] [--group N]\n"
                        "           [--swap] [--share] [--fork]\n");
        return 2;
    }
    int code = run_all(&options, &error);
    if (code != 0)
        fprintf(stderr, "prune_tool: %s\n", error.message);
    return code == 0 ? 0 : 1;
}
