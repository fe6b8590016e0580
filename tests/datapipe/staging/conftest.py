"""Nodes: processes that each have a host name of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import reads_at_start
from tests.processes import Process, ProcessServer


@pytest.fixture
def start(server: ProcessServer, request: pytest.FixtureRequest) -> Callable[..., Process | subprocess.Popen]:
    """start(*arguments, host="", **settings) -> a `datapipe stage` in the background, ended with the test."""
    children: list[Process | subprocess.Popen] = []

    def begin(
        *arguments: object, host: str = "", prefix: tuple[str, ...] = (), **settings
    ) -> Process | subprocess.Popen:
        if not prefix and not reads_at_start(settings.get("env", {})):
            children.append(server.start("-m", "datapipe", "stage", *arguments, host=host, **settings))
            return children[-1]
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
