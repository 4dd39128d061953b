/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrices in parts, one a rank, made of the tensor where it lies.
 */
#include "parallel/internal.h"

#include <stdlib.h>
#include <string.h>

struct backend_weight {
    enum weight_role role;
    uint32_t rows, columns;                /* of the whole matrix */
    uint32_t first[BACKEND_RANKS_MAX + 1]; /* rows of it from which on each rank has them: WEIGHT_VOCABULARY */
    const struct backend_operations *inner[BACKEND_RANKS_MAX];
    uint32_t ranks;
    struct backend_weight *parts[BACKEND_RANKS_MAX];
};

/* ---- parts ---- */

static int check_parts(
    const struct parallel *p, const struct tensor *tensor, enum weight_role role, struct error *error) {
    uint32_t ranks = p->ranks_count, block = tensor_format_find(tensor->type)->block_values;
    if (role == WEIGHT_COLUMNS && tensor->columns % (ranks * block) != 0)
        return error_set(error, ERROR_UNSUPPORTED,
            "tensor %s has %u columns in blocks of %u (%s), which %u devices cannot share out evenly", tensor->name,
            tensor->columns, block, tensor_type_name(tensor->type), ranks);
    if (role == WEIGHT_ROWS && tensor->rows % ranks != 0)
        return error_set(error, ERROR_UNSUPPORTED, "tensor %s has %u rows, which %u devices cannot share out evenly",
            tensor->name, tensor->rows, ranks);
    if (tensor->rows < ranks)
        return error_set(error, ERROR_UNSUPPORTED, "tensor %s has %u rows, fewer than %u devices", tensor->name,
            tensor->rows, ranks);
    return tensor_check_size(tensor, error);
}

struct split_call {
    struct parallel *p;
    const struct tensor *tensor;
    bool exact;
    struct backend_weight *weight;
    struct error errors[BACKEND_RANKS_MAX];
};

static uint32_t rows_of(const struct backend_weight *weight, uint32_t rank) {
    return weight->first[rank + 1] - weight->first[rank];
}

static void split_on_rank(void *context, uint32_t rank) {
    struct split_call *call = context;
    const struct tensor *tensor = call->tensor;
    struct backend *on = call->p->inner[rank];
    struct backend_weight *weight = call->weight;
    uint32_t ranks = call->p->ranks_count, rows = tensor->rows / ranks, columns = tensor->columns / ranks;
    struct tensor part;
    if (weight->role == WEIGHT_VOCABULARY)
        part = tensor_cut_rows(tensor, weight->first[rank], rows_of(weight, rank));
    else
        part = weight->role == WEIGHT_ROWS ? tensor_cut_rows(tensor, rank * rows, rows)
                                           : tensor_cut_columns(tensor, rank * columns, columns);
    weight->parts[rank] = on->operations->weight_create(on, &part, call->exact, &call->errors[rank]);
}

