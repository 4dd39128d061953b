/* SPDX-License-Identifier: Apache-2.0 */
#include "config/options.h"

#include <string.h>

#define SERVE CONFIG_SERVE
#define BENCH CONFIG_BENCH
#define INSPECT CONFIG_INSPECT
#define EVAL CONFIG_EVAL
#define TRAIN CONFIG_TRAIN
#define WORKER CONFIG_WORKER
#define POLICY (CONFIG_SERVE | CONFIG_BENCH | CONFIG_EVAL)
#define ENGINE (POLICY | CONFIG_TRAIN)
#define EVERY CONFIG_EVERY_COMMAND
#define FIELD(name) .offset = offsetof(struct config, name)
#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

static const char section_model[] = "Model and engine";
static const char section_server[] = "Server";
static const char section_access[] = "Access";
static const char section_admin[] = "Administration and training";
static const char section_bench[] = "Benchmark";
static const char section_eval[] = "Evaluation";
static const char section_train[] = "Training";
static const char section_general[] = "General";

/* clang-format off */
const struct option option_table[] = {
    {"model", OPTION_STRING, ENGINE | WORKER, OPTION_REQUIRED, FIELD(model), .argument = "FILE", .section = section_model,
        .help = "model file (GGUF)"},
    {"chat-template", OPTION_STRING, SERVE | EVAL | TRAIN, OPTION_MAY_BE_EMPTY, FIELD(chat_template), .default_value = "",
        .argument = "FILE", .section = section_model,
        .help = "chat template (Jinja) instead of the model file's; empty: the model's own"},
    {"backend", OPTION_CHOICE, ENGINE | WORKER, 0, FIELD(backend), .choices = "auto|cpu|cuda", .default_value = "auto",
        .argument = "NAME", .section = section_model,
        .help = "what computes; auto takes CUDA if the program was built with it and a device is there"},
    {"cpu-features", OPTION_CHOICE, ENGINE | WORKER, 0, FIELD(cpu_features), .choices = "auto|scalar|avx2|avx512",
        .default_value = "auto", .argument = "TIER", .section = section_model,
        .help = "instruction set of the CPU backend; auto takes the best one the processor has"},
    {"threads", OPTION_COUNT, ENGINE | WORKER, 0, FIELD(threads), .maximum = 256, .default_value = "0",
        .argument = "N", .section = section_model, .help = "threads that compute; 0: all processors the process may use"},
    {"tensor-parallel", OPTION_COUNT, ENGINE, 0, FIELD(tensor_parallel), .minimum = 1, .maximum = 8,
        .default_value = "1", .argument = "N", .section = section_model,
        .help = "devices that compute one model together, each with its part of the heads; must divide the model's "
                "KV heads. With backend cuda the first N GPUs; with cpu (for trying it) that many ranks share the threads"},
    {"all-reduce", OPTION_CHOICE, ENGINE, 0, FIELD(all_reduce), .choices = "auto|nccl|host", .default_value = "auto",
        .argument = "NAME", .section = section_model,
        .help = "how several GPUs add up: by NCCL, or through host memory, which may take less time between GPUs that "
                "cannot reach each other; auto: NCCL where it is installed"},
    {"world", OPTION_COUNT, ENGINE, 0, FIELD(world), .minimum = 1, .maximum = 8, .default_value = "1", .argument = "N",
        .section = section_model,
        .help = "processes that compute one model together, on this machine or others: this one, which is rank 0, and for "
                "each other rank a `distillcache worker`. Must divide the model's KV heads. 1: this one alone"},
    {"rank", OPTION_COUNT, WORKER, OPTION_REQUIRED | OPTION_NOT_IN_FILE, FIELD(rank), .minimum = 1, .maximum = 7,
        .argument = "R", .section = section_model, .help = "which of the leader's processes this is, from 1 on"},
    {"rendezvous", OPTION_STRING, ENGINE | WORKER, OPTION_MAY_BE_EMPTY, FIELD(rendezvous), .default_value = "",
        .argument = "HOST:PORT", .section = section_model,
        .help = "where the processes of a world meet: the address at which the leader waits for its workers, and each "
                "worker looks for it; 0.0.0.0:PORT to wait at all addresses"},
    {"rendezvous-key", OPTION_STRING, ENGINE | WORKER, OPTION_MAY_BE_EMPTY | OPTION_SECRET, FIELD(rendezvous_key),
        .default_value = "", .argument = "KEY", .section = section_model,
        .help = "secret that leader and workers prove to each other (best given by DISTILLCACHE_RENDEZVOUS_KEY, since "
                "the command line is seen by every user). What they then say is not encrypted: the network must be "
                "trusted. Empty: none, which only a loopback address allows"},
    {"kv-memory", OPTION_SIZE, ENGINE, 0, FIELD(kv_memory), .minimum = MIB, .maximum = 1024 * 1024 * GIB,
        .default_value = "512M", .argument = "SIZE", .section = section_model,
        .help = "bytes of the page pool that holds the KV caches of all sequences"},
    {"kv-policy", OPTION_POLICIES, POLICY, 0, FIELD(kv_policy), .default_value = "full", .argument = "POLICY",
        .section = section_model,
        .help = "which tokens leave the KV cache when it is over its budget, unless a request chooses another policy"},
    {"kv-ratio", OPTION_RATIOS, POLICY, OPTION_MAY_BE_EMPTY, FIELD(kv_ratio), .default_value = "",
        .argument = "R,...", .section = section_model,
        .help = "part of its tokens that a sequence keeps, unless the policy's own text names a budget; empty: 0.25 for "
                "policies that evict"},
    {"kv-ratio-of", OPTION_CHOICE, EVAL, 0, FIELD(kv_ratio_of), .choices = "tokens|bytes", .default_value = "tokens",
        .argument = "WHAT", .section = section_eval,
        .help = "what kv-ratio is a part of; bytes: fewer tokens stay, so that they, a policy's statistics of them and "
                "its summary slots take that part of the full cache (of the shortest prompt)"},
    {"kv-tokens", OPTION_COUNT, POLICY, 0, FIELD(kv_tokens), .maximum = 16 * 1024 * 1024, .default_value = "0",
        .argument = "N", .section = section_model,
        .help = "tokens that a layer's KV head keeps, whatever the sequence's length, instead of kv-ratio; 0: by ratio"},
    {"kv-swap", OPTION_SIZE, SERVE, 0, FIELD(kv_swap), .maximum = 1024 * 1024 * GIB, .default_value = "1G",
        .argument = "SIZE", .section = section_model,
        .help = "most host memory for pruned sequences that make room for others for a while; beyond it they are "
                "computed again"},
    {"kv-format", OPTION_CHOICE, ENGINE, 0, FIELD(kv_format), .choices = "f16|f32|bf16", .default_value = "f16",
        .argument = "FORMAT", .section = section_model, .help = "number format of cached keys and values"},
    {"precision", OPTION_CHOICE, ENGINE, 0, FIELD(precision), .choices = "int8|f32", .default_value = "int8",
        .argument = "FORMAT", .section = section_model,
        .help = "number format of activations in products with quantised weights; f32 is slow and exact"},
    {"quantize", OPTION_CHOICE, ENGINE, 0, FIELD(quantize), .choices = "none|q8_0|q4_0", .default_value = "none",
        .argument = "FORMAT", .section = section_model,
        .help = "format that matrices in F32, F16 and BF16 are brought to when they are loaded"},
    {"context", OPTION_COUNT, ENGINE, 0, FIELD(context), .maximum = 16 * 1024 * 1024, .default_value = "0",
        .argument = "N", .section = section_model, .help = "most tokens of one sequence; 0: what the model allows"},
    {"batch-tokens", OPTION_COUNT, ENGINE, 0, FIELD(batch_tokens), .minimum = 1, .maximum = 65536,
        .default_value = "512", .argument = "N", .section = section_model, .help = "most tokens of one engine step"},
    {"prefill-chunk", OPTION_COUNT, SERVE, 0, FIELD(prefill_chunk), .maximum = 65536, .default_value = "512",
        .argument = "N", .section = section_model,
        .help = "most prompt tokens of one step while others decode (never more than batch-tokens); 0: batch-tokens"},
    {"max-sequences", OPTION_COUNT, SERVE, 0, FIELD(max_sequences), .minimum = 1, .maximum = 65536,
        .default_value = "256", .argument = "N", .section = section_model, .help = "most sequences that run at once"},
    {"max-waiting", OPTION_COUNT, SERVE, 0, FIELD(max_waiting), .maximum = 1024 * 1024, .default_value = "1024",
        .argument = "N", .section = section_model, .help = "most requests that wait; further ones are answered 503"},
    {"prefix-sharing", OPTION_BOOL, ENGINE, 0, FIELD(prefix_sharing), .default_value = "true",
        .section = section_model, .help = "sequences that begin alike share their pages"},

    {"host", OPTION_STRING, SERVE, 0, FIELD(host), .default_value = "127.0.0.1", .argument = "ADDRESS",
        .section = section_server, .help = "address to listen on; 0.0.0.0 or :: for all"},
    {"port", OPTION_COUNT, SERVE, 0, FIELD(port), .maximum = 65535, .default_value = "8080", .argument = "N",
        .section = section_server, .help = "TCP port to listen on; 0: any free one"},
    {"model-alias", OPTION_STRING, SERVE, OPTION_MAY_BE_EMPTY, FIELD(model_alias), .default_value = "",
        .argument = "NAME", .section = section_server,
        .help = "name of the model in the API; empty: the file's name without its ending"},
    {"tool-call-format", OPTION_CHOICE, SERVE, 0, FIELD(tool_call_format), .choices = "auto|hermes|llama3|mistral|text",
        .default_value = "auto", .argument = "NAME", .section = section_server,
        .help = "how the model writes calls of tools; auto: as its chat template does; text: they are not looked for"},
    {"max-body", OPTION_SIZE, SERVE, 0, FIELD(max_body), .minimum = KIB, .maximum = GIB, .default_value = "16M",
        .argument = "SIZE", .section = section_server, .help = "most bytes of a request's body"},
    {"max-connections", OPTION_COUNT, SERVE, 0, FIELD(max_connections), .minimum = 1, .maximum = 65536,
        .default_value = "1024", .argument = "N", .section = section_server, .help = "most connections at once"},
    {"keep-alive", OPTION_COUNT, SERVE, 0, FIELD(keep_alive), .minimum = 1, .maximum = 86400, .default_value = "120",
        .argument = "SECONDS", .section = section_server, .help = "seconds that an idle connection stays open"},
    {"receive-timeout", OPTION_COUNT, SERVE, 0, FIELD(receive_timeout), .minimum = 1, .maximum = 86400,
        .default_value = "30", .argument = "SECONDS", .section = section_server,
        .help = "seconds that a client gets to send a whole request"},
    {"request-timeout", OPTION_COUNT, SERVE, 0, FIELD(request_timeout), .maximum = 86400, .default_value = "0",
        .argument = "SECONDS", .section = section_server,
        .help = "seconds that a completion may take from its arrival; then it ends with what it has. 0: no limit"},
    {"drain-timeout", OPTION_COUNT, SERVE, 0, FIELD(drain_timeout), .maximum = 86400, .default_value = "30",
        .argument = "SECONDS", .section = section_server,
        .help = "seconds that running requests get to finish after SIGTERM"},
    {"prefix-hash-tokens", OPTION_COUNT, SERVE, 0, FIELD(prefix_hash_tokens), .maximum = 65536, .default_value = "256",
        .argument = "N", .section = section_server,
        .help = "tokens of a prompt's beginning that the header X-Prefix-Hash of answers names, by which proxies choose "
                "among replicas; 0: no such header"},

    {"api-key", OPTION_TEXTS, SERVE, OPTION_MAY_BE_EMPTY | OPTION_SECRET, FIELD(api_key), .default_value = "",
        .argument = "KEY", .section = section_access,
        .help = "key that clients must send, repeated for several; better given by api-key-file or the environment, "
                "since the command line is seen by every user. Empty, and no api-key-file: none"},
    {"api-key-file", OPTION_STRING, SERVE, OPTION_MAY_BE_EMPTY, FIELD(api_key_file), .default_value = "",
        .argument = "FILE", .section = section_access,
        .help = "file of further keys, one a line; empty lines and those that begin with # are left out"},
    {"rate-limit", OPTION_COUNT, SERVE, 0, FIELD(rate_limit), .maximum = 1000000, .default_value = "0",
        .argument = "N", .section = section_access,
        .help = "requests that compute something, of each key, a minute; further ones are answered 429. 0: no limit"},
    {"cors-origin", OPTION_TEXTS, SERVE, OPTION_MAY_BE_EMPTY, FIELD(cors_origin), .default_value = "*",
        .argument = "ORIGIN", .section = section_access,
        .help = "origin whose web pages may read answers (CORS), such as https://chat.example, repeated for several; *: "
                "any; empty: none"},
    {"tls-cert", OPTION_STRING, SERVE, OPTION_MAY_BE_EMPTY, FIELD(tls_cert), .default_value = "", .argument = "FILE",
        .section = section_access,
        .help = "certificate (PEM), followed by those of its issuers: HTTPS instead of HTTP, on the admin port too; read "
                "again at SIGHUP. Empty: HTTP"},
    {"tls-key", OPTION_STRING, SERVE, OPTION_MAY_BE_EMPTY, FIELD(tls_key), .default_value = "", .argument = "FILE",
        .section = section_access, .help = "private key of the certificate (PEM, without a password)"},

    {"state-dir", OPTION_STRING, SERVE, OPTION_MAY_BE_EMPTY, FIELD(state_dir), .default_value = "", .argument = "DIR",
        .section = section_admin,
        .help = "folder of uploaded files, jobs and trained policies, made if need be, for one server at a time; empty: "
                "none of these"},
    {"admin-port", OPTION_COUNT, SERVE, 0, FIELD(admin_port), .maximum = 65535, .default_value = "0", .argument = "N",
        .section = section_admin, .help = "TCP port of the admin API, which needs state-dir; 0: no admin API"},
    {"admin-host", OPTION_STRING, SERVE, 0, FIELD(admin_host), .default_value = "127.0.0.1", .argument = "ADDRESS",
        .section = section_admin, .help = "address on which the admin API listens"},
    {"admin-key", OPTION_STRING, SERVE, OPTION_MAY_BE_EMPTY | OPTION_SECRET, FIELD(admin_key), .default_value = "",
        .argument = "KEY", .section = section_admin,
        .help = "key that clients of the admin API must send; better given by the environment or the file, since the "
                "command line is seen by every user. Empty: none, which only a loopback address allows"},
    {"max-upload", OPTION_SIZE, SERVE, 0, FIELD(max_upload), .minimum = KIB, .maximum = 1024 * GIB,
        .default_value = "512M", .argument = "SIZE", .section = section_admin, .help = "most bytes of an uploaded file"},
    {"training-share", OPTION_RATIO, SERVE | BENCH, 0, FIELD(training_share), .default_value = "0.25", .argument = "R",
        .section = section_admin,
        .help = "most of the time that jobs get while requests run; they get all of it while none runs"},

    {"prefill", OPTION_COUNT, BENCH, 0, FIELD(prefill), .minimum = 1, .maximum = 1024 * 1024, .default_value = "512",
        .argument = "N", .section = section_bench, .help = "prompt tokens of a prefill run"},
    {"decode", OPTION_COUNT, BENCH, 0, FIELD(decode), .minimum = 1, .maximum = 1024 * 1024, .default_value = "128",
        .argument = "N", .section = section_bench, .help = "tokens of a decode run"},
    {"batch", OPTION_COUNTS, BENCH, 0, FIELD(batch), .minimum = 1, .maximum = 65536, .default_value = "1",
        .argument = "N,...", .section = section_bench, .help = "sequences that decode at once"},
    {"depth", OPTION_COUNTS, BENCH, 0, FIELD(depth), .maximum = 16 * 1024 * 1024, .default_value = "0",
        .argument = "N,...", .section = section_bench, .help = "tokens in the cache before a run begins"},
    {"peer", OPTION_CHOICE, BENCH, OPTION_MAY_BE_EMPTY, FIELD(peer), .choices = "llama-cpp-python",
        .default_value = "", .argument = "NAME", .section = section_bench,
        .help = "another program to measure in the same run; empty: none"},
    {"peer-python", OPTION_STRING, BENCH, 0, FIELD(peer_python), .default_value = "python3", .argument = "FILE",
        .section = section_bench, .help = "Python interpreter that has the peer installed"},
    {"pairs", OPTION_COUNT, BENCH, 0, FIELD(pairs), .minimum = 1, .maximum = 1000, .default_value = "5",
        .argument = "N", .section = section_bench, .help = "repetitions of each run; the median is reported"},
    {"profile", OPTION_BOOL, BENCH, 0, FIELD(profile), .default_value = "false", .section = section_bench,
        .help = "also time the phases of a step"},
    {"admission", OPTION_BOOL, BENCH, 0, FIELD(admission), .default_value = "false", .section = section_bench,
        .help = "also count the sequences of each depth that run at once; takes as long as that many prefills"},
    {"training", OPTION_BOOL, BENCH, 0, FIELD(training), .default_value = "false", .section = section_bench,
        .help = "also measure streams beside a training job, for each batch and depth, with training-share"},

    {"task", OPTION_STRING, EVAL, OPTION_REQUIRED, FIELD(task), .argument = "T", .section = section_eval,
        .help = "what is asked: kl; generated: needle, multi-needle, kv-retrieval, variable-tracking, arithmetic; from "
                "--data: gsm8k, bbh, qa, longbench, jsonl, kv"},
    {"data", OPTION_STRING, EVAL | TRAIN, OPTION_MAY_BE_EMPTY, FIELD(data), .default_value = "", .argument = "FILE",
        .section = section_eval,
        .help = "file of the task; kl: a text, of which the second half is used (empty: generated prose); train: a text, of which "
                "the first half is used, or JSON lines with text, prompt or messages (empty: generated prompts)"},
    {"shots", OPTION_STRING, EVAL, OPTION_MAY_BE_EMPTY, FIELD(shots), .default_value = "", .argument = "FILE",
        .section = section_eval, .help = "file of the examples before each question; empty: the head of --data"},
    {"length", OPTION_COUNTS, EVAL, 0, FIELD(length), .maximum = 16 * 1024 * 1024, .default_value = "0",
        .argument = "N,...", .section = section_eval,
        .help = "tokens of context and question; 0: 1024, and for files as many as fit (longer items are skipped)"},
    {"limit", OPTION_COUNT, EVAL, 0, FIELD(limit), .maximum = 1024 * 1024, .default_value = "20",
        .argument = "N", .section = section_eval, .help = "items of each length; 0: all of a file, 100 of other tasks"},
    {"seed", OPTION_COUNT, EVAL | TRAIN, 0, FIELD(seed), .maximum = UINT32_MAX, .default_value = "1", .argument = "N",
        .section = section_eval, .help = "which items, and all other random choices"},
    {"query-aware", OPTION_BOOL, EVAL, 0, FIELD(query_aware), .default_value = "false", .section = section_eval,
        .help = "the question is part of the prompt and seen before the prune, instead of after it"},
    {"continuation", OPTION_COUNT, EVAL, 0, FIELD(continuation), .minimum = 1, .maximum = 65536,
        .default_value = "64", .argument = "N", .section = section_eval, .help = "kl: steps compared after a prompt"},
    {"csv", OPTION_STRING, EVAL, OPTION_MAY_BE_EMPTY, FIELD(csv), .default_value = "", .argument = "FILE",
        .section = section_eval, .help = "write the rows as CSV; empty: nowhere"},
    {"svg", OPTION_STRING, EVAL, OPTION_MAY_BE_EMPTY, FIELD(svg), .default_value = "", .argument = "DIR",
        .section = section_eval, .help = "write plots, and pages of what was kept; empty: nowhere"},
    {"resume", OPTION_STRING, EVAL, OPTION_MAY_BE_EMPTY, FIELD(resume), .default_value = "", .argument = "FILE",
        .section = section_eval, .help = "keep finished items in this file, and take up those it has; empty: none"},

    {"valid", OPTION_STRING, TRAIN, OPTION_MAY_BE_EMPTY, FIELD(valid), .default_value = "", .argument = "FILE",
        .section = section_train,
        .help = "file of held-out prompts, by which the best policy is chosen; empty: a tenth of --data"},
    {"out", OPTION_STRING, TRAIN, OPTION_REQUIRED, FIELD(out), .argument = "POLICY", .section = section_train,
        .help = "file of the trained policy; its checkpoints go into the folder POLICY.run"},
    {"method", OPTION_CHOICE, TRAIN, 0, FIELD(method), .choices = "distillcache|ranker|foresight|rlkv",
        .default_value = "distillcache", .argument = "M", .section = section_train, .help = "what is trained"},
    {"recipe", OPTION_CHOICE, TRAIN, 0, FIELD(recipe), .choices = "default|paper", .default_value = "default",
        .argument = "NAME", .section = section_train, .help = "features, network and stages; paper: its own"},
    {"steps", OPTION_COUNT, TRAIN, 0, FIELD(steps), .maximum = 10000000, .default_value = "0", .argument = "N",
        .section = section_train,
        .help = "steps of all stages together, each with its part of them; 0: as the recipe has it"},
    {"ratio", OPTION_RATIOS, TRAIN, OPTION_MAY_BE_EMPTY, FIELD(ratio), .default_value = "", .argument = "R,...",
        .section = section_train, .help = "budgets that are trained for and compared; empty: as the recipe has it"},
    {"students", OPTION_COUNT, TRAIN, 0, FIELD(students), .maximum = 256, .default_value = "0", .argument = "K",
        .section = section_train, .help = "rollouts of one prompt at once; 0: as the recipe has it"},
    {"set", OPTION_TEXTS, TRAIN, OPTION_ONLY_COMMAND_LINE | OPTION_MAY_BE_EMPTY, FIELD(settings), .default_value = "",
        .argument = "NAME=VALUE", .section = section_train,
        .help = "any option of training by its name; a name that is none lists them"},
    {"resume", OPTION_BOOL, TRAIN, OPTION_ONLY_COMMAND_LINE, FIELD(resume_run), .default_value = "false",
        .section = section_train, .help = "go on from the last checkpoint of the same run, if there is one"},
    {"plot", OPTION_STRING, TRAIN, OPTION_ONLY_COMMAND_LINE | OPTION_MAY_BE_EMPTY, FIELD(plot), .default_value = "", .argument = "FILE",
        .section = section_train, .help = "draw the curves of the run as SVG; empty: nowhere"},

    {"file", OPTION_STRING, INSPECT, OPTION_REQUIRED | OPTION_ONLY_COMMAND_LINE | OPTION_POSITIONAL, FIELD(file),
        .argument = "FILE", .section = section_general, .help = "model file to describe"},
    {"json", OPTION_BOOL, BENCH | INSPECT | EVAL | TRAIN, OPTION_ONLY_COMMAND_LINE, FIELD(json),
        .default_value = "false", .section = section_general,
        .help = "print one JSON document on standard output; train: one for each event, a line each"},
    {"log-level", OPTION_CHOICE, EVERY, 0, FIELD(log_level), .choices = "debug|info|warning|error",
        .default_value = "info", .argument = "LEVEL", .section = section_general, .help = "least level that is logged"},
    {"log-format", OPTION_CHOICE, EVERY, 0, FIELD(log_format), .choices = "text|json", .default_value = "text",
        .argument = "FORMAT", .section = section_general, .help = "form of log lines on standard error"},
    {"config", OPTION_STRING, EVERY, OPTION_NOT_IN_FILE | OPTION_MAY_BE_EMPTY, FIELD(config_file),
        .default_value = "", .argument = "FILE", .section = section_general,
        .help = "YAML file with options; empty: none"},
    {"print-config", OPTION_BOOL, SERVE, OPTION_ONLY_COMMAND_LINE, FIELD(print_config), .default_value = "false",
        .section = section_general, .help = "print the values in force as an annotated YAML file, then exit"},
    {"help", OPTION_BOOL, EVERY, OPTION_ONLY_COMMAND_LINE, FIELD(help), .default_value = "false",
        .section = section_general, .help = "print this text, then exit"},
};
/* clang-format on */
const size_t option_count = sizeof option_table / sizeof option_table[0];

