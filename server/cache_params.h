/* SPDX-License-Identifier: Apache-2.0
 *
 * The kv_cache object of a request: which tokens stay in its sequences' KV caches.
 *
 *   "kv_cache": {"policy": NAME, "ratio": R | "tokens": N, any option of that policy: value}
 *
 * | field          | value                                                            | default |
 * |----------------|------------------------------------------------------------------|---------|
 * | policy         | a name of the registry (GET /v1/models lists them)               | the server's policy |
 * | ratio          | above 0, up to 1: part of the tokens seen that each head keeps   | the policy's        |
 * | tokens         | slots that each head keeps, instead of a ratio                   | none                |
 * | another option | number, boolean or word, as the option wants (policy/policy.h)   | the policy's        |
 *
 * Without a policy, or with the server's own one, the fields change the server's settings; another policy starts from
 * its own defaults. "distillcache:NAME" is a trained policy by its name (policy_table.h). null is the same as an absent
 * field, but for names that there are not. Options that name files are the server's alone. Random decisions of a policy
 * follow the request's seed, unless the option `seed` is given and not 0.
 */
#ifndef SERVER_CACHE_PARAMS_H
#define SERVER_CACHE_PARAMS_H

#include "server/params.h"

/* Fills request->kv_policy, whether the body has the object or not; sampling.seed must be there already. A fault names
 * the field ("kv_cache.ratio"), the value and what is allowed. */
int cache_params_read(
    const json_t *body, const struct parse_context *context, struct request *request, struct fault *fault);

#endif
