/* SPDX-License-Identifier: Apache-2.0
 *
 * POST /admin/v1/files: a multipart form with `file` and `purpose`. The library's post processor takes the form apart
 * as it comes; what belongs to the file is gathered up to UPLOAD_BLOCK bytes and written on another thread, while the
 * connection is suspended. The file gets its name only when it is whole and synced; what is left of others is removed.
 */
#include "server/admin/admin.h"

#include "config/config.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    UPLOAD_BLOCK = 1 << 18,
    UPLOAD_FORM_MAX = 1 << 16, /* bytes of the form beside the file */
    FORM_BUFFER = 4096,        /* of the post processor */
    FILENAME_MAX_BYTES = 255,
};

struct upload {
    struct admin *admin;
    struct exchange *exchange;
    struct MHD_PostProcessor *processor;
    struct fault fault; /* the first thing that was wrong */
    char id[64];
    char stored[80]; /* name in the folder of files */
    char temporary[80];
    char filename[FILENAME_MAX_BYTES + 1];
    char purpose[64];
    bool has_file, has_purpose;
    uint64_t bytes;
    struct buffer block;   /* of the file, not written yet */
    struct buffer writing; /* the other thread's part of it */
    int fd;                /* -1: not open yet */
    uv_work_t work;
    bool working;   /* the other thread has it */
    bool abandoned; /* nobody wants it any more: freed when the thread is done */
    bool whole;     /* it has its name */
    bool kept;      /* and its record */
    struct error error;
};

/* --- Life --- */

static void upload_free(struct upload *upload) {
    if (upload->processor != NULL)
        MHD_destroy_post_processor(upload->processor);
    if (upload->fd >= 0)
        close(upload->fd);
    if (upload->admin->store != NULL && !upload->kept && (upload->fd >= 0 || upload->whole))
        admin_unlink(upload->admin, "files", upload->whole ? upload->stored : upload->temporary);
    buffer_free(&upload->block);
    buffer_free(&upload->writing);
    free(upload);
}

/* The client left while the body was coming. */
static void upload_abandon(void *state) {
    struct upload *upload = state;
    upload->exchange->state = NULL;
    upload->abandoned = true;
    if (!upload->working)
        upload_free(upload);
}

/* Training tells text from JSON lines by the file's ending. */
static const char *upload_ending(const char *filename) {
    size_t length = strlen(filename);
    return length >= 4 && strcasecmp(filename + length - 4, ".txt") == 0 ? ".txt" : ".jsonl";
}

/* --- The other thread --- */

static int upload_fail(struct upload *upload, const char *doing) {
    return error_set(&upload->error, ERROR_IO, "cannot %s the file in the state directory: %s", doing, strerror(errno));
}

static int upload_open(struct upload *upload) {
    char path[STORE_PATH_MAX];
    if (upload->fd >= 0)
        return 0;
    if (store_path(upload->admin->store, "files", upload->temporary, path, sizeof path) != 0)
        return error_set(&upload->error, ERROR_IO, "the path of the state directory is too long");
    upload->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return upload->fd < 0 ? upload_fail(upload, "create") : 0;
}

static int upload_write(struct upload *upload) {
    int code = upload_open(upload);
    size_t written = 0;
    while (code == 0 && written < upload->writing.length) {
        ssize_t count = write(upload->fd, upload->writing.data + written, upload->writing.length - written);
        if (count < 0 && errno != EINTR)
            return upload_fail(upload, "write");
        written += count > 0 ? (size_t)count : 0;
    }
    upload->writing.length = 0;
    return code;
}

static void upload_write_work(uv_work_t *work) {
    upload_write(work->data);
}

static int upload_complete(struct upload *upload) {
    char from[STORE_PATH_MAX], to[STORE_PATH_MAX];
    int code = upload_write(upload);
    if (code != 0)
        return code;
    if (store_path(upload->admin->store, "files", upload->temporary, from, sizeof from) != 0 ||
        store_path(upload->admin->store, "files", upload->stored, to, sizeof to) != 0)
        return error_set(&upload->error, ERROR_IO, "the path of the state directory is too long");
    if (fsync(upload->fd) != 0)
        return upload_fail(upload, "sync");
    if (rename(from, to) != 0)
        return upload_fail(upload, "rename");
    upload->whole = true;
    return store_sync_folder(upload->admin->store, "files", &upload->error);
}

static void upload_complete_work(uv_work_t *work) {
    upload_complete(work->data);
}

/* --- The form --- */

