/* SPDX-License-Identifier: Apache-2.0
 *
 * Sequences move to host memory and back: pages, then statistics, then summary slots, then the keys of
 * sinks, one after another.
 */
#include "engine/engine_internal.h"

#include <stdlib.h>

static size_t page_bytes(const struct sequence *sequence) {
    return kv_cache_pool(sequence->engine->cache)->page_bytes;
}

size_t sequence_swap_bytes(const struct sequence *sequence) {
    return kv_sequence_pages_saved(sequence->kv) * page_bytes(sequence) + sequence_device_bytes(sequence);
}

uint64_t sequence_swap_pages(const struct sequence *sequence) {
    return kv_sequence_pages_to_restore(sequence->kv) +
           kv_cache_pages_of(sequence->engine->cache, sequence_device_bytes(sequence));
}

int sequence_swap_out(struct sequence *sequence, struct error *error) {
    struct engine *engine = sequence->engine;
    struct eviction *eviction = &sequence->eviction;
    if (sequence->swap != NULL)
        return error_set(error, ERROR_INVALID, "the sequence is swapped out already");
    size_t bytes = sequence_swap_bytes(sequence);
    char *host = malloc(bytes + 1);
    if (host == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to swap out %zu bytes", bytes);
    sequence->swap = host;
    host += kv_sequence_pages_saved(sequence->kv) * page_bytes(sequence);
    kv_sequence_save(sequence->kv, sequence->swap);
    if (eviction->statistics != NULL) {
        statistics_save(eviction->statistics, host);
        host += eviction->statistics->bytes;
    }
    if (eviction->summaries != NULL) {
        summaries_save(eviction->summaries, host);
        host += eviction->summaries->bytes;
    }
    if (eviction->sink_keys != NULL) {
        statistics_download(engine->backend, host, eviction->sink_keys, sequence_sink_bytes(sequence));
        engine_operations(engine)->release(engine->backend, eviction->sink_keys);
        eviction->sink_keys = NULL;
        eviction->sinks_saved = true;
    }
    kv_sequence_charge(sequence->kv, 0, NULL);
    return 0;
}

static int restore_sinks(struct sequence *sequence, const void *host, struct error *error) {
    struct engine *engine = sequence->engine;
    struct eviction *eviction = &sequence->eviction;
    size_t bytes = sequence_sink_bytes(sequence);
    if (!eviction->sinks_saved)
        return 0;
    eviction->sink_keys = engine_operations(engine)->allocate(engine->backend, bytes / backend_ranks(engine->backend));
    if (eviction->sink_keys == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the keys of sinks");
    statistics_upload(engine->backend, eviction->sink_keys, host, bytes);
    eviction->sinks_saved = false;
    return 0;
}

/* A sequence has summary slots or the keys of sinks: sequence_set_policy refuses both. */
static int restore_rest(struct sequence *sequence, const void *host, struct error *error) {
    struct summaries *summaries = sequence->eviction.summaries;
    return summaries != NULL ? summaries_restore(summaries, host, error) : restore_sinks(sequence, host, error);
}

int sequence_swap_in(struct sequence *sequence, struct error *error) {
    struct eviction *eviction = &sequence->eviction;
    uint64_t needed = sequence_swap_pages(sequence), available = kv_cache_pages_free(sequence->engine->cache);
    const char *host = sequence->swap;
    if (host == NULL)
        return error_set(error, ERROR_INVALID, "the sequence is not swapped out");
    if (needed > available)
        return error_set(error, ERROR_PAGES, "%llu KV pages are needed to go on with a sequence, %llu are free",
            (unsigned long long)needed, (unsigned long long)available);
    host += kv_sequence_pages_saved(sequence->kv) * page_bytes(sequence);
    if (eviction->statistics != NULL) {
        int code = statistics_restore(eviction->statistics, host, error);
        if (code != 0)
            return code;
        host += eviction->statistics->bytes;
    }
    int code = restore_rest(sequence, host, error);
    if (code != 0) {
        if (eviction->statistics != NULL) /* back to where it was */
            statistics_save(eviction->statistics,
                (char *)sequence->swap + kv_sequence_pages_saved(sequence->kv) * page_bytes(sequence));
        return code;
    }
    kv_sequence_charge(sequence->kv, sequence_device_bytes(sequence), NULL); /* both fit: counted above */
    kv_sequence_restore(sequence->kv, sequence->swap, NULL);
    free(sequence->swap);
    sequence->swap = NULL;
    return 0;
}
