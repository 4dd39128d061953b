/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files about training jobs share.
 */
#ifndef SERVER_ADMIN_TRAINING_H
#define SERVER_ADMIN_TRAINING_H

#include "server/admin/admin.h"
#include "server/jobs_internal.h"

void training_write(struct buffer *out, const struct job_record *job);
/* Writes the job into the reply; 404 when there is none. */
int training_answer_job(struct admin_call *call, struct database *database, const char *id, struct error *error);

#endif