/* Where a rank's logits go before they are gathered. */
static int reserve_logits(struct parallel *p, const struct backend_weight *weight, struct error *error) {
    for (uint32_t rank = 0; rank < p->ranks_count; rank++) {
        struct rank *of = &p->ranks[rank];
        size_t bytes = PARALLEL_LOGITS_ROWS * (size_t)rows_of(weight, rank) * sizeof(float);
        if (bytes <= of->logits_bytes)
            continue;
        of->backend->operations->release(of->backend, of->logits);
        of->logits = of->backend->operations->allocate(of->backend, bytes);
        of->logits_bytes = of->logits != NULL ? bytes : 0;
        if (of->logits == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for logits");
    }
    return 0;
}

struct backend_weight *parallel_weight_split(
    struct backend *backend, const struct tensor *tensor, enum weight_role role, bool exact, struct error *error) {
    struct parallel *p = parallel_of(backend);
    struct split_call call = {.p = p, .tensor = tensor, .exact = exact};
    if (check_parts(p, tensor, role, error) != 0)
        return NULL;
    call.weight = calloc(1, sizeof *call.weight);
    if (call.weight == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for tensor %s", tensor->name);
        return NULL;
    }
    call.weight->role = role;
    call.weight->rows = tensor->rows;
    call.weight->columns = tensor->columns;
    call.weight->ranks = p->ranks_count;
    for (uint32_t rank = 0; rank <= p->ranks_count; rank++)
        call.weight->first[rank] = (uint32_t)((uint64_t)tensor->rows * rank / p->ranks_count);
    if (role == WEIGHT_VOCABULARY)
        memcpy(p->first_tokens, call.weight->first, sizeof p->first_tokens);
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        call.weight->inner[rank] = p->inner[rank]->operations;
    int code = role == WEIGHT_VOCABULARY ? reserve_logits(p, call.weight, error) : 0;
    if (code == 0)
        parallel_run(p, split_on_rank, &call);
    for (uint32_t rank = 0; rank < p->ranks_count && code == 0; rank++)
        if (call.weight->parts[rank] == NULL)
            code = call.errors[rank].code != 0
                       ? error_set(error, call.errors[rank].code, "%s", call.errors[rank].message)
                       : communicator_check(p->communicator, error);
    if (code == 0)
        return call.weight;
    parallel_weight_free(backend, call.weight);
    return NULL;
}

void parallel_weight_free(struct backend *backend, struct backend_weight *weight) {
    struct parallel *p = parallel_of(backend);
    for (uint32_t rank = 0; weight != NULL && rank < p->ranks_count; rank++)
        p->inner[rank]->operations->weight_free(p->inner[rank], weight->parts[rank]);
    free(weight);
}

size_t parallel_weight_bytes(const struct backend_weight *weight) {
    size_t bytes = 0;
    for (uint32_t rank = 0; rank < weight->ranks; rank++)
        bytes += weight->inner[rank]->weight_bytes(weight->parts[rank]);
    return bytes;
}

struct tensor parallel_output(const struct parallel *p, const struct tensor *output, uint32_t rank) {
    uint32_t columns = output->columns / p->ranks_count;
    return tensor_cut_columns(output, rank * columns, columns);
}

/* ---- embed ---- */

struct embed_call {
    struct backend *backend;
    const struct backend_weight *weight;
    const int32_t *own[BACKEND_RANKS_MAX]; /* tokens by the rows of each part */
    uint32_t rows;
    float *out;
};

void parallel_own_tokens(const struct parallel *p, uint32_t rank, const int32_t *tokens, uint32_t rows, int32_t *own) {
    for (uint32_t row = 0; row < rows; row++)
        own[row] = (int32_t)((uint32_t)tokens[row] - p->first_tokens[rank]);
}

static void embed_on_rank(void *context, uint32_t rank) {
    const struct embed_call *call = context;
    struct parallel *p = parallel_of(call->backend);
    struct backend *on = p->inner[rank];
    float *out = parallel_address(call->backend, call->out, rank);
    on->operations->embed(on, call->weight->parts[rank], call->own[rank], call->rows, out);
    parallel_sum_on_rank(p, rank, out, call->rows, call->weight->columns);
}

void parallel_embed(
    struct backend *backend, const struct backend_weight *weight, const int32_t *tokens, uint32_t rows, float *out) {
    struct parallel *p = parallel_of(backend);
    struct embed_call call = {.backend = backend, .weight = weight, .rows = rows, .out = out};
    for (uint32_t rank = 0; rank < p->ranks_count; rank++) {
        if (p->stepping && tokens == p->step.tokens) { /* sent with the step, rows that are nobody's too */
            call.own[rank] = p->ranks[rank].step.tokens;
            continue;
        }
        int32_t *own = parallel_reserve(&p->ranks[rank].batch, rows * sizeof *tokens);
        if (own == NULL) {
            parallel_fail(p, ERROR_MEMORY, "no memory for the tokens of a batch");
            return;
        }
        parallel_own_tokens(p, rank, tokens, rows, own);
        call.own[rank] = own;
    }
    parallel_run(p, embed_on_rank, &call);
    parallel_sum_later(p, out, rows, weight->columns);
}

/* ---- linear ---- */

struct linear_call {
    struct backend *backend;
    const struct backend_weight *const *weights;
    uint32_t weights_count;
    const float *x;
    uint32_t rows;
    bool add;
    float *out;
};

static void rows_on_rank(void *context, uint32_t rank) {
    const struct linear_call *call = context;
    struct backend *on = parallel_of(call->backend)->inner[rank];
    const struct backend_weight *parts[LINEAR_WEIGHTS_MAX];
    for (uint32_t i = 0; i < call->weights_count; i++)
        parts[i] = call->weights[i]->parts[rank];
    on->operations->linear(on, parts, call->weights_count, parallel_address(call->backend, call->x, rank), call->rows,
        call->add, parallel_address(call->backend, call->out, rank));
}

static void columns_on_rank(void *context, uint32_t rank) {
    const struct linear_call *call = context;
    struct parallel *p = parallel_of(call->backend);
    const struct backend_weight *part = call->weights[0]->parts[rank];
    float *out = parallel_address(call->backend, call->out, rank);
    struct backend *on = p->inner[rank];
    on->operations->linear(
        on, &part, 1, parallel_address(call->backend, call->x, rank), call->rows, call->add && rank == 0, out);
    parallel_sum_on_rank(p, rank, out, call->rows, call->weights[0]->rows);
}

/* Logits of some rows, at most PARALLEL_LOGITS_ROWS. */
static void logits_on_rank(void *context, uint32_t rank) {
    const struct linear_call *call = context;
    struct parallel *p = parallel_of(call->backend);
    const struct backend_weight *weight = call->weights[0], *part = weight->parts[rank];
    float *logits = p->ranks[rank].logits;
    struct backend *on = p->inner[rank];
    on->operations->linear(on, &part, 1, parallel_address(call->backend, call->x, rank), call->rows, false, logits);
    const struct communicator_part gathered = {
        .part = logits,
        .out = call->out,
        .rows = call->rows,
        .first = weight->first,
    };
    p->communicator->operations->gather(p->communicator, rank, &gathered);
}

static void compute_logits(struct linear_call call) {
    uint32_t rows = call.rows;
    for (uint32_t done = 0; done < rows; done += call.rows) {
        call.rows = rows - done < PARALLEL_LOGITS_ROWS ? rows - done : PARALLEL_LOGITS_ROWS;
        parallel_run(parallel_of(call.backend), logits_on_rank, &call);
        call.x += (size_t)call.rows * call.weights[0]->columns;
        call.out += (size_t)call.rows * call.weights[0]->rows;
    }
}

void parallel_linear(struct backend *backend, const struct backend_weight *const *weights, uint32_t weights_count,
    const float *x, uint32_t rows, bool add, float *out) {
    struct linear_call call = {backend, weights, weights_count, x, rows, add, out};
    if (weights[0]->role == WEIGHT_VOCABULARY) {
        compute_logits(call);
    } else if (weights[0]->role == WEIGHT_ROWS) {
        parallel_run(parallel_of(backend), rows_on_rank, &call);
    } else {
        parallel_run(parallel_of(backend), columns_on_rank, &call);
        parallel_sum_later(parallel_of(backend), out, rows, weights[0]->rows);
    }
}
