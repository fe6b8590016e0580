"""Ports for the processes of a test to meet at."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row on which nobody listens.

    They are below those that Linux gives to who connects: a process that tries to connect before anybody listens may be
    given just that port for its own side, and then nobody else can listen there.
    """
    for first in random.sample(range(17_100, 30_000, 10), 1000):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")
