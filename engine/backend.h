/* SPDX-License-Identifier: Apache-2.0
 *
 * The backend interface: a table of operations on device memory. engine/cpu and cuda implement it; engine/transformer.c
 * and engine/engine.c are its only callers. tests/parity runs every operation against a plain C reference.
 *
 * Letters: R rows of a batch (one per token), D width, d head_dim, H query heads, K KV heads, G = H / K, V vocabulary,
 * P = KV_PAGE_SLOTS. Matrices are row-major, [rows, columns]. `float *` and `void *` named as device memory are
 * addresses from allocate(), which the host must not read; everything else (structs, page lists, token ids) is host
 * memory, consumed before the call returns. Operations of one backend run in call order; download and synchronize wait.
 * A backend is used by one thread at a time.
 *
 * Determinism: row r of any result depends on row r of the inputs (and on its own slots) only, in a fixed order of
 * operations, never on R, on chunking or on the number of threads:
 *   linear    activations are rounded to int8 per block of 32 (scale s = f16(max|x| / 127), q = rint(x * (127 /
 * max|x|)), half to even, each operation in float32); per block the dot product of integers is exact; then acc =
 *             fma(dot, d * s, acc), and for Q4_1 acc = fma(m, s * sum(q), acc) after it, blocks in ascending order.
 *             Q4_0: dot over nibble - 8. An x that is not finite makes its row NaN. F32, F16, BF16 weights: acc =
 *             fma(w, x, acc) in ascending column order, x not rounded.
 *   attend    the slots of a head are split at multiples of ATTEND_SPLIT; a split's partial result (m, l, o) is
 *             computed alone, and partial results are merged in ascending order. Statistics are sums of integers.
 *   score     a layer's scores depend on that layer's slots and statistics only.
 */
#ifndef ENGINE_BACKEND_H
#define ENGINE_BACKEND_H

#include "engine/error.h"
#include "engine/tensor.h"
#include "policy/policy.h"

enum {
    KV_PAGE_SLOTS = 16,
    ATTEND_SPLIT = 256,  /* slots; a multiple of KV_PAGE_SLOTS */
    SAMPLE_TOP_MAX = 20, /* most likely tokens that can be reported a row */
    LINEAR_WEIGHTS_MAX = 3,
    BACKEND_RANKS_MAX = 8, /* devices of one model: tensor parallel */
};

enum kv_format { KV_F32, KV_F16, KV_BF16 };

/* One page: P slots of one layer and one KV head.
 *   keys      [d][P]  channel-major, after RoPE (so that P slots of a channel are one vector)
 *   values    [P][d]
 *   positions [P]     int32, original positions; unused slots have position KV_NO_POSITION
 * in this order without gaps, the whole rounded up to 64 bytes. */
enum { KV_NO_POSITION = 0x7fffffff };
#define KV_NO_SLOT UINT32_MAX

struct kv_layout {
    uint32_t layers;
    uint32_t kv_heads;
    uint32_t head_dim;
    enum kv_format format;
    /* A rank's pool has some of the model's KV heads, [first_head, first_head + kv_heads). What depends on the number
     * of a head (random numbers, networks) goes by the model's. */
    uint32_t first_head;
    uint32_t model_heads; /* KV heads of the model; 0: kv_heads */
};

static inline uint32_t kv_layout_model_heads(const struct kv_layout *layout) {
    return layout->model_heads != 0 ? layout->model_heads : layout->kv_heads;
}

/* Number of a pool's KV head among those of all layers of the model. */
static inline uint32_t kv_layout_head_number(const struct kv_layout *layout, uint32_t layer, uint32_t head) {
    return layer * kv_layout_model_heads(layout) + layout->first_head + head;
}

size_t kv_format_bytes(enum kv_format format);        /* of one number */
size_t kv_page_bytes(const struct kv_layout *layout); /* of one page */

/* The pool that page numbers refer to: page n starts at base + n * page_bytes. With several ranks (struct backend) each
 * has a part of the pages: page n lies on rank n / rank_pages, and holds slots of one of that rank's heads. */
struct kv_pool {
    void *base; /* device memory, 64-byte aligned */
    size_t page_bytes;
    struct kv_layout layout;
    uint32_t rank_pages; /* of each rank; 0: there is one */
};

