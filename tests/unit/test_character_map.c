/* SPDX-License-Identifier: Apache-2.0
 *
 * Precompiled normalisations: a map made by hand, and what is wrong in a file. Whole maps, and what becomes of a text
 * by them, are compared with sentencepiece in tests/model/test_tokenizers.py.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/character_map.h"
#include "tests/unit/gguf_writer.h"

enum { UNITS = 512, HEADER = 12, SIZE = HEADER + 4 + 4 * UNITS + 300 };

/* An array as a file has it. */
struct array {
    uint8_t bytes[SIZE];
    size_t size;
};

static void set_unit(struct array *array, size_t place, uint32_t unit) {
    memcpy(array->bytes + HEADER + 4 + 4 * place, &unit, sizeof unit);
}

static void set_count(struct array *array, uint32_t count) {
    memcpy(array->bytes, &(uint32_t){GGUF_UINT8}, 4);
    memcpy(array->bytes + 4, &(uint64_t){count}, 8);
    array->size = HEADER + count;
}

/* "A" becomes "a", "AB" "xyz", "\xff" nothing. Children of a place lie at it exclusive or the byte. */
static struct array make(void) {
    struct array array = {.size = 0};
    static const char replacements[] = "a\0xyz\0";
    memcpy(array.bytes + HEADER, &(uint32_t){4 * UNITS}, 4);
    set_unit(&array, 0, 0x100 << 10);                         /* the root's children at 0x100 */
    set_unit(&array, 0x100 ^ 'A', 'A' | 1 << 8 | 0x80 << 10); /* ends, and goes on at 0x141 ^ 0x80 = 0x1c1 */
    set_unit(&array, 0x1c1, 1u << 31 | 0);
    set_unit(&array, 0x1c1 ^ 'B', 'B' | 1 << 8 | 0x03 << 10);
    set_unit(&array, 0x1c1 ^ 'B' ^ 3, 1u << 31 | 2);
    set_unit(&array, 0x1ff, 0xff | 1 << 8 | 0x10 << 10);
    set_unit(&array, 0x1ef, 1u << 31 | 5);
    memcpy(array.bytes + HEADER + 4 + 4 * UNITS, replacements, sizeof replacements - 1);
    set_count(&array, 4 + 4 * UNITS + sizeof replacements - 1);
    return array;
}

static struct gguf *open_file(const struct array *array, uint8_t **file) {
    struct error error = {0};
    size_t bytes;
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_string(writer, "tokenizer.ggml.model", "t5");
    if (array != NULL)
        gguf_writer_pair(writer, "tokenizer.ggml.precompiled_charsmap", GGUF_ARRAY, array->bytes, array->size);
    *file = gguf_writer_finish(writer, &bytes);
    struct gguf *gguf = gguf_open_memory(*file, bytes, "map.gguf", &error);
    if (gguf == NULL)
        fail_msg("%s", error.message);
    return gguf;
}

static void expect(
    const struct character_map *map, const char *text, size_t bytes, size_t length, const char *becomes) {
    const char *replacement = NULL;
    assert_int_equal(character_map_match(map, text, bytes, &replacement), length);
    if (becomes != NULL)
        assert_string_equal(replacement, becomes);
    else
        assert_null(replacement);
}

static void test_longest_key(void **state) {
    (void)state;
    struct array array = make();
    struct character_map map;
    struct error error = {0};
    uint8_t *file;
    struct gguf *gguf = open_file(&array, &file);
    assert_int_equal(character_map_read(&map, gguf, &error), 0);
    expect(&map, "A", 1, 1, "a");
    expect(&map, "AC", 2, 1, "a");
    expect(&map, "ABA", 3, 2, "xyz");
    expect(&map, "AB", 1, 1, "a"); /* the text ends */
    expect(&map, "\xff", 1, 1, "");
    expect(&map, "B", 1, 0, NULL);
    expect(&map, "", 0, 0, NULL);
    gguf_free(gguf);
    free(file);
    gguf = open_file(NULL, &file);
    assert_int_equal(character_map_read(&map, gguf, &error), 0);
    expect(&map, "A", 1, 0, NULL);
    gguf_free(gguf);
    free(file);
}

/* Places and values outside the file lead nowhere, whatever the text. */
static void test_hostile_units(void **state) {
    (void)state;
    struct array array = make();
    struct character_map map;
    struct error error = {0};
    uint32_t random = 1;
    uint8_t *file, text[64];
    for (size_t place = 0; place < UNITS; place++)
        set_unit(&array, place, (random = random * 1664525 + 1013904223));
    struct gguf *gguf = open_file(&array, &file);
    assert_int_equal(character_map_read(&map, gguf, &error), 0);
    for (uint32_t i = 0; i < 20000; i++) {
        const char *replacement;
        for (size_t j = 0; j < sizeof text; j++)
            text[j] = (uint8_t)((random = random * 1664525 + 1013904223) >> 24);
        size_t length = character_map_match(&map, (const char *)text, sizeof text, &replacement);
        assert_true(length <= sizeof text);
        assert_true(length == 0 || strlen(replacement) <= CHARACTER_MAP_LONGEST);
    }
    gguf_free(gguf);
    free(file);
}

static void refuse(const struct array *array, const char *words) {
    struct character_map map;
    struct error error = {0};
    uint8_t *file;
    struct gguf *gguf = open_file(array, &file);
    assert_int_equal(character_map_read(&map, gguf, &error), ERROR_FORMAT);
    if (strstr(error.message, words) == NULL)
        fail_msg("\"%s\" does not say %s", error.message, words);
    assert_int_equal(map.count, 0);
    gguf_free(gguf);
    free(file);
}

static void test_refusals(void **state) {
    (void)state;
    struct array array = make();
    memcpy(array.bytes, &(uint32_t){GGUF_FLOAT32}, 4);
    memcpy(array.bytes + 4, &(uint64_t){4}, 8);
    array.size = HEADER + 16;
    refuse(&array, "not an array of bytes");
    array = make();
    set_count(&array, 3);
    refuse(&array, "3 bytes do not hold");
    array = make();
    set_count(&array, 4 * UNITS);
    refuse(&array, "do not hold");
    array = make();
    memcpy(array.bytes + HEADER, &(uint32_t){4 * UNITS - 1}, 4);
    refuse(&array, "do not hold");
    array = make();
    set_count(&array, 4 + 4 * UNITS); /* no replacement */
    refuse(&array, "do not end");
    array = make();
    set_count(&array, 4 + 4 * UNITS + 1); /* which does not end */
    refuse(&array, "do not end");
    array = make();
    memset(array.bytes + HEADER + 4 + 4 * UNITS, 'a', 256);
    set_count(&array, 4 + 4 * UNITS + 257);
    refuse(&array, "more than 255 bytes");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_longest_key),
        cmocka_unit_test(test_hostile_units),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
