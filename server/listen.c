/* SPDX-License-Identifier: Apache-2.0 */
#include "server/listen.h"

#include "engine/log.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BACKLOG = 1024,
    OWN_DESCRIPTORS = 64, /* model file, logs, libraries */
};

static uint32_t listen_bound_port(int socket) {
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    if (getsockname(socket, (struct sockaddr *)&address, &length) != 0)
        return 0;
    if (address.ss_family == AF_INET6)
        return ntohs(((struct sockaddr_in6 *)&address)->sin6_port);
    return ntohs(((struct sockaddr_in *)&address)->sin_port);
}

static int listen_try(const struct addrinfo *address) {
    int fd = socket(address->ai_family, address->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address->ai_protocol);
    if (fd < 0)
        return -1;
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, address->ai_addr, address->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int reason = errno;
    close(fd);
    errno = reason;
    return -1;
}

int listen_open(const char *host, uint32_t *port, struct error *error) {
    char service[16];
    snprintf(service, sizeof service, "%u", *port);
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *addresses = NULL;
    int failure = getaddrinfo(host, service, &hints, &addresses);
    if (failure != 0) {
        error_set(error, ERROR_IO, "cannot resolve host %s: %s", host, gai_strerror(failure));
        return -1;
    }
    int fd = -1;
    for (const struct addrinfo *address = addresses; address != NULL && fd < 0; address = address->ai_next)
        fd = listen_try(address);
    if (fd < 0)
        error_set(error, ERROR_IO, "cannot listen on %s port %u: %s", host, *port, strerror(errno));
    else
        *port = listen_bound_port(fd);
    freeaddrinfo(addresses);
    return fd;
}

uint32_t listen_raise_limit(uint32_t connections) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return connections;
    rlim_t needed = (rlim_t)connections + OWN_DESCRIPTORS;
    if (limit.rlim_cur >= needed)
        return connections;
    limit.rlim_cur = limit.rlim_max < needed ? limit.rlim_max : needed;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur >= needed)
        return connections;
    uint32_t fits = limit.rlim_cur > OWN_DESCRIPTORS + 1 ? (uint32_t)limit.rlim_cur - OWN_DESCRIPTORS : 1;
    log_event(LOG_WARNING, NULL, "fewer connections than configured: the limit on open files is low", "max_connections",
        LOG_INT(fits), "open_files", LOG_INT(limit.rlim_cur), NULL);
    return fits;
}
