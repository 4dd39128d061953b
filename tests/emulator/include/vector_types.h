/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA's vector types for kernels compiled as C++. A copy of one moves all its bytes at once, as one access of memory,
 * since the emulator counts accesses as the device does: the compiler must not split them into elements.
 */
#ifndef EMULATOR_VECTOR_TYPES_H
#define EMULATOR_VECTOR_TYPES_H

#include <stdint.h>

typedef unsigned emulator_bytes_16 __attribute__((vector_size(16)));

#define EMULATOR_VECTOR_COPY(name, whole)                                                                              \
    name() = default;                                                                                                  \
    name(const name &from) : all(from.all) {                                                                           \
    }                                                                                                                  \
    name &operator=(const name &from) {                                                                                \
        all = from.all;                                                                                                \
        return *this;                                                                                                  \
    }

#define EMULATOR_VECTOR_2(name, type, whole)                                                                           \
    struct alignas(sizeof(whole)) name {                                                                               \
        union {                                                                                                        \
            struct {                                                                                                   \
                type x, y;                                                                                             \
            };                                                                                                         \
            whole all;                                                                                                 \
        };                                                                                                             \
        EMULATOR_VECTOR_COPY(name, whole)                                                                              \
        name(type x_, type y_) : x(x_), y(y_) {                                                                        \
        }                                                                                                              \
    };                                                                                                                 \
    static_assert(sizeof(name) == 2 * sizeof(type), "");                                                               \
    static inline name make_##name(type x, type y) {                                                                   \
        return name(x, y);                                                                                             \
    }

#define EMULATOR_VECTOR_4(name, type, whole)                                                                           \
    struct alignas(sizeof(whole)) name {                                                                               \
        union {                                                                                                        \
            struct {                                                                                                   \
                type x, y, z, w;                                                                                       \
            };                                                                                                         \
            whole all;                                                                                                 \
        };                                                                                                             \
        EMULATOR_VECTOR_COPY(name, whole)                                                                              \
        name(type x_, type y_, type z_, type w_) : x(x_), y(y_), z(z_), w(w_) {                                        \
        }                                                                                                              \
    };                                                                                                                 \
    static_assert(sizeof(name) == 4 * sizeof(type), "");                                                               \
    static inline name make_##name(type x, type y, type z, type w) {                                                   \
        return name(x, y, z, w);                                                                                       \
    }

/* Three elements are three accesses on the device too. */
#define EMULATOR_VECTOR_3(name, type)                                                                                  \
    struct name {                                                                                                      \
        type x, y, z;                                                                                                  \
    };                                                                                                                 \
    static inline name make_##name(type x, type y, type z) {                                                           \
        return name{x, y, z};                                                                                          \
    }

#define EMULATOR_VECTORS(prefix, type, whole_2, whole_4)                                                               \
    struct prefix##1 {                                                                                                 \
        type x;                                                                                                        \
    };                                                                                                                 \
    EMULATOR_VECTOR_2(prefix##2, type, whole_2)                                                                        \
    EMULATOR_VECTOR_3(prefix##3, type)                                                                                 \
    EMULATOR_VECTOR_4(prefix##4, type, whole_4)

EMULATOR_VECTORS(char, signed char, uint16_t, uint32_t)
EMULATOR_VECTORS(uchar, unsigned char, uint16_t, uint32_t)
EMULATOR_VECTORS(short, short, uint32_t, uint64_t)
EMULATOR_VECTORS(ushort, unsigned short, uint32_t, uint64_t)
EMULATOR_VECTORS(int, int, uint64_t, emulator_bytes_16)
EMULATOR_VECTORS(uint, unsigned, uint64_t, emulator_bytes_16)
EMULATOR_VECTORS(float, float, uint64_t, emulator_bytes_16)
EMULATOR_VECTOR_2(longlong2, long long, emulator_bytes_16)
EMULATOR_VECTOR_2(ulonglong2, unsigned long long, emulator_bytes_16)
EMULATOR_VECTOR_2(double2, double, emulator_bytes_16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {
    }
};

#endif
