/* SPDX-License-Identifier: Apache-2.0
 *
 * Tasks from files.
 *   gsm8k      JSONL of {question, answer}; 8-shot: examples from --shots FILE (default: the first lines of the data
 * file, which are then not asked), number after #### bbh        JSON {examples: [{input, target}]}; 3-shot direct,
 * examples from the head of the file qa         JSONL of {question, answers, ctxs: [{title, text, isgold}]}; gold
 * passage among distractors taken from other lines, up to the length asked for longbench  JSONL of LongBench's fields
 * {input, context, answers, all_classes, dataset}; prompt and metric by dataset jsonl      JSONL of {prompt or
 * (context, question), answer or answers, metric?, max_tokens?, stop?} kv         JSONL of {ordered_kv_records, key,
 * value} (Lost in the Middle) Files may be gzip-compressed (name ends in .gz).
 */
#ifndef POLICY_EVAL_FILES_H
#define POLICY_EVAL_FILES_H

#include "policy/eval/generate.h"

struct eval_file_options {
    const char *task;
    const char *file;
    const char *shots; /* examples; NULL: from the head of file */
    uint32_t length; /* most tokens of context and question; longer items are skipped (and counted), qa is filled up */
    uint32_t limit;  /* items; 0: all */
    uint64_t seed;   /* which items, and the order of distractors */
    eval_count_tokens count_tokens;
    void *count_context;
};

const char *eval_file_tasks(void); /* "gsm8k, bbh, ..." */
bool eval_is_file_task(const char *task);
/* skipped: items longer than length. ERROR_IO, ERROR_FORMAT (line and field named), ERROR_INVALID, ERROR_MEMORY. */
int eval_load(
    const struct eval_file_options *options, struct eval_items *items, uint32_t *skipped, struct error *error);

#endif
