/* SPDX-License-Identifier: Apache-2.0
 *
 * A file is read in two passes. The outline, from libyaml's events, says which key stands on which line and whether it
 * has one value or a list; it refuses what libcyaml would take silently (a repeated key, a null) or report without a
 * line. Then libcyaml loads the values through a schema made from the option table and the outline, and option_parse
 * checks them as it checks those of the environment and the command line.
 */
#include "config/file.h"

#include "config/options.h"

#include <cyaml/cyaml.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

struct outline_entry {
    size_t line; /* 0: the file has no such key */
    bool list;
};

/* What libcyaml fills, one per option. */
struct loaded_value {
    char *text;
    char **items;
    uint32_t count;
};

struct file_reader {
    const char *name;
    struct error *error;
    struct outline_entry *entries; /* [option_count] */
    size_t entries_used;
    yaml_parser_t parser;
    yaml_event_t event; /* the present one */
};

/* Outline. */

static int refuse_here(struct file_reader *reader, const char *key, const char *reason) {
    return error_set(reader->error, ERROR_INVALID, "%.160s, line %zu: %s%s%s", reader->name,
        reader->event.start_mark.line + 1, key != NULL ? key : "", key != NULL ? " " : "", reason);
}

static int report_bad_yaml(struct file_reader *reader) {
    yaml_parser_t *parser = &reader->parser;
    const char *problem = parser->problem != NULL ? parser->problem : "cannot be read";
    if (parser->error == YAML_MEMORY_ERROR)
        return error_set(reader->error, ERROR_MEMORY, "%.160s: no memory to read it", reader->name);
    if (parser->error == YAML_READER_ERROR)
        return error_set(
            reader->error, ERROR_INVALID, "%.160s, byte %zu: %s", reader->name, parser->problem_offset, problem);
    return error_set(reader->error, ERROR_INVALID, "%.160s, line %zu: not valid YAML: %s", reader->name,
        parser->problem_mark.line + 1, problem);
}

static int next_event(struct file_reader *reader) {
    yaml_event_delete(&reader->event);
    if (!yaml_parser_parse(&reader->parser, &reader->event)) {
        memset(&reader->event, 0, sizeof reader->event);
        return report_bad_yaml(reader);
    }
    const yaml_event_t *event = &reader->event;
    bool anchor = event->type == YAML_ALIAS_EVENT ||
                  (event->type == YAML_SCALAR_EVENT && event->data.scalar.anchor != NULL) ||
                  (event->type == YAML_SEQUENCE_START_EVENT && event->data.sequence_start.anchor != NULL) ||
                  (event->type == YAML_MAPPING_START_EVENT && event->data.mapping_start.anchor != NULL);
    bool tag = (event->type == YAML_SCALAR_EVENT && event->data.scalar.tag != NULL) ||
               (event->type == YAML_SEQUENCE_START_EVENT && event->data.sequence_start.tag != NULL) ||
               (event->type == YAML_MAPPING_START_EVENT && event->data.mapping_start.tag != NULL);
    if (anchor || tag)
        return refuse_here(reader, NULL, anchor ? "anchors and aliases are not allowed" : "tags are not allowed");
    return 0;
}

static bool scalar_is_null(const yaml_event_t *event) {
    const char *text = (const char *)event->data.scalar.value;
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL"};
    if (event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE)
        return false;
    for (size_t i = 0; i < sizeof nulls / sizeof nulls[0]; i++)
        if (strcmp(text, nulls[i]) == 0)
            return true;
    return false;
}

static int check_scalar(struct file_reader *reader, const char *key) {
    const yaml_event_t *event = &reader->event;
    if (strlen((const char *)event->data.scalar.value) != event->data.scalar.length)
        return refuse_here(reader, key, "has a value with a NUL character");
    if (scalar_is_null(event))
        return refuse_here(reader, key, "has no value: give one, or leave the key out");
    return 0;
}

static int report_unknown_key(struct file_reader *reader, const char *key) {
    char quoted[OPTION_QUOTE_MAX], near_key[OPTION_NAME_MAX], reason[OPTION_QUOTE_MAX + OPTION_NAME_MAX + 40];
    const struct option *nearest =
        option_nearest(key, CONFIG_EVERY_COMMAND, OPTION_NOT_IN_FILE | OPTION_ONLY_COMMAND_LINE);
    option_quote(key, quoted);
    if (nearest == NULL) {
        snprintf(reason, sizeof reason, "unknown key %s", quoted);
    } else {
        option_yaml_key(nearest, near_key);
        snprintf(reason, sizeof reason, "unknown key %s: did you mean %s?", quoted, near_key);
    }
    return refuse_here(reader, NULL, reason);
}

