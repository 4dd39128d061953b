/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of hyperparameters: names, ranges, texts, and the presets of methods and recipes.
 */
#include "policy/train/train.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/train/local.h"

enum kind {
    KIND_PRESET,
    KIND_COUNT,
    KIND_SEED,
    KIND_REAL,
    KIND_FLOAT,
    KIND_SWITCH,
    KIND_CHOICE,
    KIND_INPUTS,
    KIND_RATIOS
};

struct entry {
    const char *name;
    enum kind kind;
    size_t offset;
    double least, most;
    const char *const *choices; /* NULL after the last */
    const char *help;
};

static const char *const methods[] = {"distillcache", "ranker", "foresight", "rlkv", NULL};
static const char *const recipes[] = {"default", "paper", NULL};
static const char *const features[] = {"content", "paper", NULL};
static const char *const scopes[] = {"head", "layer", "model", NULL};
static const char *const rewards[] = {"kl", "rollout8", "ranking", NULL};
static const char *const samplers[] = {"gumbel", "subset", NULL};

enum { ALL_INPUTS = (1 << INPUT_KINDS) - 1, STEPS_MAX = 10000000, TOKENS_MAX = 1 << 20 };
enum {
    PAPER_INPUTS =
        1 << INPUT_MEAN | 1 << INPUT_VALUE_NORM | 1 << INPUT_DEVIATION | 1 << INPUT_ENTROPY | 1 << INPUT_POSITION
};

