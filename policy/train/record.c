/* SPDX-License-Identifier: Apache-2.0
 *
 * Collecting examples: sequences are computed in groups, so that their own continuations decode in one batch. A teacher
 * goes first, through everything; its students are forks of it from the end of the prompt, and follow.
 */
#include "policy/train/record.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "policy/train/recording.h"

enum { STREAM_STUDENTS = 0x53545544, STREAM_PRUNES = 0x5052554E };
enum { GROUP_MOST = 8, STATISTICS = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY };
enum { MEMORY_MOST = 2000 << 20 /* of all examples */, LAYERS_PART = 3 /* one of so many layers, if memory allows */ };
enum { LAYERS_LEAST = 4 /* a model with few layers that are pruned has all of so many recorded */ };
enum { ROWS_OF_LANE = 4 /* a decode step of a long sequence takes as long as so many rows of a prompt */ };
enum { EXAMPLES_MOST = 1 + RECORD_STUDENTS * RECORD_PRUNES, UNBOUNDED = 1 << 30 /* a budget that is never reached */ };
enum { BUDGET_INPUTS = 1 << INPUT_BUDGET | 1 << INPUT_RECENT_8 | 1 << INPUT_RECENT_4 | 1 << INPUT_RECENT_2 };
static const double ratio_least = 0.04, ratio_most = 0.5; /* of students */

/* One sequence of the data, of a group. */
struct lane {
    uint32_t index;
    struct sequence *teacher;
    struct sequence *students[RECORD_STUDENTS];
    struct recording examples[EXAMPLES_MOST]; /* [each]; a student's by what it has seen */
    float (*standards)[6];                    /* [heads] FEATURES_PAPER: what students freeze */
    int32_t *tokens;                          /* [end + 1] */
    uint32_t prompt, end;                     /* tokens of the prompt, and of all that is computed */
    bool own;                                 /* what follows the prompt is the teacher's choice */
};

struct recorder {
    struct training *training;
    const struct record_plan *plan;
    struct records *records;
    struct token_list ends;
    struct recording_reader reader;
};

static int no_memory(struct error *error) {
    return error_set(error, ERROR_MEMORY, "no memory for recorded examples");
}

uint32_t record_tokens(const struct train_options *options, bool students, uint32_t interval) {
    return options->future + (students ? RECORD_INTERVALS * interval : 0);
}

/* ---- what is recorded ---- */

/* Of tokens after the prompt: the intervals after which a student's cache is recorded, drawn by the seed. */
static void draw_prunes(const struct recorder *recorder, uint32_t index, uint32_t student, uint32_t *after) {
    uint64_t seed = recorder->training->options->seed;
    uint32_t left = RECORD_PRUNES, interval = recorder->plan->students->interval;
    for (uint32_t i = 0; i < RECORD_INTERVALS && left > 0; i++) { /* each with the chance left / intervals to come */
        float chance = random_uniform(seed, STREAM_PRUNES + student, index, i);
        if (chance * (float)(RECORD_INTERVALS - i) < (float)left)
            after[RECORD_PRUNES - left--] = (i + 1) * interval;
    }
}

/* Log-uniform. */
static double draw_ratio(const struct recorder *recorder, uint32_t index, uint32_t student) {
    float place = random_uniform(recorder->training->options->seed, STREAM_STUDENTS, student, index);
    return ratio_least * pow(ratio_most / ratio_least, (double)place);
}

/* Sets when each example is: tokens that follow the prompt, at the latest, are returned. */
static uint32_t draw_examples(const struct recorder *recorder, struct lane *lane) {
    uint32_t future = recorder->training->options->future, last = 0, each = recorder->records->each;
    lane->examples[0] = (struct recording){.student = RECORDING_TEACHER, .at = lane->prompt};
    for (uint32_t e = 1; e < each; e += RECORD_PRUNES) {
        uint32_t after[RECORD_PRUNES], student = (e - 1) / RECORD_PRUNES;
        draw_prunes(recorder, lane->index, student, after);
        for (uint32_t i = 0; i < RECORD_PRUNES; i++)
            lane->examples[e + i] = (struct recording){.student = student, .at = lane->prompt + after[i]};
        last = after[RECORD_PRUNES - 1] > last ? after[RECORD_PRUNES - 1] : last;
    }
    return last + future;
}

