/* SPDX-License-Identifier: Apache-2.0
 *
 * The cases of tests/data/mlp.json as networks with FEATURES_PAPER. Inputs are normalised already (train_slots.standard
 * NULL).
 */
#ifndef TESTS_UNIT_MLP_CASE_H
#define TESTS_UNIT_MLP_CASE_H

#include "policy/network.h"

#include <jansson.h>

struct mlp_case {
    const json_t *object;
    const char *name;
    struct policy_network *network; /* with the case's parameters; arrays that it lacks are 0 */
    uint32_t count;                 /* slots */
    float *inputs;                  /* [count][F] */
    float *scores, *d_scores;       /* [count] */
};

json_t *mlp_load(void); /* the file */
uint32_t mlp_cases(const json_t *root);
struct mlp_case mlp_case_open(const json_t *root, uint32_t index);
void mlp_case_close(struct mlp_case *mlp);

/* The numbers of a list of any depth, flat; the caller frees them. */
float *mlp_numbers(const json_t *list, size_t *count);

#endif
