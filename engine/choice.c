/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/choice.h"

#include <stdlib.h>
#include <string.h>

static bool wants_text_of_prompt(const struct request *request) {
    return request->echo || request->logprobs >= 0;
}

/* Decodes a prompt to text; special tokens are shown as they were given. */
static int decode_prompt(const struct tokenizer *tokenizer, const struct prompt *prompt, struct prompt_text *out) {
    struct text_stream *stream = text_stream_create(NULL, 0);
    out->offsets = malloc(prompt->count * sizeof *out->offsets);
    int code = stream == NULL || out->offsets == NULL ? ERROR_MEMORY : 0;
    bool begins = true; /* nothing but special tokens so far */
    for (uint32_t i = 0; code == 0 && i < prompt->count; i++) {
        size_t bytes, skip = begins ? tokenizer_leading_space(tokenizer, prompt->tokens[i]) : 0;
        const char *text = tokenizer_token_bytes(tokenizer, prompt->tokens[i], &bytes);
        code = text_stream_push(stream, text + skip, bytes - skip);
        begins &= tokenizer_is_special(tokenizer, prompt->tokens[i]);
    }
    if (code == 0)
        code = text_stream_finish(stream);
    if (code == 0) {
        const char *text = text_stream_take(stream, &out->bytes);
        out->text = malloc(out->bytes + 1);
        if (out->text == NULL) {
            code = ERROR_MEMORY;
        } else {
            memcpy(out->text, text, out->bytes);
            out->text[out->bytes] = '\0';
            for (uint32_t i = 0; i < prompt->count; i++)
                out->offsets[i] = (uint32_t)text_stream_token_offset(stream, i);
            out->code_points = text_stream_token_offset(stream, prompt->count);
        }
    }
    text_stream_free(stream);
    return code;
}

static int prepare_prompts(struct task *task) {
    const struct request *request = task->request;
    if (!wants_text_of_prompt(request))
        return 0;
    for (uint32_t p = 0; p < request->prompts_count; p++) {
        struct prompt_text *prompt = &task->prompts[p];
        if (decode_prompt(task->tokenizer, &request->prompts[p], prompt) != 0)
            return ERROR_MEMORY;
        if (request->echo && request->logprobs >= 0) {
            prompt->results = calloc(request->prompts[p].count, sizeof *prompt->results);
            if (prompt->results == NULL)
                return ERROR_MEMORY;
        }
    }
    return 0;
}

static int prepare_choices(struct task *task) {
    const struct request *request = task->request;
    for (uint32_t i = 0; i < task->choices_count; i++) {
        struct choice *choice = &task->choices[i];
        choice->task = task;
        choice->number = i;
        choice->state = i % request->n == 0 ? CHOICE_WAITING : CHOICE_FOLLOWING;
        choice->text = text_stream_create((const char *const *)request->stops, request->stops_count);
        choice->reserve = calloc(1, sizeof *choice->reserve);
        if (task->automaton != NULL &&
            (choice->mask = calloc(request->grammar_vocabulary->words, sizeof *choice->mask)) == NULL)
            return ERROR_MEMORY;
        const struct prompt *prompt = choice_prompt(choice);
        if (choice->text == NULL || choice->reserve == NULL ||
            penalties_begin(&choice->penalties, &request->penalties, prompt->tokens, prompt->count) != 0)
            return ERROR_MEMORY;
    }
    return 0;
}

static int prepare_held(struct task *task) {
    const struct request *request = task->request;
    if (request->min_tokens == 0)
        return 0;
    for (uint32_t i = 0; i < request->stop_tokens_count; i++)
        if (token_list_append(&task->held, request->stop_tokens[i]) != 0)
            return ERROR_MEMORY;
    return tokenizer_list_ends(task->tokenizer, &task->held);
}

