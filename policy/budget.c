/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/budget.h"

#include "engine/backend.h"
#include "policy/network.h"
#include "policy/order.h"

#include <math.h>

static uint32_t min_u32(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

static uint32_t max_u32(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

/* The number that a float option was written as: a float 0.7 is a little less. */
static double decimal(float value) {
    return nearbyint((double)value * 1e6) / 1e6;
}

uint32_t budget_part(float part, uint32_t whole) {
    return (uint32_t)fmin(floor(fmax(decimal(part), 0) * whole + 1e-9), whole);
}

/* ---- shares ---- */

/* Numbers, or a line over the index: nothing here allocates, so that a budget never fails. */
struct weights {
    const double *values;
    /* Where there are no values: those of the network's layers at a level. */
    const struct policy_network *network;
    const uint32_t *numbers; /* of its layers; NULL: 0, 1, ... */
    double level;
    /* Without either: first - fall * index / (count - 1). */
    double first, fall;
    uint32_t count;
};

static double weight_at(const struct weights *weights, uint32_t i) {
    double weight = weights->first - weights->fall * i / max_u32(weights->count - 1, 1);
    if (weights->values != NULL)
        weight = weights->values[i];
    else if (weights->network != NULL)
        weight =
            network_layer_budget(weights->network, weights->numbers != NULL ? weights->numbers[i] : i, weights->level);
    return isfinite(weight) && weight > 0 ? weight : 0;
}

/* What is left for those that are not capped yet: out[i] == cap marks a capped one while sharing. */
struct shares {
    const struct weights *weights;
    uint32_t *out;
    uint32_t cap;
    double rest, sum; /* of what is free */
    uint32_t free_count;
};

static void sum_free(struct shares *shares, uint64_t total) {
    shares->sum = 0;
    shares->free_count = 0;
    for (uint32_t i = 0; i < shares->weights->count; i++)
        if (shares->out[i] != shares->cap) {
            shares->free_count++;
            shares->sum += weight_at(shares->weights, i);
        }
    shares->rest = (double)total - (double)shares->cap * (shares->weights->count - shares->free_count);
}

static double share_at(const struct shares *shares, uint32_t i) {
    if (shares->sum > 0)
        return shares->rest * weight_at(shares->weights, i) / shares->sum;
    return shares->rest / shares->free_count;
}

/* Caps every share above the cap. Whether there was any. */
static bool cap_shares(struct shares *shares) {
    bool any = false;
    for (uint32_t i = 0; i < shares->weights->count; i++)
        if (shares->out[i] != shares->cap && share_at(shares, i) > shares->cap) {
            shares->out[i] = shares->cap;
            any = true;
        }
    return any;
}

/* What share i, not capped, has beyond its whole part, in units of 1e-9; -1: it cannot be rounded up. */
static int64_t remainder_at(const struct shares *shares, uint32_t i) {
    if (shares->out[i] == shares->cap)
        return -1;
    double share = share_at(shares, i), whole = floor(share + 1e-9);
    return whole < shares->cap ? llrint((share - whole) * 1e9) : -1;
}

static uint32_t count_remainders(const struct shares *shares, int64_t least) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < shares->weights->count; i++)
        count += remainder_at(shares, i) >= least;
    return count;
}

/* The `left` largest remainders are those above *least, and as many equal to it as *equal says. */
static void find_least_remainder(const struct shares *shares, uint32_t left, int64_t *least, uint32_t *equal) {
    int64_t low = -2, high = 1000000001; /* count(low) >= left > count(high) */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (count_remainders(shares, middle) >= left)
            low = middle;
        else
            high = middle;
    }
    *least = low;
    *equal = left - count_remainders(shares, low + 1);
}

static void round_shares(struct shares *shares, uint64_t total) {
    uint32_t count = shares->weights->count, equal = 0;
    uint64_t whole = 0;
    int64_t least = INT64_MAX;
    for (uint32_t i = 0; i < count; i++)
        whole += shares->out[i] == shares->cap ? shares->cap : (uint64_t)floor(share_at(shares, i) + 1e-9);
    if (total > whole)
        find_least_remainder(shares, (uint32_t)(total - whole < count ? total - whole : count), &least, &equal);
    for (uint32_t i = 0; i < count; i++) {
        if (shares->out[i] == shares->cap)
            continue;
        int64_t beyond = remainder_at(shares, i);
        bool up = beyond >= 0 && (beyond > least || (beyond == least && equal > 0));
        equal -= up && beyond == least;
        /* A share that is rounded to the cap is marked as capped: nothing reads it after this. */
        shares->out[i] = (uint32_t)floor(share_at(shares, i) + 1e-9) + up;
    }
}

