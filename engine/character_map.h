/* SPDX-License-Identifier: Apache-2.0
 *
 * A SentencePiece model's precompiled normalisation: which strings of a text are replaced by which, as the GGUF array
 * tokenizer.ggml.precompiled_charsmap has it (normalizer_spec.precompiled_charsmap of a model file): a number of bytes,
 * then so many of a double-array trie of 32-bit units that maps keys to offsets, then the replacements, each ended by
 * NUL. Numbers are little endian.
 *
 * A unit has in bits 0 to 7 and 31 the byte that leads to it (its label; bit 31 is set of a value's unit, whose other
 * bits are the value), in bit 8 whether a key ends there, and in bits 10 to 30, shifted by 8 more where bit 9 is set,
 * what the place of the next units is reached by (exclusive or with the place, and with the next byte).
 * Sources: SentencePiece's src/normalizer.cc says what is stored; Yata's darts-clone documents the units.
 */
#ifndef ENGINE_CHARACTER_MAP_H
#define ENGINE_CHARACTER_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "engine/error.h"
#include "engine/gguf.h"

/* Borrows from the file. Zeros: nothing is replaced. */
struct character_map {
    const uint8_t *units; /* [count] 32 bits each, unaligned */
    size_t count;
    const char *replacements; /* [bytes], the last one NUL */
    size_t bytes;
};

/* Longest replacement, so that a text grows by a bounded factor (in the maps in use: 33 bytes). */
enum { CHARACTER_MAP_LONGEST = 255 };

/* A file without the array gives zeros. ERROR_FORMAT. */
int character_map_read(struct character_map *map, const struct gguf *gguf, struct error *error);

/* Bytes of the longest key that text [bytes] begins with; 0: none. *replacement ends with NUL. */
size_t character_map_match(const struct character_map *map, const char *text, size_t bytes, const char **replacement);

#endif
