/* SPDX-License-Identifier: Apache-2.0
 *
 * The data of training: formats and their errors, parts, seeded order, and generated prompts that can only be continued
 * by copying. With the tokenizer of a tiny model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/train/dataset.h"
#include "tests/unit/tiny_llama.h"

static struct gguf *model;
static struct tokenizer *tokenizer;
static struct chat_template *chat_template; /* ChatML */
static char folder[] = "/tmp/distillcache-dataset-XXXXXX";

#define CHATML                                                                                                         \
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"             \
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

static struct chat_template *template_of(const char *source) {
    struct error error = {0};
    struct chat_template *template = chat_template_create(source, strlen(source), tokenizer, &error);
    if (template == NULL)
        fail_msg("%s", error.message);
    return template;
}

static int set_up(void **state) {
    (void)state;
    struct error error = {0};
    struct tiny_llama options = tiny_llama_default();
    char *path = tiny_llama_save(&options);
    model = gguf_open(path, &error);
    unlink(path);
    free(path);
    tokenizer = model != NULL ? tokenizer_create(model, &error) : NULL;
    chat_template = tokenizer != NULL ? template_of(CHATML) : NULL;
    return chat_template == NULL || mkdtemp(folder) == NULL;
}

static int tear_down(void **state) {
    (void)state;
    chat_template_free(chat_template);
    tokenizer_free(tokenizer);
    gguf_free(model);
    return rmdir(folder);
}

static const char *write_file(const char *name, const char *text) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
    return path;
}

static struct dataset_options usual(void) {
    return (struct dataset_options){
        .tokenizer = tokenizer, .chat = {chat_template, NULL}, .least = 8, .most = 20, .future = 5, .seed = 3};
}

static struct dataset *load(const char *name, const char *text, const struct dataset_options *options) {
    struct error error = {0};
    const char *path = write_file(name, text);
    struct dataset *dataset = dataset_load(path, options, &error);
    unlink(path);
    if (dataset == NULL)
        fail_msg("%s", error.message);
    return dataset;
}

static struct dataset_sequence take(struct dataset *dataset, uint64_t index) {
    struct dataset_sequence sequence;
    struct error error = {0};
    if (dataset_sequence(dataset, index, &sequence, &error) != 0)
        fail_msg("%s", error.message);
    return sequence;
}

/* The text of tokens; the caller frees it. */
static char *text_of(const int32_t *tokens, uint32_t count) {
    char *text = calloc(count + 1, 32), *end = text;
    assert_non_null(text);
    for (uint32_t i = 0; i < count; i++) {
        size_t length;
        const char *part = tokenizer_token_bytes(tokenizer, tokens[i], &length);
        assert_true(length < 32);
        memcpy(end, part, length);
        end += length;
    }
    return text;
}

/* Lines of one digit and a letter that names the line's place. */
static char *make_lines(uint32_t lines) {
    char *text = calloc(lines, 12);
    assert_non_null(text);
    for (uint32_t i = 0; i < lines; i++)
        snprintf(text + strlen(text), 12, "%04u-wxyz\n", i % 10000);
    return text;
}

/* Cuts of the first half, as long as asked for, and nothing of the second half. */
static void test_text(void **state) {
    (void)state;
    struct dataset_options options = usual();
    char *text = make_lines(100);
    struct dataset *dataset = load("a.txt", text, &options);
    bool lengths[21] = {false}, own[2] = {false};
    uint32_t furthest = 0;
    for (uint64_t i = 0; i < 200; i++) {
        struct dataset_sequence sequence = take(dataset, i);
        assert_in_range(sequence.prompt, 8, 20);
        assert_int_equal(sequence.count, sequence.prompt + 5);
        assert_false(sequence.copies);
        lengths[sequence.prompt] = true;
        own[sequence.own] = true;
        char *cut = text_of(sequence.tokens, sequence.count), *found = strstr(text, cut);
        assert_non_null(found);
        uint32_t end = (uint32_t)(found - text) + (uint32_t)strlen(cut);
        furthest = end > furthest ? end : furthest;
        free(cut);
    }
    assert_true(lengths[8] && lengths[20] && lengths[14] && own[0] && own[1]);
    assert_in_range(furthest, 450, 500); /* 50 lines of ten bytes */
    dataset_free(dataset);
    options.whole = true;
    dataset = load("a.txt", text, &options);
    assert_in_range(dataset_tokens(dataset), 700, 1000); /* two letters may be one token */
    dataset_free(dataset);
    free(text);
}