/* What one (sequence, layer, KV head) holds. Slot s lies in pages[s / P], place s % P. */
struct kv_head_view {
    const uint32_t *pages;
    uint32_t slots;      /* slots to attend to, those of this batch's new tokens included */
    uint32_t first_slot; /* slot of the item's first new token; the others follow */
    /* One more slot that stands for evicted tokens, or NULL: device [SUMMARY_NUMBERS(d)]: key (as after RoPE) [d],
     * value [d], a logit that is added to q k / sqrt(d), and what summarise goes on with. Visible to every row; merged
     * after the last split. */
    const float *summary;
    /* Slots before it (a multiple of KV_PAGE_SLOTS) are gone, and so are their pages: a sliding layer's. */
    uint32_t from_slot;
    /* Device: the same page numbers as `pages`, or NULL: nobody keeps them there. A backend that wants them and does
     * not find them here sends `pages`. */
    const uint32_t *device_pages;
};

/* Page numbers that the device's copy of a page table lacks: write_tables. */
struct kv_table_write {
    uint32_t *to;         /* device [count] */
    const uint32_t *from; /* host [count] */
    uint32_t count;
    uint32_t rank; /* that `to` lies on */
};

/* Numbers of a summary slot: key, value, logit, W, E. */
#define SUMMARY_NUMBERS(head_dim) (2 * (head_dim) + 3)

/* What was evicted from one head, for its summary slot, whose memory begins as zeros. With c = seen - position the
 * queries that could see a token and w = max(A / c, 2^-24), A = statistics.sum / 2^24: W and E are the sums of w and of
 * w ln w, key and value the means of k (as the cache holds it) and v weighted by w, over all that was evicted. Slots
 * [count] are added in the order given, in float32: W += w, then mean += (w / W) (x - mean). logit = ln W - E / W +
 * offset. */
struct summary_update {
    struct kv_head_view view;
    const uint32_t *sum;       /* device [2][capacity] as struct kv_statistics has it */
    uint32_t capacity;         /* at least view.slots */
    const uint32_t *positions; /* host [view.slots] */
    const uint32_t *slots;     /* host [count] distinct, none empty */
    uint32_t count;            /* 0: nothing changes */
    uint32_t seen;
    float offset;
    float *summary; /* device [SUMMARY_NUMBERS(d)] */
};

struct rope_params {
    uint32_t dim;              /* leading values of a head that are rotated, even */
    const float *inverse_freq; /* [dim / 2] host; angle of pair i = position * inverse_freq[i] (Su et al. 2021) */
};

/* One sequence's rows in a batch. */
struct kv_item {
    uint32_t first_row;
    uint32_t rows;
    uint32_t position; /* original position of the first row's token; the others follow */
    /* Statistics: rows before this one (counted from the item's own first row) are not counted in those of a window
     * (window, head_window, outputs), since they will have left it before the next prune. A multiple of nothing; 0: all
     * that can be in the window after the batch are counted. */
    uint32_t window_from;
    uint32_t prompt; /* tokens of the prompt: the n-th decoded token has position prompt + n - 1 */
};

/* Statistics of one (sequence, layer, KV head), by slot: private to the sequence, device memory, zero for a slot whose
 * token was never attended to. NULL where the bit is not in `needs`. attend adds to them; compaction moves them with
 * their slots. G query heads, w = window; the ring row of the query at position t is t % w (t % history for above).
 *
 * sum, squared and noisy have two planes of 32-bit words, [2][capacity]: plane 0 holds bits 0 to 30 of a slot's number,
 * and its bit 31 says that plane 1, the number >> 31, is not zero there. Each query adds to the numbers of all slots,
 * and memory is what limits that: few slots get beyond 2^31 (a probability of 1 from 128 queries), so that plane 0 is
 * all that most queries read and write. All bytes zero is the number 0. */
