/* SPDX-License-Identifier: Apache-2.0
 *
 * POST /admin/v1/training/jobs, in the shape of OpenAI's fine-tuning jobs:
 *
 *   model             the served model's id, the default
 *   training_file     id of an uploaded file; required
 *   validation_file   id of an uploaded file; default: held out from the training file
 *   method            {type: "reinforcement", reinforcement: {hyperparameters}}
 *   hyperparameters   names and values of policy/train/train.h, also in method; default: as method and recipe say
 *   seed              whole number, the hyperparameter; default 1
 *   suffix            1 to 64 letters, digits, '-', '_', '.': begin of the policy's name; default "policy"
 *   metadata          up to 16 pairs of texts
 *
 * A hyperparameter that is "auto" or null has its default. Lists are arrays, or texts with commas. `steps` is not in
 * the table: it shares a number of steps out over the stages.
 */
#include "policy/train/train.h"
#include "server/admin/training.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUFFIX_MAX = 64, VALUE_MAX = 512 };

/* What a request says, before it is a record. */
struct creation {
    const char *training_file, *validation_file, *suffix;
    struct train_options options;
    json_t *chosen; /* options that were given: texts by name */
    json_t *options_all;
    char *chosen_text, *options_text, *metadata;
    char id[64], policy[POLICY_NAME_MAX];
};

static void creation_free(struct creation *creation) {
    json_decref(creation->chosen);
    json_decref(creation->options_all);
    free(creation->chosen_text);
    free(creation->options_text);
    free(creation->metadata);
}

/* --- Hyperparameters --- */

static int creation_number_text(const json_t *value, char *out, size_t size) {
    int64_t integer;
    if (fields_as_integer(value, &integer)) {
        snprintf(out, size, "%lld", (long long)integer);
        return 0;
    }
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(out, size, "%.*g", digits, json_number_value(value));
        if (strtod(out, NULL) == json_number_value(value))
            break;
    }
    return 0;
}

/* The text of a scalar; -1 when it is none. */
static int creation_scalar_text(const json_t *value, char *out, size_t size) {
    if (json_is_number(value))
        return creation_number_text(value, out, size);
    if (json_is_boolean(value)) {
        snprintf(out, size, "%s", json_is_true(value) ? "true" : "false");
        return 0;
    }
    if (!json_is_string(value) || json_string_length(value) >= size ||
        strlen(json_string_value(value)) != json_string_length(value))
        return -1;
    snprintf(out, size, "%s", json_string_value(value));
    return 0;
}

static int creation_value_text(const char *name, const json_t *value, char out[VALUE_MAX], struct fault *fault) {
    size_t index, length = 0;
    json_t *item;
    char text[VALUE_MAX];
    out[0] = '\0';
    if (!json_is_array(value) && creation_scalar_text(value, out, VALUE_MAX) == 0)
        return 0;
    if (!json_is_array(value))
        return fault_invalid(fault, name, "%.64s must be a number, a boolean, a short text or an array of these", name);
    json_array_foreach(value, index, item) {
        if (creation_scalar_text(item, text, sizeof text) != 0 || length + strlen(text) + 2 > VALUE_MAX)
            return fault_invalid(fault, name, "%.64s must be a short array of numbers or words", name);
        length += (size_t)snprintf(out + length, VALUE_MAX - length, "%s%s", index == 0 ? "" : ",", text);
    }
    return 0;
}

static int creation_set(struct creation *creation, const char *name, const char *value, struct fault *fault) {
    struct error error;
    if (train_options_set(&creation->options, name, value, &error) == 0)
        return 0;
    return error.code == ERROR_MEMORY ? fault_memory(fault) : fault_invalid(fault, name, "%s", error.message);
}