struct task *task_create(struct request *request, const struct tokenizer *tokenizer) {
    struct task *task = calloc(1, sizeof *task);
    if (task == NULL)
        return NULL;
    task->request = request;
    task->tokenizer = tokenizer;
    task->choices_count = request->prompts_count * request->n;
    task->unfinished = task->choices_count;
    task->choices = calloc(task->choices_count, sizeof *task->choices);
    task->prompts = calloc(request->prompts_count, sizeof *task->prompts);
    struct error error;
    if (request->grammar != NULL)
        task->automaton = automaton_create(request->grammar, request->grammar_vocabulary, &error);
    bool no_automaton = request->grammar != NULL && task->automaton == NULL;
    if (no_automaton || task->choices == NULL || task->prompts == NULL || prepare_prompts(task) != 0 ||
        prepare_choices(task) != 0 || prepare_held(task) != 0) {
        task_free(task);
        return NULL;
    }
    return task;
}

void task_free(struct task *task) {
    if (task == NULL)
        return;
    for (uint32_t i = 0; task->choices != NULL && i < task->choices_count; i++) {
        struct choice *choice = &task->choices[i];
        sequence_free(choice->sequence);
        token_list_free(&choice->generated);
        penalties_free(&choice->penalties);
        text_stream_free(choice->text);
        free(choice->pending);
        free(choice->results);
        free(choice->mask);
        pooled_free(&choice->pooled);
        output_node_free(choice->reserve);
    }
    for (uint32_t p = 0; task->prompts != NULL && p < task->request->prompts_count; p++) {
        free(task->prompts[p].text);
        free(task->prompts[p].offsets);
        free(task->prompts[p].results);
    }
    token_list_free(&task->held);
    automaton_free(task->automaton);
    free(task->choices);
    free(task->prompts);
    free(task);
}

static uint32_t prompt_index(const struct choice *choice) {
    return choice->number / choice->task->request->n;
}

static struct prompt_text *prompt_text(const struct choice *choice) {
    return &choice->task->prompts[prompt_index(choice)];
}

const struct prompt *choice_prompt(const struct choice *choice) {
    return &choice->task->request->prompts[prompt_index(choice)];
}

uint32_t choice_total(const struct choice *choice) {
    return choice_prompt(choice)->count + (uint32_t)choice->generated.count;
}

uint32_t choice_remaining(const struct choice *choice) {
    return choice_total(choice) - (choice->sequence == NULL ? 0 : sequence_length(choice->sequence));
}

bool choice_is_leader(const struct choice *choice) {
    return choice->number % choice->task->request->n == 0;
}

bool choice_is_past_prompt(const struct choice *choice) {
    return choice->sequence != NULL && sequence_length(choice->sequence) >= choice_prompt(choice)->count;
}

bool choice_is_decoding(const struct choice *choice) {
    if (choice->generated.count == 0)
        return false;
    return choice_remaining(choice) == 1 || (choice_policy(choice) != NULL && choice_is_past_prompt(choice));
}

uint32_t choice_chunk(const struct choice *choice) {
    uint32_t remaining = choice_remaining(choice);
    if (choice_policy(choice) == NULL)
        return remaining;
    if (choice_is_past_prompt(choice))
        return 1;
    uint32_t of_prompt = choice_prompt(choice)->count - sequence_length(choice->sequence);
    uint32_t room = sequence_room(choice->sequence), snapshot = sequence_snapshot_room(choice->sequence);
    room = room < snapshot ? room : snapshot;
    return of_prompt < room ? of_prompt : room;
}

const struct policy_settings *choice_policy(const struct choice *choice) {
    const struct policy_settings *settings = &choice->task->kv_policy;
    return settings->policy != NULL ? settings : NULL;
}

uint32_t choice_tokens_max(const struct choice *choice) {
    return prompt_text(choice)->tokens_max;
}

void choice_copy_tokens(const struct choice *choice, uint32_t first, uint32_t count, int32_t *out) {
    const struct prompt *prompt = choice_prompt(choice);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = first + i;
        out[i] = at < prompt->count ? prompt->tokens[at] : choice->generated.ids[at - prompt->count];
    }
}

