/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/score_state.h"
#include "engine/block.h"

#include <stdlib.h>
#include <string.h>

struct score_state *cuda_score_state(struct cuda_backend *cuda) {
    if (cuda->score == NULL)
        cuda->score = calloc(1, sizeof(struct score_state));
    return cuda->score;
}

static void matrix_free(struct score_matrix *matrix) {
    cudaFree(matrix->factors);
    cudaFree(matrix->grams);
    cudaFree(matrix->dense);
    *matrix = (struct score_matrix){0};
}

static void matrices_free(struct cuda_backend *cuda, struct score_state *state) {
    cuda_wait_stream(cuda); /* kernels may use them */
    for (uint32_t i = 0; i < state->layers; i++)
        matrix_free(&state->matrices[i]);
    free(state->matrices);
    state->matrices = NULL;
    state->layers = 0;
}

void cuda_score_free(struct cuda_backend *cuda) {
    struct score_state *state = cuda->score;
    if (state == NULL)
        return;
    matrices_free(cuda, state);
    for (uint32_t i = 0; i < SCORE_NETWORKS; i++)
        cudaFree(state->networks[i].memory);
    cuda_scratch_free(&state->scratch);
    cuda_scratch_free(&state->tensor);
    cuda_scratch_free(&state->dense);
    cuda_scratch_free(&state->squares);
    free(state);
    cuda->score = NULL;
}

