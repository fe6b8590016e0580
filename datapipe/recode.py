"""What is done to an image's bytes before they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import SettingError
from .formats import Buffer
from .image import ImageHeader, decode, read_header

CHECKS = ("header", "decode")


@dataclass(frozen=True)
class RecodeOptions:
    """`check`: read every image's header, or decode it."""

    check: str = "header"

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise SettingError(f"check: {self.check!r} is not one of {', '.join(CHECKS)}")


class Recoder:
    """Checks images. Called from many threads at once."""

    def __init__(self, options: RecodeOptions) -> None:
        self._decode = options.check == "decode"

    def __call__(self, data: Buffer) -> tuple[Buffer, ImageHeader, Sequence[str]]:
        """What is stored, its header, and what kinds of conversion were needed. Raises ValueError for a bad image."""
        image = bytes(data)
        header = read_header(image)
        if self._decode:
            decode(image, header.channels)
        return data, header, ()
