/* SPDX-License-Identifier: Apache-2.0
 *
 * The KV cache under random steps, against plain lists (kv_model.h). The pool is small, so that it runs out often;
 * allocations fail now and then (on the CPU: another backend allocates for itself). A failure prints seed and step.
 */
#include "engine/random.h"
#include "tests/sanitized.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/failing_malloc.h"
#include "tests/unit/kv_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { STEPS = 12000, TWINS_MAX = 10, DOCUMENTS = 5, DOCUMENT_TOKENS = 160, TOKENS_MAX = 300, NOTE_KINDS = 2 };

struct run {
    uint64_t seed;
    uint64_t draws;
    struct kv_cache *cache;
    struct plain_backend plain;
    struct twin *twins[TWINS_MAX];
    uint32_t twins_count;
    int32_t documents[DOCUMENTS][DOCUMENT_TOKENS];
    /* What happened, so that a run that tests nothing fails: */
    uint32_t out_of_pages, out_of_memory, adopted, reused, preempted, keeps_refused, taken_back;
    uint32_t prunes, prunes_refused, swapped, charged, notes, noted, cleared, tables_sent, tables_missing;
};

static uint32_t draw(struct run *run, uint32_t below) {
    uint32_t words[4];
    random_philox(run->seed, 0, 0, run->draws++, words);
    return words[0] % below;
}

/* Sometimes lets one of the next allocations fail. */
static void arm(struct run *run) {
    if (draw(run, 12) == 0 && chosen_backend_is_cpu())
        failing_malloc_arm(draw(run, 6));
}

/* Requires that memory was the reason for code exactly if it should be. */
static void disarm(struct run *run, bool failed_for_memory) {
    bool injected = failing_malloc_disarm();
    REQUIRE(injected || !failed_for_memory);
    run->out_of_memory += failed_for_memory;
}

static uint32_t pick(struct run *run) {
    return draw(run, run->twins_count);
}

static void remove_twin(struct run *run, uint32_t at) {
    twin_free(run->twins[at]);
    run->twins[at] = run->twins[--run->twins_count];
}

static void note_code(struct run *run, int code) {
    REQUIRE(code == 0 || code == ERROR_PAGES || code == ERROR_MEMORY);
    run->out_of_pages += code == ERROR_PAGES;
    if (code == ERROR_PAGES && draw(run, 3) == 0)
        remove_twin(run, pick(run));
}

/* Appends tokens in chunks as a prefill does; false when the twin could not take them all. */
static int prefill(struct run *run, struct twin *twin, const int32_t *tokens, uint32_t count) {
    while (twin->length < count) {
        uint32_t chunk = 1 + draw(run, 40);
        if (draw(run, 2) == 0) /* to the end of a block */
            chunk = (chunk / KV_PAGE_SLOTS + 1) * KV_PAGE_SLOTS - twin->length % KV_PAGE_SLOTS;
        if (chunk > count - twin->length)
            chunk = count - twin->length;
        arm(run);
        int code = twin_append(twin, tokens + twin->length, chunk);
        disarm(run, code == ERROR_MEMORY);
        if (code != 0)
            return code;
        if (draw(run, 2) == 0)
            twin_publish(twin);
        if (draw(run, 2) == 0)
            run->notes += twin_leave_note(twin, draw(run, NOTE_KINDS), draw(run, 1500));
    }
    return 0;
}

static void adopt(struct run *run, struct twin *twin, const int32_t *tokens, uint32_t count, uint32_t limit) {
    uint32_t unheld, available = kv_cache_pages_free(run->cache);
    uint32_t matched = kv_cache_match_prefix(run->cache, tokens, count, limit, NULL, &unheld);
    arm(run);
    uint32_t adopted = twin_adopt(twin, tokens, count, limit);
    disarm(run, adopted != matched);
    REQUIRE(adopted == matched || adopted == 0);
    REQUIRE(kv_cache_pages_free(run->cache) == available - (adopted > 0 ? unheld : 0));
    run->adopted += adopted;
}

/* Only as far as there is a note. */
static void adopt_noted(struct run *run, struct twin *twin, const int32_t *tokens, uint32_t count, uint32_t limit) {
    uint32_t kind = draw(run, NOTE_KINDS);
    uint32_t longest =
        run->cache->pages.index != NULL ? kv_model_longest_noted(run->cache, tokens, count, limit, kind) : 0;
    arm(run);
    uint32_t adopted = twin_adopt_noted(twin, tokens, count, limit, kind);
    disarm(run, adopted != longest);
    REQUIRE(adopted == longest || adopted == 0);
    run->noted += adopted;
}

