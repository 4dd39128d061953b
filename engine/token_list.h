/* SPDX-License-Identifier: Apache-2.0
 *
 * A growing array of token ids.
 */
#ifndef ENGINE_TOKEN_LIST_H
#define ENGINE_TOKEN_LIST_H

#include <stddef.h>
#include <stdint.h>

struct token_list { /* zero-initialise, free with token_list_free */
    int32_t *ids;
    size_t count;
    size_t capacity;
};
int token_list_append(struct token_list *list, int32_t id);   /* 0 or ERROR_MEMORY */
int token_list_reserve(struct token_list *list, size_t more); /* room for more ids; 0 or ERROR_MEMORY */
void token_list_free(struct token_list *list);

#endif