/* Names of the table, `steps`, and those of OpenAI's jobs, which are left at "auto" here. */
static bool creation_knows(const char *name) {
    static const char *const others[] = {"steps", "n_epochs", "batch_size", "learning_rate_multiplier", "beta",
        "compute_multiplier", "eval_interval", "eval_samples", "reasoning_effort"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (strcmp(name, others[i]) == 0)
            return true;
    return train_option_exists(name);
}

/* Remembers the texts of an object of hyperparameters. */
static int creation_gather(struct creation *creation, const json_t *object, const char *where, struct fault *fault) {
    const char *name;
    json_t *value;
    char text[VALUE_MAX];
    if (object == NULL)
        return 0;
    if (!json_is_object(object))
        return fault_invalid(fault, where, "%s must be an object, not %s", where, field_type(object));
    json_object_foreach((json_t *)object, name, value) {
        if (json_is_null(value) || (json_is_string(value) && strcmp(json_string_value(value), "auto") == 0)) {
            if (!creation_knows(name))
                return creation_set(creation, name, "auto", fault); /* fails: its message lists the names */
            continue;
        }
        if (creation_value_text(name, value, text, fault) != 0)
            return -1;
        if (json_object_set_new(creation->chosen, name, json_string(text)) != 0)
            return fault_memory(fault);
    }
    return 0;
}

static int creation_set_steps(struct creation *creation, const char *text, struct fault *fault) {
    struct error error;
    char *end;
    unsigned long steps = strtoul(text, &end, 10);
    if (*end != '\0' || end == text || text[0] == '-' || steps == 0 || steps > UINT32_MAX)
        return fault_invalid(fault, "steps", "steps is '%.64s'; it must be a whole number from 1", text);
    if (train_options_scale(&creation->options, (uint32_t)steps, &error) != 0)
        return fault_invalid(fault, "steps", "%s", error.message);
    return 0;
}

/* In the order of the table, in which those that set others come first; then what it does not have. */
static int creation_apply(struct creation *creation, struct fault *fault) {
    const char *name;
    json_t *value;
    struct error error;
    train_options_default(&creation->options, TRAIN_DISTILLCACHE, false);
    for (uint32_t i = 0; i < train_options_count(); i++) {
        const char *text = json_string_value(json_object_get(creation->chosen, train_option_name(i)));
        if (text != NULL && creation_set(creation, train_option_name(i), text, fault) != 0)
            return -1;
    }
    json_object_foreach(creation->chosen, name, value) {
        if (strcmp(name, "steps") != 0 && !train_option_exists(name))
            return creation_set(creation, name, json_string_value(value), fault); /* its message lists the names */
    }
    const char *steps = json_string_value(json_object_get(creation->chosen, "steps"));
    if (steps != NULL && creation_set_steps(creation, steps, fault) != 0)
        return -1;
    if (train_options_check(&creation->options, &error) != 0)
        return fault_invalid(fault, "hyperparameters", "%s", error.message);
    return 0;
}

static int creation_write_options(struct creation *creation, struct fault *fault) {
    char text[VALUE_MAX];
    bool failed = false;
    for (uint32_t i = 0; i < train_options_count(); i++) {
        train_option_value(i, &creation->options, text, sizeof text);
        failed |= json_object_set_new(creation->options_all, train_option_name(i), json_string(text)) != 0;
    }
    creation->options_text = json_dumps(creation->options_all, JSON_COMPACT);
    creation->chosen_text = json_dumps(creation->chosen, JSON_COMPACT);
    return failed || creation->options_text == NULL || creation->chosen_text == NULL ? fault_memory(fault) : 0;
}

static int creation_read_method(struct creation *creation, const json_t *body, struct fault *fault) {
    const json_t *method = field_get(body, "method");
    const char *type = NULL;
    if (method == NULL)
        return 0;
    if (!json_is_object(method))
        return fault_invalid(fault, "method", "method must be an object, not %s", field_type(method));
    if (field_string(method, "type", &type, fault) != 0)
        return -1;
    if (type == NULL || strcmp(type, "reinforcement") != 0)
        return fault_invalid(
            fault, "method", "method.type is '%.64s'; it must be reinforcement", type == NULL ? "" : type);
    const json_t *part = field_get(method, "reinforcement");
    if (part == NULL)
        return 0;
    if (!json_is_object(part))
        return fault_invalid(fault, "method", "method.reinforcement must be an object, not %s", field_type(part));
    if (field_get(part, "grader") != NULL)
        return fault_invalid(fault, "method",
            "method.reinforcement.grader is not supported: what is rewarded is chosen by the hyperparameter reward");
    return creation_gather(creation, field_get(part, "hyperparameters"), "method.reinforcement.hyperparameters", fault);
}

static int creation_read_options(struct creation *creation, const json_t *body, struct fault *fault) {
    const json_t *seed = field_get(body, "seed");
    creation->chosen = json_object();
    creation->options_all = json_object();
    if (creation->chosen == NULL || creation->options_all == NULL)
        return fault_memory(fault);
    if (creation_gather(creation, field_get(body, "hyperparameters"), "hyperparameters", fault) != 0 ||
        creation_read_method(creation, body, fault) != 0)
        return -1;
    int64_t number = 0;
    if (seed != NULL) {
        if (field_integer(body, "seed", 0, INT64_MAX, &number, fault) != 0)
            return -1;
        char text[32];
        snprintf(text, sizeof text, "%lld", (long long)number);
        if (json_object_set_new(creation->chosen, "seed", json_string(text)) != 0)
            return fault_memory(fault);
    }
    return creation_apply(creation, fault) == 0 ? creation_write_options(creation, fault) : -1;
}

/* --- The other fields --- */

static int creation_check_file(
    struct admin_call *call, struct database *database, const char *field, const char *id, struct error *error) {
    int found = id == NULL ? 1 : records_exist(database, "files", id, error);
    if (found == 0)
        return fault_invalid(
            &call->fault, field, "%s is '%.64s'; there is no file of that id (POST /admin/v1/files)", field, id);
    return found < 0 ? found : 0;
}

static int creation_read_suffix(struct creation *creation, const json_t *body, struct fault *fault) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    if (field_string(body, "suffix", &creation->suffix, fault) != 0)
        return -1;
    const char *suffix = creation->suffix;
    if (suffix == NULL)
        return 0;
    size_t length = strlen(suffix);
    if (length == 0 || length > SUFFIX_MAX || strspn(suffix, allowed) != length || suffix[0] == '.')
        return fault_invalid(fault, "suffix",
            "suffix is '%.80s'; it must be 1 to %d letters, digits, '-', '_' and '.', not beginning with '.'", suffix,
            SUFFIX_MAX);
    return 0;
}

