/* SPDX-License-Identifier: Apache-2.0 */
#include "server/embeddings.h"

#include "server/generation.h"
#include "server/prompts.h"

#include <string.h>

static const char *const known[] = {"input", "model", "encoding_format", "dimensions", "user", "pooling", "normalize",
    "embd_normalize", "add_special_tokens", NULL};
static const struct field_unsupported unsupported[] = {{"truncate_prompt_tokens", REFUSE_PRESENT},
    {"messages", REFUSE_PRESENT}, {"kv_cache", REFUSE_PRESENT}, {"stream", REFUSE_TRUE}, {"n", REFUSE_NOT_ONE},
    {NULL, REFUSE_PRESENT}};

/* Which of two words a field has: *second tells, and stays as it is without the field. */
static int embeddings_read_word(
    const json_t *body, const char *name, const char *one, const char *other, bool *second, struct fault *fault) {
    const char *word = *second ? other : one;
    if (field_string(body, name, &word, fault) != 0)
        return -1;
    *second = strcmp(word, other) == 0;
    if (!*second && strcmp(word, one) != 0)
        return fault_invalid(fault, name, "%s is '%.40s'; it must be %s or %s", name, word, one, other);
    return 0;
}

static int embeddings_read_normalise(const json_t *body, bool *normalise, struct fault *fault) {
    int64_t kind = 2;
    *normalise = true;
    if (field_boolean(body, "normalize", normalise, fault) != 0 ||
        field_integer(body, "embd_normalize", -1, 2, &kind, fault) != 0)
        return -1;
    if (kind != -1 && kind != 2)
        return fault_invalid(fault, "embd_normalize",
            "embd_normalize is %lld; it must be 2 (length 1) or -1 (as they are)", (long long)kind);
    if (field_get(body, "embd_normalize") == NULL)
        return 0;
    if (field_get(body, "normalize") != NULL && *normalise != (kind == 2))
        return fault_invalid(fault, "embd_normalize", "embd_normalize says otherwise than normalize");
    *normalise = kind == 2;
    return 0;
}

static int embeddings_check_dimensions(const json_t *body, uint32_t width, struct fault *fault) {
    int64_t dimensions = width;
    if (field_integer(body, "dimensions", 1, INT32_MAX, &dimensions, fault) != 0)
        return -1;
    if (dimensions == width)
        return 0;
    return fault_invalid(fault, "dimensions",
        "dimensions is %lld; this model's vectors have %u, and a part of them would mean nothing: the model was not "
        "trained for that",
        (long long)dimensions, width);
}

/* An empty text has no tokens and so no vector. */
static int embeddings_check_texts(const json_t *input, struct fault *fault) {
    size_t i;
    json_t *item;
    bool empty = json_is_string(input) && json_string_length(input) == 0;
    json_array_foreach(input, i, item) {
        empty |= json_is_string(item) && json_string_length(item) == 0;
    }
    return empty ? fault_invalid(fault, "input", "input has an empty string, which has no embedding") : 0;
}

int embeddings_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault) {
    bool add_special = true, last = context->pooling == POOLING_LAST;
    if (fields_check(body, known, unsupported, context->request_id, fault) != 0 ||
        params_check_model(body, context, fault) != 0)
        return -1;
    struct request *request = plan->request = request_create();
    if (request == NULL)
        return fault_memory(fault);
    plan->n = 1;
    request->max_tokens = 0;
    if (embeddings_read_word(body, "encoding_format", "float", "base64", &plan->base64, fault) != 0 ||
        embeddings_read_word(body, "pooling", "mean", "last", &last, fault) != 0 ||
        embeddings_read_normalise(body, &request->normalise, fault) != 0 ||
        embeddings_check_dimensions(body, context->width, fault) != 0 ||
        field_boolean(body, "add_special_tokens", &add_special, fault) != 0 ||
        embeddings_check_texts(field_get(body, "input"), fault) != 0)
        return -1;
    if (context->pooling == POOLING_NONE && field_get(body, "pooling") == NULL)
        return fault_invalid(fault, "pooling",
            "the model's file asks for a pooling that is not supported; pooling must be given: mean or last");
    request->pooling = last ? POOLING_LAST : POOLING_MEAN;
    return prompts_read(body, "input", add_special, context, request, fault);
}

void embeddings_handle(struct exchange *exchange) {
    generation_handle(exchange, embeddings_parse);
}