#define AT(field) offsetof(struct train_options, field)
/* clang-format off */
static const struct entry entries[] = {
    {"method", KIND_PRESET, AT(method), 0, 0, methods, "what is trained and by which stages; sets all others"},
    {"recipe", KIND_PRESET, AT(paper), 0, 0, recipes, "paper: its features, network and single stage; sets all others"},
    {"seed", KIND_SEED, AT(seed), 0, 0, NULL, "of everything random"},
    {"features", KIND_CHOICE, AT(features), 0, 0, features, "what the network is fed with"},
    {"inputs", KIND_INPUTS, AT(inputs), 0, 0, NULL, "of the features: all, or names separated by commas"},
    {"content", KIND_COUNT, AT(content), 0, NETWORK_CONTENT_MAX, NULL, "numbers that a learned map takes from the key"},
    {"hidden", KIND_COUNT, AT(hidden), 1, NETWORK_HIDDEN_MAX, NULL, "width of the hidden layers"},
    {"scope", KIND_CHOICE, AT(scope), 0, 0, scopes, "how slots compete"},
    {"floor", KIND_FLOAT, AT(floor), 0, 1, NULL, "scopes layer, model: part of the budget that every head keeps"},
    {"summary", KIND_SWITCH, AT(summary), 0, 1, NULL, "one slot stands for what was evicted"},
    {"interval", KIND_COUNT, AT(interval), 1, 65536, NULL, "decode steps from one prune to the next"},
    {"protect_recent", KIND_COUNT, AT(protect_recent), 0, 65536, NULL, "most recent tokens that always stay"},
    {"prompt_least", KIND_COUNT, AT(prompt_least), 16, TOKENS_MAX, NULL, "tokens of the shortest prompt"},
    {"prompt_most", KIND_COUNT, AT(prompt_most), 16, TOKENS_MAX, NULL, "tokens of the longest prompt"},
    {"copying", KIND_REAL, AT(copying), 0, 1, NULL, "part of the sequences that are generated to be copied from"},
    {"sequences", KIND_COUNT, AT(sequences), 1, 1 << 20, NULL, "rank, local: sequences recorded and used again and again"},
    {"pruned_sequences", KIND_COUNT, AT(pruned_sequences), 1, 1 << 20, NULL,
        "rank_pruned: sequences recorded, with students that prune them"},
    {"ratios", KIND_RATIOS, AT(ratios), 0, 1, NULL, "budgets, as parts of the tokens seen"},
    {"rank_steps", KIND_COUNT, AT(rank_steps), 0, STEPS_MAX, NULL, "steps of supervision on future attention"},
    {"pruned_steps", KIND_COUNT, AT(pruned_steps), 0, STEPS_MAX, NULL,
        "steps of the same supervision on caches that students prune"},
    {"local_steps", KIND_COUNT, AT(local_steps), 0, STEPS_MAX, NULL, "steps of the policy gradient on heads' own outputs"},
    {"kl_steps", KIND_COUNT, AT(kl_steps), 0, STEPS_MAX, NULL, "steps of the policy gradient on rollouts"},
    {"parameter_steps", KIND_COUNT, AT(parameter_steps), 0, STEPS_MAX, NULL,
        "steps of the policy gradient in the space of few parameters"},
    {"gate_steps", KIND_COUNT, AT(gate_steps), 0, STEPS_MAX, NULL, "rlkv: steps on which heads keep everything"},
    {"future", KIND_COUNT, AT(future), 1, 65536, NULL, "rank, rank_pruned: queries whose attention is to be predicted"},
    {"rollout", KIND_COUNT, AT(rollout), 2, 65536, NULL, "tokens of a rollout"},
    {"students", KIND_COUNT, AT(students), 1, 32, NULL, "rollouts of the same prompt at once"},
    {"reward", KIND_CHOICE, AT(reward), 0, 0, rewards, "of a rollout's steps"},
    {"sampler", KIND_CHOICE, AT(sampler), 0, 0, samplers, "distribution over what is kept"},
    {"temperature", KIND_FLOAT, AT(temperature), 1e-3, 1e3, NULL, "of sampler subset"},
    {"discount", KIND_FLOAT, AT(discount), 0, 1, NULL, "of later rewards, per step"},
    {"entropy", KIND_FLOAT, AT(entropy), 0, 100, NULL, "weight of the entropy bonus"},
    {"baseline_decay", KIND_FLOAT, AT(baseline_decay), 0, 1, NULL, "of the rewards' moving average"},
    {"gate_penalty", KIND_FLOAT, AT(gate_penalty), 0, 100, NULL, "rlkv: of a head that keeps everything"},
    {"rank_rate", KIND_FLOAT, AT(rank_rate), 0, 1, NULL, "learning rate of stage rank; rank_pruned has a third of it"},
    {"learning_rate", KIND_FLOAT, AT(learning_rate), 0, 1, NULL, "learning rate of the other stages"},
    {"parameter_rate", KIND_FLOAT, AT(parameter_rate), 0, 10, NULL,
        "learning rate of stage kl_parameter, in deviations of what is drawn"},
    {"weight_decay", KIND_FLOAT, AT(weight_decay), 0, 1, NULL, "of matrices, decoupled"},
    {"clip", KIND_FLOAT, AT(clip), 0, 1e6, NULL, "most norm of the gradient; 0: not clipped"},
    {"warmup_steps", KIND_COUNT, AT(warmup_steps), 0, STEPS_MAX, NULL, "steps in which a stage's learning rate rises"},
    {"valid_every", KIND_COUNT, AT(valid_every), 0, STEPS_MAX, NULL,
        "steps between held-out comparisons; 0: at the end of each stage"},
    {"valid_prompts", KIND_COUNT, AT(valid_prompts), 0, 4096, NULL, "held-out prompts; 0: no comparison"},
    {"valid_rollout", KIND_COUNT, AT(valid_rollout), 2, 65536, NULL, "tokens compared after a held-out prompt"},
    {"checkpoint_every", KIND_COUNT, AT(checkpoint_every), 1, STEPS_MAX, NULL, "steps between checkpoints"},
};
/* clang-format on */
enum { ENTRIES = sizeof entries / sizeof entries[0] };

/* ---- presets ---- */

static void set_ratios(struct train_options *options, const double *ratios, uint32_t count) {
    options->ratios_count = count;
    for (uint32_t i = 0; i < count; i++)
        options->ratios[i] = ratios[i];
}

/* What the paper says; where it says nothing, what its algorithm needs at least. */
static void set_paper(struct train_options *options) {
    options->features = FEATURES_PAPER;
    options->inputs = PAPER_INPUTS;
    options->content = 0;
    options->hidden = 128;
    options->scope = SCOPE_HEAD;
    options->summary = false;
    options->interval = 1;
    options->prompt_most = 4096;
    options->rank_steps = 0;
    options->pruned_steps = 0;
    options->parameter_steps = 0;
    options->students = 4;
    options->kl_steps = 10000;
    options->warmup_steps = 500;
    options->copying = 0;
}