struct kv_statistics {
    uint32_t needs;    /* mask of enum statistic, STATISTIC_MOMENTS excepted */
    uint32_t capacity; /* slots; a multiple of 16 */
    uint32_t window, history;
    uint64_t seed;         /* keyformer */
    uint32_t *sum;         /* [2][capacity] sum of rint(a * 2^24) */
    uint32_t *squared;     /* [2][capacity] sum of rint(mean of p^2 * 2^24) */
    uint32_t *noisy;       /* [2][capacity] */
    uint16_t *window_rows; /* [w][capacity] f16(a); times 2^24 an integer; see statistics_move.rows_stay */
    uint32_t *window_sum;  /* [capacity] sum over the ring of f16(a) * 2^24, modulo 2^32: 256 times 1 is 0 */
    uint16_t *head_rows;   /* [w][G][capacity] f16(p) */
    float *outputs;        /* [w][G][d] o_h */
    uint64_t *above;       /* [capacity][STATISTIC_ABOVE_BITS / 64] bit t % history */
    uint16_t *entropy;     /* [capacity] f16, of the slot's own query, nats */
    float *output_norm;    /* [capacity] 0: not computed yet */
    uint32_t content;      /* numbers of the network's content, 0 to NETWORK_CONTENT_MAX */
    /* [content + 2][capacity] f16: content, ln(1e-6 + |v|), ln(1e-6 + mean |u_h|). In the row of ln |v| 0 means that
     * the slot's numbers are not computed yet; a number that is 0 is stored as -0. */
    uint16_t *content_rows;
    float *standard; /* [8] network_standardise; [1] (an inverse deviation) 0: not frozen yet */
};

/* One number of two planes. For host memory; not for loops over many slots. */
static inline uint64_t kv_sum_get(const uint32_t *planes, uint32_t capacity, uint32_t slot) {
    uint64_t low = planes[slot] & 0x7fffffff;
    return planes[slot] >> 31 == 0 ? low : (uint64_t)planes[(size_t)capacity + slot] << 31 | low;
}

/* sum: below 2^63. */
static inline void kv_sum_set(uint32_t *planes, uint32_t capacity, uint32_t slot, uint64_t sum) {
    uint32_t high = (uint32_t)(sum >> 31);
    planes[slot] = (uint32_t)sum & 0x7fffffff;
    planes[slot] |= high != 0 ? 0x80000000 : 0;
    planes[(size_t)capacity + slot] = high;
}

/* Moments of the pre-RoPE queries of one (sequence, layer), positions >= 4 only, added in order of position. Device. */
struct query_moments {
    uint32_t *count; /* [1] */
    double *sum;     /* [H][d] */
    double *outer;   /* [H][d][d], upper triangle of each head: element (i, j), i <= j */
};

/* Columns of one head's statistics that follow their slots. */
struct statistics_move {
    /* The same arrays, or arrays of another capacity and fewer needs, zeroed before; what only one has is left alone.
     */
    const struct kv_statistics *from, *to;
    const uint32_t *from_slots, *to_slots; /* [count], in order; NULL: the first `count` slots stay where they are */
    uint32_t count;
    uint32_t clear_first, clear_end; /* then these columns of `to` are zeroed */
    uint32_t rank;                   /* that all of the head's memory lies on */
    /* Their window_rows need not be zeroed, each of which is a cache line: no stage will read them. Attention takes
     * what a row holds of a slot whose token is later than the query w before for zero, so that they do not get into
     * window_sum, as long as every query is counted there. */
    bool rows_stay;
};

struct score_layer;

/* All sequences of a batch, for one layer: views[item * K + kv_head]. */
struct kv_batch {
    const struct kv_pool *pool;
    const struct kv_item *items;
    uint32_t items_count;
    const struct kv_head_view *views;
    uint32_t layer;
    const struct kv_statistics *statistics; /* [items * K]; NULL: no item needs any */
    /* [items], or NULL: layers whose heads attend scores as soon as their statistics are there, while they lie in the
     * caches: a decode step knows beforehand that it will be followed by a prune that asks for the worst slots alone.
     * heads NULL: not this item. Its stages are such as attend_scores takes, its heads have no scores; `worst` is set
     * to what score would find, or left as it was where there is no memory. */
    const struct score_layer *scored;
    /* Further parameters of attend, for backends with attend_variants; 0 is the plain case of each. */
    uint32_t window; /* a row sees its own position and the window - 1 before it; 0: all before it */
    float scale;     /* of q k; 0: 1 / sqrt(d) */
    float cap;       /* scaled scores s become cap tanh(s / cap); before a summary slot's logit is added; 0: stay */
};

/* A batch on its way through all layers, for backends that want to have all of it before they begin. Letters as above;
 * L layers. The operations that follow get parts of it: embed `tokens`, the others batches of layer l with `items`,
 * `views` from [l] on, and so on. Host memory, unchanged until the step has ended. */
