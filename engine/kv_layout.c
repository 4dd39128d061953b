/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/backend.h"

size_t kv_format_bytes(enum kv_format format) {
    return format == KV_F32 ? sizeof(float) : sizeof(uint16_t);
}

size_t kv_page_bytes(const struct kv_layout *layout) {
    size_t keys_and_values = 2 * (size_t)layout->head_dim * KV_PAGE_SLOTS * kv_format_bytes(layout->format);
    size_t bytes = keys_and_values + KV_PAGE_SLOTS * sizeof(int32_t);
    return (bytes + 63) / 64 * 64;
}