/* foresight.h: of statistics those that the paper's network has in some form, nothing about positions and budgets. */
static void set_foresight(struct train_options *options) {
    options->inputs = 1 << INPUT_SUM | 1 << INPUT_MEAN | 1 << INPUT_DEVIATION | 1 << INPUT_ENTROPY |
                      1 << INPUT_VALUE_NORM | 1 << INPUT_OUTPUT_NORM;
    options->content = 16;
    options->hidden = 128;
    options->scope = SCOPE_HEAD;
    options->summary = false;
    options->protect_recent = 128;
    options->kl_steps = 200;
    options->warmup_steps = 50;
}

static void set_rlkv(struct train_options *options) {
    options->inputs = 1 << INPUT_SUM;
    options->content = 0;
    options->hidden = 1;
    options->scope = SCOPE_HEAD;
    options->summary = false;
    options->rank_steps = 0;
    options->gate_steps = 400;
    options->students = 8;
    options->learning_rate = 0.05f;
    options->weight_decay = 0;
    options->warmup_steps = 10;
}

void train_options_default(struct train_options *options, enum train_method method, bool paper) {
    static const double ratios[] = {0.5, 0.25, 0.125, 0.05};
    *options = (struct train_options){
        .method = method,
        .paper = paper,
        .seed = 1,
        .features = FEATURES_CONTENT,
        .inputs = ALL_INPUTS,
        .content = 4,
        .hidden = 32,
        .scope = SCOPE_LAYER,
        .floor = 0.75f,
        .summary = true,
        .interval = 16,
        .prompt_least = 160,
        .prompt_most = 1024,
        .copying = 0.25,
        .sequences = 160,
        .pruned_sequences = 80,
        .rank_steps = 3000,
        .parameter_steps = method == TRAIN_DISTILLCACHE ? 200 : 0,
        .future = 64,
        .rollout = 64,
        .students = 8,
        .reward = REWARD_KL,
        .sampler = SAMPLER_GUMBEL,
        .temperature = 1,
        .discount = 0.99f,
        .entropy = 0.01f,
        .baseline_decay = 0.9f,
        .gate_penalty = 0.05f,
        .rank_rate = 3e-3f,
        .learning_rate = 3e-4f,
        .parameter_rate = 0.15f,
        .weight_decay = 0.01f,
        .clip = 1,
        .warmup_steps = 100,
        .valid_every = 0,
        .valid_prompts = 8,
        .valid_rollout = 64,
        .checkpoint_every = 100,
    };
    set_ratios(options, ratios, sizeof ratios / sizeof ratios[0]);
    if (paper)
        set_paper(options);
    else if (method == TRAIN_FORESIGHT)
        set_foresight(options);
    else if (method == TRAIN_RLKV)
        set_rlkv(options);
}

/* ---- texts ---- */

uint32_t train_options_count(void) {
    return ENTRIES;
}

bool train_option_exists(const char *name) {
    for (uint32_t i = 0; i < train_options_count(); i++)
        if (strcmp(name, train_option_name(i)) == 0)
            return true;
    return false;
}

const char *train_option_name(uint32_t index) {
    return index < ENTRIES ? entries[index].name : NULL;
}

const char *train_option_help(uint32_t index) {
    return index < ENTRIES ? entries[index].help : NULL;
}

const char *train_method_name(enum train_method method) {
    return methods[method];
}

static int find_word(const char *const *words, const char *word, size_t length) {
    for (int i = 0; words[i] != NULL; i++)
        if (strlen(words[i]) == length && strncmp(words[i], word, length) == 0)
            return i;
    return -1;
}

int train_method_find(const char *name) {
    return find_word(methods, name, strlen(name));
}

static void join_words(const char *const *words, const char *separator, char *out, size_t size) {
    out[0] = '\0';
    for (int i = 0; words[i] != NULL; i++) {
        size_t at = strlen(out);
        snprintf(out + at, size - at, "%s%s", i > 0 ? separator : "", words[i]);
    }
}