struct kv_step {
    const void *owner; /* who calls: two owners' operations are not the same although their steps are alike */
    const int32_t *tokens;
    uint32_t rows;      /* of the batch */
    uint32_t rows_room; /* that the owner's arrays have room for; at least rows */
    const struct kv_pool *pool;
    const struct kv_item *items; /* [items_count] */
    uint32_t items_count;
    const struct kv_head_view *views;       /* [L][items_count][K] */
    const struct kv_statistics *statistics; /* the same; NULL: no item needs any */
    const struct query_moments *moments;    /* [L][items_count]; NULL */
    const struct score_layer *scored;       /* [L][items_count]; NULL */
    const uint32_t *wanted; /* [wanted_count] rows that gather_rows will be asked for; NULL: all rows stay */
    uint32_t wanted_count;
    uint32_t heads; /* H */
    const struct rope_params *rope;
    /* Each item has one row, in order, and which operations follow, with which device memory, is the same in all such
     * steps of the owner. Results of rows from `rows` on are nobody's. */
    bool repeats;
    uint32_t slots_most; /* no view of any rank has more slots; 0: the views say it */
};

/* How a step is done, in ascending order of what it spares. */
enum step_way {
    STEP_CALLS,   /* operation by operation */
    STEP_CAPTURE, /* the same, but nothing is computed: what was called is kept, and done when the step has ended */
    STEP_REPLAY,  /* what was kept of a step of the same shape is done again: nothing needs to be called */
};

/* A head at a prune: its slots and what is known of them. */
struct score_head {
    struct kv_head_view view;
    struct kv_statistics statistics;
    uint32_t sinks, recent_from; /* protected: positions < sinks or >= recent_from */
    float *scores;               /* device [slots] out; NaN where the stages give none, +infinity for protected; or
                                  * NULL: nobody will read them */
    /* Host out, or NULL: the slot that selection drops first (select.h: lowest score, NaN lowest, then lowest
     * position), empty ones left out. UINT32_MAX: all are empty. Without host_memory it is written by the next
     * operation that waits, and must be there until then. */
    uint32_t *worst;
    uint32_t *worst_rank; /* host out, or NULL: how many slots are before it in the order; or left as it was */
    /* What the host knows already, so that the backend need not read every page for it; each may be NULL. */
    const uint32_t *positions; /* host [slots] what the pages hold */
    /* host [order_count] slots by ascending position, unused ones last, and anywhere but at the end KV_NO_SLOT, which
     * stands for nothing; used when slots are not in that order */
    const uint32_t *order;
    uint32_t order_count;
};

/* A layer at a prune. Layers of one call are scored independently of each other. */
struct score_layer {
    const struct score_head *heads; /* [K] */
    uint32_t layer;
    uint32_t seen;   /* L */
    uint32_t budget; /* B */
    uint64_t seed;   /* STAGE_RANDOM */
    const struct score_stage *stages;
    uint32_t stages_count;
    uint32_t window;                /* w */
    struct query_moments moments;   /* STAGE_EXPECTED_ATTENTION */
    const struct rope_params *rope; /* the same */
    const struct tensor *output; /* attention output matrix W_o [D, H*d] of the model file, host; laprox and its like */
    const struct policy_network *network; /* STAGE_NETWORK; host */
    bool freeze; /* STAGE_NETWORK, paper: statistics.standard is set by this prune if it is not yet */
};

struct policy_network; /* policy/network.h */

/* Slots of which some stay: a row of policy/select.h with its scores on the device. */
struct selected_row {
    struct kv_head_view view;  /* positions are what its pages hold */
    const float *scores;       /* device [slots], as score leaves them */
    const uint32_t *positions; /* host [slots] what the pages hold, for those that do not look there */
    uint32_t layer, head;      /* ascending within a selection */
    uint32_t budget;           /* as there */
    /* Out, host [(slots + 31) / 32], the backend's until its next select: bit s % 32 of word s / 32: slot s stays. */
    const uint32_t *stays;
};

/* What select_slots does: rows of one sequence. */
struct selection {
    struct selected_row *rows;
    uint32_t rows_count;
    enum policy_scope scope;
    float floor_part;
};

struct backend;        /* a device with its state, or several */
struct backend_weight; /* a matrix in the layout that the backend's kernels want */

/* What of a matrix each of several ranks has. N ranks; the parts of a rank follow those of the ranks before it. */
enum weight_role {
    WEIGHT_ROWS,       /* rows / N of its rows (of W_q, W_k, W_v: its heads; of W_gate, W_up): results stay apart */
    WEIGHT_COLUMNS,    /* columns / N of its columns (W_o, W_down): results are sums over all ranks */
    WEIGHT_VOCABULARY, /* some of its rows, one a token: logits come together, rows to embed come from who has them */
};

