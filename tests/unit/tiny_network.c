/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/tiny_network.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void check(bool condition, const char *what) {
    if (condition)
        return;
    fprintf(stderr, "tiny_network: %s\n", what);
    abort();
}

struct network_shape tiny_network_shape(
    enum network_features features, uint32_t layers, uint32_t kv_heads, uint32_t head_dim) {
    const uint32_t paper =
        1 << INPUT_MEAN | 1 << INPUT_VALUE_NORM | 1 << INPUT_DEVIATION | 1 << INPUT_ENTROPY | 1 << INPUT_POSITION;
    bool content = features == FEATURES_CONTENT;
    return (struct network_shape){
        .features = features,
        .inputs = content ? (1u << INPUT_KINDS) - 1 : paper,
        .content = content ? 4 : 0,
        .hidden = 8,
        .layers = layers,
        .kv_heads = kv_heads,
        .head_dim = head_dim,
    };
}

/* Numbers from -1 to 1. */
static float next_number(uint32_t *state) {
    *state = *state * 1664525 + 1013904223;
    return (float)(*state >> 8) / (1 << 23) - 1;
}

/* Numbers from 0.5 to 1.5 with the mean 1: pairs that add up to 2. */
static void fill_layer_budgets(struct policy_network *network, uint32_t *state) {
    for (uint32_t layer = 0; layer + 1 < network->shape.layers; layer += 2) {
        network->layer_budgets[layer] = 1 + 0.5f * next_number(state);
        network->layer_budgets[layer + 1] = 2 - network->layer_budgets[layer];
    }
}

struct policy_network *tiny_network_create(const struct network_shape *shape, uint32_t seed) {
    struct policy_network *network = network_create(shape, NULL);
    struct network_array array;
    check(network != NULL, "no network");
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        for (size_t j = 0; j < array.count && strncmp(array.name, "layer_budget", 12) != 0; j++)
            array.values[j] = next_number(&seed);
    fill_layer_budgets(network, &seed);
    network->method = strdup("distillcache");
    return network;
}

void tiny_folder_create(char *out) {
    strcpy(out, "/tmp/tiny_network_XXXXXX");
    check(mkdtemp(out) != NULL, "no folder");
}

void tiny_network_ship(
    struct policy_network *network, const char *folder, const char *fingerprint, const char *method) {
    char path[256];
    struct error error = {.message = ""};
    const char *suffix = strcmp(method, "ranker") == 0 ? "-ranker" : "";
    snprintf(network->fingerprint, sizeof network->fingerprint, "%s", fingerprint);
    free(network->method);
    network->method = strdup(method);
    snprintf(path, sizeof path, "%s/%s%s.safetensors", folder, fingerprint, suffix);
    check(network_save(network, path, &error) == 0, error.message);
    network_release(network);
}

void tiny_folder_remove(const char *folder) {
    DIR *entries = opendir(folder);
    check(entries != NULL, "the folder is gone");
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] != '.')
            unlink(path);
    }
    closedir(entries);
    rmdir(folder);
}
