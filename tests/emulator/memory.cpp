/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory: one large range of addresses, of which each device has a part, closed to the host in checked mode
 * except while device work runs. Each allocation is followed by a guard zone; freed memory is not used again soon.
 */
#include "internal.h"
#include "race.h"
#include "traffic.h"

#include <deque>
#include <link.h>
#include <map>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct allocation {
    size_t bytes;    /* asked for */
    size_t reserved; /* with its guard */
    bool live;
};

enum { GUARD_BYTES = 256, QUARANTINE_BYTES = 64 << 20, RETURNED_BYTES = 1 << 20, SMALL_BYTES = 256 << 10 };
/* Of the machine. Memory is opened and closed to the host by as many at once, around everything that runs: by small
 * pages that would take longer than a small kernel. */
static const size_t large_page = (size_t)2 << 20;
static const size_t total_bytes = (size_t)8 << 30;

char *memory_arena;
uint8_t *memory_states;

static std::map<char *, struct allocation> allocations; /* live ones and those in quarantine */
static std::deque<char *> quarantine;
static size_t quarantine_bytes;
static struct {
    std::map<char *, size_t> holes; /* free ranges below end_used */
    size_t used_bytes;
    char *end_used;
} devices[DEVICES_MAX];
static unsigned opened;
/* Kernels look it up while the host may pin more. */
static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;
static std::map<char *, size_t> pinned;

char *memory_reserve(size_t bytes, int protection) {
    void *space = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) {
        fprintf(stderr, "emulator: cannot reserve %zu bytes of address space\n", bytes);
        abort();
    }
    return (char *)space;
}

void memory_create(void) {
    if (memory_arena)
        return;
    size_t bytes = (size_t)1 << MEMORY_ARENA_BYTES_LOG;
    char *space = memory_reserve(bytes + large_page, PROT_NONE);
    memory_arena = space + (large_page - (uintptr_t)space % large_page) % large_page;
    memory_states = (uint8_t *)memory_reserve(bytes / 16, PROT_READ | PROT_WRITE);
    for (size_t device = 0; device < DEVICES_MAX; device++)
        devices[device].end_used = memory_arena + (device << MEMORY_DEVICE_BYTES_LOG) + MEMORY_ALIGNMENT;
    madvise(memory_arena, bytes, MADV_HUGEPAGE);
    emulator_catch_signals();
    race_create();
    traffic_create();
}

static void protect(int protection) {
    for (size_t device = 0; device < settings.devices; device++) {
        char *first = memory_arena + (device << MEMORY_DEVICE_BYTES_LOG);
        size_t used = (size_t)(devices[device].end_used - first);
        if (used > MEMORY_ALIGNMENT)
            mprotect(first, (used + large_page - 1) / large_page * large_page, protection);
    }
}

void memory_open(void) {
    if (opened++ == 0)
        protect(PROT_READ | PROT_WRITE);
}

void memory_close(void) {
    if (--opened == 0 && !settings.fast)
        protect(PROT_NONE);
}

/* ---- Ranges ---- */

static void states_set(char *at, size_t bytes, size_t reserved, bool live) {
    uint8_t *states = memory_states + (at - memory_arena) / 16;
    memset(states, 0, reserved / 16);
    memset(states, live ? 16 : MEMORY_FREED, bytes / 16);
    if (bytes % 16 != 0)
        states[bytes / 16] = live ? (uint8_t)(bytes % 16) : (uint8_t)MEMORY_FREED;
}

static void hole_add(char *at, size_t bytes) {
    std::map<char *, size_t> &holes = devices[memory_device_of(at)].holes;
    auto next = holes.lower_bound(at);
    if (next != holes.end() && next->first == at + bytes) {
        bytes += next->second;
        next = holes.erase(next);
    }
    if (next != holes.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == at) {
            before->second += bytes;
            return;
        }
    }
    holes[at] = bytes;
}

static char *hole_take(size_t bytes, unsigned device) {
    std::map<char *, size_t> &holes = devices[device].holes;
    for (auto hole = holes.begin(); hole != holes.end(); ++hole) {
        if (hole->second < bytes)
            continue;
        char *at = hole->first;
        size_t rest = hole->second - bytes;
        holes.erase(hole);
        if (rest > 0)
            holes[at + bytes] = rest;
        return at;
    }
    return NULL;
}

static void quarantine_shrink(size_t to) {
    while (quarantine_bytes > to && !quarantine.empty()) {
        char *at = quarantine.front();
        quarantine.pop_front();
        struct allocation old = allocations[at];
        allocations.erase(at);
        quarantine_bytes -= old.reserved;
        hole_add(at, old.reserved);
    }
}

static char *end_take(size_t bytes, unsigned device) {
    char *at = devices[device].end_used;
    char *end = memory_arena + ((size_t)(device + 1) << MEMORY_DEVICE_BYTES_LOG);
    if (bytes > (size_t)(end - at))
        return NULL;
    devices[device].end_used += bytes;
    if (settings.fast || opened > 0)
        protect(PROT_READ | PROT_WRITE);
    return at;
}