/* A token's logit z becomes (z > 0 ? z * positive : z * negative) + add, each step rounded to float. */
struct logit_change {
    int32_t token;
    float positive, negative; /* above 0; 1: as it was */
    float add;
};

/* How to choose the next token of one row. Neutral values: temperature 1, top_p 1, top_k 0, min_p 0. Order: changes,
 * bans and mask, temperature, top_k, top_p (of what top_k kept), min_p; tokens are ranked by logit, equal ones by lower
 * id. The choice inverts the cumulative distribution of what is left, in order of id, at random_uniform(seed, stream,
 * step, 0). NaN counts as -infinity, and is never reported among the most likely. */
struct sample_params {
    float temperature; /* 0: the most likely token (lowest id on a tie) */
    float top_p;       /* (0, 1]: smallest set of most likely tokens whose probability reaches top_p */
    float min_p;       /* [0, 1]: drop tokens below min_p times the largest probability */
    uint32_t top_k;    /* 0: all */
    uint64_t seed;
    uint32_t stream;    /* choice number of the request */
    uint32_t step;      /* tokens generated so far */
    uint32_t top_count; /* most likely tokens to report, <= SAMPLE_TOP_MAX */
    bool want_logprob;
    int32_t forced;        /* >= 0: do not choose, report this token (prompt log-probabilities) */
    const int32_t *banned; /* host, ids that must not be chosen (for example end tokens under ignore_eos) */
    uint32_t banned_count;
    const struct logit_change *changes; /* host, by ascending token, each once, in [0, vocabulary) */
    uint32_t changes_count;
    const uint32_t *allowed; /* host, NULL: all. Bit id % 32 of word id / 32, for the whole vocabulary: what is not set
                                must not be chosen */
};

/* Log-probabilities are of the model's own distribution: before temperature, filters, changes, bans and masks. */
struct sample_result {
    int32_t token;
    bool undefined; /* no token that may be chosen has a logit above -infinity: nothing to choose by, token is arbitrary
                     */
    float logprob;  /* when want_logprob */
    uint32_t top_count;
    struct {
        int32_t token;
        float logprob;
    } top[SAMPLE_TOP_MAX]; /* descending; ties by lower id */
};

struct backend_operations {
    const char *name;                          /* "cpu" */
    bool host_memory;                          /* device memory may be read and written by the host after synchronize */
    const char *(*describe)(struct backend *); /* "cpu, avx512-vnni, 2 threads" */
    void (*close)(struct backend *);

    /* Memory. allocate: 64-byte aligned, zeroed, NULL when there is none. release and weight_free allow NULL. */
    void *(*allocate)(struct backend *, size_t bytes);
    void (*release)(struct backend *, void *memory);
    void (*upload)(struct backend *, void *to, const void *from, size_t bytes);
    void (*download)(struct backend *, void *to, const void *from, size_t bytes);
    void (*synchronize)(struct backend *);
    /* Several ranks only, NULL otherwise: where what allocate gave as `memory` (or is inside of it) lies on a rank. */
    void *(*address)(struct backend *, const void *memory, uint32_t rank);
    /* The same: 0, or the error for which results since the last check are nobody's. A rank that failed never works
     * again. */
    int (*check)(struct backend *, struct error *);

    /* Takes a matrix of any known format. The tensor's data may be forgotten afterwards. exact: keep it in float32 and
     * do not round activations (option --precision f32). */
    struct backend_weight *(*weight_create)(struct backend *, const struct tensor *, bool exact, struct error *);
    /* Several ranks only, in place of weight_create. ERROR_UNSUPPORTED when it cannot be cut into as many parts. */
    struct backend_weight *(*weight_split)(
        struct backend *, const struct tensor *, enum weight_role role, bool exact, struct error *);
    void (*weight_free)(struct backend *, struct backend_weight *);
    size_t (*weight_bytes)(const struct backend_weight *); /* what the kernels read of it per pass */

    /* A step; all NULL: the backend needs none. step_begin takes all of a batch to the device, and says how many rows
     * the operations that follow must be called with (*rows, from step->rows to step->rows_room), and the best way in
     * which it can be done. step_start chooses that way or a lesser one: ranks have to do a step in the same way. After
     * STEP_REPLAY the step is over. Otherwise operations follow, with parts of the step only, none that allocates or
     * waits; then step_end; then, after STEP_CAPTURE, step_start(STEP_REPLAY). When step_start or step_end is false,
     * nothing was computed, and all of it, step_begin included, has to be called again. */
    enum step_way (*step_begin)(struct backend *, const struct kv_step *step, uint32_t *rows);
    bool (*step_start)(struct backend *, enum step_way way);
    bool (*step_end)(struct backend *);