static uint32_t padded(uint32_t rows) {
    return (rows + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
}

/* Zeroed device memory, NULL when there is none. */
static float *floats_allocate(struct cuda_backend *cuda, size_t count) {
    void *memory = NULL;
    if (cudaMalloc(&memory, count * sizeof(float)) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    cuda_check(cuda, cudaMemsetAsync(memory, 0, count * sizeof(float), cuda->stream), "score");
    return memory;
}

/* ---- output matrices ---- */

/* One layer's matrix that is being worked on. */
struct matrix_job {
    struct cuda_backend *cuda;
    struct score_state *state;
    struct score_matrix *matrix;
    const struct tensor *output;
    uint32_t group;
    const float *dense;
};

static int matrices_resize(
    struct cuda_backend *cuda, struct score_state *state, const struct kv_layout *layout, uint32_t heads) {
    if (state->layers == layout->layers && state->heads == heads && state->dim == layout->head_dim)
        return 0;
    matrices_free(cuda, state);
    state->matrices = calloc(layout->layers, sizeof *state->matrices);
    if (state->matrices == NULL)
        return ERROR_MEMORY;
    state->layers = layout->layers;
    state->heads = heads;
    state->dim = layout->head_dim;
    return 0;
}

/* A row at a time, so that the memory for it is small. Uploads wait until their bytes are taken. */
static int upload_floats(struct matrix_job *job, float *floats) {
    const struct tensor *output = job->output;
    float *row = malloc(output->columns * sizeof *row);
    if (row == NULL)
        return ERROR_MEMORY;
    for (uint32_t r = 0; r < output->rows; r++) {
        tensor_dequantise_row(output, r, row);
        cuda_upload_bytes(job->cuda, floats + (size_t)r * output->columns, row, output->columns * sizeof *row);
    }
    free(row);
    return 0;
}

/* The tensor in scratch, row after row: as the file has it, or, of block formats, as floats. */
static int upload_tensor(struct matrix_job *job, struct cuda_score_tensor *out) {
    const struct tensor *output = job->output;
    enum tensor_type type = block_format_find(output->type) == NULL ? output->type : TENSOR_F32;
    size_t row_bytes = tensor_row_bytes(type, output->columns);
    char *bytes = cuda_scratch_reserve(job->cuda, &job->state->tensor, output->rows * row_bytes);
    if (bytes == NULL)
        return ERROR_MEMORY;
    *out = (struct cuda_score_tensor){type, output->rows, output->columns, row_bytes, bytes};
    if (type != output->type)
        return upload_floats(job, (float *)bytes);
    if (output->stride == 0)
        cuda_upload_bytes(job->cuda, bytes, output->data, output->rows * row_bytes);
    for (uint32_t row = 0; output->stride != 0 && row < output->rows; row++)
        cuda_upload_bytes(job->cuda, bytes + row * row_bytes, tensor_row(output, row), row_bytes);
    return 0;
}

/* W_o in scratch as floats, to compute products of. */
static int make_floats(struct matrix_job *job, const struct cuda_score_tensor *tensor) {
    size_t floats = (size_t)job->output->columns * padded(job->output->rows);
    float *dense = cuda_scratch_reserve(job->cuda, &job->state->dense, floats * sizeof *dense);
    if (dense == NULL)
        return ERROR_MEMORY;
    launch_score_turn(tensor, dense, job->cuda->stream);
    job->dense = dense;
    return 0;
}

/* W_o as it is kept: f16 where that is what the file has, else float, since to round it would shift norms by more than
 * sums in float do. */
static int keep_dense(struct matrix_job *job, const struct cuda_score_tensor *tensor) {
    size_t numbers = (size_t)job->output->columns * padded(job->output->rows);
    bool halves = job->output->type == TENSOR_F16;
    float *dense = floats_allocate(job->cuda, halves ? (numbers + 1) / 2 : numbers);
    if (dense == NULL)
        return ERROR_MEMORY;
    if (halves)
        launch_score_turn_halves(tensor, (uint16_t *)dense, job->cuda->stream);
    else
        launch_score_turn(tensor, dense, job->cuda->stream);
    job->matrix->dense = dense;
    job->matrix->dense_halves = halves;
    return 0;
}

/* keep: W_o itself; products: what is needed to compute others. */
static int make_dense(struct matrix_job *job, bool keep, bool products) {
    struct cuda_score_tensor tensor;
    int code = upload_tensor(job, &tensor);
    if (code == 0 && keep)
        code = keep_dense(job, &tensor);
    if (code == 0 && products && job->matrix->dense != NULL && !job->matrix->dense_halves)
        job->dense = job->matrix->dense;
    else if (code == 0 && products)
        code = make_floats(job, &tensor);
    return code;
}

enum { PAIRS_AT_ONCE = 1024 };

/* Products of pairs [count][2]: factors of those that pair a head with itself, or grams. */
static int multiply_pairs(struct matrix_job *job, const uint32_t *pairs, uint32_t count, bool factors) {
    struct score_state *state = job->state;
    uint32_t dim = state->dim;
    struct cuda_stage stage;
    double *squares = cuda_scratch_reserve(job->cuda, &state->squares, (size_t)count * dim * dim * sizeof *squares);
    if (squares == NULL || !cuda_stage_begin(job->cuda, cuda_stage_size(2 * count * sizeof *pairs), &stage))
        return ERROR_MEMORY;
    const uint32_t *device_pairs = cuda_stage_copy(&stage, pairs, 2 * count * sizeof *pairs);
    cuda_stage_send(job->cuda, &stage);
    launch_score_pairs(job->dense, job->output->rows, dim, device_pairs, count, squares, job->cuda->stream);
    if (factors)
        launch_score_factor(
            squares, count, dim, job->matrix->factors + (size_t)pairs[0] * dim * padded(dim), job->cuda->stream);
    else
        launch_score_gram(squares, dim, device_pairs, count, state->heads, job->matrix->grams, job->cuda->stream);
    return 0;
}

static int make_factors(struct matrix_job *job) {
    struct score_state *state = job->state;
    uint32_t pairs[2 * PAIRS_AT_ONCE];
    job->matrix->factors = floats_allocate(job->cuda, (size_t)state->heads * state->dim * padded(state->dim));
    int code = job->matrix->factors != NULL ? 0 : ERROR_MEMORY;
    for (uint32_t first = 0, count = 0; first < state->heads && code == 0; first += count) {
        count = state->heads - first < PAIRS_AT_ONCE ? state->heads - first : PAIRS_AT_ONCE;
        for (uint32_t i = 0; i < count; i++)
            pairs[2 * i] = pairs[2 * i + 1] = first + i;
        code = multiply_pairs(job, pairs, count, true);
    }
    return code;
}

static int make_grams(struct matrix_job *job, bool all) {
    struct score_state *state = job->state;
    uint32_t pairs[2 * PAIRS_AT_ONCE], count = 0;
    size_t floats = (size_t)state->heads * state->heads * state->dim * padded(state->dim);
    int code = 0;
    if (job->matrix->grams == NULL)
        job->matrix->grams = floats_allocate(job->cuda, floats);
    if (job->matrix->grams == NULL)
        return ERROR_MEMORY;
    for (uint32_t h = 0; h < state->heads && code == 0; h++) {
        for (uint32_t g = h + 1; g < state->heads && code == 0; g++) {
            if (!all && g / job->group != h / job->group)
                continue;
            pairs[2 * count] = h;
            pairs[2 * count++ + 1] = g;
            if (count == PAIRS_AT_ONCE) {
                code = multiply_pairs(job, pairs, count, false);
                count = 0;
            }
        }
    }
    job->matrix->all_grams = all;
    return code == 0 && count > 0 ? multiply_pairs(job, pairs, count, false) : code;
}

const struct score_matrix *cuda_score_matrix(struct cuda_backend *cuda, const struct kv_layout *layout, uint32_t layer,
    const struct tensor *output, uint32_t heads, uint32_t parts, struct error *error) {
    struct score_state *state = cuda_score_state(cuda);
    int code = state != NULL ? matrices_resize(cuda, state, layout, heads) : ERROR_MEMORY;
    if (code == 0) {
        struct score_matrix *matrix = &state->matrices[layer];
        if (matrix->data != output->data) {
            cuda_wait_stream(cuda);
            matrix_free(matrix);
        }
        matrix->data = output->data;
        bool factors = (parts & SCORE_FACTORS) != 0 && matrix->factors == NULL;
        bool all = (parts & SCORE_ALL_GRAMS) != 0 && !matrix->all_grams;
        bool grams = all || ((parts & SCORE_GROUP_GRAMS) != 0 && matrix->grams == NULL);
        bool dense = (parts & SCORE_DENSE) != 0 && matrix->dense == NULL;
        struct matrix_job job = {cuda, state, matrix, output, heads / layout->kv_heads, NULL};
        if (factors || grams || dense)
            code = make_dense(&job, dense, factors || grams);
        if (code == 0 && factors)
            code = make_factors(&job);
        if (code == 0 && grams)
            code = make_grams(&job, all);
        if (code != 0) {
            cuda_wait_stream(cuda);
            matrix_free(matrix);
        }
        if (code == 0 && cuda_check_launch(cuda, "score"))
            return matrix;
    }
    error_set(error, ERROR_MEMORY, "no memory for products of the output matrix of layer %u", layer);
    return NULL;
}

/* ---- networks ---- */

/* The arrays one after the other: host NULL only counts. */
struct network_layout {
    float *host;
    size_t floats;
};

static float *network_take_floats(struct network_layout *layout, size_t count, size_t *at) {
    *at = layout->floats;
    layout->floats += (count + 3) / 4 * 4;
    return layout->host != NULL ? layout->host + *at : NULL;
}

static size_t network_copy_array(struct network_layout *layout, const float *from, size_t count) {
    size_t at;
    float *to = network_take_floats(layout, count, &at);
    if (to != NULL)
        memcpy(to, from, count * sizeof *to);
    return at;
}

/* from [rows][columns] turned: [columns][stride]. */
static size_t network_turn_array(
    struct network_layout *layout, const float *from, uint32_t rows, uint32_t columns, uint32_t stride) {
    size_t at;
    float *to = network_take_floats(layout, (size_t)columns * stride, &at);
    for (uint32_t c = 0; to != NULL && c < columns; c++)
        for (uint32_t r = 0; r < rows; r++)
            to[(size_t)c * stride + r] = from[(size_t)r * columns + c];
    return at;
}

/* Where a network's arrays lie, in floats from the start. */
struct network_places {
    size_t content, offset, mean, scale, w1, b1, w2, skip, mlp;
};

static void lay_out_content(
    const struct policy_network *network, struct network_layout *layout, struct network_places *at) {
    const struct network_shape *shape = &network->shape;
    uint32_t inputs = network_inputs_count(shape), hidden = shape->hidden, hidden8 = (hidden + 7) / 8 * 8;
    size_t heads = (size_t)shape->layers * shape->kv_heads;
    float *to = network_take_floats(layout, heads * shape->head_dim * NETWORK_CONTENT_MAX, &at->content);
    float *offsets = network_take_floats(layout, heads * NETWORK_CONTENT_MAX, &at->offset);
    for (size_t head = 0; to != NULL && head < heads; head++) {
        for (uint32_t j = 0; j < shape->content; j++) {
            offsets[head * NETWORK_CONTENT_MAX + j] = network->content_offset[head * shape->content + j];
            for (uint32_t c = 0; c < shape->head_dim; c++)
                to[(head * shape->head_dim + c) * NETWORK_CONTENT_MAX + j] =
                    network->content[(head * shape->content + j) * shape->head_dim + c];
        }
    }
    at->mean = network_copy_array(layout, network->mean, heads * inputs);
    at->scale = network_copy_array(layout, network->scale, heads * inputs);
    to = network_take_floats(layout, (size_t)hidden8 * inputs, &at->w1);
    for (uint32_t j = 0; to != NULL && j < hidden; j++)
        for (uint32_t f = 0; f < inputs; f++)
            to[((size_t)j / 8 * inputs + f) * 8 + j % 8] = network->w1[(size_t)j * inputs + f];
    to = network_take_floats(layout, heads * hidden8, &at->b1);
    for (size_t head = 0; to != NULL && head < heads; head++)
        memcpy(to + head * hidden8, network->b1 + head * hidden, hidden * sizeof *to);
    to = network_take_floats(layout, hidden8, &at->w2);
    if (to != NULL)
        memcpy(to, network->w2, hidden * sizeof *to);
    at->skip = network_copy_array(layout, network->skip, heads * inputs);
}

static void lay_out_paper(
    const struct policy_network *network, struct network_layout *layout, struct network_places *at) {
    uint32_t inputs = network_inputs_count(&network->shape), hidden = network->shape.hidden;
    const float *numbers[] = {
        network->mlp_b1, network->g1, network->o1, network->mlp_b2, network->g2, network->o2, network->w3};
    at->w1 = network_turn_array(layout, network->w1, hidden, inputs, padded(hidden));
    at->w2 = network_turn_array(layout, network->w2, hidden, hidden, padded(hidden));
    at->skip = network_copy_array(layout, network->mlp_skip, inputs);
    float *to = network_take_floats(layout, 7 * (size_t)hidden + 1, &at->mlp);
    for (uint32_t i = 0; to != NULL && i < 7; i++)
        memcpy(to + (size_t)i * hidden, numbers[i], hidden * sizeof *to);
    if (to != NULL)
        to[7 * (size_t)hidden] = network->b3[0];
}

static struct network_places lay_out_network(const struct policy_network *network, struct network_layout *layout) {
    struct network_places at = {0};
    if (network->shape.features == FEATURES_PAPER)
        lay_out_paper(network, layout, &at);
    else
        lay_out_content(network, layout, &at);
    return at;
}

static struct cuda_score_network network_of(
    const struct policy_network *network, const struct network_places *at, const float *memory) {
    const struct network_shape *shape = &network->shape;
    enum network_input list[INPUT_KINDS];
    struct cuda_score_network out = {
        .features = shape->features,
        .content = shape->content,
        .hidden = shape->hidden,
        .inputs = network_inputs_count(shape),
        .list_count = network_inputs_list(shape, list),
        .needs = network_needs(shape),
        .keeps = (network_needs(shape) & STATISTIC_CONTENT) != 0,
        .weighs = (shape->inputs >> INPUT_OUTPUT_NORM & 1) != 0,
        .content_rows = memory + at->content,
        .content_offset = memory + at->offset,
        .mean = memory + at->mean,
        .scale = memory + at->scale,
        .w1 = memory + at->w1,
        .b1 = memory + at->b1,
        .w2 = memory + at->w2,
        .skip = memory + at->skip,
        .mlp = memory + at->mlp,
    };
    for (uint32_t i = 0; i < out.list_count; i++) {
        out.list[i] = list[i];
        out.standardised += shape->features == FEATURES_PAPER &&
                            (list[i] == INPUT_MEAN || list[i] == INPUT_VALUE_NORM || list[i] == INPUT_DEVIATION);
    }
    return out;
}

/* Of what is computed with: eight bytes at a time, since networks are looked up at every prune. */
static uint64_t digest_of(const struct policy_network *network) {
    struct network_array array;
    uint64_t digest = 0;
    const uint32_t *shape = (const uint32_t *)&network->shape;
    for (size_t i = 0; i < sizeof network->shape / sizeof *shape; i++)
        digest = (digest ^ shape[i]) * 0x9E3779B97F4A7C15u;
    for (uint32_t i = 0; network_array(network, i, &array); i++) {
        for (size_t n = 0; n < array.count; n += 2) {
            uint64_t bits = 0;
            memcpy(&bits, array.values + n, (array.count - n < 2 ? 1 : 2) * sizeof *array.values);
            digest = (digest ^ bits) * 0x9E3779B97F4A7C15u;
            digest ^= digest >> 29;
        }
    }
    return digest;
}

static int keep_network(
    struct cuda_backend *cuda, const struct policy_network *network, struct score_kept_network *kept) {
    struct network_layout layout = {0};
    lay_out_network(network, &layout);
    layout.host = calloc(layout.floats + 1, sizeof *layout.host);
    float *memory = layout.host != NULL ? floats_allocate(cuda, layout.floats + 1) : NULL;
    if (memory == NULL) {
        free(layout.host);
        return ERROR_MEMORY;
    }
    size_t floats = layout.floats;
    layout.floats = 0;
    struct network_places at = lay_out_network(network, &layout);
    cuda_upload_bytes(cuda, memory, layout.host, floats * sizeof *memory);
    free(layout.host);
    cuda_wait_stream(cuda);
    cudaFree(kept->memory);
    kept->memory = memory;
    kept->network = network_of(network, &at, memory);
    return 0;
}

const struct cuda_score_network *cuda_score_network_of(
    struct cuda_backend *cuda, const struct policy_network *network, struct error *error) {
    struct score_state *state = cuda_score_state(cuda);
    uint64_t digest = digest_of(network);
    for (uint32_t i = 0; state != NULL && i < SCORE_NETWORKS; i++)
        if (state->networks[i].memory != NULL && state->networks[i].digest == digest)
            return &state->networks[i].network;
    struct score_kept_network *kept = state != NULL ? &state->networks[state->networks_next] : NULL;
    if (kept == NULL || keep_network(cuda, network, kept) != 0) {
        error_set(error, ERROR_MEMORY, "no memory for a network on the device");
        return NULL;
    }
    kept->digest = digest;
    state->networks_next = (state->networks_next + 1) % SCORE_NETWORKS;
    return &kept->network;
}
