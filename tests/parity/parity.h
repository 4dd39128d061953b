/* SPDX-License-Identifier: Apache-2.0
 *
 * The parity harness: every backend operation against a plain C reference, on every backend and instruction tier that
 * this machine has, over seeded random shapes.
 *
 *   parity [--seed N] [--rounds N] [--only TEXT] [--tier NAME] [--threads N] [--part K/N] [--time [--seconds S]]
 *
 * --tier: scalar, avx2, avx512, cuda, or cpu for the first three. What the machine or the build lacks is skipped, and a
 * line says so; so is what calls an operation that a backend does not have. --part: each N-th case in all tiers, from
 * case K on (from 0). The scalar tier runs with one thread unless --threads says otherwise.
 *
 * A case is a function that draws one random shape from `struct parity`, runs the operation on the backend, computes
 * the reference, and calls a parity_check_*. The harness runs it `rounds` times per backend, tier and thread count. To
 * add one: write it in parity_NAME.c beside its family, list it in the family's array, list a new family in
 * parity.c and in meson.build. With --time the harness runs the family's timed cases instead.
 *
 * References live in reference*.{h,c}. They follow the definition in engine/backend.h and share no code with engine/.
 */
#ifndef TESTS_PARITY_PARITY_H
#define TESTS_PARITY_PARITY_H

#include "engine/backend.h"

struct parity; /* state of one run of one case */

struct parity_case {
    const char *name;                    /* "linear q4_1": --only matches a part of it */
    void (*run)(struct parity *parity);  /* NULL: only timed */
    uint32_t rounds;                     /* runs at --rounds 1, at least 1: more for cases with many shapes */
    uint32_t index;                      /* free for the case, to tell entries that share a function apart */
    void (*time)(struct parity *parity); /* measures, for --time; NULL: nothing to measure */
};

/* Families: arrays that end with an entry without a name. */
extern const struct parity_case parity_linear_cases[];
extern const struct parity_case parity_attend_cases[];
extern const struct parity_case parity_statistics_cases[];
extern const struct parity_case parity_summarise_cases[];
extern const struct parity_case parity_statistics_timed[];
extern const struct parity_case parity_linear_timed[];
extern const struct parity_case parity_vector_cases[];
extern const struct parity_case parity_traits_cases[];
extern const struct parity_case parity_pages_cases[];
extern const struct parity_case parity_move_cases[];
extern const struct parity_case parity_sample_cases[];
extern const struct parity_case parity_score_cases[];
extern const struct parity_case parity_score_timed[];
extern const struct parity_case parity_network_cases[];
extern const struct parity_case parity_network_timed[];
/* Where the CUDA backend is built. */
extern const struct parity_case parity_select_cases[];
extern const struct parity_case parity_score_long_cases[];
/* Of the emulated CUDA backend only (parity_traffic.h). */
extern const struct parity_case parity_traffic_core_cases[];
extern const struct parity_case parity_traffic_linear_cases[];
extern const struct parity_case parity_linear_paths_cases[];
extern const struct parity_case parity_traffic_attend_cases[];
extern const struct parity_case parity_traffic_score_cases[];

struct parity {
    struct backend *backend;
    const struct backend_operations *operations; /* of backend */
    const struct parity_case *entry;
    const char *tier;  /* "scalar", "cuda" */
    uint32_t threads;  /* of the backend */
    uint32_t round;    /* of this case */
    uint64_t random;   /* state of the generator */
    uint32_t failures; /* of this run */
    double seconds;    /* that parity_time spends */
    bool cuda;         /* not an instruction set of the CPU: other bits, but the same in every run */
    bool leads;        /* no run before this one has the same bits */
    bool skipped;      /* the case */
    uint32_t cases_skipped;
    uint32_t cases_seen; /* of all families, chosen or not */
};

/* Whether the environment asks for what takes long (DISTILLCACHE_TEST_FULL=1). */
bool parity_is_full(void);

/* Ends a case before its first check, with a line that says why; its other rounds are left out. */
void parity_skip(struct parity *parity, const char *why);

/* Random numbers, a function of --seed, case and round alone: each tier sees the same inputs. */
uint32_t parity_random(struct parity *parity, uint32_t low, uint32_t high); /* uniform in [low, high] */
uint64_t parity_random_bits(struct parity *parity);
double parity_uniform(struct parity *parity, double low, double high);
float parity_normal(struct parity *parity); /* mean 0, variance 1 */
void parity_fill_normal(struct parity *parity, float *out, size_t count, float scale);
/* Sums of attention below 2^`bits` (32 to 63) of slots [slots]. Each sixteen slots have sums below 2^31, or larger ones
 * among them or only, or such as lie less than a query's greatest share below a multiple of 2^31. */
void parity_fill_sums(struct parity *parity, uint32_t bits, uint32_t slots, uint64_t *sums);

/* Host memory; never NULL (the harness ends when there is none). Freed by the case. */
void *parity_host(size_t bytes);

/* Device memory, filled from `from` unless that is NULL (then zero), and back into new host memory. */
void *parity_upload(struct parity *parity, const void *from, size_t bytes);
void *parity_download(struct parity *parity, const void *device, size_t bytes);
/* Numbers [slots] as the two planes of struct kv_statistics have them, zero from there to the capacity. */
uint32_t *parity_upload_sums(struct parity *parity, const uint64_t *sums, uint32_t slots, uint32_t capacity);
void parity_release(struct parity *parity, void *device);

/* Checks. `what` names the shape in the message ("q8_0 R=3 576x192"), as printf. A failure prints the first difference
 * and is counted; the run goes on. They return whether all was well. */
bool parity_check_bits(struct parity *parity, const float *got, const float *want, size_t count, const char *what, ...)
    __attribute__((format(printf, 5, 6)));
bool parity_check_bytes(struct parity *parity, const void *got, const void *want, size_t bytes, const char *what, ...)
    __attribute__((format(printf, 5, 6)));
/* |got - want| <= absolute + relative * |want| for every element; NaN must meet NaN, an infinity itself. */
bool parity_check_close(struct parity *parity, const float *got, const double *want, size_t count, double absolute,
    double relative, const char *what, ...) __attribute__((format(printf, 7, 8)));
bool parity_check_true(struct parity *parity, bool condition, const char *what, ...)
    __attribute__((format(printf, 3, 4)));

/* For --time: calls work until about --seconds have passed and prints the best call as microseconds, GB/s of `bytes`
 * and GMAC/s of `macs` (each left out when 0). Returns the best time in seconds. */
double parity_time(struct parity *parity, void (*work)(void *context), void *context, double bytes, double macs,
    const char *what, ...) __attribute__((format(printf, 6, 7)));

#endif
