/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/copying.h"

#include "engine/random.h"
#include "policy/eval/prose.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STREAM_COPYING = 0x434F5059, PIECE_BYTES = PROSE_SENTENCE_MAX + 2, FACTS_MAX = 64, KINDS = 4 };
enum { QUESTION_TOKENS = 32 /* of a question with one answer, about */ };

/* What one prompt is made with. Random numbers are counted, so that a prompt depends on (seed, index) alone. */
struct writer {
    const struct copying_options *options;
    struct token_list *out;
    uint64_t index;
    uint32_t draws, sentences;
};

static uint32_t draw(struct writer *writer, uint32_t below) {
    uint32_t words[4];
    random_philox(writer->options->seed, STREAM_COPYING, writer->draws++, writer->index, words);
    return words[0] % below;
}

static int write_text(struct writer *writer, const char *text, struct error *error) {
    return tokenizer_encode(writer->options->tokenizer, text, strlen(text), false, writer->out, error);
}

static int append(struct writer *writer, const int32_t *ids, size_t count, struct error *error) {
    for (size_t i = 0; i < count; i++)
        if (token_list_append(writer->out, ids[i]) != 0)
            return error_set(error, ERROR_MEMORY, "no memory for a prompt");
    return 0;
}

/* ---- passages ---- */

static int write_prose(struct writer *writer, size_t until, struct error *error) {
    char sentence[PIECE_BYTES];
    int code = 0;
    while (writer->out->count < until && code == 0) {
        uint32_t number = (uint32_t)(writer->index * 8191) + writer->sentences++;
        size_t bytes = prose_sentence(writer->options->seed, STREAM_COPYING, number, sentence);
        strcpy(sentence + bytes, writer->sentences % 6 == 0 ? "\n" : " ");
        code = write_text(writer, sentence, error);
    }
    return code;
}

/* Natural text, or prose, up to so many tokens in all; a little more when it is prose. */
static int write_passage(struct writer *writer, size_t until, struct error *error) {
    const struct copying_options *options = writer->options;
    if (writer->out->count >= until)
        return 0;
    size_t count = until - writer->out->count;
    if (options->text_count <= count || draw(writer, 4) == 0)
        return write_prose(writer, until, error);
    size_t start = draw(writer, (uint32_t)(options->text_count - count));
    return append(writer, options->text + start, count, error);
}

/* ---- facts ---- */

struct fact {
    char name[32], value[32];
    size_t place; /* in the tokens */
};

static void make_word(struct writer *writer, char *word) {
    static const char *const syllables[] = {"ba", "do", "ker", "lin", "mo", "ra", "sel", "ti", "ven", "zu", "pha",
        "gor", "nis", "wel", "qua", "jor", "fel", "hum", "cas", "yr"};
    uint32_t count = 2 + draw(writer, 2);
    word[0] = '\0';
    for (uint32_t i = 0; i < count; i++)
        strcat(word, syllables[draw(writer, sizeof syllables / sizeof syllables[0])]);
}

static void make_fact(struct writer *writer, struct fact *fact) {
    make_word(writer, fact->name);
    if (draw(writer, 2) == 0)
        snprintf(fact->value, sizeof fact->value, "%u", 10000 + draw(writer, 90000));
    else
        make_word(writer, fact->value);
}

/* How a kind says its facts, and asks for them again: what stands before, between and after name and value. */
struct form {
    const char *intro, *statement[3], *asking, *answer[3];
    bool in_order;
};

static const struct form forms[] = {
    {"Registry of codes.\n", {"", ": ", "\n"}, "\nCodes looked up in the registry:\n", {"", ": ", "\n"}, false},
    {"The list has these entries.\n", {"- ", " (", ")\n"}, "\nThe list once more, from its beginning:\n",
        {"- ", " (", ")\n"}, true},
    {"# settings\n", {"", " = ", "\n"}, "\n# what each of them prints\n", {"print(", ")  # ", "\n"}, false},
};

static int write_fact(
    struct writer *writer, const char *const around[3], const struct fact *fact, struct error *error) {
    char text[128];
    snprintf(text, sizeof text, "%s%s%s%s%s", around[0], fact->name, around[1], fact->value, around[2]);
    return write_text(writer, text, error);
}

static int write_filler(struct writer *writer, struct error *error) {
    int code = write_prose(writer, writer->out->count + 1 + draw(writer, 60), error);
    return code == 0 ? write_text(writer, "\n", error) : code;
}

