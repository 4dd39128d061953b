/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/pretokenizer.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* Unicode's White_Space. PCRE2's \s has U+180E too, which is none since Unicode 6.3. */
#define SPACE "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

/* Repetitions of one class are possessive where nothing follows them: no text makes them backtrack. */
static const struct {
    const char *name;
    const char *pattern;
} known[] = {
    {"smollm", "\\p{N}"
               "|'(?:[stmd]|re|ve|ll)"
               "| ?\\p{L}++"
               "| ?[^" SPACE "\\p{L}\\p{N}]++"
               "|[" SPACE "]+(?![^" SPACE "\\p{N}])" /* spaces, without the last one before a word */
               "|[" SPACE "]++"},
};

struct pretokenizer {
    pcre2_code *code;
    bool compiled_to_machine_code;
};

static const char *find_pattern(struct gguf_string name) {
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strlen(known[i].name) == name.bytes && memcmp(known[i].name, name.text, name.bytes) == 0)
            return known[i].pattern;
    return NULL;
}

int pretokenizer_create(struct gguf_string name, struct pretokenizer **out, struct error *error) {
    char shown[64];
    const char *pattern = find_pattern(name);
    *out = NULL;
    if (pattern == NULL)
        return error_set(error, ERROR_UNSUPPORTED, "pre-tokenizer \"%s\" is not supported (smollm is)",
            gguf_string_show(name, shown, sizeof shown));
    struct pretokenizer *pretokenizer = calloc(1, sizeof *pretokenizer);
    if (pretokenizer == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the pre-tokenizer");
    int code;
    PCRE2_SIZE offset;
    pretokenizer->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
        PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK, &code, &offset, NULL);
    if (pretokenizer->code == NULL) {
        free(pretokenizer);
        pcre2_get_error_message(code, (PCRE2_UCHAR *)shown, sizeof shown);
        return error_set(error, ERROR_MEMORY, "cannot compile the pre-tokenizer's pattern: %s", shown);
    }
    /* A system may forbid memory that is writable and executable: the interpreter does the same, slower. */
    pretokenizer->compiled_to_machine_code = pcre2_jit_compile(pretokenizer->code, PCRE2_JIT_COMPLETE) == 0;
    *out = pretokenizer;
    return 0;
}

void pretokenizer_free(struct pretokenizer *pretokenizer) {
    if (pretokenizer == NULL)
        return;
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
        result = pcre2_jit_match(own->code, subject, bytes, at, PCRE2_NO_UTF_CHECK, scan->match, NULL);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT)
        result = pcre2_match(own->code, subject, bytes, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, scan->match, NULL);
    if (result < 0)
        return 0;
    return pcre2_get_ovector_pointer(scan->match)[1] - at;
}
