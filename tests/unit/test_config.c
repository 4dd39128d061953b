/* SPDX-License-Identifier: Apache-2.0 */
#include "config/config.h"
#include "config/file.h"
#include "config/options.h"
#include "policy/policy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Loads serve's (or another command's) configuration from a command line and an environment, each a NULL-terminated
 * list. */
static int load(struct config *config, enum config_command command, const char *const *arguments,
    const char *const *environment, struct error *error) {
    int count = 0;
    while (arguments[count] != NULL)
        count++;
    memset(error, 0, sizeof *error);
    return config_load(config, command, count, (char *const *)arguments, (char *const *)environment, error);
}

#define LIST(...) ((const char *const[]){__VA_ARGS__ __VA_OPT__(, ) NULL})

static void assert_loads(
    struct config *config, enum config_command command, const char *const *arguments, const char *const *environment) {
    struct error error;
    if (load(config, command, arguments, environment, &error) != 0)
        fail_msg("%s", error.message);
}

static void assert_refused(
    enum config_command command, const char *const *arguments, const char *const *environment, const char *message) {
    struct config config;
    struct error error;
    int code = load(&config, command, arguments, environment, &error);
    config_free(&config);
    assert_int_equal(code, ERROR_INVALID);
    assert_int_equal(error.code, ERROR_INVALID);
    assert_string_equal(error.message, message);
}

static int apply_text(struct config *config, const char *text, struct error *error) {
    memset(error, 0, sizeof *error);
    assert_int_equal(config_set_defaults(config, NULL), 0);
    return config_file_apply_text(text, strlen(text), "c.yaml", config, error);
}

static void assert_file_refused(const char *text, const char *message) {
    struct config config;
    struct error error;
    int code = apply_text(&config, text, &error);
    config_free(&config);
    assert_int_equal(code, ERROR_INVALID);
    assert_string_equal(error.message, message);
}

