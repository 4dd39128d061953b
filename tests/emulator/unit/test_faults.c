/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels and host code with deliberate faults: each is reported, and the same without the fault is not.
 */
#include "tests/emulator/emulator.h"
#include "tests/emulator/unit/faults.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/emulator/unit/checked.h"

enum { WORDS = 64, SEEDS = 5 };

/* What the report of each fault has to say. */
static const char *const reports[FAULTS] = {
    [FAULT_BARRIER] = "race",
    [FAULT_BARRIER_REUSE] = "race",
    [FAULT_SYNCWARP] = "race",
    [FAULT_SYNCWARP_MASK] = "race",
    [FAULT_GLOBAL_RACE] = "race",
    [FAULT_BYTE_RACE] = "race",
    [FAULT_BLOCK_RACE] = "both write",
    [FAULT_MEMCPY_PAST] = "writes 65 bytes out of bounds",
    [FAULT_READ_PAST] = "reads 4 bytes out of bounds",
    [FAULT_WRITE_BEFORE] = "writes 4 bytes out of bounds",
    [FAULT_SHARED_PAST] = "of shared memory, which has 256",
    [FAULT_UNWRITTEN] = "nobody has written",
    [FAULT_UNWRITTEN_OTHER] = "nobody has written",
    [FAULT_DIVERGED] = "lanes diverged",
    [FAULT_ENDED_LANE] = "ended",
    [FAULT_ENDED_THREAD] = "ended",
    [FAULT_HALF_BARRIER] = "waits at another one",
    [FAULT_MASK_SELF] = "lacks the lane itself",
    [FAULT_MASK_SOURCE] = "not in mask",
    [FAULT_NEVER] = "wait for others for ever",
    [FAULT_COPY_WAIT] = "before the wait",
    [FAULT_COPY_GROUPS] = "before the wait",
    [FAULT_COPY_BARRIER] = "race",
    [FAULT_COPY_REUSE] = "race",
    [FAULT_UNALIGNED] = "no multiple of 16",
    [FAULT_UNALIGNED_WORD] = "no multiple of 4",
    [FAULT_HOST_MEMORY] = "host memory",
    [FAULT_ATOMIC_PLAIN] = "race",
};

static void run(enum fault fault, bool right, uint64_t seed) {
    int *words = device_zeros(WORDS * sizeof(int)), *host = calloc(WORDS, sizeof(int));
    emulator_set_seed(seed);
    faults_run(fault, right, words, host, NULL);
    cudaError_t error = cudaDeviceSynchronize();
    const char *report = emulator_fault();
    if (right && (report || error != cudaSuccess))
        fail_msg("fault %d, seed %d: the right kernel is reported: %s", fault, (int)seed, report ? report : "-");
    if (!right && (!report || error == cudaSuccess))
        fail_msg("fault %d, seed %d is not reported", fault, (int)seed);
    if (!right && !strstr(report, reports[fault]))
        fail_msg("fault %d, seed %d is reported as: %s", fault, (int)seed, report);
    emulator_fault_clear();
    check(cudaFree(words));
    free(host);
}

static void test_kernels(void **state) {
    (void)state;
    for (int fault = 0; fault < FAULTS; fault++)
        for (uint64_t seed = 1; seed <= SEEDS; seed++) {
            run((enum fault)fault, false, seed);
            run((enum fault)fault, true, seed);
        }
}

static void test_report(void **state) {
    (void)state;
    int *words = device_zeros(WORDS * sizeof(int));
    emulator_set_seed(7);
    faults_run(FAULT_READ_PAST, false, words, NULL, NULL);
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    const char *report = emulator_fault();
    assert_non_null(strstr(report, "0 bytes after an allocation of 256 bytes"));
    assert_non_null(strstr(report, "kernel read_past_kernel, block (0, 0, 0), thread (63, 0, 0), seed 7"));
    /* Sticky, as on the device, until the emulator is told to forget it. */
    assert_int_equal(cudaMemset(words, 0, 4), cudaErrorLaunchFailure);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchFailure);
    emulator_fault_clear();
    check(cudaMemset(words, 0, 4));
    check(cudaFree(words));
}