    /* out [R, D] = rows of weight by token id; zeros for an id that is none of its rows: another rank has it. */
    void (*embed)(struct backend *, const struct backend_weight *, const int32_t *tokens, uint32_t rows, float *out);

    /* out [R, D] = x / sqrt(mean(x^2) + epsilon) * weight; x == out allowed. weight: device [D]. */
    void (*rms_norm)(struct backend *, const float *x, const float *weight, float epsilon, uint32_t rows,
        uint32_t width, float *out);

    /* out += x / sqrt(mean(x^2) + epsilon) * weight. NULL: the backend cannot; and so for all that are marked so. */
    void (*rms_norm_add)(struct backend *, const float *x, const float *weight, float epsilon, uint32_t rows,
        uint32_t width, float *out);

    /* Every head of queries and keys in qkv [R, H*d | K*d | K*d] is normed by itself, in place: h / sqrt(mean(h^2) +
     * epsilon) * weight. Weights: device [d]. NULL: cannot. */
    void (*head_norms)(struct backend *, const float *query_weight, const float *key_weight, float epsilon,
        uint32_t rows, uint32_t heads, uint32_t kv_heads, uint32_t head_dim, float *qkv);

    /* x[r] += bias: device [D]. NULL: cannot. */
    void (*add_bias)(struct backend *, const float *bias, uint32_t rows, uint32_t width, float *x);

    /* x [R, D] *= factor. NULL: cannot. */
    void (*scale)(struct backend *, float factor, uint32_t rows, uint32_t width, float *x);

    /* x [R, D] = cap tanh(x / cap). NULL: cannot. */
    void (*soft_cap)(struct backend *, float cap, uint32_t rows, uint32_t width, float *x);

    /* out[r, ...] = x[r] times each weight transposed, results of several weights side by side in a row of `out`:
     * x [R, columns], out [R, sum of weight rows]. All weights have the same columns. add: out += result (residual).
     * x and out must not overlap. */
    void (*linear)(struct backend *, const struct backend_weight *const *weights, uint32_t weights_count,
        const float *x, uint32_t rows, bool add, float *out);

    /* qkv [R, H*d | K*d | K*d]: rotates the pairs (2i, 2i+1) of queries in place and of keys on their way into the
     * cache, and stores keys, values and positions at the items' new slots. */
    void (*rope_and_append)(
        struct backend *, const struct kv_batch *, const struct rope_params *, uint32_t heads, float *qkv);

    /* Whether attend can score by these stages (struct kv_batch, scored). NULL: by none. */
    bool (*attend_scores)(const struct score_stage *stages, uint32_t count);

    /* Whether attend heeds window, scale and cap of struct kv_batch. */
    bool attend_variants;

    /* out [R, H*d] = softmax(q k / sqrt(d)) v over the slots of the row's sequence whose position is not after the
     * row's own. q is the leading part of qkv's rows (row stride (H + 2K) * d). Query head h reads KV head h / G.
     * Afterwards adds the rows' probabilities to the items' statistics. */
    void (*attend)(struct backend *, const struct kv_batch *, uint32_t heads, const float *qkv, float *out);

    /* Adds the pre-RoPE queries of qkv's rows to moments [items] (sum NULL: the item needs none). */
    void (*query_moments)(struct backend *, const struct kv_batch *, uint32_t heads, const float *qkv,
        const struct query_moments *moments);

    /* Scores the slots of layers [count] (of one or several sequences) by their stages, in parallel. heads: H. A slot
     * with position KV_NO_POSITION gets NaN. Does not wait. ERROR_MEMORY, ERROR_UNSUPPORTED; then scores are undefined,
     * and `worst` is not written. */
    int (*score)(struct backend *, const struct kv_pool *, const struct score_layer *layers, uint32_t count,
        uint32_t heads, struct error *error);

    /* Selects among rows whose scores the host would have to fetch, of all sequences at once: the slots that policy/
     * select.h keeps, with its ties. Waits for the result. ERROR_MEMORY. NULL: scores are host memory, use
     * select_slots.
     */
    int (*select)(struct backend *, const struct kv_pool *, const struct selection *selections, uint32_t count,
        struct error *error);