/* Names. */

void option_yaml_key(const struct option *option, char key[static OPTION_NAME_MAX]) {
    snprintf(key, OPTION_NAME_MAX, "%s", option->name);
    for (char *c = key; *c != '\0'; c++)
        if (*c == '-')
            *c = '_';
}

void option_environment_name(const struct option *option, char name[static OPTION_NAME_MAX]) {
    snprintf(name, OPTION_NAME_MAX, "DISTILLCACHE_%s", option->name);
    for (char *c = name; *c != '\0'; c++) {
        if (*c == '-')
            *c = '_';
        else if (*c >= 'a' && *c <= 'z')
            *c = (char)(*c - 'a' + 'A');
    }
}

const struct option *option_find(const char *name) {
    for (size_t i = 0; i < option_count; i++)
        if (strcmp(option_table[i].name, name) == 0)
            return &option_table[i];
    return NULL;
}

const struct option *option_find_for(const char *name, unsigned commands) {
    for (size_t i = 0; i < option_count; i++)
        if ((option_table[i].commands & commands) != 0 && strcmp(option_table[i].name, name) == 0)
            return &option_table[i];
    return option_find(name);
}

const struct option *option_find_key(const char *key) {
    char own[OPTION_NAME_MAX];
    for (size_t i = 0; i < option_count; i++) {
        option_yaml_key(&option_table[i], own);
        if (strcmp(own, key) == 0)
            return &option_table[i];
    }
    return NULL;
}