/* The present event is a key. */
static int outline_key(struct file_reader *reader, const struct option **found) {
    const yaml_event_t *event = &reader->event;
    if (event->type != YAML_SCALAR_EVENT)
        return refuse_here(reader, NULL, "a key must be the name of an option");
    const char *key = (const char *)event->data.scalar.value;
    const struct option *option = strlen(key) == event->data.scalar.length ? option_find_key(key) : NULL;
    if (option == NULL || (option->flags & (OPTION_NOT_IN_FILE | OPTION_ONLY_COMMAND_LINE)) != 0)
        return report_unknown_key(reader, key);
    struct outline_entry *entry = &reader->entries[option - option_table];
    if (entry->line != 0) {
        char reason[64];
        snprintf(reason, sizeof reason, "stands here a second time, after line %zu", entry->line);
        return refuse_here(reader, key, reason);
    }
    entry->line = event->start_mark.line + 1;
    reader->entries_used++;
    *found = option;
    return 0;
}

static int outline_sequence(struct file_reader *reader, const char *key) {
    for (size_t count = 0;; count++) {
        int code = next_event(reader);
        if (code != 0)
            return code;
        if (reader->event.type == YAML_SEQUENCE_END_EVENT)
            return count > 0 ? 0 : refuse_here(reader, key, "is an empty list: give values, or leave the key out");
        if (reader->event.type != YAML_SCALAR_EVENT)
            return refuse_here(reader, key, "has an item that is not a plain value");
        code = check_scalar(reader, key);
        if (code != 0)
            return code;
        if (count == OPTION_LIST_MAX)
            return refuse_here(reader, key, "has too many items");
    }
}

/* The event after a key: its value. */
static int outline_value(struct file_reader *reader, const struct option *option) {
    char key[OPTION_NAME_MAX], allowed[OPTION_ALLOWED_MAX], reason[OPTION_ALLOWED_MAX + 64];
    option_yaml_key(option, key);
    if (reader->event.type == YAML_SCALAR_EVENT)
        return check_scalar(reader, key);
    bool list = reader->event.type == YAML_SEQUENCE_START_EVENT;
    if (!list || !option_is_list(option)) {
        option_describe_allowed(option, allowed);
        snprintf(reason, sizeof reason, "is a %s: must be %s", list ? "list" : "mapping", allowed);
        return refuse_here(reader, key, reason);
    }
    reader->entries[option - option_table].list = true;
    return outline_sequence(reader, key);
}

static int outline_mapping(struct file_reader *reader) {
    for (;;) {
        const struct option *option = NULL;
        int code = next_event(reader);
        if (code != 0 || reader->event.type == YAML_MAPPING_END_EVENT)
            return code;
        code = outline_key(reader, &option);
        if (code == 0)
            code = next_event(reader);
        if (code == 0)
            code = outline_value(reader, option);
        if (code != 0)
            return code;
    }
}

/* The first event of the document's content. */
static int outline_root(struct file_reader *reader) {
    if (reader->event.type == YAML_SCALAR_EVENT && reader->event.data.scalar.length == 0)
        return 0;
    if (reader->event.type != YAML_MAPPING_START_EVENT)
        return refuse_here(reader, NULL, "the file must be a mapping of option keys to values");
    return outline_mapping(reader);
}

static int outline_stream(struct file_reader *reader) {
    int code = next_event(reader); /* start of the stream */
    if (code == 0)
        code = next_event(reader);
    if (code != 0 || reader->event.type == YAML_STREAM_END_EVENT)
        return code; /* nothing but comments */
    code = next_event(reader);
    if (code == 0)
        code = outline_root(reader);
    if (code == 0)
        code = next_event(reader); /* end of the document */
    if (code == 0)
        code = next_event(reader);
    if (code == 0 && reader->event.type != YAML_STREAM_END_EVENT)
        return refuse_here(reader, NULL, "a second document begins; there must be one");
    return code;
}

static int read_outline(struct file_reader *reader, const char *text, size_t length) {
    if (!yaml_parser_initialize(&reader->parser))
        return error_set(reader->error, ERROR_MEMORY, "%.160s: no memory to read it", reader->name);
    yaml_parser_set_input_string(&reader->parser, (const unsigned char *)text, length);
    int code = outline_stream(reader);
    yaml_event_delete(&reader->event);
    yaml_parser_delete(&reader->parser);
    return code;
}

/* Values. */

static const cyaml_schema_value_t item_schema = {
    CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char *, 0, CYAML_UNLIMITED),
};

