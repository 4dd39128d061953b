/* SPDX-License-Identifier: Apache-2.0
 *
 * A model's vocabulary as grammars look at it: tries of the tokens' bytes, and which tokens fit into any JSON string.
 *
 * A trie is an array of nodes in depth-first order: what is below a node lies between it and `skip`. A walk along an
 * automaton leaves a branch with the first byte that is not allowed. (The layout is that of llguidance's toktrie, as
 * its documentation describes it.)
 *
 * A token is `shown` if it has whole UTF-8 characters only, all of which a JSON string shows as they are. In a string
 * all shown tokens of at most as many characters as are left are allowed, which needs no walk; `rest` has the others
 * only. (XGrammar calls these tokens context-independent, llguidance has slices.)
 *
 * The same for other sets of bytes, of patterns such as [a-z]+: slice.h.
 *
 * Special tokens and those without bytes are in no trie. End tokens are allowed where a text may end.
 */
#ifndef GRAMMAR_VOCABULARY_H
#define GRAMMAR_VOCABULARY_H

#include "engine/tokenizer.h"

struct trie_node {
    uint32_t skip;  /* index of the first node that is not below this one */
    uint32_t first; /* in trie.tokens: of its tokens and those below it */
    uint16_t depth; /* of its parent: bytes before this one's */
    uint8_t tokens; /* how many there are, of the same bytes: 255 at most, others are never allowed */
    uint8_t byte;
};

struct trie {
    struct trie_node *nodes; /* [count] and an end: first of it is the number of tokens */
    uint32_t count;
    int32_t *tokens; /* sorted by their bytes */
    uint32_t tokens_count;
};

struct grammar_vocabulary {
    const struct tokenizer *tokenizer;
    uint32_t words;   /* of a mask: bit id % 32 of word id / 32 */
    uint32_t longest; /* bytes of a token in a trie */
    struct trie all, rest;
    uint32_t shown_longest; /* characters of a shown token */
    uint32_t *shown;        /* [shown_longest + 1][words]: those of at most that many characters */
    uint32_t *ends;         /* [words] */
    struct slice_cache *slices;
};

/* vocabulary: number of logits, at least the tokenizer's number of tokens. The tokenizer must outlive it.
 * ERROR_MEMORY. Takes some 30 ms for 50,000 tokens. */
struct grammar_vocabulary *grammar_vocabulary_create(
    const struct tokenizer *tokenizer, uint32_t vocabulary, struct error *error);
void grammar_vocabulary_free(struct grammar_vocabulary *vocabulary); /* NULL allowed */

#endif
