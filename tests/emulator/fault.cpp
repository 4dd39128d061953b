/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults: what is wrong, where, and how to see it again. Settings.
 */
#include "internal.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct settings settings;

static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;
static char fault_text[4096];
static bool quiet;

void settings_read(void) {
    static bool read;
    if (read)
        return;
    read = true;
    const char *mode = getenv("DISTILLCACHE_EMULATOR"), *seed = getenv("DISTILLCACHE_EMULATOR_SEED");
    const char *threads = getenv("DISTILLCACHE_EMULATOR_THREADS"), *devices = getenv("DISTILLCACHE_EMULATOR_DEVICES");
    long wanted = devices ? strtol(devices, NULL, 0) : (long)DEVICES_MAX;
    settings.devices = (unsigned)(wanted < 1 ? 1 : wanted > (long)DEVICES_MAX ? (long)DEVICES_MAX : wanted);
    settings.fast = mode && strcmp(mode, "fast") == 0;
    settings.seed = seed ? strtoull(seed, NULL, 0) : 1;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    long workers = threads ? strtol(threads, NULL, 0) : online;
    settings.workers = (unsigned)(workers < 1 ? 1 : workers > (long)WORKERS_MAX ? (long)WORKERS_MAX : workers);
}

/* ---- Text ---- */

/* Functions and source lines of an address of the program, by binutils where they are installed. */
static void add_address(char *text, size_t capacity, void *address) {
    Dl_info info;
    if (!address || !dladdr(address, &info) || !info.dli_fname)
        return;
    size_t length = strlen(text);
    uintptr_t offset = (uintptr_t)address - (uintptr_t)info.dli_fbase - 1;
    snprintf(text + length, capacity - length, "  at %s+0x%zx\n", info.dli_fname, (size_t)offset);
    char command[1024], line[512];
    snprintf(command, sizeof(command), "addr2line -Cfpie '%s' 0x%zx 2>/dev/null", info.dli_fname, (size_t)offset);
    FILE *pipe = popen(command, "r");
    if (!pipe)
        return;
    while (fgets(line, sizeof(line), pipe)) {
        length = strlen(text);
        snprintf(text + length, capacity - length, "    %s", line);
    }
    pclose(pipe);
}

static void add_place(char *text, size_t capacity, const struct place *place) {
    size_t length = strlen(text);
    if (place && place->file)
        snprintf(text + length, capacity - length, "  at %s:%d\n", place->file, place->line);
    else if (place)
        add_address(text, capacity, place->address);
}

static void add_thread(char *text, size_t capacity, const struct worker *worker) {
    const struct thread *t = worker->current;
    size_t length = strlen(text);
    snprintf(text + length, capacity - length, "  kernel %s, block (%u, %u, %u), thread (%u, %u, %u), seed %llu\n",
        worker->launch->name, worker->block_index.x, worker->block_index.y, worker->block_index.z, t->index.x,
        t->index.y, t->index.z, (unsigned long long)settings.seed);
}

static void record(const struct worker *worker, const struct place *place, const char *format, va_list arguments) {
    static char text[sizeof(fault_text)];
    pthread_mutex_lock(&fault_lock);
    strcpy(text, "emulator: ");
    vsnprintf(text + 10, sizeof(text) - 10, format, arguments);
    size_t length = strlen(text);
    snprintf(text + length, sizeof(text) - length, "\n");
    if (worker)
        add_thread(text, sizeof(text), worker);
    bool first = fault_text[0] == 0;
    if (first)
        add_place(text, sizeof(text), place);
    if (first)
        strcpy(fault_text, text);
    if (!quiet)
        fputs(text, stderr);
    pthread_mutex_unlock(&fault_lock);
}

void fault_raise(const struct place *place, const char *format, ...) {
    struct worker *worker = worker_running;
    thread_checked = NULL;
    va_list arguments;
    va_start(arguments, format);
    record(worker, place, format, arguments);
    va_end(arguments);
    if (!worker)
        return;
    worker->fault = true;
    if (worker->in_block) {
        void *given_up;
        fiber_switch(&given_up, worker->main_stack_pointer);
    }
}

void fault_host(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    record(NULL, NULL, format, arguments);
    va_end(arguments);
}

extern "C" const char *emulator_fault(void) {
    return fault_text[0] ? fault_text : NULL;
}

void fault_forget(void) {
    fault_text[0] = 0;
}

extern "C" void emulator_set_quiet(bool quiet_) {
    quiet = quiet_;
}

/* ---- Signals: the host touching device memory, a fiber's stack running over ---- */

static struct sigaction previous_action;

static void write_text(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

static void on_signal(int number, siginfo_t *info, void *context) {
    char text[512], what[256];
    if (memory_arena && memory_is_device(info->si_addr)) {
        memory_describe(info->si_addr, what, sizeof(what));
        snprintf(text, sizeof(text), "emulator: the host touches device memory: %s\n", what);
        write_text(text);
        signal(SIGABRT, SIG_DFL);
        abort();
    }
    if (worker_running) {
        snprintf(text, sizeof(text), "emulator: bad address %p in kernel %s (a stack of a thread has %d bytes)\n",
            info->si_addr, worker_running->launch->name, FIBER_STACK_BYTES);
        write_text(text);
    }
    if (previous_action.sa_flags & SA_SIGINFO)
        previous_action.sa_sigaction(number, info, context);
    signal(number, SIG_DFL); /* and the instruction runs again */
}

extern "C" void fault_signal_stack(void) {
    enum { BYTES = 64 * 1024 };
    stack_t stack = {};
    stack_t old = {};
    if (sigaltstack(NULL, &old) == 0 && !(old.ss_flags & SS_DISABLE))
        return;
    stack.ss_sp = malloc(BYTES);
    stack.ss_size = BYTES;
    sigaltstack(&stack, NULL);
}

extern "C" void emulator_catch_signals(void) {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    fault_signal_stack();
    sigaction(SIGSEGV, &action, &previous_action);
}