/* The schema's field for one option, at its place in the array of struct loaded_value. */
static void describe_field(cyaml_schema_field_t *field, const char *key, size_t index, bool list) {
    size_t base = index * sizeof(struct loaded_value);
    field->key = key;
    field->value.flags = CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL;
    field->value.data_size = sizeof(char *);
    if (list) {
        field->value.type = CYAML_SEQUENCE;
        field->value.sequence.entry = &item_schema;
        field->value.sequence.max = OPTION_LIST_MAX;
        field->data_offset = (uint32_t)(base + offsetof(struct loaded_value, items));
        field->count_offset = (uint32_t)(base + offsetof(struct loaded_value, count));
        field->count_size = sizeof(uint32_t);
    } else {
        field->value.type = CYAML_STRING;
        field->value.data_size = sizeof(char);
        field->value.string.max = CYAML_UNLIMITED;
        field->data_offset = (uint32_t)(base + offsetof(struct loaded_value, text));
    }
}

static int apply_value(const struct option *option, const struct outline_entry *entry, const struct loaded_value *value,
    struct config *config, struct file_reader *reader) {
    char key[OPTION_NAME_MAX], place[300];
    option_yaml_key(option, key);
    snprintf(place, sizeof place, "%.160s, line %zu: %s", reader->name, entry->line, key);
    option_clear_list(option, config);
    if (!entry->list)
        return option_parse(option, config, value->text != NULL ? value->text : "", place, reader->error);
    int code = 0;
    for (uint32_t i = 0; i < value->count && code == 0; i++)
        code = option_parse(option, config, value->items[i], place, reader->error);
    return code;
}

static int load_values(struct file_reader *reader, const char *text, size_t length, struct config *config) {
    const cyaml_config_t settings = {.mem_fn = cyaml_mem, .log_fn = NULL, .flags = CYAML_CFG_NO_ALIAS};
    cyaml_schema_field_t *fields = calloc(option_count + 1, sizeof *fields);
    char(*keys)[OPTION_NAME_MAX] = calloc(option_count, sizeof *keys);
    struct loaded_value *values = NULL;
    int code = 0;
    if (fields == NULL || keys == NULL) {
        code = error_set(reader->error, ERROR_MEMORY, "%.160s: no memory to read it", reader->name);
        goto out;
    }
    size_t used = 0;
    for (size_t i = 0; i < option_count; i++) {
        if ((option_table[i].flags & (OPTION_NOT_IN_FILE | OPTION_ONLY_COMMAND_LINE)) != 0)
            continue;
        option_yaml_key(&option_table[i], keys[i]);
        describe_field(&fields[used++], keys[i], i, reader->entries[i].list);
    }
    const cyaml_schema_value_t schema = {
        .type = CYAML_MAPPING,
        .flags = CYAML_FLAG_POINTER,
        .data_size = (uint32_t)(option_count * sizeof *values),
        .mapping.fields = fields,
    };
    cyaml_err_t failure =
        cyaml_load_data((const uint8_t *)text, length, &settings, &schema, (cyaml_data_t **)&values, NULL);
    if (failure != CYAML_OK) {
        code = error_set(reader->error, failure == CYAML_ERR_OOM ? ERROR_MEMORY : ERROR_INVALID, "%.160s: %s",
            reader->name, cyaml_strerror(failure));
        goto out;
    }
    for (size_t i = 0; i < option_count && code == 0; i++)
        if (reader->entries[i].line != 0)
            code = apply_value(&option_table[i], &reader->entries[i], &values[i], config, reader);
    cyaml_free(&settings, &schema, values, 0);
out:
    free(fields);
    free(keys);
    return code;
}

int config_file_apply_text(
    const char *text, size_t length, const char *name, struct config *config, struct error *error) {
    struct file_reader reader = {.name = name, .error = error};
    if (length > CONFIG_FILE_MAX)
        return error_set(error, ERROR_INVALID, "%.160s: larger than the %d bytes a configuration file may have", name,
            CONFIG_FILE_MAX);
    reader.entries = calloc(option_count, sizeof *reader.entries);
    if (reader.entries == NULL)
        return error_set(error, ERROR_MEMORY, "%.160s: no memory to read it", name);
    int code = read_outline(&reader, text, length);
    if (code == 0 && reader.entries_used > 0)
        code = load_values(&reader, text, length, config);
    free(reader.entries);
    return code;
}

int config_file_apply(const char *path, struct config *config, struct error *error) {
    int code = 0;
    char *text = NULL;
    FILE *file = fopen(path, "rbe");
    if (file == NULL)
        return error_set(error, ERROR_IO, "cannot open configuration file %.160s: %s", path, strerror(errno));
    text = malloc(CONFIG_FILE_MAX + 1);
    if (text == NULL) {
        code = error_set(error, ERROR_MEMORY, "%.160s: no memory to read it", path);
        goto out;
    }
    size_t length = fread(text, 1, CONFIG_FILE_MAX + 1, file);
    if (ferror(file)) {
        code = error_set(error, ERROR_IO, "cannot read configuration file %.160s: %s", path, strerror(errno));
        goto out;
    }
    code = config_file_apply_text(text, length, path, config, error);
out:
    free(text);
    fclose(file);
    return code;
}
