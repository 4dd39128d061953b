/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading: read a file, show examples, build an item of each record, keep a sample of those that fit.
 */
#include "policy/eval/files_internal.h"

#include "engine/random.h"

#include <stdlib.h>
#include <string.h>

enum { STREAM_SAMPLE = 0x4556414C }; /* of the random numbers: away from those of the formats, which count records */

static const struct eval_format *const formats[] = {
    &eval_format_gsm8k, &eval_format_bbh, &eval_format_qa, &eval_format_kv, &eval_format_longbench, &eval_format_jsonl};

const char *eval_file_tasks(void) {
    return "gsm8k, bbh, qa, kv, longbench, jsonl";
}

static const struct eval_format *find_format(const char *task) {
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (strcmp(task, formats[i]->task) == 0)
            return formats[i];
    return NULL;
}

bool eval_is_file_task(const char *task) {
    return find_format(task) != NULL;
}

void eval_shuffle(uint64_t seed, uint32_t stream, size_t *order, size_t count) {
    for (size_t i = 0; i < count; i++)
        order[i] = i;
    for (size_t i = count; i > 1; i--) {
        uint32_t words[4];
        random_philox(seed, stream, 0, i, words);
        size_t other = (size_t)((((uint64_t)words[0] << 32) | words[1]) % i), swap = order[other];
        order[other] = order[i - 1];
        order[i - 1] = swap;
    }
}

int eval_count_item(
    const struct eval_loader *loader, const struct eval_item *item, uint32_t *tokens, struct error *error) {
    char *text = eval_print("%s%s", item->context, item->question);
    if (text == NULL)
        return eval_out_of_memory(error);
    *tokens = loader->options->count_tokens(loader->options->count_context, text);
    free(text);
    return 0;
}

/* The text of the examples, from the first records of data. */
static int show_examples(
    struct eval_loader *loader, const struct eval_format *format, const struct eval_data *data, struct error *error) {
    size_t bytes;
    int code = 0;
    if (data->count < format->shots)
        return error_set(error, ERROR_FORMAT, "%s: has %zu %ss; %s shows %u examples", data->name, data->count,
            data->unit, format->task, format->shots);
    FILE *out = open_memstream(&loader->examples, &bytes);
    if (out == NULL)
        return eval_out_of_memory(error);
    for (uint32_t i = 0; code == 0 && i < format->shots; i++)
        code = format->show((struct eval_place){data, &data->records[i]}, out, error);
    if (fclose(out) != 0 && code == 0)
        code = eval_out_of_memory(error);
    return code;
}

/* Reads examples from their file, or takes the head of the data away for them. */
static int take_examples(struct eval_loader *loader, const struct eval_format *format, struct error *error) {
    const char *file = loader->options->shots;
    struct eval_data shots = {0};
    if (format->shots == 0)
        return file == NULL
                   ? 0
                   : error_set(error, ERROR_INVALID, "task %s shows no examples: %s has no use", format->task, file);
    if (file == NULL) {
        int code = show_examples(loader, format, &loader->data, error);
        if (code != 0)
            return code;
        if (loader->data.count == format->shots)
            return error_set(error, ERROR_FORMAT,
                "%s: has %zu %ss, which are all shown as examples: none is left to ask", loader->data.name,
                loader->data.count, loader->data.unit);
        for (uint32_t i = 0; i < format->shots; i++)
            json_decref(loader->data.records[i].value);
        loader->data.count -= format->shots;
        memmove(loader->data.records, loader->data.records + format->shots,
            loader->data.count * sizeof *loader->data.records);
        return 0;
    }
    int code = format->read(file, &shots, error);
    if (code == 0)
        code = show_examples(loader, format, &shots, error);
    eval_data_free(&shots);
    return code;
}

static int build_items(
    struct eval_loader *loader, const struct eval_format *format, struct eval_items *items, struct error *error) {
    int code = 0;
    for (size_t i = 0; code == 0 && i < loader->data.count; i++) {
        struct eval_item *item = eval_items_add(items);
        if (item == NULL)
            return eval_out_of_memory(error);
        code = format->build(loader, (struct eval_place){&loader->data, &loader->data.records[i]}, item, error);
    }
    return code;
}

/* Marks in kept[] the items of the sample. */
static int choose_items(struct eval_loader *loader, const struct eval_format *format, struct eval_items *items,
    const size_t *order, bool *kept, uint32_t *skipped, struct error *error) {
    const struct eval_file_options *options = loader->options;
    uint32_t chosen = 0, shortest = UINT32_MAX;
    for (size_t i = 0; i < items->count && (options->limit == 0 || chosen < options->limit); i++) {
        struct eval_item *item = &items->items[order[i]];
        uint32_t tokens = 0;
        int code = options->length == 0 ? 0 : eval_count_item(loader, item, &tokens, error);
        if (code != 0)
            return code;
        shortest = tokens < shortest ? tokens : shortest;
        if (options->length > 0 && tokens > options->length) {
            (*skipped)++;
            continue;
        }
        if (format->fill != NULL)
            code =
                format->fill(loader, (struct eval_place){&loader->data, &loader->data.records[order[i]]}, item, error);
        if (code != 0)
            return code;
        kept[order[i]] = true;
        chosen++;
    }
    if (chosen == 0)
        return error_set(error, ERROR_INVALID, "no item of %s fits into %u tokens: the shortest has %u", options->file,
            options->length, shortest);
    return 0;
}

static int keep_sample(struct eval_loader *loader, const struct eval_format *format, struct eval_items *items,
    uint32_t *skipped, struct error *error) {
    size_t count = items->count, left = 0;
    size_t *order = malloc((count + 1) * sizeof *order);
    bool *kept = calloc(count + 1, sizeof *kept);
    int code = order == NULL || kept == NULL ? eval_out_of_memory(error) : 0;
    if (code == 0) {
        eval_shuffle(loader->options->seed, STREAM_SAMPLE, order, count);
        code = choose_items(loader, format, items, order, kept, skipped, error);
    }
    for (size_t i = 0; code == 0 && i < count; i++) {
        if (kept[i])
            items->items[left++] = items->items[i];
        else
            eval_item_clear(&items->items[i]);
    }
    if (code == 0)
        items->count = left;
    free(order);
    free(kept);
    return code;
}

int eval_load(
    const struct eval_file_options *options, struct eval_items *items, uint32_t *skipped, struct error *error) {
    struct eval_loader loader = {.options = options};
    const struct eval_format *format = find_format(options->task);
    *items = (struct eval_items){0};
    *skipped = 0;
    if (format == NULL)
        return error_set(error, ERROR_INVALID, "unknown task %s: files have %s", options->task, eval_file_tasks());
    if (options->length > 0 && options->count_tokens == NULL)
        return error_set(error, ERROR_INVALID, "a length needs a count of tokens");
    int code = format->read(options->file, &loader.data, error);
    if (code == 0)
        code = take_examples(&loader, format, error);
    if (code == 0)
        code = build_items(&loader, format, items, error);
    if (code == 0)
        code = keep_sample(&loader, format, items, skipped, error);
    if (code != 0)
        eval_items_free(items);
    eval_data_free(&loader.data);
    free(loader.examples);
    free(loader.doc_tokens);
    return code;
}