static void test_use_after_free(void **state) {
    (void)state;
    int *words = device_zeros(WORDS * sizeof(int));
    faults_touch(words, NULL);
    check(cudaDeviceSynchronize());
    check(cudaFree(words));
    faults_touch(words, NULL);
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    assert_non_null(strstr(emulator_fault(), "freed allocation"));
    emulator_fault_clear();
    assert_int_equal(cudaFree(words), cudaErrorInvalidValue);
    assert_non_null(strstr(emulator_fault(), "cudaFree"));
    emulator_fault_clear();
}

static void expect_copy_fault(cudaError_t error, const char *text) {
    assert_int_not_equal(error, cudaSuccess);
    assert_non_null(emulator_fault());
    assert_non_null(strstr(emulator_fault(), text));
    emulator_fault_clear();
}

static void test_copies(void **state) {
    (void)state;
    int host[WORDS + 1] = {0}, *words = device_zeros(WORDS * sizeof(int));
    expect_copy_fault(cudaMemcpy(words, host, sizeof(host), cudaMemcpyHostToDevice), "not in one allocation");
    expect_copy_fault(cudaMemcpy(host, words + 1, WORDS * 4, cudaMemcpyDeviceToHost), "not in one allocation");
    expect_copy_fault(cudaMemcpy(words, host, 4, cudaMemcpyDeviceToHost), "should be host memory");
    expect_copy_fault(cudaMemcpy(host, words, 4, cudaMemcpyHostToDevice), "should be device memory");
    expect_copy_fault(cudaMemset(host, 0, 4), "should be device memory");
    expect_copy_fault(cudaMemset(words + WORDS - 1, 0, 8), "not in one allocation");
    check(cudaFree(words));
}

/* Work is done when it is waited for: whoever changes pinned memory before that changes what is copied. */
static void test_late_copy(void **state) {
    (void)state;
    int *staging, *words = device_zeros(WORDS * sizeof(int)), late = 0, result;
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaHostAlloc((void **)&staging, 64, cudaHostAllocDefault));
    for (uint64_t seed = 1; seed <= 20; seed++) {
        emulator_set_seed(seed);
        *staging = 1;
        check(cudaMemcpyAsync(words, staging, 4, cudaMemcpyHostToDevice, stream));
        *staging = 2;
        check(cudaStreamSynchronize(stream));
        check(cudaMemcpy(&result, words, 4, cudaMemcpyDeviceToHost));
        late += result == 2;
    }
    assert_in_range(late, 1, 19); /* mostly late, sometimes in time */
    /* Memory that is not pinned is read by the call. */
    int host = 3;
    check(cudaMemcpyAsync(words, &host, 4, cudaMemcpyHostToDevice, stream));
    host = 4;
    check(cudaStreamSynchronize(stream));
    check(cudaMemcpy(&result, words, 4, cudaMemcpyDeviceToHost));
    assert_int_equal(result, 3);
    check(cudaStreamDestroy(stream));
    check(cudaFreeHost(staging));
    check(cudaFree(words));
}

/* Without an event one stream does not wait for another. */
static void test_events(void **state) {
    (void)state;
    int *words = device_zeros(WORDS * sizeof(int)), early = 0, result;
    cudaStream_t first, second;
    cudaEvent_t event;
    check(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (uint64_t seed = 1; seed <= 20; seed++) {
        bool wait = seed % 2 == 0;
        emulator_set_seed(seed);
        check(cudaMemsetAsync(words, 0, 4, first));
        check(cudaStreamSynchronize(first));
        faults_touch(words, first);
        check(cudaEventRecord(event, first));
        if (wait)
            check(cudaStreamWaitEvent(second, event, 0));
        check(cudaMemcpyAsync(&result, words, 4, cudaMemcpyDeviceToHost, second));
        check(cudaStreamSynchronize(second));
        if (wait)
            assert_int_equal(result, 1);
        else
            early += result == 0;
        check(cudaEventSynchronize(event));
        check(cudaEventQuery(event));
    }
    assert_true(early > 0);
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(first));
    check(cudaStreamDestroy(second));
    check(cudaFree(words));
}

