/* SPDX-License-Identifier: Apache-2.0
 *
 * CPU quotas of control groups (Linux kernel, admin-guide/cgroup-v2.rst, cpu.max; scheduler/sched-bwc.rst for v1).
 */
#include "engine/cpu/threads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 4096 };

/* First line of directory/name; 0 when there is one. */
static int read_line(const char *directory, const char *name, char *line, int bytes) {
    char path[PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return -1;
    int code = fgets(line, bytes, file) != NULL ? 0 : -1;
    fclose(file);
    return code;
}

/* Quotas are in microseconds of CPU time a period; "max" or -1 means none. */
static uint32_t cpus_of(const char *quota_text, const char *period_text) {
    long long quota = strtoll(quota_text, NULL, 10);
    long long period = strtoll(period_text, NULL, 10);
    if (quota <= 0 || period <= 0)
        return UINT32_MAX;
    long long cpus = quota / period;
    if (cpus < 1)
        return 1;
    return cpus < UINT32_MAX ? (uint32_t)cpus : UINT32_MAX;
}

static uint32_t directory_quota(const char *directory) {
    char line[128];
    char period[128];
    if (read_line(directory, "cpu.max", line, sizeof line) == 0) {
        char *space = strchr(line, ' ');
        return cpus_of(line, space != NULL ? space + 1 : "100000");
    }
    if (read_line(directory, "cpu.cfs_quota_us", line, sizeof line) == 0 &&
        read_line(directory, "cpu.cfs_period_us", period, sizeof period) == 0)
        return cpus_of(line, period);
    return UINT32_MAX;
}

/* The tightest quota of root/path and of its ancestors up to root. Inside a container the path may be the host's and
 * lead nowhere; root itself then is the container's own group. */
static uint32_t path_quota(const char *root, const char *path) {
    char directory[PATH_BYTES];
    size_t root_length = strlen(root);
    if (snprintf(directory, sizeof directory, "%s%s", root, path) >= (int)sizeof directory)
        return UINT32_MAX;
    uint32_t least = UINT32_MAX;
    for (;;) {
        uint32_t quota = directory_quota(directory);
        if (quota < least)
            least = quota;
        char *slash = strrchr(directory, '/');
        if (slash == NULL || (size_t)(slash - directory) < root_length)
            return least;
        *slash = '\0';
    }
}

/* Whether the comma-separated list of controllers names cpu. */
static int names_cpu(const char *controllers) {
    for (const char *at = controllers; *at != '\0';) {
        size_t length = strcspn(at, ",");
        if (length == 3 && memcmp(at, "cpu", 3) == 0)
            return 1;
        at += length + (at[length] == ',');
    }
    return 0;
}

/* A line of the membership file is number:controllers:path; version 2 has number 0 and no controllers. */
static uint32_t line_quota(char *line, const char *mount) {
    line[strcspn(line, "\n")] = '\0';
    char *controllers = strchr(line, ':');
    char *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    if (path == NULL)
        return UINT32_MAX;
    *controllers++ = '\0';
    *path++ = '\0';
    if (*controllers == '\0')
        return path_quota(mount, path);
    if (!names_cpu(controllers))
        return UINT32_MAX;
    char root[PATH_BYTES];
    snprintf(root, sizeof root, "%s/%s", mount, controllers);
    uint32_t joined = path_quota(root, path);
    snprintf(root, sizeof root, "%s/cpu", mount);
    uint32_t alone = path_quota(root, path);
    return joined < alone ? joined : alone;
}

uint32_t thread_count_quota(const char *membership, const char *mount) {
    FILE *file = fopen(membership, "re");
    if (file == NULL)
        return UINT32_MAX;
    uint32_t least = UINT32_MAX;
    char line[PATH_BYTES];
    while (fgets(line, sizeof line, file) != NULL) {
        uint32_t quota = line_quota(line, mount);
        if (quota < least)
            least = quota;
    }
    fclose(file);
    return least;
}