/* A file with this text, removed by remove_file. */
static void write_file(char path[static 40], const char *text) {
    strcpy(path, "/tmp/distillcache-test-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static void test_defaults(void **state) {
    (void)state;
    struct config config;
    assert_loads(&config, CONFIG_SERVE, LIST("--model", "m.gguf"), LIST());
    assert_string_equal(config.model, "m.gguf");
    assert_string_equal(config.backend, "auto");
    assert_string_equal(config.cpu_features, "auto");
    assert_string_equal(config.kv_format, "f16");
    assert_string_equal(config.precision, "int8");
    assert_string_equal(config.host, "127.0.0.1");
    assert_string_equal(config.model_alias, "");
    assert_string_equal(config.log_level, "info");
    assert_string_equal(config.log_format, "text");
    assert_int_equal(config.threads, 0);
    assert_true(config.kv_memory == (size_t)512 << 20);
    assert_int_equal(config.kv_policy.count, 1);
    assert_string_equal(config.kv_policy.items[0], "full");
    assert_int_equal(config.kv_ratio.count, 0);
    assert_int_equal(config.kv_tokens, 0);
    assert_true(config.kv_swap == (size_t)1 << 30);
    assert_int_equal(config.context, 0);
    assert_int_equal(config.batch_tokens, 512);
    assert_int_equal(config.prefill_chunk, 512);
    assert_int_equal(config.max_sequences, 256);
    assert_int_equal(config.max_waiting, 1024);
    assert_true(config.prefix_sharing);
    assert_int_equal(config.port, 8080);
    assert_true(config.max_body == (size_t)16 << 20);
    assert_int_equal(config.max_connections, 1024);
    assert_int_equal(config.keep_alive, 120);
    assert_int_equal(config.receive_timeout, 30);
    assert_int_equal(config.drain_timeout, 30);
    assert_int_equal(config.prefix_hash_tokens, 256);
    assert_int_equal(config.prefill, 512);
    assert_int_equal(config.decode, 128);
    assert_int_equal(config.batch.count, 1);
    assert_string_equal(config.batch.items[0], "1");
    assert_int_equal(config.depth.count, 1);
    assert_string_equal(config.depth.items[0], "0");
    assert_int_equal(config.pairs, 5);
    assert_false(config.json || config.help || config.print_config || config.profile);
    config_free(&config);
}

/* Each name in its forms leads back to its own option, and no two options share a field. */
static void test_table(void **state) {
    (void)state;
    for (size_t i = 0; i < option_count; i++) {
        const struct option *option = &option_table[i];
        char key[OPTION_NAME_MAX], name[OPTION_NAME_MAX];
        option_yaml_key(option, key);
        option_environment_name(option, name);
        assert_ptr_equal(option_find_for(option->name, option->commands), option);
        if ((option->flags & OPTION_ONLY_COMMAND_LINE) == 0)
            assert_ptr_equal(option_find_key(key), option);
        assert_ptr_equal(option_nearest(option->name, option->commands, 0), option);
        assert_int_equal(strncmp(name, "DISTILLCACHE_", 13), 0);
        assert_null(strpbrk(name, "abcdefghijklmnopqrstuvwxyz-"));
        assert_non_null(option->help);
        assert_true(option->help[strlen(option->help) - 1] != '.');
        assert_non_null(option->section);
        assert_true((option->default_value == NULL) == ((option->flags & OPTION_REQUIRED) != 0));
        assert_true((option->argument == NULL) == (option->type == OPTION_BOOL));
        if (option->type == OPTION_COUNT || option->type == OPTION_COUNTS)
            assert_true(option->maximum > option->minimum && option->maximum <= UINT32_MAX);
        for (size_t j = 0; j < i; j++)
            assert_true(option_table[j].offset != option->offset);
    }
}

static void test_precedence(void **state) {
    (void)state;
    struct config config;
    char path[40];
    write_file(path, "port: 1001\nthreads: 11\nmax_waiting: 21\nbatch: [3, 4]\ndepth: 5,6\nkv_memory: 64M\n");
    const char *variables[] = {"PATH=/bin", "DISTILLCACHE_PORT=1002", "DISTILLCACHE_THREADS=12",
        "DISTILLCACHE_DEPTH=7,8", "DISTILLCACHE_TEST_ANYTHING=x", NULL};
    assert_loads(&config, CONFIG_SERVE, LIST("--model=m", "--config", path, "--port", "1003"), variables);
    assert_int_equal(config.port, 1003);
    assert_int_equal(config.threads, 12);
    assert_int_equal(config.max_waiting, 21);
    assert_int_equal(config.max_sequences, 256);
    assert_true(config.kv_memory == (size_t)64 << 20);
    assert_int_equal(config.batch.count, 2);
    assert_string_equal(config.batch.items[1], "4");
    assert_int_equal(config.depth.count, 2);
    assert_string_equal(config.depth.items[0], "7");
    config_free(&config);

    char variable[80];
    snprintf(variable, sizeof variable, "DISTILLCACHE_CONFIG=%s", path);
    assert_loads(&config, CONFIG_BENCH, LIST("--model=m", "--batch", "1,2", "--batch=9"), LIST(variable));
    assert_int_equal(config.port, 1001);
    assert_int_equal(config.batch.count, 3);
    assert_string_equal(config.batch.items[2], "9");
    assert_string_equal(config.depth.items[1], "6");
    config_free(&config);

    assert_loads(&config, CONFIG_BENCH, LIST("--model=m", "--config="), LIST(variable));
    assert_int_equal(config.port, 8080);
    config_free(&config);
    unlink(path);
}

static void test_command_line_forms(void **state) {
    (void)state;
    struct config config;
    assert_loads(&config, CONFIG_SERVE,
        LIST("--model", "a=b", "--kv-memory=2G", "--no-prefix-sharing", "--port", "1", "--port", "2", "--model-alias",
            ""),
        LIST());
    assert_string_equal(config.model, "a=b");
    assert_true(config.kv_memory == (size_t)2 << 30);
    assert_false(config.prefix_sharing);
    assert_int_equal(config.port, 2);
    config_free(&config);
    assert_loads(&config, CONFIG_SERVE, LIST("--model=m", "--no-prefix-sharing", "--prefix-sharing=true"), LIST());
    assert_true(config.prefix_sharing);
    config_free(&config);
    assert_loads(&config, CONFIG_INSPECT, LIST("--json", "--", "--odd.gguf"), LIST());
    assert_true(config.json);
    assert_string_equal(config.file, "--odd.gguf");
    config_free(&config);
    assert_loads(&config, CONFIG_BENCH, LIST("--model=m", "--peer", "llama-cpp-python", "--json", "--profile"), LIST());
    assert_string_equal(config.peer, "llama-cpp-python");
    assert_true(config.profile);
    config_free(&config);
    assert_loads(&config, CONFIG_SERVE, LIST("-h"), LIST("DISTILLCACHE_PORT=none"));
    assert_true(config.help);
    config_free(&config);
}

static void test_command_line_errors(void **state) {
    (void)state;
    const enum config_command serve = CONFIG_SERVE;
    assert_refused(serve, LIST("--kv-memry=1G"), LIST(), "unknown option --kv-memry: did you mean --kv-memory?");
    assert_refused(serve, LIST("--kv_memory=1G"), LIST(), "unknown option --kv_memory: did you mean --kv-memory?");
    assert_refused(serve, LIST("--no-prefixsharing"), LIST(),
        "unknown option --no-prefixsharing: did you mean --no-prefix-sharing?");
    assert_refused(serve, LIST("--no-port"), LIST(), "unknown option --no-port: did you mean --port?");
    assert_refused(serve, LIST("--xyzzyxyzzy"), LIST(), "unknown option --xyzzyxyzzy: see distillcache serve --help");
    assert_refused(serve, LIST("--file", "x"), LIST(), "unknown option --file: see distillcache serve --help");
    assert_refused(serve, LIST("-p"), LIST(), "unknown option \"-p\": options begin with --");
    assert_refused(
        serve, LIST("--pairs", "3"), LIST(), "option --pairs belongs to distillcache bench, not to distillcache serve");
    assert_refused(serve, LIST("--port"), LIST(), "option --port needs a value: a whole number from 0 to 65535");
    assert_refused(serve, LIST("--port", "--model"), LIST(),
        "option --port needs a value: a whole number from 0 to 65535 (one that begins with -- is joined by =)");
    assert_refused(serve, LIST("--no-prefix-sharing=true"), LIST(), "option --no-prefix-sharing takes no value");
    assert_refused(
        serve, LIST("--prefix-sharing=yes"), LIST(), "option --prefix-sharing is \"yes\": must be true or false");
    assert_refused(serve, LIST("stray"), LIST(), "unexpected argument \"stray\"");
    assert_refused(CONFIG_INSPECT, LIST("a", "b"), LIST(), "unexpected argument \"b\"");
    assert_refused(CONFIG_INSPECT, LIST(""), LIST(),
        "argument FILE is \"\": must be a text that is not empty, of at most 4095 bytes "
        "of UTF-8 without control characters");
    assert_refused(serve, LIST("--kv-format=f64"), LIST(), "option --kv-format is \"f64\": must be f16, f32 or bf16");
    assert_refused(serve, LIST(), LIST(),
        "no model given: option --model FILE, environment variable DISTILLCACHE_MODEL, or key model of the "
        "configuration file");
    assert_refused(CONFIG_INSPECT, LIST(), LIST(), "no file given: distillcache inspect FILE (model file to describe)");
}

static void test_environment_errors(void **state) {
    (void)state;
    assert_refused(CONFIG_SERVE, LIST(), LIST("DISTILLCACHE_PORT=99999"),
        "environment variable DISTILLCACHE_PORT is \"99999\": must be a whole number from 0 to 65535");
    assert_refused(CONFIG_SERVE, LIST(), LIST("DISTILLCACHE_PORT="),
        "environment variable DISTILLCACHE_PORT is \"\": must be a whole number from 0 to 65535");
    assert_refused(CONFIG_SERVE, LIST(), LIST("DISTILLCACHE_PROT=1"),
        "unknown environment variable \"DISTILLCACHE_PROT\": did you mean DISTILLCACHE_PORT?");
    assert_refused(CONFIG_SERVE, LIST(), LIST("DISTILLCACHE_POLICIES=/a", "DISTILLCACHE_POLICIES_=/a"),
        "unknown environment variable \"DISTILLCACHE_POLICIES_\"");
    assert_refused(CONFIG_SERVE, LIST(), LIST("DISTILLCACHE_=1"), "unknown environment variable \"DISTILLCACHE_\"");
    assert_refused(
        CONFIG_SERVE, LIST(), LIST("DISTILLCACHE_HELP=true"), "unknown environment variable \"DISTILLCACHE_HELP\"");
    assert_refused(CONFIG_SERVE, LIST(), LIST("DISTILLCACHE_DEPTH=1,,2"),
        "environment variable DISTILLCACHE_DEPTH is \"1,,2\": must be 1 to 64 whole numbers from 0 to 16777216");
}

static void test_numbers(void **state) {
    (void)state;
    const char *const bad[] = {"-1", "+1", " 1", "1 ", "1.0", "1e3", "0x10", "", "18446744073709551616", "65536", "K",
        "99999999999999999999999999", "1K"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct config config;
        struct error error;
        assert_int_equal(config_set_defaults(&config, NULL), 0);
        assert_int_equal(option_parse(option_find("port"), &config, bad[i], "place", &error), ERROR_INVALID);
        assert_int_equal(config.port, 8080);
        config_free(&config);
    }
    const struct {
        const char *text;
        size_t bytes;
    } sizes[] = {{"1048576", 1 << 20}, {"1024K", 1 << 20}, {"1M", 1 << 20}, {"3G", (size_t)3 << 30}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct config config = {0};
        assert_int_equal(option_parse(option_find("kv-memory"), &config, sizes[i].text, "place", NULL), 0);
        assert_true(config.kv_memory == sizes[i].bytes);
    }
    assert_refused(CONFIG_SERVE, LIST("--kv-memory=1m"), LIST(),
        "option --kv-memory is \"1m\": must be a number of bytes from 1M to 1048576G (K, M, G: powers of 1024)");
    assert_refused(CONFIG_SERVE, LIST("--kv-memory=18446744073709551615G"), LIST(),
        "option --kv-memory is \"18446744073709551615G\": must be a number of bytes from 1M to 1048576G (K, M, G: "
        "powers "
        "of 1024)");
}

static void test_bad_bytes_in_messages(void **state) {
    (void)state;
    assert_refused(CONFIG_SERVE, LIST("--port=\x1b[31m\xff\xc3\xa4"), LIST(),
        "option --port is \"\\x1b[31m\\xff\xc3\xa4\": must be a whole number from 0 to 65535");
    assert_refused(CONFIG_SERVE, LIST("--host=a\nb"), LIST(),
        "option --host is \"a\\x0ab\": must be a text that is not empty, of at most 4095 bytes of UTF-8 without "
        "control "
        "characters");
    char *many = malloc(100001);
    assert_non_null(many);
    memset(many, 'a', 100000);
    many[100000] = '\0';
    struct config config;
    struct error error;
    assert_int_equal(load(&config, CONFIG_SERVE, LIST("--model", many), LIST(), &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "aaa...\": must be"));
    config_free(&config);
    assert_int_equal(load(&config, CONFIG_SERVE, LIST(many), LIST(), &error), ERROR_INVALID);
    config_free(&config);
    free(many);
}

static void test_file_values(void **state) {
    (void)state;
    struct config config;
    struct error error;
    const char *text = "# a comment\n"
                       "model: models/a b.gguf\n"
                       "model_alias: \"smol \\u00e4\\\"\"\n"
                       "host: '::1'\n"
                       "prefix_sharing: false\n"
                       "kv_memory: 1G\n"
                       "batch:\n  - 1\n  - \"8\"\n  - 2,3\n"
                       "log_level: |-\n  error\n";
    if (apply_text(&config, text, &error) != 0)
        fail_msg("%s", error.message);
    assert_string_equal(config.model, "models/a b.gguf");
    assert_string_equal(config.model_alias, "smol \xc3\xa4\"");
    assert_string_equal(config.host, "::1");
    assert_false(config.prefix_sharing);
    assert_true(config.kv_memory == (size_t)1 << 30);
    assert_int_equal(config.batch.count, 4);
    assert_string_equal(config.batch.items[1], "8");
    assert_string_equal(config.batch.items[3], "3");
    assert_string_equal(config.log_level, "error");
    config_free(&config);
    const char *const empty[] = {"", "\n", "# nothing\n", "{}\n", "---\n", "---\n...\n", "\xef\xbb\xbf# mark\n"};
    for (size_t i = 0; i < sizeof empty / sizeof empty[0]; i++) {
        if (apply_text(&config, empty[i], &error) != 0)
            fail_msg("case %zu: %s", i, error.message);
        config_free(&config);
    }
}

static void test_file_errors(void **state) {
    (void)state;
    assert_file_refused("port: 99999\n", "c.yaml, line 1: port is \"99999\": must be a whole number from 0 to 65535");
    assert_file_refused(
        "host: x\n\nport: yes\n", "c.yaml, line 3: port is \"yes\": must be a whole number from 0 to 65535");
    assert_file_refused("prefix_sharing: yes\n", "c.yaml, line 1: prefix_sharing is \"yes\": must be true or false");
    assert_file_refused("prot: 1\n", "c.yaml, line 1: unknown key \"prot\": did you mean port?");
    assert_file_refused("kv-memory: 1G\n", "c.yaml, line 1: unknown key \"kv-memory\": did you mean kv_memory?");
    assert_file_refused("config: x\n", "c.yaml, line 1: unknown key \"config\"");
    assert_file_refused("help: true\n", "c.yaml, line 1: unknown key \"help\"");
    assert_file_refused("xyzzyxyzzy: 1\n", "c.yaml, line 1: unknown key \"xyzzyxyzzy\"");
    assert_file_refused("port: 1\nhost: a\nport: 2\n", "c.yaml, line 3: port stands here a second time, after line 1");
    assert_file_refused("port: {a: 1}\n", "c.yaml, line 1: port is a mapping: must be a whole number from 0 to 65535");
    assert_file_refused("port: [1]\n", "c.yaml, line 1: port is a list: must be a whole number from 0 to 65535");
    assert_file_refused(
        "batch: {a: 1}\n", "c.yaml, line 1: batch is a mapping: must be 1 to 64 whole numbers from 1 to 65536");
    assert_file_refused("batch: [1, [2]]\n", "c.yaml, line 1: batch has an item that is not a plain value");
    assert_file_refused("batch: []\n", "c.yaml, line 1: batch is an empty list: give values, or leave the key out");
    assert_file_refused(
        "batch: [1,\n  0]\n", "c.yaml, line 1: batch is \"0\": must be 1 to 64 whole numbers from 1 to 65536");
    const char *const nulls[] = {"port:\n", "port: ~\n", "port: null\n", "model: NULL\n", "batch: [1, ~]\n"};
    for (size_t i = 0; i < sizeof nulls / sizeof nulls[0]; i++) {
        char message[100];
        snprintf(message, sizeof message, "c.yaml, line 1: %.*s has no value: give one, or leave the key out",
            (int)strcspn(nulls[i], ":"), nulls[i]);
        assert_file_refused(nulls[i], message);
    }
    assert_file_refused("just text\n", "c.yaml, line 1: the file must be a mapping of option keys to values");
    assert_file_refused("- port\n", "c.yaml, line 1: the file must be a mapping of option keys to values");
    assert_file_refused("[a]: 1\n", "c.yaml, line 1: a key must be the name of an option");
    assert_file_refused("port: &x 1\n", "c.yaml, line 1: anchors and aliases are not allowed");
    assert_file_refused("port: *x\n", "c.yaml, line 1: anchors and aliases are not allowed");
    assert_file_refused("port: !!int 1\n", "c.yaml, line 1: tags are not allowed");
    assert_file_refused("port: 1\n---\nport: 2\n", "c.yaml, line 2: a second document begins; there must be one");
    assert_file_refused("host: \"a\\0b\"\n", "c.yaml, line 1: host has a value with a NUL character");
    assert_file_refused("\"port\\0\": 1\n", "c.yaml, line 1: unknown key \"port\": did you mean port?");
    assert_file_refused(
        "port: 1\n\tx: 2\n", "c.yaml, line 2: not valid YAML: found a tab character that violates indentation");
    assert_file_refused("host: \xff\n", "c.yaml, byte 6: invalid leading UTF-8 octet");
    assert_file_refused("host: \"\\x07\"\n",
        "c.yaml, line 1: host is \"\\x07\": must be a text that is not empty, of at "
        "most 4095 bytes of UTF-8 without control characters");
}

static void test_list_limits(void **state) {
    (void)state;
    char text[1000] = "batch: [1";
    for (int i = 1; i < OPTION_LIST_MAX; i++)
        strcat(text, ",1");
    size_t length = strlen(text);
    strcat(text, "]\n");
    struct config config;
    struct error error;
    assert_int_equal(apply_text(&config, text, &error), 0);
    assert_int_equal(config.batch.count, OPTION_LIST_MAX);
    config_free(&config);
    strcpy(text + length, ",1]\n");
    assert_file_refused(text, "c.yaml, line 1: batch has too many items");
    strcpy(text + length, ",1,1\n");
    memmove(text + 7, text + 8, strlen(text + 7)); /* the same as one scalar */
    assert_int_equal(apply_text(&config, text, &error), ERROR_INVALID);
    config_free(&config);
}

static void test_file_sizes_and_places(void **state) {
    (void)state;
    struct config config;
    struct error error;
    char path[40];
    char *large = malloc(CONFIG_FILE_MAX + 2);
    assert_non_null(large);
    memset(large, '#', CONFIG_FILE_MAX + 1);
    large[CONFIG_FILE_MAX + 1] = '\0';
    write_file(path, large);
    assert_int_equal(config_set_defaults(&config, NULL), 0);
    assert_int_equal(config_file_apply(path, &config, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "larger than the 1048576 bytes"));
    assert_int_equal(truncate(path, CONFIG_FILE_MAX), 0);
    assert_int_equal(config_file_apply(path, &config, &error), 0);
    unlink(path);
    memset(large, '[', CONFIG_FILE_MAX); /* nothing here is deep recursion */
    assert_int_equal(config_file_apply_text(large, CONFIG_FILE_MAX, "c.yaml", &config, &error), ERROR_INVALID);
    assert_int_equal(config_file_apply(path, &config, &error), ERROR_IO);
    assert_non_null(strstr(error.message, "cannot open configuration file /tmp/distillcache-test-"));
    assert_non_null(strstr(error.message, "No such file or directory"));
    assert_int_equal(config_file_apply("/tmp", &config, &error), ERROR_IO);
    assert_non_null(strstr(error.message, "cannot read configuration file /tmp: Is a directory"));
    config_free(&config);
    free(large);
}

/* The policies of a command line, as "name tokens ratio" lines. */
static void assert_policies(enum config_command command, const char *const *arguments, const char *expected) {
    struct config config;
    struct policy_settings *list;
    struct error error;
    size_t count;
    char text[1000] = "";
    assert_loads(&config, command, arguments, LIST());
    if (config_policies(&config, NULL, &list, &count, &error) != 0)
        fail_msg("%s", error.message);
    for (size_t i = 0; i < count; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s %u %g\n", list[i].policy->name, list[i].tokens,
            list[i].ratio);
    assert_string_equal(text, expected);
    config_free_policies(list, count);
    config_free(&config);
}

static void test_policies(void **state) {
    (void)state;
    assert_policies(CONFIG_SERVE, LIST("--model=m"), "full 0 1\n");
    assert_policies(CONFIG_SERVE, LIST("--model=m", "--kv-policy", "snapkv"), "snapkv 0 0.25\n");
    assert_policies(CONFIG_SERVE, LIST("--model=m", "--kv-policy", "h2o", "--kv-ratio", "1"), "h2o 0 1\n");
    assert_policies(CONFIG_SERVE, LIST("--model=m", "--kv-policy", "h2o", "--kv-ratio=.5"), "h2o 0 0.5\n");
    assert_policies(CONFIG_SERVE, LIST("--model=m", "--kv-policy", "tova", "--kv-tokens", "100"), "tova 100 0.25\n");
    assert_policies(CONFIG_SERVE, LIST("--model=m", "--kv-policy", "full", "--kv-ratio", "1.0"), "full 0 1\n");
    assert_policies(CONFIG_BENCH,
        LIST("--model=m", "--kv-policy", "full", "--kv-policy=h2o,recent=0.25", "--kv-policy", "snapkv,tokens=200",
            "--kv-policy", "streaming,ratio=0.0625", "--kv-ratio", "0.5,0.125"),
        "full 0 1\nh2o 0 0.5\nh2o 0 0.125\nsnapkv 200 0.25\nstreaming 0 0.0625\n");

    struct config config;
    struct policy_settings *list;
    struct error error;
    size_t count;
    if (apply_text(&config, "kv_policy: [h2o, \"snapkv,window=16,decode=keep\"]\nkv_ratio: [0.5]\n", &error) != 0)
        fail_msg("%s", error.message);
    assert_int_equal(config_policies(&config, NULL, &list, &count, &error), 0);
    assert_int_equal(count, 2);
    assert_int_equal(list[1].window, 16);
    assert_true(list[1].frozen_prompt && !list[0].frozen_prompt && list[1].ratio == 0.5);
    config_free_policies(list, count);
    config_free(&config);
}

/* Messages about policies name the option, the value, and what there is. */
static void assert_policy_refused(const char *const *arguments, const char *const *environment, const char *words) {
    struct config config;
    struct error error;
    char copy[400], *rest;
    assert_int_equal(load(&config, CONFIG_SERVE, arguments, environment, &error), ERROR_INVALID);
    config_free(&config);
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok_r(copy, "|", &rest); word != NULL; word = strtok_r(NULL, "|", &rest))
        if (strstr(error.message, word) == NULL)
            fail_msg("no '%s' in: %s", word, error.message);
}