void *memory_allocate(size_t bytes, unsigned device) {
    if (bytes == 0 || bytes > total_bytes - devices[device].used_bytes)
        return NULL;
    size_t reserved = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT + GUARD_BYTES;
    char *at = hole_take(reserved, device);
    if (!at)
        at = end_take(reserved, device);
    if (!at) {
        quarantine_shrink(0);
        at = hole_take(reserved, device);
    }
    if (!at)
        return NULL;
    allocations[at] = {bytes, reserved, true};
    devices[device].used_bytes += bytes;
    states_set(at, bytes, reserved, true);
    if (!settings.fast) {
        memory_open();
        memset(at, 0xff, bytes);
        memory_close();
        if (bytes <= SMALL_BYTES)
            race_expect_writes((size_t)(at - memory_arena), bytes);
    }
    return at;
}

bool memory_release(void *memory) {
    auto found = allocations.find((char *)memory);
    if (found == allocations.end() || !found->second.live)
        return false;
    struct allocation *allocation = &found->second;
    allocation->live = false;
    devices[memory_device_of(memory)].used_bytes -= allocation->bytes;
    states_set(found->first, allocation->bytes, allocation->reserved, false);
    uintptr_t first = ((uintptr_t)memory + 4095) & ~(uintptr_t)4095, end = ((uintptr_t)memory + allocation->bytes);
    end &= ~(uintptr_t)4095;
    if (end > first && end - first >= RETURNED_BYTES)
        madvise((void *)first, end - first, MADV_DONTNEED);
    quarantine.push_back(found->first);
    quarantine_bytes += allocation->reserved;
    quarantine_shrink(QUARANTINE_BYTES);
    return true;
}

size_t memory_used(unsigned device) {
    return devices[device].used_bytes;
}

size_t memory_total(void) {
    return total_bytes;
}

static std::map<char *, struct allocation>::iterator allocation_before(const void *at) {
    auto next = allocations.upper_bound((char *)at);
    return next == allocations.begin() ? allocations.end() : std::prev(next);
}

bool memory_range_ok(const void *from, size_t bytes) {
    auto found = allocation_before(from);
    if (found == allocations.end() || !found->second.live)
        return false;
    size_t offset = (size_t)((const char *)from - found->first);
    return offset <= found->second.bytes && bytes <= found->second.bytes - offset;
}

void memory_describe(const void *at, char *text, size_t capacity) {
    if (!memory_is_device(at)) {
        snprintf(text, capacity, "%p, no device memory", at);
        return;
    }
    auto found = allocation_before(at);
    if (found == allocations.end()) {
        snprintf(text, capacity, "%p, before all allocations", at);
        return;
    }
    size_t offset = (size_t)((const char *)at - found->first);
    const char *state = found->second.live ? "an" : "a freed";
    unsigned device = memory_device_of(at);
    if (offset < found->second.bytes)
        snprintf(text, capacity, "%p, byte %zu of %s allocation of %zu bytes on device %u", at, offset, state,
            found->second.bytes, device);
    else
        snprintf(text, capacity, "%p, %zu bytes after %s allocation of %zu bytes on device %u", at,
            offset - found->second.bytes, state, found->second.bytes, device);
}

/* ---- Host memory that kernels may read ---- */

struct segment {
    uintptr_t first, bytes;
};

/* last: in, the address as `first`; out, the segment it lies in. */
static int find_segment(struct dl_phdr_info *info, size_t, void *last_) {
    struct segment *last = (struct segment *)last_;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        struct segment segment = {info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, info->dlpi_phdr[i].p_memsz};
        if (info->dlpi_phdr[i].p_type != PT_LOAD || last->first - segment.first >= segment.bytes)
            continue;
        *last = segment;
        return 1;
    }
    return 0;
}

bool memory_is_static(const void *at) {
    static __thread struct segment last; /* tables are read many times */
    if ((uintptr_t)at - last.first < last.bytes)
        return true;
    struct segment found = {(uintptr_t)at, 0};
    if (!dl_iterate_phdr(find_segment, &found))
        return false;
    last = found;
    return true;
}

void memory_pin(void *memory, size_t bytes) {
    pthread_mutex_lock(&pinned_lock);
    pinned[(char *)memory] = bytes;
    pthread_mutex_unlock(&pinned_lock);
}

bool memory_unpin(void *memory) {
    pthread_mutex_lock(&pinned_lock);
    bool found = pinned.erase((char *)memory) > 0;
    pthread_mutex_unlock(&pinned_lock);
    return found;
}

bool memory_is_pinned(const void *at, size_t bytes) {
    pthread_mutex_lock(&pinned_lock);
    auto next = pinned.upper_bound((char *)at);
    bool is = false;
    if (next != pinned.begin()) {
        auto found = std::prev(next);
        size_t offset = (size_t)((const char *)at - found->first);
        is = offset <= found->second && bytes <= found->second - offset;
    }
    pthread_mutex_unlock(&pinned_lock);
    return is;
}