/* ---- computing ---- */

static int choose_next(struct recorder *recorder, uint32_t row, int32_t *next, struct error *error) {
    struct sample_params greedy = {
        .top_p = 1, .forced = -1, .banned = recorder->ends.ids, .banned_count = (uint32_t)recorder->ends.count};
    struct sample_result result;
    int code = engine_sample(recorder->training->engine, &row, &greedy, 1, &result, error);
    if (code == 0 && result.undefined)
        code = error_set(error, ERROR_FORMAT, "the model's logits are not numbers");
    *next = result.token;
    return code;
}

/* A prune is done when more is to follow it: what was before it can be seen until then. */
static int prune_due(struct recorder *recorder, struct sequence *sequence, struct error *error) {
    if (sequence_room(sequence) != 0)
        return 0;
    int code = engine_prune(recorder->training->engine, &sequence, 1, error);
    return code == 0 ? train_yield(recorder->training) : code;
}

/* Appends the lane's tokens until the sequence has seen `until` of them, and chooses the next one when it is wanted. */
static int feed(struct recorder *recorder, const struct lane *lane, struct sequence *sequence, uint32_t until,
    int32_t *next, struct error *error) {
    struct training *training = recorder->training;
    int code = 0;
    for (uint32_t seen; code == 0 && (seen = sequence_length(sequence)) < until;) {
        code = prune_due(recorder, sequence, error);
        if (code != 0)
            break;
        uint32_t most = background_rows(training->run->background, engine_batch_rows(training->engine));
        uint32_t rows = until - seen < most ? until - seen : most, room = sequence_room(sequence);
        rows = rows < room ? rows : room;
        bool last = next != NULL && seen + rows == until;
        struct batch_item item = {
            .sequence = sequence, .tokens = lane->tokens + seen, .count = rows, .want = last ? WANT_LAST : WANT_NONE};
        code = engine_forward(training->engine, &item, 1, error);
        training->tokens += rows;
        if (code == 0 && last)
            code = choose_next(recorder, item.first_row, next, error);
        if (code == 0)
            code = train_yield(training);
    }
    return code;
}

/* ---- the teacher ---- */

/* What is to be read of the teacher after the tokens that it has seen. Rows that were wanted are lost. */
static int read_teacher(struct recorder *recorder, struct lane *lane, struct error *error) {
    uint32_t seen = sequence_length(lane->teacher);
    int code = 0;
    for (uint32_t e = 0; code == 0 && e < recorder->records->each; e++) {
        struct recording *example = &lane->examples[e];
        if (example->at == seen && example->student == RECORDING_TEACHER)
            code = recording_read(&recorder->reader, example, lane->teacher, NULL, error);
        if (code == 0 && example->at == seen)
            code = recording_begin_future(&recorder->reader, example, lane->teacher, error);
        if (code == 0 && example->end == seen)
            code = recording_end_future(&recorder->reader, example, lane->teacher, error);
    }
    return code;
}

/* The next number of tokens after which something is to be read of the teacher. */
static uint32_t next_reading(const struct recorder *recorder, const struct lane *lane) {
    uint32_t seen = sequence_length(lane->teacher), next = lane->end;
    for (uint32_t e = 0; e < recorder->records->each; e++) {
        uint32_t at = lane->examples[e].at, end = lane->examples[e].end;
        next = at > seen && at < next ? at : next;
        next = end > seen && end < next ? end : next;
    }
    return next;
}

/* The continuation that is the data's. */
static int follow_text(struct recorder *recorder, struct lane *lane, struct error *error) {
    int code = 0;
    while (code == 0 && sequence_length(lane->teacher) < lane->end) {
        code = feed(recorder, lane, lane->teacher, next_reading(recorder, lane), NULL, error);
        if (code == 0)
            code = read_teacher(recorder, lane, error);
    }
    return code;
}

/* Those that are not at their end: their number. */
static uint32_t find_active(struct lane *lanes, uint32_t count, struct lane **active) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++)
        if (lanes[i].own && sequence_length(lanes[i].teacher) < lanes[i].end)
            active[found++] = &lanes[i];
    return found;
}