static void test_policy_errors(void **state) {
    (void)state;
    assert_policy_refused(
        LIST("--model=m", "--kv-policy", "h3o"), LIST(), "option --kv-policy is \"h3o\"|full|h2o|snapkv|streaming");
    assert_policy_refused(LIST("--model=m"), LIST("DISTILLCACHE_KV_POLICY=lru"),
        "environment variable DISTILLCACHE_KV_POLICY is \"lru\"|full|h2o");
    assert_policy_refused(LIST("--model=m", "--kv-policy="), LIST(), "option --kv-policy is \"\"|full|h2o");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "snapkv,windw=3"), LIST(), "--kv-policy|windw|window");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "snapkv,window=0"), LIST(), "--kv-policy|window|0|256");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "snapkv,window"), LIST(), "--kv-policy|window");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "knorm,window=3"), LIST(), "--kv-policy|window|knorm");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "snapkv:"), LIST(), "--kv-policy");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "snapkv:file.json"), LIST(), "--kv-policy|snapkv");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "h2o\x1b"), LIST(), "--kv-policy is \"h2o\\x1b\"");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "h2o", "--kv-policy", "snapkv"), LIST(),
        "kv-policy|2 choices|serve has one policy");
    assert_policy_refused(LIST("--model=m", "--kv-policy", "h2o", "--kv-ratio", "0.5,0.25"), LIST(), "2 choices");
    assert_policy_refused(
        LIST("--model=m", "--kv-ratio", "0.5", "--kv-tokens", "64"), LIST(), "kv-ratio 0.5|kv-tokens 64|exclude");
    assert_policy_refused(
        LIST("--model=m", "--kv-tokens", "64"), LIST("DISTILLCACHE_KV_RATIO=0.5"), "kv-ratio 0.5|kv-tokens 64|exclude");
    assert_policies(
        CONFIG_SERVE, LIST("--model=m", "--kv-policy=h2o", "--kv-ratio=", "--kv-tokens", "64"), "h2o 64 0.25\n");
    static const char *const ratios[] = {
        "0", "0.0", "1.01", "-0.5", "2", "1e-1", "nan", "inf", "0x1", " 1", "0.5,", "0.5,,1", "1.0.0", "."};
    for (size_t i = 0; i < sizeof ratios / sizeof ratios[0]; i++) {
        char message[120];
        snprintf(
            message, sizeof message, "option --kv-ratio is \"%s\": must be 1 to 64 numbers above 0 up to 1", ratios[i]);
        assert_refused(CONFIG_SERVE, LIST("--model=m", "--kv-ratio", ratios[i]), LIST(), message);
    }
    struct config config;
    struct error error;
    assert_int_equal(apply_text(&config, "\nkv_policy: {name: h2o}\n", &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "c.yaml, line 2: kv_policy is a mapping: must be a policy name"));
    config_free(&config);
    assert_int_equal(apply_text(&config, "kv_policy: snapkv,x=1\n", &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "c.yaml, line 1: kv_policy is \"snapkv,x=1\": "));
    config_free(&config);
}