bool choice_wants_prompt_rows(const struct choice *choice) {
    const struct prompt_text *prompt = prompt_text(choice);
    if (choice->task->request->pooling == POOLING_MEAN)
        return choice->pooled.count < choice_prompt(choice)->count;
    return choice_is_leader(choice) && prompt->results != NULL &&
           prompt->results_done + 1 < choice_prompt(choice)->count;
}

static void want_logprobs(const struct request *request, struct sample_params *params) {
    params->want_logprob = request->logprobs >= 0;
    params->top_count = request->logprobs > 0 ? (uint32_t)request->logprobs : 0;
}

void choice_prompt_params(const struct choice *choice, uint32_t position, struct sample_params *params) {
    *params = (struct sample_params){.temperature = 1, .top_p = 1};
    params->forced = choice_prompt(choice)->tokens[position + 1];
    want_logprobs(choice->task->request, params);
}

void choice_accept_prompt_result(struct choice *choice, uint32_t position, const struct sample_result *result) {
    struct prompt_text *prompt = prompt_text(choice);
    prompt->results[position + 1] = *result;
    if (prompt->results_done < position + 1)
        prompt->results_done = position + 1;
}

int choice_accept_states(struct choice *choice, uint32_t first, const float *states, uint32_t count, uint32_t width) {
    uint32_t known = 0;
    if (choice->task->request->pooling == POOLING_MEAN)
        known = choice->pooled.count - first < count ? choice->pooled.count - first : count;
    return pooled_add(&choice->pooled, states + (size_t)known * width, count - known, width);
}

/* Leads the choice's place through its text, when it has none or there was no memory to keep it. */
static int find_place(struct choice *choice, struct error *error) {
    struct automaton *automaton = choice->task->automaton;
    if (!automaton_is_lost(automaton, &choice->place))
        return 0;
    int code = automaton_start(automaton, &choice->place, error);
    for (size_t i = 0; code == 0 && i < choice->generated.count; i++) {
        size_t bytes;
        const char *text = tokenizer_token_bytes(choice->task->tokenizer, choice->generated.ids[i], &bytes);
        code = automaton_advance(automaton, &choice->place, text, bytes, error);
    }
    return code;
}

/* What went wrong with a client's grammar is the client's fault, unless it was memory. */
static const uint32_t *refuse_grammar(struct error *error) {
    if (error->code != ERROR_MEMORY)
        error->code = ERROR_INVALID;
    return NULL;
}

static const uint32_t *make_mask(struct choice *choice) {
    struct automaton *automaton = choice->task->automaton;
    struct error *error = &choice->grammar_error;
    if (automaton == NULL)
        return NULL;
    automaton_trim(automaton, &choice->task->choices[0].place, sizeof *choice, choice->task->choices_count);
    if (find_place(choice, error) != 0 || automaton_mask(automaton, &choice->place, choice->mask, error) != 0)
        return refuse_grammar(error);
    return choice->mask;
}

void choice_sample_params(
    struct choice *choice, const int32_t *banned, uint32_t banned_count, struct sample_params *params) {
    const struct request *request = choice->task->request;
    *params = request->sampling;
    params->stream = choice->number % request->n;
    params->step = (uint32_t)choice->generated.count;
    params->forced = -1;
    params->banned = request->ignore_eos ? banned : NULL;
    params->banned_count = request->ignore_eos ? banned_count : 0;
    if (choice->generated.count < request->min_tokens) {
        params->banned = choice->task->held.ids;
        params->banned_count = (uint32_t)choice->task->held.count;
    }
    params->changes = choice->penalties.changes;
    params->changes_count = choice->penalties.count;
    params->allowed = make_mask(choice);
    want_logprobs(request, params);
}

