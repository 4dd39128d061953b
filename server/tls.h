/* SPDX-License-Identifier: Apache-2.0
 *
 * The certificate and key of HTTPS: read, checked, and read again while connections are open.
 *
 * libmicrohttpd asks for them at each handshake (MHD_OPTION_HTTPS_CERT_CALLBACK2, RFC 8446 and 5246 by GnuTLS), so that
 * a renewed certificate serves new connections without a restart. The process has at most one struct tls, since that
 * callback is given nothing of ours to find it by.
 */
#ifndef SERVER_TLS_H
#define SERVER_TLS_H

#include "engine/error.h"

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>

/* Versions 1.2 and 1.3. */
#define TLS_PRIORITIES "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"

enum { TLS_CHAIN_MAX = 16, TLS_FILE_MAX = 1 << 20 /* bytes */ };

struct tls;      /* opaque */
struct tls_pair; /* opaque: a chain of certificates and the key of the first */

/* Reads both files. The chain begins with the server's own certificate; an expired one is taken, with a warning in the
 * log. ERROR_IO: a file cannot be read; ERROR_INVALID: it is not PEM of the right kind, or they do not belong together
 * (the message names the files); ERROR_MEMORY. May be called on any thread. */
struct tls_pair *tls_pair_read(const char *certificate_file, const char *key_file, struct error *error);
void tls_pair_free(struct tls_pair *pair); /* NULL allowed */

/* Takes the pair over. NULL and ERROR_MEMORY. */
struct tls *tls_create(struct tls_pair *pair, struct error *error);
void tls_free(struct tls *tls); /* after the last connection; NULL allowed */
/* New connections get this pair, which is taken over. The old one stays until tls_free: handshakes may refer to it. */
void tls_replace(struct tls *tls, struct tls_pair *pair);

/* For MHD_OPTION_HTTPS_CERT_CALLBACK2. */
int tls_retrieve(gnutls_session_t session, const struct gnutls_cert_retr_st *info, gnutls_pcert_st **certificates,
    unsigned int *certificates_count, gnutls_ocsp_data_st **ocsp, unsigned int *ocsp_count, gnutls_privkey_t *key,
    unsigned int *flags);

#endif
