/* SPDX-License-Identifier: Apache-2.0
 *
 * Configuration: defaults < YAML file < environment DISTILLCACHE_* < command line.
 *
 * Every option is declared once, in the table of config/options.c, which gives its name, type, range, default and help
 * (config/options.h). From it come the YAML schema (libcyaml), the environment names (kv-memory ->
 * DISTILLCACHE_KV_MEMORY), the command line, `--help` and the annotated example file. A wrong key, type or range is an
 * error that names the key, where it stood (file, environment or command line), the value and what is allowed.
 *
 * YAML keys are the option names with `_` for `-`. Sizes take K, M, G (powers of 1024). Booleans are true or false; on
 * the command line a bare `--flag` is true and `--no-flag` false. Lists repeat the option, or are a YAML sequence, or
 * are separated by commas (policies are not: their options have commas); a list from one source replaces that of a
 * source below. A scalar that is repeated on the
 * command line has its last value. The file and the environment may hold options of every command. Variables that begin
 * with DISTILLCACHE_TEST_ or DISTILLCACHE_EMULATOR belong to the tests and are ignored; another unknown DISTILLCACHE_
 * variable is an error.
 */
#ifndef CONFIG_CONFIG_H
#define CONFIG_CONFIG_H

#include "engine/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct policy_settings;  /* policy/policy.h */
struct trained_policies; /* policy/trained.h */

struct string_list {
    char **items;
    size_t count;
};

/* All options of all commands; a command accepts only those the table assigns to it. */
struct config {
    /* model and engine */
    char *model;
    char *backend;                /* auto | cpu | cuda */
    char *cpu_features;           /* auto | scalar | avx2 | avx512 */
    uint32_t threads;             /* 0: all that the process may use */
    uint32_t tensor_parallel;     /* devices that compute one model */
    char *all_reduce;             /* auto | nccl | host */
    uint32_t world;               /* processes that compute one model; 1: this one alone */
    uint32_t rank;                /* worker: which of them */
    char *rendezvous;             /* "HOST:PORT"; empty: none */
    char *rendezvous_key;         /* empty: none; loopback only */
    size_t kv_memory;             /* bytes of the page pool */
    struct string_list kv_policy; /* "name[:FILE][,key=value...]" each; serve: one. See config_policies */
    char *kv_ratio_of;            /* eval: "tokens" or "bytes" */
    struct string_list kv_ratio;  /* numbers above 0 up to 1; empty: as the policies say. serve: at most one */
    uint32_t kv_tokens;           /* slots of a head instead of a ratio; 0: by ratio */
    size_t kv_swap;               /* bytes of host memory for preempted sequences that were pruned */
    char *kv_format;              /* f16 | f32 | bf16 */
    char *precision;              /* int8 | f32 */
    char *quantize;               /* none | q8_0 | q4_0 */
    uint32_t context;             /* 0: the model's */
    uint32_t batch_tokens;        /* rows of one step */
    uint32_t prefill_chunk;       /* prompt tokens a step while others decode; 0: batch_tokens */
    uint32_t max_sequences;
    uint32_t max_waiting;
    bool prefix_sharing;
    /* server */
    char *host;
    uint32_t port;       /* 0: any free one */
    char *chat_template; /* a file; empty: the model's own */
    char *tool_call_format;
    char *model_alias; /* id shown by /v1/models; empty: the file's name without ending */
    size_t max_body;   /* bytes of a request body */
    uint32_t max_connections;
    uint32_t keep_alive;         /* seconds an idle connection stays open */
    uint32_t receive_timeout;    /* seconds to receive a whole request */
    uint32_t request_timeout;    /* seconds for a completion; 0: no limit */
    uint32_t drain_timeout;      /* seconds that running requests get after SIGTERM */
    uint32_t prefix_hash_tokens; /* of X-Prefix-Hash; 0: no such header */
    char *log_level;             /* debug | info | warning | error */
    char *log_format;            /* text | json */
    /* server: access */
    struct string_list api_key;     /* both empty: everybody is let in */
    char *api_key_file;             /* empty: none */
    uint32_t rate_limit;            /* requests a minute and key; 0: no limit */
    struct string_list cors_origin; /* "*": any; empty: none */
    char *tls_cert, *tls_key;       /* files; both or neither */
    /* server: administration and training */
    char *state_dir;       /* empty: none */
    char *admin_host;      /* address of the admin API */
    uint32_t admin_port;   /* 0: no admin API */
    char *admin_key;       /* empty: none; loopback only */
    size_t max_upload;     /* bytes of an uploaded file */
    double training_share; /* (0, 1]: of the time, for jobs beside requests */
    /* bench */
    uint32_t prefill;
    uint32_t decode;
    struct string_list batch; /* comma lists are split: one whole number an item */
    struct string_list depth;
    char *peer;        /* "" | llama-cpp-python */
    char *peer_python; /* interpreter that has the peer */
    uint32_t pairs;
    bool profile;
    bool admission;
    bool training;
    bool json;
    /* eval */
    char *task;
    char *data;                /* empty: none */
    char *shots;               /* empty: the head of data */
    struct string_list length; /* whole numbers; "0": by task */
    uint32_t limit;            /* 0: all */
    uint32_t seed;
    bool query_aware;
    uint32_t continuation;
    char *csv, *svg, *resume; /* empty: none */
    /* train; data and seed as eval */
    char *valid;                 /* empty: held out from data */
    char *out;                   /* the policy file */
    char *method, *recipe;       /* policy/train/train.h */
    uint32_t steps;              /* of all stages; 0: as the recipe has it */
    struct string_list ratio;    /* empty: as the recipe has it */
    uint32_t students;           /* 0: as the recipe has it */
    struct string_list settings; /* "name=value" of policy/train/train.h, one a text */
    bool resume_run;
    char *plot; /* empty: none */
    /* inspect */
    char *file; /* positional */
    /* every command */
    char *config_file;
    bool help;
    bool print_config; /* print the annotated example with the values in force, then exit */
};

