# SPDX-License-Identifier: Apache-2.0
"""Ports for servers of tests that cannot say which one they were given."""

import random
import socket


def free_port():
    """None that connections are given (net.ipv4.ip_local_port_range): tests beside this one would get it meanwhile."""
    while True:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", random.randrange(10240, 32768)))
                return listener.getsockname()[1]
            except OSError:
                pass
