/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/actor.h"

#include <stdlib.h>
#include <string.h>

#include "engine/cpu/threads.h"
#include "engine/random.h"
#include "policy/budget.h"
#include "policy/train/choice.h"

enum { CHUNKS = 8 /* of heads: sums are in their order */, STREAM_DRAW = 0x44524157, POSITION_BITS = 24 };

/* What a student did at a prune. */
struct deed {
    double entropy; /* sum over groups */
    uint32_t groups;
};

struct actor {
    struct actor_options options;
    uint32_t places;              /* of a student */
    struct gradient **gradients;  /* [students][places]; NULL: not needed yet */
    bool *used;                   /* [students][places] */
    struct deed *deeds;           /* [students][prunes] */
    struct network_pass **passes; /* [threads] */
    struct gradient *sums[CHUNKS];
    /* Of a call: [heads_most][slots_most], row after row. */
    float *scores, *d_scores;
    struct choice_head *heads; /* [heads_most] */
    /* Of a call. */
    const struct actor_prune *prune;
    uint32_t *groups;       /* [heads_most + 1] first heads, then the end */
    struct choice *choices; /* [heads_most] */
    struct error *errors;   /* [heads_most] */
};

/* ---- create ---- */

static uint32_t count_places(const struct actor_options *options) {
    size_t each = network_parameters_count(options->network) * sizeof(float) * options->students;
    size_t most = (options->bytes > 0 ? options->bytes : ACTOR_BYTES) / (each > 0 ? each : 1);
    most = most > 0 ? most : 1;
    return options->prunes < most ? options->prunes : (uint32_t)most;
}

static bool allocate(struct actor *actor) {
    const struct actor_options *options = &actor->options;
    size_t all = (size_t)options->students * actor->places, heads = options->heads_most;
    size_t numbers = heads * options->slots_most, threads = thread_pool_size(options->threads);
    actor->gradients = calloc(all, sizeof(struct gradient *));
    actor->used = calloc(all, sizeof *actor->used);
    actor->deeds = calloc((size_t)options->students * options->prunes, sizeof *actor->deeds);
    actor->passes = calloc(threads, sizeof(struct network_pass *));
    actor->scores = malloc((numbers + 1) * sizeof *actor->scores);
    actor->d_scores = malloc((numbers + 1) * sizeof *actor->d_scores);
    actor->heads = calloc(heads + 1, sizeof *actor->heads);
    actor->groups = calloc(heads + 1, sizeof *actor->groups);
    actor->choices = calloc(heads + 1, sizeof *actor->choices);
    actor->errors = calloc(heads + 1, sizeof *actor->errors);
    bool there = actor->gradients != NULL && actor->used != NULL && actor->deeds != NULL && actor->passes != NULL &&
                 actor->scores != NULL && actor->d_scores != NULL && actor->heads != NULL && actor->groups != NULL &&
                 actor->choices != NULL && actor->errors != NULL;
    for (size_t i = 0; there && i < threads; i++) {
        actor->passes[i] = network_pass_create(&options->network->shape, options->slots_most);
        there = actor->passes[i] != NULL;
    }
    for (int c = 0; there && c < CHUNKS; c++) {
        actor->sums[c] = gradient_create(options->network);
        there = actor->sums[c] != NULL;
    }
    return there;
}

struct actor *actor_create(const struct actor_options *options) {
    struct actor *actor = calloc(1, sizeof *actor);
    if (actor == NULL)
        return NULL;
    actor->options = *options;
    actor->places = count_places(options);
    if (allocate(actor))
        return actor;
    actor_free(actor);
    return NULL;
}

void actor_free(struct actor *actor) {
    if (actor == NULL)
        return;
    size_t all = (size_t)actor->options.students * actor->places;
    for (size_t i = 0; actor->gradients != NULL && i < all; i++)
        free(actor->gradients[i]);
    for (uint32_t i = 0; actor->passes != NULL && i < thread_pool_size(actor->options.threads); i++)
        network_pass_free(actor->passes[i]);
    for (int c = 0; c < CHUNKS; c++)
        free(actor->sums[c]);
    free(actor->gradients);
    free(actor->used);
    free(actor->deeds);
    free(actor->passes);
    free(actor->scores);
    free(actor->d_scores);
    free(actor->heads);
    free(actor->groups);
    free(actor->choices);
    free(actor->errors);
    free(actor);
}

