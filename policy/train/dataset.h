/* SPDX-License-Identifier: Apache-2.0
 *
 * What a policy is trained on: sequences of tokens from files, cut into a prompt and what follows.
 *
 * Files: plain text (.txt: one long text, cut into sequences; only its first half is used unless `whole`, the second is
 * the evaluation's), or JSON lines with "text" (one after the other they make a long text, so that short ones serve
 * too), or "prompt" and optionally "completion", or "messages" (rendered as the server does, engine/chat_template.h,
 * with CHAT_FIXED_TIME; a last message of the assistant is the completion). Lines whose prompt is too short or too long
 * are passed over. `copying` adds generated prompts that can only be continued by copying from them (copying.h). Order
 * and cuts depend on the seed only.
 */
#ifndef POLICY_TRAIN_DATASET_H
#define POLICY_TRAIN_DATASET_H

#include "engine/chat_template.h"
#include "engine/tokenizer.h"

enum dataset_part {
    DATASET_ALL,
    DATASET_TRAIN,    /* the first nine tenths of a text, nine of ten lines */
    DATASET_HELD_OUT, /* the rest; of generated sequences others */
};

struct dataset_options {
    const struct tokenizer *tokenizer;
    struct chat_source chat; /* that writes messages */
    uint32_t least, most;    /* tokens of a prompt */
    uint32_t future;         /* tokens that must follow it; for records with a completion as many as there are */
    double copying;          /* part of the sequences, 0 to 1 */
    bool whole;
    enum dataset_part part;
    uint64_t seed;
};

struct dataset_sequence {
    const int32_t *tokens;
    uint32_t prompt; /* tokens of the prompt */
    uint32_t count;  /* of all; of a prompt without a completion the same */
    bool own;        /* what follows the prompt is to be the teacher's own continuation (every other sequence) */
    bool copies;     /* generated */
    bool chat;       /* messages: begins as the template lets it begin; all others with the BOS token, where the model
                        wants one */
};

struct dataset; /* opaque */
/* ERROR_IO, ERROR_FORMAT ("FILE: line N: ..."), ERROR_INVALID (nothing long enough in it), ERROR_MEMORY. file NULL:
 * only generated sequences. */
struct dataset *dataset_load(const char *file, const struct dataset_options *options, struct error *error);
void dataset_free(struct dataset *dataset); /* NULL allowed */

/* Sequence `index` of an endless, seeded order over the data; valid until the next call. */
int dataset_sequence(struct dataset *dataset, uint64_t index, struct dataset_sequence *out, struct error *error);
uint64_t dataset_tokens(const struct dataset *dataset); /* of the file */

#endif
