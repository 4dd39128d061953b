/* SPDX-License-Identifier: Apache-2.0
 *
 * Pages: what choices hold and will take, who is let in, who has to give way and how.
 *
 * Admission looks at two numbers of a choice, both beyond the pages that it has: `peak`, the most it takes while its
 * prompt is computed and pruned, and `settled`, what it takes in the end (a few tokens ahead: growth beyond is met by
 * preemption). Prompts are computed one after another, so that when one is at its peak those before it are settled and
 * those after it have not begun: a choice fits when its peak fits beside all the others settled. Peaks do not add up,
 * which is what lets many pruned sequences run where few unpruned ones would.
 */
#include "engine/scheduler_internal.h"

#include "engine/clock.h"

/* Tokens that a choice with a policy is looked after in advance. Growth is slow where little is kept, and what the last
 * prompt needed at its peak is there for it. */
enum { TOKENS_AHEAD = 32 };

struct outlook {
    int64_t peak;
    int64_t settled;
};

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t pages_free(const struct scheduler *s) {
    return kv_cache_pages_free(engine_kv_cache(s->engine));
}

/* ---- what is held ---- */

static void note_memory(struct choice *choice) {
    if (choice->sequence == NULL || choice->swapped)
        return;
    choice->memory = sequence_memory(choice->sequence);
}

void scheduler_count_memory(struct scheduler *s) {
    uint64_t seen = 0, bytes = 0, bytes_full = 0;
    double kept = 0;
    for (uint32_t i = 0; i < s->running_count; i++) {
        struct choice *choice = s->running[i];
        note_memory(choice);
        seen += choice->memory.seen;
        kept += choice->memory.kept;
        bytes += choice->memory.bytes;
        bytes_full += choice->memory.bytes_full;
    }
    s->counters.kv_tokens_seen = seen;
    s->counters.kv_tokens_kept = (uint64_t)(kept + 0.5);
    s->counters.kv_bytes = bytes;
    s->counters.kv_bytes_full = bytes_full;
    s->counters.snapshot_bytes = engine_snapshot_bytes(s->engine);
}

void scheduler_drop_sequence(struct scheduler *s, struct choice *choice) {
    note_memory(choice);
    if (choice->swapped)
        s->counters.swapped_bytes -= sequence_swap_bytes(choice->sequence);
    sequence_free(choice->sequence);
    choice->sequence = NULL;
    choice->swapped = false;
}

/* Pages and statistics, in pages. */
static int64_t pages_held(const struct scheduler *s, struct sequence *sequence) {
    size_t statistics = kv_cache_pages_of(engine_kv_cache(s->engine), sequence_statistics_bytes(sequence));
    return (int64_t)(kv_sequence_pages_held(sequence_kv(sequence)) + statistics);
}

/* ---- what a policy makes of it ---- */

struct policy_settings scheduler_policy(const struct scheduler *s, const struct request *request) {
    if (request->pooling != POOLING_NONE)
        return (struct policy_settings){.policy = NULL};
    struct policy_settings settings = request->kv_policy.policy != NULL ? request->kv_policy : s->options.kv_policy;
    if (settings.policy == NULL || policy_settings_keep_all(&settings))
        return (struct policy_settings){.policy = NULL};
    if (settings.seed == 0)
        settings.seed = request->sampling.seed;
    return settings;
}

