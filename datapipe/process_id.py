"""What tells a process from all others, so that a note of it says later, and elsewhere, whether it still lives."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .fsio import boot_id


@dataclass(frozen=True)
class ProcessId:
    """A process.

    Attributes:
        host: Name of its host.
        boot: What tells the host's present life from its earlier ones; "" where the system does not say.
        namespace: What tells its container's process numbers from those of others; "" where the system does not say.
        pid: Its number.
        started: When it began, in the kernel's ticks since the host booted; "" for a process that has ended.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def here(cls, pid: int | None = None) -> ProcessId:
        """Identify the process that has a number here now; None: this one."""
        pid = os.getpid() if pid is None else pid
        namespace = started = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5)
            started = fields[19] if fields[0] not in "ZX" else ""  # a zombie or dead process has ended
        return cls(socket.gethostname(), boot_id(), namespace, pid, started)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> ProcessId:
        """Read what `vars` gave. Raises KeyError, TypeError or ValueError where it is something else."""
        host, boot, started = (str(fields[name]) for name in ("host", "boot", "started"))
        return cls(host, boot, str(fields.get("namespace", "")), int(fields["pid"]), started)

    def find_state(self) -> Literal["alive", "ended", "unknown"]:
        """Find out whether the process lives; only where it would be seen from here can that be known."""
        here = ProcessId.here(self.pid)
        if not (self.boot and self.namespace) or (self.host, self.boot, self.namespace) != (
            here.host,
            here.boot,
            here.namespace,
        ):
            return "unknown"
        return "alive" if self.started and self.started == here.started else "ended"
