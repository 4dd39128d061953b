/* SPDX-License-Identifier: Apache-2.0
 *
 * Traffic of kernels: what the lanes of a warp touch together. A warp access is the n-th execution of a place in the
 * code by the warp's lanes since all of them last met. Each lane keeps a log of its accesses; the logs are matched
 * where the lanes meet.
 */
#ifndef EMULATOR_TRAFFIC_H
#define EMULATOR_TRAFFIC_H

#include "internal.h"
#include "check.h"

void traffic_create(void);
void traffic_worker_create(struct worker *worker);
/* A worker's part of a launch; the launch as a whole. */
void traffic_launch_begin(struct worker *worker);
void traffic_launch_end(struct worker *worker);
void traffic_launch_done(const struct launch *launch);
/* One access of a lane, at an offset of the arena or of shared memory. */
void traffic_record(struct worker *worker, struct thread *thread, bool shared, size_t offset, size_t bytes,
    enum access_kind kind, void *site);
/* Points at which logs are matched. */
void traffic_barrier(struct worker *worker);
void traffic_warp(struct worker *worker, struct warp *warp);

#endif
