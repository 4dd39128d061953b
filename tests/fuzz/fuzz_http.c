/* SPDX-License-Identifier: Apache-2.0
 *
 * Heads of HTTP requests, to the whole server (http_server.h): a run is repeated by its input. An input begins with a
 * byte that says what the client does with the rest: 'B'    a byte that chooses a route of ROUTES, and a body: sends a
 * good head and the body. It must be answered, as JSON, by no 5xx. else   sends the rest as it is, in two pieces that
 * are cut at this part of it (0: in one). Then the client leaves: whatever it sent, the server must be rid of it at
 * once.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/http_server.h"

static const char *const ROUTES[] = {"/tokenize", "/detokenize", "/apply-template"};

/* With an origin whose pages may ask. */
static struct server *server(void) {
    static char *options[] = {"--max-body", "64K", "--cors-origin", "https://a.example"};
    return fuzz_server(sizeof options / sizeof options[0], options);
}

static void try_body(uint8_t choice, const uint8_t *body, size_t bytes) {
    struct buffer request = {0};
    struct answer answer = {0};
    buffer_format(&request,
        "POST %s HTTP/1.1\r\nHost: a\r\nX-Api-Key: " FUZZ_KEY "\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n",
        ROUTES[choice % (sizeof ROUTES / sizeof ROUTES[0])], bytes);
    buffer_append(&request, (const char *)body, bytes);
    int fd = client_connect(loop_port(server()->loop));
    client_send(fd, &answer, request.data, request.length);
    client_wait(fd, &answer);
    answer_check(&answer, true);
    client_leave(fd);
    answer_free(&answer);
    buffer_free(&request);
}

static void try_text(uint8_t cut, const uint8_t *text, size_t bytes) {
    struct answer answer = {0};
    int fd = client_connect(loop_port(server()->loop));
    client_send_cut(fd, &answer, cut, text, bytes);
    answer_check(&answer, false);
    client_leave(fd);
    answer_free(&answer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes >= 2 && data[0] == 'B')
        try_body(data[1], data + 2, bytes - 2);
    else if (bytes >= 1)
        try_text(data[0], data + 1, bytes - 1);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const struct fuzz_text seeds[] = {
        FUZZ_TEXT("\0GET /health HTTP/1.1\r\nHost: a\r\n\r\n"),
        FUZZ_TEXT("\x80GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nX-Request-Id: my-1\r\n\r\n"),
        FUZZ_TEXT("\0GET http://a:80/v1/models/model?x=%20&y HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\n\r\n"
                  "HEAD /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
        FUZZ_TEXT("\x40POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nContent-Type: "
                  "application/json\r\nContent-Length: 30\r\n\r\n{\"prompt\":\"ab\",\"max_tokens\":3}"),
        FUZZ_TEXT(
            "\xc0POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nTransfer-Encoding: chunked\r\n\r\n"
            "2a\r\n{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}\r\n11;x=y\r\n],\"stream\":true} \r\n0\r\n\r\n"),
        FUZZ_TEXT("\0POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nContent-Length: 13\r\nExpect: "
                  "100-continue\r\n\r\n{\"input\":\"a\"}"),
        FUZZ_TEXT("\0POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nContent-Length: 30\r\n\r\n"
                  "{\"prompt\":\"ab\",\"max_tokens\":0}"),
        FUZZ_TEXT("\0OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\nOrigin: https://a.example\r\n"
                  "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n"),
        FUZZ_TEXT(
            "\0DELETE /v1/completions HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nOrigin: https://b.example\r\n\r\n"),
        FUZZ_TEXT(
            "\0POST /tokenize HTTP/1.0\r\nAuthorization: bearer  key\r\nContent-Length: 99999999999999999999\r\n\r\n"),
        FUZZ_TEXT("\0POST /tokenize HTTP/1.1\r\nHost: a\r\nX-Api-Key: key\r\nContent-Length: 2\r\nTransfer-Encoding: "
                  "chunked\r\n\r\n0\r\n\r\n"),
        FUZZ_TEXT("\0GET /%2e%2e/%00%ff HTTP/1.1\r\nHost: a\r\nCookie: a=b; c\r\nX: 1\r\n folded\r\n\r\n"),
        FUZZ_TEXT("\0GET /openapi.json HTTP/2.0\r\n\r\n"),
        FUZZ_TEXT("B\0{\"prompt\":\"a<|im_start|>\\u00e9\",\"return_token_strs\":true,\"add_special_tokens\":null}"),
        FUZZ_TEXT("B\0{\"content\":\"ab\",\"parse_special\":false,\"model\":\"model\"}"),
        FUZZ_TEXT("B\1{\"tokens\":[97,195,169,256,258.0]}"),
        FUZZ_TEXT("B\2{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"}]},{\"role\":"
                  "\"assistant\","
                  "\"content\":null}],\"add_generation_prompt\":false,\"chat_template_kwargs\":{\"x\":[1]}}"),
    };
    return fuzz_text_copy(seeds, sizeof seeds / sizeof seeds[0], index, bytes);
}
