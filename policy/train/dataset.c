/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/dataset.h"

#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "policy/eval/files_internal.h"
#include "policy/eval/question.h"
#include "policy/train/copying.h"

enum { STREAM_ORDER = 0x4F524452, STREAM_CUT = 0x43555453, HELD_OUT_OF = 10, MESSAGES_MAX = 4096 };

/* A line with a prompt of its own: tokens of the list from `begin` on. */
struct prompt_record {
    size_t begin;
    uint32_t prompt, count;
    bool chat;
};

struct dataset {
    struct dataset_options options;
    struct token_list text; /* that is cut anywhere */
    size_t *starts;         /* ascending: where lines of the file begin in text; none for plain text */
    size_t starts_count, starts_capacity;
    struct token_list lines; /* tokens of records */
    struct prompt_record *records;
    size_t records_count, records_capacity;
    size_t pieces;    /* that text is cut into */
    uint64_t pass;    /* whose order is held */
    size_t *order;    /* [pieces + records] */
    uint64_t skipped; /* lines that are too short or too long */
    struct token_list sequence;
};

static int no_memory(struct error *error) {
    return error_set(error, ERROR_MEMORY, "no memory for the data of training");
}

static int append(struct token_list *to, const int32_t *ids, size_t count, struct error *error) {
    for (size_t i = 0; i < count; i++)
        if (token_list_append(to, ids[i]) != 0)
            return no_memory(error);
    return 0;
}

/* One more item's room in an array that doubles. */
static void *grow(void *list, size_t count, size_t *capacity, size_t item) {
    if (count < *capacity)
        return list;
    size_t wanted = *capacity == 0 ? 64 : 2 * *capacity;
    void *grown = reallocarray(list, wanted, item);
    if (grown != NULL)
        *capacity = wanted;
    return grown;
}

/* ---- plain text ---- */

static bool ends_with(const char *name, const char *ending) {
    size_t length = strlen(name), tail = strlen(ending);
    return length >= tail && strcmp(name + length - tail, ending) == 0;
}

static int load_text(struct dataset *dataset, const char *file, struct error *error) {
    size_t bytes;
    char *text = eval_text_read(file, &bytes, error);
    if (text == NULL)
        return error->code;
    size_t half = eval_text_half(text, bytes);
    size_t used = dataset->options.whole || half == 0 ? bytes : half;
    int code = tokenizer_encode(dataset->options.tokenizer, text, used, false, &dataset->text, error);
    free(text);
    if (code != 0 || dataset->options.part == DATASET_ALL)
        return code;
    size_t train = dataset->text.count - dataset->text.count / HELD_OUT_OF;
    if (dataset->options.part == DATASET_HELD_OUT)
        memmove(dataset->text.ids, dataset->text.ids + train, (dataset->text.count - train) * sizeof(int32_t));
    dataset->text.count = dataset->options.part == DATASET_HELD_OUT ? dataset->text.count - train : train;
    return 0;
}

/* ---- lines ---- */

static int add_start(struct dataset *dataset, struct error *error) {
    size_t *grown = grow(dataset->starts, dataset->starts_count, &dataset->starts_capacity, sizeof *grown);
    if (grown == NULL)
        return no_memory(error);
    dataset->starts = grown;
    dataset->starts[dataset->starts_count++] = dataset->text.count;
    return 0;
}

static int add_text(struct dataset *dataset, const char *text, struct error *error) {
    const struct tokenizer *tokenizer = dataset->options.tokenizer;
    int code = add_start(dataset, error);
    if (code == 0)
        code = tokenizer_encode(tokenizer, text, strlen(text), false, &dataset->text, error);
    return code == 0 ? tokenizer_encode(tokenizer, "\n\n", 2, false, &dataset->text, error) : code;
}

