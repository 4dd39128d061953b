/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/plot_files.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { NAME_MAX_BYTES = 80 };

int plot_folder_create(const char *folder, struct error *error) {
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return error_set(error, ERROR_IO, "cannot create folder %.200s: %s", folder, strerror(errno));
    return 0;
}

FILE *plot_file_open(
    const char *folder, const char *prefix, const char *name, const char *ending, struct error *error) {
    char safe[NAME_MAX_BYTES + 1], *path = NULL;
    size_t length = 0;
    for (; name[length] != '\0' && length < NAME_MAX_BYTES; length++)
        safe[length] = isalnum((unsigned char)name[length]) || strchr(".-", name[length]) ? name[length] : '_';
    safe[length] = '\0';
    if (asprintf(&path, "%s/%s-%s.%s", folder, prefix, safe, ending) < 0) {
        error_set(error, ERROR_MEMORY, "no memory for a file name");
        return NULL;
    }
    FILE *file = fopen(path, "we");
    if (file == NULL)
        error_set(error, ERROR_IO, "cannot create %.200s: %s", path, strerror(errno));
    free(path);
    return file;
}

int plot_file_close(FILE *file, const char *folder, struct error *error) {
    bool failed = ferror(file) != 0;
    if (fclose(file) != 0 || failed)
        return error_set(error, ERROR_IO, "cannot write a file in %.200s: %s", folder, strerror(errno));
    return 0;
}

bool plot_is_first(const struct eval_setup *setup, uint32_t variant) {
    for (uint32_t v = 0; v < variant; v++)
        if (strcmp(setup->variants[v].policy, setup->variants[variant].policy) == 0)
            return false;
    return true;
}

void plot_describe_budget(const struct eval_variant *variant, char *text, size_t size) {
    if (variant->settings.tokens == 0)
        snprintf(text, size, "%.4g", variant->ratio);
    else
        snprintf(text, size, "%u tokens", variant->settings.tokens);
}