static char *print_example(const struct config *config) {
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    assert_non_null(out);
    config_print_example(config, out);
    fclose(out);
    return text;
}

static char *format_value(const struct option *option, const struct config *config) {
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    assert_non_null(out);
    option_format(option, config, false, out);
    fclose(out);
    return text;
}

/* Prints a configuration and reads the text back into a fresh one: every option of serve has the same value. */
static void assert_reads_back(const struct config *config) {
    struct config again;
    struct error error;
    char *example = print_example(config);
    if (apply_text(&again, example, &error) != 0)
        fail_msg("%s in:\n%s", error.message, example);
    for (size_t i = 0; i < option_count; i++) {
        const struct option *option = &option_table[i];
        if ((option->commands & CONFIG_SERVE) == 0 ||
            (option->flags & (OPTION_NOT_IN_FILE | OPTION_ONLY_COMMAND_LINE)) != 0)
            continue;
        char *before = format_value(option, config), *after = format_value(option, &again);
        assert_string_equal(before, after);
        free(before);
        free(after);
    }
    config_free(&again);
    free(example);
}

static void test_example_reads_back(void **state) {
    (void)state;
    struct config config;
    assert_int_equal(config_set_defaults(&config, NULL), 0);
    assert_reads_back(&config);
    config_free(&config);
    assert_loads(&config, CONFIG_SERVE,
        LIST("--model", "a \"b\" \\ : # {x}\xe2\x80\xa8\xef\xbb\xbf\xc3\xa4", "--model-alias", "null", "--host", "true",
            "--kv-memory", "1048577", "--max-body=3K", "--no-prefix-sharing", "--threads=7", "--port=0",
            "--log-format=json", "--kv-format=bf16", "--kv-policy", "snapkv,window=16,decode=keep", "--kv-ratio=0.125",
            "--kv-swap=0"),
        LIST());
    assert_reads_back(&config);
    config_free(&config);
}

