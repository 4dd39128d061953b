/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/item.h"

#include <stdlib.h>

struct eval_item *eval_items_add(struct eval_items *items) {
    if (items->count == items->capacity) {
        size_t capacity = items->capacity == 0 ? 16 : 2 * items->capacity;
        struct eval_item *grown = reallocarray(items->items, capacity, sizeof *grown);
        if (grown == NULL)
            return NULL;
        items->items = grown;
        items->capacity = capacity;
    }
    struct eval_item *item = &items->items[items->count++];
    *item = (struct eval_item){0};
    return item;
}

static void free_texts(char **texts, uint32_t count) {
    for (uint32_t i = 0; texts != NULL && i < count; i++)
        free(texts[i]);
    free(texts);
}

void eval_item_clear(struct eval_item *item) {
    free(item->context);
    free(item->question);
    free_texts(item->answers, item->answers_count);
    free_texts(item->classes, item->classes_count);
    free(item->stop);
    free(item->group);
    *item = (struct eval_item){0};
}

void eval_items_free(struct eval_items *items) {
    for (size_t i = 0; i < items->count; i++)
        eval_item_clear(&items->items[i]);
    free(items->items);
    *items = (struct eval_items){0};
}
