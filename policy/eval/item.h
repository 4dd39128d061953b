/* SPDX-License-Identifier: Apache-2.0
 *
 * What an evaluation asks: items of a task. Tasks are generated (generate.h) or read from files (files.h); metrics.h
 * scores answers. Knows no engine.
 */
#ifndef POLICY_EVAL_ITEM_H
#define POLICY_EVAL_ITEM_H

#include "engine/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How an answer is scored, in [0, 1] (metrics.h). */
enum eval_metric {
    METRIC_NONE,           /* log-probability only */
    METRIC_CONTAINS,       /* part of the expected answers that occur in the output */
    METRIC_CONTAINS_ANY,   /* an answer occurs in the output, both after SQuAD's normalisation */
    METRIC_EXACT,          /* first line equals an answer after normalisation */
    METRIC_NUMBER,         /* last number of the output equals the answer's (gsm8k) */
    METRIC_F1,             /* LongBench: token F1 after SQuAD's normalisation, best over the answers */
    METRIC_ROUGE_L,        /* LongBench: ROUGE-L F, best over the answers */
    METRIC_CLASSIFICATION, /* LongBench: 1 / number of matched classes when the answer is among them */
    METRIC_RETRIEVAL,      /* LongBench: part of the numbers in the output that are the answer's paragraph number */
    METRIC_COUNT,          /* LongBench: part of the numbers in the output that equal the answer */
    METRIC_EDIT,           /* LongBench: edit similarity of the first line that is code */
    METRIC_KINDS,
};

/* One question. All text is UTF-8 and owned by the items. In a text that is continued, a space stands between the
 * question and its answer where neither has white space there. */
struct eval_item {
    char *context;  /* what a query-agnostic policy sees before it prunes */
    char *question; /* follows the context; may be empty: then the context is all */
    char **answers; /* any of them is right (METRIC_CONTAINS: all are expected); the first is the gold answer */
    uint32_t answers_count;
    char **classes; /* METRIC_CLASSIFICATION: all classes; else NULL */
    uint32_t classes_count;
    char *stop;          /* the output ends before this text; NULL: none */
    bool first_line;     /* scored is the first line that is not empty; the output ends with it */
    uint32_t max_tokens; /* of the answer */
    bool chat;           /* context and question are one message of the user; else the text is continued as it is */
    enum eval_metric metric;
    char *group; /* what rows are also reported by ("depth 0.5", a sub-task); NULL: none */
};

struct eval_items {
    struct eval_item *items;
    size_t count, capacity;
};

/* Appends a zeroed item; NULL on failed allocation. */
struct eval_item *eval_items_add(struct eval_items *items);
void eval_item_clear(struct eval_item *item); /* frees its texts */
void eval_items_free(struct eval_items *items);

#endif
