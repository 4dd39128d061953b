/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/character_map.h"

#include <stdbool.h>
#include <string.h>

static const char key[] = "tokenizer.ggml.precompiled_charsmap";

static uint32_t read_number(const uint8_t *from) {
    uint32_t number;
    memcpy(&number, from, sizeof number);
    return number;
}

/* Whether each replacement ends, within the limit. */
static bool check_replacements(const struct character_map *map) {
    size_t longest = 0, length = 0;
    for (size_t i = 0; i < map->bytes; i++) {
        length = map->replacements[i] == '\0' ? 0 : length + 1;
        longest = length > longest ? length : longest;
    }
    return map->bytes > 0 && length == 0 && longest <= CHARACTER_MAP_LONGEST;
}

int character_map_read(struct character_map *map, const struct gguf *gguf, struct error *error) {
    const struct gguf_pair *pair = gguf_find(gguf, key);
    *map = (struct character_map){0};
    if (pair == NULL)
        return 0;
    bool bytes = pair->type == GGUF_ARRAY && (pair->element_type == GGUF_UINT8 || pair->element_type == GGUF_INT8);
    if (!bytes)
        return error_set(error, ERROR_FORMAT, "%s is not an array of bytes", key);
    if (pair->count == 0)
        return 0;
    const uint8_t *data = pair->data;
    size_t size = pair->count, units = size >= 4 ? read_number(data) : 0;
    if (size < 4 || units == 0 || units % 4 != 0 || units > size - 4)
        return error_set(error, ERROR_FORMAT, "%s: %zu bytes do not hold what its first number says", key, size);
    struct character_map found = {.units = data + 4,
        .count = units / 4,
        .replacements = (const char *)data + 4 + units,
        .bytes = size - 4 - units};
    if (!check_replacements(&found))
        return error_set(error, ERROR_FORMAT, "%s: its replacements do not end, or have more than %d bytes", key,
            CHARACTER_MAP_LONGEST);
    *map = found;
    return 0;
}

static size_t next_of(size_t place, uint32_t unit) {
    return place ^ (size_t)(unit >> 10) << ((unit & 1u << 9) >> 6);
}

size_t character_map_match(const struct character_map *map, const char *text, size_t bytes, const char **replacement) {
    size_t longest = 0;
    if (map->count == 0)
        return 0;
    size_t place = next_of(0, read_number(map->units));
    for (size_t i = 0; i < bytes; i++) {
        uint8_t byte = (uint8_t)text[i];
        place ^= byte;
        if (place >= map->count)
            break;
        uint32_t unit = read_number(map->units + 4 * place);
        if ((unit & (1u << 31 | 0xff)) != byte)
            break;
        place = next_of(place, unit);
        if ((unit >> 8 & 1) == 0 || place >= map->count)
            continue;
        uint32_t value = read_number(map->units + 4 * place) & 0x7fffffff;
        if (value >= map->bytes)
            continue;
        longest = i + 1;
        *replacement = map->replacements + value;
    }
    return longest;
}
