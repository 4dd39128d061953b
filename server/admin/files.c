/* SPDX-License-Identifier: Apache-2.0
 *
 * Uploaded files: list, retrieve, content, delete. In the shapes of OpenAI's Files. A job that needs a file which was
 * deleted fails and says so.
 */
#include "server/admin/admin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILES_LIMIT = 10000, CONTENT_BLOCK = 1 << 18 };

void files_write(struct buffer *out, const struct file_record *file) {
    buffer_string(out, "{\"id\":");
    buffer_json_cstring(out, file->id);
    buffer_format(out, ",\"object\":\"file\",\"bytes\":%lld", (long long)file->bytes);
    admin_write_seconds(out, "created_at", file->created);
    buffer_string(out, ",\"expires_at\":null");
    admin_write_text(out, "filename", file->filename);
    admin_write_text(out, "purpose", file->purpose);
    buffer_string(out, ",\"status\":\"processed\",\"status_details\":null}");
}

static int files_write_one(void *context, const struct file_record *file) {
    files_write(context, file);
    return 1;
}

static int files_answer_one(struct admin_call *call, struct database *database, struct error *error) {
    int code = files_find(database, call->id, files_write_one, &call->reply, error);
    return code == 0 ? admin_not_found(call, "file") : code;
}

void files_retrieve(struct exchange *exchange) {
    admin_handle(exchange, files_answer_one, NULL);
}

static int files_write_entry(void *context, const struct file_record *file) {
    struct admin_list *list = context;
    if (!admin_list_next(list, file->id))
        return 1;
    files_write(list->out, file);
    return 0;
}

static int files_answer_list(struct admin_call *call, struct database *database, struct error *error) {
    struct page page;
    struct admin_list list;
    int code = admin_page(call, database, "files", FILES_LIMIT, FILES_LIMIT, &page, error);
    if (code != 0)
        return code;
    admin_list_begin(&list, &call->reply, &page);
    page.limit++;
    code =
        files_list(database, &page, call->purpose[0] == '\0' ? NULL : call->purpose, files_write_entry, &list, error);
    admin_list_end(&list);
    return code;
}

void files_list_all(struct exchange *exchange) {
    admin_handle(exchange, files_answer_list, NULL);
}

/* --- Deleting --- */

static int files_take_stored(void *context, const struct file_record *file) {
    struct admin_call *call = context;
    snprintf(call->subject, sizeof call->subject, "%s", file->stored);
    return 1;
}

static int files_answer_delete(struct admin_call *call, struct database *database, struct error *error) {
    int code = files_find(database, call->id, files_take_stored, call, error);
    if (code == 0)
        return admin_not_found(call, "file");
    if (code > 0)
        code = files_delete(database, call->id, error);
    buffer_string(&call->reply, "{\"id\":");
    buffer_json_cstring(&call->reply, call->id);
    buffer_string(&call->reply, ",\"object\":\"file\",\"deleted\":true}");
    return code;
}

static void files_deleted(struct admin_call *call) {
    admin_unlink(call->admin, "files", call->subject);
}

void files_remove(struct exchange *exchange) {
    admin_handle(exchange, files_answer_delete, files_deleted);
}

/* --- Content --- */

/* A file on its way to a client: read in blocks on another thread, the next when the last was sent. */
struct content {
    struct exchange *exchange; /* a reference */
    char path[STORE_PATH_MAX];
    int fd;
    bool found, working, gone, begun;
    uint64_t size;
    ssize_t count; /* of the block that was read; negative: it failed */
    uv_work_t work;
    char block[CONTENT_BLOCK];
};

static void content_free(struct content *content) {
    if (content->fd >= 0)
        close(content->fd);
    exchange_release(content->exchange);
    free(content);
}

static void content_abandon(void *state) {
    struct content *content = state;
    content->gone = true;
    content->exchange->state = NULL;
    content->exchange->drained = NULL;
    if (!content->working)
        content_free(content);
}

static void content_read(uv_work_t *work) {
    struct content *content = work->data;
    struct stat status;
    if (content->fd < 0) {
        content->fd = open(content->path, O_RDONLY | O_CLOEXEC);
        if (content->fd >= 0 && fstat(content->fd, &status) == 0)
            content->size = (uint64_t)status.st_size;
    }
    do
        content->count = content->fd < 0 ? -1 : read(content->fd, content->block, sizeof content->block);
    while (content->count < 0 && errno == EINTR && content->fd >= 0);
}

static void content_more(void *state);

static void content_was_read(uv_work_t *work, int status) {
    struct content *content = work->data;
    struct exchange *exchange = content->exchange;
    struct fault fault;
    (void)status;
    content->working = false;
    if (content->gone) {
        content_free(content);
    } else if (content->count < 0 && !content->begun) {
        fault_set(&fault, 500, NULL, NULL, "the file cannot be read from the state directory");
        exchange_fault(exchange, &fault);
    } else if (content->count < 0) {
        exchange_abandon(exchange);
    } else {
        if (!content->begun)
            exchange_stream_as(exchange, "application/octet-stream", content->size, content_more);
        content->begun = true;
        if (content->count > 0)
            exchange_write(exchange, content->block, (size_t)content->count);
        else
            exchange_end(exchange);
    }
}

static void content_more(void *state) {
    struct content *content = state;
    if (content == NULL || content->working || content->count == 0)
        return;
    content->working =
        uv_queue_work(loop_uv(content->exchange->server->loop), &content->work, content_read, content_was_read) == 0;
    if (!content->working)
        exchange_abandon(content->exchange);
}

static int content_find(struct database *database, void *state, struct error *error) {
    struct content *content = state;
    struct admin_call call = {.subject = ""};
    char id[POLICY_NAME_MAX];
    exchange_path_part(content->exchange, id, sizeof id);
    int code = files_find(database, id, files_take_stored, &call, error);
    content->found = code > 0 && store_path(content->exchange->server->admin->store, "files", call.subject,
                                     content->path, sizeof content->path) == 0;
    return code < 0 ? code : 0;
}

static void content_found(void *state, const struct error *error) {
    struct content *content = state;
    char id[POLICY_NAME_MAX];
    struct fault fault;
    content->working = false;
    if (content->gone) {
        content_free(content);
        return;
    }
    exchange_path_part(content->exchange, id, sizeof id);
    if (error != NULL)
        fault_set(&fault, 500, NULL, NULL, "%s", error->message);
    else
        fault_set(&fault, 404, NULL, NULL, "there is no file '%.100s'", id);
    if (error != NULL || !content->found)
        exchange_fault(content->exchange, &fault);
    else
        content_more(content);
}

void files_content(struct exchange *exchange) {
    struct content *content = calloc(1, sizeof *content);
    if (content == NULL) {
        exchange_fault_memory(exchange);
        return;
    }
    content->exchange = exchange;
    content->fd = -1;
    content->count = -1;
    content->work.data = content;
    exchange_retain(exchange);
    exchange->state = content;
    exchange->abandon = content_abandon; /* also when all was sent */
    content->working = true;
    if (store_post(exchange->server->admin->store, content_find, content_found, content) != 0) {
        content->working = false;
        exchange_fault_memory(exchange);
    }
}
