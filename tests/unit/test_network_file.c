/* SPDX-License-Identifier: Apache-2.0
 *
 * Files of networks: what is written is what is read, and whatever is wrong with a file is said and harms nothing.
 * Files are made wrong by exchanging words of a good one's header for others of the same length.
 */
#include "policy/network.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATH_SIZE = 192 };

static const struct network_shape shapes[] = {
    {.features = FEATURES_CONTENT,
        .inputs = (1u << INPUT_KINDS) - 1,
        .content = 4,
        .hidden = 8,
        .layers = 3,
        .kv_heads = 2,
        .head_dim = 16},
    {.features = FEATURES_CONTENT, .inputs = 1 << INPUT_SUM, .hidden = 1, .layers = 1, .kv_heads = 1, .head_dim = 1},
    {.features = FEATURES_PAPER,
        .inputs =
            1 << INPUT_MEAN | 1 << INPUT_VALUE_NORM | 1 << INPUT_DEVIATION | 1 << INPUT_ENTROPY | 1 << INPUT_POSITION,
        .hidden = 8,
        .layers = 3,
        .kv_heads = 2,
        .head_dim = 16},
};

static char folder[64];

static void path_of(const char *name, char path[static PATH_SIZE]) {
    snprintf(path, PATH_SIZE, "%s/%s", folder, name);
}

static struct policy_network *make(const struct network_shape *shape) {
    struct policy_network *network = network_create(shape, NULL);
    struct network_array array;
    uint32_t state = 1;
    assert_non_null(network);
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        for (size_t j = 0; j < array.count; j++) {
            state = state * 1664525 + 1013904223;
            array.values[j] = (float)(state >> 8) / (1 << 24);
        }
    memset(network->fingerprint, 'a', 64);
    network->method = strdup("distillcache");
    free(network->record);
    network->record = strdup("{\"steps\": 100, \"note\": \"\\\"quoted\\\"\"}");
    network->scope = SCOPE_MODEL;
    network->floor = 0.3f;
    network->interval = 5;
    network->summary = false;
    network->protect_recent = 7;
    network->protect_sinks = 1 << 30;
    return network;
}

static void expect_same(const struct policy_network *a, const struct policy_network *b) {
    struct network_array x, y;
    assert_memory_equal(&a->shape, &b->shape, sizeof a->shape);
    for (uint32_t i = 0; network_array(a, i, &x); i++) {
        assert_true(network_array(b, i, &y));
        assert_memory_equal(x.values, y.values, x.count * sizeof x.values[0]);
    }
    assert_int_equal(a->scope, b->scope);
    assert_true(a->floor == b->floor);
    assert_int_equal(a->interval, b->interval);
    assert_int_equal(a->summary, b->summary);
    assert_int_equal(a->protect_recent, b->protect_recent);
    assert_int_equal(a->protect_sinks, b->protect_sinks);
    assert_string_equal(a->fingerprint, b->fingerprint);
    assert_string_equal(a->method, b->method);
    assert_string_equal(a->record, b->record);
}

struct bytes {
    unsigned char *data;
    size_t size;
};

static struct bytes read_whole(const char *path) {
    FILE *file = fopen(path, "rb");
    struct bytes bytes = {0};
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    bytes.size = (size_t)ftell(file);
    rewind(file);
    bytes.data = malloc(bytes.size);
    assert_int_equal(fread(bytes.data, 1, bytes.size, file), bytes.size);
    fclose(file);
    return bytes;
}

static struct bytes save(const struct network_shape *shape) {
    char path[PATH_SIZE];
    struct error error;
    struct policy_network *network = make(shape);
    path_of("saved", path);
    if (network_save(network, path, &error) != 0)
        fail_msg("%s", error.message);
    network_release(network);
    struct bytes bytes = read_whole(path);
    unlink(path);
    return bytes;
}

/* ---- good files ---- */

static void test_round_trip(void **state) {
    (void)state;
    char path[PATH_SIZE], temporary[PATH_SIZE];
    struct error error;
    path_of("network.safetensors", path);
    path_of("network.safetensors.tmp", temporary);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct policy_network *network = make(&shapes[i]);
        assert_int_equal(network_save(network, path, &error), 0);
        assert_int_not_equal(access(temporary, F_OK), 0);
        struct policy_network *read = network_load(path, &error);
        if (read == NULL)
            fail_msg("%s", error.message);
        expect_same(network, read);
        network_release(read);
        network_release(network);
    }
    unlink(path);
}

static void test_no_texts(void **state) {
    (void)state;
    char path[PATH_SIZE];
    struct policy_network *network = network_create(&shapes[0], NULL);
    path_of("plain", path);
    assert_int_equal(network_save(network, path, NULL), 0);
    struct policy_network *read = network_load(path, NULL);
    assert_non_null(read);
    assert_null(read->method);
    assert_string_equal(read->fingerprint, "");
    assert_true(read->summary && read->scope == SCOPE_LAYER && read->floor == 0.75f && read->interval == 16);
    network_release(network);
    network_release(read);
    unlink(path);
}