/* The committed example file is what the program prints. */
static void test_example_is_current(void **state) {
    (void)state;
    const char *path = getenv("DISTILLCACHE_TEST_EXAMPLE");
    if (path == NULL)
        fail_msg("DISTILLCACHE_TEST_EXAMPLE does not name the example file");
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    static char committed[64 * 1024];
    size_t length = fread(committed, 1, sizeof committed - 1, file);
    committed[length] = '\0';
    fclose(file);
    char *example = print_example(NULL);
    assert_string_equal(committed, example);
    free(example);
}

static void test_help_names_every_option(void **state) {
    (void)state;
    for (unsigned command = 1; command < CONFIG_EVERY_COMMAND; command *= 2) {
        char *text = NULL;
        size_t length = 0;
        FILE *out = open_memstream(&text, &length);
        assert_non_null(out);
        config_print_help((enum config_command)command, out);
        fclose(out);
        for (size_t i = 0; i < option_count; i++) {
            const struct option *option = &option_table[i];
            if ((option->flags & OPTION_POSITIONAL) != 0)
                continue;
            char form[OPTION_NAME_MAX + 4], no_form[OPTION_NAME_MAX + 8];
            snprintf(form, sizeof form, " --%s ", option->name);
            snprintf(no_form, sizeof no_form, " --no-%s ", option->name);
            bool found = strstr(text, form) != NULL || strstr(text, no_form) != NULL;
            assert_int_equal(found, (option_find_for(option->name, command)->commands & command) != 0);
        }
        free(text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_precedence),
        cmocka_unit_test(test_command_line_forms),
        cmocka_unit_test(test_command_line_errors),
        cmocka_unit_test(test_environment_errors),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_bad_bytes_in_messages),
        cmocka_unit_test(test_file_values),
        cmocka_unit_test(test_file_errors),
        cmocka_unit_test(test_list_limits),
        cmocka_unit_test(test_file_sizes_and_places),
        cmocka_unit_test(test_policies),
        cmocka_unit_test(test_policy_errors),
        cmocka_unit_test(test_example_reads_back),
        cmocka_unit_test(test_example_is_current),
        cmocka_unit_test(test_help_names_every_option),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
