/* SPDX-License-Identifier: Apache-2.0
 *
 * The peer's protocol, with shell scripts in the place of the peer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands/bench_peer.h"

static char script_path[] = "/tmp/test_bench_peer_XXXXXX";

static int make_script(void **state) {
    (void)state;
    int descriptor = mkstemp(script_path);
    return descriptor < 0 ? -1 : close(descriptor);
}

static int remove_script(void **state) {
    (void)state;
    return unlink(script_path);
}

static struct bench_peer *start(const char *script, struct error *error) {
    FILE *file = fopen(script_path, "w");
    assert_non_null(file);
    fputs(script, file);
    fclose(file);
    struct bench_peer_options options = {.python = "sh", .script = script_path, .model = "m.gguf", .threads = 3};
    *error = (struct error){0};
    return bench_peer_start(&options, error);
}

static void peer_gets_arguments_and_questions(void **state) {
    (void)state;
    struct error error;
    struct bench_peer *peer = start("echo \"ready $*\"\n"
                                    "while read -r line; do\n"
                                    "case \"$line\" in\n"
                                    "'prefill 512') echo 'seconds 0.25' ;;\n"
                                    "'decode 16 depth 100 batch 8') echo 'seconds 1.5' ;;\n"
                                    "*) echo \"error what is $line\" ;;\n"
                                    "esac\ndone\n",
        &error);
    assert_non_null(peer);
    assert_string_equal(bench_peer_description(peer), "--model m.gguf --threads 3");
    double seconds = 0;
    assert_int_equal(bench_peer_prefill(peer, 512, &seconds, &error), 0);
    assert_float_equal(seconds, 0.25, 0);
    assert_int_equal(bench_peer_decode(peer, 16, 100, 8, &seconds, &error), 0);
    assert_float_equal(seconds, 1.5, 0);
    assert_int_equal(bench_peer_prefill(peer, 7, &seconds, &error), ERROR_IO);
    assert_non_null(strstr(error.message, "cannot do 'prefill 7': what is prefill 7"));
    bench_peer_stop(peer);
}

static void failure_to_start_is_told(void **state) {
    (void)state;
    struct error error;
    struct bench_peer_options options = {.python = "no-such-interpreter", .script = "s", .model = "m", .threads = 1};
    assert_null(bench_peer_start(&options, &error));
    assert_int_equal(error.code, ERROR_IO);
    assert_non_null(strstr(error.message, "no-such-interpreter"));
    assert_null(start("exit 3", &error));
    assert_int_equal(error.code, ERROR_IO);
    assert_non_null(strstr(error.message, "exit code 3"));
    assert_null(start("kill -9 $$", &error));
    assert_non_null(strstr(error.message, "signal 9"));
    assert_null(start("echo hello", &error));
    assert_int_equal(error.code, ERROR_FORMAT);
    assert_non_null(strstr(error.message, "hello"));
}

static void end_between_questions_is_told(void **state) {
    (void)state;
    struct error error;
    struct bench_peer *peer = start("echo 'ready x'; read -r line; echo 'seconds 1'; exit 5", &error);
    assert_non_null(peer);
    double seconds;
    assert_int_equal(bench_peer_prefill(peer, 1, &seconds, &error), 0);
    /* Whether the end shows at the sending or at the reading is a race; the message is the same. */
    assert_int_equal(bench_peer_prefill(peer, 1, &seconds, &error), ERROR_IO);
    assert_non_null(strstr(error.message, "exit code 5"));
    assert_non_null(strstr(error.message, "prefill 1"));
    bench_peer_stop(peer);
}

static void answers_that_are_no_time_are_refused(void **state) {
    (void)state;
    static const char *const answers[] = {
        "seconds nan", "seconds 0", "seconds -1", "seconds 1x", "seconds ", "second 1"};
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        char script[128];
        struct error error;
        double seconds;
        snprintf(script, sizeof script, "echo 'ready x'; read -r line; echo '%s'; read -r line", answers[i]);
        struct bench_peer *peer = start(script, &error);
        assert_non_null(peer);
        assert_int_equal(bench_peer_prefill(peer, 1, &seconds, &error), ERROR_FORMAT);
        bench_peer_stop(peer);
    }
}

static void endless_line_is_refused(void **state) {
    (void)state;
    struct error error;
    assert_null(start("yes | tr -d '\\n'", &error));
    assert_int_equal(error.code, ERROR_FORMAT);
    assert_non_null(strstr(error.message, "longer than"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(peer_gets_arguments_and_questions),
        cmocka_unit_test(failure_to_start_is_told),
        cmocka_unit_test(end_between_questions_is_told),
        cmocka_unit_test(answers_that_are_no_time_are_refused),
        cmocka_unit_test(endless_line_is_refused),
    };
    return cmocka_run_group_tests(tests, make_script, remove_script);
}