/* Lower case, and - for _: what a mistyped name is compared in. */
static char fold_character(char c) {
    if (c == '_')
        return '-';
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

/* Levenshtein distance of two short names. */
static size_t name_distance(const char *a, const char *b) {
    size_t row[OPTION_NAME_MAX + 1], width = strlen(b);
    for (size_t j = 0; j <= width; j++)
        row[j] = j;
    for (size_t i = 0; a[i] != '\0'; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < width; j++) {
            size_t change = diagonal + (fold_character(a[i]) != fold_character(b[j]));
            size_t insert_or_remove = 1 + (row[j] < row[j + 1] ? row[j] : row[j + 1]);
            diagonal = row[j + 1];
            row[j + 1] = change < insert_or_remove ? change : insert_or_remove;
        }
    }
    return row[width];
}

const struct option *option_nearest(const char *name, unsigned commands, unsigned without_flags) {
    size_t length = strlen(name);
    if (length >= OPTION_NAME_MAX)
        return NULL;
    const struct option *nearest = NULL;
    size_t nearest_distance = length / 3 + 2; /* farther is no likeness */
    for (size_t i = 0; i < option_count; i++) {
        const struct option *option = &option_table[i];
        if ((option->commands & commands) == 0 || (option->flags & without_flags) != 0)
            continue;
        size_t distance = name_distance(name, option->name);
        if (distance < nearest_distance) {
            nearest = option;
            nearest_distance = distance;
        }
    }
    return nearest;
}
