/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA devices as ranks, on emulated ones: sums and gathers by NCCL and through host memory, norms taken with them, and
 * everything that can go wrong between devices, each of which has to end in everybody's error. A model on ranks:
 * tests/unit/test_parallel.c and the other tests of suite cuda_ranks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/exchange.h"
#include "cuda/ranks.h"
#include "cuda/cuda.h"
#include "engine/random.h"
#include "parallel/crew.h"
#include "tests/emulator/emulator.h"

#include <nccl.h>

enum { PATIENCE = 240, RANKS_MOST = 4, WIDE = 700 };

static const char *const kinds[] = {"nccl", "host"};

struct scene {
    struct backend *backends[RANKS_MOST];
    struct communicator *communicator;
    struct crew *crew;
    uint32_t ranks;
    float *memory[RANKS_MOST], *normed[RANKS_MOST], *weight[RANKS_MOST]; /* of each rank's device */
    uint32_t rows, width;
    bool norms;
    const uint32_t *first; /* gather */
    uint32_t absent;       /* rank that does not come; RANKS_MOST: none */
    int codes[RANKS_MOST];
    uint32_t rounds;
};

static const struct backend_operations *operations(const struct scene *scene) {
    return scene->backends[0]->operations;
}

static struct scene scene_open(const char *kind, uint32_t ranks) {
    struct scene scene = {.ranks = ranks, .absent = RANKS_MOST, .rounds = 1};
    struct error error = {0};
    alarm(PATIENCE);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        const struct backend_options options = {.device = rank};
        scene.backends[rank] = backend_cuda_open(&options, &error);
        if (scene.backends[rank] == NULL)
            fail_msg("%s", error.message);
    }
    scene.communicator = backend_cuda_connect(scene.backends, ranks, kind, &error);
    if (scene.communicator == NULL)
        fail_msg("%s", error.message);
    scene.crew = crew_create(ranks, &error);
    assert_non_null(scene.crew);
    return scene;
}

static void scene_close(struct scene *scene) {
    const struct backend_operations *o = operations(scene);
    for (uint32_t rank = 0; rank < scene->ranks; rank++) {
        o->release(scene->backends[rank], scene->memory[rank]);
        o->release(scene->backends[rank], scene->normed[rank]);
        o->release(scene->backends[rank], scene->weight[rank]);
        o->close(scene->backends[rank]);
    }
    crew_free(scene->crew);
    scene->communicator->operations->free(scene->communicator);
    assert_null(emulator_fault());
}

static float number(uint32_t round, uint32_t rank, size_t i) {
    return (float)random_uniform(round, rank, (uint32_t)i, 0) * 1000 - 500;
}

static float *make_floats(const struct scene *scene, uint32_t rank, uint32_t round, size_t count) {
    struct backend *on = scene->backends[rank];
    float *host = malloc(count * sizeof *host), *device = operations(scene)->allocate(on, count * sizeof *host);
    assert_non_null(device);
    for (size_t i = 0; i < count; i++)
        host[i] = number(round, rank, i);
    operations(scene)->upload(on, device, host, count * sizeof *host);
    free(host);
    return device;
}

static float *read_floats(const struct scene *scene, uint32_t rank, const float *device, size_t count) {
    float *host = malloc(count * sizeof *host);
    operations(scene)->download(scene->backends[rank], host, device, count * sizeof *host);
    return host;
}

static void add_up(void *context, uint32_t rank) {
    struct scene *scene = context;
    struct communicator *communicator = scene->communicator;
    if (rank == scene->absent)
        return;
    const struct communicator_sum sum = {
        .x = scene->memory[rank],
        .rows = scene->rows,
        .width = scene->width,
        .weight = scene->norms ? scene->weight[rank] : NULL,
        .epsilon = 1e-5F,
        .normed = scene->normed[rank],
    };
    scene->codes[rank] = communicator->operations->all_reduce(communicator, rank, &sum);
    operations(scene)->synchronize(scene->backends[rank]);
    if (scene->codes[rank] == 0)
        scene->codes[rank] = communicator_check(communicator, NULL);
}

/* ---- results ---- */

