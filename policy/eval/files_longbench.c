/* SPDX-License-Identifier: Apache-2.0
 *
 * LongBench (Bai et al. 2023, THUDM/LongBench): {input, context, answers, all_classes, dataset}. Prompt formats and
 * output lengths below are the published ones (its config/dataset2prompt.json and config/dataset2maxlen.json, MIT
 * licence), as is which datasets are asked outside a chat and scored by their first line (pred.py, eval.py): scores
 * compare with others' only so. Unlike there, prompts that are too long are left out, not cut in the middle; and
 * samsum, where the output there may not begin with a line end, is scored by the first line that is not empty.
 */
#include "policy/eval/files_internal.h"

#include <stdlib.h>
#include <string.h>

struct dataset {
    const char *name;
    const char *before_context, *before_input; /* NULL before_input: the input is not shown */
    const char *behind;
    uint32_t max_tokens;
    enum eval_metric metric; /* METRIC_NONE: not supported here */
    bool plain;              /* asked outside a chat */
    bool first_line;
};

#define PASSAGES                                                                                                       \
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
#define PASSAGES_CONTEXT PASSAGES "\n\nThe following are given passages.\n"
#define PASSAGES_INPUT "\n\n" PASSAGES "\n\nQuestion: "
#define STORY "as concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
#define ARTICLE                                                                                                        \
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered "      \
    "based "                                                                                                           \
    "on the information in the article, write \"unanswerable\". If the question is a yes/no question, answer "         \
    "\"yes\", \"no\", or \"unanswerable\". Do not provide any explanation.\n\n"