static void describe_allowed(const struct entry *entry, char *out, size_t size) {
    size_t at;
    switch (entry->kind) {
    case KIND_COUNT:
        snprintf(out, size, "a whole number from %.0f to %.0f", entry->least, entry->most);
        break;
    case KIND_SEED:
        snprintf(out, size, "a whole number from 0 to 18446744073709551615");
        break;
    case KIND_REAL:
    case KIND_FLOAT:
        snprintf(out, size, "a number from %g to %g", entry->least, entry->most);
        break;
    case KIND_SWITCH:
        snprintf(out, size, "0 or 1");
        break;
    case KIND_RATIOS:
        snprintf(out, size, "1 to %d numbers above 0 up to 1, separated by commas", TRAIN_RATIOS_MAX);
        break;
    case KIND_INPUTS:
        at = (size_t)snprintf(out, size, "all, or of these, separated by commas: ");
        for (int i = 0; i < INPUT_KINDS; i++)
            at += (size_t)snprintf(out + at, size - at, "%s%s", i > 0 ? ", " : "", network_input_name(i));
        break;
    default:
        join_words(entry->choices, ", ", out, size);
    }
}

static int refuse(const struct entry *entry, const char *value, struct error *error) {
    char allowed[256];
    describe_allowed(entry, allowed, sizeof allowed);
    return error_set(error, ERROR_INVALID, "%s: \"%.40s\" is not %s%s", entry->name, value,
        entry->kind == KIND_CHOICE || entry->kind == KIND_PRESET ? "one of " : "", allowed);
}

static bool read_number(const char *text, size_t length, double *out) {
    char copy[64], *end;
    if (length == 0 || length >= sizeof copy || strchr("0123456789.-", text[0]) == NULL)
        return false;
    memcpy(copy, text, length);
    copy[length] = '\0';
    *out = strtod(copy, &end);
    return *end == '\0' && isfinite(*out) && strpbrk(copy, "xXpP") == NULL;
}

static bool read_seed(const char *text, uint64_t *out) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0)
        return false;
    *out = value;
    return true;
}

static bool read_ratios(struct train_options *options, const char *text) {
    double ratios[TRAIN_RATIOS_MAX];
    uint32_t count = 0;
    while (true) {
        size_t length = strcspn(text, ",");
        if (count == TRAIN_RATIOS_MAX || !read_number(text, length, &ratios[count]) || ratios[count] <= 0 ||
            ratios[count] > 1)
            return false;
        count++;
        text += length;
        if (*text == '\0')
            break;
        text++;
    }
    set_ratios(options, ratios, count);
    return true;
}

static int find_input(const char *word, size_t length) {
    for (int i = 0; i < INPUT_KINDS; i++)
        if (strlen(network_input_name(i)) == length && strncmp(network_input_name(i), word, length) == 0)
            return i;
    return -1;
}

static bool read_inputs(struct train_options *options, const char *text) {
    uint32_t mask = 0;
    if (strcmp(text, "all") == 0) {
        options->inputs = options->features == FEATURES_PAPER ? PAPER_INPUTS : ALL_INPUTS;
        return true;
    }
    while (true) {
        size_t length = strcspn(text, ",");
        int input = find_input(text, length);
        if (input < 0)
            return false;
        mask |= 1u << input;
        text += length;
        if (*text == '\0')
            break;
        text++;
    }
    options->inputs = mask;
    return true;
}

/* ---- setting ---- */

static bool set_preset(struct train_options *options, const struct entry *entry, int choice) {
    uint64_t seed = options->seed;
    if (entry->offset == AT(method))
        train_options_default(options, (enum train_method)choice, options->paper);
    else
        train_options_default(options, options->method, choice != 0);
    options->seed = seed;
    return true;
}

static bool set_choice(struct train_options *options, const struct entry *entry, int choice) {
    int *field = (int *)((char *)options + entry->offset);
    *field = choice;
    if (entry->offset == AT(features)) {
        options->inputs = choice == FEATURES_PAPER ? PAPER_INPUTS : ALL_INPUTS;
        options->content = choice == FEATURES_PAPER ? 0 : 8;
        options->hidden = choice == FEATURES_PAPER ? 128 : 32;
    }
    return true;
}

