/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of the emulator (README.md): what its files share. A worker is one OS thread that runs blocks, one at a time;
 * a block's threads are fibers of the worker, which are switched only where a thread waits for others.
 */
#ifndef EMULATOR_INTERNAL_H
#define EMULATOR_INTERNAL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <vector>

#include "emulator_device.h"
#include "emulator.h"

enum {
    WARP_LANES = 32,
    BLOCK_THREADS_MAX = 1024,
    BLOCK_WARPS_MAX = BLOCK_THREADS_MAX / WARP_LANES,
    BLOCK_SHARED_MAX = 99 * 1024,    /* bytes of an RTX 4090 */
    BLOCK_SHARED_SPACE = 128 * 1024, /* address space of a worker's shared memory */
    SECTOR_BYTES = 32,
    WORKERS_MAX = 16,
    DEVICES_MAX = 4,
};

/* ---- Fibers (fiber.cpp) ---- */

struct fiber {
    void *stack_pointer; /* while it does not run */
    char *stack;         /* lowest address */
    unsigned number;
};

enum { FIBER_STACK_BYTES = 64 * 1024 };

/* Runs `start` on the fiber's stack at the next switch to it. It never returns. */
void fiber_reset(struct fiber *fiber, void (*start)(void));
extern "C" void fiber_switch(void **save_stack_pointer, void *load_stack_pointer);
/* Stacks with a guard page below each. */
void fiber_create_all(struct fiber *fibers, unsigned count);

/* ---- A kernel's launch ---- */

struct launch {
    char name[96];
    unsigned device;
    struct dim3 grid, block;
    size_t shared_bytes;
    void (*invoke)(const void *arguments);
    std::vector<char> arguments;
};

/* A place in a kernel: a source line, or the return address of an access. */
struct place {
    const char *file;
    int line;
    void *address;
};

static inline bool place_same_line(const struct place *a, const struct place *b) {
    return a->line == b->line && (a->file == b->file || strcmp(a->file, b->file) == 0);
}

/* ---- A block while it runs (block.cpp, warp.cpp) ---- */

/* What a lane brings to a warp's meeting. */
struct meeting {
    enum emulator_warp_kind kind;
    unsigned mask;
    uint64_t value;
    unsigned argument, width;
    uint64_t result;
    uint32_t *fragment_d;
    const uint32_t *fragment_a, *fragment_b, *fragment_c;
    const void *row;
    struct place place;
    struct meeting *first; /* of the lane that came first with this mask */
    unsigned met;          /* there: the lanes that came */
};

enum thread_state { THREAD_READY, THREAD_RUNNING, THREAD_AT_BARRIER, THREAD_AT_MEETING, THREAD_ENDED };

struct async_copy {
    void *to;
    const void *from;
    unsigned valid;
};

/* Copies not applied yet, oldest first; groups[i] is the number of copies in the i-th oldest group. */
struct async_copies {
    std::vector<struct async_copy> copies;
    std::vector<unsigned> groups;
    unsigned open; /* copies after the last commit */
};

struct thread {
    struct {
        unsigned x, y, z;
    } index;
    unsigned number; /* in the block */
    unsigned lane;
    struct warp *warp;
    enum thread_state state;
    struct fiber *fiber; /* NULL: not started */
    struct meeting *meeting;
    int barrier_predicate;
    struct place barrier_place;
    struct async_copies copies;
    std::vector<uint64_t> log; /* accesses since the warp's last common point (traffic.cpp) */
};

struct warp {
    unsigned number;
    unsigned exists;  /* lanes that the block has */
    unsigned live;    /* lanes that have not ended */
    unsigned waiting; /* lanes at a meeting */
    struct thread *lanes[WARP_LANES];
    uint64_t common_stamp;                       /* last meeting of all live lanes (race.cpp) */
    uint64_t pair_stamp[WARP_LANES][WARP_LANES]; /* last meeting of two lanes */
    bool pairs;                                  /* pair_stamp has entries of this block */
};

struct worker {
    unsigned number; /* of all workers, for the records of accesses */
    bool launches;   /* it is whoever launched, not a thread of a pool */
    bool rests;      /* a thread waits for what is outside of the launch */
    struct pool *pool;
    bool checked;
    const struct launch *launch;
    uint64_t launch_number;
    unsigned block; /* number in the grid, x first */
    struct {
        unsigned x, y, z;
    } block_index;
    unsigned threads_count, warps_count;
    unsigned live;       /* threads that have not ended */
    unsigned at_barrier; /* threads */
    enum emulator_barrier_kind barrier_kind;
    int barrier_result;
    struct thread *current;
    struct thread threads[BLOCK_THREADS_MAX];
    struct warp warps[BLOCK_WARPS_MAX];
    /* Threads that may run: a ring; taken from the front. */
    unsigned short ready[2 * BLOCK_THREADS_MAX];
    unsigned ready_first, ready_count;
    struct fiber fibers[BLOCK_THREADS_MAX];
    struct fiber *free_fibers[BLOCK_THREADS_MAX];
    unsigned free_count;
    void *main_stack_pointer;
    bool in_block; /* a fiber runs, not the worker's own stack */
    bool fault;    /* this block is given up */
    uint64_t random;
    char *shared;                                  /* [BLOCK_SHARED_SPACE] */
    uint8_t *shared_states;                        /* [BLOCK_SHARED_SPACE] enum shared_state of each byte */
    struct race_cell *shared_words, *shared_bytes; /* race.h */
    bool shared_parts[BLOCK_SHARED_SPACE / 1024];  /* KiB in which parts of words were touched in this block */
    uint64_t stamp;                                /* counts barriers and meetings, never back (race.cpp) */
    uint64_t barrier_stamp;                        /* last time that all threads of the block met, or it began */
    struct traffic *traffic;                       /* traffic.cpp */
};