/* Grows an array to hold one more element of `size` bytes. */
static int reserve_one(void **array, size_t count, size_t *capacity, size_t size) {
    if (count < *capacity)
        return 0;
    size_t grown = *capacity == 0 ? 16 : 2 * *capacity;
    void *memory = realloc(*array, grown * size);
    if (memory == NULL)
        return ERROR_MEMORY;
    *array = memory;
    *capacity = grown;
    return 0;
}

static size_t count_code_points(const char *text, size_t bytes) {
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++)
        count += ((unsigned char)text[i] & 0xC0) != 0x80;
    return count;
}

/* Moves what the stream has released to the pending text. */
static int take_text(struct choice *choice) {
    size_t bytes;
    const char *text = text_stream_take(choice->text, &bytes);
    if (bytes == 0)
        return 0;
    if (choice->pending_bytes + bytes + 1 > choice->pending_capacity) {
        size_t capacity = 2 * (choice->pending_bytes + bytes + 1);
        char *grown = realloc(choice->pending, capacity);
        if (grown == NULL)
            return ERROR_MEMORY;
        choice->pending = grown;
        choice->pending_capacity = capacity;
    }
    memcpy(choice->pending + choice->pending_bytes, text, bytes);
    choice->pending_bytes += bytes;
    choice->code_points += count_code_points(text, bytes);
    return 0;
}

/* Tokens whose text begins behind the cut of a stop string are no part of the answer. */
static void drop_cut_results(struct choice *choice) {
    while (choice->results_count > choice->results_published &&
           text_stream_token_offset(choice->text, choice->results_count - 1) >= choice->code_points)
        choice->results_count--;
}

static bool keeps_special(const struct request *request, int32_t token) {
    for (uint32_t i = 0; i < request->kept_special_count; i++)
        if (request->kept_special[i] == token)
            return true;
    return false;
}

static bool is_stop_token(const struct request *request, int32_t token) {
    for (uint32_t i = 0; i < request->stop_tokens_count; i++)
        if (request->stop_tokens[i] == token)
            return true;
    return false;
}

/* The token's bytes through the grammar; they are allowed, since the token was in the mask. */
static int follow_token(struct choice *choice, const char *text, size_t bytes, bool *complete) {
    struct automaton *automaton = choice->task->automaton;
    struct error error;
    int code = automaton_is_lost(automaton, &choice->place) /* the token is among those generated */
                   ? find_place(choice, &error)
                   : automaton_advance(automaton, &choice->place, text, bytes, &error);
    if (code != 0)
        return ERROR_MEMORY;
    *complete = automaton_must_end(automaton, &choice->place);
    return 0;
}

int choice_accept_token(struct choice *choice, const struct sample_result *result, uint32_t tokens_max, double now) {
    const struct request *request = choice->task->request;
    const struct tokenizer *tokenizer = choice->task->tokenizer;
    if (choice->generated.count == 0)
        choice->first_token_s = now;
    if (token_list_append(&choice->generated, result->token) != 0 ||
        penalties_add(&choice->penalties, &request->penalties, result->token) != 0)
        return ERROR_MEMORY;
    if ((!request->ignore_eos && tokenizer_is_end(tokenizer, result->token)) || is_stop_token(request, result->token))
        return FINISH_STOP;
    if (request->logprobs >= 0) {
        if (reserve_one((void **)&choice->results, choice->results_count, &choice->results_capacity,
                sizeof *choice->results) != 0)
            return ERROR_MEMORY;
        choice->results[choice->results_count++] = *result;
    }
    size_t bytes;
    const char *text = tokenizer_token_bytes(tokenizer, result->token, &bytes);
    bool complete = false;
    if (choice->task->automaton != NULL && follow_token(choice, text, bytes, &complete) != 0)
        return ERROR_MEMORY;
    if (request->skip_special && tokenizer_is_special(tokenizer, result->token) &&
        !keeps_special(request, result->token))
        bytes = 0;
    int stopped = text_stream_push(choice->text, text, bytes);
    if (stopped < 0 || take_text(choice) != 0)
        return ERROR_MEMORY;
    if (stopped == 1) {
        drop_cut_results(choice);
        return FINISH_STOP;
    }
    if (complete)
        return FINISH_STOP;
    if (choice->generated.count >= request->max_tokens || choice_total(choice) >= tokens_max)
        return FINISH_LENGTH;
    return FINISH_NONE;
}