/* One pass takes every piece once; the seed decides the order. */
static void test_order(void **state) {
    (void)state;
    struct dataset_options options = usual();
    char *text = make_lines(100);
    struct dataset *a = load("a.txt", text, &options), *b = load("a.txt", text, &options);
    options.seed++;
    struct dataset *other = load("a.txt", text, &options);
    uint32_t same = 0, differ = 0;
    for (uint64_t i = 40; i-- > 0;) { /* backwards: an index is all that counts */
        struct dataset_sequence first = take(a, i), second = take(b, i), third = take(other, i);
        assert_int_equal(first.prompt, second.prompt);
        assert_memory_equal(first.tokens, second.tokens, first.count * sizeof(int32_t));
        differ += first.prompt != third.prompt || memcmp(first.tokens, third.tokens, 8 * sizeof(int32_t)) != 0;
        take(b, 7); /* another one in between */
        same++;
    }
    assert_int_equal(same, 40);
    assert_in_range(differ, 36, 40);
    dataset_free(a);
    dataset_free(b);
    dataset_free(other);
    free(text);
}

/* What is trained on and what is held out have nothing in common, and are all together. */
static void test_parts(void **state) {
    (void)state;
    struct dataset_options options = usual();
    char lines[2000] = "";
    for (int i = 0; i < 40; i++)
        snprintf(lines + strlen(lines), sizeof lines - strlen(lines), "{\"prompt\": \"%02d-abcdefghij\"}\n", i);
    bool seen[2][40] = {{false}};
    for (int part = 0; part < 2; part++) {
        options.part = part == 0 ? DATASET_TRAIN : DATASET_HELD_OUT;
        struct dataset *dataset = load("a.jsonl", lines, &options);
        for (uint64_t i = 0; i < (part == 0 ? 36 : 4); i++) { /* one pass */
            struct dataset_sequence sequence = take(dataset, i);
            char *text = text_of(sequence.tokens, sequence.count);
            int line = atoi(text);
            assert_false(seen[part][line]);
            seen[part][line] = true;
            assert_true(sequence.own); /* nothing follows */
            assert_int_equal(sequence.count, sequence.prompt);
            free(text);
        }
        dataset_free(dataset);
    }
    for (int i = 0; i < 40; i++)
        assert_int_equal(seen[0][i] + seen[1][i], 1);
    options.part = DATASET_TRAIN;
    char *text = make_lines(100);
    struct dataset *train = load("a.txt", text, &options);
    options.part = DATASET_HELD_OUT;
    struct dataset *held_out = load("a.txt", text, &options);
    options.part = DATASET_ALL;
    struct dataset *all = load("a.txt", text, &options);
    assert_int_equal(dataset_tokens(train) + dataset_tokens(held_out), dataset_tokens(all));
    assert_int_equal(dataset_tokens(held_out), dataset_tokens(all) / 10);
    dataset_free(train);
    dataset_free(held_out);
    dataset_free(all);
    free(text);
}

static void test_lines(void **state) {
    (void)state;
    struct dataset_options options = usual();
    options.most = 60;
    struct dataset *dataset = load("a.jsonl",
        "{\"prompt\": \"0123456789\", \"completion\": \"!?!\"}\n\n"
        "{\"prompt\": \"too\", \"completion\": \"short\"}\n"
        "{\"messages\": [{\"role\": \"system\", \"content\": \"S\"}, {\"role\": \"user\", \"content\": \"42\"}, "
        "{\"role\": \"assistant\", \"content\": \"##\"}]}\n",
        &options);
    bool completion = false, chat = false;
    for (uint64_t i = 0; i < 2; i++) {
        struct dataset_sequence sequence = take(dataset, i);
        char *prompt = text_of(sequence.tokens, sequence.prompt);
        char *rest = text_of(sequence.tokens + sequence.prompt, sequence.count - sequence.prompt);
        if (strcmp(prompt, "0123456789") == 0 && strcmp(rest, "!?!") == 0)
            completion = true;
        if (strcmp(prompt,
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n") == 0 &&
            strcmp(rest, "##") == 0)
            chat = sequence.tokens[0] == 1; /* special tokens are such */
        free(prompt);
        free(rest);
    }
    assert_true(completion && chat);
    dataset_free(dataset);
}

/* The only sequence of one conversation, and its prompt's text. */
static struct dataset *load_messages(
    const char *source, const char *messages, struct dataset_options *options, struct dataset_sequence *sequence) {
    char line[1000];
    struct chat_template *template = template_of(source);
    options->chat = (struct chat_source){template, NULL};
    options->most = 100;
    snprintf(line, sizeof line, "{\"messages\": [%s]}\n", messages);
    struct dataset *dataset = load("a.jsonl", line, options);
    chat_template_free(template);
    *sequence = take(dataset, 0);
    return dataset;
}

static void assert_messages(const char *source, const char *messages, const char *expected, const char *completion) {
    struct dataset_options options = usual();
    struct dataset_sequence sequence;
    struct dataset *dataset = load_messages(source, messages, &options, &sequence);
    char *prompt = text_of(sequence.tokens, sequence.prompt);
    char *rest = text_of(sequence.tokens + sequence.prompt, sequence.count - sequence.prompt);
    assert_string_equal(prompt, expected);
    assert_string_equal(rest, completion);
    free(prompt);
    free(rest);
    dataset_free(dataset);
}

/* Messages are written as the server writes them. */
static void test_templates(void **state) {
    (void)state;
    assert_messages("{{ strftime_now('%Y') }}{% for m in messages %}[{{ m.role }}]"
                    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}",
        "{\"role\": \"developer\", \"content\": \"12\"}, {\"role\": \"user\", \"content\": \"34\"}",
        "2024[system]12[user]34", "");
    assert_messages(CHATML,
        "{\"role\": \"user\", \"content\": \"1234\"}, {\"role\": \"assistant\", \"content\": \"!?\"}",
        "<|im_start|>user\n1234<|im_end|>\n<|im_start|>assistant\n", "!?");
}

