"""What a copy says of itself: `.origin.json` in its folder, from the first byte on."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..dataset.arriving import PARTIAL, temporary_path
from ..errors import StagingError
from ..foreign import read_own
from ..fsio import named
from .landing import make_own_name

ORIGIN = ".origin.json"


@dataclass(frozen=True)
class Origin:
    """What a copy says of itself.

    Attributes:
        source: the data set's folder.
        manifest: of `compute_digest`, of its manifest; "" in copies of earlier versions of this software.
        files: names of its files; none in those.
        is_complete: whether all files were in place once.
        in_background: whether loaders may use what has landed while a process is at work.
        total_bytes: of all files.
        began: when the copying began, in seconds since 1970.
        began_bytes: that were in place then.
        capacity_bytes: of the slots that the folder has for blocks; 0 where it is for all of the data set.
        splits: names of the copies that were staged together with this one, its own included; none for one by itself.
    """

    source: str
    manifest: str = ""
    files: list[str] = field(default_factory=list)
    is_complete: bool = True
    in_background: bool = False
    total_bytes: int = 0
    began: float = field(default_factory=time.time)
    began_bytes: int = 0
    capacity_bytes: int = 0
    splits: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Origin:
        """Read what a copy says. Raises StagingError where that is not readable, or others can have written it."""
        try:
            return cls(**json.loads(read_own(folder / ORIGIN)))
        except (OSError, ValueError, TypeError) as error:
            raise StagingError(f"cannot be read: {error}", path=folder / ORIGIN) from error

    @staticmethod
    def is_begun(folder: Path) -> bool:
        """Return whether a folder has one, or has what a process left that was killed while it wrote the first."""
        return (folder / ORIGIN).exists() or any(folder.glob(f".{ORIGIN}.*.{PARTIAL}"))

    def write(self, folder: Path) -> None:
        """Write it into the copy's folder."""
        path = folder / ORIGIN
        partial = temporary_path(path, PARTIAL, make_own_name())  # which `sweep` finds where there are no locks
        try:
            with named(partial):
                with open(partial, "xb", opener=_open_own) as file:
                    file.write(json.dumps(asdict(self)).encode())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)  # of a full disk
            raise


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)  # so that it is believed, whatever the umask
