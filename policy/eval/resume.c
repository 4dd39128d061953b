/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/resume.h"

#include "policy/eval/json_number.h"
#include "policy/network.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- writing ---- */

enum { NETWORK_TEXT_MAX = 17 };

/* Which network scores: its file may be another one by now. NULL: none does. */
static const char *write_network(const struct eval_variant *variant, char text[static NETWORK_TEXT_MAX]) {
    if (variant->settings.network == NULL)
        return NULL;
    snprintf(text, NETWORK_TEXT_MAX, "%016" PRIx64, network_digest(variant->settings.network));
    return text;
}

/* Of the tokens: less than the ratio where that is of the bytes. */
static double part_of(const struct eval_variant *variant) {
    return variant->settings.tokens == 0 ? variant->settings.ratio : 0;
}

/* What a result depends on beside the item. Texts that are not UTF-8 (file names of policies) fail: NULL. */
static json_t *key_json(const struct eval_setup *setup, const struct eval_result *result) {
    const struct eval_variant *variant = &setup->variants[result->variant];
    char network[NETWORK_TEXT_MAX];
    return json_pack("{s:s, s:s, s:I, s:b, s:I, s:s, s:s*, s:f, s:f, s:I, s:I, s:I, s:I}", "model", setup->model,
        "task", setup->task, "seed", (json_int_t)setup->seed, "query_aware", (int)setup->query_aware, "continuation",
        (json_int_t)setup->continuation, "kv_policy", variant->policy, "kv_network", write_network(variant, network),
        "kv_ratio", variant->settings.tokens == 0 ? variant->ratio : 0.0, "kv_part", part_of(variant), "kv_tokens",
        (json_int_t)variant->settings.tokens, "length", (json_int_t)setup->lengths[result->length], "item",
        (json_int_t)result->item, "part", (json_int_t)result->part);
}

/* Failed calls answer -1; the answers are summed up. */
static int add_kl(json_t *line, const struct eval_result *result) {
    int failed = json_object_set_new(line, "steps", json_integer(result->steps));
    failed |= json_object_set_new(line, "kl", eval_json_number(result->kl));
    failed |= json_object_set_new(line, "top1", eval_json_number(result->top1));
    failed |= json_object_set_new(line, "loss", eval_json_number(result->loss));
    failed |= json_object_set_new(line, "loss_full", eval_json_number(result->loss_full));
    return failed;
}

static int add_answer(json_t *line, const struct eval_result *result) {
    int failed = 0;
    json_t *output = json_string(result->output != NULL ? result->output : "");
    failed |= json_object_set_new(line, "output", output != NULL ? output : json_string("(not UTF-8)"));
    failed |= json_object_set_new(line, "output_tokens", json_integer(result->output_tokens));
    failed |= json_object_set_new(line, "max_tokens", json_integer(result->max_tokens));
    if (result->has_score) {
        failed |= json_object_set_new(line, "score", eval_json_number(result->score));
        failed |= json_object_set_new(line, "chance", eval_json_number(result->chance));
        failed |= json_object_set_new(line, "kind", json_integer(result->kind));
    }
    if (result->has_gold) {
        json_t *gold = json_string(result->gold); /* may be cut within a character */
        failed |= json_object_set_new(line, "gold", gold != NULL ? gold : json_string(""));
        failed |= json_object_set_new(line, "gold_logprob", eval_json_number(result->gold_logprob));
        failed |= json_object_set_new(line, "gold_tokens", json_integer(result->gold_tokens));
    }
    return failed;
}

