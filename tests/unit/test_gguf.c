/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/gguf_writer.h"

/* A file in a block of exactly its size, so that ASan sees any read past its end. */
struct file {
    uint8_t *data;
    size_t bytes;
};

static struct file finish(struct gguf_writer *writer) {
    struct file file;
    uint8_t *loose = gguf_writer_finish(writer, &file.bytes);
    file.data = malloc(file.bytes);
    assert_non_null(file.data);
    memcpy(file.data, loose, file.bytes);
    free(loose);
    return file;
}

/* One of each kind of value and two tensors. */
static struct file small_file(void) {
    static const char *const words[] = {"one", "", "three"};
    static const int32_t numbers[] = {-1, 0, 2147483647};
    static const float values[64] = {1.5f, -2};
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_string(writer, "text", "hello");
    gguf_writer_uint32(writer, "number", 7);
    gguf_writer_float(writer, "real", 0.25f);
    gguf_writer_bool(writer, "truth", true);
    gguf_writer_pair(writer, "wide", GGUF_UINT64, "\xff\xff\xff\xff\x00\x00\x00\x00", 8);
    gguf_writer_pair(writer, "too wide", GGUF_UINT64, "\x00\x00\x00\x00\x01\x00\x00\x00", 8);
    gguf_writer_pair(writer, "negative", GGUF_INT8, "\xff", 1);
    gguf_writer_pair(writer, "short", GGUF_INT16, "\x34\x12", 2);
    gguf_writer_pair(writer, "double", GGUF_FLOAT64, "\x00\x00\x00\x00\x00\x00\xf8\x3f", 8);
    gguf_writer_pair(writer, "huge double", GGUF_FLOAT64, "\x00\x00\x00\x00\x00\x00\xf8\x7e", 8);
    gguf_writer_strings(writer, "words", words, 3);
    gguf_writer_int32s(writer, "numbers", numbers, 3);
    gguf_writer_tensor(writer, "vector", TENSOR_F32, 1, (uint64_t[]){16}, values, 64);
    gguf_writer_tensor(writer, "matrix", TENSOR_Q8_0, 2, (uint64_t[]){32, 2}, values, 68);
    return finish(writer);
}

static bool equals(struct gguf_string string, const char *text) {
    return string.bytes == strlen(text) && memcmp(string.text, text, string.bytes) == 0;
}

static void reads_what_was_written(void **state) {
    (void)state;
    struct error error = {0};
    struct file file = small_file();
    struct gguf *gguf = gguf_open_memory(file.data, file.bytes, "small", &error);
    uint32_t number = 0;
    float real = 0;
    bool truth = false;
    struct gguf_string text = {0};
    assert_non_null(gguf);
    assert_int_equal(gguf_version(gguf), 3);
    assert_string_equal(gguf_name(gguf), "small");
    assert_int_equal(gguf_pair_count(gguf), 12);
    assert_int_equal(gguf_get_uint32(gguf, "number", &number, &error), 0);
    assert_int_equal(number, 7);
    assert_int_equal(gguf_get_uint32(gguf, "wide", &number, &error), 0);
    assert_true(number == UINT32_MAX);
    assert_int_equal(gguf_get_uint32(gguf, "short", &number, &error), 0);
    assert_int_equal(number, 0x1234);
    assert_int_equal(gguf_get_float(gguf, "real", &real, &error), 0);
    assert_true(real == 0.25f);
    assert_int_equal(gguf_get_float(gguf, "double", &real, &error), 0);
    assert_true(real == 1.5f);
    assert_int_equal(gguf_get_bool(gguf, "truth", &truth, &error), 0);
    assert_true(truth);
    assert_int_equal(gguf_get_string(gguf, "text", &text, &error), 0);
    assert_true(equals(text, "hello"));
    const struct gguf_pair *words = gguf_find(gguf, "words");
    assert_int_equal(words->count, 3);
    assert_true(
        equals(words->strings[0], "one") && equals(words->strings[1], "") && equals(words->strings[2], "three"));
    const struct gguf_pair *numbers = gguf_find(gguf, "numbers");
    assert_int_equal(gguf_array_int(numbers, 0), -1);
    assert_int_equal(gguf_array_int(numbers, 2), 2147483647);
    assert_true(gguf_array_float(numbers, 0) == -1);
    assert_int_equal(gguf_tensor_count(gguf), 2);
    const struct gguf_tensor *vector = gguf_find_tensor(gguf, "vector");
    assert_int_equal(vector->size[0], 16);
    assert_int_equal(vector->size[1], 1);
    assert_memory_equal(vector->data, "\x00\x00\xc0\x3f\x00\x00\x00\xc0", 8);
    const struct gguf_tensor *matrix = gguf_find_tensor(gguf, "matrix");
    assert_ptr_equal(matrix, gguf_tensor_at(gguf, 1));
    assert_int_equal(matrix->bytes, 68);
    assert_int_equal(matrix->offset, (const uint8_t *)matrix->data - file.data);
    assert_null(gguf_find(gguf, "absent"));
    assert_null(gguf_find_tensor(gguf, "vect"));
    gguf_free(gguf);
    free(file.data);
}

