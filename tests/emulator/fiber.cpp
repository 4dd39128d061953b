/* SPDX-License-Identifier: Apache-2.0 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if !defined(__x86_64__)
#error "the emulator switches fibers by a few lines of x86-64 assembly: add those of this machine"
#endif

/* Registers that a call preserves in the System V ABI go to the stack, then the stacks are swapped. */
asm(R"(
.text
.globl fiber_switch
.type fiber_switch, @function
fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size fiber_switch, . - fiber_switch
)");

enum { STACK_GUARD_BYTES = 4096 };

void fiber_reset(struct fiber *fiber, void (*start)(void)) {
    /* Tops are spread over the cache's sets: stacks of equal offsets would evict each other. */
    uintptr_t top = (uintptr_t)fiber->stack + FIBER_STACK_BYTES - fiber->number * 320 % 4096;
    void **at = (void **)(top & ~(uintptr_t)63);
    *--at = NULL; /* return address of start: none */
    *--at = (void *)start;
    for (int i = 0; i < 6; i++)
        *--at = NULL;
    fiber->stack_pointer = at;
}

void fiber_create_all(struct fiber *fibers, unsigned count) {
    size_t each = FIBER_STACK_BYTES + STACK_GUARD_BYTES;
    char *stacks =
        (char *)mmap(NULL, count * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED)
        abort();
    for (unsigned i = 0; i < count; i++) {
        mprotect(stacks + i * each, STACK_GUARD_BYTES, PROT_NONE);
        fibers[i].stack = stacks + i * each + STACK_GUARD_BYTES;
        fibers[i].number = i;
    }
}
