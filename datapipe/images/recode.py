"""Make of an image what is stored: its bytes unchanged, with restart markers, resized, or only its pixels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import MissingBackendError, SettingError
from ..names import CHECKS, COMPRESSIONS, STORES
from . import Buffer, jpeg, pnm, turbojpeg
from .codec import ImageHeader, check_image, decode, encode_jpeg, png_bits, read_header
from .lanczos import decoded_size, resize

RESIZE = re.compile(r"(short|max)=([1-9]\d{0,4})")
DEFAULT_QUALITY = 90
MAX_SIDE = 0xFFFF
Recoded = tuple[Buffer, ImageHeader, tuple[str, ...]]  # what is stored, its header, and what was unusual before
# Memory that decoding takes, in bytes per pixel (measured). Pillow holds RGB as 4 bytes, and copies; for JPEG it is the
# coefficients, which a progressive image needs all at once.
PNG_BYTES, GREY_PNG_BYTES, JPEG_BYTES = 14, 7, 6


@dataclass(frozen=True)
class RecodeOptions:
    """How images are stored. Raises SettingError for a value out of range.

    Attributes:
        check: "header", or "decode" to decode every image once and refuse damaged ones.
        resize: "short=256" (the shorter side, in pixels) or "max=500" (the longer side). Images are never enlarged.
        quality: Quality of JPEG, 1 to 100. If given, every image is re-encoded; those that must be re-encoded anyway
            have 90.
        restart: Distance of restart markers in MCUs, approximately, 1 to 65,535.
        store: "encoded", or "raw" to store decoded pixels, as PNM.
        size: Length in pixels to which "raw" scales the shorter side, before it crops to the central square.
        compress: Compression of "raw": "lz4" or "zstd".
        headerless: Whether "raw" stores pixels without PNM's header.
        channels: 1 (grey) or 3 (RGB): what all images are read as, and stored as where they are decoded; None: those of
            each image, and they are read as RGB unless all are grey.
    """

    check: str = "header"
    resize: str | None = None
    quality: int | None = None
    restart: int | None = None
    store: str = "encoded"
    size: int | None = None
    compress: str | None = None
    headerless: bool = False
    channels: int | None = None

    def __post_init__(self) -> None:
        is_resize = self.resize is None or RESIZE.fullmatch(self.resize)
        rules = (
            ("check", self.check in CHECKS, f"one of {', '.join(CHECKS)}"),
            ("store", self.store in STORES, f"one of {', '.join(STORES)}"),
            ("compress", self.compress in (None, *COMPRESSIONS), f"one of {', '.join(COMPRESSIONS)}"),
            ("quality", self.quality is None or 1 <= self.quality <= 100, "1 to 100"),
            ("restart", self.restart is None or 1 <= self.restart <= 0xFFFF, f"1 to {0xFFFF}"),
            ("size", self.size is None or 1 <= self.size <= MAX_SIDE, f"1 to {MAX_SIDE}"),
            ("resize", is_resize, "short=PIXELS or max=PIXELS, such as short=256"),
            ("channels", self.channels in (None, 1, 3), "1 or 3"),
        )
        for name, is_allowed, allowed in rules:
            if not is_allowed:
                raise SettingError(f"{name}: {getattr(self, name)!r} is not allowed; allowed: {allowed}")
        for store, names in (("raw", ("size", "compress", "headerless")), ("encoded", ("quality", "restart"))):
            for name in names:
                if getattr(self, name) and self.store != store:
                    value = getattr(self, name)
                    raise SettingError(f"{name}: {value!r} needs --store {store}, and is of no use without it")
        for name, other in (("size", "resize"), ("headerless", "compress")):
            if getattr(self, name) and getattr(self, other):
                raise SettingError(f"{name}: {getattr(self, name)!r} excludes {other}; leave one of them out")

    def settings(self) -> dict[str, Any]:
        """Return what the stored bytes depend on, as JSON values.

        These are the options that are not at their defaults, and the libraries that encode: nodes may have different
        ones, and two encoders do not write the same bytes.
        """
        defaults = asdict(RecodeOptions(check=self.check))
        settings = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        if self.resize or self.quality:
            settings["encoder"] = "libturbojpeg" if turbojpeg.turbojpeg() else "Pillow"
        if self.restart and (lossless := turbojpeg.lossless()):
            settings["lossless"] = "libturbojpeg" if hasattr(lossless, "__self__") else "jpegtran"
        return settings

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that an image of this size gets, in pixels (before `size` crops it)."""
        if self.size is not None:
            side, new_side = min(width, height), self.size
        elif self.resize is not None:
            kind, pixels = self.resize.split("=")
            side = (min if kind == "short" else max)(width, height)
            new_side = min(int(pixels), side)  # images are never enlarged
        else:
            return width, height
        new_width, new_height = (
            min(max(1, (2 * n * new_side + side) // (2 * side)), MAX_SIDE) for n in (width, height)
        )
        return new_width, new_height


class Recoder:
    """Makes of an image what is stored. Called by many threads at once.

    Raises MissingBackendError when the options need what is not installed.
    """

    def __init__(self, options: RecodeOptions) -> None:
        self.options = options
        encoded, new = options.store == "encoded", options.resize is not None or options.quality is not None
        self._as_it_is = encoded and not new and options.restart is None
        self._turbojpeg = turbojpeg.turbojpeg() if encoded and not self._as_it_is else None
        self._restart = self._compress = None
        if encoded and options.restart is not None:
            # Images that are re-encoded get their markers then, so the few that are not can be re-encoded, too.
            self._restart = turbojpeg.lossless() if new else turbojpeg.need_lossless()
        if options.compress:
            self._compress = pnm.compressor(options.compress)

    def __call__(self, data: Buffer, claim: Callable[[int], object] = lambda size: None) -> Recoded:
        """Make what is stored of an image.

        Args:
            data: The image.
            claim: Function that is called before anything is decoded, with the memory in bytes that is needed until
                this returns, approximately.

        Returns:
            Bytes to be stored (`data` itself if nothing has to be done), their header, and names of what was unusual
            and no longer is: "png", "progressive", "multi-scan", "arithmetic", "cmyk", "16-bit", "rotated", "damaged"
            (but decoded as far as possible).

        Raises:
            ValueError: The image is bad.
        """
        try:
            header = read_header(data)
            if self._as_it_is and self.options.check == "header":
                return data, header, ()
            claim(self._memory_bytes(header))
            if self.options.check == "decode":
                check_image(data)
        except MissingBackendError as error:  # hardly any image needs it: this one is bad, the others are not
            raise ValueError(error.message) from error
        if self._as_it_is:
            return data, header, ()
        image = _Image(data, header)
        return self._raw(image) if self.options.store == "raw" else self._encoded(image)

    def _memory_bytes(self, header: ImageHeader) -> int:
        width, height, channels = header.width, header.height, self.options.channels or header.channels
        pixels = decoded = width * height
        target = self.options.target(width, height)
        least = decoded_size(*target)
        if header.encoding == "jpeg":
            opening = JPEG_BYTES * pixels
            if 2 * max(least) <= min(width, height) or self._as_it_is:
                decoded //= 4
        elif header.encoding == "png":
            opening = (GREY_PNG_BYTES if header.channels == 1 else PNG_BYTES) * pixels
        else:
            opening = 2 * header.channels * pixels
        if self._as_it_is:
            return opening
        resized = target != (width, height)
        made = target[0] * target[1]
        between = 4 * target[1] * width if resized else 0  # float32, scaled in height only
        return max(opening, channels * (2 * decoded + between + (5 if resized else 2) * made))

    def _encoded(self, image: _Image) -> Recoded:
        options, size, unusual = self.options, self.options.target(*image.size), image.unusual
        data: Buffer | None = None
        if options.quality is None and size == image.size and image.is_plain_jpeg():
            data = self._restarted(image)
        if data is None:
            quality = options.quality or DEFAULT_QUALITY
            channels = min(image.header.channels, options.channels or 3)  # grey as RGB would only be larger
            columns = -(-size[0] // (8 if channels == 1 else 16))
            interval = jpeg.restart_interval(columns, options.restart) if options.restart is not None else 0
            data = self._from_planes(image, size, channels, quality, interval)
            if data is None:
                pixels, unusual = image.resized(channels, size)
                data = encode_jpeg(pixels, quality, interval)
        return data, read_header(data), unusual

    def _restarted(self, image: _Image) -> Buffer | None:
        """Return the image with the same coefficients and restart markers; None if that is not possible."""
        if self.options.restart is None:
            return None if image.unusual else image.data
        assert image.jpeg is not None
        (across, down), (width, height) = image.jpeg.mcu_size(), image.jpeg[:2]
        if image.turn != 1 and (width % across or height % down):
            return None  # blocks at the edges are not whole
        columns = -(-height // down) if image.turn >= 5 else -(-width // across)
        interval = jpeg.restart_interval(columns, self.options.restart)
        if interval == image.jpeg.restart_interval and not image.unusual:
            return image.data
        try:
            return self._restart(image.data, interval, image.turn) if self._restart else None
        except ValueError:
            return None  # damaged

    def _from_planes(
        self, image: _Image, size: tuple[int, int], channels: int, quality: int, interval: int
    ) -> bytes | None:
        """Decode, resize and encode luma and chroma at their own resolutions, which is less work than through RGB.

        Return None where this is not possible: without libturbojpeg, and for an image that is damaged, rotated, or
        neither YCbCr nor grey.
        """
        if self._turbojpeg is None or image.jpeg is None or image.turn != 1:
            return None
        try:
            planes, halved, (across, down) = self._turbojpeg.planes(image.data, decoded_size(*size))
        except ValueError:
            return None
        width, height = size
        ratio = image.jpeg.width / width / (1 << halved), image.jpeg.height / height / (1 << halved)
        if channels == 1 or len(planes) == 1:
            resized = [resize(planes[0][:, :, None], width, height, ratio)[:, :, 0]]
        else:
            half = (width + 1) // 2, (height + 1) // 2
            step = ratio[0] * 2 / across, ratio[1] * 2 / down  # 4:2:0: a sample of chroma stands for 2×2 pixels
            sizes = ((2 * half[0], 2 * half[1], ratio), (*half, step), (*half, step))
            resized = [resize(plane[:, :, None], *to)[:, :, 0] for plane, to in zip(planes, sizes, strict=True)]
        return self._turbojpeg.compress(resized, width, height, quality, interval)

    def _raw(self, image: _Image) -> Recoded:
        options, size = self.options, self.options.target(*image.size)
        pixels, unusual = image.resized(options.channels or image.header.channels, size)
        if options.size is not None:
            left, top = (size[0] - options.size) // 2, (size[1] - options.size) // 2
            pixels = pixels[top : top + options.size, left : left + options.size]
        height, width, channels = pixels.shape
        if options.headerless:
            return pixels.tobytes(), ImageHeader("raw", width, height, channels, 0), unusual
        data, encoding = pnm.encode(pixels), "pnm"
        if self._compress:
            data, encoding = self._compress(data), f"pnm+{options.compress}"
        return data, ImageHeader(encoding, width, height, channels, 0), unusual


class _Image:
    """An image that is recoded. `turn`: its EXIF orientation; `size`: width and height in pixels when upright."""

    def __init__(self, data: Buffer, header: ImageHeader) -> None:
        self.data, self.header = data, header
        self.jpeg = jpeg.read_markers(data) if header.encoding == "jpeg" else None
        self.turn = jpeg.orientation(data, self.jpeg) if self.jpeg else 1
        self.size = (header.height, header.width) if self.turn >= 5 else (header.width, header.height)
        self.unusual = tuple(name for name, is_so in self._signs() if is_so)

    def _signs(self) -> list[tuple[str, bool]]:
        """Return whether the image is unusual, by the name of each way of being so."""
        header = self.jpeg
        if header is None:
            is_png = self.header.encoding == "png"
            return [("png", is_png), ("16-bit", is_png and png_bits(self.data) == 16)]
        is_progressive = header.frame in jpeg.PROGRESSIVE
        return [
            ("arithmetic", header.frame in jpeg.ARITHMETIC),
            ("progressive", is_progressive),
            ("multi-scan", not is_progressive and not header.interleaved),
            ("cmyk", header.components == 4),
            ("rotated", self.turn != 1),
        ]

    def is_plain_jpeg(self) -> bool:
        """Return whether it can become a baseline JPEG with the same coefficients, grey or in three colours."""
        header = self.jpeg
        return header is not None and header.frame not in jpeg.ARITHMETIC and header.components in (1, 3)

    def resized(self, channels: int, size: tuple[int, int]) -> tuple[np.ndarray, tuple[str, ...]]:
        """Decode the image, upright, and resize it; return what is unusual, too."""
        smallest = decoded_size(*size)
        smallest = smallest[::-1] if self.turn >= 5 else smallest
        if 2 * smallest[0] > self.header.width or 2 * smallest[1] > self.header.height:
            smallest = (0, 0)  # libjpeg-turbo decodes to five eighths or more slower than to the full size
        unusual = self.unusual
        try:
            pixels = decode(self.data, channels, smallest=smallest, strict=True)
        except ValueError:
            pixels, unusual = decode(self.data, channels, smallest=smallest), (*unusual, "damaged")
        return resize(upright(pixels, self.turn), *size), unusual


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Turn pixels, [height, width, channels], as the EXIF orientation (1 to 8) says."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    down, across = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return pixels[:: -1 if down else 1, :: -1 if across else 1]
