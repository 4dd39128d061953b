/* SPDX-License-Identifier: Apache-2.0
 *
 * A scheduler and a tokenizer without a model, for tests of the server: they define the functions of engine/scheduler.h
 * and engine/tokenizer.h. What they answer is predictable, and the scheduler has a thread of its own, so that the
 * loop's threads can be tested (also under TSan).
 *
 * Tokenizer: token i < 256 is byte i; 256 <|im_start|> (BOS, not added), 257 <|im_end|> (end), 258 <|endoftext|> (end).
 *
 * Scheduler: a choice's answer is its prompt again, token by token, one a step, without end (the prompt is repeated);
 * a special token of the prompt ends it (unless ignore_eos). Log-probability of token t is -(t % 16) / 16; the most
 * likely ones are t, t + 1, ... Stop strings, UTF-8 boundaries, echo and cancellation work as in the real one. The
 * prefix cache reports half of each prompt as cached; a quarter of a token beyond the budget of its policy is kept, a
 * token has FAKE_TOKEN_BYTES. The hidden state of token t is (t, 1, 0, 0). A prompt that begins with
 *   "!fail"   fails before its first token        "!late"   fails after three tokens
 *   "!never"  stays in the queue                  "!slow"   takes ten steps for each token
 */
#ifndef TESTS_UNIT_FAKE_SCHEDULER_H
#define TESTS_UNIT_FAKE_SCHEDULER_H

#include "engine/scheduler.h"

struct fake_options {
    unsigned step_us;     /* a step takes this long */
    unsigned max_running; /* choices */
    unsigned max_waiting; /* requests */
    unsigned tokens_max;
    void (*wake)(void *context);
    void *wake_context;
};

enum { FAKE_VOCABULARY = 259, FAKE_BOS = 256, FAKE_EOS = 257, FAKE_WIDTH = 4, FAKE_TOKEN_BYTES = 100 };

/* SmolLM2's chat template. */
#define FAKE_TEMPLATE                                                                                                  \
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"     \
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"                  \
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"               \
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

struct scheduler *fake_scheduler_create(const struct fake_options *options);
struct tokenizer *fake_tokenizer_create(bool adds_bos);

#endif
