/* SPDX-License-Identifier: Apache-2.0
 *
 * Follows a text byte by byte through a grammar, and says which tokens may come next.
 *
 * The grammar is a pushdown automaton. A stack is a list of what has still to be written: an expression (with the place
 * in a literal, or the counts that are left of a repetition) and the stack below it. Equal stacks are one object, so
 * that a stack is a number. A state is the set of stacks that the text so far may have led to. States, too, are made
 * once, when they are first met; each remembers where its bytes lead, and its mask of tokens. (The sets are Antimirov's
 * partial derivatives, with a stack in place of a regular expression's concatenation.)
 *
 * A mask comes from a walk over the vocabulary's trie; inside a string only over the tokens that contain a quotation
 * mark, a backslash or a part of a character, the others being known (vocabulary.h).
 *
 * Memory grows with the states met: automaton_trim drops all but those where texts are when there are many. Beyond
 * AUTOMATON_BYTES_MAX, or with more than AUTOMATON_WORK_MAX steps for one mask or byte, a grammar is refused while it
 * runs (ERROR_UNSUPPORTED): only grammars that are made to be ambiguous come there.
 *
 * Not safe on several threads: one automaton per request.
 */
#ifndef GRAMMAR_AUTOMATON_H
#define GRAMMAR_AUTOMATON_H

#include "grammar/grammar.h"
#include "grammar/vocabulary.h"

enum {
    AUTOMATON_BYTES_KEPT = 8 << 20, /* automaton_trim drops states above */
    AUTOMATON_BYTES_MAX = 32 << 20,
    AUTOMATON_WORK_MAX = 1 << 18, /* stacks looked at */
};

struct automaton; /* opaque */

/* Where a text is. Zero: not in the automaton yet. */
struct automaton_place {
    uint32_t state;
    uint32_t epoch;
};

/* Grammar and vocabulary (NULL: no masks are wanted) must outlive it. ERROR_MEMORY. */
struct automaton *automaton_create(
    const struct grammar *grammar, const struct grammar_vocabulary *vocabulary, struct error *error);
void automaton_free(struct automaton *automaton); /* NULL allowed */

/* Drops what was remembered if it is much, and makes anew the states of places [count], each `stride` bytes after the
 * one before. */
void automaton_trim(struct automaton *automaton, struct automaton_place *places, size_t stride, uint32_t count);
/* The place was not started, or not among the places when states were dropped, or there was no memory for it then: it
 * must be started, and led through its text. */
bool automaton_is_lost(const struct automaton *automaton, const struct automaton_place *place);

/* Returns 0; ERROR_INVALID: these bytes are not allowed here (the place is then as before); ERROR_UNSUPPORTED,
 * ERROR_MEMORY. */
int automaton_start(struct automaton *automaton, struct automaton_place *place, struct error *error);
int automaton_advance(
    struct automaton *automaton, struct automaton_place *place, const void *bytes, size_t count, struct error *error);

bool automaton_may_end(const struct automaton *automaton, const struct automaton_place *place);
/* It may, and nothing else may follow. */
bool automaton_must_end(const struct automaton *automaton, const struct automaton_place *place);

/* Which tokens may follow, end tokens included: mask [vocabulary.words]. ERROR_INVALID: none, since the vocabulary
 * lacks a byte; ERROR_UNSUPPORTED, ERROR_MEMORY. */
int automaton_mask(
    struct automaton *automaton, const struct automaton_place *place, uint32_t *mask, struct error *error);

/* Which bytes may follow: set bits. For tests. */
int automaton_bytes(
    struct automaton *automaton, const struct automaton_place *place, struct byte_set *bytes, struct error *error);

struct automaton_figures {
    uint32_t states, stacks;
    uint64_t masks, masks_made; /* asked for; not remembered */
    size_t bytes;
};
void automaton_get_figures(const struct automaton *automaton, struct automaton_figures *out);

#endif