static void require_sum(struct scene *scene, uint32_t round) {
    size_t count = (size_t)scene->rows * scene->width;
    for (uint32_t rank = 0; rank < scene->ranks; rank++) {
        assert_int_equal(scene->codes[rank], 0);
        float *got = read_floats(scene, rank, scene->memory[rank], count);
        for (size_t i = 0; i < count; i++) {
            double want = 0, size = 0;
            float in_order = number(round, 0, i);
            for (uint32_t other = 0; other < scene->ranks; other++) {
                want += (double)number(round, other, i);
                size += 1000;
                in_order += other > 0 ? number(round, other, i) : 0;
            }
            if (scene->communicator->norms || scene->ranks == 2)
                assert_true(got[i] == in_order);
            assert_true((double)got[i] - want < 1e-6 * size && want - (double)got[i] < 1e-6 * size);
        }
        free(got);
    }
}

static void sums_are_right(void **state) {
    static const struct {
        uint32_t rows, width;
    } shapes[] = {{1, 1}, {1, 7}, {3, 64}, {4, 33}, {5, 576}, {9, 31}, {40, WIDE}, {1, 9000}};
    (void)state;
    for (size_t kind = 0; kind < 2; kind++)
        for (uint32_t ranks = 2; ranks <= RANKS_MOST; ranks++) {
            struct scene scene = scene_open(kinds[kind], ranks);
            for (uint32_t round = 0; round < sizeof shapes / sizeof shapes[0]; round++) {
                scene.rows = shapes[round].rows;
                scene.width = shapes[round].width;
                for (uint32_t rank = 0; rank < ranks; rank++)
                    scene.memory[rank] = make_floats(&scene, rank, round, (size_t)scene.rows * scene.width);
                crew_run(scene.crew, add_up, &scene);
                require_sum(&scene, round);
                for (uint32_t rank = 0; rank < ranks; rank++) {
                    operations(&scene)->release(scene.backends[rank], scene.memory[rank]);
                    scene.memory[rank] = NULL;
                }
            }
            scene_close(&scene);
        }
}

/* Slots are smaller than this: it goes in parts, of which the last is not full. */
static void large_sums_go_in_parts(void **state) {
    (void)state;
    emulator_set_fast(true);
    struct scene scene = scene_open("host", 2);
    scene.width = 1001;
    scene.rows = EXCHANGE_FLOATS / scene.width + 70;
    for (uint32_t rank = 0; rank < 2; rank++)
        scene.memory[rank] = make_floats(&scene, rank, 1, (size_t)scene.rows * scene.width);
    crew_run(scene.crew, add_up, &scene);
    require_sum(&scene, 1);
    scene_close(&scene);
    emulator_set_fast(false);
}

/* The bits of rms_norm. */
static void norms_are_those_of_rms_norm(void **state) {
    static const struct { uint32_t rows, width; } shapes[] = {{1, 576}, {4, 4096}, {20, 64}, {2, 9001}, {7, 63}};
    (void)state;
    for (uint32_t round = 0; round < sizeof shapes / sizeof shapes[0]; round++) {
        struct scene scene = scene_open("host", 2);
        size_t count = (size_t)shapes[round].rows * shapes[round].width;
        scene.rows = shapes[round].rows;
        scene.width = shapes[round].width;
        scene.norms = true;
        for (uint32_t rank = 0; rank < 2; rank++) {
            scene.memory[rank] = make_floats(&scene, rank, round, count);
            scene.normed[rank] = make_floats(&scene, rank, 5, count);
            scene.weight[rank] = make_floats(&scene, 0, 6, scene.width);
            if (rank == 1) { /* on its own device */
                operations(&scene)->release(scene.backends[0], scene.weight[1]);
                float *host = read_floats(&scene, 0, scene.weight[0], scene.width);
                scene.weight[1] = operations(&scene)->allocate(scene.backends[1], scene.width * sizeof(float));
                operations(&scene)->upload(scene.backends[1], scene.weight[1], host, scene.width * sizeof(float));
                free(host);
            }
        }
        crew_run(scene.crew, add_up, &scene);
        require_sum(&scene, round);
        for (uint32_t rank = 0; rank < 2; rank++) {
            struct backend *on = scene.backends[rank];
            float *plain = operations(&scene)->allocate(on, count * sizeof(float));
            operations(&scene)->rms_norm(
                on, scene.memory[rank], scene.weight[rank], 1e-5F, scene.rows, scene.width, plain);
            float *got = read_floats(&scene, rank, scene.normed[rank], count);
            float *want = read_floats(&scene, rank, plain, count);
            assert_memory_equal(got, want, count * sizeof *got);
            free(got);
            free(want);
            operations(&scene)->release(on, plain);
        }
        scene_close(&scene);
    }
}