static void share_out(const struct weights *weights, uint64_t total, uint32_t cap, uint32_t *out) {
    struct shares shares = {.weights = weights, .out = out, .cap = cap};
    uint64_t most = (uint64_t)cap * weights->count;
    for (uint32_t i = 0; i < weights->count; i++)
        out[i] = total >= most ? cap : 0;
    if (total >= most)
        return;
    do
        sum_free(&shares, total);
    while (cap_shares(&shares));
    round_shares(&shares, total);
}

void budget_share_out(const double *weights, uint32_t count, uint64_t total, uint32_t cap, uint32_t *out) {
    struct weights values = {.values = weights, .count = count};
    share_out(&values, total, cap, out);
}

/* ---- layers ---- */

/* budgets [0, layers) hold what each layer gets beyond what all get: gives it to each of its heads. */
static void spread_layers(const struct budget_input *input, uint32_t all, uint32_t *budgets) {
    for (uint32_t layer = input->layers; layer-- > 0;) {
        uint32_t budget = all + budgets[layer];
        for (uint32_t head = 0; head < input->kv_heads; head++)
            budgets[(size_t)layer * input->kv_heads + head] = budget;
    }
}

/* From 2R - R/beta in the first layer to R/beta in the last, R the budget beyond the window (beta below 1: it rises); a
 * layer cannot use more than the tokens there are, then the line is flatter. */
static void allocate_pyramid(const struct budget_input *input, uint32_t budget, uint32_t *budgets) {
    uint32_t window = min_u32(input->settings->window, budget / 2), rest = budget - window;
    uint32_t room = max_u32(input->seen > window ? input->seen - window : 0, rest);
    double top = fmin(2.0 * rest - rest / (double)input->settings->beta, room);
    top = fmax(top, 2.0 * rest - room);
    struct weights line = {.first = top, .fall = 2 * top - 2.0 * rest, .count = input->layers};
    share_out(&line, (uint64_t)input->layers * rest, room, budgets);
    spread_layers(input, window, budgets);
}

static void allocate_cake(const struct budget_input *input, uint32_t budget, uint32_t *budgets) {
    uint32_t window = min_u32(input->settings->window, budget / 2);
    uint32_t room = input->seen > window ? input->seen - window : 0;
    budget_share_out(
        input->layer_preferences, input->layers, (uint64_t)input->layers * (budget - window), room, budgets);
    spread_layers(input, window, budgets);
}

/* Layers by the network's weights; the least comes first, so that the newest token has a place everywhere, beside a
 * summary slot. */
static void allocate_network(const struct budget_input *input, uint32_t budget, uint32_t *budgets) {
    uint32_t least = min_u32(budget, input->settings->summary ? 2 : 1);
    uint32_t room = input->seen > least ? input->seen - least : 0;
    struct weights weights = {.network = input->settings->network,
        .numbers = input->numbers,
        .level = network_level(budget, input->seen),
        .count = input->layers};
    share_out(&weights, (uint64_t)input->layers * (budget - least), room, budgets);
    spread_layers(input, least, budgets);
}

/* ---- heads with gates ---- */

/* rlkv: heads that keep everything. By the budget: as many as it has room for. */
static uint32_t count_full_rlkv(const struct budget_input *input, uint32_t budget, uint32_t heads) {
    const struct policy_settings *settings = input->settings;
    if (!isnan(settings->sparsity))
        return heads - min_u32(heads, (uint32_t)floor(decimal(settings->sparsity) * heads + 0.5));
    uint64_t small = (uint64_t)settings->sinks + settings->recent_tokens;
    if (small >= input->seen)
        return budget >= input->seen ? heads : 0;
    if (budget <= small)
        return 0;
    uint64_t full = (uint64_t)heads * (budget - small) / (input->seen - small);
    return full < heads ? (uint32_t)full : heads;
}

/* hybrid: min(full_heads, r / 2) of the heads, r the part that the budget is of all tokens. */
static uint32_t count_full_hybrid(const struct budget_input *input, uint32_t budget, uint32_t heads) {
    const struct policy_settings *settings = input->settings;
    double part = (double)budget / max_u32(input->seen, 1);
    if (settings->tokens == 0)
        part = fmax(settings->ratio, part); /* floor(r L) / L would waver about r */
    return (uint32_t)floor(fmin(decimal(settings->full_heads), fmin(part, 1) / 2) * heads + 1e-9);
}