/* A step of these. */
static int decode_step(struct recorder *recorder, struct lane *const *lanes, uint32_t count, struct error *error) {
    struct batch_item items[GROUP_MOST];
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        struct sequence *teacher = lanes[i]->teacher;
        code = prune_due(recorder, teacher, error);
        items[i] = (struct batch_item){
            .sequence = teacher, .tokens = lanes[i]->tokens + sequence_length(teacher), .count = 1, .want = WANT_LAST};
    }
    if (code == 0)
        code = engine_forward(recorder->training->engine, items, count, error);
    recorder->training->tokens += count;
    for (uint32_t i = 0; code == 0 && i < count; i++)
        code = choose_next(recorder, items[i].first_row, &lanes[i]->tokens[sequence_length(lanes[i]->teacher)], error);
    for (uint32_t i = 0; code == 0 && i < count; i++)
        code = read_teacher(recorder, lanes[i], error);
    return code == 0 ? train_yield(recorder->training) : code;
}

/* The continuations that are the teacher's own, side by side: fewer of them while others want the processor. */
static int decode_own(struct recorder *recorder, struct lane *lanes, uint32_t count, struct error *error) {
    const struct training *training = recorder->training;
    struct lane *active[GROUP_MOST];
    uint32_t found;
    int code = 0;
    while (code == 0 && (found = find_active(lanes, count, active)) > 0) {
        for (uint32_t first = 0, slice; code == 0 && first < found; first += slice) {
            uint32_t rows = background_rows(training->run->background, engine_batch_rows(training->engine));
            slice = rows > ROWS_OF_LANE ? rows / ROWS_OF_LANE : 1;
            slice = slice < found - first ? slice : found - first;
            code = decode_step(recorder, active + first, slice, error);
        }
    }
    return code;
}

/* ---- students ---- */

/* The policy of students, that the teacher begins with too: statistics are those of both. */
static int set_policy(struct recorder *recorder, struct lane *lane, struct error *error) {
    struct policy_settings settings;
    policy_settings_default(policy_find("distillcache"), &settings);
    policy_settings_use_network(&settings, recorder->plan->students);
    settings.tokens = UNBOUNDED;
    int code = sequence_set_policy(lane->teacher, &settings, lane->prompt, error);
    policy_settings_release(&settings);
    return code;
}

/* Forks of the teacher at the end of the prompt, with budgets of their own. */
static int fork_students(struct recorder *recorder, struct lane *lane, struct error *error) {
    int code = 0;
    if (recorder->records->shape.features == FEATURES_PAPER) {
        lane->standards = calloc(recorder->records->heads, sizeof *lane->standards);
        code = lane->standards == NULL ? no_memory(error)
                                       : recording_standards(&recorder->reader, lane->teacher, lane->standards, error);
    }
    for (uint32_t s = 0; code == 0 && s < RECORD_STUDENTS; s++) {
        lane->students[s] = sequence_fork(lane->teacher);
        if (lane->students[s] == NULL)
            return error_set(error, ERROR_PAGES, "no memory for a sequence");
        code = sequence_set_budget(lane->students[s], draw_ratio(recorder, lane->index, s), 0, error);
    }
    return code;
}

/* Through what the teacher went through, as far as there is something to read. */
static int follow_teacher(struct recorder *recorder, struct lane *lane, uint32_t student, struct error *error) {
    struct sequence *sequence = lane->students[student];
    int code = 0;
    for (uint32_t e = 0; code == 0 && e < recorder->records->each; e++) {
        struct recording *example = &lane->examples[e];
        if (example->student != student)
            continue;
        code = feed(recorder, lane, sequence, example->at, NULL, error);
        if (code == 0)
            code = recording_read(&recorder->reader, example, sequence, (const float(*)[6])lane->standards, error);
        example->out->budget = policy_budget(sequence_policy(sequence), example->at);
        example->out->fresh = recorder->plan->students->interval;
    }
    sequence_free(sequence);
    lane->students[student] = NULL;
    return code;
}

/* ---- a group ---- */

