/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation files: whatever stands in one, each task gives items that can be scored, or a message. The first byte says
 * which task; bit 7 asks for a length, bit 6 for compression's magic before the rest.
 */
#include "tests/fuzz/fuzz.h"

#include "policy/eval/files.h"
#include "policy/eval/metrics.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *const tasks[] = {"gsm8k", "bbh", "qa", "kv", "longbench", "jsonl"};
enum { TASKS = sizeof tasks / sizeof tasks[0] };

static void expect(bool condition) {
    if (!condition)
        abort();
}

static uint32_t count_bytes(void *context, const char *text) {
    (void)context;
    return (uint32_t)strlen(text);
}

static void try_item(const struct eval_item *item) {
    expect(item->context != NULL && item->question != NULL && item->max_tokens > 0);
    expect(item->metric == METRIC_NONE || item->answers_count > 0);
    expect(item->metric != METRIC_CLASSIFICATION || item->classes_count > 0);
    const char *outputs[] = {"", item->question, item->answers_count > 0 ? item->answers[0] : item->context};
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++) {
        double score = eval_score(item, outputs[i]);
        expect(score >= 0 && score <= 1);
    }
}

static void try_file(const char *file, uint8_t choice) {
    struct eval_file_options options = {.task = tasks[(choice & 63) % TASKS],
        .file = file,
        .limit = 4,
        .length = choice & 128 ? 600 : 0,
        .count_tokens = count_bytes};
    struct eval_items items;
    struct error error = {0};
    uint32_t skipped;
    int code = eval_load(&options, &items, &skipped, &error);
    expect(code == error.code && (code == 0) == (items.count > 0));
    if (code != 0)
        expect(error.message[0] != '\0' && strpbrk(error.message, "\n\x1b") == NULL);
    for (size_t i = 0; i < items.count; i++)
        try_item(&items.items[i]);
    eval_items_free(&items);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static const uint8_t magic[] = {0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3};
    char file[64];
    if (bytes == 0)
        return 0;
    int descriptor = memfd_create("fuzz", MFD_CLOEXEC);
    expect(descriptor >= 0);
    if (data[0] & 64)
        expect(write(descriptor, magic, sizeof magic) == sizeof magic);
    expect(write(descriptor, data + 1, bytes - 1) == (ssize_t)(bytes - 1));
    snprintf(file, sizeof file, "/proc/self/fd/%d", descriptor);
    try_file(file, data[0]);
    close(descriptor);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
#define GSM8K "{\"question\": \"q\", \"answer\": \"4-1=3\\n#### 3\"}\n"
#define EXAMPLE "{\"input\": \"i\", \"target\": \"(A)\"}"
    static const struct {
        uint8_t choice;
        const char *text;
    } seeds[] = {
        {0, GSM8K GSM8K GSM8K GSM8K GSM8K GSM8K GSM8K GSM8K GSM8K},
        {1, "{\"examples\": [" EXAMPLE ", " EXAMPLE ", " EXAMPLE ", " EXAMPLE "]}"},
        {2, "{\"question\": \"q\", \"answers\": [\"a x\", \"b\"], \"ctxs\": [{\"title\": \"t\", \"text\": \"a x\", "
            "\"isgold\": true}, {\"title\": \"u\", \"text\": \"w\"}]}\n{\"question\": \"q\", \"answers\": [\"c\"], "
            "\"ctxs\": [{\"title\": \"v\", \"text\": \"c\", \"isgold\": true}]}\n"},
        {3, "{\"ordered_kv_records\": [[\"a\", \"b\"], [\"c\", \"d\"]], \"key\": \"c\", \"value\": \"d\"}\n"},
        {4, "{\"input\": \"i\", \"context\": \"c\", \"answers\": [\"Paragraph 3\"], \"all_classes\": null, "
            "\"dataset\": "
            "\"passage_retrieval_en\"}\n{\"input\": \"i\", \"context\": \"c\", \"answers\": [\"x. y. z\"], "
            "\"dataset\": "
            "\"gov_report\"}\n{\"input\": \"i\", \"context\": \"c\", \"answers\": [\"x\"], \"all_classes\": [\"x\", "
            "\"xy\"], "
            "\"dataset\": \"trec\"}\n{\"context\": \"c\", \"answers\": [\"return x\"], \"dataset\": \"lcc\"}\n"},
        {5, "{\"prompt\": \"p\", \"answer\": \"a\", \"metric\": \"exact\", \"stop\": \"s\"}\n{\"context\": "
            "\"\\u03a3\", "
            "\"question\": \"q\", \"answers\": [\"1\", \"\\u0130\"], \"metric\": \"number\", \"max_tokens\": 3}\n"},
    };
    if (index >= 2 * sizeof seeds / sizeof seeds[0])
        return NULL;
    const char *text = seeds[index / 2].text;
    *bytes = 1 + strlen(text);
    uint8_t *data = malloc(*bytes);
    if (data == NULL)
        return NULL;
    data[0] = (uint8_t)(seeds[index / 2].choice | (index % 2 ? 128 : 0));
    memcpy(data + 1, text, *bytes - 1);
    return data;
}
