/* SPDX-License-Identifier: Apache-2.0
 *
 * Every route of the server.
 */
#include "server/chat.h"
#include "server/completions.h"
#include "server/embeddings.h"
#include "server/models.h"
#include "server/server.h"
#include "server/tokenize.h"

const struct route server_routes[] = {
    {"POST", "/v1/completions", completions_handle, true, NULL},
    {"POST", "/v1/chat/completions", chat_handle, true, NULL},
    {"POST", "/v1/embeddings", embeddings_handle, true, NULL},
    {"POST", "/apply-template", apply_template_handle, true, NULL},
    {"GET", "/v1/models", models_list, false, NULL},
    {"GET", "/v1/models/*", models_retrieve, false, NULL},
    {"POST", "/tokenize", tokenize_handle, true, NULL},
    {"POST", "/detokenize", detokenize_handle, true, NULL},
    {"GET", "/tokenizer_info", tokenizer_info_handle, true, NULL},
    {"GET", "/health", models_health, false, NULL},
    {"GET", "/ready", models_ready, false, NULL},
    {"GET", "/version", models_version, false, NULL},
    {"GET", "/metrics", models_metrics, false, NULL},
    {"GET", "/openapi.json", models_openapi, false, NULL},
    {NULL, NULL, NULL, false, NULL},
};

/* What probes and Prometheus read: they hold no keys, and nothing here is of one client. */
const char *const server_open_paths[] = {"/health", "/ready", "/version", "/metrics", "/openapi.json", NULL};