static void gather_parts(void *context, uint32_t rank) {
    struct scene *scene = context;
    const struct communicator_part part = {
        .part = scene->memory[rank], .out = scene->normed[0], .rows = scene->rows, .first = scene->first};
    scene->codes[rank] = scene->communicator->operations->gather(scene->communicator, rank, &part);
    operations(scene)->synchronize(scene->backends[rank]);
}

static void parts_come_together(void **state) {
    static const uint32_t columns[3][RANKS_MOST + 1] = {{0, 160, 321}, {0, 1, 2, 4}, {0, 700, 1400, 2100, 2801}};
    (void)state;
    for (size_t kind = 0; kind < 2; kind++)
        for (uint32_t ranks = 2; ranks <= RANKS_MOST; ranks++)
            for (uint32_t rows = 1; rows <= 5; rows += 4) {
                struct scene scene = scene_open(kinds[kind], ranks);
                uint32_t width = columns[ranks - 2][ranks];
                scene.rows = rows;
                scene.first = columns[ranks - 2];
                for (uint32_t rank = 0; rank < ranks; rank++)
                    scene.memory[rank] =
                        make_floats(&scene, rank, rows, (size_t)rows * (scene.first[rank + 1] - scene.first[rank]));
                scene.normed[0] = make_floats(&scene, 0, 9, (size_t)rows * width);
                crew_run(scene.crew, gather_parts, &scene);
                float *got = read_floats(&scene, 0, scene.normed[0], (size_t)rows * width);
                for (uint32_t rank = 0; rank < ranks; rank++) {
                    uint32_t own = scene.first[rank + 1] - scene.first[rank];
                    assert_int_equal(scene.codes[rank], 0);
                    for (uint32_t i = 0; i < rows * own; i++)
                        assert_true(got[i / own * width + scene.first[rank] + i % own] == number(rows, rank, i));
                }
                free(got);
                scene_close(&scene);
            }
}

/* ---- failures ---- */

enum fault { RANK_GIVES_UP, RANK_STAYS_AWAY, DEVICE_FAILS, CALL_FAILS, ERROR_COMES_LATER, FAULTS };

static void add_up_with_faults(void *context, uint32_t rank) {
    struct scene *scene = context;
    for (uint32_t round = 0; round < scene->rounds; round++)
        add_up(scene, rank);
}

static void give_up_or_add(void *context, uint32_t rank) {
    struct scene *scene = context;
    if (rank == scene->absent) {
        const struct error error = {.code = ERROR_DEVICE, .message = "rank is gone"};
        usleep(20000); /* the others wait by then */
        communicator_give_up(scene->communicator, &error);
        scene->codes[rank] = ERROR_DEVICE;
        return;
    }
    add_up(scene, rank);
}

static const char *inject(struct scene *scene, enum fault fault, uint32_t rank) {
    switch (fault) {
    case RANK_GIVES_UP:
        scene->absent = rank;
        crew_run(scene->crew, give_up_or_add, scene);
        return "rank is gone";
    case RANK_STAYS_AWAY:
        scene->absent = rank;
        scene->communicator->patience = 0.05;
        crew_run(scene->crew, add_up, scene);
        scene->codes[rank] = communicator_check(scene->communicator, NULL);
        return "0.05 seconds"; /* said by whoever sees it first: the kernel that waits, or the thread */
    case DEVICE_FAILS:
        emulator_fail_device((int)rank, cudaErrorIllegalAddress);
        crew_run(scene->crew, add_up, scene);
        return "illegal memory access";
    case CALL_FAILS:
        emulator_fail_nccl_call(ncclSystemError);
        crew_run(scene->crew, add_up, scene);
        return "unhandled system error";
    default:
        emulator_fail_nccl_later(ncclRemoteError);
        scene->absent = rank; /* or they are done before anybody asks */
        crew_run(scene->crew, add_up, scene);
        scene->codes[rank] = communicator_check(scene->communicator, NULL);
        emulator_fail_nccl_later(ncclSuccess);
        return "remote process";
    }
}

