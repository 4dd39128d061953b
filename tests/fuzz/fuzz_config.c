/* SPDX-License-Identifier: Apache-2.0
 *
 * Configuration: whatever stands in a file, the environment or the command line, reading it fails with a message, or
 * gives values that can be printed and read back.
 */
#include "tests/fuzz/fuzz.h"

#include "config/config.h"
#include "config/file.h"

#include <stdlib.h>
#include <string.h>

enum { WORDS_MAX = 32 };

static void expect(bool condition) {
    if (!condition)
        abort();
}

static char *print_example(const struct config *config) {
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    expect(out != NULL);
    config_print_example(config, out);
    fclose(out);
    return text;
}

/* A valid configuration printed, read and printed again is the same text. */
static void expect_reads_back(const struct config *config) {
    struct config again;
    struct error error;
    char *first = print_example(config);
    expect(config_set_defaults(&again, &error) == 0);
    expect(config_file_apply_text(first, strlen(first), "printed", &again, &error) == 0);
    char *second = print_example(&again);
    expect(strcmp(first, second) == 0);
    config_free(&again);
    free(first);
    free(second);
}

static void expect_result(int code, const struct config *config, const struct error *error) {
    if (code == 0) {
        expect_reads_back(config);
    } else {
        expect(error->code == code && error->message[0] != '\0');
        expect(strpbrk(error->message, "\n\x1b") == NULL);
    }
}

static void try_file(const char *text, size_t length) {
    struct config config;
    struct error error = {0};
    expect(config_set_defaults(&config, &error) == 0);
    int code = config_file_apply_text(text, length, "fuzz.yaml", &config, &error);
    expect_result(code, &config, &error);
    config_free(&config);
}

/* Splits the text at line ends; NULL-terminated. Words that would open a file are left out. */
static int split_words(char *text, const char *forbidden, char **words) {
    int count = 0;
    char *rest;
    for (char *word = strtok_r(text, "\n", &rest); word != NULL && count < WORDS_MAX;
         word = strtok_r(NULL, "\n", &rest))
        if (strncmp(word, forbidden, strlen(forbidden)) != 0)
            words[count++] = word;
    words[count] = NULL;
    return count;
}

static void try_words(char *text, bool environment) {
    static const enum config_command commands[] = {CONFIG_SERVE, CONFIG_BENCH, CONFIG_INSPECT};
    char *words[WORDS_MAX + 1], *none[] = {NULL};
    int count = split_words(text, environment ? "DISTILLCACHE_CONFIG" : "--config", words);
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        struct config config;
        struct error error = {0};
        int code = config_load(&config, commands[i], environment ? 0 : count, environment ? none : words,
            environment ? words : none, &error);
        expect_result(code, &config, &error);
        config_free(&config);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char *text = malloc(bytes + 1);
    if (text == NULL)
        return 0;
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    try_file(text, bytes);
    if (bytes > 0)
        try_words(text, data[0] == 'D');
    free(text);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const char *const seeds[] = {
        "port: 80\nmodel: \"a\\u00e4\\x41.gguf\"\nkv_memory: 512M\nbatch: [1, 2,3]\nprefix_sharing: false\n",
        "# comment\nmodel: 'it''s'\ndepth:\n  - 1\n  - \"2\"\nlog_level: >-\n  debug\nhost: |\n  x\n",
        "%YAML 1.1\n---\nport: 1\n...\n",
        "a: &b c\n*b : [d, {e: f}]\n!!str g: ~\n",
        "--model\nm.gguf\n--port=80\n--no-prefix-sharing\n--kv-memory\n1G\n",
        "--model=m\n--batch\n1,2\n--batch=3\n--json\n--peer\nllama-cpp-python\n",
        "--model=m\n--kv-policy\nsnapkv,window=16,decode=keep\n--kv-policy=h2o\n--kv-ratio\n0.5,.25\n--kv-swap=0\n",
        "--model=m\n--kv-policy=streaming,sinks=2,positions=cache\n--kv-tokens\n64\n",
        "kv_policy: [h2o, \"adakv,tokens=64\"]\nkv_ratio: 0.125\nkv_tokens: 0\nkv_swap: 1G\n",
        "--json\n--\n--file\n",
        "DISTILLCACHE_MODEL=m\nDISTILLCACHE_PORT=1\nDISTILLCACHE_BATCH=1,2\nDISTILLCACHE_TEST_X=1\nHOME=/\n",
    };
    if (index == sizeof seeds / sizeof seeds[0]) { /* the example file */
        char *example = print_example(NULL);
        *bytes = strlen(example);
        return (uint8_t *)example;
    }
    if (index > sizeof seeds / sizeof seeds[0])
        return NULL;
    *bytes = strlen(seeds[index]);
    return (uint8_t *)strdup(seeds[index]);
}