static void getters_name_the_key_and_the_kind(void **state) {
    (void)state;
    struct error error = {0};
    struct file file = small_file();
    struct gguf *gguf = gguf_open_memory(file.data, file.bytes, "small", &error);
    uint32_t number;
    float real;
    bool truth;
    struct gguf_string text;
    assert_int_equal(gguf_get_uint32(gguf, "absent", &number, &error), ERROR_FORMAT);
    assert_string_equal(error.message, "small: key \"absent\" is missing");
    assert_int_equal(gguf_get_uint32(gguf, "words", &number, &error), ERROR_FORMAT);
    assert_string_equal(error.message, "small: key \"words\" is an array, not an integer");
    assert_int_equal(gguf_get_uint32(gguf, "negative", &number, &error), ERROR_FORMAT);
    assert_string_equal(error.message, "small: key \"negative\" is -1, not 0 to 4294967295");
    assert_int_equal(gguf_get_uint32(gguf, "too wide", &number, &error), ERROR_FORMAT);
    assert_int_equal(gguf_get_uint32(gguf, "real", &number, NULL), ERROR_FORMAT);
    assert_int_equal(gguf_get_float(gguf, "number", &real, &error), ERROR_FORMAT);
    assert_int_equal(gguf_get_float(gguf, "huge double", &real, &error), ERROR_FORMAT);
    assert_int_equal(gguf_get_bool(gguf, "number", &truth, &error), ERROR_FORMAT);
    assert_int_equal(gguf_get_string(gguf, "words", &text, &error), ERROR_FORMAT);
    gguf_free(gguf);
    free(file.data);
}

/* Opening must fail with this code and a message that holds part. */
static void assert_refused(struct file file, int code, const char *part) {
    struct error error = {0};
    struct gguf *gguf = gguf_open_memory(file.data, file.bytes, "broken", &error);
    assert_null(gguf);
    assert_int_equal(error.code, code);
    if (strncmp(error.message, "broken: ", 8) != 0 || strstr(error.message, part) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error.message, part);
    free(file.data);
}

static void every_truncation_is_refused(void **state) {
    (void)state;
    struct file file = small_file();
    for (size_t bytes = 0; bytes < file.bytes; bytes++) {
        struct file exact = {malloc(bytes == 0 ? 1 : bytes), bytes};
        assert_non_null(exact.data);
        memcpy(exact.data, file.data, bytes);
        assert_refused(exact, ERROR_FORMAT, "");
    }
    free(file.data);
}

static volatile uint8_t sink;

