/* SPDX-License-Identifier: Apache-2.0
 *
 * Every route of the admin API.
 */
#include "server/admin/admin.h"

#define ADMIN "/admin/v1"
/* Under both names: the second is where openai's client looks. */
#define TRAINING_ROUTES(base)                                                                                          \
    {"POST", base, training_create, false, NULL}, {"GET", base, training_list, false, NULL},                           \
        {"GET", base "/{}", training_retrieve, false, NULL},                                                           \
        {"POST", base "/{}/cancel", training_cancel, false, NULL},                                                     \
        {"POST", base "/{}/pause", training_pause, false, NULL},                                                       \
        {"POST", base "/{}/resume", training_resume, false, NULL},                                                     \
        {"GET", base "/{}/events", training_events, false, NULL}, {                                                    \
        "GET", base "/{}/checkpoints", training_checkpoints, false, NULL                                               \
    }

const struct route admin_routes[] = {
    {"POST", ADMIN "/files", files_upload, false, &upload_reader},
    {"GET", ADMIN "/files", files_list_all, false, NULL},
    {"GET", ADMIN "/files/{}", files_retrieve, false, NULL},
    {"GET", ADMIN "/files/{}/content", files_content, false, NULL},
    {"DELETE", ADMIN "/files/{}", files_remove, false, NULL},
    TRAINING_ROUTES(ADMIN "/training/jobs"),
    TRAINING_ROUTES(ADMIN "/fine_tuning/jobs"),
    {"GET", ADMIN "/policies", policies_list_all, false, NULL},
    {"GET", ADMIN "/policies/{}", policies_retrieve, false, NULL},
    {"POST", ADMIN "/policies/{}/activate", policies_activate, false, NULL},
    {"POST", ADMIN "/policies/{}/deactivate", policies_deactivate, false, NULL},
    {"DELETE", ADMIN "/policies/{}", policies_remove, false, NULL},
    {"POST", ADMIN "/evaluations", evaluations_create, false, NULL},
    {"GET", ADMIN "/evaluations", evaluations_list_all, false, NULL},
    {"GET", ADMIN "/evaluations/{}", evaluations_retrieve, false, NULL},
    {"POST", ADMIN "/evaluations/{}/cancel", evaluations_cancel, false, NULL},
    {"GET", ADMIN "/status", status_show, false, NULL},
    {NULL, NULL, NULL, false, NULL},
};