/* Takes the tokens that were appended to lines from `begin` on as a record, unless its prompt does not fit. */
static int add_record(struct dataset *dataset, size_t begin, size_t prompt, bool chat, struct error *error) {
    size_t count = dataset->lines.count - begin;
    if (prompt < dataset->options.least || prompt > dataset->options.most) {
        dataset->skipped++;
        dataset->lines.count = begin;
        return 0;
    }
    struct prompt_record *grown =
        grow(dataset->records, dataset->records_count, &dataset->records_capacity, sizeof *grown);
    if (grown == NULL)
        return no_memory(error);
    dataset->records = grown;
    dataset->records[dataset->records_count++] =
        (struct prompt_record){.begin = begin, .prompt = (uint32_t)prompt, .count = (uint32_t)count, .chat = chat};
    return 0;
}

static int add_prompt(struct dataset *dataset, const char *prompt, const char *completion, struct error *error) {
    const struct tokenizer *tokenizer = dataset->options.tokenizer;
    size_t begin = dataset->lines.count, count = 0;
    int code = tokenizer_encode(tokenizer, prompt, strlen(prompt), false, &dataset->lines, error);
    count = dataset->lines.count - begin;
    if (code == 0 && completion != NULL)
        code = tokenizer_encode(tokenizer, completion, strlen(completion), false, &dataset->lines, error);
    return code == 0 ? add_record(dataset, begin, count, false, error) : code;
}

/* A message as the template takes it, added to the list. */
static int add_message(const struct chat_template *template, struct eval_place place, const json_t *message,
    json_t *list, struct error *error) {
    const json_t *role = json_object_get(message, "role"), *content = json_object_get(message, "content");
    if (!json_is_string(role) || !json_is_string(content))
        return eval_field_error(place, error, "messages", "role and content of each must be texts");
    const char *name = chat_template_role(template, json_string_value(role));
    if (name == NULL)
        return eval_field_error(
            place, error, "messages", "a role must be one of system, developer, user, assistant, tool, function");
    json_t *text = chat_template_content(template, json_incref((json_t *)content));
    json_t *copy = text == NULL ? NULL : json_pack("{s:s, s:o}", "role", name, "content", text);
    return copy != NULL && json_array_append_new(list, copy) == 0 ? 0 : no_memory(error);
}

/* Appends the tokens of a conversation's prompt. */
static int append_conversation(
    struct dataset *dataset, struct eval_place place, const json_t *messages, struct error *error) {
    const struct chat_input input = {.messages = messages, .add_generation_prompt = true, .now = CHAT_FIXED_TIME};
    struct template_text text = {0};
    struct error cause = {0};
    int code = chat_template_render(dataset->options.chat.template, &input, &text, &cause);
    if (code == ERROR_FORMAT) {
        char why[300];
        snprintf(why, sizeof why, "the chat template refuses them: %.240s", cause.message);
        return eval_field_error(place, error, "messages", why);
    }
    if (code == 0)
        code = tokenizer_encode_marked(
            dataset->options.tokenizer, text.text, text.input, text.bytes, &dataset->lines, &cause);
    template_text_free(&text);
    return code == 0 ? 0 : no_memory(error);
}

/* The last message of the assistant is the completion. */
static int add_messages(struct dataset *dataset, struct eval_place place, const json_t *list, struct error *error) {
    const struct chat_source *chat = &dataset->options.chat;
    size_t count = json_array_size(list), begin = dataset->lines.count, prompt;
    if (!json_is_array(list) || count == 0 || count > MESSAGES_MAX)
        return eval_field_error(place, error, "messages", "not a list of 1 to 4,096 messages");
    if (chat->template == NULL)
        return eval_field_error(
            place, error, "messages", chat->refusal != NULL ? chat->refusal : "the model has no chat template");
    json_t *messages = json_array();
    int code = messages == NULL ? no_memory(error) : 0;
    for (size_t i = 0; code == 0 && i < count; i++)
        code = add_message(chat->template, place, json_array_get(list, i), messages, error);
    const json_t *last = json_array_get(list, count - 1), *answer = json_object_get(last, "content");
    bool answered =
        code == 0 && count > 1 && strcmp(json_string_value(json_object_get(last, "role")), "assistant") == 0;
    if (answered)
        json_array_remove(messages, count - 1);
    if (code == 0)
        code = append_conversation(dataset, place, messages, error);
    prompt = dataset->lines.count - begin;
    if (answered && code == 0)
        code = tokenizer_encode(dataset->options.tokenizer, json_string_value(answer), json_string_length(answer),
            false, &dataset->lines, error);
    json_decref(messages);
    return code == 0 ? add_record(dataset, begin, prompt, true, error) : code;
}

