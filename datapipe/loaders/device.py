"""NVIDIA's driver as the kernel shows it: what there is to say where torch sees none of its GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

# For each major version of CUDA, newest first: the oldest driver that runs it
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1), and a build of torch,
# of those that there are for 2.13 and 2.14 (https://github.com/pytorch/pytorch/issues/190355).
BUILDS = {13: (580, "cu130"), 12: (525, "cu126")}
WHEELS = "https://download.pytorch.org/whl"


@dataclass(frozen=True)
class Driver:
    """A driver that is loaded. `version`: such as "535.104.05", "" where it does not tell; `num_gpus`: from 1."""

    version: str
    num_gpus: int


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
    named = f"NVIDIA's driver {driver.version}".rstrip()
    reason = _reason(driver, torch.__version__, torch.version.cuda)
    return f"{named} has {driver.num_gpus} GPU(s) here, and torch sees none of them: {reason}"


def _reason(driver: Driver, version: str, cuda: str | None) -> str:
    """`version`, `cuda`: torch's own, and of what it was built for, None for a build without CUDA."""
    major = int(driver.version.partition(".")[0] or 0)
    if cuda is None:
        return f"torch {version} is a build without CUDA; {_build_for(major, version)}"
    built = f"torch {version} is built for CUDA {cuda}"
    oldest, _ = BUILDS.get(int(cuda.partition(".")[0]), (0, ""))
    if major and major < oldest:
        return f"{built}, which needs driver {oldest} or newer; {_build_for(major, version)}"
    return (
        f"{built}, and says: {_error()} (A container shows GPUs only when started with --nv or --gpus all, a scheduler "
        "only to a job that asked for them)"
    )


def _build_for(major: int, version: str) -> str:
    """The wheel to install. `major`: of the driver's version, 0 where it is not known."""
    builds = [build for oldest, build in BUILDS.values() if not major or major >= oldest]
    if not builds:
        oldest = min(oldest for oldest, _ in BUILDS.values())
        return f"no build works with a driver as old as this one; have it updated to {oldest} or newer"
    # For an unknown driver the build for old ones: newer drivers run it as well.
    build = builds[0] if major else builds[-1]
    wheel = f"torch=={version.partition('+')[0]}+{build}"  # without the build, pip keeps a torch of the same version
    return f"install one for this driver: pip install {wheel} --index-url {WHEELS}/{build}"


def _error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip()
    return "nothing"
