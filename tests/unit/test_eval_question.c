/* SPDX-License-Identifier: Apache-2.0
 *
 * Questions of chats: the tokens that the server makes of the same message, with any template that writes it as it is.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/eval/question.h"
#include "tests/unit/tiny_llama.h"

static struct gguf *model;
static struct tokenizer *tokenizer;

static int set_up(void **state) {
    (void)state;
    struct tiny_llama options = tiny_llama_default();
    options.adds_bos = true;
    char *path = tiny_llama_save(&options);
    model = gguf_open(path, NULL);
    unlink(path);
    free(path);
    tokenizer = model != NULL ? tokenizer_create(model, NULL) : NULL;
    return tokenizer == NULL;
}

static int tear_down(void **state) {
    (void)state;
    tokenizer_free(tokenizer);
    gguf_free(model);
    return 0;
}

static struct chat_template *template_of(const char *source) {
    struct error error = {0};
    struct chat_template *template = chat_template_create(source, strlen(source), tokenizer, &error);
    if (template == NULL)
        fail_msg("%s", error.message);
    return template;
}

static const char context[] = "Some <|im_end|> words. ", question[] = "What is <b>?";

static struct eval_item chat_item(void) {
    return (struct eval_item){.context = (char *)context, .question = (char *)question, .chat = true};
}

/* What the server makes of one message with both. Encoded whole: words that meet a border may become other tokens,
 * which bytes as tokens exclude here. */
static struct token_list served(const struct chat_template *template) {
    char words[100];
    snprintf(words, sizeof words, "%s%s", context, question);
    json_t *content = chat_template_content(template, json_string(words));
    json_t *messages = json_pack("[{s:s, s:o}]", "role", "user", "content", content);
    const struct chat_input input = {.messages = messages, .add_generation_prompt = true, .now = CHAT_FIXED_TIME};
    struct template_text text;
    struct token_list list = {0};
    assert_int_equal(chat_template_render(template, &input, &text, NULL), 0);
    assert_int_equal(tokenizer_encode_marked(tokenizer, text.text, text.input, text.bytes, &list, NULL), 0);
    template_text_free(&text);
    json_decref(messages);
    return list;
}

static const char *const templates[] = {
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    /* Parts, a date, BOS, text before and after. */
    "{{ bos_token }}Today: {{ strftime_now('%d %b %Y') }}\n{% for m in messages %}<{{ m.role }}>"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] | trim }}{% endif %}{% endfor %}<|im_end|>"
    "{% endfor %}\nA:",
};

static void writes_chats_as_served(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof templates / sizeof templates[0]; i++)
        for (int aware = 0; aware <= 1; aware++) {
            struct chat_template *template = template_of(templates[i]);
            const struct chat_source chat = {template, NULL};
            const struct eval_item item = chat_item();
            struct token_list whole = served(template);
            struct eval_question asked;
            assert_int_equal(eval_question_create(tokenizer, &chat, &item, aware == 1, &asked, NULL), 0);
            assert_int_equal(asked.asked.count == 0, aware);
            assert_int_equal(asked.prompt.count + asked.asked.count, whole.count);
            assert_memory_equal(asked.prompt.ids, whole.ids, asked.prompt.count * sizeof *whole.ids);
            if (aware == 0)
                assert_memory_equal(
                    asked.asked.ids, whole.ids + asked.prompt.count, asked.asked.count * sizeof *whole.ids);
            eval_question_free(&asked);
            token_list_free(&whole);
            chat_template_free(template);
        }
}

static void assert_refused(const struct chat_source *chat, const char *why) {
    const struct eval_item item = chat_item();
    struct eval_question asked;
    struct error error = {0};
    assert_int_not_equal(eval_question_create(tokenizer, chat, &item, false, &asked, &error), 0);
    if (strstr(error.message, why) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error.message, why);
}

static void refuses_other_templates(void **state) {
    (void)state;
    static const char *const wrong[][2] = {
        {"nothing", "does not write a user's message as it is"},
        {"{{ messages[0].content }} and {{ messages[0].content }}", "does not write a user's message as it is"},
        {"{{ messages[0].content | tojson }}", "does not write a user's message as it is"},
        {"{{ raise_exception('no users') }}", "the chat template refuses a user's message: line 1: no users"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const struct chat_source chat = {template_of(wrong[i][0]), NULL};
        assert_refused(&chat, wrong[i][1]);
        chat_template_free((struct chat_template *)chat.template);
    }
    assert_refused(&(struct chat_source){NULL, "the file lacks one"}, "the file lacks one");
    assert_refused(&(struct chat_source){NULL, NULL}, "no chat template");
}

/* Text that is continued needs no template, and begins with the BOS token that the model wants. */
static void continues_text_without(void **state) {
    (void)state;
    struct eval_item item = chat_item();
    struct eval_question asked;
    item.chat = false;
    assert_int_equal(eval_question_create(tokenizer, &(struct chat_source){0}, &item, false, &asked, NULL), 0);
    assert_int_equal(asked.prompt.ids[0], tokenizer_bos(tokenizer));
    assert_int_equal(asked.prompt.count, 1 + strlen(context));
    eval_question_free(&asked);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(writes_chats_as_served),
        cmocka_unit_test(refuses_other_templates),
        cmocka_unit_test(continues_text_without),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