static void test_save_failures(void **state) {
    (void)state;
    char path[PATH_SIZE];
    struct error error;
    struct policy_network *network = make(&shapes[0]);
    path_of("none/network", path);
    assert_int_equal(network_save(network, path, &error), ERROR_IO);
    assert_non_null(strstr(error.message, "No such file"));
    /* A folder in the place of the file: what was written is removed. */
    path_of("folder", path);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(network_save(network, path, &error), ERROR_IO);
    rmdir(path);
    path_of("folder.tmp", path);
    assert_int_not_equal(access(path, F_OK), 0);
    network->w1[3] = INFINITY;
    path_of("network", path);
    assert_int_equal(network_save(network, path, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "number 3 of w1"));
    network->w1[3] = 0;
    strcpy(network->record, "[]");
    assert_int_equal(network_save(network, path, &error), ERROR_INVALID);
    assert_int_not_equal(access(path, F_OK), 0);
    network_release(network);
}

static void test_load_failures(void **state) {
    (void)state;
    char path[PATH_SIZE];
    struct error error;
    path_of("none", path);
    assert_null(network_load(path, &error));
    assert_int_equal(error.code, ERROR_IO);
    assert_null(network_load(folder, &error));
    assert_int_equal(error.code, ERROR_IO);
    assert_null(network_load("/dev/zero", &error));
    assert_int_equal(error.code, ERROR_IO);
}

/* ---- bad files ---- */

static void refuse(const unsigned char *data, size_t size, const char *words) {
    struct error error = {0};
    unsigned char *copy = malloc(size > 0 ? size : 1); /* the end is where a sanitiser sees it */
    memcpy(copy, data, size);
    struct policy_network *network = network_parse(copy, size, "FILE", &error);
    free(copy);
    if (network != NULL)
        fail_msg("was read, but %s", words);
    assert_int_equal(error.code, ERROR_FORMAT);
    if (strncmp(error.message, "FILE: ", 6) != 0 || strstr(error.message, words) == NULL)
        fail_msg("\"%s\" does not say %s", error.message, words);
}

static void test_truncated(void **state) {
    (void)state;
    struct bytes bytes = save(&shapes[0]);
    for (size_t size = 0; size < bytes.size; size += size < 3000 ? 1 : 97)
        refuse(bytes.data, size, "");
    refuse(bytes.data, bytes.size - 1, "");
    bytes.data = realloc(bytes.data, bytes.size + 4);
    memset(bytes.data + bytes.size, 0, 4);
    refuse(bytes.data, bytes.size + 4, "bytes of data, but its tensors end at");
    free(bytes.data);
}

/* The file with `from`, which its header has once, replaced by `to`; the length of the header follows. */
static struct bytes exchange(struct bytes bytes, const char *from, const char *to) {
    uint64_t header;
    memcpy(&header, bytes.data, 8);
    char *at = memmem(bytes.data + 8, header, from, strlen(from));
    if (at == NULL)
        fail_msg("the header has no %s", from);
    size_t before = (size_t)((unsigned char *)at - bytes.data), after = before + strlen(from);
    struct bytes made = {.size = bytes.size - strlen(from) + strlen(to)};
    made.data = malloc(made.size);
    memcpy(made.data, bytes.data, before);
    memcpy(made.data + before, to, strlen(to));
    memcpy(made.data + before + strlen(to), bytes.data + after, bytes.size - after);
    header += strlen(to) - strlen(from);
    memcpy(made.data, &header, 8);
    return made;
}