/* Takes sequence `index` of the data. */
static int open_lane(struct recorder *recorder, uint32_t index, struct lane *lane, struct error *error) {
    const struct records *records = recorder->records;
    struct training *training = recorder->training;
    struct dataset_sequence data;
    int code = dataset_sequence(training->dataset, recorder->plan->first + index, &data, error);
    if (code != 0)
        return code;
    lane->index = index;
    lane->prompt = data.prompt;
    uint32_t follow = draw_examples(recorder, lane), text = data.count - data.prompt;
    lane->own = data.own || (records->each > 1 && text < follow);
    lane->end = data.prompt + (lane->own || text > follow ? follow : text);
    lane->tokens = malloc(((size_t)lane->end + 1) * sizeof *lane->tokens);
    if (lane->tokens == NULL)
        return no_memory(error);
    memcpy(lane->tokens, data.tokens, (lane->own ? data.prompt : lane->end) * sizeof *lane->tokens);
    for (uint32_t e = 0; code == 0 && e < records->each; e++) {
        uint32_t end = lane->examples[e].at + training->options->future;
        lane->examples[e].end = end < lane->end ? end : lane->end;
        code = recording_open(records, training->options->seed, index * records->each + e, &lane->examples[e], error);
    }
    return code;
}

static void close_lane(const struct recorder *recorder, struct lane *lane, bool failed) {
    sequence_free(lane->teacher);
    for (uint32_t s = 0; s < RECORD_STUDENTS; s++)
        sequence_free(lane->students[s]);
    for (uint32_t e = 0; e < recorder->records->each; e++)
        recording_close(&lane->examples[e], failed);
    free(lane->standards);
    free(lane->tokens);
    *lane = (struct lane){0};
}

static int compute_prompt(struct recorder *recorder, struct lane *lane, struct error *error) {
    bool students = recorder->plan->students != NULL;
    lane->teacher = sequence_create(recorder->training->engine);
    if (lane->teacher == NULL)
        return error_set(error, ERROR_PAGES, "no memory for a sequence");
    int code = students ? set_policy(recorder, lane, error) : 0;
    if (code == 0)
        code = recorder->plan->outputs ? sequence_record(lane->teacher, STATISTICS | STATISTIC_HEAD_WINDOW,
                                             recorder->reader.features.window, error)
                                       : sequence_record(lane->teacher, STATISTICS, 0, error);
    if (code == 0)
        code = feed(recorder, lane, lane->teacher, lane->prompt, lane->own ? &lane->tokens[lane->prompt] : NULL, error);
    if (code == 0)
        code = read_teacher(recorder, lane, error);
    return code == 0 && students ? fork_students(recorder, lane, error) : code;
}

static int compute_group(
    struct recorder *recorder, struct lane *lanes, uint32_t first, uint32_t count, struct error *error) {
    uint32_t students = recorder->plan->students != NULL ? RECORD_STUDENTS : 0;
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        code = open_lane(recorder, first + i, &lanes[i], error);
        if (code == 0)
            code = train_yield(recorder->training);
    }
    for (uint32_t i = 0; code == 0 && i < count; i++)
        code = compute_prompt(recorder, &lanes[i], error);
    for (uint32_t i = 0; code == 0 && i < count; i++)
        if (!lanes[i].own)
            code = follow_text(recorder, &lanes[i], error);
    if (code == 0)
        code = decode_own(recorder, lanes, count, error);
    for (uint32_t i = 0; code == 0 && i < count * students; i++)
        code = follow_teacher(recorder, &lanes[i / students], i % students, error);
    for (uint32_t i = 0; code == 0 && i < count * recorder->records->each; i++)
        recording_finish(&lanes[i / recorder->records->each].examples[i % recorder->records->each]);
    return code;
}

/* Records sequences [first, first + count). On a failure nothing of them is left. */
static int record_group(struct recorder *recorder, uint32_t first, uint32_t count, struct error *error) {
    struct lane *lanes = calloc(GROUP_MOST, sizeof *lanes);
    if (lanes == NULL)
        return no_memory(error);
    uint64_t tokens = recorder->training->tokens;
    int code = compute_group(recorder, lanes, first, count, error);
    if (code != 0) /* what is made again is not counted again */
        recorder->training->tokens = tokens;
    for (uint32_t i = 0; i < count; i++)
        close_lane(recorder, &lanes[i], code != 0);
    free(lanes);
    return code;
}

