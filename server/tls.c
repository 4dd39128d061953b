/* SPDX-License-Identifier: Apache-2.0 */
#include "server/tls.h"

#include "engine/log.h"

#include <gnutls/x509.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

struct tls_pair {
    gnutls_pcert_st chain[TLS_CHAIN_MAX];
    unsigned chain_count;
    gnutls_privkey_t key;
    struct tls_pair *older;
};

struct tls {
    struct tls_pair *pair; /* the newest */
};

static struct tls *current;

/* --- Reading --- */

/* A file's bytes, to be freed by gnutls_free. kind: what the option is called. */
static int tls_load(const char *file, const char *option, gnutls_datum_t *data, struct error *error) {
    struct stat status;
    if (stat(file, &status) == 0 && (!S_ISREG(status.st_mode) || status.st_size > TLS_FILE_MAX))
        return error_set(error, ERROR_INVALID, "%s %.180s is no file of at most %d bytes", option, file, TLS_FILE_MAX);
    int failed = gnutls_load_file(file, data);
    if (failed == GNUTLS_E_MEMORY_ERROR)
        return error_set(error, ERROR_MEMORY, "no memory for %s", option);
    return failed == 0 ? 0 : error_set(error, ERROR_IO, "cannot read %s %.180s", option, file);
}

static int tls_read_chain(struct tls_pair *pair, const char *file, struct error *error) {
    gnutls_datum_t data;
    int code = tls_load(file, "tls-cert", &data, error);
    if (code != 0)
        return code;
    gnutls_x509_crt_t chain[TLS_CHAIN_MAX];
    unsigned count = TLS_CHAIN_MAX;
    int failed = gnutls_x509_crt_list_import(
        chain, &count, &data, GNUTLS_X509_FMT_PEM, GNUTLS_X509_CRT_LIST_IMPORT_FAIL_IF_EXCEED);
    gnutls_free(data.data);
    if (failed < 0)
        return error_set(error, ERROR_INVALID, "tls-cert %.180s has no chain of up to %d certificates in PEM: %s", file,
            TLS_CHAIN_MAX, gnutls_strerror(failed));
    if (gnutls_x509_crt_get_expiration_time(chain[0]) < time(NULL))
        log_event(LOG_WARNING, NULL, "the certificate has expired", "file", LOG_STRING(file), NULL);
    unsigned sorted = count; /* fewer, if some are no part of the chain */
    failed = gnutls_pcert_import_x509_list(pair->chain, chain, &sorted, GNUTLS_X509_CRT_LIST_SORT);
    for (unsigned i = 0; i < count; i++)
        gnutls_x509_crt_deinit(chain[i]);
    if (failed < 0)
        return error_set(error, ERROR_INVALID, "tls-cert %.180s cannot be used: %s", file, gnutls_strerror(failed));
    pair->chain_count = sorted;
    return 0;
}

static int tls_read_key(struct tls_pair *pair, const char *file, struct error *error) {
    gnutls_datum_t data;
    int code = tls_load(file, "tls-key", &data, error);
    if (code != 0)
        return code;
    int failed = gnutls_privkey_init(&pair->key);
    if (failed == 0)
        failed = gnutls_privkey_import_x509_raw(pair->key, &data, GNUTLS_X509_FMT_PEM, NULL, 0);
    gnutls_memset(data.data, 0, data.size);
    gnutls_free(data.data);
    if (failed == GNUTLS_E_DECRYPTION_FAILED)
        return error_set(error, ERROR_INVALID, "tls-key %.180s has a password: give one without", file);
    return failed == 0 ? 0
                       : error_set(error, ERROR_INVALID, "tls-key %.180s has no private key in PEM: %s", file,
                             gnutls_strerror(failed));
}

/* Compares the public halves. */
static bool tls_pair_matches(const struct tls_pair *pair) {
    unsigned char own[64], certified[64];
    size_t own_size = sizeof own, certified_size = sizeof certified;
    gnutls_pubkey_t public;
    if (gnutls_pubkey_init(&public) != 0)
        return false;
    bool same =
        gnutls_pubkey_import_privkey(public, pair->key, 0, 0) == 0 &&
        gnutls_pubkey_get_key_id(public, GNUTLS_KEYID_USE_SHA256, own, &own_size) == 0 &&
        gnutls_pubkey_get_key_id(pair->chain[0].pubkey, GNUTLS_KEYID_USE_SHA256, certified, &certified_size) == 0 &&
        own_size == certified_size && memcmp(own, certified, own_size) == 0;
    gnutls_pubkey_deinit(public);
    return same;
}

struct tls_pair *tls_pair_read(const char *certificate_file, const char *key_file, struct error *error) {
    struct tls_pair *pair = calloc(1, sizeof *pair);
    if (pair == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for a certificate");
        return NULL;
    }
    int code = tls_read_chain(pair, certificate_file, error);
    if (code == 0)
        code = tls_read_key(pair, key_file, error);
    if (code == 0 && !tls_pair_matches(pair))
        code = error_set(error, ERROR_INVALID, "the key in tls-key %.180s is not that of the certificate in %.180s",
            key_file, certificate_file);
    if (code == 0)
        return pair;
    tls_pair_free(pair);
    return NULL;
}

void tls_pair_free(struct tls_pair *pair) {
    if (pair == NULL)
        return;
    for (unsigned i = 0; i < pair->chain_count; i++)
        gnutls_pcert_deinit(&pair->chain[i]);
    if (pair->key != NULL)
        gnutls_privkey_deinit(pair->key);
    free(pair);
}

/* --- Serving --- */

struct tls *tls_create(struct tls_pair *pair, struct error *error) {
    struct tls *tls = calloc(1, sizeof *tls);
    if (tls == NULL) {
        tls_pair_free(pair);
        error_set(error, ERROR_MEMORY, "no memory for a certificate");
        return NULL;
    }
    tls->pair = pair;
    current = tls;
    return tls;
}

void tls_free(struct tls *tls) {
    if (tls == NULL)
        return;
    for (struct tls_pair *pair = tls->pair, *older; pair != NULL; pair = older) {
        older = pair->older;
        tls_pair_free(pair);
    }
    free(tls);
    current = NULL;
}

void tls_replace(struct tls *tls, struct tls_pair *pair) {
    pair->older = tls->pair;
    tls->pair = pair;
}

int tls_retrieve(gnutls_session_t session, const struct gnutls_cert_retr_st *info, gnutls_pcert_st **certificates,
    unsigned int *certificates_count, gnutls_ocsp_data_st **ocsp, unsigned int *ocsp_count, gnutls_privkey_t *key,
    unsigned int *flags) {
    (void)session;
    (void)info;
    *certificates = current->pair->chain;
    *certificates_count = current->pair->chain_count;
    *ocsp = NULL;
    *ocsp_count = 0;
    *key = current->pair->key;
    *flags = 0; /* all of it stays ours */
    return 0;
}
