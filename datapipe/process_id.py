"""What tells a process from all others, so that a note of it says later, and elsewhere, whether it still lives."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .fsio import boot_id

State = Literal["alive", "ended", "unknown"]
MARK = re.compile(r"([0-9a-f]{12})-([0-9]+)-([0-9]*)")


@dataclass(frozen=True)
class ProcessId:
    """A process.

    Attributes:
        host: Name of its host.
        boot: Mark that tells the host's present life from its earlier ones; "" if the system does not say.
        namespace: Mark that tells its container's process numbers from those of others; "" if the system does not say.
        pid: Its number.
        started: Time at which it began, in the kernel's ticks since the host booted; "" for a process that has ended.
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
        host, boot = (str(fields[name]) for name in ("host", "boot"))
        namespace, started = (str(fields.get(name, "")) for name in ("namespace", "started"))
        return cls(host, boot, namespace, int(fields["pid"]), started)

    def find_state(self) -> State:
        """Find out whether the process lives; only where it would be seen from here can that be known."""
        return find_state(self.mark)

    @property
    def mark(self) -> str:
        """What tells the process from all others in a file's name: of its host, boot and container, a hash."""
        place = hashlib.sha256(repr((self.host, self.boot, self.namespace)).encode()).hexdigest()
        return f"{place[:12] if self.boot and self.namespace else '0' * 12}-{self.pid}-{self.started}"


def find_state(mark: str) -> State:
    """Find out whether the process with a mark (see `ProcessId`) lives."""
    match = MARK.fullmatch(mark)
    if match is None or not int(match[1], 16):
        return "unknown"
    here = MARK.fullmatch(ProcessId.here(int(match[2])).mark)
    if here is None or here[1] != match[1]:
        return "unknown"
    return "alive" if match[3] and match[3] == here[3] else "ended"
