/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/replace_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A new file, synced; errno says why not. */
static bool write_new(const char *file, bool (*write)(void *context, FILE *out), void *context) {
    FILE *out = fopen(file, "wbe");
    if (out == NULL)
        return false;
    bool written = write(context, out) && fflush(out) == 0 && fsync(fileno(out)) == 0;
    int reason = errno;
    if (fclose(out) != 0 && written)
        return false;
    errno = reason;
    return written;
}

/* So that the new name is there after a power failure, too. Changes the text. */
static int sync_folder(char *file) {
    char *slash = strrchr(file, '/');
    if (slash != NULL)
        slash[slash == file] = '\0';
    int descriptor = open(slash != NULL ? file : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0)
        return -1;
    int failed = fsync(descriptor), reason = errno;
    close(descriptor);
    errno = reason;
    return failed;
}

int replace_file(const char *file, bool (*write)(void *context, FILE *out), void *context, struct error *error) {
    char *temporary = NULL;
    int code = 0;
    if (asprintf(&temporary, "%s.tmp", file) < 0)
        return error_set(error, ERROR_MEMORY, "no memory to write %.200s", file);
    if (!write_new(temporary, write, context)) {
        code = error_set(error, ERROR_IO, "cannot write %.200s: %s", temporary, strerror(errno));
        unlink(temporary);
    } else if (rename(temporary, file) != 0) {
        code = error_set(error, ERROR_IO, "cannot rename %.200s to %.200s: %s", temporary, file, strerror(errno));
        unlink(temporary);
    } else if (sync_folder(temporary) != 0) {
        code = error_set(error, ERROR_IO, "cannot sync the folder of %.200s: %s", file, strerror(errno));
    }
    free(temporary);
    return code;
}
