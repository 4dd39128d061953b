/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/run_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/clock.h"

static const struct sample_params greedy = {.top_p = 1, .forced = -1};

int give_way(struct eval_run *run) {
    return run->options.between == NULL ? 0 : run->options.between(run->options.context);
}

void branch_close(struct branch *branch) {
    sequence_free(branch->sequence);
    branch->sequence = NULL;
}

/* The branch that reports memory ends last or alone: TEXT of kl, ANSWER otherwise. */
static void finish_branch(struct lane *lane, struct branch *branch) {
    if (branch == &lane->branches[0])
        lane->memory = sequence_memory(branch->sequence);
    branch_close(branch);
}

static int refuse_logits(struct eval_run *run, const struct lane *lane, struct error *error) {
    return error_set(error, ERROR_FORMAT, "the logits of item %u under policy %s are not numbers", run->work->index,
        run->options.setup->variants[lane->variant].policy);
}

/* Whether the first line that is not empty ends in these bytes of the answer. */
static bool first_line_ends(struct branch *branch, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == '\n' && branch->line_begun)
            return true;
        if (memchr(" \t\r\n", text[i], 4) == NULL)
            branch->line_begun = true;
    }
    return false;
}

/* Takes a generated token. Sets *end when it is the last one. */
static int take_token(struct eval_run *run, struct branch *branch, int32_t token, bool *end, struct error *error) {
    const struct tokenizer *tokenizer = run->options.tokenizer;
    if (tokenizer_is_end(tokenizer, token)) {
        *end = true;
        return 0;
    }
    size_t bytes;
    const char *text = tokenizer_token_bytes(tokenizer, token, &bytes);
    bool special = tokenizer_is_special(tokenizer, token);
    int stopped = special ? 0 : text_stream_push(branch->stream, text, bytes);
    if (stopped < 0)
        return error_set(error, ERROR_MEMORY, "no memory for an answer");
    bool line_ends = !special && run->work->item->first_line && first_line_ends(branch, text, bytes);
    branch->output[branch->generated++] = token;
    branch->next = token;
    *end = stopped > 0 || line_ends || branch->generated >= run->work->item->max_tokens;
    return 0;
}

/* ---- the beginning of branches ---- */

static int open_kl(struct eval_run *run, struct lane *lane, const struct sample_result *first) {
    if (lane->variant == 0 && !lane->silent)
        run->own_first = first->token;
    lane->branches[0] = (struct branch){.kind = BRANCH_TEXT, .next = run->work->question->text.ids[0]};
    lane->branches[1] = (struct branch){.kind = BRANCH_OWN, .next = run->own_first};
    return 0;
}

