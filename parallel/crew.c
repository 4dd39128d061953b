/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/crew.h"

#include "engine/backend.h"
#include "parallel/wait.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct member {
    struct crew *crew;
    uint32_t rank;
    pthread_t handle;
};

struct crew {
    struct wait_number jobs;  /* handed out so far */
    struct wait_number dones; /* jobs that all members but the caller are done with */
    _Atomic uint32_t pending; /* members that are not done with the job */
    crew_work work;           /* the job; NULL: go home */
    void *context;
    uint32_t ranks, started;
    struct member members[BACKEND_RANKS_MAX];
};

static void *member_main(void *argument) {
    struct member *member = argument;
    struct crew *crew = member->crew;
    for (uint32_t job = 0;; job++) {
        wait_number_await(&crew->jobs, job);
        if (crew->work == NULL)
            return NULL;
        crew->work(crew->context, member->rank);
        if (atomic_fetch_sub(&crew->pending, 1) == 1)
            wait_number_advance(&crew->dones);
    }
}

struct crew *crew_create(uint32_t ranks, struct error *error) {
    struct crew *crew = aligned_alloc(_Alignof(struct crew), sizeof *crew);
    if (crew == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the threads of %u devices", ranks);
        return NULL;
    }
    memset(crew, 0, sizeof *crew);
    crew->ranks = ranks;
    for (uint32_t rank = 1; rank < ranks; rank++) {
        struct member *member = &crew->members[rank];
        *member = (struct member){.crew = crew, .rank = rank};
        if (pthread_create(&member->handle, NULL, member_main, member) != 0) {
            error_set(error, ERROR_IO, "thread %u of %u could not be started", rank + 1, ranks);
            crew_free(crew);
            return NULL;
        }
        crew->started++;
    }
    return crew;
}

void crew_free(struct crew *crew) {
    if (crew == NULL)
        return;
    crew->work = NULL;
    wait_number_advance(&crew->jobs);
    for (uint32_t i = 1; i <= crew->started; i++)
        pthread_join(crew->members[i].handle, NULL);
    free(crew);
}

void crew_run(struct crew *crew, crew_work work, void *context) {
    uint32_t done = wait_number_get(&crew->dones);
    crew->work = work;
    crew->context = context;
    atomic_store(&crew->pending, crew->ranks - 1);
    wait_number_advance(&crew->jobs);
    work(context, 0);
    if (crew->ranks > 1)
        wait_number_await(&crew->dones, done);
}