/* The worker of this OS thread while a block runs, otherwise NULL. */
extern __thread struct worker *worker_running __attribute__((tls_model("initial-exec")));
/* The running thread where accesses are to be checked and counted, otherwise NULL: hooks return at once. */
extern __thread struct thread *thread_checked __attribute__((tls_model("initial-exec")));

/* Runs one block of the launch; stops the block at the first fault. */
void block_run(struct worker *worker, unsigned block);
/* The running thread waits until another makes it ready. */
void block_wait(struct worker *worker, enum thread_state state);
/* Makes threads ready, in random order (in fast mode: as given). */
void block_ready(struct worker *worker, struct thread **threads, unsigned count);
/* All lanes of a warp have ended or met. */
void warp_leave(struct worker *worker, struct thread *thread);
void worker_create(struct worker *worker, unsigned number);
uint64_t worker_random(struct worker *worker);
/* Others go on while a thread of the block waits for them (workers.cpp). */
void worker_rest(struct worker *worker);

/* mma.cpp: by the last lane that came, for all. */
void mma_compute(struct warp *warp, enum emulator_warp_kind kind);
void ldmatrix_compute(struct worker *worker, struct warp *warp, enum emulator_warp_kind kind);

/* Applies a thread's copies until at most `groups` groups are left. */
void copies_apply(struct worker *worker, struct thread *thread, unsigned groups);

/* ---- Faults (fault.cpp) ---- */

/* Records what is wrong (printf format), with kernel, block, thread and place, and gives the running block up: does not
 * return while a kernel runs. */
void fault_raise(const struct place *place, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same, of host calls: returns. */
void fault_host(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fault_forget(void);
extern "C" void fault_signal_stack(void); /* of this OS thread */

/* ---- Device memory (memory.cpp) ---- */

enum { MEMORY_DEVICE_BYTES_LOG = 34, MEMORY_ARENA_BYTES_LOG = 36 /* of DEVICES_MAX */, MEMORY_ALIGNMENT = 256 };

extern char *memory_arena;     /* [2^36] address space; device pointers lie in it, each device's in its part */
extern uint8_t *memory_states; /* [arena / 16]: bytes of the 16 that may be used, 0 to 16; MEMORY_FREED */
enum { MEMORY_FREED = 0xfd };

static inline bool memory_is_device(const void *at) {
    return (uintptr_t)at - (uintptr_t)memory_arena < (uintptr_t)1 << MEMORY_ARENA_BYTES_LOG;
}

static inline unsigned memory_device_of_offset(size_t offset) {
    return (unsigned)(offset >> MEMORY_DEVICE_BYTES_LOG);
}

/* Of device memory. */
static inline unsigned memory_device_of(const void *at) {
    return memory_device_of_offset((size_t)((const char *)at - memory_arena));
}

/* Address space without memory until it is touched; zero. */
char *memory_reserve(size_t bytes, int protection);
void memory_create(void);
void *memory_allocate(size_t bytes, unsigned device);
bool memory_release(void *memory);
size_t memory_used(unsigned device);
size_t memory_total(void); /* of a device */
/* True when all bytes belong to one live allocation. */
bool memory_range_ok(const void *from, size_t bytes);
/* Words that describe an address: "16 bytes after an allocation of 64 bytes". */
void memory_describe(const void *at, char *text, size_t capacity);
/* Host access to device memory, counted: closed at 0 (checked mode). */
void memory_open(void);
void memory_close(void);
/* The program's own variables: constants of kernels. */
bool memory_is_static(const void *at);
/* Host memory that kernels may touch, and that asynchronous copies read late. */
void memory_pin(void *memory, size_t bytes);
bool memory_unpin(void *memory);
bool memory_is_pinned(const void *at, size_t bytes);

/* ---- Workers (workers.cpp) ---- */

/* Runs all blocks of a launch, on several OS threads; false after a fault. */
bool workers_run(const struct launch *launch);

/* ---- Settings ---- */

struct settings {
    bool fast;
    uint64_t seed;
    unsigned workers;
    unsigned devices;
};
extern struct settings settings;
void settings_read(void); /* once, from the environment */

#endif
