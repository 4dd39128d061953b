/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/rendezvous.h"

#include "engine/backend.h"
#include "engine/clock.h"
#include "engine/log.h"
#include "parallel/messages.h"

#include <errno.h>
#include <netdb.h>
#include <nettle/hmac.h>
#include <nettle/memops.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    NONCE_BYTES = 32,
    VERSION_BYTES = 32,
    GUESTS_MAX = 16, /* that have not said who they are; when one more comes the first goes */
    BACKLOG = 16,
    LOOK_MS = 200,
    RETRY_MICROSECONDS = 200 * 1000,
    PEER_BYTES = 80,
};
static const char magic[8] = "DCRANKS";
static const double GUEST_SECONDS = 10;

/* What is said before messages begin, in this order. Sizes are multiples of 8, numbers little-endian. */
struct greeting { /* leader to worker */
    char magic[8];
    uint32_t protocol, world;
    uint8_t nonce[NONCE_BYTES];
    char version[VERSION_BYTES];
};

struct application { /* worker to leader */
    char magic[8];
    uint32_t protocol, rank, world, zero;
    uint8_t nonce[NONCE_BYTES];
    char version[VERSION_BYTES];
    char fingerprint[72];
    char backend[16];
    uint8_t proof[SHA256_DIGEST_SIZE]; /* of the greeting and what is above */
};

struct decision {                      /* leader to worker */
    uint32_t accepted, stranger;       /* stranger: the leader has another key */
    char reason[184];                  /* of a refusal */
    uint8_t proof[SHA256_DIGEST_SIZE]; /* of the worker's proof and what is above */
};

_Static_assert(
    sizeof(struct greeting) % 8 == 0 && sizeof(struct application) % 8 == 0 && sizeof(struct decision) % 8 == 0,
    "messages that follow are aligned");

/* ---- proofs ---- */

static void prove(const struct rendezvous *options, const char *who, const void *before, size_t before_bytes,
    const void *said, size_t said_bytes, uint8_t proof[SHA256_DIGEST_SIZE]) {
    struct hmac_sha256_ctx hmac;
    hmac_sha256_set_key(&hmac, strlen(options->key), (const uint8_t *)options->key);
    hmac_sha256_update(&hmac, strlen(who) + 1, (const uint8_t *)who);
    hmac_sha256_update(&hmac, before_bytes, before);
    hmac_sha256_update(&hmac, said_bytes, said);
    hmac_sha256_digest(&hmac, SHA256_DIGEST_SIZE, proof);
}

static void prove_worker(const struct rendezvous *options, const struct greeting *greeting,
    const struct application *application, uint8_t proof[SHA256_DIGEST_SIZE]) {
    prove(options, "worker", greeting, sizeof *greeting, application, offsetof(struct application, proof), proof);
}

static void prove_leader(const struct rendezvous *options, const struct application *application,
    const struct decision *decision, uint8_t proof[SHA256_DIGEST_SIZE]) {
    prove(options, "leader", application->proof, sizeof application->proof, decision, offsetof(struct decision, proof),
        proof);
}

static int draw_nonce(uint8_t nonce[NONCE_BYTES], struct error *error) {
    if (getrandom(nonce, NONCE_BYTES, 0) == NONCE_BYTES)
        return 0;
    return error_set(error, ERROR_IO, "no random numbers: %s", strerror(errno));
}

static bool cancelled(const struct rendezvous *options) {
    return options->cancelled != NULL && atomic_load(options->cancelled);
}

/* What a stranger may have sent goes to a terminal. */
static void show_text(char *text, size_t size) {
    text[size - 1] = '\0';
    for (; *text != '\0'; text++)
        *text = *text < ' ' || *text > '~' ? '?' : *text;
}

/* ---- addresses ---- */

