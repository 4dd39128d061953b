/* SPDX-License-Identifier: Apache-2.0 */
#include "server/prompts.h"

#include <stdlib.h>

/* One prompt: text or an array of ids. */
static int prompts_add(const json_t *item, const char *name, bool add_special, const struct parse_context *context,
    struct request *request, struct fault *fault) {
    struct token_list ids = {0};
    int failed;
    if (json_is_string(item))
        failed =
            params_encode_prompt(json_string_value(item), json_string_length(item), add_special, context, &ids, fault);
    else
        failed = params_read_tokens(item, name, context, &ids, fault);
    if (failed == 0)
        failed = params_add_prompt(request, &ids, context, name, fault);
    token_list_free(&ids);
    return failed;
}

/* The number of prompts in the field, 0 with a fault. */
static size_t prompts_count(const json_t *prompt, const char *name, struct fault *fault) {
    if (json_is_string(prompt))
        return 1;
    if (!json_is_array(prompt) || json_array_size(prompt) == 0) {
        fault_invalid(fault, name,
            "%s must be a string, an array of strings, an array of token ids or an array of arrays of token ids, "
            "not %s",
            name, json_is_array(prompt) ? "an empty array" : field_type(prompt));
        return 0;
    }
    const json_t *first = json_array_get(prompt, 0);
    if (json_is_number(first))
        return 1;
    bool text = json_is_string(first);
    size_t i;
    json_t *item;
    json_array_foreach(prompt, i, item) {
        if (text ? json_is_string(item) : json_is_array(item))
            continue;
        fault_invalid(fault, name,
            "entry %zu of %s is %s: all entries must be strings, or all token ids, or all arrays of token ids", i, name,
            field_type(item));
        return 0;
    }
    return json_array_size(prompt);
}

int prompts_read(const json_t *body, const char *name, bool add_special, const struct parse_context *context,
    struct request *request, struct fault *fault) {
    const json_t *prompt = field_get(body, name);
    if (prompt == NULL)
        return fault_invalid(fault, name, "%s is missing", name);
    size_t count = prompts_count(prompt, name, fault);
    if (count == 0)
        return -1;
    if (count * request->n > CHOICES_MAX)
        return fault_invalid(fault, name, "%zu prompts with n %u are %zu choices; at most %d are allowed", count,
            request->n, count * request->n, CHOICES_MAX);
    request->prompts = calloc(count, sizeof *request->prompts);
    if (request->prompts == NULL)
        return fault_memory(fault);
    if (json_is_string(prompt) || json_is_number(json_array_get(prompt, 0)))
        return prompts_add(prompt, name, add_special, context, request, fault);
    for (size_t i = 0; i < count; i++)
        if (prompts_add(json_array_get(prompt, i), name, add_special, context, request, fault) != 0)
            return -1;
    return 0;
}
