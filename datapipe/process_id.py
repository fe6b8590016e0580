"""What tells a process from all others, so that a note of it says later, and elsewhere, whether it still lives."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .fsio import boot_id

State = Literal["alive", "ended", "unknown"]
_MARK = re.compile(r"([0-9a-f]{12})-([0-9]+)-([0-9]*)")
_FORGOTTEN_S = 7 * 24 * 3600.0  # without a write, after which a file is not a live process's


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
    match = _MARK.fullmatch(mark)
    if match is None or not int(match[1], 16):
        return "unknown"
    here = _MARK.fullmatch(ProcessId.here(int(match[2])).mark)
    if here is None or here[1] != match[1]:
        return "unknown"
    return "alive" if match[3] and match[3] == here[3] else "ended"


def make_own_name() -> str:
    """Return what makes temporary names this process's own."""
    return f".{ProcessId.here().mark}.{uuid.uuid4().hex[:8]}"


def is_of_dead_process(path: Path) -> bool:
    """Return whether a temporary file is the own one of a process that has ended.

    Of a process that cannot be seen from here, that counts which its file has not been written to for `_FORGOTTEN_S`.
    """
    match = re.fullmatch(rf"\..+\.({_MARK.pattern})\.[0-9a-f]{{8}}", path.stem)
    if match is None:
        return False
    state = find_state(match[1])
    with suppress(OSError):  # it is gone
        return state == "ended" or (state == "unknown" and time.time() - path.stat().st_mtime > _FORGOTTEN_S)
    return False