int rendezvous_parse(const char *address, char *host, char *port, struct error *error) {
    const char *colon = strrchr(address, ':'), *begin = address, *end = colon;
    if (colon != NULL && address[0] == '[' && colon[-1] == ']') {
        begin++;
        end--;
    }
    bool numeric = colon != NULL && colon[1] != '\0' && strspn(colon + 1, "0123456789") == strlen(colon + 1);
    bool bare = begin == address && colon != NULL && memchr(address, ':', (size_t)(colon - address)) != NULL;
    if (!numeric || bare || end <= begin || end - begin >= RENDEZVOUS_HOST_MAX ||
        strlen(colon + 1) >= RENDEZVOUS_PORT_MAX || strtoul(colon + 1, NULL, 10) > 65535 ||
        strtoul(colon + 1, NULL, 10) == 0)
        return error_set(error, ERROR_INVALID,
            "rendezvous '%.200s' is no address: HOST:PORT or [ADDRESS]:PORT, with a port from 1 to 65535", address);
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    memcpy(port, colon + 1, strlen(colon + 1) + 1);
    return 0;
}

static int look_up(const struct rendezvous *options, int flags, struct addrinfo **found, struct error *error) {
    char host[RENDEZVOUS_HOST_MAX], port[RENDEZVOUS_PORT_MAX];
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV};
    int code = rendezvous_parse(options->address, host, port, error);
    if (code != 0)
        return code;
    int result = getaddrinfo(host, port, &hints, found);
    if (result != 0)
        return error_set(error, ERROR_IO, "rendezvous %.200s: %s", options->address, gai_strerror(result));
    return 0;
}

/* ---- joining ---- */

/* A connected socket, or -1 with errno. */
static int connect_once(const struct addrinfo *to) {
    int found = -1;
    for (; to != NULL && found < 0; to = to->ai_next) {
        int fd = socket(to->ai_family, to->ai_socktype | SOCK_CLOEXEC, to->ai_protocol);
        if (fd >= 0 && connect(fd, to->ai_addr, to->ai_addrlen) == 0)
            found = fd;
        else if (fd >= 0)
            close(fd);
    }
    return found;
}

static int reach_leader(const struct rendezvous *options, int *socket, struct error *error) {
    double begun = clock_seconds();
    for (bool said = false;; said = true) {
        struct addrinfo *found = NULL;
        int code = look_up(options, 0, &found, error);
        if (code == ERROR_INVALID)
            return code;
        if (code == 0) {
            *socket = connect_once(found);
            code = *socket >= 0
                       ? 0
                       : error_set(error, ERROR_IO, "no leader at %.200s: %s", options->address, strerror(errno));
            freeaddrinfo(found);
        }
        if (code == 0)
            return 0;
        if (cancelled(options))
            return error_set(error, ERROR_CANCELLED, "asked to end");
        if (clock_seconds() - begun > options->patience)
            return code;
        if (!said)
            log_event(LOG_INFO, NULL, "waiting for the leader", "address", LOG_STRING(options->address), NULL);
        usleep(RETRY_MICROSECONDS);
    }
}

/* What a worker finds wrong with a leader. */
static int check_greeting(const struct rendezvous *options, struct greeting *greeting, struct error *error) {
    show_text(greeting->version, sizeof greeting->version);
    if (memcmp(greeting->magic, magic, sizeof magic) != 0)
        return error_set(
            error, ERROR_UNSUPPORTED, "who listens at %.200s is no leader of distillcache", options->address);
    if (greeting->protocol != MESSAGE_PROTOCOL || strcmp(greeting->version, options->version) != 0)
        return error_set(error, ERROR_UNSUPPORTED,
            "the leader is of version %s (protocol %u), this worker of version %s (protocol %d)", greeting->version,
            greeting->protocol, options->version, MESSAGE_PROTOCOL);
    if (greeting->world < 2 || greeting->world > BACKEND_RANKS_MAX || options->rank >= greeting->world ||
        (options->world != 0 && options->world != greeting->world))
        return error_set(error, ERROR_UNSUPPORTED, "the leader has a world of %u ranks, this worker is rank %u of %u",
            greeting->world, options->rank, options->world != 0 ? options->world : greeting->world);
    return 0;
}