/* What stands in a message stays text: one token for each byte of it here. */
static void test_special_texts(void **state) {
    (void)state;
    struct dataset_options options = usual();
    struct dataset_sequence sequence;
    struct dataset *dataset = load_messages(CHATML,
        "{\"role\": \"user\", \"content\": \"<|im_end|>\"}, {\"role\": \"assistant\", \"content\": \"<|im_end|>\"}",
        &options, &sequence);
    uint32_t ends = 0;
    for (uint32_t i = 0; i < sequence.count; i++)
        ends += sequence.tokens[i] == 2;
    assert_int_equal(ends, 1);
    assert_int_equal(sequence.count - sequence.prompt, strlen("<|im_end|>"));
    dataset_free(dataset);
}

/* A conversation begins as the template lets it begin, other sequences with BOS where the model wants it. */
static void test_first_token(void **state) {
    (void)state;
    struct tiny_llama wants = tiny_llama_default();
    wants.adds_bos = true;
    char *path = tiny_llama_save(&wants);
    struct gguf *file = gguf_open(path, NULL);
    struct dataset_options options = usual();
    struct tokenizer *other = tokenizer_create(file, NULL);
    assert_non_null(other);
    options.tokenizer = other;
    static const char source[] = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    struct dataset_sequence sequence;
    struct dataset *dataset =
        load_messages(source, "{\"role\": \"user\", \"content\": \"12345678\"}", &options, &sequence);
    assert_int_equal(sequence.tokens[0], 3 + '<');
    dataset_free(dataset);
    dataset = load("a.jsonl", "{\"prompt\": \"12345678\"}\n", &options);
    assert_int_equal(take(dataset, 0).tokens[0], 1);
    dataset_free(dataset);
    tokenizer_free(other);
    gguf_free(file);
    unlink(path);
    free(path);
}

/* Short texts make one long one, whose cuts begin where texts do. */
static void test_short_texts(void **state) {
    (void)state;
    struct dataset_options options = usual();
    char lines[4000] = "";
    for (int i = 0; i < 60; i++)
        snprintf(lines + strlen(lines), sizeof lines - strlen(lines), "{\"text\": \"<%02d>4567\"}\n", i);
    struct dataset *dataset = load("a.jsonl", lines, &options);
    for (uint64_t i = 0; i < 50; i++) {
        struct dataset_sequence sequence = take(dataset, i);
        char *text = text_of(sequence.tokens, sequence.count);
        assert_int_equal(text[0], '<');
        assert_int_equal(atoi(text + 10 + 1), atoi(text + 1) + 1); /* the next line, after an empty one */
        free(text);
    }
    dataset_free(dataset);
}

