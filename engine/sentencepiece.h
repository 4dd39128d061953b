/* SPDX-License-Identifier: Apache-2.0
 *
 * The two SentencePiece models, read from GGUF metadata: text to pieces of a vocabulary whose spaces are marks.
 *
 * A text is normalised first: what the file's precompiled map has is replaced, the longest key at each place
 * (character_map.h), but not within user-defined tokens; a space is put before it (tokenizer.ggml.add_space_prefix,
 * true when absent) and, where tokenizer.ggml.remove_extra_whitespaces is true, spaces at its ends go and runs of them
 * become one; U+2581 counts as a space. User-defined tokens are found next, the longest at each place. What lies
 * between becomes pieces: BPE
 * (`llama`)  neighbours that join to a token are joined, best score first, leftmost of equals, until none do. With
 * tokenizer.ggml.merges and no scores, those merges are used, lowest rank first. unigram  (`t5`)     the pieces of the
 * largest sum of scores. A character that begins no piece costs 10 more than the worst piece; user-defined tokens
 * always win. A character that is no piece becomes the tokens of its bytes; without those, it and its neighbours of
 * that sort become one unknown token. Bytes that are not UTF-8 are taken one by one.
 *
 * The time is O(n log n) for BPE, O(n longest piece) for unigram, n bytes of the normalised text.
 * Sources: Kudo, Richardson 2018, "SentencePiece"; Kudo 2018, "Subword regularization"; GGUF specification.
 */
#ifndef ENGINE_SENTENCEPIECE_H
#define ENGINE_SENTENCEPIECE_H

#include "engine/bpe.h"
#include "engine/token_list.h"
#include "engine/vocabulary.h"

struct sentencepiece; /* opaque; may be shared by threads */

/* vocabulary: with SPELLING_MARKS; it must outlive the result. NULL with a message. */
struct sentencepiece *sentencepiece_create(
    const struct gguf *gguf, const struct vocabulary *vocabulary, bool unigram, struct error *error);
void sentencepiece_free(struct sentencepiece *model);

bool sentencepiece_adds_space(const struct sentencepiece *model); /* before a text */

/* Memory of one thread, kept from one text to the next; zero-initialise. */
struct sentencepiece_scratch {
    struct bpe_scratch bpe;
    char *text; /* normalised */
    size_t capacity;
    struct sentencepiece_node *nodes; /* unigram's lattice */
    size_t node_capacity;
};
void sentencepiece_scratch_free(struct sentencepiece_scratch *scratch);

/* Appends the ids of text [bytes]. 0 or ERROR_MEMORY; out may have grown then. bytes < 2^31. */
int sentencepiece_encode(const struct sentencepiece *model, struct sentencepiece_scratch *scratch, const char *text,
    size_t bytes, struct token_list *out);

#endif