static int read_decision(
    const struct rendezvous *options, struct link *link, const struct application *application, struct error *error) {
    struct decision decision;
    uint8_t proof[SHA256_DIGEST_SIZE];
    int code = link_receive_plain(link, &decision, sizeof decision, error);
    if (code != 0)
        return code;
    show_text(decision.reason, sizeof decision.reason);
    prove_leader(options, application, &decision, proof);
    if (decision.stranger != 0 || memeql_sec(proof, decision.proof, sizeof proof) == 0)
        return error_set(error, ERROR_UNSUPPORTED, "the leader at %.200s has another rendezvous-key", options->address);
    if (decision.accepted != 1)
        return error_set(error, ERROR_UNSUPPORTED, "the leader refuses this worker: %s", decision.reason);
    return 0;
}

static int introduce(const struct rendezvous *options, struct link *link, uint32_t *world, struct error *error) {
    struct greeting greeting;
    struct application application = {.protocol = MESSAGE_PROTOCOL, .rank = options->rank};
    int code = link_receive_plain(link, &greeting, sizeof greeting, error);
    if (code == 0)
        code = check_greeting(options, &greeting, error);
    if (code == 0)
        code = draw_nonce(application.nonce, error);
    if (code != 0)
        return code;
    memcpy(application.magic, magic, sizeof magic);
    application.world = *world = greeting.world;
    snprintf(application.version, sizeof application.version, "%s", options->version);
    snprintf(application.fingerprint, sizeof application.fingerprint, "%s", options->fingerprint);
    snprintf(application.backend, sizeof application.backend, "%s", options->backend);
    prove_worker(options, &greeting, &application, application.proof);
    code = link_send_plain(link, &application, sizeof application, error);
    return code == 0 ? read_decision(options, link, &application, error) : code;
}

int rendezvous_join(const struct rendezvous *options, struct link *link, uint32_t *world, struct error *error) {
    int socket, code = reach_leader(options, &socket, error);
    if (code != 0)
        return code;
    link_init(link, socket, options->patience);
    code = link_prepare(socket, options->patience, error);
    if (code == 0)
        code = introduce(options, link, world, error);
    if (code != 0)
        link_close(link);
    return code;
}

/* ---- leading ---- */

/* Somebody who connected and has not been accepted. */
struct guest {
    int socket;
    double since;
    char peer[PEER_BYTES];
    struct greeting greeting;
    struct application application;
    size_t got; /* bytes of the application */
};

struct reception {
    const struct rendezvous *options;
    int listener;
    struct guest guests[GUESTS_MAX];
    uint32_t guests_count;
    struct link *links;
};

static int listen_at(const struct rendezvous *options, struct error *error) {
    struct addrinfo *found, *at;
    int fd = -1, one = 1;
    if (look_up(options, AI_PASSIVE, &found, error) != 0)
        return -1;
    for (at = found; at != NULL && fd < 0; at = at->ai_next) {
        fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol);
        if (fd < 0)
            continue;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, at->ai_addr, at->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
            int why = errno;
            close(fd);
            fd = -1;
            errno = why;
        }
    }
    freeaddrinfo(found);
    if (fd < 0)
        error_set(error, ERROR_IO, "cannot listen for workers at %.200s: %s", options->address, strerror(errno));
    return fd;
}

static void dismiss(struct reception *reception, uint32_t which, const char *why) {
    struct guest *guest = &reception->guests[which];
    if (why != NULL)
        log_event(LOG_WARNING, NULL, "a connection at the rendezvous was refused", "peer", LOG_STRING(guest->peer),
            "reason", LOG_STRING(why), NULL);
    if (guest->socket >= 0)
        close(guest->socket);
    reception->guests_count--;
    memmove(guest, guest + 1, (reception->guests_count - which) * sizeof *guest);
}

