/* SPDX-License-Identifier: Apache-2.0
 *
 * Plain English sentences out of word lists, for generated tasks: filler between facts, and text to continue. They hold
 * no digits and none of the names that tasks ask for. The n-th sentence of a seed and stream is always the same.
 */
#ifndef POLICY_EVAL_PROSE_H
#define POLICY_EVAL_PROSE_H

#include <stddef.h>
#include <stdint.h>

enum { PROSE_SENTENCE_MAX = 320 };

/* Writes sentence number `index`, with its full stop and without a space before or after it; returns its bytes. */
size_t prose_sentence(uint64_t seed, uint32_t stream, uint32_t index, char out[static PROSE_SENTENCE_MAX]);

#endif
