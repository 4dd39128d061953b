/* SPDX-License-Identifier: Apache-2.0
 *
 * What a network is before its first step.
 */
#ifndef POLICY_TRAIN_START_H
#define POLICY_TRAIN_START_H

#include "policy/train/train.h"

/* A network of the options' shape for a model, with its defaults, and weights that are small and random. NULL:
 * ERROR_INVALID, ERROR_MEMORY. */
struct policy_network *network_start(
    const struct train_options *options, const struct model *model, struct error *error);
/* FEATURES_CONTENT, once mean and scale are known: scores begin as ln A, as h2o's (where the network has that input;
 * else that of the mean). */
void network_start_skip(struct policy_network *network);
/* Content maps for keys that are whitened: every number of content has about the spread of a key's. */
void network_start_content(struct policy_network *network, uint64_t seed);

#endif
