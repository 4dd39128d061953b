/* SPDX-License-Identifier: Apache-2.0
 *
 * Policy files: reading fails with a message, or gives a network of finite numbers that scores slots.
 */
#include "tests/fuzz/fuzz.h"

#include "tests/unit/tiny_network.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLOTS = 3 };

static void expect(bool condition) {
    if (!condition)
        abort();
}

static void check_arrays(const struct policy_network *network) {
    struct network_array array;
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        for (size_t j = 0; j < array.count; j++)
            expect(isfinite(array.values[j]));
    expect(network->scope <= SCOPE_MODEL && network->floor >= 0 && network->floor <= 1);
    expect(network->interval >= 1 && network->interval <= 65536);
}

static void score(const struct policy_network *network) {
    static const uint32_t positions[SLOTS] = {0, 7, 9};
    static const float numbers[SLOTS * NETWORK_CONTENT_MAX] = {0.5f, 2, 0.25f};
    const struct network_slots slots = {.count = SLOTS,
        .seen = 10,
        .budget = 4,
        .positions = positions,
        .sum = numbers,
        .squared = numbers,
        .entropy = numbers,
        .content = numbers,
        .value_norm = numbers,
        .output_norm = numbers};
    float inputs[SLOTS * NETWORK_INPUTS_MAX], scores[SLOTS], standard[6] = {0};
    uint32_t heads = network->shape.layers * network->shape.kv_heads;
    network_gather(&network->shape, &slots, inputs);
    network_standardise(&network->shape, inputs, SLOTS, standard);
    network_normalise(network, heads - 1, standard, SLOTS, inputs);
    network_score(network, heads - 1, inputs, SLOTS, scores);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct error error = {0};
    struct policy_network *network = network_parse(data, bytes, "fuzz.safetensors", &error);
    if (network == NULL) {
        expect(error.code == ERROR_FORMAT || error.code == ERROR_MEMORY);
        expect(error.message[0] != '\0' && strpbrk(error.message, "\n\x1b") == NULL);
        return 0;
    }
    check_arrays(network);
    score(network);
    struct policy_network *copy = network_copy(network);
    network_release(network);
    if (copy != NULL)
        check_arrays(copy);
    network_release(copy);
    return 0;
}

static uint8_t *read_back(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    uint8_t *data = malloc(1 << 16);
    expect(file != NULL && data != NULL);
    *bytes = fread(data, 1, 1 << 16, file);
    fclose(file);
    return data;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    if (index >= 4)
        return NULL;
    char folder[64], path[96];
    struct network_shape shape = tiny_network_shape(index % 2 == 0 ? FEATURES_CONTENT : FEATURES_PAPER, 2, 1, 4);
    shape.hidden = 2;
    if (index >= 2)
        shape.inputs &= 1 << INPUT_MEAN | 1 << INPUT_POSITION;
    struct policy_network *network = tiny_network_create(&shape, index);
    tiny_folder_create(folder);
    snprintf(path, sizeof path, "%s/network", folder);
    expect(network_save(network, path, NULL) == 0);
    network_release(network);
    uint8_t *data = read_back(path, bytes);
    tiny_folder_remove(folder);
    return data;
}