uint32_t scheduler_tokens_max(const struct scheduler *s, const struct policy_settings *settings, uint32_t count) {
    uint32_t most = engine_tokens_max(s->engine);
    if (settings == NULL || settings->policy == NULL)
        return most;
    uint64_t total = kv_cache_pages_total(engine_kv_cache(s->engine));
    uint32_t low = count, high = engine_context(s->engine);
    if (count > high || engine_demand(s->engine, settings, count, count).peak_pages > total)
        return 0;
    while (low < high) { /* low fits */
        uint32_t middle = low + (high - low + 1) / 2;
        if (engine_demand(s->engine, settings, count, middle).pages <= total)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Tokens that the choice will still generate, as far as it is looked ahead; the last one is never computed. */
static uint32_t tokens_ahead(const struct choice *choice) {
    uint32_t max_tokens = choice->task->request->max_tokens;
    uint32_t left = max_tokens - (uint32_t)choice->generated.count;
    uint32_t ahead = left == 0 ? 0 : left - 1;
    uint32_t room = choice_tokens_max(choice) - choice_total(choice);
    ahead = ahead < room ? ahead : room;
    return ahead < TOKENS_AHEAD ? ahead : TOKENS_AHEAD;
}

static struct sequence_demand demand_of(const struct scheduler *s, const struct choice *choice) {
    return engine_demand(
        s->engine, choice_policy(choice), choice_prompt(choice)->count, choice_total(choice) + tokens_ahead(choice));
}

/* Free pages for the first prune of a sequence that shares pages: kept slots move to pages of its own, head by head,
 * while what it holds alone becomes free. */
static int64_t copies_of_first_prune(const struct scheduler *s, int64_t shared, int64_t alone, int64_t kept) {
    if (shared == 0)
        return 0;
    return larger(smaller(shared, kept) - alone, 0) + kept / s->heads + 1;
}

/* Every decode step may change one shared page a head. */
static int64_t copies_of_steps(const struct scheduler *s, int64_t shared, uint32_t steps) {
    return smaller(shared, (int64_t)s->heads * steps);
}

uint64_t scheduler_pages_of_step(const struct scheduler *s, const struct choice *choice, uint32_t count) {
    uint64_t pages = sequence_pages_needed(choice->sequence, count);
    if (choice_policy(choice) == NULL)
        return pages;
    struct kv_sequence *kv = sequence_kv(choice->sequence);
    int64_t shared = kv_sequence_pages_shared(kv);
    if (shared == 0)
        return pages;
    if (choice_is_decoding(choice))
        return pages + (uint64_t)copies_of_steps(s, shared, 1);
    if (count < sequence_room(choice->sequence))
        return pages;
    int64_t alone = (int64_t)(kv_sequence_pages_held(kv) + pages) - shared;
    return pages + (uint64_t)copies_of_first_prune(s, shared, alone, (int64_t)demand_of(s, choice).pages);
}

/* Of a running choice. */
static struct outlook outlook_of(const struct scheduler *s, const struct choice *choice) {
    struct sequence *sequence = choice->sequence;
    if (choice_policy(choice) == NULL) {
        int64_t pages = (int64_t)sequence_pages_needed(sequence, choice_remaining(choice)) + s->heads;
        return (struct outlook){pages, pages};
    }
    struct sequence_demand demand = demand_of(s, choice);
    int64_t shared = kv_sequence_pages_shared(sequence_kv(sequence)), held = pages_held(s, sequence);
    int64_t peak = (int64_t)demand.peak_pages, pages = (int64_t)demand.pages;
    if (choice_is_decoding(choice)) {
        uint32_t steps = choice_remaining(choice) + tokens_ahead(choice);
        int64_t settled = larger(pages - held, 0) + copies_of_steps(s, shared, steps);
        return (struct outlook){settled, settled};
    }
    return (struct outlook){
        .peak = peak - held + copies_of_first_prune(s, shared, peak - shared, pages),
        .settled = pages - (held - shared),
    };
}

uint64_t scheduler_pages_of_prompt(const struct scheduler *s, const struct choice *choice) {
    return (uint64_t)larger(outlook_of(s, choice).peak, 0);
}

/* ---- admission ---- */

/* Leading tokens of a waiting choice that may come from a shared prefix. */
static uint32_t reusable_tokens(const struct choice *choice) {
    if (choice_wants_prompt_rows(choice))
        return 0;
    const struct policy_settings *settings = choice_policy(choice);
    if (settings == NULL)
        return choice_total(choice) - 1;
    return policy_reusable_tokens(settings, choice_prompt(choice)->count);
}

/* Pages of the shared prefix that others hold; those that nobody does count as free, and are taken from there. */
static int64_t match_prefix(struct scheduler *s, const struct choice *choice) {
    uint32_t limit = reusable_tokens(choice), unheld = 0, matched = 0;
    if (limit > 0) {
        choice_copy_tokens(choice, 0, limit, s->scratch);
        matched = engine_match_prefix(s->engine, choice_policy(choice), s->scratch, limit, &unheld);
    }
    return (int64_t)(matched / KV_PAGE_SLOTS) * s->heads - unheld;
}

/* The other choices of its prompt, which start as forks and come to own what they change; statistics at once. */
static int64_t pages_of_followers(const struct scheduler *s, const struct choice *choice, int64_t pages) {
    if (!choice_is_leader(choice) || choice->generated.count > 0)
        return 0;
    int64_t each =
        policy_needs(choice_policy(choice), false) != 0 ? pages : copies_of_steps(s, pages, tokens_ahead(choice));
    return (choice->task->request->n - 1) * each;
}

static struct outlook outlook_of_waiting(struct scheduler *s, const struct choice *choice) {
    if (choice_policy(choice) == NULL) {
        int64_t shared = match_prefix(s, choice);
        int64_t blocks = (choice_total(choice) + KV_PAGE_SLOTS) / KV_PAGE_SLOTS;
        int64_t pages = blocks * s->heads - shared;
        return (struct outlook){pages, pages};
    }
    struct sequence_demand demand = demand_of(s, choice);
    int64_t peak = (int64_t)demand.peak_pages, pages = (int64_t)demand.pages;
    if (choice->swapped) {
        int64_t settled = larger((int64_t)sequence_swap_pages(choice->sequence), pages);
        return (struct outlook){settled, settled};
    }
    int64_t shared = match_prefix(s, choice);
    return (struct outlook){
        .peak = peak - shared + copies_of_first_prune(s, shared, peak - shared, pages),
        .settled = pages + pages_of_followers(s, choice, pages),
    };
}

/* Most pages that the running choices take at once beyond those they have, and the newcomer after them. */
static int64_t most_pages(const struct scheduler *s, struct outlook newcomer) {
    int64_t settled = 0;
    for (uint32_t i = 0; i < s->running_count; i++)
        if (choice_is_decoding(s->running[i]))
            settled += outlook_of(s, s->running[i]).settled;
    int64_t most = settled;
    for (uint32_t i = 0; i < s->running_count; i++) {
        if (choice_is_decoding(s->running[i]))
            continue;
        struct outlook outlook = outlook_of(s, s->running[i]);
        most = larger(most, settled + outlook.peak);
        settled += outlook.settled;
    }
    return larger(larger(most, settled + newcomer.peak), settled + newcomer.settled);
}

static bool choice_fits(struct scheduler *s, const struct choice *choice) {
    return most_pages(s, outlook_of_waiting(s, choice)) <= pages_free(s);
}

/* Gives a choice a sequence, with what it can have of a shared prefix. */
static int start_choice(struct scheduler *s, struct choice *choice, struct error *error) {
    choice->sequence = sequence_create(s->engine);
    if (choice->sequence == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    const struct policy_settings *settings = choice_policy(choice);
    uint32_t prompt = choice_prompt(choice)->count, total = choice_total(choice), reused = 0;
    int code = settings == NULL ? 0 : sequence_set_policy(choice->sequence, settings, prompt, error);
    if (code != 0)
        return code;
    if (choice->task->request->pooling != POOLING_NONE)
        sequence_keep_private(choice->sequence);
    if (reusable_tokens(choice) > 0) {
        uint32_t count = settings == NULL ? total : prompt;
        choice_copy_tokens(choice, 0, count, s->scratch);
        reused = sequence_reuse_prefix(choice->sequence, s->scratch, count);
    }
    if (choice->looked_up || !choice_is_leader(choice))
        return 0;
    choice->looked_up = true;
    choice->cached_tokens = reused;
    s->counters.prefix_queries += total;
    s->counters.prefix_hits += reused;
    s->counters.prompt_tokens += total;
    return 0;
}

/* Without memory to swap it back it is computed again; without pages it waits. */
static int swap_in(struct scheduler *s, struct choice *choice, struct error *error) {
    size_t bytes = sequence_swap_bytes(choice->sequence);
    int code = sequence_swap_in(choice->sequence, error);
    if (code == 0) {
        choice->swapped = false;
        s->counters.swapped_bytes -= bytes;
    } else if (code != ERROR_PAGES || s->running_count == 0) {
        scheduler_drop_sequence(s, choice);
        s->counters.replays++;
    }
    return code;
}

void scheduler_set_running(struct scheduler *s, struct choice *choice) {
    choice->state = CHOICE_RUNNING;
    s->running[s->running_count++] = choice;
}

/* Nothing is to be generated, and neither log-probabilities of the prompt nor a vector are asked for. */
static bool needs_no_computing(const struct choice *choice) {
    const struct request *request = choice->task->request;
    return request->max_tokens == 0 && !(request->echo && request->logprobs >= 0) && request->pooling == POOLING_NONE;
}

/* The running list is in order of admission without sorting: only the last of it are preempted, and those come back
 * before anything newer. */
void scheduler_admit(struct scheduler *s) {
    struct error error;
    while (s->waiting_first != NULL && s->running_count < s->options.max_sequences) {
        struct choice *choice = s->waiting_first;
        struct task *task = choice->task;
        double now = clock_seconds();
        if (needs_no_computing(choice)) {
            scheduler_mark_started(s, task, now);
            scheduler_finish_prompt(s, choice, now);
            continue;
        }
        if (!choice_fits(s, choice)) {
            if (background_reclaim(s->options.background))
                continue;
            if (s->running_count > 0)
                return;
        }
        if (choice->swapped && swap_in(s, choice, &error) != 0) {
            if (choice->swapped)
                return;
            continue;
        }
        scheduler_queue_remove(s, choice);
        choice->state = CHOICE_RUNNING;
        scheduler_mark_started(s, task, now);
        if (choice->sequence == NULL && start_choice(s, choice, &error) != 0) {
            scheduler_finish_task(s, task, FINISH_ERROR, &error);
            continue;
        }
        scheduler_set_running(s, choice);
    }
}

/* ---- preemption ---- */

/* A sequence that was not pruned is computed again as fast as it could be copied back, or nearly. */
static bool swap_out(struct scheduler *s, struct choice *choice) {
    if (choice_policy(choice) == NULL || !choice_is_past_prompt(choice))
        return false;
    size_t bytes = sequence_swap_bytes(choice->sequence);
    if (bytes > s->options.swap_bytes || s->counters.swapped_bytes > s->options.swap_bytes - bytes)
        return false;
    struct error error;
    note_memory(choice);
    if (sequence_swap_out(choice->sequence, &error) != 0)
        return false;
    choice->swapped = true;
    s->counters.swapped_bytes += sequence_swap_bytes(choice->sequence);
    s->counters.swaps++;
    return true;
}

void scheduler_preempt(struct scheduler *s, struct choice *choice, bool may_swap) {
    if (!may_swap || !swap_out(s, choice)) {
        s->counters.replays += choice_policy(choice) != NULL && choice_is_past_prompt(choice);
        scheduler_drop_sequence(s, choice);
    }
    scheduler_queue_front(s, choice);
    scheduler_sweep_running(s);
    s->counters.preemptions++;
}

static bool is_batched(const struct scheduler *s, const struct choice *choice) {
    for (uint32_t i = s->items_count; i > 0; i--)
        if (s->batched[i - 1].choice == choice)
            return true;
    return false;
}

bool scheduler_make_room(struct scheduler *s, const struct choice *choice, uint64_t needed) {
    while ((int64_t)needed > pages_free(s)) {
        if (background_reclaim(s->options.background))
            continue;
        struct choice *victim = s->running[s->running_count - 1];
        if (victim == choice || is_batched(s, victim))
            return false;
        scheduler_preempt(s, victim, true);
    }
    return true;
}

void scheduler_give_way(struct scheduler *s, struct choice *choice) {
    if (s->running_count > 1) {
        scheduler_preempt(s, choice, true);
        return;
    }
    struct error error;
    error_set(&error, ERROR_PAGES, "the KV cache is too small for this request");
    scheduler_finish_task(s, choice->task, FINISH_ERROR, &error);
}
