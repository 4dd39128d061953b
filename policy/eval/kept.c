/* SPDX-License-Identifier: Apache-2.0
 *
 * Prompts as readable text, with what was kept of them.
 */
#include "policy/eval/plot.h"

#include <stdlib.h>
#include <string.h>

#include "policy/eval/chart.h"
#include "policy/eval/plot_files.h"

/* Runs of tokens that are kept alike share a span; eight degrees. */
static void write_tokens(
    const struct tokenizer *tokenizer, const struct token_list *tokens, const uint8_t *kept, FILE *out) {
    for (size_t i = 0; i < tokens->count;) {
        unsigned degree = kept[i] / 32;
        char *text = NULL;
        size_t size = 0;
        FILE *run = open_memstream(&text, &size);
        for (; run != NULL && i < tokens->count && kept[i] / 32u == degree; i++) {
            size_t bytes;
            const char *token = tokenizer_token_bytes(tokenizer, tokens->ids[i], &bytes);
            fwrite(token, 1, bytes, run);
        }
        if (run == NULL || fclose(run) != 0)
            return;
        fprintf(out, "<span class=\"k%u\">", degree);
        chart_write_text(text, out);
        fputs("</span>", out);
        free(text);
    }
}

static void write_page_head(const struct eval_setup *setup, uint32_t policy, FILE *out) {
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>", out);
    chart_write_text(setup->variants[policy].policy, out);
    fputs("</title>\n<style>body { font-family: sans-serif; max-width: 60em; margin: 2em auto; } pre { white-space: "
          "pre-wrap; }\n",
        out);
    for (int degree = 0; degree < 8; degree++)
        fprintf(out, ".k%d { background: rgba(40, 90, 220, %.2f); color: %s; }\n", degree, degree / 8.0,
            degree > 4    ? "white"
            : degree == 0 ? "#999"
                          : "black");
    fputs("</style></head><body>\n<h1>", out);
    chart_write_text(setup->variants[policy].policy, out);
    fputs("</h1>\n<p>The first prompt after its prune. The darker a token, the more layers and heads keep it.</p>\n",
        out);
}

static int write_page(const char *folder, const struct eval_setup *setup, const struct tokenizer *tokenizer,
    const struct token_list *tokens, uint8_t *const *kept, uint32_t policy, struct error *error) {
    FILE *out = plot_file_open(folder, "kept", setup->variants[policy].policy, "html", error);
    if (out == NULL)
        return error->code;
    write_page_head(setup, policy, out);
    for (uint32_t v = policy; v < setup->variants_count; v++) {
        char budget[24];
        if (kept[v] == NULL || strcmp(setup->variants[v].policy, setup->variants[policy].policy) != 0)
            continue;
        plot_describe_budget(&setup->variants[v], budget, sizeof budget);
        fprintf(out, "<h2>budget %s</h2>\n<pre>", budget);
        write_tokens(tokenizer, tokens, kept[v], out);
        fputs("</pre>\n", out);
    }
    fputs("</body></html>\n", out);
    return plot_file_close(out, folder, error);
}

int eval_kept_write(const char *folder, const struct eval_setup *setup, const struct tokenizer *tokenizer,
    const struct token_list *tokens, uint8_t *const *kept, struct error *error) {
    int code = plot_folder_create(folder, error);
    for (uint32_t v = 1; v < setup->variants_count && code == 0; v++) /* full keeps everything */
        if (plot_is_first(setup, v) && kept[v] != NULL)
            code = write_page(folder, setup, tokenizer, tokens, kept, v, error);
    return code;
}
