/* SPDX-License-Identifier: Apache-2.0
 *
 * Similarities of two texts that need more than counting.
 */
#ifndef POLICY_EVAL_SIMILARITY_H
#define POLICY_EVAL_SIMILARITY_H

#include "policy/eval/text.h"

/* Ratcliff-Obershelp similarity of a and b in [0, 1], as Python's difflib.SequenceMatcher(None, a, b).ratio() computes
 * it: twice the characters in common over all characters, where those in common are the longest common block (the
 * earliest in a, then in b), and so on to the left and to the right of it. In a b of 200 characters and more, those
 * that make up more than 1 % of it start no block ("autojunk").
 * This is the ratio of fuzzywuzzy, and so of LongBench, in an installation without python-Levenshtein, as its list of
 * requirements gives it; with that package the ratio is another one (insertions and deletions).
 * Of each text the first 2,048 characters count. 0 on failed allocation. */
double eval_block_ratio(const struct eval_text *a, const struct eval_text *b);

/* ROUGE-L F of output against a reference, as the package `rouge` 1.0.1 computes it, which LongBench calls: texts are
 * split into sentences at full stops; for each pair of sentences their longest common subsequence of words; the union
 * of those, as a set of words, over the set of words of either text. 0 when a text has nothing but full stops, and on
 * failed allocation. Of a sentence of the output the first 8,192 words count. */
double eval_rouge_l(const struct eval_text *output, const struct eval_text *reference);

#endif