/* ---- places ---- */

static uint32_t place_of(const struct actor *actor, uint32_t prune) {
    return (uint32_t)((uint64_t)prune * actor->places / actor->options.prunes);
}

uint32_t actor_first(const struct actor *actor, uint32_t prune) {
    uint64_t place = place_of(actor, prune), prunes = actor->options.prunes;
    return (uint32_t)((place * prunes + actor->places - 1) / actor->places);
}

static struct deed *deed_of(const struct actor *actor, uint32_t student, uint32_t prune) {
    return &actor->deeds[(size_t)student * actor->options.prunes + prune];
}

double actor_entropy(const struct actor *actor, uint32_t student, uint32_t prune) {
    const struct deed *deed = deed_of(actor, student, prune);
    return deed->groups > 0 ? deed->entropy / deed->groups : 0;
}

void actor_clear(struct actor *actor) {
    const struct actor_options *options = &actor->options;
    memset(actor->used, 0, (size_t)options->students * actor->places * sizeof *actor->used);
    memset(actor->deeds, 0, (size_t)options->students * options->prunes * sizeof *actor->deeds);
}

/* The gradient that a prune adds to; zero at first. NULL: no memory. */
static struct gradient *open_place(struct actor *actor, uint32_t student, uint32_t prune) {
    size_t at = (size_t)student * actor->places + place_of(actor, prune);
    if (actor->gradients[at] == NULL)
        actor->gradients[at] = gradient_create(actor->options.network);
    if (actor->gradients[at] != NULL && !actor->used[at])
        gradient_clear(actor->gradients[at]);
    actor->used[at] = actor->gradients[at] != NULL;
    return actor->gradients[at];
}

void actor_gradient(const struct actor *actor, const double *advantages, struct gradient *gradient) {
    const struct actor_options *options = &actor->options;
    gradient_clear(gradient);
    for (uint32_t s = 0; s < options->students; s++) {
        for (uint32_t p = 0; p < options->prunes; p++) {
            size_t at = (size_t)s * actor->places + place_of(actor, p);
            if (actor_first(actor, p) != p || !actor->used[at])
                continue;
            double factor = -advantages[(size_t)s * options->prunes + p] / options->students;
            for (size_t i = 0; i < gradient->count; i++)
                gradient->values[i] += (float)(factor * (double)actor->gradients[at]->values[i]);
        }
    }
}

/* ---- a draw ---- */

/* The noise of a slot goes by what it is, not by where it lies. */
struct noise {
    const struct actor *actor;
    const struct actor_head *heads; /* of the group */
};

static double uniform(void *context, uint32_t head, uint32_t slot) {
    const struct noise *noise = context;
    const struct actor_prune *prune = noise->actor->prune;
    const struct actor_head *of = &noise->heads[head];
    uint64_t heads =
        (uint64_t)noise->actor->options.network->shape.layers * noise->actor->options.network->shape.kv_heads;
    uint64_t index = (prune->prune * heads + of->head) << POSITION_BITS | of->positions[slot];
    return random_uniform_fine(noise->actor->options.seed, STREAM_DRAW + prune->student, (uint32_t)prune->step, index);
}

/* Heads that compete. Returns the number of groups. */
static uint32_t group_heads(struct actor *actor) {
    const struct actor_prune *prune = actor->prune;
    uint32_t kv_heads = prune->network->shape.kv_heads, count = 0;
    enum policy_scope scope = prune->network->scope;
    for (uint32_t h = 0; h < prune->heads_count; h++) {
        bool same =
            h > 0 && (scope == SCOPE_MODEL || (scope == SCOPE_LAYER && prune->heads[h].head / kv_heads ==
                                                                           prune->heads[h - 1].head / kv_heads));
        if (!same)
            actor->groups[count++] = h;
    }
    actor->groups[count] = prune->heads_count;
    return count;
}

/* As select_slots has it. */
static uint32_t floor_of(const struct actor_prune *prune, const struct choice *choice, uint32_t heads, uint32_t head) {
    if (heads == 1)
        return 0;
    uint32_t budget = prune->heads[head].budget;
    if (prune->network->scope == SCOPE_MODEL)
        budget = (uint32_t)(choice->total / heads);
    return budget_part(prune->network->floor, budget);
}