static void test_bad_headers(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *words;
    } cases[] = {
        {"{\"__metadata__\":{", "[", "not JSON"},
        {"\"__metadata__\":{", "\"__metadata_\":{", "dtype"},
        {"\"summary\":\"0\"", "\"summary\":0", "no string"},
        {"distillcache-policy-1", "distillcache-policy-2", "no policy file"},
        {"\"format\":\"distillcache-policy-1\",", "", "no policy file"},
        {"\"interval\":", "\"intervals\":", "do not have 'interval'"},
        {"\"interval\":\"5\"", "\"interval\":\"5\",\"more\":\"1\"", "unknown key 'more'"},
        {"\"interval\":\"5\"", "\"interval\":\"0\"", "interval is '0'"},
        {"\"interval\":\"5\"", "\"interval\":\"5x\"", "interval is '5x'"},
        {"\"interval\":\"5\"", "\"interval\":\"65537\"", "interval is '65537'"},
        {"\"features\":\"content\"", "\"features\":\"deeper\"", "features is 'deeper'"},
        {"\"inputs\":\"content,sum,mean", "\"inputs\":\"content,mean,sum", "inputs is"},
        {"\"inputs\":\"content,sum", "\"inputs\":\"sum", "inputs is"},
        {"\"inputs\":\"content,sum", "\"inputs\":\"content,sum,sum", "inputs is"},
        {"\"inputs\":\"content,sum", "\"inputs\":\"content,hidden_state", "known inputs"},
        {"\"content\":\"4\"", "\"content\":\"-4\"", "content is '-4'"},
        {"\"content\":\"4\"", "\"content\":\"17\"", "content is '17'"},
        {"\"content\":\"4\"", "\"content\":\"5\"", "shape of tensor 'content'"},
        {"\"hidden\":\"8\"", "\"hidden\":\"7\"", "shape of tensor 'w1'"},
        {"\"hidden\":\"8\"", "\"hidden\":\"0\"", "hidden is 0"},
        {"\"layers\":\"3\"", "\"layers\":\"4294967295\"", "too few"},
        {"\"layers\":\"3\"", "\"layers\":\"4294967296\"", "layers is '4294967296'"},
        {"\"layers\":\"3\"", "\"layers\":\"0\"", "layers is 0"},
        {"\"kv_heads\":\"2\"", "\"kv_heads\":\"1\"", "shape of tensor"},
        {"\"head_dim\":\"16\"", "\"head_dim\":\"32\"", "shape of tensor 'content'"},
        {"\"fingerprint\":\"aaaa", "\"fingerprint\":\"../a", "fingerprint"},
        {"\"fingerprint\":\"aaaa", "\"fingerprint\":\"aaa", "fingerprint"},
        {"\"scope\":\"model\"", "\"scope\":\"world\"", "scope is 'world'"},
        {"\"floor\":\"0.3", "\"floor\":\"1.3", "floor is"},
        {"\"floor\":\"0.3", "\"floor\":\"nan", "floor is"},
        {"\"floor\":\"0.3", "\"floor\":\"-0.3", "floor is"},
        {"\"summary\":\"0\"", "\"summary\":\"2\"", "summary is '2'"},
        {"\"protect_sinks\":\"1073741824\"", "\"protect_sinks\":\"1073741825\"", "protect_sinks"},
        {"\"method\":\"distillcache\"", "\"method\":\"a b\"", "method"},
        {"\"record\":\"{", "\"record\":\"", "record"},
        {"\"content_offset\":", "\"content_offsets\":", "unknown tensor 'content_offsets'"},
        {"\"content_offset\":", "\"mean\":", "not JSON"}, /* the name is there twice */
        {"\"w2\":{\"dtype\":\"F32\"", "\"w2\":{\"dtype\":\"F16\"", "'w2' is not F32"},
        {"\"w2\":{\"dtype\":\"F32\"", "\"w2\":{\"dtype\":32", "no dtype"},
        {"\"w2\":{", "\"w2\":[],\"w9\":{", "no dtype"},
        {"\"shape\":[8]", "\"shape\":[-8]", "no valid shape"},
        {"\"shape\":[8]", "\"shape\":[8.0]", "no valid shape"},
        {"\"shape\":[8]", "\"shape\":[8,1]", "shape of tensor 'w2'"},
        {"\"shape\":[8]", "\"shape\":[[[[[[8]]]]]]", "no valid shape"},
        {"\"shape\":[8]", "\"shape\":[18446744073709551616]", "not JSON"},
        {"\"data_offsets\":[0,", "\"data_offsets\":[4,", "gap"},
        {"\"data_offsets\":[0,", "\"data_offsets\":[-4,", "data_offsets"},
        {"\"data_offsets\":[0,", "\"data_offsets\":[99999999,", "data_offsets"},
        {"\"data_offsets\":[0,1536]", "\"data_offsets\":[0,1540]", "overlap"},
        {"\"data_offsets\":[0,1536]", "\"data_offsets\":[0,1532]", "gap"},
        {"\"data_offsets\":[0,1536]", "\"data_offsets\":[1536,0]", "data_offsets"},
        {"\"data_offsets\":[0,1536]", "\"data_offsets\":[0,1536,1536]", "data_offsets"},
        {"\"data_offsets\":[0,1536]", "\"data_offsets\":[0,9223372036854775807]", "data_offsets"},
        {"\"data_offsets\":[0,1536]", "\"data\":[0,1536]", "data_offsets"},
    };
    struct bytes bytes = save(&shapes[0]);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct bytes wrong = exchange(bytes, cases[i].from, cases[i].to);
        refuse(wrong.data, wrong.size, cases[i].words);
        free(wrong.data);
    }
    free(bytes.data);
}

