/* SPDX-License-Identifier: Apache-2.0
 *
 * A connection that carries messages (messages.h), between two processes. Bytes are sent at once (TCP_NODELAY). A peer
 * that is gone without a word (a host without power, a cut cable) is found by keep-alive within a minute. One thread at
 * a time uses a link, but for link_stop.
 */
#ifndef PARALLEL_LINK_H
#define PARALLEL_LINK_H

#include "engine/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct link {
    int socket;      /* connected, not blocking */
    double patience; /* seconds that a wait with a limit takes at most */
    uint8_t *in;     /* [in_capacity] bytes that came; those from in_at to in_end were not taken yet */
    size_t in_at, in_end, in_capacity;
};

/* Takes the socket over. */
void link_init(struct link *link, int socket, double patience);
void link_close(struct link *link);
/* Whoever waits for the peer, or will, gets an error. From any thread and from a signal's handler. */
void link_stop(const struct link *link);
/* The peer has closed, or the connection broke: without waiting, from any thread. */
bool link_is_broken(const struct link *link);

/* Sends a message of what lies in `bytes` [size] and then in `more` [more_size], which is no copy. ERROR_IO. */
int link_send(struct link *link, uint32_t operation, const void *bytes, size_t size, const void *more, size_t more_size,
    struct error *error);

/* Waits for the next message: *bytes [*size] are in the link's memory, 8-byte aligned, until the next call. most: bytes
 * that are accepted. forever: without a limit. ERROR_IO: the connection broke, or nothing came; ERROR_FORMAT: what came
 * is no message; ERROR_MEMORY. */
int link_receive(struct link *link, uint64_t most, bool forever, uint32_t *operation, void **bytes, size_t *size,
    struct error *error);

/* Exactly so many bytes, as they are: before messages begin. */
int link_send_plain(struct link *link, const void *bytes, size_t size, struct error *error);
int link_receive_plain(struct link *link, void *bytes, size_t size, struct error *error);

/* Options of a socket that a link has. ERROR_IO. */
int link_prepare(int socket, double patience, struct error *error);

#endif
