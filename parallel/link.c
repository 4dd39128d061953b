/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/link.h"

#include "engine/clock.h"
#include "parallel/messages.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    READ_BYTES = 1 << 16, /* asked for at least */
    LOOK_MS = 500,
    IDLE_SECONDS = 15, /* until the first probe of keep-alive, from one to the next, and how many */
    PROBE_SECONDS = 5,
    PROBES = 6,
};

/* A process that was stopped meanwhile has not waited: the time between two looks counts up to this. */
static const double LOOK_SECONDS_MOST = 1;

int link_prepare(int socket, double patience, struct error *error) {
    const struct {
        int level, name, value;
    } options[] = {
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_NODELAY, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, IDLE_SECONDS},
        {IPPROTO_TCP, TCP_KEEPINTVL, PROBE_SECONDS},
        {IPPROTO_TCP, TCP_KEEPCNT, PROBES},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, (int)(patience * 1000)},
    };
    int flags = fcntl(socket, F_GETFL);
    if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) != 0)
        return error_set(error, ERROR_IO, "the connection cannot be set up: %s", strerror(errno));
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        if (setsockopt(socket, options[i].level, options[i].name, &options[i].value, sizeof options[i].value) != 0 &&
            errno != EOPNOTSUPP && errno != ENOPROTOOPT) /* sockets of another kind */
            return error_set(error, ERROR_IO, "the connection cannot be set up: %s", strerror(errno));
    return 0;
}

void link_init(struct link *link, int socket, double patience) {
    *link = (struct link){.socket = socket, .patience = patience};
}

void link_close(struct link *link) {
    if (link->socket >= 0)
        close(link->socket);
    free(link->in);
    *link = (struct link){.socket = -1};
}

void link_stop(const struct link *link) {
    if (link->socket >= 0)
        shutdown(link->socket, SHUT_RDWR);
}

bool link_is_broken(const struct link *link) {
    char byte;
    ssize_t got = recv(link->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

static int broken(const char *why, struct error *error) {
    return error_set(error, ERROR_IO, "the connection broke: %s", why);
}

/* Waits until the socket can be read or written. */
static int await(const struct link *link, short events, bool forever, struct error *error) {
    double waited = 0, last = clock_seconds();
    for (;;) {
        struct pollfd look = {.fd = link->socket, .events = events};
        int ready = poll(&look, 1, LOOK_MS);
        if (ready > 0)
            return 0;
        if (ready < 0 && errno != EINTR)
            return broken(strerror(errno), error);
        double now = clock_seconds();
        waited += now - last < LOOK_SECONDS_MOST ? now - last : LOOK_SECONDS_MOST;
        last = now;
        if (!forever && waited > link->patience)
            return error_set(error, ERROR_IO, "no answer within %g seconds", link->patience);
    }
}

/* ---- sending ---- */

/* Drops what was sent from the front of the parts. */
static void advance(struct msghdr *message, size_t sent) {
    while (message->msg_iovlen > 0 && sent >= message->msg_iov->iov_len) {
        sent -= message->msg_iov->iov_len;
        message->msg_iov++;
        message->msg_iovlen--;
    }
    if (message->msg_iovlen > 0) {
        message->msg_iov->iov_base = (char *)message->msg_iov->iov_base + sent;
        message->msg_iov->iov_len -= sent;
    }
}

static int send_parts(struct link *link, struct iovec *parts, size_t count, struct error *error) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    advance(&message, 0);
    while (message.msg_iovlen > 0) {
        ssize_t sent = sendmsg(link->socket, &message, MSG_NOSIGNAL);
        if (sent >= 0) {
            advance(&message, (size_t)sent);
            continue;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            return broken(strerror(errno), error);
        int code = await(link, POLLOUT, false, error);
        if (code != 0)
            return code;
    }
    return 0;
}

int link_send(struct link *link, uint32_t operation, const void *bytes, size_t size, const void *more, size_t more_size,
    struct error *error) {
    static const uint8_t zeros[8];
    uint8_t header[MESSAGE_HEADER_BYTES];
    size_t all = size + more_size, filling = (sizeof zeros - all % sizeof zeros) % sizeof zeros;
    message_write_header(header, operation, all);
    struct iovec parts[] = {
        {header, sizeof header}, {(void *)bytes, size}, {(void *)more, more_size}, {(void *)zeros, filling}};
    return send_parts(link, parts, sizeof parts / sizeof parts[0], error);
}

int link_send_plain(struct link *link, const void *bytes, size_t size, struct error *error) {
    struct iovec part = {(void *)bytes, size};
    return send_parts(link, &part, 1, error);
}

/* ---- receiving ---- */

/* Room for so many bytes from in_at on, which moves to the front. */
static int reserve(struct link *link, size_t bytes, struct error *error) {
    size_t left = link->in_end - link->in_at;
    if (link->in_at > 0) {
        memmove(link->in, link->in + link->in_at, left);
        link->in_at = 0;
        link->in_end = left;
    }
    if (bytes <= link->in_capacity)
        return 0;
    size_t capacity = bytes + READ_BYTES;
    uint8_t *grown = realloc(link->in, capacity); /* aligned for anything */
    if (grown == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a message of %zu bytes", bytes);
    link->in = grown;
    link->in_capacity = capacity;
    return 0;
}

/* Waits until so many bytes are there. */
static int gather(struct link *link, size_t bytes, bool forever, struct error *error) {
    int code = link->in_end - link->in_at < bytes ? reserve(link, bytes, error) : 0;
    while (code == 0 && link->in_end - link->in_at < bytes) {
        ssize_t got = recv(link->socket, link->in + link->in_end, link->in_capacity - link->in_end, 0);
        if (got > 0)
            link->in_end += (size_t)got;
        else if (got == 0)
            code = broken("the other end closed it", error);
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            code = await(link, POLLIN, forever, error);
        else if (errno != EINTR)
            code = broken(strerror(errno), error);
    }
    return code;
}

int link_receive(struct link *link, uint64_t most, bool forever, uint32_t *operation, void **bytes, size_t *size,
    struct error *error) {
    uint64_t length;
    int code = gather(link, MESSAGE_HEADER_BYTES, forever, error);
    if (code != 0)
        return code;
    if (!message_read_header(link->in + link->in_at, most, operation, &length))
        return error_set(error, ERROR_FORMAT, "what came is no message");
    size_t whole = MESSAGE_HEADER_BYTES + (size_t)(length + 7) / 8 * 8;
    code = gather(link, whole, false, error);
    if (code != 0)
        return code;
    *bytes = link->in + link->in_at + MESSAGE_HEADER_BYTES;
    *size = (size_t)length;
    link->in_at += whole;
    return 0;
}

int link_receive_plain(struct link *link, void *bytes, size_t size, struct error *error) {
    int code = gather(link, size, false, error);
    if (code != 0)
        return code;
    memcpy(bytes, link->in + link->in_at, size);
    link->in_at += size;
    return 0;
}