static json_t *result_json(const struct eval_setup *setup, const struct eval_result *result) {
    json_t *line = key_json(setup, result);
    char digest[20];
    snprintf(digest, sizeof digest, "%016" PRIx64, result->digest);
    int failed = json_object_set_new(line, "digest", json_string(digest));
    if (result->group[0] != '\0') {
        json_t *group = json_string(result->group);
        failed |= json_object_set_new(line, "group", group != NULL ? group : json_string("(not UTF-8)"));
    }
    failed |= result->steps > 0 ? add_kl(line, result) : add_answer(line, result);
    failed |= json_object_set_new(line, "kv_tokens_kept", eval_json_number(result->tokens_kept));
    failed |= json_object_set_new(line, "kv_tokens_seen", json_integer(result->tokens_seen));
    failed |= json_object_set_new(line, "kv_bytes", eval_json_number(result->bytes));
    failed |= json_object_set_new(line, "kv_bytes_full", eval_json_number(result->bytes_full));
    failed |= json_object_set_new(line, "tokens", json_integer(result->tokens));
    failed |= json_object_set_new(line, "seconds", eval_json_number(result->seconds));
    failed |= eval_positions_write(line, &result->positions);
    if (result->kept != NULL)
        failed |= json_object_set_new(line, "kept", json_string(result->kept));
    if (failed != 0) {
        json_decref(line);
        return NULL;
    }
    return line;
}

int eval_resume_append(
    struct eval_resume *resume, const struct eval_setup *setup, const struct eval_result *result, struct error *error) {
    json_t *line = result_json(setup, result);
    char *text = line != NULL ? json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(line);
    if (text == NULL)
        return error_set(error, ERROR_MEMORY, "%.200s: no memory for a result", resume->name);
    bool failed = fprintf(resume->file, "%s\n", text) < 0 || fflush(resume->file) != 0;
    free(text);
    return failed ? error_set(error, ERROR_IO, "cannot write %.200s: %s", resume->name, strerror(errno)) : 0;
}

/* ---- reading ---- */

