/* SPDX-License-Identifier: Apache-2.0
 *
 * The scheduler while each allocation of the engine thread in turn fails: requests may end with an error that says so,
 * others answer as ever, and nothing is lost.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "tests/sanitized.h"
#include "tests/unit/failing_malloc.h"
#include "tests/unit/serving.h"

static const char *const policies[] = {"streaming,tokens=40", "h2o,ratio=0.25,minimum=8,prefill_prune_every=32",
    "snapkv,ratio=0.5,minimum=8,window=8", "laprox,ratio=0.4,minimum=16,window=8", "h2o,tokens=40,summary=1", "full"};
enum { REQUESTS = sizeof policies / sizeof policies[0], CHOICES = 2 };

/* Requests that crowd each other out of a small pool, to and from a small host buffer. */
static struct serving *begin(struct call *calls[REQUESTS]) {
    struct serving *serving =
        serving_create(&(struct serving_options){.kv_pages = 4 * 34, .swap_bytes = 60000, .lockstep = true});
    for (uint32_t i = REQUESTS; i-- > 0;) {
        struct request *request = serving_request(80 + 10 * i, i, 60);
        struct error error = {0};
        serving_set_policy(request, policies[i]);
        request->ignore_eos = true;
        request->n = CHOICES;
        calls[i] = serving_submit(serving, request, &error);
        if (calls[i] == NULL)
            fail_msg("refused: %s", error.message);
    }
    return serving;
}

/* Returns whether an allocation failed. */
static bool run_failing(uint32_t successes, struct call *const *expected, uint32_t *errors) {
    struct call *calls[REQUESTS];
    struct serving *serving = begin(calls);
    failing_malloc_arm(successes);
    serving_wait_all(serving);
    bool failed = failing_malloc_disarm();
    for (uint32_t i = 0; i < REQUESTS; i++)
        for (uint32_t c = 0; c < CHOICES; c++) {
            const struct answer *answer = &calls[i]->answers[c];
            *errors += answer->finish == FINISH_ERROR;
            if (answer->finish == FINISH_ERROR)
                assert_non_null(strstr(answer->error.message, "no memory"));
            else if (!answers_equal(answer, &expected[i]->answers[c]))
                fail_msg("%s answers differently after failure %u", policies[i], successes);
        }
    serving_free(serving);
    return failed;
}

static void every_failed_allocation_is_survived(void **state) {
    (void)state;
    struct call *expected[REQUESTS];
    failing_malloc_spare_thread();
    struct serving *serving = begin(expected);
    serving_wait_all(serving);
    uint32_t runs = 0, errors = 0;
    for (uint32_t at = 0; run_failing(at, expected, &errors); at += 1 + at / (sanitized() ? 4 : 12))
        runs++;
    print_message("%u runs, %u answers ended by an error\n", runs, errors);
    assert_true(runs > 20);
    assert_true(errors > 0);
    serving_free(serving);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_failed_allocation_is_survived)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
