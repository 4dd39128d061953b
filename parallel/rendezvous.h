/* SPDX-License-Identifier: Apache-2.0
 *
 * How the processes of one model find each other: the leader (rank 0) listens, each worker connects and says which rank
 * it is. Both prove that they know the same key without sending it (HMAC-SHA-256, RFC 2104, of random numbers from both
 * ends and all that was said), and compare what must be the same: the protocol, the program's version, the model's
 * fingerprint, the kind of backend, the number of ranks. Whoever does not fit is told why and sent away, and a stranger
 * who says nothing keeps nobody waiting. After that nothing is proved or encrypted any more: whoever can change what
 * the network carries can do what a leader can.
 */
#ifndef PARALLEL_RENDEZVOUS_H
#define PARALLEL_RENDEZVOUS_H

#include "parallel/link.h"

#include <stdatomic.h>

struct rendezvous {
    const char *address;           /* "HOST:PORT", "[::1]:PORT" */
    const char *key;               /* "": none */
    const char *version;           /* of the program */
    const char *fingerprint;       /* of the model */
    const char *backend;           /* "cpu", "cuda" */
    uint32_t rank;                 /* joining: 1 to world - 1 */
    uint32_t world;                /* joining: 0: as the leader says */
    double patience;               /* seconds until somebody must have come */
    const _Atomic bool *cancelled; /* NULL; true: give up */
};

/* Leads: links [world], of which 1 on are connected when it returns 0; on an error none is. ERROR_INVALID (the
 * address), ERROR_IO (somebody did not come), ERROR_CANCELLED. */
int rendezvous_lead(const struct rendezvous *options, struct link *links, struct error *error);

/* Joins; tries again while nobody listens. *world: how many ranks there are. ERROR_INVALID (the address), ERROR_IO,
 * ERROR_UNSUPPORTED (refused, with the reason), ERROR_CANCELLED. */
int rendezvous_join(const struct rendezvous *options, struct link *link, uint32_t *world, struct error *error);

/* Cuts "HOST:PORT" in two. host: at least RENDEZVOUS_HOST_MAX bytes, port 8. ERROR_INVALID. */
enum { RENDEZVOUS_HOST_MAX = 256, RENDEZVOUS_PORT_MAX = 8 };
int rendezvous_parse(const char *address, char *host, char *port, struct error *error);

#endif
