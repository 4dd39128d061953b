/* SPDX-License-Identifier: Apache-2.0 */
#include "template/template.h"

#include "template/json.h"
#include "template/parser.h"
#include "template/run.h"

#include <stdlib.h>
#include <string.h>

enum { SOURCE_MAX = 1 << 20 };

struct template {
    struct arena arena;
    struct node_list body;
};

/* Whether the arena did not fail. */
static bool template_fill(struct template *template, const char *source, size_t bytes) {
    if (setjmp(template->arena.failed) != 0)
        return false;
    template->body = parser_run(&template->arena, source, bytes);
    return true;
}

struct template *template_parse(const char *source, size_t bytes, struct error *error) {
    struct template *template = NULL;
    if (bytes > SOURCE_MAX)
        error_set(error, ERROR_FORMAT, "a template of %zu bytes; at most %d", bytes, SOURCE_MAX);
    else if ((template = calloc(1, sizeof *template)) == NULL)
        error_set(error, ERROR_MEMORY, "no memory for a template");
    if (template == NULL)
        return NULL;
    template->arena.error = error;
    template->arena.bytes_max = TEMPLATE_MEMORY;
    if (!template_fill(template, source, bytes)) {
        template_free(template);
        return NULL;
    }
    return template;
}

void template_free(struct template *template) {
    if (template == NULL)
        return;
    arena_release(&template->arena);
    free(template);
}

void template_text_free(struct template_text *text) {
    free(text->text);
    free(text->input);
    *text = (struct template_text){0};
}

/* One mark for each byte of the longest string that is input, shared by all. */
static const uint8_t *make_marks(struct run *run, const struct template_options *options) {
    size_t longest = 0;
    for (size_t i = 0; i < options->count; i++) {
        size_t one = options->variables[i].input ? json_longest(options->variables[i].value) : 0;
        longest = one > longest ? one : longest;
    }
    uint8_t *marks = arena_take(&run->arena, longest + 1);
    memset(marks, 1, longest);
    return marks;
}

static void set_variables(struct run *run, const struct template_options *options) {
    const uint8_t *marks = make_marks(run, options);
    for (size_t i = 0; i < options->count; i++) {
        const struct template_variable *variable = &options->variables[i];
        const struct string name = string_of(variable->name);
        if (variable->value != NULL)
            scope_set(run, run->scope, &name,
                json_value(run, variable->value, variable->input ? marks : NULL, variable->plain_key));
    }
}

static void copy_out(struct run *run, const struct builder *from, struct template_text *out) {
    out->bytes = from->bytes;
    out->text = malloc(from->bytes + 1);
    out->input = from->input == NULL ? NULL : malloc(from->bytes + 1);
    if (out->text == NULL || (from->input != NULL && out->input == NULL)) {
        template_text_free(out);
        run->arena.code = error_set(run->arena.error, ERROR_MEMORY, "no memory for a prompt of %zu bytes", from->bytes);
        longjmp(run->arena.failed, 1);
    }
    if (from->bytes > 0)
        memcpy(out->text, from->text, from->bytes);
    if (out->input != NULL)
        memcpy(out->input, from->input, from->bytes);
    out->text[from->bytes] = '\0';
}

int template_render(const struct template *template, const struct template_options *options, struct template_text *out,
    struct error *error) {
    struct run run = {.arena = {.error = error, .bytes_max = TEMPLATE_MEMORY},
        .steps_left = options->steps_max == 0 ? TEMPLATE_STEPS : options->steps_max,
        .bytes_max = options->bytes_max == 0 ? TEMPLATE_BYTES : options->bytes_max,
        .now = options->now};
    struct builder text = {.run = &run};
    *out = (struct template_text){0};
    if (setjmp(run.arena.failed) != 0) {
        arena_release(&run.arena);
        return run.arena.code;
    }
    run.out = &text;
    run.scope = scope_create(&run, NULL);
    set_variables(&run, options);
    run_body(&run, &template->body);
    copy_out(&run, &text, out);
    arena_release(&run.arena);
    return 0;
}
