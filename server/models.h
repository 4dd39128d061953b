/* SPDX-License-Identifier: Apache-2.0
 *
 * Routes about the server and its model:
 *   GET /v1/models        {object: "list", data: [model]}
 *   GET /v1/models/{id}   {id, object: "model", created, owned_by, max_model_len, kv_cache, kv_policies}; 404
 *                         model_not_found for another id. kv_cache: the policy and budget of requests that choose none,
 *                         {policy, ratio | tokens | sparsity}; kv_policies: the names that kv_cache.policy may have.
 * max_model_len and kv_cache are null while the model is loading GET /health           200 as long as the process
 * serves HTTP GET /ready            200 when work is accepted, else 503 (loading, draining) GET /version {version,
 * model, system_fingerprint} GET /metrics          Prometheus text (metrics.h)
 */
#ifndef SERVER_MODELS_H
#define SERVER_MODELS_H

#include "server/http.h"

void models_list(struct exchange *exchange);
void models_retrieve(struct exchange *exchange);
void models_health(struct exchange *exchange);
void models_ready(struct exchange *exchange);
void models_version(struct exchange *exchange);
void models_openapi(struct exchange *exchange); /* GET /openapi.json: openapi.json */
void models_metrics(struct exchange *exchange);

#endif
