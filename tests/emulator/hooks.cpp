/* SPDX-License-Identifier: Apache-2.0
 *
 * What g++ -fsanitize=thread calls at each access of memory in a kernel: our own functions of those names, so libtsan
 * is not linked. Host code of .cu files calls them too: nothing is checked unless a kernel runs.
 */
#include "internal.h"
#include "check.h"

#define HOOK(name, bytes, kind, aligned)                                                                               \
    extern "C" void name(void *at) {                                                                                   \
        struct thread *thread = thread_checked;                                                                        \
        if (__builtin_expect(thread != NULL, 0))                                                                       \
            check_access(thread, at, bytes, kind, aligned, __builtin_return_address(0));                               \
    }

HOOK(__tsan_read1, 1, ACCESS_READ, true)
HOOK(__tsan_read2, 2, ACCESS_READ, true)
HOOK(__tsan_read4, 4, ACCESS_READ, true)
HOOK(__tsan_read8, 8, ACCESS_READ, true)
HOOK(__tsan_write1, 1, ACCESS_WRITE, true)
HOOK(__tsan_write2, 2, ACCESS_WRITE, true)
HOOK(__tsan_write4, 4, ACCESS_WRITE, true)
HOOK(__tsan_write8, 8, ACCESS_WRITE, true)
HOOK(__tsan_unaligned_read2, 2, ACCESS_READ, false)
HOOK(__tsan_unaligned_read4, 4, ACCESS_READ, false)
HOOK(__tsan_unaligned_read8, 8, ACCESS_READ, false)
HOOK(__tsan_unaligned_read16, 16, ACCESS_READ, false)
HOOK(__tsan_unaligned_write2, 2, ACCESS_WRITE, false)
HOOK(__tsan_unaligned_write4, 4, ACCESS_WRITE, false)
HOOK(__tsan_unaligned_write8, 8, ACCESS_WRITE, false)
HOOK(__tsan_unaligned_write16, 16, ACCESS_WRITE, false)

/* g++ calls 16 bytes aligned when 8 are: structs of two 8-byte numbers are moved so here, and by halves on the device.
 * That vector types lie at multiples of 16 is checked where their pointers are used, below. */
static void access_16(void *at, enum access_kind kind, void *site) {
    if ((uintptr_t)at % 16 == 0) {
        check_access(thread_checked, at, 16, kind, true, site);
        return;
    }
    check_access(thread_checked, at, 8, kind, true, site);
    check_access(thread_checked, (char *)at + 8, 8, kind, true, (char *)site + 1); /* a place of its own */
}

extern "C" void __tsan_read16(void *at) {
    if (__builtin_expect(thread_checked != NULL, 0))
        access_16(at, ACCESS_READ, __builtin_return_address(0));
}

extern "C" void __tsan_write16(void *at) {
    if (__builtin_expect(thread_checked != NULL, 0))
        access_16(at, ACCESS_WRITE, __builtin_return_address(0));
}

/* What g++ -fsanitize=alignment calls where a pointer is used that is no multiple of its type's alignment (the layout
 * of GCC's ubsan.c). */
struct alignment_data {
    const char *file;
    uint32_t line, column;
    const void *type;
    unsigned char alignment_log, kind;
};

extern "C" void __ubsan_handle_type_mismatch_v1(const struct alignment_data *data, void *at) {
    struct place place = {data->file, (int)data->line, NULL};
    if (worker_running)
        fault_raise(&place, "pointer %p is no multiple of %u, as its type has to be", at, 1u << data->alignment_log);
    else
        fault_host("%s:%u: pointer %p is no multiple of %u, as its type has to be", data->file, data->line, at,
            1u << data->alignment_log);
}

extern "C" void __tsan_read_range(void *at, size_t bytes) {
    if (thread_checked)
        check_access(thread_checked, at, bytes, ACCESS_READ, false, __builtin_return_address(0));
}

extern "C" void __tsan_write_range(void *at, size_t bytes) {
    if (thread_checked)
        check_access(thread_checked, at, bytes, ACCESS_WRITE, false, __builtin_return_address(0));
}

extern "C" void *emulator_memcpy(void *to, const void *from, size_t bytes) {
    char *site = (char *)__builtin_return_address(0);
    if (thread_checked && bytes > 0) {
        check_access(thread_checked, from, bytes, ACCESS_READ, false, site);
        check_access(thread_checked, to, bytes, ACCESS_WRITE, false, site + 1); /* a place of its own */
    }
    return memcpy(to, from, bytes);
}

extern "C" void *emulator_memset(void *to, int value, size_t bytes) {
    if (thread_checked && bytes > 0)
        check_access(thread_checked, to, bytes, ACCESS_WRITE, false, __builtin_return_address(0));
    return memset(to, value, bytes);
}

extern "C" void __tsan_vptr_update(void **, void *) {
}
extern "C" void __tsan_func_entry(void *) {
}
extern "C" void __tsan_func_exit(void) {
}
extern "C" void __tsan_init(void) {
}

/* Of __threadfence, which only has to stop the compiler here. */
extern "C" void __tsan_atomic_signal_fence(int) {
}
