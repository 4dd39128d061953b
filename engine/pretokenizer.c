/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/pretokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* Unicode's White_Space. PCRE2's \s has U+180E too, which is none since Unicode 6.3. */
#define SPACE "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

/* Repetitions of one class are possessive where nothing follows them that it could take: no text makes them
 * backtrack. Where they do backtrack (CASED), it is once over the run that they matched. */
#define CLITICS "'(?:[stmd]|re|ve|ll)"
#define WORD "[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++"
#define MARKS_AND_LINES "| ?[^" SPACE "\\p{L}\\p{N}]++[\\r\\n]*+"
#define MARKS_LINES_SLASHES "| ?[^" SPACE "\\p{L}\\p{N}]++[\\r\\n/]*+"
#define LINES_AND_SPACES                                                                                               \
    "|[" SPACE "]*[\\r\\n]+"                                                                                           \
    "|[" SPACE "]+(?![^" SPACE "])" /* spaces, without the last one before a word */                                   \
    "|[" SPACE "]++"
#define UPPER "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define LOWER "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"
#define CASED(end)                                                                                                     \
    "[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]*[" LOWER "]+" end "|[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]+[" LOWER "]*" end
#define SYMBOLS "\\p{P}$+<=>^~|" /* that `default` cuts off first */

static const char smollm[] = "\\p{N}"
                             "|" CLITICS "| ?\\p{L}++"
                             "| ?[^" SPACE "\\p{L}\\p{N}]++"
                             "|[" SPACE "]+(?![^" SPACE "\\p{N}])"
                             "|[" SPACE "]++";
static const char gpt_2[] = CLITICS "| ?\\p{L}++"
                                    "| ?\\p{N}++"
                                    "| ?[^" SPACE "\\p{L}\\p{N}]++"
                                    "|[" SPACE "]+(?![^" SPACE "])"
                                    "|[" SPACE "]++";
static const char llama_bpe[] = "(?i:" CLITICS ")|" WORD "|\\p{N}{1,3}+" MARKS_AND_LINES LINES_AND_SPACES;
static const char qwen2[] = "(?i:" CLITICS ")|" WORD "|\\p{N}" MARKS_AND_LINES LINES_AND_SPACES;
static const char tekken[] = CASED("") "|\\p{N}" MARKS_LINES_SLASHES LINES_AND_SPACES;
static const char o200k[] = CASED("(?i:" CLITICS ")?+") "|\\p{N}{1,3}+" MARKS_LINES_SLASHES LINES_AND_SPACES;
/* Numbers are cut into threes of ASCII digits; a space before one stands alone. */
static const char by_default[] = "[" SYMBOLS "]++"
                                 "| ?\\p{L}++"
                                 "|[0-9]{3}|(?:(?![0-9]{3})\\p{N})++"
                                 "| ?[^" SPACE "\\p{L}\\p{N}" SYMBOLS "]++"
                                 "|[" SPACE "]+(?![^" SPACE SYMBOLS "])"
                                 "|[" SPACE "]++";

static const struct known {
    const char *name;
    const char *pattern;
    struct pretokenizer_traits traits;
} known[] = {
    {"default", by_default, {0}},
    {"gpt-2", gpt_2, {0}},
    {"phi-2", gpt_2, {0}},
    {"mpt", gpt_2, {0}},
    {"olmo", gpt_2, {0}},
    {"smollm", smollm, {0}},
    {"starcoder", smollm, {0}},
    {"refact", smollm, {0}},
    {"command-r", smollm, {0}},
    {"codeshell", smollm, {0}},
    {"llama-bpe", llama_bpe, {.whole_pieces = true, .adds_bos = true}},
    {"llama3", llama_bpe, {.whole_pieces = true, .adds_bos = true}},
    {"llama-v3", llama_bpe, {.whole_pieces = true, .adds_bos = true}},
    {"falcon3", llama_bpe, {.whole_pieces = true, .adds_bos = true}},
    {"pixtral", llama_bpe, {.whole_pieces = true, .adds_bos = true}},
    {"lfm2", llama_bpe, {.whole_pieces = true, .adds_bos = true}},
    {"dbrx", llama_bpe, {0}},
    {"smaug-bpe", llama_bpe, {0}},
    {"qwen2", qwen2, {.composes = true}},
    {"deepseek-r1-qwen", qwen2, {.composes = true}},
    {"tekken", tekken, {.whole_pieces = true, .adds_bos = true}},
    {"o200k", o200k, {0}},
    {"gpt-4o", o200k, {0}},
    {"llama4", o200k, {0}},
};
enum { KNOWN = sizeof known / sizeof known[0] };