/* States facts and filler until the prompt is nearly full. Returns the number of facts in *count. */
static int state_facts(struct writer *writer, const struct form *form, size_t until, struct fact *facts,
    uint32_t *count, struct error *error) {
    uint32_t apart = 1 + draw(writer, 6); /* facts between pieces of filler */
    int code = write_text(writer, form->intro, error);
    *count = 0;
    while (code == 0 && (*count < 4 || writer->out->count < until)) {
        if (*count == FACTS_MAX)
            return write_prose(writer, until, error);
        make_fact(writer, &facts[*count]);
        facts[*count].place = writer->out->count;
        code = write_fact(writer, form->statement, &facts[(*count)++], error);
        if (code == 0 && *count % apart == 0)
            code = write_filler(writer, error);
    }
    return code;
}

/* The first fact that will not be cut (cut_front), as far as that can be told before the question. */
static uint32_t first_kept(const struct writer *writer, const struct fact *facts, uint32_t count, uint32_t length) {
    size_t cut = writer->out->count + QUESTION_TOKENS > length ? writer->out->count + QUESTION_TOKENS - length : 0;
    uint32_t first = 0;
    while (first + 1 < count && facts[first].place < cut)
        first++;
    return first;
}

static int write_facts(
    struct writer *writer, const struct form *form, uint32_t length, uint32_t *prompt, struct error *error) {
    struct fact facts[FACTS_MAX];
    uint32_t count = 0, given = draw(writer, 2);
    int code = state_facts(writer, form, length, facts, &count, error);
    uint32_t first = first_kept(writer, facts, count, length);
    if (code == 0)
        code = write_text(writer, form->asking, error);
    *prompt = (uint32_t)writer->out->count;
    for (uint32_t i = 0; code == 0 && writer->out->count < (size_t)*prompt + writer->options->future; i++) {
        const struct fact *fact = &facts[first + (form->in_order ? i % (count - first) : draw(writer, count - first))];
        code = write_fact(writer, form->answer, fact, error);
        if (i + 1 == given) /* one as an example */
            *prompt = (uint32_t)writer->out->count;
    }
    return code;
}

/* ---- repetition ---- */

static int write_repetition(struct writer *writer, uint32_t length, uint32_t *prompt, struct error *error) {
    uint32_t passage = writer->options->future + 8;
    passage = passage > length / 2 ? length / 2 : passage;
    uint32_t room = length - passage > 16 ? length - passage - 16 : 1;
    uint32_t least = room / 2 < QUESTION_TOKENS ? room / 2 : QUESTION_TOKENS; /* what is cut in front is no passage */
    uint32_t before = least + draw(writer, room - least);
    int code = write_passage(writer, before, error);
    if (code == 0 && before > 0)
        code = write_text(writer, "\n\n", error);
    size_t start = writer->out->count;
    if (code == 0)
        code = write_passage(writer, start + passage, error);
    size_t end = writer->out->count;
    if (code == 0)
        code = write_text(writer, "\n\n", error);
    if (code == 0)
        code = write_passage(writer, length, error);
    if (code == 0)
        code = write_text(writer, "\n\nThe same passage, word for word:\n\n", error);
    uint32_t shown = 4 < end - start ? 4 : 0; /* which of the passages is meant */
    *prompt = (uint32_t)writer->out->count + shown;
    for (size_t at = start; code == 0 && writer->out->count < (size_t)*prompt + writer->options->future;
         at = at + 1 < end ? at + 1 : start) {
        int32_t id = writer->out->ids[at];
        code = append(writer, &id, 1, error);
    }
    return code;
}

/* ---- a prompt ---- */

/* What is too long goes in front: most of what is asked for stays. */
static void cut_front(struct token_list *out, uint32_t *prompt, uint32_t most) {
    if (*prompt <= most)
        return;
    size_t cut = *prompt - most;
    memmove(out->ids, out->ids + cut, (out->count - cut) * sizeof *out->ids);
    out->count -= cut;
    *prompt = most;
}

int copying_generate(const struct copying_options *options, uint64_t index, struct token_list *out, uint32_t *prompt,
    struct error *error) {
    struct writer writer = {.options = options, .out = out, .index = index};
    uint32_t length = options->least + draw(&writer, options->most - options->least + 1), kind = index % KINDS;
    out->count = 0;
    int code = kind == 1 ? write_repetition(&writer, length, prompt, error)
                         : write_facts(&writer, &forms[kind > 1 ? kind - 1 : 0], length, prompt, error);
    if (code != 0)
        return code;
    cut_front(out, prompt, length);
    out->count = (size_t)*prompt + options->future;
    return 0;
}
