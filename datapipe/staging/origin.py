"""What a copy says of itself: `.origin.json` in its folder, from the first byte on."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import StagingError
from ..fsio import atomic_write

ORIGIN = ".origin.json"


@dataclass(frozen=True)
class Origin:
    """What a copy says of itself.

    Attributes:
        source: the data set's folder.
        manifest: sha256 of its manifest's file; "" in copies of earlier versions.
        is_complete: whether all files were in place once.
        in_background: whether loaders may use what has landed while a process is at work.
        total_bytes: of all files.
        began: when the copying began, in seconds since 1970.
        began_bytes: that were in place then.
        capacity_bytes: of the slots that the folder has for blocks; 0 where it is for all of the data set.
    """

    source: str
    manifest: str = ""
    is_complete: bool = True
    in_background: bool = False
    total_bytes: int = 0
    began: float = field(default_factory=time.time)
    began_bytes: int = 0
    capacity_bytes: int = 0

    @classmethod
    def read(cls, folder: Path) -> Origin:
        """Read what a copy says. Raises StagingError where that is not readable."""
        try:
            return cls(**json.loads((folder / ORIGIN).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise StagingError(f"cannot be read: {error}", path=folder / ORIGIN) from error

    def write(self, folder: Path) -> None:
        """Write it into the copy's folder."""
        with atomic_write(folder / ORIGIN, alone=False) as file:
            file.write(json.dumps(asdict(self)).encode())
