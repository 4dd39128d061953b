/* SPDX-License-Identifier: Apache-2.0 */
#include "traffic.h"

#include <algorithm>
#include <map>
#include <pthread.h>
#include <string>
#include <string.h>
#include <sys/mman.h>

/* A record of a log: site << 48 | shared << 46 | kind << 44 | bytes - 1 << 40 | offset. */
enum { RECORD_SITE = 48, RECORD_SHARED = 46, RECORD_KIND = 44, RECORD_BYTES = 40 };
enum { SITES_MAX = 1 << 15, SITES_TABLE = 1 << 16 };

struct traffic {
    struct emulator_traffic counts; /* of this worker's part of the launch */
    void *site_keys[SITES_TABLE];   /* open addressing */
    uint16_t site_numbers[SITES_TABLE];
    unsigned sites;
    /* Matching of logs that differ: per site. */
    uint32_t lane_count[SITES_MAX], most[SITES_MAX], first[SITES_MAX];
    uint32_t lane_stamp[SITES_MAX], site_stamp[SITES_MAX];
    uint32_t stamp;
    std::vector<uint32_t> touched;
    std::vector<uint64_t> matrix; /* [rows][32 lanes] */
};

static pthread_mutex_t totals_lock = PTHREAD_MUTEX_INITIALIZER;
static std::map<std::string, struct emulator_traffic> totals;
/* Per sector, the last launch that read or wrote it. */
static uint32_t *seen_read, *seen_written;

void traffic_create(void) {
    size_t sectors = ((size_t)1 << MEMORY_ARENA_BYTES_LOG) / SECTOR_BYTES;
    seen_read = (uint32_t *)memory_reserve(sectors * sizeof(uint32_t), PROT_READ | PROT_WRITE);
    seen_written = (uint32_t *)memory_reserve(sectors * sizeof(uint32_t), PROT_READ | PROT_WRITE);
}

void traffic_worker_create(struct worker *worker) {
    worker->traffic = new struct traffic();
}

void traffic_launch_begin(struct worker *worker) {
    struct traffic *traffic = worker->traffic;
    memset(&traffic->counts, 0, sizeof(traffic->counts));
    if (traffic->sites > SITES_MAX / 2) {
        memset(traffic->site_keys, 0, sizeof(traffic->site_keys));
        traffic->sites = 0;
    }
}

static void add(struct emulator_traffic *to, const struct emulator_traffic *from) {
    to->launches += from->launches;
    to->sectors_read += from->sectors_read;
    to->sectors_written += from->sectors_written;
    to->sectors_atomic += from->sectors_atomic;
    to->unique_read += from->unique_read;
    to->unique_written += from->unique_written;
    to->shared_wavefronts += from->shared_wavefronts;
    to->shared_ideal += from->shared_ideal;
}

void traffic_launch_end(struct worker *worker) {
    if (!worker->checked)
        return;
    pthread_mutex_lock(&totals_lock);
    add(&totals[worker->launch->name], &worker->traffic->counts);
    pthread_mutex_unlock(&totals_lock);
}

void traffic_launch_done(const struct launch *launch) {
    pthread_mutex_lock(&totals_lock);
    totals[launch->name].launches++;
    pthread_mutex_unlock(&totals_lock);
}

/* ---- Logs ---- */

/* Numbers from 1 on. */
static unsigned site_number(struct traffic *traffic, void *site) {
    unsigned at = (unsigned)((uintptr_t)site * 0x9e3779b97f4a7c15 >> 48);
    while (traffic->site_keys[at] != site) {
        if (!traffic->site_keys[at]) {
            traffic->site_keys[at] = site;
            traffic->site_numbers[at] = (uint16_t)(traffic->sites + 1 < SITES_MAX ? ++traffic->sites : SITES_MAX - 1);
            break;
        }
        at = (at + 1) % SITES_TABLE;
    }
    return traffic->site_numbers[at];
}

void traffic_record(struct worker *worker, struct thread *thread, bool shared, size_t offset, size_t bytes,
    enum access_kind kind, void *site) {
    uint64_t head = (uint64_t)site_number(worker->traffic, site) << RECORD_SITE | (uint64_t)shared << RECORD_SHARED |
                    (uint64_t)kind << RECORD_KIND;
    for (; bytes > 16; bytes -= 16, offset += 16)
        thread->log.push_back(head | (uint64_t)15 << RECORD_BYTES | offset);
    thread->log.push_back(head | (uint64_t)(bytes - 1) << RECORD_BYTES | offset);
}

static size_t record_offset(uint64_t record) {
    return (size_t)(record & (((uint64_t)1 << RECORD_BYTES) - 1));
}

