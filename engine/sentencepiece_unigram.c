/* SPDX-License-Identifier: Apache-2.0
 *
 * SentencePiece's unigram model: the way through a text whose pieces have the largest sum of scores (Viterbi).
 */
#include "engine/sentencepiece_internal.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { UNKNOWN_PENALTY = 10 }; /* below the lowest score */

static int reserve(struct sentencepiece_scratch *scratch, size_t nodes) {
    if (nodes <= scratch->node_capacity)
        return 0;
    free(scratch->nodes);
    scratch->node_capacity = 0;
    scratch->nodes = malloc(nodes * sizeof *scratch->nodes);
    if (scratch->nodes == NULL)
        return ERROR_MEMORY;
    scratch->node_capacity = nodes;
    return 0;
}

/* The first of equals stays. Ties are common (runs of one character), and which way wins hangs on how the scores before
 * were rounded: sums are in single precision, from the start of the text on. */
static void offer(struct sentencepiece_node *node, float score, int32_t token, size_t from) {
    if (node->from == SIZE_MAX || score > node->score)
        *node = (struct sentencepiece_node){score, token, from};
}

/* A user-defined token, by its bytes with marks. As sentencepiece computes it, in double precision up to the end: no
 * piece scores more. */
static float score_user_defined(const struct sentencepiece *model, const char *text, size_t bytes) {
    size_t marked = bytes;
    for (size_t i = 0; i < bytes; i++)
        marked += text[i] == ' ' ? 2 : 0;
    return (float)((double)((float)marked * fmaxf(model->highest, FLT_MIN)) - 0.1);
}

/* All pieces that begin at a place, and its character as an unknown one where that is no piece. */
static void go_on(const struct sentencepiece *model, struct sentencepiece_node *nodes, const char *text, size_t bytes,
    size_t at, size_t character) {
    const float before = nodes[at].score;
    const size_t most = bytes - at < model->longest ? bytes - at : model->longest;
    bool is_piece = false;
    for (size_t length = character; length <= most;) {
        struct gguf_string piece = {text + at, length};
        int32_t id = vocabulary_find(model->vocabulary, piece, (struct gguf_string){NULL, 0});
        int32_t user = text_set_find(&model->user_defined, piece.text, length);
        if (id >= 0)
            offer(&nodes[at + length], before + sentencepiece_score(model, (uint32_t)id), id, at);
        if (user >= 0)
            offer(&nodes[at + length], before + score_user_defined(model, piece.text, length), user, at);
        id = id >= 0 ? id : user;
        is_piece |= id >= 0 && length == character;
        int32_t next;
        length += at + length < bytes ? sentencepiece_character(text + at + length, bytes - at - length, &next) : 1;
    }
    if (!is_piece)
        offer(&nodes[at + character], before + (model->lowest - UNKNOWN_PENALTY), -1, at);
}

/* Turns the way to the end round: each node of it then leads to the next. Returns where the first piece ends. */
static void turn_round(struct sentencepiece_node *nodes, size_t bytes) {
    size_t at = bytes, next = SIZE_MAX;
    int32_t token = -1;
    while (at > 0) {
        struct sentencepiece_node here = nodes[at];
        nodes[at] = (struct sentencepiece_node){0, token, next};
        next = at;
        token = here.token;
        at = here.from;
    }
    nodes[0] = (struct sentencepiece_node){0, token, next};
}

int sentencepiece_encode_unigram(const struct sentencepiece *model, struct sentencepiece_scratch *scratch,
    const char *text, size_t bytes, bool *after_unknown, struct token_list *out) {
    if (reserve(scratch, bytes + 1) != 0)
        return ERROR_MEMORY;
    struct sentencepiece_node *nodes = scratch->nodes;
    int32_t character;
    for (size_t i = 0; i <= bytes; i++)
        nodes[i].from = SIZE_MAX;
    nodes[0].score = 0;
    for (size_t at = 0, length; at < bytes; at += length) {
        length = sentencepiece_character(text + at, bytes - at, &character);
        go_on(model, nodes, text, bytes, at, length);
    }
    turn_round(nodes, bytes);
    for (size_t at = 0; at < bytes; at = nodes[at].from) {
        int32_t token = nodes[at].token;
        int code = 0;
        if (token < 0) {
            code = sentencepiece_fall_back(model, text + at, nodes[at].from - at, after_unknown, out);
        } else {
            code = token_list_append(out, token);
            *after_unknown = false;
        }
        if (code != 0)
            return code;
    }
    return 0;
}