/* A new twin that computes tokens [count], reusing what is published of them. */
static void add_twin(struct run *run, const int32_t *tokens, uint32_t count) {
    arm(run);
    struct twin *twin = twin_create(run->cache);
    disarm(run, twin == NULL);
    if (twin == NULL)
        return;
    run->twins[run->twins_count++] = twin;
    uint32_t limit = draw(run, 4) == 0 ? draw(run, count + 1) : count - 1;
    if (draw(run, 2) == 0)
        adopt(run, twin, tokens, count, limit);
    else
        adopt_noted(run, twin, tokens, count, limit);
    twin_compare(twin);
    if (draw(run, 8) == 0) {
        run->cleared += twin->length > 0;
        twin_clear(twin);
        twin_compare(twin);
    }
    int code = prefill(run, twin, tokens, count);
    if (code == 0 && draw(run, 4) > 0)
        twin_publish(twin);
    if (code != 0)
        note_code(run, code);
}

static void step_create(struct run *run) {
    int32_t tokens[DOCUMENT_TOKENS + 40];
    const int32_t *document = run->documents[draw(run, DOCUMENTS)];
    uint32_t shared = draw(run, DOCUMENT_TOKENS), own = 1 + draw(run, 40);
    for (uint32_t i = 0; i < shared; i++)
        tokens[i] = document[i];
    for (uint32_t i = 0; i < own; i++)
        tokens[shared + i] = (int32_t)draw(run, 1000);
    add_twin(run, tokens, shared + own);
}

/* A twin that is not swapped out, or is so no more; NULL when it cannot come back. */
static struct twin *pick_ready(struct run *run) {
    struct twin *twin = run->twins[pick(run)];
    if (twin->saved == NULL)
        return twin;
    int code = twin_restore(twin);
    if (code != 0) {
        note_code(run, code);
        return NULL;
    }
    twin_compare(twin);
    run->swapped++;
    return twin;
}

static void step_append(struct run *run) {
    struct twin *twin = pick_ready(run);
    int32_t tokens[64];
    uint32_t count = draw(run, 3) > 0 ? 1 : 1 + draw(run, 64);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)draw(run, 1000);
    if (twin == NULL || twin->length + count > TOKENS_MAX)
        return;
    if (count == 1)
        for (uint32_t h = 0; h < MODEL_HEADS; h++)
            run->reused += twin->heads[h].marked != KV_NO_SLOT;
    arm(run);
    int code = twin_append(twin, tokens, count);
    disarm(run, code == ERROR_MEMORY);
    twin_compare_head(twin, draw(run, MODEL_HEADS));
    note_code(run, code);
}

static void step_fork(struct run *run) {
    const struct twin *twin = pick_ready(run);
    if (twin == NULL)
        return;
    arm(run);
    struct twin *fork = twin_fork(twin);
    disarm(run, fork == NULL);
    if (fork == NULL)
        return;
    twin_compare_head(fork, draw(run, MODEL_HEADS));
    run->twins[run->twins_count++] = fork;
}

static int keep_some(struct run *run, struct twin *twin, uint32_t h, uint32_t percent, uint32_t leading) {
    uint32_t slots[TOKENS_MAX], count = 0;
    for (uint32_t i = 0; i < twin->heads[h].count; i++)
        if (i < leading || draw(run, 100) < percent)
            slots[count++] = i;
    uint64_t copied = run->plain.slots_moved;
    arm(run);
    int code = twin_keep(twin, h, slots, count);
    disarm(run, code == ERROR_MEMORY);
    run->keeps_refused += code == ERROR_PAGES;
    REQUIRE(code == 0 || run->plain.slots_moved == copied);
    twin_compare_head(twin, h);
    return code;
}

static void step_keep(struct run *run) {
    struct twin *twin = pick_ready(run);
    uint32_t percent = draw(run, 8) == 0 ? 100 * draw(run, 2) : 1 + draw(run, 99);
    uint32_t leading = draw(run, 2) == 0 ? draw(run, 64) : 0;
    uint32_t first = draw(run, MODEL_HEADS), end = draw(run, 3) == 0 ? first + 1 : first + MODEL_HEADS;
    int code = 0;
    for (uint32_t h = first; twin != NULL && code == 0 && h < end; h++)
        code = keep_some(run, twin, h % MODEL_HEADS, percent, leading);
    note_code(run, code);
}

static void step_evict(struct run *run) {
    struct twin *twin = pick_ready(run);
    uint32_t end = 1 + draw(run, MODEL_HEADS);
    int code = 0;
    for (uint32_t h = 0; twin != NULL && code == 0 && h < end; h++) {
        if (twin->heads[h].count == 0 || twin->heads[h].marked != KV_NO_SLOT)
            continue;
        arm(run);
        code = twin_evict(twin, h, draw(run, twin->heads[h].count));
        disarm(run, code == ERROR_MEMORY);
        twin_compare_head(twin, h);
    }
    note_code(run, code);
}

