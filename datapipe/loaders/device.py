"""The device that batches are delivered on: choosing it, normalising images on it, and why torch may see no GPU."""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import SettingError

# For each major version of CUDA, newest first: the oldest driver that runs it
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1), and a build of torch,
# of those that there are for 2.13 and 2.14 (https://github.com/pytorch/pytorch/issues/190355).
_BUILDS = {13: (580, "cu130"), 12: (525, "cu126")}
_WHEELS = "https://download.pytorch.org/whl"


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the CPU (also for None) or a GPU that is here, by its number; "cuda" is this thread's current one.

    The loader's other threads, and DALI, have a current GPU of their own. Raises SettingError.
    """
    try:
        resolved = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SettingError(f"device: {device!r} is not a device; allowed: cpu, cuda, cuda:0 …") from error
    gpus = torch.cuda.device_count()
    if resolved.type == "cpu":
        return resolved
    if resolved.type == "cuda" and (resolved.index or 0) < gpus:
        return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
    raise SettingError(f"device: {device!r} is not here; allowed: cpu, and any of {gpus} cuda devices")


def gpu_names() -> list[str]:
    """List the names of the GPUs that torch sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a GPU, from pinned memory, without waiting for what it computes; on the CPU share its memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else tensor


class KeptForStream:
    """Keeps what the work on a GPU's stream reads until that is done, without waiting for it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[torch.cuda.Event, object]] = deque()

    def keep(self, stream: torch.cuda.Stream, thing: object) -> torch.cuda.Event:
        """Keep something until the stream has done what it has been given so far; return the event of that."""
        event = torch.cuda.Event()
        event.record(stream)
        self._kept.append((event, thing))
        while self._kept[0][0].query() and len(self._kept) > 1:
            self._kept.popleft()
        return event

    def drain(self) -> None:
        """Wait until the streams are done with all of it."""
        for event, _ in self._kept:
            event.synchronize()
        self._kept.clear()


def normalise(
    images: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Compute (images / 255 - mean) / std on the images' device.

    Args:
        images: Images, uint8[B, C, H, W].
        mean: Mean of each channel, one number per channel, of pixels from 0 to 1.
        std: Standard deviation of each channel, one number per channel, of pixels from 0 to 1.
        dtype: Data type of the result.

    Returns:
        Normalised images, `dtype`[B, C, H, W], in the same memory format.

    Raises:
        SettingError: When the images have another number of channels.
    """
    return _normaliser(tuple(mean), tuple(std), images.device)(images).to(dtype)


class Normaliser:
    """What `normalise` does, for images on one device. torch.compile can have it in a network's graph."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self._counts = len(mean), len(std)
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=device).view(1, -1, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=False)], device=device).view(1, -1, 1, 1)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise images from 0 to 255, uint8 or float32 [B, C, H, W]: float32, in the same memory format.

        Raises SettingError for another number of channels.
        """
        if self._counts != (images.shape[1],) * 2:
            mean, std = self._counts
            raise SettingError(f"mean, std: {mean} and {std} numbers for images of {images.shape[1]} channels")
        return images.to(torch.float32, copy=True).mul_(self._scale).add_(self._shift)


_normaliser = functools.lru_cache(Normaliser)  # on a GPU each has copies that the host waits for


@dataclass(frozen=True)
class Driver:
    """An NVIDIA driver that is loaded."""

    version: str  # such as "535.104.05"; "" where the driver does not say it
    num_gpus: int  # from 1


def read_driver(root: Path = Path("/")) -> Driver | None:
    """Read what the kernel shows of the driver in `root`'s /proc and /dev; None if there is no GPU.

    The files are those of the driver's README, chapter "Using the /proc File System Interface".
    """
    proc = root / "proc/driver/nvidia"
    num_gpus = len(list((root / "dev").glob("nvidia[0-9]*"))) or len(list(proc.glob("gpus/*")))
    if not num_gpus:
        return None
    try:
        text = (proc / "version").read_text(errors="replace")
    except OSError:
        text = ""
    version = re.search(r"^NVRM version:.*?\s(\d{3,}(\.\d+)+)\s", text, re.MULTILINE)
    return Driver(version[1] if version else "", num_gpus)


def dali_extra(driver: Driver | None) -> str:
    """Return the extra of pyproject.toml whose DALI runs with a driver: that of CUDA 12 with old ones."""
    major = int(driver.version.partition(".")[0] or 0) if driver else 0
    return "dali12" if 0 < major < _BUILDS[13][0] else "dali"


def explain_unseen_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """Say why torch sees no GPU where the driver has some, and what helps.

    None where torch sees one, where there is none, and where CUDA_VISIBLE_DEVICES hides all: CUDA ends its list at the
    first item that is neither a number nor a UUID, such as -1, or Slurm's NoDevFiles for a job without GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible)
    if hidden or torch.cuda.is_available():
        return None
    driver = read_driver(root)
    if driver is None:
        return None
    name = f"NVIDIA's driver {driver.version}".rstrip()
    reason = _reason(driver, torch.__version__, torch.version.cuda)
    return f"{name} has {driver.num_gpus} GPU(s) here, and torch sees none of them: {reason}"


def _reason(driver: Driver, version: str, cuda: str | None) -> str:
    """Say why torch sees no GPU.

    Args:
        driver: The driver that is loaded.
        version: Version of torch.
        cuda: The version of CUDA that torch was built for; None for a build without CUDA.
    """
    major = int(driver.version.partition(".")[0] or 0)
    if cuda is None:
        return f"torch {version} is a build without CUDA; {_build_for(major, version)}"
    built = f"torch {version} is built for CUDA {cuda}"
    oldest, _ = _BUILDS.get(int(cuda.partition(".")[0]), (0, ""))
    if major and major < oldest:
        return f"{built}, which needs driver {oldest} or newer; {_build_for(major, version)}"
    return (
        f"{built}, and says: {_error()} (A container shows GPUs only when started with --nv or --gpus all, a scheduler "
        "only to a job that asked for them)"
    )


def _build_for(major: int, version: str) -> str:
    """Say which wheel to install. `major`: of the driver's version, 0 where it is not known."""
    builds = [build for oldest, build in _BUILDS.values() if not major or major >= oldest]
    if not builds:
        oldest = min(oldest for oldest, _ in _BUILDS.values())
        return f"no build works with a driver as old as this one; have it updated to {oldest} or newer"
    # For an unknown driver the build for old ones: newer drivers run it as well.
    build = builds[0] if major else builds[-1]
    wheel = f"torch=={version.partition('+')[0]}+{build}"  # without the build, pip keeps a torch of the same version
    return f"install one for this driver: pip install {wheel} --index-url {_WHEELS}/{build}"


def _error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip()
    return "nothing"