static const struct dataset datasets[] = {
    {"narrativeqa",
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the "
        "question " STORY "Story: ",
        "\n\nNow, answer the question based on the story " STORY "Question: ", "\n\nAnswer:", 128, METRIC_F1, false,
        false},
    {"qasper", "You are given a scientific article and a question. Answer the question " ARTICLE "Article: ",
        "\n\n Answer the question based on the above article " ARTICLE "Question: ", "\n\nAnswer:", 128, METRIC_F1,
        false, false},
    {"multifieldqa_en", "Read the following text and answer briefly.\n\n",
        "\n\nNow, answer the following question based on the above text, only give me the answer and do not output any "
        "other words.\n\nQuestion: ",
        "\nAnswer:", 64, METRIC_F1, false, false},
    {"hotpotqa", PASSAGES_CONTEXT, PASSAGES_INPUT, "\nAnswer:", 32, METRIC_F1, false, false},
    {"2wikimqa", PASSAGES_CONTEXT, PASSAGES_INPUT, "\nAnswer:", 32, METRIC_F1, false, false},
    {"musique", PASSAGES_CONTEXT, PASSAGES_INPUT, "\nAnswer:", 32, METRIC_F1, false, false},
    {"gov_report",
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n", NULL,
        "\n\nNow, write a one-page summary of the report.\n\nSummary:", 512, METRIC_ROUGE_L, false, false},
    {"qmsum",
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or "
        "more sentences.\n\nTranscript:\n",
        "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\nQuery: ",
        "\nAnswer:", 512, METRIC_ROUGE_L, false, false},
    {"multi_news", "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n", NULL,
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:", 512, METRIC_ROUGE_L, false, false},
    {"trec", "Please determine the type of the question below. Here are some examples of questions.\n\n", "\n", "", 64,
        METRIC_CLASSIFICATION, true, true},
    {"triviaqa",
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The "
        "following are some examples.\n\n",
        "\n\n", "", 32, METRIC_F1, true, true},
    {"samsum", "Summarize the dialogue into a few short sentences. The following are some examples.\n\n", "\n\n", "",
        128, METRIC_ROUGE_L, true, true},
    {"lsht", "请判断给定新闻的类别，下面是一些例子。\n\n", "\n", "", 64, METRIC_CLASSIFICATION, true, true},
    {"passage_count",
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, "
        "how many non-repeating paragraphs are there in total?\n\n",
        NULL,
        "\n\nPlease enter the final count of unique paragraphs after removing duplicates. The output format should "
        "only "
        "contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        32, METRIC_COUNT, false, false},
    {"passage_retrieval_en",
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is "
        "from.\n\n",
        "\n\nThe following is an abstract.\n\n",
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer format must be like "
        "\"Paragraph 1\", \"Paragraph 2\", etc.\n\nThe answer is: ",
        32, METRIC_RETRIEVAL, false, false},
    {"passage_retrieval_zh", "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n",
        "\n\n下面是一个摘要\n\n", "\n\n请输入摘要所属段落的编号。答案格式必须是\"段落1\"，\"段落2\"等格式\n\n答案是：",
        32, METRIC_RETRIEVAL, false, false},
    {"lcc", "Please complete the code given below. \n", NULL, "Next line of code:\n", 64, METRIC_EDIT, true, false},
    {"repobench-p", "Please complete the code given below. \n", "", "Next line of code:\n", 64, METRIC_EDIT, true,
        false},
    {"multifieldqa_zh", NULL, NULL, NULL, 0, METRIC_NONE, false, false},
    {"dureader", NULL, NULL, NULL, 0, METRIC_NONE, false, false},
    {"vcsum", NULL, NULL, NULL, 0, METRIC_NONE, false, false},
};

/* By name; LongBench-E's names end in _e. */
static const struct dataset *find_dataset(const char *name) {
    size_t length = strlen(name);
    if (length > 2 && strcmp(name + length - 2, "_e") == 0)
        length -= 2;
    for (size_t i = 0; i < sizeof datasets / sizeof datasets[0]; i++)
        if (strlen(datasets[i].name) == length && strncmp(name, datasets[i].name, length) == 0)
            return &datasets[i];
    return NULL;
}

static int read_dataset(
    struct eval_place place, struct eval_item *item, const struct dataset **dataset, struct error *error) {
    int code = eval_field_text(place, NULL, "dataset", true, &item->group, error);
    if (code != 0)
        return code;
    *dataset = find_dataset(item->group);
    if (*dataset == NULL)
        return eval_field_error(place, error, "dataset", "not one of LongBench's");
    if ((*dataset)->metric == METRIC_NONE)
        return error_set(error, ERROR_UNSUPPORTED,
            "%s: line %zu: dataset %s is scored by Chinese words, which nothing "
            "here can tell apart",
            place.data->name, place.record->number, (*dataset)->name);
    return 0;
}

static int print_prompt(
    const struct dataset *dataset, struct eval_place place, struct eval_item *item, struct error *error) {
    char *context, *input = NULL;
    bool shown = dataset->before_input != NULL;
    int code = eval_field_text(place, NULL, "context", true, &context, error);
    if (code == 0)
        code = eval_field_text(place, NULL, "input", shown, &input, error);
    if (code == 0) {
        item->context = eval_print("%s%s", dataset->before_context, context);
        item->question = eval_print("%s%s%s", shown ? dataset->before_input : "", shown ? input : "", dataset->behind);
        code = item->context == NULL || item->question == NULL ? eval_out_of_memory(error) : 0;
    }
    free(context);
    free(input);
    return code;
}

/* An answer of the retrieval tasks names a paragraph. */
static int check_paragraphs(struct eval_place place, const struct eval_item *item, struct error *error) {
    for (uint32_t i = 0; i < item->answers_count; i++)
        if (strpbrk(item->answers[i], "0123456789") == NULL)
            return eval_field_error(place, error, "answers", "names no paragraph by number");
    return 0;
}

static int build(
    const struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error) {
    const struct dataset *dataset;
    (void)loader;
    int code = read_dataset(place, item, &dataset, error);
    if (code == 0)
        code = print_prompt(dataset, place, item, error);
    if (code == 0)
        code = eval_field_texts(place, "answers", &item->answers, &item->answers_count, error);
    if (code == 0 && dataset->metric == METRIC_CLASSIFICATION)
        code = eval_field_texts(place, "all_classes", &item->classes, &item->classes_count, error);
    if (code == 0 && dataset->metric == METRIC_RETRIEVAL)
        code = check_paragraphs(place, item, error);
    if (code != 0)
        return code;
    item->metric = dataset->metric;
    item->max_tokens = dataset->max_tokens;
    item->chat = !dataset->plain;
    item->first_line = dataset->first_line;
    return 0;
}

const struct eval_format eval_format_longbench = {.task = "longbench", .read = eval_data_read_lines, .build = build};
