/* SPDX-License-Identifier: Apache-2.0
 *
 * Every route of the server.
 */
#include "server/chat.h"
#include "server/completions.h"
#include "server/models.h"
#include "server/server.h"
#include "server/tokenize.h"

const struct route server_routes[] = {
    {"POST", "/v1/completions", completions_handle, true},
    {"POST", "/v1/chat/completions", chat_handle, true},
    {"GET", "/v1/models", models_list, false},
    {"GET", "/v1/models/*", models_retrieve, false},
    {"POST", "/tokenize", tokenize_handle, true},
    {"POST", "/detokenize", detokenize_handle, true},
    {"GET", "/health", models_health, false},
    {"GET", "/ready", models_ready, false},
    {"GET", "/version", models_version, false},
    {"GET", "/metrics", models_metrics, false},
    {NULL, NULL, NULL, false},
};
