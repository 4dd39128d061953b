/* SPDX-License-Identifier: Apache-2.0
 *
 * Questions over many passages and keys in large objects, with the prompts and metrics of Lost in the Middle (Liu et
 * al. 2023): {question, answers, ctxs: [{title, text, isgold}]} and {ordered_kv_records, key, value}.
 */
#include "policy/eval/files_internal.h"

#include "engine/random.h"
#include "policy/eval/metrics.h"

#include <stdlib.h>
#include <string.h>

enum {
    QA_MAX_TOKENS = 48,
    KV_MAX_TOKENS = 64,
    UNLIMITED_DOCUMENTS = 20, /* where no length is asked for */
    MOST_DOCUMENTS = 4096,
    MOST_MISSES = 8,  /* passages too long for the room that is left, before filling ends */
    MOST_TRIES = 512, /* passages looked at for an item */
};

/* A passage, in a record that outlives it. */
struct document {
    const char *title, *text;
};

static int read_document(
    struct eval_place place, const json_t *context, struct document *document, struct error *error) {
    document->title = json_string_value(json_object_get(context, "title"));
    document->text = json_string_value(json_object_get(context, "text"));
    if (document->title == NULL || document->text == NULL)
        return eval_field_error(place, error, "ctxs", "not a list of passages with title and text");
    return 0;
}

static bool is_gold(const json_t *context) {
    return json_is_true(json_object_get(context, "isgold"));
}

/* The gold passage; that every passage is well formed is checked by the way. */
static int find_gold(struct eval_place place, struct document *gold, struct error *error) {
    const json_t *contexts = json_object_get(place.record->value, "ctxs");
    bool found = false;
    if (!json_is_array(contexts))
        return eval_field_error(place, error, "ctxs", contexts == NULL ? "missing" : "not a list");
    for (size_t i = 0; i < json_array_size(contexts); i++) {
        const json_t *context = json_array_get(contexts, i);
        struct document document;
        int code = read_document(place, context, &document, error);
        if (code != 0)
            return code;
        if (is_gold(context) && !found) {
            *gold = document;
            found = true;
        }
    }
    return found ? 0 : eval_field_error(place, error, "ctxs", "no passage has isgold true");
}

