/* SPDX-License-Identifier: Apache-2.0
 *
 * Random networks of policies for tests, and files of them.
 */
#ifndef TESTS_TINY_NETWORK_H
#define TESTS_TINY_NETWORK_H

#include "policy/network.h"

/* All inputs, content 4 (paper: none), hidden 8. */
struct network_shape tiny_network_shape(
    enum network_features features, uint32_t layers, uint32_t kv_heads, uint32_t head_dim);

/* Every array random, layer budgets from 0.5 to 1.5 excepted what makes their mean 1. Method distillcache, no
 * fingerprint, other defaults as network_create says. */
struct policy_network *tiny_network_create(const struct network_shape *shape, uint32_t seed);

/* A new folder under /tmp, in out [64]. */
void tiny_folder_create(char *out);

/* Saves it as the one that ships for this fingerprint and method in the folder, and releases it. */
void tiny_network_ship(struct policy_network *network, const char *folder, const char *fingerprint, const char *method);

/* Removes the folder and the files in it. */
void tiny_folder_remove(const char *folder);

#endif