static double number_of(const json_t *line, const char *name) {
    const json_t *value = json_object_get(line, name);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static json_int_t integer_of(const json_t *line, const char *name) {
    const json_t *value = json_object_get(line, name);
    return json_is_integer(value) && json_integer_value(value) >= 0 ? json_integer_value(value) : 0;
}

static uint32_t count_of(const json_t *line, const char *name) {
    json_int_t value = integer_of(line, name);
    return value <= UINT32_MAX ? (uint32_t)value : 0;
}

static bool is_text(const json_t *line, const char *name, const char *text) {
    const char *value = json_string_value(json_object_get(line, name));
    return value != NULL && strcmp(value, text) == 0;
}

static bool same_variant(const json_t *line, const struct eval_variant *variant) {
    double ratio = variant->settings.tokens == 0 ? variant->ratio : 0;
    char text[NETWORK_TEXT_MAX];
    if (!is_text(line, "kv_policy", variant->policy) || number_of(line, "kv_ratio") != ratio ||
        number_of(line, "kv_part") != part_of(variant) || integer_of(line, "kv_tokens") != variant->settings.tokens)
        return false;
    const char *network = write_network(variant, text);
    return network != NULL ? is_text(line, "kv_network", network) : json_object_get(line, "kv_network") == NULL;
}

/* Whether the line is one of this setup; where, in *result. */
static bool find_place(const json_t *line, const struct eval_setup *setup, struct eval_result *result) {
    bool ours = is_text(line, "model", setup->model) && is_text(line, "task", setup->task) &&
                json_integer_value(json_object_get(line, "seed")) == (json_int_t)setup->seed &&
                json_is_true(json_object_get(line, "query_aware")) == setup->query_aware &&
                integer_of(line, "continuation") == setup->continuation;
    if (!ours)
        return false;
    uint32_t length = 0, variant = 0;
    while (length < setup->lengths_count && setup->lengths[length] != integer_of(line, "length"))
        length++;
    while (variant < setup->variants_count && !same_variant(line, &setup->variants[variant]))
        variant++;
    result->length = length;
    result->variant = variant;
    return length < setup->lengths_count && variant < setup->variants_count;
}

static void read_measured(const json_t *line, struct eval_result *result) {
    result->steps = count_of(line, "steps");
    result->kl = number_of(line, "kl");
    result->top1 = number_of(line, "top1");
    result->loss = number_of(line, "loss");
    result->loss_full = number_of(line, "loss_full");
    result->output_tokens = count_of(line, "output_tokens");
    result->max_tokens = count_of(line, "max_tokens");
    result->has_score = json_object_get(line, "score") != NULL;
    result->score = number_of(line, "score");
    result->chance = number_of(line, "chance");
    json_int_t kind = integer_of(line, "kind");
    result->kind = kind < EVAL_ERROR_KINDS ? (enum eval_error)kind : EVAL_WRONG;
    result->has_gold = json_object_get(line, "gold_logprob") != NULL;
    result->gold_logprob = number_of(line, "gold_logprob");
    result->gold_tokens = count_of(line, "gold_tokens");
    result->tokens_kept = number_of(line, "kv_tokens_kept");
    result->tokens_seen = count_of(line, "kv_tokens_seen");
    result->bytes = number_of(line, "kv_bytes");
    result->bytes_full = number_of(line, "kv_bytes_full");
    result->tokens = count_of(line, "tokens");
    result->seconds = number_of(line, "seconds");
    eval_positions_read(line, &result->positions);
}

static void copy_text(const json_t *line, const char *name, char *out, size_t size) {
    const char *text = json_string_value(json_object_get(line, name));
    snprintf(out, size, "%s", text != NULL ? text : "");
}

static int read_result(const json_t *line, const struct eval_setup *setup, struct eval_results *results) {
    struct eval_result result = {0};
    if (!find_place(line, setup, &result))
        return 0;
    const char *digest = json_string_value(json_object_get(line, "digest"));
    const char *kept = json_string_value(json_object_get(line, "kept"));
    result.item = count_of(line, "item");
    result.part = count_of(line, "part");
    result.digest = digest != NULL ? strtoull(digest, NULL, 16) : 0;
    copy_text(line, "group", result.group, sizeof result.group);
    copy_text(line, "gold", result.gold, sizeof result.gold);
    read_measured(line, &result);
    if (kept != NULL && strlen(kept) == (size_t)setup->layers * KEPT_BINS) {
        result.kept = strdup(kept);
        if (result.kept == NULL)
            return ERROR_MEMORY;
    }
    return eval_results_add(results, &result);
}

static int read_lines(
    struct eval_resume *resume, const struct eval_setup *setup, struct eval_results *results, struct error *error) {
    char *text = NULL;
    size_t capacity = 0;
    ssize_t length;
    int code = 0;
    bool whole = true; /* the last line ends */
    for (size_t number = 1; code == 0 && (length = getline(&text, &capacity, resume->file)) >= 0; number++) {
        json_t *line = json_loadb(text, (size_t)length, 0, NULL);
        whole = text[length - 1] == '\n';
        if (line == NULL)
            resume->torn++;
        else if (!json_is_string(json_object_get(line, "kv_policy")) || !json_is_string(json_object_get(line, "task")))
            code = error_set(
                error, ERROR_FORMAT, "%.200s, line %zu: not a result of distillcache eval", resume->name, number);
        else if ((code = read_result(line, setup, results)) != 0)
            error_set(error, code, "%.200s: no memory for its results", resume->name);
        json_decref(line);
    }
    free(text);
    if (code == 0 && ferror(resume->file))
        code = error_set(error, ERROR_IO, "cannot read %.200s: %s", resume->name, strerror(errno));
    if (code == 0 && (fseek(resume->file, 0, SEEK_END) != 0 || (!whole && fputc('\n', resume->file) == EOF)))
        code = error_set(error, ERROR_IO, "cannot write %.200s: %s", resume->name, strerror(errno));
    return code;
}

int eval_resume_open(struct eval_resume *resume, const char *name, const struct eval_setup *setup,
    struct eval_results *results, struct error *error) {
    *resume = (struct eval_resume){.name = name, .file = fopen(name, "a+e")};
    if (resume->file == NULL)
        return error_set(error, ERROR_IO, "cannot open %.200s: %s", name, strerror(errno));
    rewind(resume->file);
    int code = read_lines(resume, setup, results, error);
    if (code != 0)
        eval_resume_close(resume);
    return code;
}

void eval_resume_close(struct eval_resume *resume) {
    if (resume->file != NULL)
        fclose(resume->file);
    resume->file = NULL;
}