static void prepare_group(struct actor *actor, uint32_t group) {
    const struct actor_prune *prune = actor->prune;
    uint32_t first = actor->groups[group], end = actor->groups[group + 1];
    struct choice *choice = &actor->choices[group];
    *choice = (struct choice){.sampler = actor->options.sampler,
        .temperature = actor->options.temperature,
        .compare = prune->network->scope != SCOPE_HEAD,
        .sinks = prune->sinks,
        .recent_from = prune->recent_from,
        .uniform = uniform};
    for (uint32_t h = first; h < end; h++)
        choice->total += prune->heads[h].budget;
    for (uint32_t h = first; h < end; h++) {
        size_t row = (size_t)h * actor->options.slots_most;
        actor->heads[h] = (struct choice_head){.slots = prune->heads[h].slots.count,
            .scores = actor->scores + row,
            .positions = prune->heads[h].positions,
            .floor = floor_of(prune, choice, end - first, h),
            .keep = prune->heads[h].keep,
            .gradient = actor->d_scores + row};
    }
}

static void score_chunk(void *context, uint32_t chunk, uint32_t thread) {
    struct actor *actor = context;
    const struct actor_prune *prune = actor->prune;
    for (uint32_t h = chunk; h < prune->heads_count; h += CHUNKS)
        network_forward(prune->network, prune->heads[h].head, &prune->heads[h].slots, actor->passes[thread],
            actor->scores + (size_t)h * actor->options.slots_most);
}

static void draw_group(void *context, uint32_t group, uint32_t thread) {
    struct actor *actor = context;
    uint32_t first = actor->groups[group];
    struct noise noise = {actor, actor->prune->heads + first};
    (void)thread;
    actor->choices[group].context = &noise;
    actor->errors[group].code = choice_draw(
        &actor->choices[group], actor->heads + first, actor->groups[group + 1] - first, &actor->errors[group]);
}

/* Scores are computed once more: a pass holds one head. */
static void learn_chunk(void *context, uint32_t chunk, uint32_t thread) {
    struct actor *actor = context;
    const struct actor_prune *prune = actor->prune;
    gradient_clear(actor->sums[chunk]);
    for (uint32_t h = chunk; h < prune->heads_count; h += CHUNKS) {
        const struct actor_head *head = &prune->heads[h];
        size_t row = (size_t)h * actor->options.slots_most;
        network_forward(prune->network, head->head, &head->slots, actor->passes[thread], actor->scores + row);
        network_backward(
            prune->network, head->head, &head->slots, actor->passes[thread], actor->d_scores + row, actor->sums[chunk]);
    }
}

/* Adds what the groups drew to the student's deed. Whether any drew. */
static bool take_stock(struct actor *actor, uint32_t groups) {
    struct deed *deed = deed_of(actor, actor->prune->student, actor->prune->prune);
    bool any = false;
    for (uint32_t g = 0; g < groups; g++) {
        if (actor->choices[g].drawn == 0)
            continue;
        deed->groups++;
        deed->entropy += actor->choices[g].entropy;
        any = true;
    }
    return any;
}

int actor_draw(struct actor *actor, const struct actor_prune *prune, struct error *error) {
    struct thread_pool *threads = actor->options.threads;
    actor->prune = prune;
    uint32_t groups = group_heads(actor);
    for (uint32_t g = 0; g < groups; g++)
        prepare_group(actor, g);
    thread_pool_run(threads, CHUNKS, score_chunk, actor);
    thread_pool_run(threads, groups, draw_group, actor);
    for (uint32_t g = 0; g < groups; g++)
        if (actor->errors[g].code != 0)
            return error_set(error, actor->errors[g].code, "%s", actor->errors[g].message);
    if (!take_stock(actor, groups) || !prune->learns)
        return 0;
    struct gradient *place = open_place(actor, prune->student, prune->prune);
    if (place == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a gradient");
    thread_pool_run(threads, CHUNKS, learn_chunk, actor);
    for (int c = 0; c < CHUNKS; c++)
        gradient_add(place, actor->sums[c]);
    return 0;
}
