/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/report.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy/eval/json_number.h"

/* ---- JSON: the json_object_set_new calls below take NULL (a failed allocation) and answer -1; the answers are summed
 * up, so that one check at the end covers all. ---- */

static int set_number(json_t *object, const char *name, double value) {
    return json_object_set_new(object, name, eval_json_number(value));
}

static int set_count(json_t *object, const char *name, uint64_t value) {
    return json_object_set_new(object, name, json_integer((json_int_t)value));
}

/* Texts of files need not be UTF-8. */
static int set_text(json_t *object, const char *name, const char *text) {
    json_t *value = json_string(text);
    return json_object_set_new(object, name, value != NULL ? value : json_string("(not UTF-8)"));
}

static int set_interval(json_t *object, const char *name, const struct bootstrap_interval *interval) {
    char bounds[64];
    json_t *pair = json_array();
    int failed = set_number(object, name, interval->mean);
    failed |= json_array_append_new(pair, eval_json_number(interval->low));
    failed |= json_array_append_new(pair, eval_json_number(interval->high));
    snprintf(bounds, sizeof bounds, "%s_ci", name);
    failed |= json_object_set_new(object, bounds, pair);
    return failed;
}

static int set_kl(json_t *object, const struct eval_row *row) {
    int failed = set_interval(object, "kl", &row->kl);
    failed |= set_number(object, "kl_geometric", row->kl_geometric);
    failed |= set_number(object, "top1", row->top1);
    failed |= set_number(object, "perplexity", row->perplexity);
    failed |= set_number(object, "perplexity_full", row->perplexity_full);
    failed |= set_number(object, "perplexity_increase", row->perplexity / row->perplexity_full);
    return failed;
}

static int set_score(json_t *object, const struct eval_row *row) {
    json_t *errors = json_object();
    int failed = set_interval(object, "score", &row->score);
    failed |= set_number(object, "score_full", row->score_full);
    failed |= set_interval(object, "score_difference", &row->score_difference);
    failed |= set_number(object, "chance", row->chance);
    failed |= json_object_set_new(object, "claimed", json_boolean(row->claimed));
    failed |= set_count(object, "full_right", row->full_right);
    for (int kind = 0; kind < EVAL_ERROR_KINDS; kind++)
        failed |= set_count(errors, eval_error_name((enum eval_error)kind), row->errors[kind]);
    failed |= json_object_set_new(object, "errors", errors);
    return failed;
}

static int set_gold(json_t *object, const struct eval_row *row) {
    int failed = set_interval(object, "gold_logprob", &row->gold_logprob);
    failed |= set_number(object, "gold_logprob_full", row->gold_logprob_full);
    failed |= set_interval(object, "gold_logprob_difference", &row->gold_difference);
    return failed;
}

static json_t *row_json(const struct eval_setup *setup, const struct eval_row *row) {
    const struct eval_variant *variant = &setup->variants[row->variant];
    json_t *object = json_object();
    int failed = set_text(object, "task", setup->task);
    failed |= set_text(object, "kv_policy", variant->policy);
    if (variant->settings.tokens == 0)
        failed |= set_number(object, "kv_ratio", variant->ratio);
    else
        failed |= set_count(object, "kv_tokens", variant->settings.tokens);
    failed |= set_count(object, "length", setup->lengths[row->length]);
    if (row->group[0] != '\0')
        failed |= set_text(object, "group", row->group);
    failed |= set_count(object, "n", row->n);
    failed |= row->has_kl ? set_kl(object, row) : 0;
    failed |= row->has_score ? set_score(object, row) : 0;
    failed |= row->has_gold ? set_gold(object, row) : 0;
    failed |= row->has_output ? set_number(object, "length_ratio", row->length_ratio) : 0;
    failed |= set_number(object, "tokens_per_second", row->tokens_per_second);
    failed |= set_number(object, "kv_tokens_kept", row->tokens_kept);
    failed |= set_number(object, "kv_tokens_seen", row->tokens_seen);
    failed |= set_number(object, "kv_bytes", row->bytes);
    failed |= set_number(object, "kv_bytes_full", row->bytes_full);
    failed |= eval_positions_write(object, &row->positions);
    if (failed != 0) {
        json_decref(object);
        return NULL;
    }
    return object;
}

static json_t *rows_json(const struct eval_setup *setup, const struct eval_row *rows, size_t count) {
    json_t *list = json_array();
    int failed = list == NULL;
    for (size_t i = 0; i < count; i++)
        failed |= json_array_append_new(list, row_json(setup, &rows[i]));
    if (failed != 0) {
        json_decref(list);
        return NULL;
    }
    return list;
}

