/* SPDX-License-Identifier: Apache-2.0
 *
 * dequantise_rows FILE [FORMAT]: reads lines "ROW TENSOR" on standard input, writes those rows as float32 on standard
 * output; with FORMAT (q8_0 or q4_0), as they are when they are brought to that format.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/gguf.h"
#include "engine/quantise.h"

static enum tensor_type format; /* F32: as they are */

static int write_row(const struct gguf *gguf, const char *name, uint32_t row) {
    const struct gguf_tensor *found = gguf_find_tensor(gguf, name);
    if (found == NULL || found->data == NULL || row >= found->size[1]) {
        fprintf(stderr, "no row %u of %s\n", row, name);
        return 1;
    }
    struct tensor tensor = {.name = name,
        .type = (enum tensor_type)found->type,
        .rows = (uint32_t)found->size[1],
        .columns = (uint32_t)found->size[0],
        .data = found->data,
        .bytes = found->bytes};
    struct error error;
    void *memory = NULL;
    if (quantise_takes(&tensor, format) && quantise_tensor(&tensor, format, &tensor, &memory, &error) != 0) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    float *values = malloc(tensor.columns * sizeof *values);
    if (values == NULL)
        return 1;
    tensor_dequantise_row(&tensor, row, values);
    size_t written = fwrite(values, sizeof *values, tensor.columns, stdout);
    free(values);
    free(memory);
    return written == tensor.columns ? 0 : 1;
}

int main(int argc, char **argv) {
    struct error error;
    char line[512];
    int code = 0;
    bool good = argc == 2 || (argc == 3 && quantise_find_format(argv[2], &format) == 0);
    struct gguf *gguf = good ? gguf_open(argv[1], &error) : NULL;
    if (gguf == NULL) {
        fprintf(stderr, "%s\n", good ? error.message : "usage: dequantise_rows FILE [FORMAT]");
        return 2;
    }
    while (code == 0 && fgets(line, sizeof line, stdin) != NULL) {
        char *name;
        uint32_t row = (uint32_t)strtoul(line, &name, 10);
        name += strspn(name, " ");
        name[strcspn(name, "\n")] = '\0';
        code = write_row(gguf, name, row);
    }
    gguf_free(gguf);
    return code != 0 ? code : fflush(stdout) != 0;
}