static int add_line(struct dataset *dataset, struct eval_place place, struct error *error) {
    const json_t *messages = json_object_get(place.record->value, "messages");
    char *text = NULL, *prompt = NULL, *completion = NULL;
    int code = 0;
    if (messages != NULL)
        return add_messages(dataset, place, messages, error);
    code = eval_field_text(place, NULL, "text", false, &text, error);
    if (code == 0 && text == NULL)
        code = eval_field_text(place, NULL, "prompt", false, &prompt, error);
    if (code == 0 && prompt != NULL)
        code = eval_field_text(place, NULL, "completion", false, &completion, error);
    if (code == 0 && text == NULL && prompt == NULL)
        code = eval_field_error(place, error, "text", "missing, and no prompt or messages in its place");
    if (code == 0)
        code = text != NULL ? add_text(dataset, text, error) : add_prompt(dataset, prompt, completion, error);
    free(text);
    free(prompt);
    free(completion);
    return code;
}

static int load_lines(struct dataset *dataset, const char *file, struct error *error) {
    struct eval_data data;
    int code = eval_data_read_lines(file, &data, error);
    for (size_t i = 0; code == 0 && i < data.count; i++) {
        bool held_out = data.count >= HELD_OUT_OF && i % HELD_OUT_OF == HELD_OUT_OF - 1;
        if (dataset->options.part == DATASET_ALL || held_out == (dataset->options.part == DATASET_HELD_OUT))
            code = add_line(dataset, (struct eval_place){&data, &data.records[i]}, error);
    }
    eval_data_free(&data);
    return code;
}

/* ---- loading ---- */

static size_t text_needed(const struct dataset *dataset) {
    return (size_t)dataset->options.least + dataset->options.future;
}

static int count_pieces(struct dataset *dataset, const char *file, struct error *error) {
    size_t usual = ((size_t)dataset->options.least + dataset->options.most) / 2 + dataset->options.future;
    if (dataset->text.count >= text_needed(dataset))
        dataset->pieces = dataset->text.count > usual ? dataset->text.count / usual : 1;
    if (dataset->pieces + dataset->records_count == 0)
        return error_set(error, ERROR_INVALID,
            "%.200s: nothing to train on: %zu tokens of text, prompts of %u to %u and %u that follow; %llu lines too "
            "short "
            "or too long",
            file, dataset->text.count, dataset->options.least, dataset->options.most, dataset->options.future,
            (unsigned long long)dataset->skipped);
    dataset->order = calloc(dataset->pieces + dataset->records_count, sizeof *dataset->order);
    dataset->pass = UINT64_MAX;
    return dataset->order == NULL ? no_memory(error) : 0;
}

struct dataset *dataset_load(const char *file, const struct dataset_options *options, struct error *error) {
    struct dataset *dataset = calloc(1, sizeof *dataset);
    if (dataset == NULL) {
        no_memory(error);
        return NULL;
    }
    dataset->options = *options;
    int code = 0;
    if (file != NULL)
        code = ends_with(file, ".txt") ? load_text(dataset, file, error) : load_lines(dataset, file, error);
    if (code == 0 && file != NULL)
        code = count_pieces(dataset, file, error);
    if (code == 0)
        return dataset;
    dataset_free(dataset);
    return NULL;
}

void dataset_free(struct dataset *dataset) {
    if (dataset == NULL)
        return;
    token_list_free(&dataset->text);
    token_list_free(&dataset->lines);
    token_list_free(&dataset->sequence);
    free(dataset->starts);
    free(dataset->records);
    free(dataset->order);
    free(dataset);
}

uint64_t dataset_tokens(const struct dataset *dataset) {
    return dataset->text.count + dataset->lines.count;
}

/* ---- sequences ---- */

