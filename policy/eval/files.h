/* SPDX-License-Identifier: Apache-2.0
 *
 * Tasks from files. Each line of a JSONL file is an item; empty lines count for nothing but line numbers. Files may be
 * compressed by gzip. They are not trusted: what is wrong is an error that names file, line and field.
 *
 *   gsm8k      {question, answer}: grade-school mathematics, 8-shot as text to continue ("Question: ...\nAnswer:", the
 *              form of EleutherAI's lm-evaluation-harness), the number behind #### is the answer
 *   bbh        JSON {examples: [{input, target}]}, a task of BIG-Bench Hard: 3-shot, answers without reasoning
 *              ("Q: ...\nA:"), exact match
 *   qa         {question, answers, ctxs: [{title, text, isgold}]}: the gold passage at a random place among
 * distractors, which are the item's other passages and then gold passages of other lines that hold no answer, up to the
 *              length asked for (20 passages where there is no limit). Prompt and metric of Lost in the Middle (Liu et
 *              al. 2023)
 *   kv         {ordered_kv_records, key, value}: look up a key in a JSON object. Prompt and metric from the same source
 *   longbench  {input, context, answers, all_classes, dataset}: prompts, output lengths and metrics of LongBench by
 *              dataset (Bai et al. 2023); files_longbench.c has the table. Its datasets in Chinese that are scored by
 *              words need a word segmenter and are refused
 *   jsonl      {prompt, or context and question; answer or answers; and if wanted metric, classes, max_tokens, stop,
 *              first_line, chat, group}; metric is f1, max_tokens 64, chat false where not given
 */
#ifndef POLICY_EVAL_FILES_H
#define POLICY_EVAL_FILES_H

#include "policy/eval/generate.h"

struct eval_file_options {
    const char *task;
    const char *file;
    const char *shots; /* a file of the same format to take examples from; NULL: from the head of file, whose examples
                          are then not asked. For gsm8k and bbh */
    uint32_t length;   /* most tokens of context and question; longer items are skipped, qa is filled up. 0: no limit */
    uint32_t limit;    /* items; 0: all. Fewer than there are: a sample by seed, in the order of the file */
    uint64_t seed;     /* which items; for qa also distractors and the place of the gold passage */
    eval_count_tokens count_tokens; /* needed with length */
    void *count_context;
};

const char *eval_file_tasks(void); /* "gsm8k, bbh, ..." */
bool eval_is_file_task(const char *task);
/* skipped: items tried for the sample that are longer than length. That nothing is left to ask is an error.
 * ERROR_IO, ERROR_FORMAT (line and field named), ERROR_INVALID, ERROR_UNSUPPORTED, ERROR_MEMORY; items is then empty.
 */
int eval_load(
    const struct eval_file_options *options, struct eval_items *items, uint32_t *skipped, struct error *error);

#endif
