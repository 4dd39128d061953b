/* SPDX-License-Identifier: Apache-2.0
 *
 * What the formats of files.h share: records of a file, their fields, and what a format has to say. For files*.c, and
 * records alone for the data of training (policy/train/dataset.c).
 */
#ifndef POLICY_EVAL_FILES_INTERNAL_H
#define POLICY_EVAL_FILES_INTERNAL_H

#include "policy/eval/files.h"

#include <jansson.h>
#include <stdio.h>

/* A JSON object of a file. */
struct eval_record {
    json_t *value; /* owned */
    size_t number; /* of its line or example, from 1 */
};

struct eval_data {
    const char *name; /* of the file */
    const char *unit; /* "line" or "example" */
    struct eval_record *records;
    size_t count, capacity;
};

/* Read a whole file, at least one record. Both: ERROR_IO, ERROR_FORMAT, ERROR_MEMORY; data may be freed after either.
 */
int eval_data_read_lines(const char *file, struct eval_data *data, struct error *error);
int eval_data_read_examples(const char *file, struct eval_data *data, struct error *error);
void eval_data_free(struct eval_data *data);

/* Where a value stands, for messages: "FILE: line 3: field ctxs[2].title: ...". */
struct eval_place {
    const struct eval_data *data;
    const struct eval_record *record;
};

int eval_field_error(struct eval_place place, struct error *error, const char *field, const char *problem);
/* A text of object (NULL: of the record), a copy. *text stays NULL when an optional field is absent or null. */
int eval_field_text(
    struct eval_place place, const json_t *object, const char *field, bool required, char **text, struct error *error);
/* A list of at least one text. */
int eval_field_texts(struct eval_place place, const char *field, char ***texts, uint32_t *count, struct error *error);
/* Moves a text into the item as its only answer. */
int eval_item_answer(struct eval_item *item, char *answer, struct error *error);
/* Fills what the arguments give; NULL on failed allocation. */
char *eval_print(const char *format, ...) __attribute__((format(printf, 1, 2)));
int eval_out_of_memory(struct error *error);

struct eval_loader {
    const struct eval_file_options *options;
    struct eval_data data;
    char *examples;       /* text of the examples shown before each question; NULL: the format shows none */
    uint32_t *doc_tokens; /* qa: [records] tokens of each gold passage, 0: not counted yet */
};

struct eval_format {
    const char *task;
    int (*read)(const char *file, struct eval_data *data, struct error *error);
    uint32_t shots;
    int (*show)(struct eval_place place, FILE *out, struct error *error); /* writes one example */
    int (*build)(
        const struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error);
    /* Lengthens a built item up to the length; NULL: items are as long as they are. */
    int (*fill)(struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error);
};

extern const struct eval_format eval_format_gsm8k, eval_format_bbh, eval_format_qa, eval_format_kv,
    eval_format_longbench, eval_format_jsonl;

/* Tokens of context and question. ERROR_MEMORY. */
int eval_count_item(
    const struct eval_loader *loader, const struct eval_item *item, uint32_t *tokens, struct error *error);
/* Puts 0 to count - 1 into an order that depends on the seed and the stream alone. */
void eval_shuffle(uint64_t seed, uint32_t stream, size_t *order, size_t count);

#endif
