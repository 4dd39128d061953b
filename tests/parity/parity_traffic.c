/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/parity_traffic.h"

#include "tests/emulator/emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static const double limit = 1.2, sector = 32, passes_limit = 1.1;

void traffic_begin(struct parity *parity) {
    parity->operations->synchronize(parity->backend);
    emulator_traffic_reset();
}

/* bytes 0: each sector once. */
static void check(struct parity *parity, const char *kernel, double bytes, double passes, const char *what) {
    struct emulator_traffic traffic;
    parity->operations->synchronize(parity->backend);
    if (emulator_fast()) {
        parity_skip(parity, "the emulator counts nothing in fast mode");
        return;
    }
    if (!parity_check_true(parity, emulator_traffic_read(kernel, &traffic), "no kernel %s ran: %s", kernel, what))
        return;
    double moved = sector * (double)(traffic.sectors_read + traffic.sectors_written + traffic.sectors_atomic);
    double least = bytes > 0 ? bytes : sector * (double)(traffic.unique_read + traffic.unique_written);
    double wavefronts = (double)traffic.shared_wavefronts, ideal = (double)traffic.shared_ideal;
    parity_check_true(parity, moved > 0 && moved <= limit * least, "%s moves %.0f bytes, %.2f times %.0f: %s", kernel,
        moved, moved / least, least, what);
    parity_check_true(parity, wavefronts <= passes * ideal,
        "%s takes %.0f passes of shared memory where %.0f would do: %s", kernel, wavefronts, ideal, what);
    if (getenv("PARITY_TRAFFIC") != NULL)
        printf("%-28s %-32s %10.0f bytes, %.2f of the least, shared memory %.2f\n", kernel, what, moved, moved / least,
            ideal > 0 ? wavefronts / ideal : 1);
}

void traffic_check(struct parity *parity, const char *kernel, double bytes, const char *what, ...) {
    char text[160];
    va_list arguments;
    va_start(arguments, what);
    vsnprintf(text, sizeof text, what, arguments);
    va_end(arguments);
    check(parity, kernel, bytes, passes_limit, text);
}

void traffic_check_atomics(
    struct parity *parity, const char *kernel, double bytes, double passes, const char *what, ...) {
    char text[160];
    va_list arguments;
    va_start(arguments, what);
    vsnprintf(text, sizeof text, what, arguments);
    va_end(arguments);
    check(parity, kernel, bytes, passes, text);
}

void traffic_check_once(struct parity *parity, const char *kernel, const char *what, ...) {
    char text[160];
    va_list arguments;
    va_start(arguments, what);
    vsnprintf(text, sizeof text, what, arguments);
    va_end(arguments);
    check(parity, kernel, 0, passes_limit, text);
}
