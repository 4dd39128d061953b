/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/gguf.h"

#include "engine/bytes.h"

#include <math.h>
#include <string.h>

static bool is_integer(enum gguf_type type) {
    return type != GGUF_FLOAT32 && type != GGUF_FLOAT64 && type != GGUF_BOOL && type != GGUF_STRING &&
           type != GGUF_ARRAY;
}

static double load_float(enum gguf_type type, const uint8_t *data) {
    uint64_t bits = type == GGUF_FLOAT32 ? load_u32(data) : load_u64(data);
    if (type == GGUF_FLOAT32) {
        uint32_t low = (uint32_t)bits;
        float value;
        memcpy(&value, &low, sizeof value);
        return value;
    }
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Unsigned 64-bit numbers past the signed range are cut to its end: nothing in a model file is that large. */
static int64_t load_int(enum gguf_type type, const uint8_t *data) {
    switch (type) {
    case GGUF_UINT8:
    case GGUF_BOOL:
        return data[0];
    case GGUF_INT8:
        return (int8_t)data[0];
    case GGUF_UINT16:
        return load_u16(data);
    case GGUF_INT16:
        return (int16_t)load_u16(data);
    case GGUF_UINT32:
        return load_u32(data);
    case GGUF_INT32:
        return (int32_t)load_u32(data);
    case GGUF_UINT64:
        return load_u64(data) > INT64_MAX ? INT64_MAX : (int64_t)load_u64(data);
    case GGUF_INT64:
        return (int64_t)load_u64(data);
    default:
        return 0;
    }
}

size_t gguf_type_bytes(uint32_t type) {
    switch (type) {
    case GGUF_UINT8:
    case GGUF_INT8:
    case GGUF_BOOL:
        return 1;
    case GGUF_UINT16:
    case GGUF_INT16:
        return 2;
    case GGUF_UINT32:
    case GGUF_INT32:
    case GGUF_FLOAT32:
        return 4;
    case GGUF_UINT64:
    case GGUF_INT64:
    case GGUF_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

int64_t gguf_array_int(const struct gguf_pair *pair, uint64_t i) {
    enum gguf_type type = pair->element_type;
    if (!is_integer(type) && type != GGUF_BOOL)
        return 0;
    return load_int(type, (const uint8_t *)pair->data + i * gguf_type_bytes(type));
}

double gguf_array_float(const struct gguf_pair *pair, uint64_t i) {
    enum gguf_type type = pair->element_type;
    if (type != GGUF_FLOAT32 && type != GGUF_FLOAT64)
        return (double)gguf_array_int(pair, i);
    return load_float(type, (const uint8_t *)pair->data + i * gguf_type_bytes(type));
}

static const char *kind_name(enum gguf_type type) {
    switch (type) {
    case GGUF_STRING:
        return "a string";
    case GGUF_ARRAY:
        return "an array";
    case GGUF_BOOL:
        return "a truth value";
    case GGUF_FLOAT32:
    case GGUF_FLOAT64:
        return "a float";
    default:
        return "an integer";
    }
}

static const struct gguf_pair *find_or_fail(const struct gguf *gguf, const char *key, struct error *error) {
    const struct gguf_pair *pair = gguf_find(gguf, key);
    if (pair == NULL)
        error_set(error, ERROR_FORMAT, "%s: key \"%s\" is missing", gguf_name(gguf), key);
    return pair;
}

static int kind_error(
    const struct gguf *gguf, const struct gguf_pair *pair, const char *key, const char *wanted, struct error *error) {
    return error_set(
        error, ERROR_FORMAT, "%s: key \"%s\" is %s, not %s", gguf_name(gguf), key, kind_name(pair->type), wanted);
}

int gguf_get_uint32(const struct gguf *gguf, const char *key, uint32_t *out, struct error *error) {
    const struct gguf_pair *pair = find_or_fail(gguf, key, error);
    if (pair == NULL)
        return ERROR_FORMAT;
    if (!is_integer(pair->type))
        return kind_error(gguf, pair, key, "an integer", error);
    int64_t value = load_int(pair->type, pair->data);
    if (value < 0 || value > UINT32_MAX)
        return error_set(
            error, ERROR_FORMAT, "%s: key \"%s\" is %lld, not 0 to 4294967295", gguf_name(gguf), key, (long long)value);
    *out = (uint32_t)value;
    return 0;
}

int gguf_get_float(const struct gguf *gguf, const char *key, float *out, struct error *error) {
    const struct gguf_pair *pair = find_or_fail(gguf, key, error);
    if (pair == NULL)
        return ERROR_FORMAT;
    if (pair->type != GGUF_FLOAT32 && pair->type != GGUF_FLOAT64)
        return kind_error(gguf, pair, key, "a float", error);
    double value = load_float(pair->type, pair->data);
    if (!(fabs(value) <= 3.4028234663852886e38))
        return error_set(error, ERROR_FORMAT, "%s: key \"%s\" is %g, not a finite float", gguf_name(gguf), key, value);
    *out = (float)value;
    return 0;
}

int gguf_get_bool(const struct gguf *gguf, const char *key, bool *out, struct error *error) {
    const struct gguf_pair *pair = find_or_fail(gguf, key, error);
    if (pair == NULL)
        return ERROR_FORMAT;
    if (pair->type != GGUF_BOOL)
        return kind_error(gguf, pair, key, "a truth value", error);
    *out = *(const uint8_t *)pair->data != 0;
    return 0;
}

int gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *out, struct error *error) {
    const struct gguf_pair *pair = find_or_fail(gguf, key, error);
    if (pair == NULL)
        return ERROR_FORMAT;
    if (pair->type != GGUF_STRING)
        return kind_error(gguf, pair, key, "a string", error);
    *out = pair->strings[0];
    return 0;
}