static int open_answer(struct eval_run *run, struct lane *lane, const struct sample_result *first,
    const struct sample_result *gold, bool *answer_ends, bool *gold_ends, struct error *error) {
    const struct eval_item *item = run->work->item;
    const struct token_list *expected = &run->work->question->gold;
    struct branch *answer = &lane->branches[0];
    *answer = (struct branch){.kind = BRANCH_ANSWER};
    const char *stops[1] = {item->stop};
    uint32_t most = item->max_tokens > 0 ? item->max_tokens : 1;
    answer->stream = text_stream_create(stops, item->stop != NULL);
    answer->output = calloc(most, sizeof *answer->output);
    if (answer->stream == NULL || answer->output == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for an answer of %u tokens", most);
    lane->branches[1] = (struct branch){.kind = BRANCH_GOLD};
    if (expected->count > 0) {
        lane->branches[1].loss = -(double)gold->logprob;
        lane->branches[1].next = expected->ids[0];
    }
    *gold_ends = expected->count <= 1;
    return take_token(run, answer, first->token, answer_ends, error);
}

int first_results(struct eval_run *run, uint32_t row, struct sample_result out[2], struct error *error) {
    const struct token_list *gold = &run->work->question->gold;
    struct sample_params params[2] = {greedy, greedy};
    uint32_t rows[2] = {row, row};
    uint32_t count = 1;
    if (run->work->item == NULL) {
        params[0].banned = run->ends.ids;
        params[0].banned_count = (uint32_t)run->ends.count;
    } else if (gold->count > 0) {
        params[1].forced = gold->ids[0];
        params[1].want_logprob = true;
        count = 2;
    }
    return engine_sample(run->options.engine, rows, params, count, out, error);
}

int open_branches(struct eval_run *run, struct lane *lane, const struct sample_result first[2], struct error *error) {
    bool ends[BRANCHES] = {false, false};
    int code = 0;
    if (!lane->silent && first[0].undefined)
        return refuse_logits(run, lane, error);
    if (run->work->item == NULL)
        code = open_kl(run, lane, first);
    else
        code = open_answer(run, lane, &first[0], &first[1], &ends[0], &ends[1], error);
    if (code != 0)
        return code;
    if (!ends[1]) {
        lane->branches[1].sequence = sequence_fork(lane->sequence);
        if (lane->branches[1].sequence == NULL)
            return error_set(error, ERROR_PAGES, "no memory for a fork of a sequence");
    }
    lane->branches[0].sequence = lane->sequence;
    lane->sequence = NULL;
    if (ends[0])
        finish_branch(lane, &lane->branches[0]);
    return 0;
}

/* ---- the question, after the prune ---- */

static uint32_t least(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

/* The lanes that still read the question, and their next tokens. */
static uint32_t collect_asking(struct eval_run *run) {
    const struct token_list *asked = &run->work->question->asked;
    uint32_t count = 0, share;
    for (uint32_t i = 0; i < run->lanes_count; i++)
        if (run->lanes[i].sequence != NULL && run->lanes[i].asked < asked->count)
            run->owners[count++] = &run->lanes[i];
    if (count == 0)
        return 0;
    share = engine_batch_rows(run->options.engine) / count;
    for (uint32_t i = 0; i < count; i++) {
        struct lane *lane = run->owners[i];
        uint32_t left = (uint32_t)asked->count - lane->asked;
        uint32_t rows = least(least(left, sequence_room(lane->sequence)), share > 0 ? share : 1);
        run->items[i] = (struct batch_item){.sequence = lane->sequence,
            .tokens = asked->ids + lane->asked,
            .count = rows,
            .want = rows == left ? WANT_LAST : WANT_NONE};
        run->sequences[i] = lane->sequence;
    }
    return count;
}

static void add_time(struct eval_run *run, uint32_t count, double start) {
    double seconds = clock_seconds() - start;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < count; i++)
        rows += run->items[i].count;
    for (uint32_t i = 0; i < count; i++) {
        run->owners[i]->seconds += seconds * run->items[i].count / rows;
        run->owners[i]->tokens += run->items[i].count;
    }
}

static int finish_asking(struct eval_run *run, struct lane *lane, uint32_t row, struct error *error) {
    struct sample_result first[2];
    int code = first_results(run, row, first, error);
    return code == 0 ? open_branches(run, lane, first, error) : code;
}

static int ask(struct eval_run *run, struct error *error) {
    struct engine *engine = run->options.engine;
    int code = 0;
    uint32_t count;
    while (code == 0 && (count = collect_asking(run)) > 0) {
        double start = clock_seconds();
        code = engine_forward(engine, run->items, count, error);
        if (code == 0)
            code = engine_prune(engine, run->sequences, count, error);
        add_time(run, count, start);
        for (uint32_t i = 0; i < count && code == 0; i++) {
            run->owners[i]->asked += run->items[i].count;
            if (run->items[i].want == WANT_LAST)
                code = finish_asking(run, run->owners[i], run->items[i].first_row, error);
        }
        if (code == 0)
            code = give_way(run);
    }
    return code;
}

/* ---- steps of branches ---- */

static uint32_t collect_active(struct eval_run *run) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < run->lanes_count; i++) {
        for (int b = 0; b < BRANCHES; b++) {
            struct branch *branch = &run->lanes[i].branches[b];
            if (branch->sequence == NULL)
                continue;
            run->items[count] = (struct batch_item){
                .sequence = branch->sequence, .tokens = &branch->next, .count = 1, .want = WANT_LAST};
            run->sequences[count] = branch->sequence;
            run->owners[count] = &run->lanes[i];
            run->active[count++] = branch;
        }
    }
    return count;
}

/* The token after the one that was fed, where it is known: -1 for an answer. own_next: the full model's choice. */
static int32_t known_next(struct eval_run *run, const struct branch *branch, int32_t own_next) {
    const struct eval_question *question = run->work->question;
    switch (branch->kind) {
    case BRANCH_TEXT:
        return question->text.ids[branch->steps + 1];
    case BRANCH_OWN:
        return own_next;
    case BRANCH_GOLD:
        return question->gold.ids[branch->steps + 1];
    case BRANCH_ANSWER:
        break;
    }
    return -1;
}