/* What goes of one head: nothing, one slot that is marked, or what a list leaves out or names. */
static struct kv_removal draw_removal(struct run *run, const struct model_head *head, uint32_t *list) {
    struct kv_removal removal = {.evict = KV_NO_SLOT};
    uint32_t kind = draw(run, 4), percent = draw(run, 101);
    if (head->count == 0 || kind == 0)
        return removal;
    if (kind == 1 && head->marked == KV_NO_SLOT) {
        removal.evict = draw(run, head->count);
        removal.rank = draw(run, head->count); /* may be wrong */
        return removal;
    }
    bool names = draw(run, 2) == 0;
    uint32_t listed = 0;
    for (uint32_t i = 0; i < head->count; i++)
        if (draw(run, 100) < percent)
            list[listed++] = i;
    removal.count = names ? head->count - listed : listed;
    *(names ? &removal.drop : &removal.keep) = list;
    return removal;
}

static void step_prune(struct run *run) {
    static uint32_t lists[MODEL_HEADS][TOKENS_MAX];
    struct kv_removal removals[MODEL_HEADS];
    struct twin *twin = pick_ready(run);
    if (twin == NULL)
        return;
    for (uint32_t h = 0; h < MODEL_HEADS; h++)
        removals[h] = draw_removal(run, &twin->heads[h], lists[h]);
    arm(run);
    int code = twin_prune(twin, removals);
    disarm(run, code == ERROR_MEMORY);
    twin_leave_note(twin, draw(run, NOTE_KINDS), 1); /* only of what was not pruned */
    run->prunes++;
    run->prunes_refused += code == ERROR_PAGES;
    twin_compare(twin);
    note_code(run, code);
}

static void step_swap(struct run *run) {
    struct twin *twin = run->twins[pick(run)];
    if (twin->saved == NULL)
        twin_save(twin);
    twin_compare(twin);
}

static void step_charge(struct run *run) {
    struct twin *twin = run->twins[pick(run)];
    int code = twin_charge(twin, draw(run, 3) == 0 ? 0 : draw(run, 3000));
    run->charged += code == 0;
    note_code(run, code);
}

/* Frees a twin and computes it again from its tokens. */
static void step_preempt(struct run *run) {
    uint32_t at = pick(run), count = run->twins[at]->length;
    int32_t tokens[TOKENS_MAX];
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = run->twins[at]->tokens[i];
    remove_twin(run, at);
    if (count == 0)
        return;
    add_twin(run, tokens, count);
    run->preempted++;
}

static void step_publish(struct run *run) {
    struct twin *twin = pick_ready(run);
    if (twin == NULL)
        return;
    twin_publish(twin);
    twin_leave_note(twin, draw(run, NOTE_KINDS), draw(run, 1500));
}

/* As before a forward: of some twins next to each other. Without memory for it views do not name a copy. */
static void send_tables(struct run *run) {
    uint32_t first = draw(run, run->twins_count), count = 1 + draw(run, run->twins_count - first);
    bool fails = draw(run, 8) == 0;
    run->plain.fail_allocate = fails;
    arm(run);
    bool complete = twin_send_tables(run->twins + first, count);
    bool injected = failing_malloc_disarm();
    run->plain.fail_allocate = false;
    REQUIRE(complete || fails || injected);
    for (uint32_t i = 0; i < count; i++)
        twin_compare_head(run->twins[first + i], draw(run, MODEL_HEADS));
    run->tables_sent += complete;
    run->tables_missing += !complete;
}

static void step(struct run *run) {
    uint32_t choice = draw(run, 100);
    bool had_notes = kv_model_notes != NULL;
    if (run->twins_count == 0 || (choice < 12 && run->twins_count < TWINS_MAX))
        step_create(run);
    else if (choice < 20 && run->twins_count < TWINS_MAX)
        step_fork(run);
    else if (choice < 27)
        remove_twin(run, pick(run));
    else if (choice < 32)
        step_keep(run);
    else if (choice < 42)
        step_evict(run);
    else if (choice < 47)
        step_preempt(run);
    else if (choice < 53)
        step_prune(run);
    else if (choice < 56)
        step_swap(run);
    else if (choice < 59)
        step_charge(run);
    else if (choice < 66)
        step_publish(run);
    else if (choice == 66 && draw(run, 8) == 0)
        REQUIRE(kv_cache_release_attached(run->cache) == had_notes && kv_model_notes == NULL);
    else
        step_append(run);
}

static uint64_t weak_hash(uint64_t before, const int32_t tokens[KV_PAGE_SLOTS]) {
    return (before + (uint32_t)tokens[0]) & 1;
}

