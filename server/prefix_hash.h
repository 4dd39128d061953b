/* SPDX-License-Identifier: Apache-2.0
 *
 * The response header X-Prefix-Hash: a name for how a prompt begins, the same at every replica that serves the model.
 * Whoever spreads requests over replicas sends those with one name to one replica, which then holds the computed
 * prefix (engine/prefix.h); docker/README.md shows how.
 *
 * The name is 16 hexadecimal digits: FNV-1a (64 bits; its authors' constants) over the first `prefix_hash_tokens` token
 * ids, each as four bytes, low byte first. Prompts with fewer tokens have none: there is little to go back for, and
 * their name would change with each turn of a conversation.
 */
#ifndef SERVER_PREFIX_HASH_H
#define SERVER_PREFIX_HASH_H

#include <stdint.h>

enum { PREFIX_HASH_SIZE = 17 }; /* with the NUL */

/* The name of tokens [count], by the first `length` of them; empty if there are fewer, or length is 0. */
void prefix_hash_write(const int32_t *tokens, uint32_t count, uint32_t length, char out[static PREFIX_HASH_SIZE]);

#endif