static void test_capture(void **state) {
    (void)state;
    int *words = device_zeros(WORDS * sizeof(int));
    void *more;
    cudaStream_t stream;
    cudaGraph_t graph;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    assert_int_equal(cudaMalloc(&more, 4), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    cudaGetLastError();
    check(cudaStreamDestroy(stream));
    check(cudaFree(words));
}

/* The host reading device memory ends the program: in a child, whose last words are read. */
static void test_host_access(void **state) {
    (void)state;
    int *words = device_zeros(WORDS * sizeof(int)), ends[2], status;
    char text[1024] = "";
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        emulator_catch_signals(); /* cmocka took them */
        int value = ((volatile int *)words)[3];
        _exit(value == 12345);
    }
    close(ends[1]);
    ssize_t length = read(ends[0], text, sizeof(text) - 1);
    assert_true(length > 0);
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_non_null(strstr(text, "the host touches device memory"));
    assert_non_null(strstr(text, "byte 12 of an allocation of 256 bytes"));
    check(cudaFree(words));
}

static void test_launches(void **state) {
    (void)state;
    int *words = device_zeros(WORDS * sizeof(int));
    faults_copy_vectors(words, words, 0, NULL); /* no blocks */
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    emulator_fault_clear();
    faults_transpose((float *)words, (float *)words, 4096, NULL); /* 512 KiB of shared memory */
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    emulator_fault_clear();
    check(cudaFree(words));
}

/* Memory, streams and events belong to the device that the thread had chosen; whoever waits for one device does not run
 * the work of another, and one that failed leaves the others alone. */
static void test_devices(void **state) {
    (void)state;
    int *here = device_zeros(WORDS * sizeof(int)), *there, result;
    cudaStream_t stream;
    cudaEvent_t event;
    check(cudaSetDevice(1));
    there = device_zeros(WORDS * sizeof(int));
    check(cudaDeviceSynchronize());
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaSetDevice(0));
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    faults_touch(there, NULL);
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    assert_non_null(strstr(emulator_fault(), "kernel of device 0 reads 4 bytes of another device"));
    check(cudaSetDevice(1)); /* which goes on */
    faults_touch(there, stream);
    check(cudaStreamSynchronize(stream));
    check(cudaMemcpy(&result, there, 4, cudaMemcpyDeviceToHost));
    assert_int_equal(result, 1);
    assert_int_equal(cudaSetDevice(0), cudaErrorLaunchFailure);
    emulator_fault_clear();
    faults_touch(here, stream);
    expect_copy_fault(cudaGetLastError(), "on a stream of device 1, the thread's is 0");
    expect_copy_fault(cudaMemcpyAsync(here, there, 4, cudaMemcpyDeviceToDevice, stream), "of another");
    expect_copy_fault(cudaMemsetAsync(here, 0, 4, stream), "of another");
    expect_copy_fault(cudaEventRecord(event, stream), "the event is of device 0, the stream of device 1");
    assert_int_equal(cudaSetDevice(-1), cudaErrorInvalidDevice);
    assert_int_equal(cudaSetDevice(64), cudaErrorInvalidDevice);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidDevice);
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(stream));
    check(cudaFree(here));
    check(cudaFree(there));
}

static int quiet(void **state) {
    (void)state;
    emulator_set_quiet(true);
    return 0;
}

/* A failed test leaves no fault to the next one. */
static int forget(void **state) {
    (void)state;
    emulator_fault_clear();
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_kernels, forget),
        cmocka_unit_test_teardown(test_report, forget),
        cmocka_unit_test_teardown(test_use_after_free, forget),
        cmocka_unit_test_teardown(test_copies, forget),
        cmocka_unit_test_teardown(test_late_copy, forget),
        cmocka_unit_test_teardown(test_events, forget),
        cmocka_unit_test_teardown(test_capture, forget),
        cmocka_unit_test_teardown(test_host_access, forget),
        cmocka_unit_test_teardown(test_launches, forget),
        cmocka_unit_test_teardown(test_devices, forget),
    };
    return cmocka_run_group_tests(tests, quiet, NULL);
}