static void name_peer(int socket, char peer[PEER_BYTES]) {
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    char host[64], port[16];
    snprintf(peer, PEER_BYTES, "unknown");
    if (getpeername(socket, (struct sockaddr *)&address, &size) == 0 &&
        getnameinfo((struct sockaddr *)&address, size, host, sizeof host, port, sizeof port,
            NI_NUMERICHOST | NI_NUMERICSERV) == 0)
        snprintf(peer, PEER_BYTES, strchr(host, ':') != NULL ? "[%s]:%s" : "%s:%s", host, port);
}

/* Takes everybody who waits at the door. The greeting fits into an empty socket. */
static void admit(struct reception *reception) {
    for (;;) {
        int fd = accept4(reception->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        if (reception->guests_count == GUESTS_MAX)
            dismiss(reception, 0, "too many others came");
        struct guest *guest = &reception->guests[reception->guests_count++];
        *guest = (struct guest){.socket = fd, .since = clock_seconds()};
        name_peer(fd, guest->peer);
        memcpy(guest->greeting.magic, magic, sizeof magic);
        guest->greeting.protocol = MESSAGE_PROTOCOL;
        guest->greeting.world = reception->options->world;
        snprintf(guest->greeting.version, VERSION_BYTES, "%s", reception->options->version);
        if (link_prepare(fd, reception->options->patience, NULL) != 0 || draw_nonce(guest->greeting.nonce, NULL) != 0 ||
            send(fd, &guest->greeting, sizeof guest->greeting, MSG_NOSIGNAL) != (ssize_t)sizeof guest->greeting)
            dismiss(reception, reception->guests_count - 1, "it could not be greeted");
    }
}

/* What a leader finds wrong with a worker that knows the key; the reason is empty when nothing is. */
static void examine(const struct reception *reception, const struct application *a, char *reason, size_t size) {
    const struct rendezvous *o = reception->options;
    reason[0] = '\0';
    if (strcmp(a->version, o->version) != 0)
        snprintf(reason, size, "it is of version %s, the leader of %s", a->version, o->version);
    else if (a->world != o->world || a->rank < 1 || a->rank >= o->world)
        snprintf(reason, size, "it is rank %u of %u, the leader has %u", a->rank, a->world, o->world);
    else if (strcmp(a->fingerprint, o->fingerprint) != 0)
        snprintf(reason, size, "its model is another: fingerprint %.16s, the leader's is %.16s", a->fingerprint,
            o->fingerprint);
    else if (strcmp(a->backend, o->backend) != 0)
        snprintf(reason, size, "its backend is %s, the leader's is %s", a->backend, o->backend);
    else if (reception->links[a->rank].socket >= 0)
        snprintf(reason, size, "rank %u is taken", a->rank);
}

/* A guest who has said everything. */
static void decide(struct reception *reception, uint32_t which) {
    struct guest *guest = &reception->guests[which];
    struct application *application = &guest->application;
    struct decision decision = {0};
    uint8_t proof[SHA256_DIGEST_SIZE];
    const char *why = NULL;
    if (memcmp(application->magic, magic, sizeof magic) != 0 || application->protocol != MESSAGE_PROTOCOL) {
        dismiss(reception, which, "it is no worker of this version of distillcache");
        return;
    }
    prove_worker(reception->options, &guest->greeting, application, proof);
    if (memeql_sec(proof, application->proof, sizeof proof) == 0) {
        decision.stranger = 1;
        why = "it has another rendezvous-key";
    } else {
        show_text(application->version, sizeof application->version);
        show_text(application->fingerprint, sizeof application->fingerprint);
        show_text(application->backend, sizeof application->backend);
        examine(reception, application, decision.reason, sizeof decision.reason);
        decision.accepted = decision.reason[0] == '\0';
        why = decision.accepted == 1 ? NULL : decision.reason;
        prove_leader(reception->options, application, &decision, decision.proof);
    }
    bool sent = send(guest->socket, &decision, sizeof decision, MSG_NOSIGNAL) == (ssize_t)sizeof decision;
    if (sent && decision.accepted == 1) {
        link_init(&reception->links[application->rank], guest->socket, reception->options->patience);
        log_event(LOG_INFO, NULL, "a worker joined", "rank", LOG_INT(application->rank), "peer",
            LOG_STRING(guest->peer), NULL);
        guest->socket = -1;
    }
    dismiss(reception, which, why);
}

/* Reads what a guest has said so far. */
static void listen_to(struct reception *reception, uint32_t which) {
    struct guest *guest = &reception->guests[which];
    char *into = (char *)&guest->application + guest->got;
    ssize_t got = recv(guest->socket, into, sizeof guest->application - guest->got, 0);
    if (got > 0) {
        guest->got += (size_t)got;
        if (guest->got == sizeof guest->application)
            decide(reception, which);
    } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
        dismiss(reception, which, "it left without a word of a worker");
    }
}

