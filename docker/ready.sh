#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The image's health check: succeeds when the server in this container takes requests (GET /ready says 200). By bash
# alone, since the image has no other client.
exec 3<>"/dev/tcp/127.0.0.1/${DISTILLCACHE_PORT:-8080}" || exit 1
printf 'GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3
read -r _ status _ <&3
[ "$status" = 200 ]