/* Below `below`, by the place in the order. */
static size_t draw(const struct dataset *dataset, uint32_t stream, uint32_t step, uint64_t index, size_t below) {
    uint32_t words[4];
    random_philox(dataset->options.seed, stream, step, index, words);
    return (size_t)((((uint64_t)words[0] << 32) | words[1]) % below);
}

/* Every pass over the data has an order of its own. */
static size_t unit_at(struct dataset *dataset, uint64_t index) {
    size_t units = dataset->pieces + dataset->records_count;
    uint64_t pass = index / units;
    if (dataset->pass != pass) {
        for (size_t i = 0; i < units; i++)
            dataset->order[i] = i;
        for (size_t i = units; i > 1; i--) {
            size_t other = draw(dataset, STREAM_ORDER, (uint32_t)pass, i, i), swap = dataset->order[other];
            dataset->order[other] = dataset->order[i - 1];
            dataset->order[i - 1] = swap;
        }
        dataset->pass = pass;
    }
    return dataset->order[index % units];
}

/* The last start at or before a place; the place itself where there is none, or it is far away. */
static size_t snap(const struct dataset *dataset, size_t place) {
    size_t low = 0, high = dataset->starts_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (dataset->starts[middle] <= place)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 && place - dataset->starts[low - 1] < text_needed(dataset) ? dataset->starts[low - 1] : place;
}

static int cut_text(
    struct dataset *dataset, uint64_t index, size_t piece, struct dataset_sequence *out, struct error *error) {
    const struct dataset_options *options = &dataset->options;
    size_t total = dataset->text.count, most = total - options->future;
    most = most > options->most ? options->most : most;
    size_t prompt = options->least + draw(dataset, STREAM_CUT, 0, index, most - options->least + 1);
    size_t needed = prompt + options->future, width = total / dataset->pieces;
    size_t start = snap(dataset, piece * width + draw(dataset, STREAM_CUT, 1, index, width));
    start = start > total - needed ? total - needed : start;
    out->prompt = (uint32_t)prompt;
    return append(&dataset->sequence, dataset->text.ids + start, needed, error);
}

static int take_data(struct dataset *dataset, uint64_t index, struct dataset_sequence *out, struct error *error) {
    size_t unit = unit_at(dataset, index);
    out->own = index % 2 == 1;
    if (unit < dataset->pieces)
        return cut_text(dataset, index, unit, out, error);
    const struct prompt_record *record = &dataset->records[unit - dataset->pieces];
    out->prompt = record->prompt;
    out->chat = record->chat;
    out->own = out->own || record->count == record->prompt;
    return append(&dataset->sequence, dataset->lines.ids + record->begin, record->count, error);
}

static int take_copying(struct dataset *dataset, uint64_t index, struct dataset_sequence *out, struct error *error) {
    const struct dataset_options *options = &dataset->options;
    struct copying_options copying = {.tokenizer = options->tokenizer,
        .text = dataset->text.ids,
        .text_count = dataset->text.count,
        .least = options->least,
        .most = options->most,
        .future = options->future,
        .seed = options->seed};
    out->copies = true;
    out->own = index / 4 % 2 == 1; /* copying.h: four kinds */
    uint64_t place = options->part == DATASET_HELD_OUT ? UINT64_MAX / 2 + index : index;
    return copying_generate(&copying, place, &dataset->sequence, &out->prompt, error);
}

int dataset_sequence(struct dataset *dataset, uint64_t index, struct dataset_sequence *out, struct error *error) {
    double part = dataset->pieces + dataset->records_count == 0 ? 1 : dataset->options.copying;
    uint64_t before = (uint64_t)((double)index * part), after = (uint64_t)((double)(index + 1) * part);
    *out = (struct dataset_sequence){0};
    dataset->sequence.count = 0;
    int code =
        after > before ? take_copying(dataset, before, out, error) : take_data(dataset, index - before, out, error);
    int32_t bos = tokenizer_bos(dataset->options.tokenizer);
    if (code == 0 && !out->chat && tokenizer_adds_bos(dataset->options.tokenizer) && bos >= 0)
        dataset->sequence.ids[0] = bos; /* the length stays */
    out->tokens = dataset->sequence.ids;
    out->count = (uint32_t)dataset->sequence.count;
    return code;
}
