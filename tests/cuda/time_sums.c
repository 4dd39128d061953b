/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums between CUDA devices, by NCCL and through host memory: first that they are right, then how long one takes by its
 * size. For scripts/gpu_check.sh --gpus; the tests of everything else about them: test_ranks.c.
 *
 *   time_sums RANKS REPEATS ROWS   devices; sums in a row, of which the time of one is the mean; the most rows of a sum
 *
 * Lines of the output, of which a kind that is not there has only the last:
 *   sums nccl  2 ranks     4 rows of  4096     38.10 us
 *   FAIL nccl, 2 ranks, 4 rows of 4096: WHY
 *   skipped nccl: WHY
 * Exit status 1 after a FAIL, 2 when the arguments are wrong or there are too few devices.
 *
 * Sums are launched one by one, each after the last has ended on all devices: in a graph, as decode steps have them,
 * the part of it that is the host's launches falls away.
 */
#include "cuda/cuda.h"
#include "engine/clock.h"
#include "engine/random.h"
#include "parallel/communicator.h"
#include "parallel/crew.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 4096 /* of a 7B's residual stream */, RANKS_MOST = 8, WARM_UP = 3 };

static const char *const kinds[] = {"nccl", "host"};
static const uint32_t sizes[] = {1, 4, 8, 32, 512}; /* rows: tokens of a batch */

struct scene {
    const char *kind;
    struct backend *backends[RANKS_MOST];
    struct communicator *communicator;
    struct crew *crew;
    uint32_t ranks, repeats;
    uint32_t rows;
    float *memory[RANKS_MOST]; /* [rows][WIDTH] of each rank's device */
    int codes[RANKS_MOST];
};

static void *need(void *memory) {
    if (memory == NULL) {
        fprintf(stderr, "time_sums: no memory\n");
        exit(2);
    }
    return memory;
}

static float number(uint32_t rank, size_t i) {
    return (float)random_uniform(1, rank, (uint32_t)i, 0) * 1000 - 500;
}

/* A rank's part; or zeros, which stay what they are however often they are added up. */
static void fill(struct scene *scene, uint32_t rank, float *host, bool zeros) {
    struct backend *on = scene->backends[rank];
    size_t count = (size_t)scene->rows * WIDTH;
    for (size_t i = 0; i < count; i++)
        host[i] = zeros ? 0 : number(rank, i);
    on->operations->upload(on, scene->memory[rank], host, count * sizeof *host);
}

static void add_up(void *context, uint32_t rank) {
    struct scene *scene = context;
    struct communicator *communicator = scene->communicator;
    struct backend *on = scene->backends[rank];
    const struct communicator_sum sum = {.x = scene->memory[rank], .rows = scene->rows, .width = WIDTH};
    scene->codes[rank] = 0;
    for (uint32_t i = 0; i < scene->repeats && scene->codes[rank] == 0; i++)
        scene->codes[rank] = communicator->operations->all_reduce(communicator, rank, &sum);
    on->operations->synchronize(on);
    if (scene->codes[rank] == 0)
        scene->codes[rank] = communicator_check(communicator, NULL);
}

/* Microseconds of one sum; negative, and a line that says why, if it failed. */
static double run(struct scene *scene, uint32_t repeats) {
    scene->repeats = repeats;
    double start = clock_seconds();
    crew_run(scene->crew, add_up, scene);
    double seconds = clock_seconds() - start;
    for (uint32_t rank = 0; rank < scene->ranks; rank++)
        if (scene->codes[rank] != 0) {
            struct error error = {0};
            communicator_check(scene->communicator, &error);
            printf(
                "FAIL %s, %u ranks, %u rows of %d: %s\n", scene->kind, scene->ranks, scene->rows, WIDTH, error.message);
            return -1;
        }
    return seconds / repeats * 1e6;
}

static bool is_right(const struct scene *scene, uint32_t rank, const float *got) {
    size_t count = (size_t)scene->rows * WIDTH;
    for (size_t i = 0; i < count; i++) {
        double want = 0, size = 0;
        for (uint32_t other = 0; other < scene->ranks; other++) {
            want += (double)number(other, i);
            size += fabs((double)number(other, i));
        }
        if (!(fabs((double)got[i] - want) <= 1e-6 * size)) {
            printf("FAIL %s, %u ranks, %u rows of %d: element %zu of rank %u is %g, not %g\n", scene->kind,
                scene->ranks, scene->rows, WIDTH, i, rank, (double)got[i], want);
            return false;
        }
    }
    return true;
}