static unsigned record_bytes(uint64_t record) {
    return (unsigned)(record >> RECORD_BYTES & 15) + 1;
}

/* ---- One warp access: records [32] by lane, 0 where a lane takes no part ---- */

static bool mark_seen(uint32_t *seen, uint32_t launch) {
    if (__atomic_load_n(seen, __ATOMIC_RELAXED) == launch)
        return false;
    return __atomic_exchange_n(seen, launch, __ATOMIC_RELAXED) != launch;
}

static void count_global(struct worker *worker, const uint64_t *records) {
    size_t sectors[2 * WARP_LANES];
    unsigned count = 0;
    bool ascending = true;
    enum access_kind kind = ACCESS_READ;
    for (unsigned lane = 0; lane < WARP_LANES; lane++) {
        if (records[lane] == 0)
            continue;
        kind = (enum access_kind)(records[lane] >> RECORD_KIND & 3);
        size_t first = record_offset(records[lane]) / SECTOR_BYTES;
        size_t last = (record_offset(records[lane]) + record_bytes(records[lane]) - 1) / SECTOR_BYTES;
        for (size_t sector = first; sector <= last; sector++) {
            if (count > 0 && sectors[count - 1] == sector)
                continue;
            ascending = ascending && (count == 0 || sectors[count - 1] < sector);
            sectors[count++] = sector;
        }
    }
    if (!ascending) {
        std::sort(sectors, sectors + count);
        count = (unsigned)(std::unique(sectors, sectors + count) - sectors);
    }
    struct emulator_traffic *counts = &worker->traffic->counts;
    uint32_t *seen = kind == ACCESS_READ ? seen_read : seen_written, launch = (uint32_t)worker->launch_number;
    unsigned unique = 0;
    for (unsigned i = 0; i < count; i++)
        unique += mark_seen(&seen[sectors[i]], launch);
    *(kind == ACCESS_READ ? &counts->unique_read : &counts->unique_written) += unique;
    *(kind == ACCESS_READ      ? &counts->sectors_read
        : kind == ACCESS_WRITE ? &counts->sectors_written
                               : &counts->sectors_atomic) += count;
}

/* Passes over the 32 banks of 4 bytes: lanes that want different words of one bank take turns. Accesses of 8 bytes go
 * by half warps, those of 16 by quarters. */
static unsigned group_wavefronts(const uint64_t *records, unsigned lanes) {
    size_t words[WARP_LANES][WARP_LANES]; /* [bank] distinct words */
    unsigned count[WARP_LANES] = {0}, most = 0;
    for (unsigned lane = 0; lane < lanes; lane++) {
        if (records[lane] == 0)
            continue;
        size_t first = record_offset(records[lane]) / 4;
        size_t last = (record_offset(records[lane]) + record_bytes(records[lane]) - 1) / 4;
        for (size_t word = first; word <= last; word++) {
            unsigned bank = (unsigned)(word % WARP_LANES), i = 0;
            while (i < count[bank] && words[bank][i] != word)
                i++;
            if (i == count[bank] && i < WARP_LANES)
                words[bank][count[bank]++] = word;
            most = count[bank] > most ? count[bank] : most;
        }
    }
    return most;
}

static void count_shared(struct worker *worker, const uint64_t *records) {
    unsigned bytes = 4;
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        if (records[lane] != 0)
            bytes = record_bytes(records[lane]) > bytes ? record_bytes(records[lane]) : bytes;
    unsigned lanes = bytes <= 4 ? WARP_LANES : bytes <= 8 ? WARP_LANES / 2 : WARP_LANES / 4;
    for (unsigned first = 0; first < WARP_LANES; first += lanes) {
        unsigned wavefronts = group_wavefronts(records + first, lanes);
        worker->traffic->counts.shared_wavefronts += wavefronts;
        worker->traffic->counts.shared_ideal += wavefronts > 0;
    }
}

static void count_access(struct worker *worker, const uint64_t *records, uint64_t any) {
    if (any >> RECORD_SHARED & 1)
        count_shared(worker, records);
    else
        count_global(worker, records);
}

/* ---- Matching ---- */

/* As long as all lanes did the same: records at one place of the logs belong together. Returns how many did. */
static size_t match_same(struct worker *worker, struct warp *warp, unsigned lanes, size_t shortest) {
    uint64_t records[WARP_LANES] = {0};
    for (size_t i = 0; i < shortest; i++) {
        uint64_t any = 0, different = 0;
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            unsigned lane = (unsigned)__builtin_ctz(rest);
            uint64_t record = warp->lanes[lane]->log[i];
            any = any ? any : record;
            different |= any ^ record;
            records[lane] = record;
        }
        if (different >> RECORD_BYTES != 0)
            return i;
        count_access(worker, records, any);
    }
    return shortest;
}