static int upload_refuse(struct upload *upload, const char *parameter, const char *message) {
    if (upload->fault.status == 0)
        fault_invalid(&upload->fault, parameter, "%s", message);
    return MHD_YES;
}

static int upload_take_file(
    struct upload *upload, const char *filename, const char *data, uint64_t offset, size_t bytes) {
    if (offset == 0 && upload->has_file && upload->bytes > 0)
        return upload_refuse(upload, "file", "the form has more than one file");
    if (!upload->has_file) {
        upload->has_file = true;
        if (strlen(filename) > FILENAME_MAX_BYTES || !utf8_valid(filename, strlen(filename)))
            return upload_refuse(upload, "file", "the file's name must be UTF-8 of at most 255 bytes");
        snprintf(upload->filename, sizeof upload->filename, "%s", filename);
        snprintf(upload->stored, sizeof upload->stored, "%s%s", upload->id, upload_ending(filename));
    }
    upload->bytes += bytes;
    if (upload->bytes > upload->admin->server->config->max_upload) {
        fault_set(&upload->fault, 413, NULL, "file", "the file has more than %zu bytes, the limit (max-upload)",
            upload->admin->server->config->max_upload);
        return MHD_YES;
    }
    buffer_append(&upload->block, data, bytes);
    return MHD_YES;
}

static int upload_take_purpose(struct upload *upload, const char *data, size_t bytes) {
    size_t length = strlen(upload->purpose);
    upload->has_purpose = true;
    if (length + bytes >= sizeof upload->purpose)
        return upload_refuse(upload, "purpose", "purpose is too long; it must be fine-tune or evals");
    memcpy(upload->purpose + length, data, bytes);
    upload->purpose[length + bytes] = '\0';
    return MHD_YES;
}

static enum MHD_Result upload_take(void *context, enum MHD_ValueKind kind, const char *key, const char *filename,
    const char *content_type, const char *transfer_encoding, const char *data, uint64_t offset, size_t bytes) {
    struct upload *upload = context;
    (void)kind;
    (void)content_type;
    (void)transfer_encoding;
    if (upload->fault.status != 0 || key == NULL)
        return MHD_YES;
    if (strcmp(key, "file") == 0 && filename == NULL)
        upload_refuse(upload, "file", "the field file must be a file: it has no filename");
    else if (strcmp(key, "file") == 0)
        upload_take_file(upload, filename, data, offset, bytes);
    else if (strcmp(key, "purpose") == 0)
        upload_take_purpose(upload, data, bytes);
    else if (strncmp(key, "expires_after", 13) == 0)
        upload_refuse(upload, "expires_after", "expires_after is not supported: delete the file when it is not needed");
    return MHD_YES;
}

/* --- The reader --- */

static int upload_begin(struct exchange *exchange, uint64_t announced, struct fault *fault) {
    const char *type = exchange_header(exchange, "Content-Type");
    size_t most = exchange->server->config->max_upload;
    if (type == NULL || strncasecmp(type, "multipart/form-data", 19) != 0)
        return fault_invalid(fault, NULL,
            "the body must be multipart/form-data with the fields file and purpose, not %.80s",
            type == NULL ? "without a Content-Type" : type);
    if (announced > (uint64_t)most + UPLOAD_FORM_MAX)
        return fault_set(fault, 413, NULL, "file", "the body has %llu bytes; the limit of a file is %zu (max-upload)",
            (unsigned long long)announced, most);
    struct upload *upload = calloc(1, sizeof *upload);
    if (upload == NULL)
        return fault_memory(fault);
    upload->admin = exchange->server->admin;
    upload->exchange = exchange;
    upload->fd = -1;
    upload->work.data = upload;
    http_make_id(upload->id, sizeof upload->id, "file-");
    snprintf(upload->stored, sizeof upload->stored, "%s.jsonl", upload->id);
    snprintf(upload->temporary, sizeof upload->temporary, ".upload-%s", upload->id);
    upload->processor =
        MHD_create_post_processor(connection_handle(exchange->connection), FORM_BUFFER, upload_take, upload);
    if (upload->processor == NULL) {
        upload_free(upload);
        return fault_invalid(fault, NULL, "the Content-Type has no boundary: '%.120s'", type);
    }
    exchange->state = upload;
    exchange->abandon = upload_abandon;
    return 0;
}

static void upload_take_error(struct upload *upload) {
    if (upload->error.code != 0 && upload->fault.status == 0)
        fault_set(&upload->fault, 500, NULL, NULL, "%s", upload->error.message);
    if (upload->block.failed && upload->fault.status == 0)
        fault_memory(&upload->fault);
}

static void upload_written(uv_work_t *work, int status);