/* A note that the cache still has when it is freed. */
static void leave_last_note(struct run *run) {
    struct twin *twin = twin_create(run->cache);
    REQUIRE(twin_append(twin, run->documents[0], 2 * KV_PAGE_SLOTS) == 0);
    twin_publish(twin);
    REQUIRE(twin_leave_note(twin, NOTE_KINDS, 100));
    kv_model_check(run->cache, &twin, 1);
    twin_free(twin);
    kv_model_check(run->cache, NULL, 0);
    REQUIRE(kv_model_notes != NULL);
}

static void run_steps(uint64_t seed, uint32_t pages, bool sharing, bool weak, bool poison) {
    struct run run = {.seed = seed};
    run.cache = kv_model_cache(&run.plain, pages, sharing);
    run.cache->pages.poison_free = poison;
    if (weak)
        run.cache->pages.index->hash = weak_hash;
    for (uint32_t d = 0; d < DOCUMENTS; d++)
        for (uint32_t i = 0; i < DOCUMENT_TOKENS; i++) /* documents 0 and 1, 2 and 3 start alike */
            run.documents[d][i] = (int32_t)((i < 48 ? d / 2 : d) * DOCUMENT_TOKENS + i);
    uint32_t check_every = chosen_backend_share(8, 64); /* it reads all of the pool */
    for (uint32_t i = 0; i < STEPS; i++) {
        snprintf(kv_model_place, sizeof kv_model_place, "seed %llu, step %u", (unsigned long long)seed, i);
        uint32_t used = sharing ? run.cache->pages.index->used : 0;
        step(&run);
        if (run.twins_count > 0 && draw(&run, 3) == 0)
            send_tables(&run);
        run.taken_back += sharing && run.cache->pages.index->used < used;
        if (i % check_every == 0)
            kv_model_check(run.cache, run.twins, run.twins_count);
        if (i % 64 == 0)
            for (uint32_t t = 0; t < run.twins_count; t++)
                twin_compare(run.twins[t]);
    }
    while (run.twins_count > 0)
        remove_twin(&run, 0);
    kv_model_check(run.cache, NULL, 0);
    REQUIRE(kv_cache_pages_free(run.cache) == pages);
    print_message(
        "seed %llu: out of pages %u, out of memory %u, adopted %u, reused %u, preempted %u, keeps refused %u, copied "
        "%llu, taken back %u, prunes %u, refused %u, swapped %u, charged %u, notes %u, noted %u, cleared %u\n",
        (unsigned long long)seed, run.out_of_pages, run.out_of_memory, run.adopted, run.reused, run.preempted,
        run.keeps_refused, (unsigned long long)run.plain.pages_copied, run.taken_back, run.prunes, run.prunes_refused,
        run.swapped, run.charged, run.notes, run.noted, run.cleared);
    REQUIRE(run.out_of_pages > 100 && run.reused > 100 && run.preempted > 100);
    REQUIRE(run.out_of_memory > 20 || !chosen_backend_is_cpu());
    REQUIRE(run.plain.pages_copied > 100 && run.prunes > 200 && run.swapped > 100 && run.charged > 100);
    REQUIRE(run.tables_sent > 1000 && run.tables_missing > 0 && run.plain.table_numbers > 1000);
    REQUIRE(!sharing || (run.adopted > 1000 && run.taken_back > 50 && run.keeps_refused > 0));
    REQUIRE(!sharing || (run.notes > 100 && run.noted > 300 && run.cleared > 30));
    if (sharing)
        leave_last_note(&run);
    kv_cache_free(run.cache);
    REQUIRE(kv_model_notes == NULL);
    plain_backend_close(&run.plain);
}

static void test_shared_prefixes(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= chosen_backend_share(sanitized() ? 2 : 4, 1); seed++)
        run_steps(seed, 130 + 10 * (uint32_t)seed, true, false, true);
}

static void test_hashes_that_collide(void **state) {
    (void)state;
    for (uint64_t seed = 11; seed <= chosen_backend_share(sanitized() ? 11 : 12, 11); seed++)
        run_steps(seed, 150, true, true, true);
}

/* Pages come back with what their last holder left in them. */
static void test_without_poison(void **state) {
    (void)state;
    run_steps(31, 150, true, false, false);
}

static void test_without_sharing(void **state) {
    (void)state;
    for (uint64_t seed = 21; seed <= chosen_backend_share(sanitized() ? 21 : 22, 21); seed++)
        run_steps(seed, 140, false, false, true);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared_prefixes),
        cmocka_unit_test(test_hashes_that_collide),
        cmocka_unit_test(test_without_poison),
        cmocka_unit_test(test_without_sharing),
    };
    return cmocka_run_group_tests_name("kv_random", tests, NULL, NULL);
}