/* How often each lane came to each site. */
static void count_sites(struct traffic *traffic, const std::vector<uint64_t> *log, size_t from, uint32_t lane_stamp) {
    for (size_t i = from; i < log->size(); i++) {
        unsigned site = (unsigned)((*log)[i] >> RECORD_SITE);
        if (traffic->site_stamp[site] != traffic->stamp) {
            traffic->site_stamp[site] = traffic->stamp;
            traffic->most[site] = 0;
            traffic->touched.push_back(site);
        }
        if (traffic->lane_stamp[site] != lane_stamp) {
            traffic->lane_stamp[site] = lane_stamp;
            traffic->lane_count[site] = 0;
        }
        uint32_t count = ++traffic->lane_count[site];
        traffic->most[site] = count > traffic->most[site] ? count : traffic->most[site];
    }
}

static void fill_matrix(struct traffic *traffic, const std::vector<uint64_t> *log, size_t from, unsigned lane) {
    for (unsigned site : traffic->touched)
        traffic->lane_count[site] = 0;
    for (size_t i = from; i < log->size(); i++) {
        unsigned site = (unsigned)((*log)[i] >> RECORD_SITE);
        size_t row = traffic->first[site] + traffic->lane_count[site]++;
        traffic->matrix[row * WARP_LANES + lane] = (*log)[i];
    }
}

/* By site and number of execution. */
static void match_sites(struct worker *worker, struct warp *warp, unsigned lanes, size_t from) {
    struct traffic *traffic = worker->traffic;
    traffic->stamp += 64;
    traffic->touched.clear();
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        unsigned lane = (unsigned)__builtin_ctz(rest);
        count_sites(traffic, &warp->lanes[lane]->log, from, traffic->stamp + lane + 1);
    }
    size_t rows = 0;
    for (unsigned site : traffic->touched) {
        traffic->first[site] = (uint32_t)rows;
        rows += traffic->most[site];
    }
    traffic->matrix.assign(rows * WARP_LANES, 0);
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        unsigned lane = (unsigned)__builtin_ctz(rest);
        fill_matrix(traffic, &warp->lanes[lane]->log, from, lane);
    }
    for (size_t row = 0; row < rows; row++) {
        const uint64_t *records = &traffic->matrix[row * WARP_LANES];
        uint64_t any = 0;
        for (unsigned lane = 0; lane < WARP_LANES; lane++)
            any |= records[lane];
        count_access(worker, records, any);
    }
}

void traffic_warp(struct worker *worker, struct warp *warp) {
    unsigned lanes = 0;
    size_t shortest = SIZE_MAX, longest = 0;
    for (unsigned rest = warp->exists; rest != 0; rest &= rest - 1) {
        unsigned lane = (unsigned)__builtin_ctz(rest);
        size_t length = warp->lanes[lane]->log.size();
        if (length == 0)
            continue;
        lanes |= 1u << lane;
        shortest = std::min(shortest, length);
        longest = std::max(longest, length);
    }
    if (lanes == 0)
        return;
    size_t same = match_same(worker, warp, lanes, shortest);
    if (same < longest)
        match_sites(worker, warp, lanes, same);
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
        warp->lanes[__builtin_ctz(rest)]->log.clear();
}

void traffic_barrier(struct worker *worker) {
    for (unsigned w = 0; w < worker->warps_count; w++)
        traffic_warp(worker, &worker->warps[w]);
}

/* ---- Reading ---- */

extern "C" void emulator_traffic_reset(void) {
    cudaDeviceSynchronize();
    pthread_mutex_lock(&totals_lock);
    totals.clear();
    pthread_mutex_unlock(&totals_lock);
}

extern "C" bool emulator_traffic_read(const char *kernel, struct emulator_traffic *traffic) {
    cudaDeviceSynchronize();
    size_t length = strlen(kernel);
    bool found = false;
    memset(traffic, 0, sizeof(*traffic));
    traffic->kernel = kernel;
    pthread_mutex_lock(&totals_lock);
    for (const auto &total : totals)
        if (total.first == kernel || (total.first.compare(0, length, kernel) == 0 && total.first[length] == '<')) {
            add(traffic, &total.second);
            found = true;
        }
    pthread_mutex_unlock(&totals_lock);
    return found;
}

extern "C" size_t emulator_traffic_list(struct emulator_traffic *traffics, size_t capacity) {
    cudaDeviceSynchronize();
    size_t count = 0;
    pthread_mutex_lock(&totals_lock);
    for (const auto &total : totals) {
        if (count < capacity) {
            traffics[count] = total.second;
            traffics[count].kernel = total.first.c_str();
        }
        count++;
    }
    pthread_mutex_unlock(&totals_lock);
    return count;
}