/* Hands the block to the other thread. */
static int upload_hand_over(struct upload *upload, uv_work_cb work, uv_after_work_cb done) {
    struct buffer empty = upload->writing;
    upload->writing = upload->block;
    upload->block = empty;
    if (uv_queue_work(loop_uv(upload->admin->server->loop), &upload->work, work, done) != 0)
        return fault_memory(&upload->fault);
    upload->working = true;
    return 0;
}

static void upload_written(uv_work_t *work, int status) {
    struct upload *upload = work->data;
    (void)status;
    upload->working = false;
    if (upload->abandoned) {
        upload_free(upload);
        return;
    }
    upload_take_error(upload);
    exchange_resume(upload->exchange);
}

/* The library may bring what it has of a chunked body although the connection is suspended: that waits in the block. */
static int upload_piece(struct exchange *exchange, const char *data, size_t bytes, struct fault *fault) {
    struct upload *upload = exchange->state;
    if (upload == NULL)
        return 0;
    if (upload->fault.status == 0 && MHD_post_process(upload->processor, data, bytes) != MHD_YES)
        upload_refuse(upload, NULL, "the body is not a well-formed multipart form");
    if (upload->fault.status == 0 && !upload->working && upload->block.length >= UPLOAD_BLOCK &&
        upload_hand_over(upload, upload_write_work, upload_written) == 0)
        exchange_pause(exchange);
    if (!upload->working)
        upload_take_error(upload);
    *fault = upload->fault;
    return upload->fault.status == 0 ? 0 : -1;
}

const struct body_reader upload_reader = {upload_begin, upload_piece};

/* --- The end --- */

/* The exchange is not read by anybody now: its state is the call's. */
static int upload_record(struct admin_call *call, struct database *database, struct error *error) {
    const struct upload *upload = call->exchange->state;
    struct file_record file = {.id = upload->id,
        .filename = upload->filename,
        .purpose = upload->purpose,
        .stored = upload->stored,
        .created = store_now(),
        .bytes = (int64_t)upload->bytes};
    int code = files_insert(database, &file, error);
    if (code == 0)
        files_write(&call->reply, &file);
    return code;
}

static void upload_recorded(struct admin_call *call) {
    ((struct upload *)call->exchange->state)->kept = true;
}

static void upload_finish(struct admin_call *call) {
    struct upload *upload = call->exchange->state;
    call->exchange->state = NULL;
    if (upload != NULL)
        upload_free(upload);
}

static void upload_refuse_whole(struct upload *upload) {
    struct exchange *exchange = upload->exchange;
    exchange->state = NULL;
    exchange_fault(exchange, &upload->fault);
    upload_free(upload);
}

static void upload_completed(uv_work_t *work, int status) {
    struct upload *upload = work->data;
    struct exchange *exchange = upload->exchange;
    (void)status;
    upload->working = false;
    upload_take_error(upload);
    if (exchange->connection == NULL || upload->admin->store == NULL) { /* the client left */
        exchange->state = NULL;
        upload_free(upload);
    } else if (upload->fault.status != 0) {
        upload_refuse_whole(upload);
    } else {
        admin_handle_with(exchange, upload_record, upload_recorded, upload_finish);
    }
    exchange_release(exchange);
}

static void upload_check_form(struct upload *upload) {
    bool ended = MHD_destroy_post_processor(upload->processor) == MHD_YES;
    upload->processor = NULL;
    if (!ended)
        upload_refuse(upload, NULL, "the multipart form is not complete: its last boundary is missing");
    if (!upload->has_file)
        upload_refuse(upload, "file", "the form has no file: the field file is required");
    if (!upload->has_purpose)
        upload_refuse(upload, "purpose", "the form has no purpose: it must be fine-tune or evals");
    if (upload->fault.status == 0 && strcmp(upload->purpose, "fine-tune") != 0 && strcmp(upload->purpose, "evals") != 0)
        fault_invalid(&upload->fault, "purpose", "purpose is '%.60s'; it must be fine-tune or evals", upload->purpose);
    if (upload->bytes == 0)
        upload_refuse(upload, "file", "the file is empty");
}

void files_upload(struct exchange *exchange) {
    struct upload *upload = exchange->state;
    exchange->abandon = NULL; /* from here on it lives as long as its work */
    upload_check_form(upload);
    if (upload->fault.status != 0) {
        upload_refuse_whole(upload);
        return;
    }
    if (upload_hand_over(upload, upload_complete_work, upload_completed) != 0) {
        upload_refuse_whole(upload);
        return;
    }
    exchange_retain(exchange);
}