/* Total unchanged: what the full heads leave, shared equally. */
static uint32_t rest_of_hybrid(const struct budget_input *input, uint32_t budget, uint32_t heads, uint32_t full) {
    uint64_t total = (uint64_t)heads * budget, used = (uint64_t)full * input->seen;
    if (full >= heads || used >= total)
        return 1;
    uint64_t each = (total - used) / (heads - full);
    return each == 0 ? 1 : (uint32_t)(each < BUDGET_ALL ? each : BUDGET_ALL);
}

static uint32_t count_gates(const float *gates, uint32_t heads, int64_t least) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < heads; i++)
        count += order_of_float(gates[i]) >= least;
    return count;
}

/* The `full` heads with the highest gates keep everything, the others get `rest`. */
static void allocate_by_gates(const float *gates, uint32_t heads, uint32_t full, uint32_t rest, uint32_t *budgets) {
    int64_t low = INT32_MIN, high = (int64_t)INT32_MAX + 1; /* count(low) >= full, count(high) < full */
    while (full > 0 && high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (count_gates(gates, heads, middle) >= full)
            low = middle;
        else
            high = middle;
    }
    uint32_t equal = full > 0 ? full - count_gates(gates, heads, low + 1) : 0;
    for (uint32_t i = 0; i < heads; i++) {
        int64_t gate = order_of_float(gates[i]);
        bool keep = full > 0 && (gate > low || (gate == low && equal > 0));
        equal -= keep && gate == low;
        budgets[i] = keep ? BUDGET_ALL : rest;
    }
}

static void allocate_gates(const struct budget_input *input, uint32_t budget, uint32_t *budgets) {
    const struct policy_settings *settings = input->settings;
    uint32_t heads = input->layers * input->kv_heads;
    bool rlkv = (settings->policy->options & OPTION_SPARSITY) != 0;
    uint32_t full = rlkv ? count_full_rlkv(input, budget, heads) : count_full_hybrid(input, budget, heads);
    uint32_t rest = rlkv ? settings->sinks + settings->recent_tokens : rest_of_hybrid(input, budget, heads, full);
    allocate_by_gates(input->gates, heads, full, rest, budgets);
}

uint32_t budget_least(const struct policy_settings *settings, uint32_t seen) {
    uint32_t budget = policy_budget(settings, seen);
    return policy_settings_by_sparsity(settings) ? min_u32(budget, settings->sinks + settings->recent_tokens) : budget;
}

/* There is a network, and it has these layers. */
static bool has_layers(const struct budget_input *input) {
    const struct policy_network *network = input->settings->network;
    if (network == NULL || input->layers == 0)
        return false;
    return input->numbers != NULL ? input->numbers[input->layers - 1] < network->shape.layers
                                  : network->shape.layers == input->layers;
}

void budget_allocate(const struct budget_input *input, uint32_t *budgets) {
    uint32_t budget = policy_budget(input->settings, input->seen);
    enum policy_allocation allocation = input->settings->policy->allocation;
    if (allocation == ALLOCATE_PYRAMID)
        allocate_pyramid(input, budget, budgets);
    else if (allocation == ALLOCATE_CAKE && input->layer_preferences != NULL)
        allocate_cake(input, budget, budgets);
    else if (allocation == ALLOCATE_GATES && input->gates != NULL)
        allocate_gates(input, budget, budgets);
    else if (allocation == ALLOCATE_NETWORK && has_layers(input))
        allocate_network(input, budget, budgets);
    else
        for (size_t i = 0; i < (size_t)input->layers * input->kv_heads; i++)
            budgets[i] = budget;
}

float head_gate_from_attention(const uint32_t *sums, const uint32_t *positions, uint32_t slots, uint32_t seen) {
    uint32_t recent_from = seen > HEAD_GATE_RECENT ? seen - HEAD_GATE_RECENT : 0;
    uint64_t all = 0, outside = 0;
    for (uint32_t i = 0; i < slots; i++) {
        if (positions[i] == KV_NO_POSITION)
            continue;
        all += sums[i];
        if (positions[i] >= HEAD_GATE_SINKS && positions[i] < recent_from)
            outside += sums[i];
    }
    return all > 0 ? (float)((double)outside / (double)all) : 0;
}
