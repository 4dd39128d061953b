/* SPDX-License-Identifier: Apache-2.0
 *
 * One example on its way into records: read from a sequence's cache, its targets from the teacher's attention.
 * record.c computes the sequences.
 */
#ifndef POLICY_TRAIN_RECORDING_H
#define POLICY_TRAIN_RECORDING_H

#include "policy/train/record.h"

enum { RECORDING_TEACHER = UINT32_MAX };

/* Work space for reading caches. Whoever reads all heads of one gives way between them (train_yield): a long one takes
 * a millisecond or two. */
struct recording_reader {
    struct training *training;
    const struct records *records;
    struct head_features features; /* values and head_window: of records with outputs */
    float *inputs;                 /* [slots][fixed] */
};
/* slots: most of a head; window: queries whose attention outputs are recorded from. */
int recording_reader_open(struct recording_reader *reader, struct training *training, const struct records *records,
    uint32_t slots, uint32_t window, struct error *error);
void recording_reader_close(struct recording_reader *reader);

struct recording {
    struct recorded_sequence *out;
    uint32_t student; /* whose cache; RECORDING_TEACHER: the teacher's */
    uint32_t at, end; /* tokens seen, then and when its future ends */
    float *future;    /* [heads of the example][at] attention that positions get from what follows */
};

/* Chooses the heads of example `index`, and makes room for what the teacher will pay. ERROR_MEMORY. */
int recording_open(
    const struct records *records, uint64_t seed, uint32_t index, struct recording *example, struct error *error);
/* Frees what the example holds beside its record; failed: that too. */
void recording_close(struct recording *example, bool failed);

/* The teacher's attention, when it has seen `at` tokens, and when it has seen `end`; of its own cache also what outputs
 * are made of. */
int recording_begin_future(
    struct recording_reader *reader, struct recording *example, struct sequence *teacher, struct error *error);
int recording_end_future(
    struct recording_reader *reader, struct recording *example, struct sequence *teacher, struct error *error);
/* Reads the cache of a sequence that has seen `at` tokens. Targets hold what a slot adds to the output until
 * recording_finish. standards [heads of the model]: what FEATURES_PAPER has frozen; NULL: that of the cache. */
int recording_read(struct recording_reader *reader, struct recording *example, struct sequence *sequence,
    const float (*standards)[6], struct error *error);
/* FEATURES_PAPER: what a prune of the sequence now would freeze: standards [heads of the model], of those that do not
 * slide. */
int recording_standards(
    struct recording_reader *reader, struct sequence *sequence, float (*standards)[6], struct error *error);
/* Targets, once cache and future are known. */
void recording_finish(struct recording *example);

/* Bytes that a slot of a head takes. */
size_t recording_slot_bytes(const struct records *records);

#endif
