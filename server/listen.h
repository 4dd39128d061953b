/* SPDX-License-Identifier: Apache-2.0
 *
 * The listening socket and the process's descriptor limit.
 */
#ifndef SERVER_LISTEN_H
#define SERVER_LISTEN_H

#include "engine/error.h"

#include <stdint.h>

/* A listening TCP socket, non-blocking, closed on exec; -1 and an error that names host and port. *port: in the wished
 * port (0: any), out the real one. Resolving a name may block; it is for the start of the process. */
int listen_open(const char *host, uint32_t *port, struct error *error);

/* Raises RLIMIT_NOFILE so that this many connections fit beside the process's own descriptors. Returns how many do. */
uint32_t listen_raise_limit(uint32_t connections);

#endif