/* What the full model continues its own text with. */
static int choose_own(struct eval_run *run, uint32_t count, int32_t *token, struct error *error) {
    struct sample_params params = greedy;
    struct sample_result result;
    params.banned = run->ends.ids;
    params.banned_count = (uint32_t)run->ends.count;
    for (uint32_t i = 0; i < count; i++) {
        if (run->active[i]->kind != BRANCH_OWN || run->owners[i]->variant != 0)
            continue;
        int code = engine_sample(run->options.engine, &run->items[i].first_row, &params, 1, &result, error);
        if (code != 0)
            return code;
        *token = result.token;
    }
    return 0;
}

static int sample_active(struct eval_run *run, uint32_t count, struct error *error) {
    int32_t own_next = -1;
    int code = run->work->item == NULL ? choose_own(run, count, &own_next, error) : 0;
    for (uint32_t i = 0; i < count; i++) {
        run->rows[i] = run->items[i].first_row;
        run->params[i] = greedy;
        run->params[i].forced = known_next(run, run->active[i], own_next);
        run->params[i].want_logprob = run->params[i].forced >= 0;
        run->params[i].top_count = run->work->item == NULL;
    }
    return code != 0 ? code : engine_sample(run->options.engine, run->rows, run->params, count, run->samples, error);
}

/* run->kl, and for run->samples of a teacher's place the one of the teacher: indices in run->teacher_rows. */
static int compare_active(struct eval_run *run, uint32_t count, struct error *error) {
    uint32_t teacher[BRANCHES] = {0};
    for (uint32_t i = 0; i < count; i++)
        if (run->owners[i]->variant == 0)
            teacher[run->active[i]->kind] = i;
    for (uint32_t i = 0; i < count; i++)
        run->teacher_rows[i] = run->rows[teacher[run->active[i]->kind]];
    int code = engine_kl(run->options.engine, run->teacher_rows, run->rows, count, run->kl, error);
    for (uint32_t i = 0; i < count && code == 0; i++) {
        struct branch *branch = run->active[i];
        branch->kl += run->owners[i]->variant == 0 ? 0 : fmax(0, run->kl[i]); /* rounding may leave it below zero */
        branch->same += run->samples[i].top[0].token == run->samples[teacher[branch->kind]].top[0].token;
    }
    return code;
}

static int advance(struct eval_run *run, uint32_t i, struct error *error) {
    struct branch *branch = run->active[i];
    const struct eval_question *question = run->work->question;
    bool end = false;
    int code = 0;
    if (run->samples[i].undefined)
        return refuse_logits(run, run->owners[i], error);
    branch->steps++;
    if (branch->kind == BRANCH_ANSWER) {
        code = take_token(run, branch, run->samples[i].token, &end, error);
    } else {
        branch->loss -= (double)run->samples[i].logprob;
        branch->next = run->params[i].forced;
        end = branch->kind == BRANCH_GOLD ? branch->steps + 1 >= question->gold.count
                                          : branch->steps + 1 >= question->text.count;
    }
    if (code == 0 && end)
        finish_branch(run->owners[i], branch);
    return code;
}

/* Of run->sequences, those that are due: beside others one after the other, since all may be due at once. Rows are
 * lost. Time of others is not counted. */
static int prune_active(struct eval_run *run, uint32_t count, double *start, struct error *error) {
    struct engine *engine = run->options.engine;
    int code = 0;
    if (run->options.background == NULL)
        return engine_prune(engine, run->sequences, count, error);
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        if (sequence_room(run->sequences[i]) != 0)
            continue;
        code = engine_prune(engine, &run->sequences[i], 1, error);
        double before = clock_seconds();
        if (code == 0)
            code = give_way(run);
        *start += clock_seconds() - before;
    }
    return code;
}

static int step(struct eval_run *run, uint32_t count, struct error *error) {
    double start = clock_seconds();
    int code = engine_forward(run->options.engine, run->items, count, error);
    if (code != 0)
        return code;
    code = sample_active(run, count, error);
    if (code == 0 && run->work->item == NULL)
        code = compare_active(run, count, error);
    if (code == 0)
        code = prune_active(run, count, &start, error);
    add_time(run, count, start);
    for (uint32_t i = 0; i < count && code == 0; i++)
        code = advance(run, i, error);
    return code;
}

int run_wave(struct eval_run *run, struct error *error) {
    int code = ask(run, error);
    uint32_t count;
    while (code == 0 && (count = collect_active(run)) > 0) {
        code = step(run, count, error);
        if (code == 0)
            code = give_way(run);
    }
    return code;
}