/* Sums of one size: whether they are right, and all ranks have the same bits. */
static bool check(struct scene *scene, float *host, float *first) {
    size_t bytes = (size_t)scene->rows * WIDTH * sizeof *host;
    for (uint32_t rank = 0; rank < scene->ranks; rank++)
        fill(scene, rank, host, false);
    if (run(scene, 1) < 0)
        return false;
    for (uint32_t rank = 0; rank < scene->ranks; rank++) {
        struct backend *on = scene->backends[rank];
        float *to = rank == 0 ? first : host;
        on->operations->download(on, to, scene->memory[rank], bytes);
        if (!is_right(scene, rank, to))
            return false;
        if (memcmp(to, first, bytes) != 0) {
            printf("FAIL %s, %u ranks, %u rows of %d: rank %u has other bits than rank 0\n", scene->kind, scene->ranks,
                scene->rows, WIDTH, rank);
            return false;
        }
    }
    return true;
}

static bool measure(struct scene *scene, float *host, uint32_t repeats) {
    for (uint32_t rank = 0; rank < scene->ranks; rank++)
        fill(scene, rank, host, true);
    if (run(scene, WARM_UP) < 0)
        return false;
    double microseconds = run(scene, repeats);
    if (microseconds >= 0)
        printf("sums %s  %u ranks  %4u rows of %5d  %9.2f us\n", scene->kind, scene->ranks, scene->rows, WIDTH,
            microseconds);
    return microseconds >= 0;
}

static bool all_sizes(struct scene *scene, uint32_t repeats, uint32_t rows_most) {
    size_t bytes = (size_t)rows_most * WIDTH * sizeof(float);
    float *host = need(malloc(bytes)), *first = need(malloc(bytes));
    bool good = true;
    for (uint32_t rank = 0; rank < scene->ranks; rank++)
        scene->memory[rank] = need(scene->backends[rank]->operations->allocate(scene->backends[rank], bytes));
    for (size_t i = 0; good && i < sizeof sizes / sizeof sizes[0] && sizes[i] <= rows_most; i++) {
        scene->rows = sizes[i];
        good = check(scene, host, first) && measure(scene, host, repeats);
        fflush(stdout);
    }
    for (uint32_t rank = 0; rank < scene->ranks; rank++)
        scene->backends[rank]->operations->release(scene->backends[rank], scene->memory[rank]);
    free(first);
    free(host);
    return good;
}

/* One kind. False after a FAIL. */
static bool run_kind(const char *kind, uint32_t ranks, uint32_t repeats, uint32_t rows_most) {
    struct scene scene = {.kind = kind, .ranks = ranks};
    struct error error = {0};
    bool good = true;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        const struct backend_options options = {.device = rank};
        scene.backends[rank] = backend_cuda_open(&options, &error);
        if (scene.backends[rank] == NULL) {
            fprintf(stderr, "time_sums: %s\n", error.message);
            exit(2);
        }
    }
    scene.communicator = backend_cuda_connect(scene.backends, ranks, kind, &error);
    if (scene.communicator != NULL) {
        scene.crew = need(crew_create(ranks, &error));
        good = all_sizes(&scene, repeats, rows_most);
        crew_free(scene.crew);
    } else if (error.code == ERROR_UNSUPPORTED) {
        printf("skipped %s: %s\n", kind, error.message);
    } else {
        printf("FAIL %s, %u ranks: %s\n", kind, ranks, error.message);
        good = false;
    }
    for (uint32_t rank = 0; rank < ranks; rank++)
        scene.backends[rank]->operations->close(scene.backends[rank]);
    if (scene.communicator != NULL)
        scene.communicator->operations->free(scene.communicator);
    return good;
}

int main(int count, char **arguments) {
    unsigned long numbers[3] = {0};
    for (int i = 0; count == 4 && i < 3; i++)
        numbers[i] = strtoul(arguments[i + 1], NULL, 10);
    if (numbers[0] < 2 || numbers[0] > RANKS_MOST || numbers[1] < 1 || numbers[1] > 100000 || numbers[2] < 1 ||
        numbers[2] > 100000) {
        fprintf(stderr, "usage: time_sums RANKS REPEATS ROWS (RANKS: 2 to %d)\n", RANKS_MOST);
        return 2;
    }
    bool good = true;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        good = run_kind(kinds[i], (uint32_t)numbers[0], (uint32_t)numbers[1], (uint32_t)numbers[2]) && good;
    return good ? 0 : 1;
}