/* As tokenizer.json files write them. */
#define JSON_ENDS "[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define JSON_ENDS_SLASH "[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define JSON_CLITICS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define JSON_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define JSON_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
static const struct {
    const char *pattern;
    const char *name;
} json_patterns[] = {
    {JSON_CLITICS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?" JSON_ENDS, "llama-bpe"},
    {JSON_CLITICS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?" JSON_ENDS, "qwen2"},
    {"[^\\r\\n\\p{L}\\p{N}]?" JSON_UPPER "*" JSON_LOWER "+|[^\\r\\n\\p{L}\\p{N}]?" JSON_UPPER "+" JSON_LOWER
     "*|\\p{N}| ?" JSON_ENDS_SLASH,
        "tekken"},
    {"[^\\r\\n\\p{L}\\p{N}]?" JSON_UPPER "*" JSON_LOWER "+" JSON_CLITICS "?|[^\\r\\n\\p{L}\\p{N}]?" JSON_UPPER
     "+" JSON_LOWER "*" JSON_CLITICS "?|\\p{N}{1,3}| ?" JSON_ENDS_SLASH,
        "o200k"},
    {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", "gpt-2"},
};

struct pretokenizer {
    pcre2_code *code;
    pcre2_match_context *limits; /* backtracking over one run of a long text may exceed PCRE2's own limit */
    bool compiled_to_machine_code;
    struct pretokenizer_traits traits;
};

static const struct known *find_known(struct gguf_string name) {
    for (size_t i = 0; i < KNOWN; i++)
        if (strlen(known[i].name) == name.bytes && memcmp(known[i].name, name.text, name.bytes) == 0)
            return &known[i];
    return NULL;
}

const char *pretokenizer_name(size_t index) {
    return index < KNOWN ? known[index].name : NULL;
}

const char *pretokenizer_find_pattern(const char *pattern) {
    for (size_t i = 0; i < sizeof json_patterns / sizeof json_patterns[0]; i++)
        if (strcmp(json_patterns[i].pattern, pattern) == 0)
            return json_patterns[i].name;
    return NULL;
}

struct pretokenizer_traits pretokenizer_traits(const struct pretokenizer *pretokenizer) {
    return pretokenizer->traits;
}

/* The names of all, for a message. */
static const char *list_names(char *out, size_t size) {
    size_t at = 0;
    for (size_t i = 0; i < KNOWN && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%s", i == 0 ? "" : ", ", known[i].name);
    return out;
}

int pretokenizer_create(struct gguf_string name, struct pretokenizer **out, struct error *error) {
    char shown[64], names[512];
    const struct known *found = find_known(name);
    *out = NULL;
    if (found == NULL)
        return error_set(error, ERROR_UNSUPPORTED, "pre-tokenizer \"%s\" is not supported; these are: %s",
            gguf_string_show(name, shown, sizeof shown), list_names(names, sizeof names));
    struct pretokenizer *pretokenizer = calloc(1, sizeof *pretokenizer);
    if (pretokenizer == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the pre-tokenizer");
    int code;
    PCRE2_SIZE offset;
    pretokenizer->code = pcre2_compile((PCRE2_SPTR)found->pattern, PCRE2_ZERO_TERMINATED,
        PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK, &code, &offset, NULL);
    if (pretokenizer->code == NULL) {
        free(pretokenizer);
        pcre2_get_error_message(code, (PCRE2_UCHAR *)shown, sizeof shown);
        return error_set(error, ERROR_MEMORY, "cannot compile the pre-tokenizer's pattern: %s", shown);
    }
    pretokenizer->limits = pcre2_match_context_create(NULL);
    if (pretokenizer->limits == NULL) {
        pretokenizer_free(pretokenizer);
        return error_set(error, ERROR_MEMORY, "no memory for the pre-tokenizer");
    }
    pcre2_set_match_limit(pretokenizer->limits, UINT32_MAX);
    /* A system may forbid memory that is writable and executable: the interpreter does the same, slower. */
    pretokenizer->compiled_to_machine_code = pcre2_jit_compile(pretokenizer->code, PCRE2_JIT_COMPLETE) == 0;
    pretokenizer->traits = found->traits;
    *out = pretokenizer;
    return 0;
}

void pretokenizer_free(struct pretokenizer *pretokenizer) {
    if (pretokenizer == NULL)
        return;
    pcre2_match_context_free(pretokenizer->limits);
    pcre2_code_free(pretokenizer->code);
    free(pretokenizer);
}

int pretokenizer_begin(struct pretokenizer_scan *scan, const struct pretokenizer *pretokenizer) {
    scan->pretokenizer = pretokenizer;
    scan->match = pcre2_match_data_create(1, NULL);
    return scan->match == NULL ? ERROR_MEMORY : 0;
}

void pretokenizer_end(struct pretokenizer_scan *scan) {
    pcre2_match_data_free(scan->match);
    scan->match = NULL;
}

size_t pretokenizer_next(const struct pretokenizer_scan *scan, const char *text, size_t bytes, size_t at) {
    const struct pretokenizer *own = scan->pretokenizer;
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int result = PCRE2_ERROR_JIT_STACKLIMIT;
    /* No pattern nests repetitions, so the machine code's own stack (32 KiB of the thread's) is enough; the
     * interpreter, which keeps its frames on the heap, stands behind it all the same. */
    if (own->compiled_to_machine_code)
        result = pcre2_jit_match(own->code, subject, bytes, at, PCRE2_NO_UTF_CHECK, scan->match, own->limits);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT)
        result =
            pcre2_match(own->code, subject, bytes, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, scan->match, own->limits);
    if (result < 0)
        return 0;
    return pcre2_get_ovector_pointer(scan->match)[1] - at;
}