static void fill_entry(struct output_token *entry, const struct sample_result *result, uint32_t offset,
    bool from_prompt, bool has_logprob) {
    entry->token = result->token;
    entry->text_offset = offset;
    entry->from_prompt = from_prompt;
    entry->has_logprob = has_logprob;
    if (!has_logprob)
        return;
    entry->logprob = result->logprob;
    entry->top_count = result->top_count;
    for (uint32_t i = 0; i < result->top_count; i++) {
        entry->top[i].token = result->top[i].token;
        entry->top[i].logprob = result->top[i].logprob;
    }
}

/* Generated tokens whose text is out. */
static size_t results_released(const struct choice *choice, enum finish_reason finish) {
    if (finish != FINISH_NONE)
        return choice->results_count;
    size_t released = text_stream_tokens_released(choice->text);
    return released < choice->results_count ? released : choice->results_count;
}

/* Allocates the entries with room for their lists of most likely tokens behind them. */
static struct output_token *allocate_entries(size_t count, uint32_t top) {
    size_t entry_bytes = sizeof(struct output_token), top_bytes = top * sizeof(*((struct output_token *)0)->top);
    char *memory = calloc(count, entry_bytes + top_bytes);
    struct output_token *entries = (struct output_token *)(void *)memory;
    for (size_t i = 0; memory != NULL && i < count; i++)
        entries[i].top = (void *)(memory + count * entry_bytes + i * top_bytes);
    return entries;
}

static int add_entries(struct choice *choice, struct output *output, bool echo, enum finish_reason finish) {
    const struct request *request = choice->task->request;
    const struct prompt_text *prompt = prompt_text(choice);
    const struct prompt *tokens = choice_prompt(choice);
    size_t from_prompt = echo ? tokens->count : 0;
    size_t released = results_released(choice, finish);
    size_t count = from_prompt + released - choice->results_published;
    if (request->logprobs < 0 || count == 0)
        return 0;
    output->tokens = allocate_entries(count, (uint32_t)request->logprobs);
    if (output->tokens == NULL)
        return ERROR_MEMORY;
    output->tokens_count = (uint32_t)count;
    struct output_token *entry = output->tokens;
    for (uint32_t i = 0; i < from_prompt; i++, entry++) {
        fill_entry(entry, &prompt->results[i], prompt->offsets[i], true, i > 0 && i <= prompt->results_done);
        entry->token = tokens->tokens[i];
    }
    for (; choice->results_published < released; choice->results_published++, entry++) {
        size_t offset = prompt->code_points + text_stream_token_offset(choice->text, choice->results_published);
        fill_entry(entry, &choice->results[choice->results_published], (uint32_t)offset, false, true);
    }
    return 0;
}

static int add_text(struct choice *choice, struct output *output, bool echo) {
    const struct prompt_text *prompt = prompt_text(choice);
    size_t prompt_bytes = echo ? prompt->bytes : 0;
    output->text_bytes = prompt_bytes + choice->pending_bytes;
    output->text = malloc(output->text_bytes + 1);
    if (output->text == NULL)
        return ERROR_MEMORY;
    if (prompt_bytes > 0)
        memcpy(output->text, prompt->text, prompt_bytes);
    if (choice->pending_bytes > 0)
        memcpy(output->text + prompt_bytes, choice->pending, choice->pending_bytes);
    output->text[output->text_bytes] = '\0';
    choice->pending_bytes = 0;
    return 0;
}