/* Of the same length as its place, two tensors swapped so that one is the other's data: sizes differ. */
static void test_wrong_sizes(void **state) {
    (void)state;
    struct bytes bytes = save(&shapes[0]);
    struct bytes one = exchange(bytes, "[0,1536]", "[0,1632]"), both = exchange(one, "[1536,1632]", "[1632,1632]");
    refuse(both.data, both.size, "not the 1536 bytes");
    free(one.data);
    free(both.data);
    free(bytes.data);
}

static void test_too_many_tensors(void **state) {
    (void)state;
    char text[8192] = "";
    size_t length = 0;
    for (int i = 0; i < 80; i++)
        length += (size_t)snprintf(text + length, sizeof text - length,
            "\"x%d\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},", i);
    snprintf(text + length, sizeof text - length, "\"content\":{");
    struct bytes bytes = save(&shapes[0]), many = exchange(bytes, "\"content\":{", text);
    refuse(many.data, many.size, "more than 64 tensors");
    free(bytes.data);
    free(many.data);
}

static void test_header_length(void **state) {
    (void)state;
    struct bytes bytes = save(&shapes[0]);
    const uint64_t lengths[] = {0, 1, bytes.size - 7, (16 << 20) + 1, UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        memcpy(bytes.data, &lengths[i], 8);
        refuse(bytes.data, bytes.size, "header");
    }
    free(bytes.data);
}

static void test_not_finite(void **state) {
    (void)state;
    struct bytes bytes = save(&shapes[0]);
    uint64_t header;
    memcpy(&header, bytes.data, 8);
    unsigned char *data = bytes.data + 8 + header, *last = bytes.data + bytes.size - 4;
    unsigned char *last_budget = last - 3 * 3 * sizeof(float); /* before three more arrays of three layers */
    const float not_a_number = NAN, infinite = -INFINITY, negative = -1;
    float kept;
    memcpy(&kept, data + 12, 4);
    memcpy(data + 12, &not_a_number, 4);
    refuse(bytes.data, bytes.size, "number 3 of tensor 'content' is not finite");
    memcpy(data + 12, &kept, 4);
    memcpy(last_budget, &infinite, 4);
    refuse(bytes.data, bytes.size, "number 2 of tensor 'layer_budgets' is not finite");
    memcpy(last_budget, &kept, 4);
    memcpy(last, &infinite, 4);
    refuse(bytes.data, bytes.size, "number 2 of tensor 'summary_slopes' is not finite");
    memcpy(last, &kept, 4);
    memcpy(last_budget, &negative, 4);
    refuse(bytes.data, bytes.size, "budget of layer 2 is negative");
    free(bytes.data);
}

/* ---- shipped ones ---- */

static void test_shipped(void **state) {
    (void)state;
    char path[PATH_SIZE], name[128], fingerprint[65];
    struct error error = {0};
    struct policy_network *network = make(&shapes[0]);
    memset(fingerprint, 'c', 64);
    fingerprint[64] = '\0';
    setenv("DISTILLCACHE_POLICIES", folder, 1);
    assert_null(network_load_shipped(fingerprint, "distillcache", &error));
    assert_int_equal(error.code, ERROR_IO);
    assert_non_null(strstr(error.message, "distillcache train"));
    snprintf(name, sizeof name, "%s-ranker.safetensors", fingerprint);
    path_of(name, path);
    assert_int_equal(network_save(network, path, NULL), 0);
    assert_null(network_load_shipped(fingerprint, "distillcache", &error));
    struct policy_network *first = network_load_shipped(fingerprint, "ranker", &error);
    struct policy_network *second = network_load_shipped(fingerprint, "ranker", &error);
    assert_non_null(first);
    assert_ptr_equal(first, second);
    /* A new file is read again; who has the old one keeps it. */
    network->w1[0] = 5;
    assert_int_equal(network_save(network, path, NULL), 0);
    struct policy_network *third = network_load_shipped(fingerprint, "ranker", &error);
    assert_ptr_not_equal(third, first);
    assert_true(third->w1[0] == 5);
    assert_int_equal(first->references, 2);
    assert_null(network_load_shipped("../network", "distillcache", &error));
    assert_null(network_load_shipped("", "distillcache", &error));
    network_release(first);
    network_release(second);
    network_release(third);
    network_release(network);
    unlink(path);
    unsetenv("DISTILLCACHE_POLICIES");
}

int main(void) {
    strcpy(folder, "/tmp/test_network_XXXXXX");
    if (mkdtemp(folder) == NULL)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_no_texts),
        cmocka_unit_test(test_save_failures),
        cmocka_unit_test(test_load_failures),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_bad_headers),
        cmocka_unit_test(test_wrong_sizes),
        cmocka_unit_test(test_too_many_tensors),
        cmocka_unit_test(test_header_length),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_shipped),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(folder);
    return failed;
}
