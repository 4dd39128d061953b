/* SPDX-License-Identifier: Apache-2.0
 *
 * What a thread does between two looks at a number that another thread is about to change.
 */
#ifndef ENGINE_SPIN_H
#define ENGINE_SPIN_H

static inline void spin_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
