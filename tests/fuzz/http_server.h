/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole server in this process, for targets that speak HTTP: on the fake scheduler, driven step by step on one
 * thread, and a client of it. There is one of each; what must hold aborts.
 */
#ifndef TESTS_FUZZ_HTTP_SERVER_H
#define TESTS_FUZZ_HTTP_SERVER_H

#include "server/server.h"

#define FUZZ_KEY "key"

void fuzz_expect(bool condition);

/* Opens it, or returns the one that is open. options: of `serve`, beside a model, a port and FUZZ_KEY. */
struct server *fuzz_server(int count, char **options);
/* What runs before the server is freed, at the end of the process, and after it. */
void fuzz_server_at_end(void (*before)(void), void (*after)(void));

struct answer {
    struct buffer text;
    bool ended; /* the server closed the connection */
};
void answer_free(struct answer *answer);

int client_connect(uint32_t port);
/* Lets the server work, and reads what it has sent. */
void client_turn(int fd, struct answer *answer);
void client_send(int fd, struct answer *answer, const void *data, size_t bytes);
/* Until the server closes. */
void client_wait(int fd, struct answer *answer);
/* Leaves by a reset; the server must then be rid of its requests. */
void client_leave(int fd);
/* Sends text in two pieces, cut at this part of 256, and reads while the answer is made. */
void client_send_cut(int fd, struct answer *answer, uint8_t cut, const uint8_t *text, size_t bytes);

/* The first answer's head has no byte that a client could have smuggled in (line ends, controls), and what says that it
 * is JSON is JSON. must_be_json: that, and no 5xx. Returns the body, which lies in the text; NULL: there is no whole
 * head. */
const char *answer_check(struct answer *answer, bool must_be_json);

/* A seed of fuzz_seed. */
struct fuzz_text {
    const char *text;
    size_t bytes;
};
#define FUZZ_TEXT(text)                                                                                                \
    { text, sizeof text - 1 }
uint8_t *fuzz_text_copy(const struct fuzz_text *seeds, size_t count, unsigned index, size_t *bytes);

#endif
