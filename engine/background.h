/* SPDX-License-Identifier: Apache-2.0
 *
 * Who uses the engine: the scheduler's steps for live requests (foreground), or one background job (training, an
 * evaluation) on its own thread. Only one of them runs at a time; that is what makes the job's calls of engine.h calls
 * "from the engine thread". The job takes turns, each of some milliseconds: a turn begins when the foreground has
 * nothing to do, or when the job's part of the time, over the last seconds, is below `share`.
 *
 * A job is written as if it were alone: background_begin, then work with background_yield between its calls of the
 * engine and, in long arithmetic, every few milliseconds; background_end. Its sequences hold pages between turns. When
 * the foreground lacks pages, a yield returns BACKGROUND_GIVE_UP_PAGES: the job frees all its sequences, says so by
 * background_gave_up, and begins its present piece of work again when the foreground has what it needed; the next yield
 * waits for that. A piece of work must give the same results when it is done again.
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
    BACKGROUND_STOP,          /* the job is to end, or pause: free everything and call background_end */
};

/* share in (0, 1]: of the time while the foreground has work. */
struct background *background_create(double share, struct error *error);
void background_free(struct background *background); /* NULL allowed; no job may be there */

/* ---- the job's thread ---- */

enum background_turn background_begin(struct background *background); /* waits for the first turn */
/* Goes on at once while the turn lasts, else waits for the next. NULL: alone, always BACKGROUND_GO_ON. */
enum background_turn background_yield(struct background *background);
void background_gave_up(struct background *background);
void background_end(struct background *background); /* ends the turn; begin may follow */

/* ---- any thread ---- */

/* Makes begin and yield return BACKGROUND_STOP until background_allow. */
void background_stop(struct background *background);
void background_allow(struct background *background);

/* ---- the scheduler's thread ---- */

/* Before a step: takes the engine; waits until the job's turn is over. */
void background_take(struct background *background);
/* After it. busy: there is more to do at once. Gives the job a turn if it is owed one, or whenever not busy. */
void background_give(struct background *background, bool busy);
/* Pages are needed: true while a job holds sequences that it was not yet seen to give up; the scheduler then steps on
 * and admits when they are free. met: nothing is lacking any more. */
bool background_ask_for_pages(struct background *background);
void background_pages_met(struct background *background);

struct background_stats {
    uint64_t turns;
    double seconds;      /* of turns */
    double busy_seconds; /* of them, while the foreground had work */
    uint64_t gave_up;
};
void background_get_stats(struct background *background, struct background_stats *out);

#endif