static bool set_entry(struct train_options *options, const struct entry *entry, const char *value) {
    char *field = (char *)options + entry->offset;
    double number = 0;
    int choice;
    switch (entry->kind) {
    case KIND_PRESET:
        choice = find_word(entry->choices, value, strlen(value));
        return choice >= 0 && set_preset(options, entry, choice);
    case KIND_CHOICE:
        choice = find_word(entry->choices, value, strlen(value));
        return choice >= 0 && set_choice(options, entry, choice);
    case KIND_SEED:
        return read_seed(value, &options->seed);
    case KIND_INPUTS:
        return read_inputs(options, value);
    case KIND_RATIOS:
        return read_ratios(options, value);
    default:
        break;
    }
    if (!read_number(value, strlen(value), &number) || number < entry->least || number > entry->most)
        return false;
    bool whole = number == floor(number);
    if (entry->kind == KIND_REAL)
        *(double *)field = number;
    else if (entry->kind == KIND_FLOAT)
        *(float *)field = (float)number;
    else if (entry->kind == KIND_SWITCH && whole)
        *(bool *)field = number != 0;
    else if (entry->kind == KIND_COUNT && whole)
        *(uint32_t *)field = (uint32_t)number;
    else
        return false;
    return true;
}

/* The names do not all fit a message: the last ones are left out, and it says so. */
static int refuse_name(const char *name, struct error *error) {
    char names[440] = "";
    const char *rest = "";
    for (uint32_t i = 0; i < ENTRIES; i++) {
        size_t at = strlen(names), more = strlen(entries[i].name) + sizeof ", ";
        if (at + more > sizeof names) {
            rest = ", ...";
            break;
        }
        snprintf(names + at, sizeof names - at, "%s%s", i > 0 ? ", " : "", entries[i].name);
    }
    return error_set(error, ERROR_INVALID, "no option is called \"%.16s\": %s%s", name, names, rest);
}

int train_options_set(struct train_options *options, const char *name, const char *value, struct error *error) {
    for (uint32_t i = 0; i < ENTRIES; i++)
        if (strcmp(entries[i].name, name) == 0)
            return set_entry(options, &entries[i], value) ? 0 : refuse(&entries[i], value, error);
    return refuse_name(name, error);
}

static void print_list(const struct entry *entry, const struct train_options *options, char *out, size_t size) {
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; entry->kind == KIND_RATIOS && i < options->ratios_count && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%.9g", i > 0 ? "," : "", options->ratios[i]);
    for (uint32_t i = 0; entry->kind == KIND_INPUTS && i < INPUT_KINDS && at < size; i++)
        if ((options->inputs >> i & 1) != 0)
            at += (size_t)snprintf(out + at, size - at, "%s%s", at > 0 ? "," : "", network_input_name(i));
}

void train_option_value(uint32_t index, const struct train_options *options, char *out, size_t size) {
    const struct entry *entry = &entries[index];
    const char *field = (const char *)options + entry->offset;
    switch (entry->kind) {
    case KIND_PRESET:
    case KIND_CHOICE:
        snprintf(out, size, "%s", entry->choices[entry->offset == AT(paper) ? options->paper : *(const int *)field]);
        break;
    case KIND_COUNT:
        snprintf(out, size, "%u", *(const uint32_t *)field);
        break;
    case KIND_SEED:
        snprintf(out, size, "%llu", (unsigned long long)options->seed);
        break;
    case KIND_REAL:
        snprintf(out, size, "%.9g", *(const double *)field);
        break;
    case KIND_FLOAT:
        snprintf(out, size, "%.7g", (double)*(const float *)field);
        break;
    case KIND_SWITCH:
        snprintf(out, size, "%d", *(const bool *)field);
        break;
    default:
        print_list(entry, options, out, size);
    }
}

