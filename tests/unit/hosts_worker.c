/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/hosts_worker.h"

#include <arpa/inet.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "parallel/communicator.h"
#include "tests/unit/chosen_backend.h"

void hosts_address(char address[HOSTS_ADDRESS]) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof any;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&any, sizeof any), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&any, &size), 0);
    close(fd);
    snprintf(address, HOSTS_ADDRESS, "127.0.0.1:%u", ntohs(any.sin_port));
}

struct rendezvous hosts_options(const char *address, uint32_t rank) {
    return (struct rendezvous){
        .address = address, .key = "of the test", .version = "1", .rank = rank, .patience = COMMUNICATOR_PATIENCE};
}

static void *run_worker(void *argument) {
    struct hosts_worker *worker = argument;
    const struct backend_options options = {.cpu_features = "auto", .threads = 1, .name = chosen_backend()};
    struct backend *backend = backend_open(&options, &worker->error);
    worker->code = backend == NULL ? worker->error.code
                                   : hosts_work(worker->model, backend, &worker->options, NULL, &worker->error);
    if (backend != NULL)
        backend->operations->close(backend);
    return NULL;
}

void hosts_worker_start(struct hosts_worker *worker, const struct model *model, const struct rendezvous *options) {
    *worker = (struct hosts_worker){.model = model, .options = *options};
    assert_int_equal(pthread_create(&worker->thread, NULL, run_worker, worker), 0);
}

int hosts_worker_join(struct hosts_worker *worker) {
    pthread_join(worker->thread, NULL);
    return worker->code;
}
