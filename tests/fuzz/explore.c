/* SPDX-License-Identifier: Apache-2.0
 *
 * Linked into libFuzzer programs: with DISTILLCACHE_TEST_SEEDS=FOLDER in the environment the program writes its seeds
 * there, as the plain driver's --write-seeds does, and ends.
 */
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerInitialize(int *count, char ***arguments);

static void write_seed(const char *folder, unsigned index, const uint8_t *data, size_t bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/seed-%u", folder, index);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) {
        perror(path);
        exit(2);
    }
}

int LLVMFuzzerInitialize(int *count, char ***arguments) {
    const char *folder = getenv("DISTILLCACHE_TEST_SEEDS");
    uint8_t *data;
    size_t bytes;
    (void)count;
    (void)arguments;
    if (folder == NULL)
        return 0;
    for (unsigned i = 0; (data = fuzz_seed(i, &bytes)) != NULL; i++) {
        write_seed(folder, i, data, bytes);
        free(data);
    }
    exit(0);
}