int train_options_scale(struct train_options *options, uint32_t steps, struct error *error) {
    uint32_t *parts[] = {&options->rank_steps, &options->pruned_steps, &options->local_steps, &options->kl_steps,
        &options->parameter_steps, &options->gate_steps};
    enum { PARTS = sizeof parts / sizeof parts[0] };
    uint64_t all = 0, before = 0, taken = 0;
    uint32_t stages = 0;
    for (int i = 0; i < PARTS; i++) {
        all += *parts[i];
        stages += *parts[i] > 0;
    }
    if (steps < stages || stages == 0)
        return error_set(error, ERROR_INVALID, "steps: %u are fewer than the %u stages", steps, stages);
    for (int i = 0; i < PARTS; i++) { /* one each, the others by parts; sums are rounded, not parts */
        if (*parts[i] == 0)
            continue;
        before += *parts[i];
        uint64_t until = before * (steps - stages) / all;
        *parts[i] = (uint32_t)(until - taken) + 1;
        taken = until;
    }
    return 0;
}

/* ---- as a whole ---- */

static int check_stages(const struct train_options *options, struct error *error) {
    bool gates = options->method == TRAIN_RLKV, others = options->rank_steps > 0 || options->pruned_steps > 0 ||
                                                         options->local_steps > 0 || options->kl_steps > 0 ||
                                                         options->parameter_steps > 0;
    if (gates ? others : options->gate_steps > 0)
        return error_set(
            error, ERROR_INVALID, "gate_steps: stage gates is method rlkv's, which has no other, and no other has it");
    if (options->paper && (gates || options->method == TRAIN_FORESIGHT))
        return error_set(
            error, ERROR_INVALID, "recipe: paper is that of method distillcache, not of %s", methods[options->method]);
    if (gates && options->students < 2)
        return error_set(error, ERROR_INVALID, "students: stage gates compares at least 2");
    if (options->method == TRAIN_FORESIGHT && options->kl_steps > 0 && options->students < 2)
        return error_set(error, ERROR_INVALID, "students: method foresight compares at least 2");
    if (options->local_steps > 0 && options->future > LOCAL_FUTURE_MAX)
        return error_set(error, ERROR_INVALID, "future: stage local compares outputs of at most %d queries, not %u",
            LOCAL_FUTURE_MAX, options->future);
    if (options->local_steps > 0 && options->students < 2)
        return error_set(error, ERROR_INVALID, "students: stage local compares at least 2 draws");
    if (options->kl_steps > 0 && options->reward == REWARD_RANKING && options->sampler == SAMPLER_SUBSET)
        return error_set(error, ERROR_INVALID, "sampler: reward ranking is of an order, sampler subset draws none");
    if (options->kl_steps > 0 && options->reward == REWARD_RANKING && options->students < 2)
        return error_set(error, ERROR_INVALID, "students: reward ranking compares at least 2 draws");
    return 0;
}

static int check_network(const struct train_options *options, struct error *error) {
    if (options->method == TRAIN_RLKV)
        return 0;
    if (options->features == FEATURES_PAPER && (options->inputs & ~(uint32_t)PAPER_INPUTS) != 0)
        return error_set(error, ERROR_INVALID,
            "inputs: the paper's features are mean, deviation, entropy, value_norm and position only");
    if (options->features == FEATURES_PAPER && options->content > 0)
        return error_set(error, ERROR_INVALID, "content: the paper's features take nothing from keys (0)");
    if (options->inputs == 0 && options->content == 0)
        return error_set(error, ERROR_INVALID, "inputs and content: the network needs one");
    bool recorded = options->rank_steps > 0 || options->local_steps > 0 ||
                    (options->kl_steps > 0 && options->reward == REWARD_RANKING);
    if (options->features == FEATURES_CONTENT && !recorded)
        return error_set(error, ERROR_INVALID,
            "rank_steps: features content need a stage on recorded sequences, which measures their inputs");
    return 0;
}

int train_options_check(const struct train_options *options, struct error *error) {
    if (options->prompt_least > options->prompt_most)
        return error_set(error, ERROR_INVALID, "prompt_least: %u is more than prompt_most, %u", options->prompt_least,
            options->prompt_most);
    if (options->rank_steps == 0 && options->pruned_steps == 0 && options->local_steps == 0 && options->kl_steps == 0 &&
        options->parameter_steps == 0 && options->gate_steps == 0)
        return error_set(error, ERROR_INVALID,
            "rank_steps, pruned_steps, local_steps, kl_steps, parameter_steps, gate_steps: one of the stages needs a "
            "step");
    int code = check_stages(options, error);
    return code == 0 ? check_network(options, error) : code;
}
