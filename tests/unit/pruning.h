/* SPDX-License-Identifier: Apache-2.0
 *
 * Sequences under policies on a tiny random model, for tests of the engine: a stream feeds given tokens, first a prompt
 * in chunks and then one by one, and notes logits and what is kept after every prune.
 */
#ifndef TESTS_PRUNING_H
#define TESTS_PRUNING_H

#include "engine/engine.h"
#include "tests/unit/tiny_llama.h"

/* All policies, and the options that change when and how they prune. */
enum { PRUNING_POLICIES = 35 };
extern const char *const pruning_policies[PRUNING_POLICIES];

struct model *pruning_model(const struct tiny_llama *shape);

/* KV f16 unless options say otherwise; poison_free, two threads, and the chosen backend (chosen_backend.h) unless a
 * tier of the CPU is asked for. */
struct engine *pruning_engine(const struct model *model, const struct engine_options *options);
/* Closes it; the test fails when a sequence left anything behind. */
void pruning_engine_close(struct engine *engine);

/* Makes small random networks the ones of distillcache and ranker that ship for the engine's model, in this folder. */
void pruning_ship_networks(const struct engine *engine, const char *folder);

/* As on the command line; the test fails when it is refused. */
struct policy_settings pruning_settings(const char *text);

/* Token number i of text number `text`. */
int32_t pruning_token(const struct model *model, uint32_t text, uint32_t i);

struct stream {
    struct engine *engine;
    struct sequence *sequence;
    int32_t *tokens; /* [total] */
    uint32_t prompt, total, done;
    float *logits; /* [total - prompt + 1][vocabulary] from the prompt's last token on */
    uint64_t
        *kept; /* [total - prompt + 1] a hash over the positions that each head holds after the prune, by position */
};

/* policy NULL: none is set. */
struct stream *stream_create(struct engine *engine, const char *policy, uint32_t text, uint32_t prompt, uint32_t total);
struct stream *stream_fork(const struct stream *stream);
void stream_free(struct stream *stream); /* NULL allowed */

/* One batch and its prune: each of streams [count] that is not done goes on by at most `chunk` prompt tokens, or one.
 * Returns whether anything was left to do. The test fails on an error. */
bool streams_step(struct stream *const *streams, uint32_t count, uint32_t chunk);
void streams_run(struct stream *const *streams, uint32_t count, uint32_t chunk);
void stream_run(struct stream *stream);

/* Logits and kept positions of every step are the same, bit for bit; from step `first` on (0: the prompt's end). */
void streams_require_same(const struct stream *a, const struct stream *b, uint32_t first, const char *what);

/* Positions that a head holds, ascending: out [tokens]; returns how many. */
uint32_t stream_positions(const struct stream *stream, uint32_t layer, uint32_t head, uint32_t *out);

#endif
