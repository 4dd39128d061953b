/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of bench_machine.h that lets two processors play ping-pong. */
#include "commands/bench_machine.h"

#include "engine/clock.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>

enum {
    BLOCK = 100, /* rounds from one look at the clock to the next */
    BLOCKS = 1000,
    REPETITIONS = 5,
};
static const double LIMIT_SECONDS = 0.5; /* of a repetition: two processors may turn out to be one that is shared */

/* The ball: an even count waits for the first player, an odd one for the second. A cache line of its own. */
struct game {
    _Alignas(128) _Atomic uint32_t count;
    _Alignas(128) _Atomic bool over;
    double seconds[BLOCKS];
    uint32_t blocks; /* played */
};

static inline void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits until the count is `value`; false when the game is over. */
static bool wait_for(struct game *game, uint32_t value) {
    while (atomic_load_explicit(&game->count, memory_order_acquire) != value) {
        if (atomic_load_explicit(&game->over, memory_order_relaxed))
            return false;
        pause_a_little();
    }
    return true;
}

static void *play_first(void *context) {
    struct game *game = context;
    atomic_store_explicit(&game->count, 1, memory_order_release); /* a round before the clock starts: both are there */
    wait_for(game, 2);
    double start = clock_seconds(), last = start;
    uint32_t round = 1;
    while (game->blocks < BLOCKS && last - start < LIMIT_SECONDS) {
        for (uint32_t i = 0; i < BLOCK; i++, round++) {
            atomic_store_explicit(&game->count, 2 * round + 1, memory_order_release);
            wait_for(game, 2 * round + 2);
        }
        double now = clock_seconds();
        game->seconds[game->blocks++] = now - last;
        last = now;
    }
    atomic_store(&game->over, true);
    return NULL;
}

static void *play_second(void *context) {
    struct game *game = context;
    for (uint32_t round = 0; wait_for(game, 2 * round + 1); round++)
        atomic_store_explicit(&game->count, 2 * round + 2, memory_order_release);
    return NULL;
}

static int start_on(pthread_t *thread, int processor, void *(*play)(void *), struct game *game) {
    pthread_attr_t attributes;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    if (pthread_attr_init(&attributes) != 0)
        return -1;
    int code = pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    if (code == 0)
        code = pthread_create(thread, &attributes, play, game);
    pthread_attr_destroy(&attributes);
    return code;
}

/* Nanoseconds of one way; 0 when a thread could not be started. The median over blocks: one in which a player lost its
 * processor to another process tells nothing. */
static double play(int first, int second) {
    struct game game = {0};
    pthread_t threads[2];
    if (start_on(&threads[1], second, play_second, &game) != 0)
        return 0;
    bool started = start_on(&threads[0], first, play_first, &game) == 0;
    if (started)
        pthread_join(threads[0], NULL);
    atomic_store(&game.over, true);
    pthread_join(threads[1], NULL);
    return started ? bench_median(game.seconds, game.blocks) * 1e9 / (2.0 * BLOCK) : 0;
}

double bench_core_to_core_ns(void) {
    cpu_set_t allowed;
    int processors[2], found = 0;
    double times[REPETITIONS];
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return 0;
    for (int i = 0; i < CPU_SETSIZE && found < 2; i++)
        if (CPU_ISSET(i, &allowed))
            processors[found++] = i;
    if (found < 2)
        return 0;
    for (int i = 0; i < REPETITIONS; i++) {
        times[i] = play(processors[0], processors[1]);
        if (times[i] <= 0)
            return 0;
    }
    return bench_median(times, REPETITIONS);
}