enum config_command {
    CONFIG_SERVE = 1,
    CONFIG_BENCH = 2,
    CONFIG_INSPECT = 4,
    CONFIG_EVAL = 8,
    CONFIG_TRAIN = 16,
    CONFIG_WORKER = 32,
    CONFIG_EVERY_COMMAND = 63
};

/* Only the defaults. ERROR_MEMORY. To be freed in any case. */
int config_set_defaults(struct config *config, struct error *error);

/* Reads everything in order of precedence. arguments: those after the command's name. environment: NULL-terminated
 * "NAME=value" (main's environ). ERROR_INVALID with a message as above, ERROR_IO for a file that cannot be read,
 * ERROR_MEMORY. With help set, the file and the environment were not read; with help or print_config set, required
 * options may be missing. The config is to be freed in any case. */
int config_load(struct config *config, enum config_command command, int arguments_count, char *const *arguments,
    char *const *environment, struct error *error);
void config_free(struct config *config);

/* The policies that kv_policy, kv_ratio and kv_tokens stand for: each policy with each ratio, in this order. A policy
 * comes once when it is full, when its text names a budget ("h2o,ratio=0.1"), with kv_tokens, and when no
 * ratio is given (then it has its own default). config_load has checked that this succeeds, but for files that a policy
 * reads and trained policies' names (trained NULL: there are none). *list is to be freed by config_free_policies.
 * ERROR_INVALID, ERROR_MEMORY, and those of the files. */
int config_policies(const struct config *config, const struct trained_policies *trained, struct policy_settings **list,
    size_t *count, struct error *error);
void config_free_policies(struct policy_settings *list, size_t count); /* NULL allowed */

/* The option of an evaluation that says the same twice, and what it says: kv-policy (the same text), kv-ratio or length
 * (the same number); NULL: none. Two rows of a report would be one. config_load refuses it for eval. */
const char *config_repeated(const struct config *config, const char **value);

void config_print_help(enum config_command command, FILE *out);
/* The annotated example file: every option of `serve` with its help as a comment, at its value in config (NULL:
 * defaults). What is printed can be read back. */
void config_print_example(const struct config *config, FILE *out);

#endif
