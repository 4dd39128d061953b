/* SPDX-License-Identifier: Apache-2.0
 *
 * Trained policies by name: the one that ships for the model ("shipped"), and those that jobs have made. Requests
 * choose them as `kv_cache: {"policy": "distillcache:NAME"}`; one of them is active, which is the one that
 * `distillcache` means without a name, in requests and as the server's own policy. Their networks are in memory, so
 * that a request reads no file, and counted by references: a sequence keeps its own whatever happens here.
 *
 * Any thread.
 */
#ifndef SERVER_POLICY_TABLE_H
#define SERVER_POLICY_TABLE_H

#include "policy/network.h"
#include "policy/policy.h"
#include "policy/trained.h"

enum { POLICY_NAME_MAX = 128 };
extern const char policy_shipped_name[]; /* "shipped" */

struct policy_table; /* opaque */

struct policy_entry {
    char name[POLICY_NAME_MAX];
    char job[64];         /* empty: none */
    char fingerprint[65]; /* of the model that it was trained for */
    char method[32];      /* "distillcache", "ranker", ...; empty: its file cannot be used */
    char problem[256];    /* why its file cannot be used; empty: it can */
    int64_t created;      /* microseconds of Unix time; 0: shipped */
    uint64_t bytes;       /* of the file */
    uint64_t parameters;  /* trained numbers */
    bool active;
    struct policy_network *network; /* a reference; NULL with a problem */
};

struct policy_table *policy_table_create(const struct policy_model *model); /* NULL on failed allocation */
void policy_table_free(struct policy_table *table);                         /* NULL allowed */

/* Reads a policy file, checks it against the model, and puts it under its name, in place of one that was there. A file
 * that cannot be used is listed with its problem; the error says it too. */
int policy_table_load(struct policy_table *table, const char *name, const char *file, const char *job, int64_t created,
    struct error *error);
/* The one that ships for the model, if there is one. */
void policy_table_load_shipped(struct policy_table *table);
/* Whether a file could be put into the table. */
int policy_table_check_file(const struct policy_table *table, const char *file, struct error *error);

/* ERROR_INVALID: no usable policy of that name. name NULL or empty: none is active. */
int policy_table_activate(struct policy_table *table, const char *name, struct error *error);
/* ERROR_INVALID: none of that name. */
int policy_table_remove(struct policy_table *table, const char *name, struct error *error);

/* Entries by index, in the order of names' first appearance: false when there are no more. The entry's network is not
 * given. */
bool policy_table_at(struct policy_table *table, uint32_t index, struct policy_entry *out);
bool policy_table_find(struct policy_table *table, const char *name, struct policy_entry *out);

/* The server's own settings as the configuration has them, copied: without a network that no file or name there gave.
 * Once, before others are served. */
void policy_table_set_own(struct policy_table *table, const struct policy_settings *own);
/* The server's own settings as they are now, resolved, but that they may want a network that there is not (any more):
 * to be released. */
void policy_table_own(struct policy_table *table, struct policy_settings *settings);
/* Gives settings the network or the gates of that name. NULL: where distillcache scores, the active network, or else
 * the one that ships. ERROR_INVALID: there is no such name, it cannot be used, or the policy cannot use it. The
 * settings are then to be resolved (policy_settings_resolve). */
int policy_table_apply(
    struct policy_table *table, const char *name, struct policy_settings *settings, struct error *error);
/* That, for texts of policies. files: they may name files too. */
struct trained_policies policy_table_names(struct policy_table *table, bool files);

#endif
