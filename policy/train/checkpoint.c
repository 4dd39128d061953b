/* SPDX-License-Identifier: Apache-2.0
 *
 * One walk over the state serves writing and reading: what is written is what is read.
 */
#include "policy/train/checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/replace_file.h"

static const char magic[] = "distillcache-training-1\n";
enum { DESCRIPTION_MAX = 1 << 16 };

struct stream {
    FILE *file;
    bool writing;
    bool failed;
    uint64_t hash; /* FNV-1a of the bytes so far */
};

static void walk_bytes(struct stream *stream, void *bytes, size_t count) {
    unsigned char *at = bytes;
    if (stream->failed)
        return;
    size_t moved = stream->writing ? fwrite(bytes, 1, count, stream->file) : fread(bytes, 1, count, stream->file);
    stream->failed = moved != count;
    for (size_t i = 0; i < moved; i++)
        stream->hash = (stream->hash ^ at[i]) * UINT64_C(0x100000001b3);
}

/* All arrays, those that are not trained too. */
static void walk_network(struct stream *stream, const struct policy_network *network) {
    struct network_array array;
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        walk_bytes(stream, array.values, array.count * sizeof *array.values);
    /* Defaults that a stage may have learned. */
    struct policy_network *owned = (struct policy_network *)network;
    walk_bytes(stream, &owned->floor, sizeof owned->floor);
}

/* One that may be NULL. */
static void walk_optional(struct stream *stream, struct run_state *state, struct policy_network **network) {
    uint8_t there = *network != NULL;
    walk_bytes(stream, &there, sizeof there);
    if (there == 0 || stream->failed)
        return;
    if (*network == NULL)
        *network = network_copy(state->training.network);
    if (*network == NULL)
        stream->failed = true;
    else
        walk_network(stream, *network);
}

static void walk_optimiser(struct stream *stream, struct adamw *adamw) {
    walk_bytes(stream, &adamw->step, sizeof adamw->step);
    walk_bytes(stream, adamw->first, adamw->count * sizeof *adamw->first);
    walk_bytes(stream, adamw->second, adamw->count * sizeof *adamw->second);
}

static void walk(struct stream *stream, struct run_state *state) {
    struct training *training = &state->training;
    walk_bytes(stream, &training->stage, sizeof training->stage);
    walk_bytes(stream, &training->stage_step, sizeof training->stage_step);
    walk_bytes(stream, &training->step, sizeof training->step);
    walk_bytes(stream, &training->tokens, sizeof training->tokens);
    walk_bytes(stream, training->baselines, TRAIN_RATIOS_MAX * sizeof *training->baselines);
    walk_network(stream, training->network);
    walk_optimiser(stream, training->adamw);
    walk_optional(stream, state, &training->stage_network);
    walk_optional(stream, state, &state->best);
    walk_bytes(stream, &state->sums, sizeof state->sums);
    walk_bytes(stream, &state->settled, sizeof state->settled);
    walk_bytes(stream, &state->best_at, sizeof state->best_at);
    walk_bytes(stream, &state->validated_count, sizeof state->validated_count);
    if (state->validated_count > VALIDATED_MAX)
        stream->failed = true;
    else
        walk_bytes(stream, state->validated, state->validated_count * sizeof *state->validated);
}

/* ---- description ---- */

static const char *base_name(const char *path) {
    const char *slash = path == NULL ? NULL : strrchr(path, '/');
    return path == NULL ? "" : slash != NULL ? slash + 1 : path;
}

char *checkpoint_describe(const struct training *training) {
    char *text = NULL, value[256];
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL)
        return NULL;
    for (uint32_t i = 0; i < train_options_count(); i++) {
        train_option_value(i, training->options, value, sizeof value);
        fprintf(out, "%s=%s\n", train_option_name(i), value);
    }
    fprintf(out, "data=%s\n", base_name(training->run->data));
    fprintf(out, "valid=%s\n", base_name(training->run->valid));
    fprintf(out, "tokens=%llu\n", (unsigned long long)dataset_tokens(training->dataset));
    fprintf(out, "model=%s\n", training->network->fingerprint);
    bool failed = ferror(out) != 0;
    if (fclose(out) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}