    /* Adds what is evicted to heads' summary slots. Heads are distinct. Before the slots are moved or cleared. */
    void (*summarise)(struct backend *, const struct kv_pool *, const struct summary_update *updates, uint32_t count);

    /* What the slots of one head weigh, host [slots] each, either may be NULL: value_norm = ln(1e-6 + |v|), output_norm
     * = ln(1e-6 + mean over the group of |v W_h|), L2 norms; 0 for empty slots. output: the layer's W_o. heads: H.
     * ERROR_MEMORY, ERROR_INVALID. */
    int (*slot_norms)(struct backend *, const struct kv_pool *, const struct kv_head_view *view,
        const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm,
        float *output_norm, struct error *error);

    /* cake's layer preference before exponents: entropy[i] = - sum p ln p, variance[i] = sum over slots and query heads
     * of the population variance over the window's queries of p[h,t,slot]; over slots outside the protected ones. Needs
     * STATISTIC_HEAD_WINDOW. Host results. */
    void (*window_preference)(struct backend *, const struct kv_pool *, const struct score_layer *layers,
        uint32_t count, uint32_t heads, double *entropy, double *variance);

    /* Rotates the keys of `count` slots of one head (positions unchanged) to what they are at position `to[i]`: out of
     * keys [count][d] (device, f32, unrotated). For StreamingLLM's positions in the cache. */
    void (*rotate_slots)(struct backend *, const struct kv_pool *, const struct rope_params *, const uint32_t *pages,
        const uint32_t *slots, const float *keys, const uint32_t *to, uint32_t count);
    /* keys [count][d] f32 = the keys of slots, their rotation at their own position undone. */
    void (*unrotate_slots)(struct backend *, const struct kv_pool *, const struct rope_params *, const uint32_t *pages,
        const uint32_t *slots, uint32_t count, float *keys);

    /* gate_up [R, 2F], gate first: out [R, F] = silu(gate) * up. */
    void (*silu_mul)(struct backend *, const float *gate_up, uint32_t rows, uint32_t width, float *out);
    /* The same with GELU in its tanh form: g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2. NULL: cannot. */
    void (*gelu_mul)(struct backend *, const float *gate_up, uint32_t rows, uint32_t width, float *out);

    /* out [n, D] = x[rows_wanted[i]]. */
    void (*gather_rows)(
        struct backend *, const float *x, const uint32_t *rows_wanted, uint32_t count, uint32_t width, float *out);

    /* logits [R, V] -> results [R] (host). Waits for the result. */
    void (*sample)(struct backend *, const float *logits, uint32_t rows, uint32_t vocabulary,
        const struct sample_params *params, struct sample_result *results);

    /* out[r] (host) = KL(softmax(p[p_rows[r]]) || softmax(q[r])) in nats; p [.., V], q [R, V] logits, p_rows [R]
     * (host). Waits for the result. */
    void (*kl)(struct backend *, const float *p, const uint32_t *p_rows, const float *q, uint32_t rows,
        uint32_t vocabulary, float *out);

    /* Copies whole pages inside the pool: from[i] -> to[i]. */
    void (*copy_pages)(
        struct backend *, const struct kv_pool *, const uint32_t *from, const uint32_t *to, uint32_t count);

    /* Moves slots of one head, for compaction: slot from[i] of view `pages` goes to slot to[i], in order of i. */
    void (*move_slots)(struct backend *, const struct kv_pool *, const uint32_t *pages, const uint32_t *from,
        const uint32_t *to, uint32_t count);

    /* Brings device copies of page tables up to date. NULL: the backend reads tables in host memory. */
    void (*write_tables)(struct backend *, const struct kv_table_write *writes, uint32_t count);

    /* Marks slots [first, end) of one head as unused (position KV_NO_POSITION). */
    void (*clear_slots)(struct backend *, const struct kv_pool *, const uint32_t *pages, uint32_t first, uint32_t end);

    /* Moves columns of statistics of distinct heads, moves [count]. Outputs are copied when the arrays are others. */
    void (*move_statistics)(
        struct backend *, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim);

    /* Fills pages with NaN and position KV_NO_POSITION (test builds, when pages become free). */
    void (*poison_pages)(struct backend *, const struct kv_pool *, const uint32_t *pages, uint32_t count);
};