static void add_finish(
    struct choice *choice, struct output *output, enum finish_reason finish, const struct error *error, double now) {
    const struct task *task = choice->task;
    output->finish = finish;
    if (error != NULL)
        output->error = *error;
    output->prompt_tokens = choice_prompt(choice)->count;
    output->completion_tokens = (uint32_t)choice->generated.count;
    output->cached_tokens = choice->cached_tokens;
    output->kv_tokens_seen = choice->memory.seen;
    output->kv_tokens_kept = choice->memory.kept;
    output->kv_bytes = choice->memory.bytes;
    output->kv_bytes_full = choice->memory.bytes_full;
    double started = task->started ? task->started_s : now;
    double first = choice->first_token_s > 0 ? choice->first_token_s : now;
    output->queued_s = started - task->submitted_s;
    output->prefill_s = first - started;
    output->decode_s = now - first;
}

/* Whose output it is, and when: what every output has, also one for which memory runs out. */
static void begin_output(const struct choice *choice, struct output *output, double now) {
    output->request = choice->task->request;
    output->choice = choice->number;
    output->time_s = now;
}

/* Text and entries into an output; ERROR_MEMORY leaves it without, and the choice as it was. */
static int fill_output(struct choice *choice, struct output *output, enum finish_reason finish) {
    const struct request *request = choice->task->request;
    bool echo = request->echo && !choice->echo_published && finish != FINISH_CANCELLED && finish != FINISH_ERROR;
    size_t results_published = choice->results_published;
    if (add_entries(choice, output, echo, finish) != 0 || add_text(choice, output, echo) != 0) {
        free(output->tokens);
        output->tokens = NULL;
        output->tokens_count = 0;
        output->text_bytes = 0;
        choice->results_published = results_published;
        return ERROR_MEMORY;
    }
    output->generated = (uint32_t)choice->generated.count - choice->generated_published;
    choice->generated_published = (uint32_t)choice->generated.count;
    choice->echo_published |= echo;
    return 0;
}

struct output_node *choice_make_output(struct choice *choice, double now) {
    const struct request *request = choice->task->request;
    bool first = choice->generated_published == 0;
    bool more = choice->pending_bytes > 0 || results_released(choice, FINISH_NONE) > choice->results_published;
    if (!first && !(request->stream && more))
        return NULL;
    struct output_node *node = calloc(1, sizeof *node);
    if (node == NULL)
        return NULL;
    begin_output(choice, &node->output, now);
    if (fill_output(choice, &node->output, FINISH_NONE) != 0) {
        output_node_free(node);
        return NULL;
    }
    return node;
}

struct output_node *choice_make_last_output(
    struct choice *choice, enum finish_reason finish, const struct error *error, double now) {
    struct output_node *node = choice->reserve;
    choice->reserve = NULL;
    begin_output(choice, &node->output, now);
    int code = 0;
    if (finish == FINISH_STOP || finish == FINISH_LENGTH)
        code = text_stream_finish(choice->text) != 0 || take_text(choice) != 0 ? ERROR_MEMORY : 0;
    if (code == 0)
        code = fill_output(choice, &node->output, finish);
    if (code == 0 && finish == FINISH_STOP) {
        node->output.vector = choice->pooled.sum;
        node->output.vector_width = choice->pooled.width;
        choice->pooled = (struct pooled){0};
    }
    struct error memory = {.code = ERROR_MEMORY, .message = "no memory for the answer"};
    add_finish(choice, &node->output, code == 0 ? finish : FINISH_ERROR, code == 0 ? error : &memory, now);
    return node;
}

void output_node_free(struct output_node *node) {
    if (node == NULL)
        return;
    free(node->output.text);
    free(node->output.tokens);
    free(node->output.vector);
    free(node);
}

int request_prepare(struct request *request, const struct tokenizer *tokenizer, struct error *error) {
    if (request->task == NULL)
        request->task = task_create(request, tokenizer);
    return request->task != NULL ? 0 : error_set(error, ERROR_MEMORY, "no memory for the request");
}

void request_free(struct request *request) {
    if (request == NULL)
        return;
    task_free(request->task);
    request_free_parameters(request);
}