/* Whatever happens, it must be an error with a message or a readable directory; ASan watches. */
static void touch(struct file file) {
    struct error error = {0};
    struct gguf *gguf = gguf_open_memory(file.data, file.bytes, "flipped", &error);
    if (gguf == NULL) {
        assert_true(error.code < 0 && error.message[0] != '\0');
        return;
    }
    for (size_t i = 0; i < gguf_pair_count(gguf); i++) {
        const struct gguf_pair *pair = gguf_pair_at(gguf, i);
        for (uint64_t j = 0; j < pair->count; j++) {
            if (pair->strings != NULL && pair->strings[j].bytes > 0)
                sink ^= (uint8_t)pair->strings[j].text[pair->strings[j].bytes - 1];
            else if (pair->strings == NULL && pair->type == GGUF_ARRAY)
                sink ^= (uint8_t)gguf_array_int(pair, j);
        }
    }
    for (size_t i = 0; i < gguf_tensor_count(gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor_at(gguf, i);
        for (size_t j = 0; j < tensor->bytes; j++)
            sink ^= ((const uint8_t *)tensor->data)[j];
    }
    gguf_free(gguf);
}

static void every_bit_flip_is_survived(void **state) {
    (void)state;
    struct file file = small_file();
    for (size_t bit = 0; bit < 8 * file.bytes; bit++) {
        file.data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        touch(file);
        file.data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    free(file.data);
}

/* Every place of the file overwritten by numbers that overflow when multiplied or added. */
static void huge_numbers_anywhere_are_survived(void **state) {
    (void)state;
    static const uint64_t numbers[] = {
        UINT64_MAX, UINT64_MAX - 31, INT64_MAX, 1ull << 63, 1ull << 61, 1ull << 32, 0xffffffff, 0x80000000, 0};
    struct file file = small_file();
    for (size_t at = 0; at + 8 <= file.bytes; at++) {
        uint8_t saved[8];
        memcpy(saved, file.data + at, 8);
        for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
            memcpy(file.data + at, &numbers[i], 8);
            touch(file);
        }
        memcpy(file.data + at, saved, 8);
    }
    free(file.data);
}

static struct file patched(size_t at, const void *data, size_t bytes) {
    struct file file = small_file();
    memcpy(file.data + at, data, bytes);
    return file;
}

static void headers_are_checked(void **state) {
    (void)state;
    assert_refused(patched(0, "GGML", 4), ERROR_FORMAT, "not a GGUF file");
    assert_refused(patched(4, "\x01\x00\x00\x00", 4), ERROR_UNSUPPORTED, "version 1 is not supported");
    assert_refused(patched(4, "\x04\x00\x00\x00", 4), ERROR_UNSUPPORTED, "version 4 is not supported");
    assert_refused(patched(4, "\x00\x00\x00\x03", 4), ERROR_UNSUPPORTED, "big-endian");
    assert_refused(patched(8, "\xff\xff\xff\xff\xff\xff\xff\xff", 8), ERROR_FORMAT, "number of tensors");
    assert_refused(patched(16, "\x00\x00\x00\x00\x00\x00\x00\x80", 8), ERROR_FORMAT, "number of metadata pairs");
    struct error error = {0};
    struct file second = patched(4, "\x02\x00\x00\x00", 4);
    struct gguf *gguf = gguf_open_memory(second.data, second.bytes, "second", &error);
    assert_non_null(gguf);
    gguf_free(gguf);
    free(second.data);
}

static struct file file_with_pair(const char *key, uint32_t type, const void *value, size_t bytes) {
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_pair(writer, key, type, value, bytes);
    gguf_writer_string(writer, "pad", "0123456789012345678901234567890123456789");
    return finish(writer);
}

#define PAIR(type, value) file_with_pair("key", type, value, sizeof value - 1)

static void values_are_checked(void **state) {
    (void)state;
    assert_refused(PAIR(13, "\x00"), ERROR_FORMAT, "key \"key\": unknown value type");
    assert_refused(PAIR(GGUF_BOOL, "\x02"), ERROR_FORMAT, "neither 0 nor 1");
    assert_refused(PAIR(GGUF_ARRAY, "\x09\0\0\0\x01\0\0\0\0\0\0\0"), ERROR_UNSUPPORTED, "arrays of arrays");
    assert_refused(PAIR(GGUF_ARRAY, "\x0d\0\0\0\x01\0\0\0\0\0\0\0"), ERROR_FORMAT, "unknown value type");
    assert_refused(PAIR(GGUF_ARRAY, "\x07\0\0\0\x02\0\0\0\0\0\0\0\x01\x02"), ERROR_FORMAT, "neither 0 nor 1");
    assert_refused(PAIR(GGUF_ARRAY, "\x08\0\0\0\xff\xff\xff\xff\0\0\0\0"), ERROR_FORMAT, "more strings");
    assert_refused(PAIR(GGUF_ARRAY, "\x08\0\0\0\xff\xff\xff\xff\xff\xff\xff\x1f"), ERROR_FORMAT, "more strings");
    assert_refused(
        PAIR(GGUF_ARRAY, "\x04\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f"), ERROR_FORMAT, "longer than the file");
    assert_refused(PAIR(GGUF_ARRAY, "\x0c\0\0\0\0\0\0\0\0\0\0\x20"), ERROR_FORMAT, "longer than the file");
    assert_refused(PAIR(GGUF_STRING, "\xff\xff\xff\xff\xff\xff\xff\xff"), ERROR_FORMAT, "a string at byte");
    assert_refused(file_with_pair("pad", GGUF_UINT8, "", 1), ERROR_FORMAT, "key \"pad\" occurs twice");
    assert_refused(file_with_pair("a\nb\xff", GGUF_BOOL, "\x02", 1), ERROR_FORMAT, "\"a?b?\"");
    assert_refused(file_with_pair("general.alignment", GGUF_UINT32, "\0\0\0", 4), ERROR_FORMAT, "power of two");
    assert_refused(file_with_pair("general.alignment", GGUF_UINT32, "\x30\0\0", 4), ERROR_FORMAT, "power of two");
    assert_refused(file_with_pair("general.alignment", GGUF_FLOAT32, "\0\0\0", 4), ERROR_FORMAT, "not an integer");
}

static struct file file_with_tensor(uint32_t type, uint32_t dimensions, const uint64_t *size) {
    struct gguf_writer *writer = gguf_writer_create();
    static const uint8_t data[128];
    gguf_writer_tensor(writer, "x", type, dimensions, size, data, sizeof data);
    return finish(writer);
}

#define TENSOR(type, dimensions, ...) file_with_tensor(type, dimensions, (const uint64_t[]){__VA_ARGS__})

static void tensors_are_checked(void **state) {
    (void)state;
    assert_refused(TENSOR(TENSOR_F32, 0, 1), ERROR_FORMAT, "tensor \"x\": the number of dimensions");
    assert_refused(TENSOR(TENSOR_F32, 5, 1, 1, 1, 1, 1), ERROR_FORMAT, "the number of dimensions");
    assert_refused(TENSOR(TENSOR_F32, 2, 8, 0), ERROR_FORMAT, "a size is 0");
    assert_refused(TENSOR(TENSOR_F32, 1, 33), ERROR_FORMAT, "the data ends after the file");
    assert_refused(TENSOR(TENSOR_Q4_0, 2, 16, 2), ERROR_FORMAT, "whole number of blocks");
    assert_refused(TENSOR(TENSOR_F32, 2, 1ull << 33, 1ull << 33), ERROR_FORMAT, "product of the sizes overflows");
    assert_refused(TENSOR(TENSOR_F32, 2, 1ull << 62, 4), ERROR_FORMAT, "product of the sizes overflows");
    assert_refused(TENSOR(TENSOR_F32, 1, 1ull << 63), ERROR_FORMAT, "product of the sizes overflows");
    assert_refused(TENSOR(TENSOR_F32, 1, 1ull << 62), ERROR_FORMAT, "number of bytes overflows");
    assert_refused(TENSOR(12, 4, 1ull << 16, 1ull << 16, 1ull << 16, 1ull << 16), ERROR_FORMAT, "overflows");
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_tensor(writer, "x", TENSOR_F32, 1, (uint64_t[]){1}, "1234", 4);
    gguf_writer_tensor(writer, "x", TENSOR_F32, 1, (uint64_t[]){1}, "1234", 4);
    assert_refused(finish(writer), ERROR_FORMAT, "tensor \"x\" occurs twice");
    /* Offsets: the last field of the only directory entry, at 24 + 8 + 1 + 4 + 8 + 4. */
    struct file file = TENSOR(TENSOR_F32, 1, 1);
    file.data[49] = 4;
    assert_refused(file, ERROR_FORMAT, "the offset is not a multiple");
    file = TENSOR(TENSOR_F32, 1, 1);
    memset(file.data + 49, 0xff, 8);
    file.data[49] = 0xe0;
    assert_refused(file, ERROR_FORMAT, "the data ends after the file");
}

static void unknown_formats_are_listed_without_data(void **state) {
    (void)state;
    struct error error = {0};
    struct file file = TENSOR(16, 2, 256, 1);
    struct gguf *gguf = gguf_open_memory(file.data, file.bytes, "k", &error);
    assert_non_null(gguf);
    assert_null(gguf_find_tensor(gguf, "x")->data);
    assert_int_equal(gguf_find_tensor(gguf, "x")->bytes, 0);
    assert_int_equal(gguf_find_tensor(gguf, "x")->type, 16);
    gguf_free(gguf);
    free(file.data);
}

static void alignment_moves_the_data(void **state) {
    (void)state;
    struct error error = {0};
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_uint32(writer, "general.alignment", 8);
    gguf_writer_tensor(writer, "x", TENSOR_F32, 1, (uint64_t[]){1}, "1234", 4);
    struct file file = finish(writer); /* padded to 32 by the writer, to 8 by the reader */
    struct gguf *gguf = gguf_open_memory(file.data, file.bytes, "aligned", &error);
    assert_non_null(gguf);
    assert_int_equal(gguf_find_tensor(gguf, "x")->offset, 96); /* the directory ends at 90 */
    gguf_free(gguf);
    free(file.data);
}

static void an_empty_directory_is_a_file(void **state) {
    (void)state;
    struct error error = {0};
    struct file file = finish(gguf_writer_create());
    struct gguf *gguf = gguf_open_memory(file.data, file.bytes, "empty", &error);
    assert_non_null(gguf);
    assert_int_equal(gguf_pair_count(gguf) + gguf_tensor_count(gguf), 0);
    assert_null(gguf_find(gguf, "x"));
    gguf_free(gguf);
    free(file.data);
}

static void opens_regular_files_only(void **state) {
    (void)state;
    struct error error = {0};
    char folder[] = "/tmp/distillcache-test-XXXXXX";
    char pipe[64];
    assert_non_null(mkdtemp(folder));
    strcat(strcpy(pipe, folder), "/pipe");
    assert_int_equal(mkfifo(pipe, 0600), 0);
    assert_null(gguf_open(folder, &error)); /* a directory without a model */
    assert_int_equal(error.code, ERROR_IO);
    assert_non_null(strstr(error.message, "/config.json: cannot open"));
    assert_null(gguf_open(pipe, &error)); /* and does not wait for a writer */
    assert_non_null(strstr(error.message, "not a regular file"));
    unlink(pipe);
    assert_null(gguf_open(pipe, &error));
    assert_int_equal(error.code, ERROR_IO);
    assert_non_null(strstr(error.message, pipe));
    rmdir(folder);
    char *empty = test_file_create("", 0);
    assert_null(gguf_open(empty, &error));
    assert_int_equal(error.code, ERROR_FORMAT);
    unlink(empty);
    free(empty);
}

static void mapped_data_survives_being_forgotten(void **state) {
    (void)state;
    struct error error = {0};
    enum { VALUES = 16384 };
    float *values = calloc(VALUES, sizeof *values);
    values[0] = 1;
    values[VALUES / 2] = 2;
    values[VALUES - 1] = 3;
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_tensor(writer, "x", TENSOR_F32, 1, (uint64_t[]){VALUES}, values, VALUES * sizeof *values);
    struct file file = finish(writer);
    char *path = test_file_create(file.data, file.bytes);
    struct gguf *gguf = gguf_open(path, &error);
    assert_non_null(gguf);
    unlink(path);
    const struct gguf_tensor *tensor = gguf_find_tensor(gguf, "x");
    gguf_forget(gguf, tensor->data, tensor->bytes);
    assert_memory_equal(tensor->data, values, VALUES * sizeof *values);
    gguf_forget(gguf, tensor->data, SIZE_MAX); /* nonsense is ignored */
    gguf_free(gguf);
    free(path);
    free(values);
    free(file.data);
}

static void strings_are_shown_safely(void **state) {
    (void)state;
    char out[8];
    assert_string_equal(gguf_string_show((struct gguf_string){"a\0b\x7f", 4}, out, sizeof out), "a?b?");
    assert_string_equal(
        gguf_string_show((struct gguf_string){"\xc3\xa9\xff\xe2\x82", 5}, out, sizeof out), "\xc3\xa9???");
    /* Cut between characters, never inside one. */
    assert_string_equal(gguf_string_show((struct gguf_string){"abcdef\xc3\xa9", 8}, out, sizeof out), "abcdef");
    assert_string_equal(gguf_string_show((struct gguf_string){"abcdefghi", 9}, out, sizeof out), "abcdefg");
    assert_string_equal(gguf_string_show((struct gguf_string){NULL, 0}, out, sizeof out), "");
    assert_string_equal(gguf_string_show((struct gguf_string){"a", 1}, out, 1), "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_was_written),
        cmocka_unit_test(getters_name_the_key_and_the_kind),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(every_bit_flip_is_survived),
        cmocka_unit_test(huge_numbers_anywhere_are_survived),
        cmocka_unit_test(headers_are_checked),
        cmocka_unit_test(values_are_checked),
        cmocka_unit_test(tensors_are_checked),
        cmocka_unit_test(unknown_formats_are_listed_without_data),
        cmocka_unit_test(alignment_moves_the_data),
        cmocka_unit_test(an_empty_directory_is_a_file),
        cmocka_unit_test(opens_regular_files_only),
        cmocka_unit_test(mapped_data_survives_being_forgotten),
        cmocka_unit_test(strings_are_shown_safely),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