static char *print_documents(const struct document *documents, size_t count) {
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL)
        return NULL;
    fputs("Write a high-quality answer for the given question using only the provided search results (some of which "
          "might be irrelevant).\n\n",
        out);
    for (size_t i = 0; i < count; i++)
        fprintf(out, "Document [%zu](Title: %s) %s\n", i + 1, documents[i].title, documents[i].text);
    if (fclose(out) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static int build_qa(
    const struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error) {
    char *question;
    struct document gold;
    (void)loader;
    item->metric = METRIC_CONTAINS_ANY;
    item->max_tokens = QA_MAX_TOKENS;
    item->first_line = true;
    int code = eval_field_text(place, NULL, "question", true, &question, error);
    if (code == 0)
        code = eval_field_texts(place, "answers", &item->answers, &item->answers_count, error);
    if (code == 0)
        code = find_gold(place, &gold, error);
    if (code == 0) {
        item->context = print_documents(&gold, 1);
        item->question = eval_print("\nQuestion: %s\nAnswer:", question);
        code = item->context == NULL || item->question == NULL ? eval_out_of_memory(error) : 0;
    }
    free(question);
    return code;
}

/* Passages of one item on their way into its context. */
struct filling {
    struct eval_loader *loader;
    struct eval_item *item;
    struct document *chosen; /* distractors */
    size_t count;
    struct document gold;
    uint32_t room; /* tokens left */
    uint32_t misses, tries;
};

static bool is_full(const struct filling *filling) {
    size_t most = filling->loader->options->length == 0 ? UNLIMITED_DOCUMENTS - 1 : MOST_DOCUMENTS;
    return filling->count >= most || filling->misses >= MOST_MISSES || filling->tries >= MOST_TRIES;
}

static bool same_document(const struct document *a, const struct document *b) {
    return strcmp(a->title, b->title) == 0 && strcmp(a->text, b->text) == 0;
}

/* A distractor neither answers the question nor is there already. */
static bool is_distractor(const struct filling *filling, const struct document *document) {
    if (eval_score(filling->item, document->text) > 0 || same_document(document, &filling->gold))
        return false;
    for (size_t i = 0; i < filling->count; i++)
        if (same_document(document, &filling->chosen[i]))
            return false;
    return true;
}

/* Tokens of a passage with its heading; *cached is where they are remembered, NULL: nowhere. */
static int count_document(const struct filling *filling, const struct document *document, uint32_t *cached,
    uint32_t *tokens, struct error *error) {
    const struct eval_file_options *options = filling->loader->options;
    *tokens = cached == NULL ? 0 : *cached;
    if (options->length == 0 || *tokens > 0)
        return 0;
    char *text = eval_print("Document [100](Title: %s) %s\n", document->title, document->text);
    if (text == NULL)
        return eval_out_of_memory(error);
    *tokens = options->count_tokens(options->count_context, text);
    if (cached != NULL)
        *cached = *tokens;
    free(text);
    return 0;
}

static int try_document(
    struct filling *filling, const struct document *document, uint32_t *cached, struct error *error) {
    uint32_t tokens;
    filling->tries++;
    if (!is_distractor(filling, document))
        return 0;
    int code = count_document(filling, document, cached, &tokens, error);
    if (code != 0)
        return code;
    if (tokens > filling->room) {
        filling->misses++;
        return 0;
    }
    struct document *grown = reallocarray(filling->chosen, filling->count + 1, sizeof *grown);
    if (grown == NULL)
        return eval_out_of_memory(error);
    filling->chosen = grown;
    filling->chosen[filling->count++] = *document;
    filling->room -= tokens;
    return 0;
}

static int add_own(struct filling *filling, struct eval_place place, struct error *error) {
    const json_t *contexts = json_object_get(place.record->value, "ctxs");
    int code = 0;
    for (size_t i = 0; code == 0 && i < json_array_size(contexts) && !is_full(filling); i++) {
        struct document document;
        code = read_document(place, json_array_get(contexts, i), &document, error);
        if (code == 0)
            code = try_document(filling, &document, NULL, error);
    }
    return code;
}

static int add_others(struct filling *filling, struct eval_place place, struct error *error) {
    struct eval_loader *loader = filling->loader;
    const struct eval_data *data = &loader->data;
    size_t *order = malloc((data->count + 1) * sizeof *order);
    int code = order == NULL ? eval_out_of_memory(error) : 0;
    if (code == 0)
        eval_shuffle(loader->options->seed, (uint32_t)place.record->number, order, data->count);
    for (size_t i = 0; code == 0 && i < data->count && !is_full(filling); i++) {
        struct eval_place other = {data, &data->records[order[i]]};
        struct document document;
        if (other.record == place.record)
            continue;
        code = find_gold(other, &document, error);
        if (code == 0)
            code = try_document(filling, &document, &loader->doc_tokens[order[i]], error);
    }
    free(order);
    return code;
}

/* Writes the context with the gold passage at a place from 0 to count. */
static int print_context(struct filling *filling, size_t at, struct error *error) {
    struct document *all = malloc((filling->count + 1) * sizeof *all);
    if (all == NULL)
        return eval_out_of_memory(error);
    all[at] = filling->gold;
    for (size_t i = 0; i < filling->count; i++)
        all[i < at ? i : i + 1] = filling->chosen[i];
    char *text = print_documents(all, filling->count + 1);
    free(all);
    if (text == NULL)
        return eval_out_of_memory(error);
    free(filling->item->context);
    filling->item->context = text;
    return 0;
}

/* Puts the gold passage at a random place, and drops distractors while the whole is longer than its parts were. */
static int place_gold(struct filling *filling, struct eval_place place, struct error *error) {
    const struct eval_file_options *options = filling->loader->options;
    static const char *const groups[] = {"gold early", "gold in the middle", "gold late"};
    for (;; filling->count--) {
        uint32_t tokens = 0, words[4];
        random_philox(options->seed, (uint32_t)place.record->number, 1, 0, words);
        size_t at = (size_t)(((uint64_t)words[0] * (filling->count + 1)) >> 32);
        int code = print_context(filling, at, error);
        if (code == 0 && options->length > 0)
            code = eval_count_item(filling->loader, filling->item, &tokens, error);
        if (code != 0)
            return code;
        if (tokens > options->length && filling->count > 0)
            continue;
        filling->item->group = strdup(groups[3 * at / (filling->count + 1)]);
        return filling->item->group == NULL ? eval_out_of_memory(error) : 0;
    }
}

static int fill_qa(struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error) {
    struct filling filling = {.loader = loader, .item = item};
    uint32_t tokens = 0;
    if (loader->doc_tokens == NULL)
        loader->doc_tokens = calloc(loader->data.count, sizeof *loader->doc_tokens);
    if (loader->doc_tokens == NULL)
        return eval_out_of_memory(error);
    int code = find_gold(place, &filling.gold, error);
    if (code == 0 && loader->options->length > 0)
        code = eval_count_item(loader, item, &tokens, error);
    filling.room = loader->options->length - tokens;
    if (code == 0)
        code = add_own(&filling, place, error);
    if (code == 0)
        code = add_others(&filling, place, error);
    if (code == 0)
        code = place_gold(&filling, place, error);
    free(filling.chosen);
    return code;
}

const struct eval_format eval_format_qa = {
    .task = "qa", .read = eval_data_read_lines, .build = build_qa, .fill = fill_qa};

/* Key-value retrieval. */

/* One line of the object, with JSON's quotes and escapes. */
static int print_pair(struct eval_place place, const json_t *pair, const char *before, FILE *out, struct error *error) {
    const json_t *key = json_array_get(pair, 0), *value = json_array_get(pair, 1);
    if (json_array_size(pair) != 2 || !json_is_string(key) || !json_is_string(value))
        return eval_field_error(place, error, "ordered_kv_records", "not a list of pairs of texts");
    char *key_text = json_dumps(key, JSON_ENCODE_ANY), *value_text = json_dumps(value, JSON_ENCODE_ANY);
    int code = key_text == NULL || value_text == NULL ? eval_out_of_memory(error) : 0;
    if (code == 0)
        fprintf(out, "%s%s: %s", before, key_text, value_text);
    free(key_text);
    free(value_text);
    return code;
}

static int print_object(struct eval_place place, FILE *out, struct error *error) {
    const json_t *pairs = json_object_get(place.record->value, "ordered_kv_records");
    int code = 0;
    if (!json_is_array(pairs) || json_array_size(pairs) == 0)
        return eval_field_error(place, error, "ordered_kv_records", pairs == NULL ? "missing" : "not a list of pairs");
    fputs("Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n", out);
    for (size_t i = 0; code == 0 && i < json_array_size(pairs); i++)
        code = print_pair(place, json_array_get(pairs, i), i == 0 ? "{" : ",\n ", out, error);
    fputs("}\n", out);
    return code;
}

/* That the object says of the key what the answer says. */
static int check_answer(struct eval_place place, const char *key, const char *value, struct error *error) {
    const json_t *pairs = json_object_get(place.record->value, "ordered_kv_records");
    for (size_t i = 0; i < json_array_size(pairs); i++) {
        const json_t *pair = json_array_get(pairs, i);
        if (strcmp(json_string_value(json_array_get(pair, 0)), key) == 0 &&
            strcmp(json_string_value(json_array_get(pair, 1)), value) == 0)
            return 0;
    }
    return eval_field_error(place, error, "key", "not in ordered_kv_records with that value");
}

static int build_kv(
    const struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error) {
    char *key, *value = NULL;
    size_t bytes;
    (void)loader;
    item->metric = METRIC_CONTAINS;
    item->max_tokens = KV_MAX_TOKENS;
    FILE *out = open_memstream(&item->context, &bytes);
    if (out == NULL)
        return eval_out_of_memory(error);
    int code = print_object(place, out, error);
    if (fclose(out) != 0 && code == 0)
        code = eval_out_of_memory(error);
    if (code != 0)
        return code;
    code = eval_field_text(place, NULL, "key", true, &key, error);
    if (code == 0)
        code = eval_field_text(place, NULL, "value", true, &value, error);
    if (code == 0)
        code = check_answer(place, key, value, error);
    if (code == 0) {
        item->question = eval_print("\nKey: \"%s\"\nCorresponding value:", key);
        item->stop = strdup("\n");
        code = item->question == NULL || item->stop == NULL ? eval_out_of_memory(error) : 0;
    }
    if (code == 0) {
        code = eval_item_answer(item, value, error);
        value = NULL;
    }
    free(key);
    free(value);
    return code;
}

const struct eval_format eval_format_kv = {.task = "kv", .read = eval_data_read_lines, .build = build_kv};
