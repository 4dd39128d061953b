/* SPDX-License-Identifier: Apache-2.0 */
#include "store/records.h"

#include <stdio.h>

struct policy_reader {
    policy_each each;
    void *context;
    bool found;
};

static int policy_row(void *context, const struct row *row) {
    struct policy_reader *reader = context;
    struct policy_record policy = {
        .name = row_text(row, 0), .job = row_text(row, 1), .file = row_text(row, 2), .created = row_integer(row, 3)};
    reader->found = true;
    return reader->each(reader->context, &policy);
}

int policies_insert(struct database *database, const struct policy_record *policy, struct error *error) {
    int changed = database_run(database, error,
        "INSERT INTO policies(name, job, file, created) VALUES(?, ?, ?, ?) ON CONFLICT(name) DO UPDATE SET job = "
        "excluded.job, file = excluded.file, created = excluded.created",
        "ttti", policy->name, policy->job, policy->file, policy->created);
    return changed < 0 ? changed : 0;
}

int policies_list(struct database *database, policy_each each, void *context, struct error *error) {
    struct policy_reader reader = {.each = each, .context = context};
    return database_query(database, error, policy_row, &reader,
        "SELECT name, job, file, created FROM policies ORDER BY created, name", "");
}

int policies_find(struct database *database, const char *name, policy_each each, void *context, struct error *error) {
    struct policy_reader reader = {.each = each, .context = context};
    int code = database_query(database, error, policy_row, &reader,
        "SELECT name, job, file, created FROM policies WHERE name = ?", "t", name);
    return code < 0 ? code : reader.found;
}

int policies_delete(struct database *database, const char *name, struct error *error) {
    return database_run(database, error, "DELETE FROM policies WHERE name = ?", "t", name);
}

int settings_set(struct database *database, const char *key, const char *value, struct error *error) {
    int changed =
        value == NULL || value[0] == '\0'
            ? database_run(database, error, "DELETE FROM settings WHERE key = ?", "t", key)
            : database_run(database, error,
                  "INSERT INTO settings(key, value) VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
                  "tt", key, value);
    return changed < 0 ? changed : 0;
}

struct setting {
    char *out;
    size_t size;
};

static int setting_row(void *context, const struct row *row) {
    const struct setting *setting = context;
    snprintf(setting->out, setting->size, "%s", row_text(row, 0));
    return 1;
}

int settings_get(struct database *database, const char *key, char *out, size_t size, struct error *error) {
    struct setting setting = {.out = out, .size = size};
    out[0] = '\0';
    int code =
        database_query(database, error, setting_row, &setting, "SELECT value FROM settings WHERE key = ?", "t", key);
    return code < 0 ? code : 0;
}
