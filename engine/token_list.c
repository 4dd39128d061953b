/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/token_list.h"

#include <stdlib.h>

#include "engine/error.h"

int token_list_reserve(struct token_list *list, size_t more) {
    if (more <= list->capacity - list->count)
        return 0;
    if (more > SIZE_MAX / 16 - list->count)
        return ERROR_MEMORY;
    size_t capacity = list->count + more;
    if (capacity < 2 * list->capacity)
        capacity = 2 * list->capacity;
    if (capacity < 64)
        capacity = 64;
    int32_t *ids = realloc(list->ids, capacity * sizeof *ids);
    if (ids == NULL)
        return ERROR_MEMORY;
    list->ids = ids;
    list->capacity = capacity;
    return 0;
}

int token_list_append(struct token_list *list, int32_t id) {
    if (token_list_reserve(list, 1) != 0)
        return ERROR_MEMORY;
    list->ids[list->count++] = id;
    return 0;
}

void token_list_free(struct token_list *list) {
    free(list->ids);
    *list = (struct token_list){0};
}
