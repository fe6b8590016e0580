"""Nodes: processes that each have a host name of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Callable[..., subprocess.Popen]:
    """start(*arguments, host="", **settings) -> a `datapipe stage` in the background, ended with the test."""
    children: list[subprocess.Popen] = []

    def begin(*arguments: object, host: str = "", prefix: tuple[str, ...] = (), **settings) -> subprocess.Popen:
        # It is renamed before it starts: a process in a namespace of its own, for host names only.
        named = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"] if host else []
        command = [*named, *prefix, sys.executable, "-m", "datapipe", "stage", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen(command, **pipes, **settings))
        return children[-1]

    def end() -> None:
        for child in children:
            child.kill()
            child.communicate()

    request.addfinalizer(end)
    return begin
