"""What bounds a run, in words, and what to change. Pure."""

from __future__ import annotations

from typing import NamedTuple

WORTH = 0.1  # the share of the time from which on it is worth to change something
FULL = 0.9  # the share of the memory from which on a larger batch hardly fits
NAMES = {"data": "waiting for data", "host": "the host", "compute": "computing", "communication": "communication"}


class Figures(NamedTuple):
    """What was measured of some steps.

    Attributes:
        shares: of the time, by row of a trace; means over the ranks.
        step_s: how long a step took, in seconds.
        images_per_s: over all ranks.
        memory_share: of the device's memory, at most; on the rank that had the least left.
        device: "cuda" or "cpu".
        world_size: how many ranks.
        batch_size: per rank.
        precision: bf16, fp16, tf32 or off.
        channels_last: whether images lie in memory pixel by pixel.
        is_compiled: whether the network is.
        threads: that compute, per rank.
        cores: that a rank may use.
        loader_threads: that decode, per rank.
        backend: of the loader.
        is_staged: whether data is read from a copy on the node's own disk.
    """

    shares: dict[str, float]
    step_s: float
    images_per_s: float
    memory_share: float
    device: str
    world_size: int
    batch_size: int
    precision: str
    channels_last: bool
    is_compiled: bool
    threads: int
    cores: int
    loader_threads: int
    backend: str
    is_staged: bool


def find_bound(figures: Figures) -> str:
    """Return what bounds the run: that of data, host and communication that takes most, if it is much; or compute."""
    most = max(("data", "host", "communication"), key=lambda row: figures.shares[row])
    return most if figures.shares[most] >= WORTH else "compute"


def advise(figures: Figures) -> list[str]:
    """Return the verdict and the advice: the first line says what bounds the run, each other one what may help."""
    bound = find_bound(figures)
    share = figures.shares[bound]
    lines = [f"{NAMES[bound]} bounds this run: {share:.0%} of each step of {1000 * figures.step_s:.1f} ms"]
    lines += _ADVICE[bound](figures)
    if figures.memory_share >= FULL:
        lines.append(f"memory: {figures.memory_share:.0%} is in use, so that a larger batch hardly fits")
    return lines


def _advise_data(figures: Figures) -> list[str]:
    lines = []
    cores = figures.cores
    if figures.backend != "resident":
        lines.append("images of one size that fit into memory: data.backend = 'resident' decodes them once")
    if figures.loader_threads < cores:
        lines.append(f"data.threads: {figures.loader_threads} of {cores} cores of this rank decode")
    if figures.device == "cuda" and figures.backend == "cpu":
        lines.append("data.backend = 'dali' decodes on the GPU")
    if not figures.is_staged:
        lines.append("--stage reads from the node's own disk; `datapipe bench` tells what the loader alone can do")
    lines.append("`datapipe convert --resize` stores images no larger than they are used")
    return lines


def _advise_host(figures: Figures) -> list[str]:
    lines = [] if figures.is_compiled else ["train.compile = true: fewer and larger kernels to start"]
    lines.append(
        f"train.batch_size: {figures.batch_size} images per rank; more of them share what a step costs the host"
    )
    return lines


def _advise_communication(figures: Figures) -> list[str]:
    total = figures.batch_size * figures.world_size
    lines = [f"train.batch_size: {total} on {figures.world_size} ranks; a larger one communicates as much less often"]
    lines.append("GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: whether the ranks use the fastest network")
    return lines


def _advise_compute(figures: Figures) -> list[str]:
    lines = []
    if figures.precision == "off":
        lines.append("train.precision = 'bf16', where the device computes natively in it")
    if not figures.channels_last:
        lines.append("train.channels_last = true: faster convolutions")
    if not figures.is_compiled:
        lines.append("train.compile = true: fused kernels")
    if figures.device == "cpu" and figures.threads < figures.cores:
        lines.append(f"OMP_NUM_THREADS: {figures.threads} of {figures.cores} cores of this rank compute")
    if figures.device == "cuda" and figures.memory_share < 0.5:
        lines.append(
            f"train.batch_size: {figures.memory_share:.0%} of the memory is in use; more fill the device better"
        )
    lines.append("otherwise a smaller network or input, or more devices: little is left to take from elsewhere")
    return lines


_ADVICE = {
    "data": _advise_data,
    "host": _advise_host,
    "communication": _advise_communication,
    "compute": _advise_compute,
}
