/* SPDX-License-Identifier: Apache-2.0
 *
 * Networks that ship with the program (network.h). A file is read once and shared: those last used are kept, and read
 * again only when the file is another one.
 */
#include "policy/network.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PATH_SIZE = 4096, KEPT_MAX = 8 };

struct kept {
    char *path;
    struct stat status;
    struct policy_network *network;
};

static struct {
    pthread_mutex_t lock;
    struct kept kept[KEPT_MAX];
    uint32_t next; /* to be replaced */
} shipped = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static struct kept *find_kept(const char *path) {
    for (uint32_t i = 0; i < KEPT_MAX; i++)
        if (shipped.kept[i].path != NULL && strcmp(shipped.kept[i].path, path) == 0)
            return &shipped.kept[i];
    return NULL;
}

/* Keeps a reference of its own; without memory it is not kept, and read again the next time. */
static void keep(const char *path, const struct stat *status, struct policy_network *network) {
    struct kept *kept = find_kept(path);
    char *copy = strdup(path);
    if (copy == NULL)
        return;
    if (kept == NULL) {
        kept = &shipped.kept[shipped.next];
        shipped.next = (shipped.next + 1) % KEPT_MAX;
    }
    free(kept->path);
    network_release(kept->network);
    *kept = (struct kept){.path = copy, .status = *status, .network = network_take(network)};
}

static struct policy_network *load_locked(const char *path, const struct stat *status, struct error *error) {
    struct kept *kept = find_kept(path);
    if (kept != NULL && same_file(&kept->status, status))
        return network_take(kept->network);
    struct policy_network *network = network_load(path, error);
    if (network != NULL)
        keep(path, status, network);
    return network;
}

static struct policy_network *load(const char *path, const struct stat *status, struct error *error) {
    pthread_mutex_lock(&shipped.lock);
    struct policy_network *network = load_locked(path, status, error);
    pthread_mutex_unlock(&shipped.lock);
    return network;
}

/* Whether there is such a file in the folder. */
static bool find_file(
    const char *folder, const char *fingerprint, const char *method, char path[static PATH_SIZE], struct stat *status) {
    const char *suffix = strcmp(method, "ranker") == 0 ? "-ranker" : "";
    int length = snprintf(path, PATH_SIZE, "%s/%s%s.safetensors", folder, fingerprint, suffix);
    return length > 0 && length < PATH_SIZE && stat(path, status) == 0;
}

struct policy_network *network_load_shipped(const char *fingerprint, const char *method, struct error *error) {
    char path[PATH_SIZE];
    struct stat status;
    const char *chosen = getenv("DISTILLCACHE_POLICIES");
    bool named = fingerprint[0] != '\0' && fingerprint[strspn(fingerprint, "0123456789abcdef")] == '\0';
    bool found = named && chosen != NULL && find_file(chosen, fingerprint, method, path, &status);
    if (named && chosen == NULL)
        found = find_file(POLICIES_SOURCE, fingerprint, method, path, &status) ||
                find_file(POLICIES_INSTALLED, fingerprint, method, path, &status);
    if (found)
        return load(path, &status, error);
    error_set(error, ERROR_IO,
        "no policy %s is trained for this model (fingerprint %.12s); train one with `distillcache train`, or name a "
        "policy file",
        method, fingerprint);
    return NULL;
}