/* The first line in which they differ. */
static int refuse_other(const char *file, const char *had, const char *wanted, struct error *error) {
    while (*had != '\0' && *wanted != '\0') {
        size_t a = strcspn(had, "\n"), b = strcspn(wanted, "\n");
        if (a != b || memcmp(had, wanted, a) != 0)
            return error_set(error, ERROR_INVALID, "%.120s: the run was begun with %.*s, not %.*s", file,
                (int)(a < 80 ? a : 80), had, (int)(b < 80 ? b : 80), wanted);
        had += a + (had[a] == '\n');
        wanted += b + (wanted[b] == '\n');
    }
    return error_set(error, ERROR_INVALID, "%.120s: the run was begun with other options", file);
}

/* ---- files ---- */

static char *state_file(const struct run_state *state) {
    char *name = NULL;
    return asprintf(&name, "%s/checkpoint.state", state->training.run->directory) < 0 ? NULL : name;
}

struct writing {
    const struct run_state *state;
    char *description;
};

static bool write_state(void *context, FILE *file) {
    const struct writing *writing = context;
    struct stream stream = {.file = file, .writing = true, .hash = UINT64_C(0xcbf29ce484222325)};
    uint64_t length = strlen(writing->description);
    walk_bytes(&stream, (char *)magic, sizeof magic - 1);
    walk_bytes(&stream, &length, sizeof length);
    walk_bytes(&stream, writing->description, length);
    walk(&stream, (struct run_state *)writing->state); /* writing changes nothing */
    uint64_t hash = stream.hash;
    walk_bytes(&stream, &hash, sizeof hash);
    return !stream.failed;
}

int checkpoint_save(const struct run_state *state, struct error *error) {
    char *name = state_file(state);
    struct writing writing = {state, checkpoint_describe(&state->training)};
    int code = name == NULL || writing.description == NULL
                   ? error_set(error, ERROR_MEMORY, "no memory for a checkpoint")
                   : replace_file(name, write_state, &writing, error);
    free(name);
    free(writing.description);
    return code;
}

/* 0: the description is this run's. */
static int read_description(struct stream *stream, const char *name, const char *wanted, struct error *error) {
    char head[sizeof magic] = "";
    uint64_t length = 0;
    walk_bytes(stream, head, sizeof magic - 1);
    walk_bytes(stream, &length, sizeof length);
    if (stream->failed || memcmp(head, magic, sizeof magic - 1) != 0 || length > DESCRIPTION_MAX)
        return error_set(error, ERROR_FORMAT, "%.300s: not the checkpoint of a training", name);
    char *had = calloc(1, length + 1);
    if (had == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a checkpoint");
    walk_bytes(stream, had, length);
    int code = 0;
    if (!stream->failed && strcmp(had, wanted) != 0)
        code = refuse_other(name, had, wanted, error);
    free(had);
    return code;
}

static int read_state(struct run_state *state, FILE *file, const char *name, const char *wanted, struct error *error) {
    struct stream stream = {.file = file, .hash = UINT64_C(0xcbf29ce484222325)};
    int code = read_description(&stream, name, wanted, error);
    if (code != 0)
        return code;
    walk(&stream, state);
    uint64_t hash = stream.hash, stored = 0;
    walk_bytes(&stream, &stored, sizeof stored);
    if (stream.failed || hash != stored || fgetc(file) != EOF)
        return error_set(error, ERROR_FORMAT, "%.300s: the checkpoint is not whole", name);
    return 0;
}

int checkpoint_load(struct run_state *state, struct error *error) {
    char *name = state_file(state), *wanted = checkpoint_describe(&state->training);
    int code = 0;
    if (name == NULL || wanted == NULL) {
        code = error_set(error, ERROR_MEMORY, "no memory for a checkpoint");
        goto out;
    }
    FILE *file = fopen(name, "rbe");
    if (file == NULL) {
        code = errno == ENOENT ? 1 : error_set(error, ERROR_IO, "cannot open %.300s: %s", name, strerror(errno));
        goto out;
    }
    code = read_state(state, file, name, wanted, error);
    fclose(file);
out:
    free(name);
    free(wanted);
    return code;
}