static void every_failure_is_everybodys(void **state) {
    (void)state;
    for (size_t kind = 0; kind < 2; kind++)
        for (uint32_t fault = 0; fault < (kind == 0 ? FAULTS : CALL_FAILS); fault++)
            for (uint32_t ranks = 2; ranks <= 3; ranks++)
                for (uint32_t rank = 0; rank < ranks; rank++) {
                    struct scene scene = scene_open(kinds[kind], ranks);
                    struct error error = {0};
                    scene.rows = rank == 0 ? 1 : 6; /* both ways through host memory */
                    scene.width = 64;
                    for (uint32_t i = 0; i < ranks; i++)
                        scene.memory[i] = make_floats(&scene, i, 0, (size_t)scene.rows * scene.width);
                    const char *word = inject(&scene, fault, rank);
                    assert_int_equal(communicator_check(scene.communicator, &error), ERROR_DEVICE);
                    if (strstr(error.message, word) == NULL)
                        fail_msg("%s, fault %u: '%s' does not say '%s'", kinds[kind], fault, error.message, word);
                    for (uint32_t i = 0; i < ranks; i++)
                        assert_int_equal(scene.codes[i], ERROR_DEVICE);
                    scene.absent = RANKS_MOST; /* nor does it ever work again */
                    scene.rounds = 2;
                    crew_run(scene.crew, add_up_with_faults, &scene);
                    for (uint32_t i = 0; i < ranks; i++)
                        assert_int_equal(scene.codes[i], ERROR_DEVICE);
                    scene_close(&scene);
                    emulator_fault_clear();
                }
}

/* ---- opening ---- */

static void what_is_not_there_is_refused(void **state) {
    const struct backend_options options = {.name = "cuda", .ranks = RANKS_MOST + 1},
                                 unknown = {.name = "cuda", .ranks = 2, .all_reduce = "pigeons"};
    struct error error = {0};
    (void)state;
    assert_null(backend_open(&options, &error));
    assert_int_equal(error.code, ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "CUDA device 4 is asked for, there are 4"));
    assert_null(backend_open(&unknown, &error));
    assert_int_equal(error.code, ERROR_INVALID);
    assert_non_null(strstr(error.message, "pigeons"));
}

/* ---- what the emulator finds ---- */

/* A backend that is given memory of another device, or whose device another thread's calls are for. */
static void other_devices_memory_is_found(void **state) {
    struct scene scene = scene_open("host", 2);
    (void)state;
    scene.memory[0] = make_floats(&scene, 0, 1, 64);
    scene.weight[0] = make_floats(&scene, 0, 1, 64);
    emulator_set_quiet(true);
    operations(&scene)->rms_norm(scene.backends[1], scene.memory[0], scene.weight[0], 1e-5F, 1, 64, scene.memory[0]);
    operations(&scene)->synchronize(scene.backends[1]);
    assert_non_null(emulator_fault());
    assert_non_null(strstr(emulator_fault(), "of another device"));
    assert_int_equal(communicator_check(scene.communicator, NULL), ERROR_DEVICE);
    emulator_set_quiet(false);
    emulator_fault_clear();
    scene_close(&scene);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_right),
        cmocka_unit_test(large_sums_go_in_parts),
        cmocka_unit_test(norms_are_those_of_rms_norm),
        cmocka_unit_test(parts_come_together),
        cmocka_unit_test(every_failure_is_everybodys),
        cmocka_unit_test(what_is_not_there_is_refused),
        cmocka_unit_test(other_devices_memory_is_found),
    };
    return cmocka_run_group_tests_name("cuda ranks", tests, NULL, NULL);
}