/* As many side by side as pages allow; begun anew when pages were given up. One alone that finds none waits for those
 * of live requests. */
static int record_all(struct recorder *recorder, struct error *error) {
    struct training *training = recorder->training;
    uint32_t group = GROUP_MOST, most = engine_batch_rows(training->engine), count = recorder->plan->sequences;
    int code = 0;
    group = group > most ? most : group;
    for (uint32_t first = 0; code == 0 && first < count;) {
        uint32_t members = count - first < group ? count - first : group;
        code = record_group(recorder, first, members, error);
        if (code == 0) {
            first += members;
            train_progress(training, "recording", first, count);
        } else if (code == ERROR_PAGES && members > 1) {
            group = members / 2;
            code = 0;
        } else if (code == TRAIN_AGAIN || (code == ERROR_PAGES && train_may_wait(training))) {
            code = train_gave_up(training);
        }
    }
    return code;
}

/* ---- all ---- */

/* Layers of an example that are recorded. */
static uint32_t layers_of_example(
    const struct records *records, const struct train_options *options, uint32_t sequences) {
    const struct network_shape *shape = &records->shape;
    double part = 1 + (records->each - 1) * (ratio_most - ratio_least) / log(ratio_most / ratio_least);
    double slots = ((double)options->prompt_least + options->prompt_most) / 2 * sequences * part;
    double bytes = slots * shape->kv_heads * (double)recording_slot_bytes(records);
    double most = MEMORY_MOST / bytes, wanted = ceil((double)records->layers / LAYERS_PART);
    wanted = fmax(wanted, fmin(records->layers, LAYERS_LEAST));
    double layers = most < wanted ? floor(most) : wanted;
    return layers < 1 ? 1 : (uint32_t)layers;
}

static struct records *allocate_records(
    const struct training *training, const struct record_plan *plan, struct error *error) {
    struct records *records = calloc(1, sizeof *records);
    if (records == NULL) {
        no_memory(error);
        return NULL;
    }
    const struct model *loaded = engine_model(training->engine);
    const struct model_shape *model = &loaded->shape;
    bool students = plan->students != NULL;
    records->group = model->heads / model->kv_heads;
    records->outputs = plan->outputs;
    struct network_shape bare = records->shape = training->network->shape;
    bare.content = 0;
    records->inputs = network_inputs_count(&bare);
    records->fixed_mask = bare.inputs &= ~(uint32_t)BUDGET_INPUTS;
    records->fixed = network_inputs_count(&bare);
    records->heads = records->shape.layers * records->shape.kv_heads;
    records->layers = model->global_layers;
    records->layer_numbers = loaded->global_layers;
    records->each = students ? EXAMPLES_MOST : 1;
    records->heads_most = layers_of_example(records, training->options, plan->sequences) * records->shape.kv_heads;
    records->slots_most = training->options->prompt_most + (students ? RECORD_INTERVALS * plan->students->interval : 0);
    records->count = plan->sequences * records->each;
    records->sequences = calloc(records->count, sizeof *records->sequences);
    if (records->sequences != NULL)
        return records;
    free(records);
    no_memory(error);
    return NULL;
}

int records_create(
    struct training *training, const struct record_plan *plan, struct records **out, struct error *error) {
    struct recorder recorder = {.training = training, .plan = plan};
    recorder.records = allocate_records(training, plan, error);
    if (recorder.records == NULL)
        return ERROR_MEMORY;
    uint32_t slots = recorder.records->slots_most + training->options->future;
    int code = recording_reader_open(
        &recorder.reader, training, recorder.records, slots + 2 * KV_PAGE_SLOTS, training->options->future, error);
    if (code == 0 && tokenizer_list_ends(training->run->tokenizer, &recorder.ends) != 0)
        code = no_memory(error);
    if (code == 0)
        code = record_all(&recorder, error);
    if (code == 0 && recorder.records->shape.content > 0)
        code = records_whiten_keys(training, recorder.records, error);
    recording_reader_close(&recorder.reader);
    token_list_free(&recorder.ends);
    *out = code == 0 ? recorder.records : NULL;
    if (code != 0)
        records_free(recorder.records);
    return code;
}
