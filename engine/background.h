/* SPDX-License-Identifier: Apache-2.0
 *
 * Who uses the engine: the scheduler's steps for live requests (foreground), or one background job (training, an
 * evaluation) on a thread of its own. Only one of them runs at a time; that is what makes the job's calls of engine.h
 * calls "from the engine thread".
 *
 * A job is written as if it were alone: background_begin, then work with background_yield between its calls of the
 * engine and every few milliseconds in long arithmetic, then background_end. While the foreground has nothing to do the
 * job goes on and on; while it has, the job gets turns for `share` of the time: after each step of the foreground it is
 * owed share / (1 - share) of what the step took, and it has a turn when it is owed anything, until the yield at which
 * that is used up. What it takes too much is owed the other way round. A row that was asked for (engine.h, wanted rows)
 * does not outlast a yield.
 *
 * The job's sequences hold pages between turns. Live requests come first: when they lack pages a yield returns
 * BACKGROUND_GIVE_UP_PAGES: the job frees all its sequences, calls background_gave_up, which waits until live requests
 * lack nothing, and begins its present piece of work anew. A piece of work must give the same results when it is done
 * again.
 */
#ifndef ENGINE_BACKGROUND_H
#define ENGINE_BACKGROUND_H

#include "engine/error.h"

#include <stdbool.h>
#include <stdint.h>

struct background; /* opaque */

enum background_turn {
    BACKGROUND_GO_ON = 0,
    BACKGROUND_GIVE_UP_PAGES, /* free every sequence, then background_gave_up */
    BACKGROUND_STOP,          /* end, or pause: free every sequence, then background_end */
};

/* share of the time while the foreground has work: 0 (none) to 0.9. NULL: ERROR_INVALID, ERROR_MEMORY. */
struct background *background_create(double share, struct error *error);
void background_free(struct background *background); /* NULL allowed; nobody may use it any more */

/* ---- the job's thread; with NULL, the engine is its own: every turn goes on ---- */

/* Waits for the first turn: BACKGROUND_GO_ON, or BACKGROUND_STOP (then it has none, and no background_end follows). */
enum background_turn background_begin(struct background *background);
enum background_turn background_yield(struct background *background);
/* After BACKGROUND_GIVE_UP_PAGES; or of itself, when the engine had no pages for the job (ERROR_PAGES) while live
 * requests hold some. All sequences are freed. Waits for a turn: BACKGROUND_GO_ON, or BACKGROUND_STOP. */
enum background_turn background_gave_up(struct background *background);
void background_end(struct background *background);
/* Most rows of one engine_forward of the job, so that live requests do not wait for long: fewer while there are some.
 */
uint32_t background_rows(struct background *background, uint32_t batch_rows);

/* ---- any thread ---- */

/* Makes begin and yield return BACKGROUND_STOP at once, until background_allow. */
void background_stop(struct background *background);
void background_allow(struct background *background);
/* From now on; 0 to 0.9, else nothing changes. */
void background_set_share(struct background *background, double share);

struct background_stats {
    uint64_t turns;
    double seconds;            /* of turns */
    double busy_seconds;       /* of turns while the foreground had work */
    double foreground_seconds; /* of the foreground's steps */
    double longest;            /* between two yields of the job, within a turn: what a request may have to wait */
    uint64_t gave_up;          /* times that pages were taken back */
};
void background_get_stats(struct background *background, struct background_stats *out);

/* ---- the foreground's thread; NULL: there is no job, ever ---- */

/* Before a step: takes the engine; waits until the job yields. */
void background_take(struct background *background);
/* After it. busy: there is more to do at once. waiting: requests wait for pages; a job that gave up its pages gets no
 * turn meanwhile. */
void background_give(struct background *background, bool busy, bool waiting);
/* Within a step: takes back the pages that the job holds; it frees its sequences before this returns. False: it holds
 * none. */
bool background_reclaim(struct background *background);

#endif