char *eval_report_json(const struct eval_report *report) {
    const struct eval_setup *setup = report->setup;
    char *text = NULL;
    json_t *document = json_object(), *lengths = json_array();
    int failed = set_text(document, "task", setup->task);
    failed |= set_text(document, "model", report->model);
    failed |= json_object_set_new(document, "seed", json_integer((json_int_t)setup->seed));
    failed |= json_object_set_new(document, "query_aware", json_boolean(setup->query_aware));
    for (uint32_t i = 0; i < setup->lengths_count; i++)
        failed |= json_array_append_new(lengths, json_integer(setup->lengths[i]));
    failed |= json_object_set_new(document, "lengths", lengths);
    failed |= json_object_set_new(document, "complete", json_boolean(report->complete));
    failed |= set_count(document, "items", report->items);
    failed |= set_count(document, "skipped", report->skipped);
    failed |= json_object_set_new(document, "rows", rows_json(setup, report->rows->list, report->rows->count));
    failed |=
        json_object_set_new(document, "groups", rows_json(setup, report->rows->groups, report->rows->groups_count));
    if (failed == 0)
        text = json_dumps(document, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(document);
    return text;
}

/* ---- table ---- */

static void describe_budget(const struct eval_variant *variant, char *text, size_t size) {
    if (variant->settings.tokens == 0)
        snprintf(text, size, "%.4g", variant->ratio);
    else
        snprintf(text, size, "%u tok", variant->settings.tokens);
}

static void print_kl_row(const struct eval_row *row, FILE *out) {
    fprintf(out, " %8.4f [%.4f, %.4f] %8.4f %6.3f %9.3f %7.3f", row->kl.mean, row->kl.low, row->kl.high,
        row->kl_geometric, row->top1, row->perplexity, row->perplexity / row->perplexity_full);
}

static void print_answer_row(const struct eval_row *row, FILE *out) {
    if (row->has_score)
        fprintf(out, " %6.3f [%.3f, %.3f] %+6.3f%s", row->score.mean, row->score.low, row->score.high,
            row->score_difference.mean, row->claimed ? " " : "*");
    if (row->has_gold)
        fprintf(out, " %8.2f [%.2f, %.2f]", row->gold_logprob.mean, row->gold_logprob.low, row->gold_logprob.high);
    fprintf(out, " %6.2f", row->length_ratio);
    for (int kind = 0; row->has_score && kind < EVAL_ERROR_KINDS; kind++)
        fprintf(out, "%s%u", kind == 0 ? "  " : "/", row->errors[kind]);
}

static void print_row(const struct eval_report *report, const struct eval_row *row, int width, FILE *out) {
    const struct eval_variant *variant = &report->setup->variants[row->variant];
    char budget[24];
    describe_budget(variant, budget, sizeof budget);
    fprintf(out, "%-*s %8s %7u %4u", width, variant->policy, budget, report->setup->lengths[row->length], row->n);
    if (row->has_kl)
        print_kl_row(row, out);
    else
        print_answer_row(row, out);
    if (row->positions.present)
        fprintf(out, "  %3.0f/%3.0f/%3.0f %%", 100 * row->positions.sinks, 100 * row->positions.between,
            100 * row->positions.recent);
    fprintf(out, "  %7.1f/%.0f %8.2f/%.2f MB %7.0f tok/s\n", row->tokens_kept, row->tokens_seen, row->bytes / 1e6,
        row->bytes_full / 1e6, row->tokens_per_second);
}

static void print_legend(const struct eval_report *report, FILE *out) {
    bool unclaimed = false;
    for (size_t i = 0; i < report->rows->count; i++)
        unclaimed = unclaimed || (report->rows->list[i].has_score && !report->rows->list[i].claimed);
    if (!report->setup->answers) {
        fputs("columns: policy, budget, length, n, KL [95 %], geometric KL, top-1 agreement, perplexity and how many "
              "times full's, kept of the prompt's first 4 tokens/between/last 32, tokens kept/seen, KV held/full\n",
            out);
        return;
    }
    fputs("columns: policy, budget, length, n, score [95 %] and minus full's, log-probability of the answer [95 %], "
          "output length against full's, of the items that full gets right: ",
        out);
    for (int kind = 0; kind < EVAL_ERROR_KINDS; kind++)
        fprintf(out, "%s%s", kind == 0 ? "" : "/", eval_error_name((enum eval_error)kind));
    fputs(", kept of the prompt's first 4 tokens/between/last 32, tokens kept/seen, KV held/full\n", out);
    if (unclaimed)
        fputs("* full does not beat chance by 15 points here: no claim is made about the score\n", out);
}

void eval_report_table(const struct eval_report *report, FILE *out) {
    const struct eval_setup *setup = report->setup;
    int width = 6;
    for (uint32_t i = 0; i < setup->variants_count; i++)
        width = (int)strlen(setup->variants[i].policy) > width ? (int)strlen(setup->variants[i].policy) : width;
    fprintf(out, "%s, task %s, seed %llu, %s%s\n", report->model, setup->task, (unsigned long long)setup->seed,
        setup->query_aware ? "the question is seen before the prune" : "the question comes after the prune",
        report->complete ? "" : "; stopped before the end");
    if (report->skipped > 0)
        fprintf(out, "%u items were longer than the length and were skipped\n", report->skipped);
    for (size_t i = 0; i < report->rows->count; i++)
        print_row(report, &report->rows->list[i], width, out);
    print_legend(report, out);
}

/* ---- CSV ---- */

static void print_field(FILE *out, const char *text) {
    fputc('"', out);
    for (; *text != '\0'; text++) {
        if (*text == '"')
            fputc('"', out);
        fputc(*text, out);
    }
    fputc('"', out);
}

static void print_numbers(FILE *out, bool present, const double *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (present && isfinite(values[i]))
            fprintf(out, ",%.9g", values[i]);
        else
            fputc(',', out);
    }
}