/* A device, or several that compute one model together (parallel/parallel.h): tensor parallel. Rank r of N has KV heads
 * [r K / N, (r + 1) K / N) of every layer with their query heads, the r-th part of the feed-forward columns and of the
 * vocabulary. Then
 *   allocate  makes one allocation on each rank, all of as many bytes, and returns that of rank 0, by which the others
 *             are found (address); upload fills all of them, download reads rank 0's
 *   matrices  of which each rank has a part (qkv, attention, gate_up) have a rank's width in all operations; x and
 *             hidden are the same on all ranks; logits are rank 0's
 *   heads     memory of one head (pages, statistics, summary slot, scores) is on its rank alone, and addresses of it
 *             are that rank's; counts of heads, and lists by head, are those of the whole model */
struct backend {
    const struct backend_operations *operations;
    uint32_t ranks;               /* 0 or 1: one device */
    struct backend *const *inner; /* [ranks] with several: each rank's own, for memory of its heads */
    /* Takes matrices from the model file by name and place: what weight_create is given must be what is there. */
    bool by_name;
};

static inline uint32_t backend_ranks(const struct backend *backend) {
    return backend->ranks > 1 ? backend->ranks : 1;
}

/* Who has a rank's memory. Called while no operation runs. */
static inline struct backend *backend_of_rank(struct backend *backend, uint32_t rank) {
    return backend->ranks > 1 ? backend->inner[rank] : backend;
}

static inline void *backend_address(struct backend *backend, const void *memory, uint32_t rank) {
    return backend->ranks > 1 ? backend->operations->address(backend, memory, rank) : (void *)memory;
}

static inline int backend_check(struct backend *backend, struct error *error) {
    return backend->ranks > 1 ? backend->operations->check(backend, error) : 0;
}

/* Where heads lie that are numbered layer * kv_heads + head: the rank, and the number among that rank's heads of all
 * layers. */
static inline uint32_t backend_rank_of_head(const struct backend *backend, uint32_t kv_heads, uint32_t number) {
    return number % kv_heads / (kv_heads / backend_ranks(backend));
}

static inline uint32_t backend_head_on_rank(const struct backend *backend, uint32_t kv_heads, uint32_t number) {
    uint32_t heads = kv_heads / backend_ranks(backend);
    return number / kv_heads * heads + number % kv_heads % heads;
}

static inline struct backend *backend_of_head(struct backend *backend, uint32_t kv_heads, uint32_t number) {
    return backend_of_rank(backend, backend_rank_of_head(backend, kv_heads, number));
}

static inline uint32_t kv_pool_rank(const struct kv_pool *pool, uint32_t page) {
    return pool->rank_pages != 0 ? page / pool->rank_pages : 0;
}

/* Where a page lies, on its rank. */
static inline void *kv_pool_address(struct backend *backend, const struct kv_pool *pool, uint32_t page) {
    uint32_t rank = kv_pool_rank(pool, page);
    char *base = (char *)backend_address(backend, pool->base, rank);
    return base + (size_t)(page - rank * pool->rank_pages) * pool->page_bytes;
}

/* Ranks that are other processes (parallel/hosts.h). */
struct backend_hosts {
    uint32_t world;         /* processes, this one is rank 0; 0 or 1: none */
    const char *rendezvous; /* "HOST:PORT" to wait for them at */
    const char *key;        /* that they must know; "": none */
    const char *version;    /* of the program, which theirs must be */
};

struct backend_options {
    const char *cpu_features; /* highest tier to use: "auto", "scalar", "avx2", "avx512" */
    uint32_t threads;         /* 0: as many as the affinity mask and cgroup quota allow */
    const char *name;         /* "cpu" (or NULL), "cuda", or "auto" */
    uint32_t ranks;           /* tensor parallel: as many backends as one; 0 or 1: one */
    uint32_t device;          /* CUDA: its number among those that CUDA_VISIBLE_DEVICES leaves */
    const char *all_reduce;   /* how CUDA ranks add up: "nccl", "host", or "auto" (or NULL): the first that is there */
    struct backend_hosts hosts;
    const char *fingerprint; /* of the model, for hosts; engine_open knows it */
};

/* The backend of that name. auto: CUDA where the build has it and a device is there (cuda/cuda.h), else the CPU, and a
 * log line says why. ERROR_UNSUPPORTED: the build, the machine or its driver lacks what was asked for; ERROR_INVALID:
 * no such name; ERROR_MEMORY. */
struct backend *backend_open(const struct backend_options *options, struct error *error);

/* engine/cpu/cpu.c. Always there; fails on an unknown tier name or one that the machine lacks. */
struct backend *backend_cpu_open(const struct backend_options *options, struct error *error);

#endif