static int creation_read_model(struct admin_call *call, const json_t *body) {
    const char *own = call->admin->server->model_id, *model = NULL;
    if (field_string(body, "model", &model, &call->fault) != 0)
        return -1;
    if (model == NULL || strcmp(model, own) == 0)
        return 0;
    return fault_set(&call->fault, 404, "model_not_found", "model",
        "the model '%.128s' does not exist; this server has '%.128s'", model, own);
}

static int creation_read(
    struct admin_call *call, struct creation *creation, struct database *database, struct error *error) {
    static const char *const known[] = {
        "model", "training_file", "validation_file", "method", "hyperparameters", "seed", "suffix", "metadata", NULL};
    static const struct field_unsupported unsupported[] = {{"integrations", REFUSE_NONEMPTY}, {NULL, REFUSE_PRESENT}};
    struct fault *fault = &call->fault;
    const json_t *body = admin_body(call);
    if (body == NULL || fields_check(body, known, unsupported, call->exchange->id, fault) != 0 ||
        creation_read_model(call, body) != 0 ||
        field_string(body, "training_file", &creation->training_file, fault) != 0 ||
        field_string(body, "validation_file", &creation->validation_file, fault) != 0)
        return -1;
    if (creation->training_file == NULL)
        return fault_invalid(fault, "training_file", "training_file is required: the id of an uploaded file");
    if (creation_read_suffix(creation, body, fault) != 0 || creation_read_options(creation, body, fault) != 0 ||
        admin_read_metadata(body, &creation->metadata, fault) != 0)
        return -1;
    int code = creation_check_file(call, database, "training_file", creation->training_file, error);
    return code == 0 ? creation_check_file(call, database, "validation_file", creation->validation_file, error) : code;
}

/* --- All --- */

static int creation_insert(
    struct admin_call *call, struct creation *creation, struct database *database, struct error *error) {
    const struct server *server = call->admin->server;
    http_make_id(creation->id, sizeof creation->id, "ftjob-");
    snprintf(creation->policy, sizeof creation->policy, "%s-%.8s",
        creation->suffix == NULL ? "policy" : creation->suffix, creation->id + 6);
    struct job_record job = {.id = creation->id,
        .model = server->model_id,
        .fingerprint = server->model.fingerprint == NULL ? "" : server->model.fingerprint,
        .training_file = creation->training_file,
        .validation_file = creation->validation_file,
        .method = train_method_name(creation->options.method),
        .recipe = creation->options.paper ? "paper" : "default",
        .hyperparameters = creation->options_text,
        .chosen = creation->chosen_text,
        .suffix = creation->suffix,
        .metadata = creation->metadata,
        .policy = creation->policy,
        .created = store_now(),
        .seed = (int64_t)creation->options.seed};
    int code = jobs_insert(database, &job, error);
    if (code == 0)
        code = job_event_insert(database, job.id, "info", "message", "the job was created", NULL, error);
    if (code != 0)
        return code;
    snprintf(call->subject, sizeof call->subject, "%s", job.id);
    return training_answer_job(call, database, job.id, error);
}

static int creation_answer(struct admin_call *call, struct database *database, struct error *error) {
    struct creation *creation = calloc(1, sizeof *creation);
    if (creation == NULL)
        return fault_memory(&call->fault);
    int code = creation_read(call, creation, database, error);
    if (code == 0)
        code = creation_insert(call, creation, database, error);
    creation_free(creation);
    free(creation);
    return code;
}

static void creation_after(struct admin_call *call) {
    if (call->admin->jobs != NULL)
        jobs_poke(call->admin->jobs);
}

void training_create(struct exchange *exchange) {
    struct fault fault;
    if (admin_check_ready(exchange->server->admin, &fault) != 0)
        exchange_fault(exchange, &fault);
    else
        admin_handle(exchange, creation_answer, creation_after);
}