static void print_csv_row(const struct eval_setup *setup, const struct eval_row *row, FILE *out) {
    const struct eval_variant *variant = &setup->variants[row->variant];
    print_field(out, setup->task);
    fputc(',', out);
    print_field(out, variant->policy);
    print_numbers(out, variant->settings.tokens == 0, &variant->ratio, 1);
    print_numbers(out, variant->settings.tokens != 0, &(double){variant->settings.tokens}, 1);
    fprintf(out, ",%u,", setup->lengths[row->length]);
    print_field(out, row->group);
    fprintf(out, ",%u", row->n);
    print_numbers(out, row->has_kl,
        (double[]){row->kl.mean, row->kl.low, row->kl.high, row->kl_geometric, row->top1, row->perplexity,
            row->perplexity_full},
        7);
    print_numbers(out, row->has_score,
        (double[]){row->score.mean, row->score.low, row->score.high, row->score_full, row->score_difference.mean,
            row->score_difference.low, row->score_difference.high, row->chance, row->claimed, row->full_right,
            row->errors[EVAL_RIGHT], row->errors[EVAL_REPETITIVE], row->errors[EVAL_OVER_LENGTH],
            row->errors[EVAL_WRONG]},
        14);
    print_numbers(out, row->has_gold,
        (double[]){row->gold_logprob.mean, row->gold_logprob.low, row->gold_logprob.high, row->gold_logprob_full,
            row->gold_difference.mean, row->gold_difference.low, row->gold_difference.high},
        7);
    print_numbers(out, row->has_output, &row->length_ratio, 1);
    print_numbers(out, true,
        (double[]){row->tokens_per_second, row->tokens_kept, row->tokens_seen, row->bytes, row->bytes_full}, 5);
    print_numbers(out, row->positions.present,
        (double[]){row->positions.sinks, row->positions.between, row->positions.recent}, 3);
    fputc('\n', out);
}

void eval_report_csv(const struct eval_report *report, FILE *out) {
    fputs("task,kv_policy,kv_ratio,kv_tokens,length,group,n,kl,kl_low,kl_high,kl_geometric,top1,perplexity,"
          "perplexity_full,score,score_low,score_high,score_full,score_difference,score_difference_low,"
          "score_difference_high,chance,claimed,full_right,right,repetitive,over_length,wrong,gold_logprob,"
          "gold_logprob_low,gold_logprob_high,gold_logprob_full,gold_logprob_difference,gold_logprob_difference_low,"
          "gold_logprob_difference_high,length_ratio,tokens_per_second,kv_tokens_kept,kv_tokens_seen,kv_bytes,"
          "kv_bytes_full,kept_sinks,kept_between,kept_recent\n",
        out);
    for (size_t i = 0; i < report->rows->count; i++)
        print_csv_row(report->setup, &report->rows->list[i], out);
    for (size_t i = 0; i < report->rows->groups_count; i++)
        print_csv_row(report->setup, &report->rows->groups[i], out);
}