static void look_around(struct reception *reception) {
    struct pollfd looks[GUESTS_MAX + 1];
    uint32_t guests = reception->guests_count;
    for (uint32_t i = 0; i < guests; i++)
        looks[i] = (struct pollfd){.fd = reception->guests[i].socket, .events = POLLIN};
    looks[guests] = (struct pollfd){.fd = reception->listener, .events = POLLIN};
    if (poll(looks, guests + 1, LOOK_MS) < 0)
        return;
    for (uint32_t i = guests; i-- > 0;) {
        if (looks[i].revents != 0)
            listen_to(reception, i);
        else if (clock_seconds() - reception->guests[i].since > GUEST_SECONDS)
            dismiss(reception, i, "it did not say who it is");
    }
    admit(reception);
}

/* The first rank that is not there, 0 when all are. Who was and is gone may come again. */
static uint32_t find_missing(struct reception *reception) {
    uint32_t missing = 0;
    for (uint32_t rank = reception->options->world - 1; rank >= 1; rank--) {
        struct link *link = &reception->links[rank];
        if (link->socket >= 0 && link_is_broken(link)) {
            log_event(LOG_WARNING, NULL, "a worker left before all had come", "rank", LOG_INT(rank), NULL);
            link_close(link);
        }
        missing = link->socket < 0 ? rank : missing;
    }
    return missing;
}

static int receive_all(struct reception *reception, struct error *error) {
    const struct rendezvous *options = reception->options;
    double begun = clock_seconds();
    for (uint32_t missing; (missing = find_missing(reception)) != 0;) {
        if (cancelled(options))
            return error_set(error, ERROR_CANCELLED, "asked to end");
        if (clock_seconds() - begun > options->patience)
            return error_set(error, ERROR_IO, "rank %u of %u did not come to %.200s within %g seconds", missing,
                options->world, options->address, options->patience);
        look_around(reception);
    }
    return 0;
}

int rendezvous_lead(const struct rendezvous *options, struct link *links, struct error *error) {
    for (uint32_t rank = 0; rank < options->world; rank++)
        links[rank] = (struct link){.socket = -1};
    int listener = listen_at(options, error);
    if (listener < 0)
        return error != NULL ? error->code : ERROR_IO;
    struct reception *reception = calloc(1, sizeof *reception);
    int code = reception != NULL ? 0 : error_set(error, ERROR_MEMORY, "no memory to receive workers");
    if (code == 0) {
        reception->options = options;
        reception->listener = listener;
        reception->links = links;
        log_event(LOG_INFO, NULL, "waiting for workers", "address", LOG_STRING(options->address), "world",
            LOG_INT(options->world), NULL);
        code = receive_all(reception, error);
        while (reception->guests_count > 0)
            dismiss(reception, 0, "all ranks have come");
    }
    for (uint32_t rank = 0; code != 0 && rank < options->world; rank++)
        link_close(&links[rank]);
    free(reception);
    close(listener);
    return code;
}