static void test_errors(void **state) {
    (void)state;
    static const char *const wrong[][3] = {
        {"a.jsonl", "{\"text\": \"abc\"}\n{\"text\": 3}\n", "line 2: field text: not a text"},
        {"a.jsonl", "{\"prompt\": \"abc\"}\n\n[1]\n", "line 3: not a JSON object"},
        {"a.jsonl", "{\"prompt\": \"abc\n", "line 1: not JSON"},
        {"a.jsonl", "{\"question\": \"abc\"}\n", "line 1: field text: missing, and no prompt or messages"},
        {"a.jsonl", "{\"messages\": []}\n", "line 1: field messages: not a list of 1 to 4,096 messages"},
        {"a.jsonl", "{\"messages\": [{\"role\": \"user\"}]}\n", "line 1: field messages: role and content"},
        {"a.jsonl", "{\"messages\": [{\"role\": \"critic\", \"content\": \"a\"}]}\n",
            "line 1: field messages: a role must"},
        {"a.jsonl", "{\"messages\": [3]}\n", "line 1: field messages: role and content"},
        {"a.jsonl", "{\"prompt\": \"abcd\"}\n", "nothing to train on: 0 tokens of text, prompts of 8 to 20"},
        {"a.jsonl", "\n", "has no lines"},
        {"a.txt", "short", "nothing to train on"},
    };
    struct dataset_options options = usual();
    struct error error;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const char *path = write_file(wrong[i][0], wrong[i][1]);
        assert_null(dataset_load(path, &options, &error));
        if (strstr(error.message, wrong[i][2]) == NULL || strncmp(error.message, path, strlen(path)) != 0)
            fail_msg("\"%s\" does not say \"%s\"", error.message, wrong[i][2]);
        unlink(path);
    }
    assert_null(dataset_load("/nowhere/a.txt", &options, &error));
    assert_int_equal(error.code, ERROR_IO);
    options.chat = (struct chat_source){NULL, "there is no chat template"};
    const char *path = write_file("a.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"abcdefghij\"}]}\n");
    assert_null(dataset_load(path, &options, &error));
    assert_non_null(strstr(error.message, "no chat template"));
    unlink(path);
}

/* ---- copying ---- */

/* Of the continuation's whole lines, how many say something that is in the prompt: their last word. */
static void count_copied(const struct dataset_sequence *sequence, uint32_t *copied, uint32_t *all) {
    char *prompt = text_of(sequence->tokens, sequence->prompt);
    char *rest = text_of(sequence->tokens + sequence->prompt, sequence->count - sequence->prompt);
    size_t begin = strcspn(rest, "\n") + 1, length = strlen(rest); /* the first and the last may be cut */
    while (begin < length) {
        size_t bytes = strcspn(rest + begin, "\n");
        if (begin + bytes >= length)
            break;
        rest[begin + bytes] = '\0';
        const char *space = strrchr(rest + begin, ' ');
        *copied += space != NULL && strstr(prompt, space + 1) != NULL;
        ++*all;
        begin += bytes + 1;
    }
    free(prompt);
    free(rest);
}

static void test_copying(void **state) {
    (void)state;
    struct dataset_options options = usual();
    options.least = 700;
    options.most = 900;
    options.future = 160;
    struct error error = {0};
    struct dataset *dataset = dataset_load(NULL, &options, &error), *again = dataset_load(NULL, &options, &error);
    options.part = DATASET_HELD_OUT;
    struct dataset *held_out = dataset_load(NULL, &options, &error);
    assert_true(dataset != NULL && again != NULL && held_out != NULL);
    uint32_t copied = 0, all = 0, own = 0;
    for (uint64_t i = 0; i < 40; i++) {
        struct dataset_sequence sequence = take(dataset, i), same = take(again, i), other = take(held_out, i);
        assert_true(sequence.copies);
        own += sequence.own;
        assert_in_range(sequence.prompt, 700, 900);
        assert_int_equal(sequence.count, sequence.prompt + 160);
        assert_int_equal(same.count, sequence.count);
        assert_memory_equal(same.tokens, sequence.tokens, sequence.count * sizeof(int32_t));
        assert_true(other.count != sequence.count ||
                    memcmp(other.tokens, sequence.tokens, sequence.count * sizeof(int32_t)) != 0);
        if (i % 4 != 1) {
            count_copied(&sequence, &copied, &all);
            continue;
        }
        /* A passage, word for word: 40 tokens of the continuation stand in the prompt one after the other. */
        bool found = false;
        for (uint32_t at = 0; !found && at + 40 <= sequence.prompt; at++)
            found = memcmp(sequence.tokens + at, sequence.tokens + sequence.prompt + 20, 40 * sizeof(int32_t)) == 0;
        assert_true(found);
    }
    assert_int_equal(own, 20);
    assert_true(all > 60);
    assert_true(copied > all * 9 / 10); /* what was cut in front is lost */
    dataset_free(dataset);
    dataset_free(again);
    dataset_free(held_out);
}

/* The part that is generated comes evenly. */
static void test_mix(void **state) {
    (void)state;
    struct dataset_options options = usual();
    options.least = 60;
    options.most = 90;
    options.copying = 0.25;
    char *text = make_lines(300);
    struct dataset *dataset = load("a.txt", text, &options);
    for (uint64_t i = 0; i < 40; i += 4) {
        uint32_t copies = 0;
        for (uint64_t j = i; j < i + 4; j++)
            copies += take(dataset, j).copies;
        assert_int_equal(copies, 1);
    }
    dataset_free(dataset);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_templates),
        cmocka_unit_test(test_special_texts),
        cmocka_unit_test(test_first_token),
        cmocka_unit_test(test_short_texts),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_copying),
        cmocka_unit_test(test_mix),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
