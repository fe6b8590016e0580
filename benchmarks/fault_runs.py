"""A run that trains on two ranks: its processes, what it says, and which of its checkpoints a restart could use."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ROOT, shown
from benchmarks.testbed import on_host

TAG = "FAULT_RUN"  # the variable by which processes of a run are found, whoever their parent is by then
RANK_NAMES = "RANK", "LOCAL_RANK", "NODE_RANK"  # as torchrun, and as Lightning tell it: the first that is there
POLL_S = 0.1
CHECKPOINTS = "*.pt", "*.ckpt", "checkpoints/checkpoint_*"  # those of ours and of a plain loop; Lightning; accelerate
BLAME = re.compile(r"\brank\s*[:=]?\s*1\b", re.IGNORECASE)
# Where a rank says of itself which one it is: before an exception, in our log and last line, and before a signal.
SPEAKER = re.compile(r"\[rank1\]:|\brank 1 [A-Z]+ (rank 1:)?|error: rank 1:|\[rank: 1\] Received")
OTHERS_OF_TORCHRUN = re.compile(r"^Failures:.*?^Root Cause", re.MULTILINE | re.DOTALL)
ROW_OF_TORCHRUN = re.compile(r"^ *host +: (\S+)\n +rank +: ", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """What is started on a host: 1 or 2 of `network`; without one, on this machine."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    host: int = 1
    network: str = ""


class Run:
    """Processes that train, with all that they start. At the end of the block none of them is left.

    Args:
        commands: What to start.
        folder: An empty folder, for the logs.
        out: Where it writes its checkpoints.
        environment: Variables for all of it.
    """

    def __init__(self, commands: Sequence[Command], folder: Path, out: Path, environment: Mapping[str, str]) -> None:
        self._commands, self._out, self._tag = commands, out, uuid.uuid4().hex
        self.network = commands[0].network
        self._logs = [folder / f"log-{number}.txt" for number in range(len(commands))]
        self._environment = os.environ | environment | {TAG: self._tag}
        self._said_before = [0] * len(commands)

    def __enter__(self) -> Run:
        self._children = [self._start(*pair) for pair in zip(self._commands, self._logs, strict=True)]
        return self

    def _start(self, command: Command, log: Path) -> subprocess.Popen:
        words = [*(on_host(command.network, command.host) if command.network else ()), *command.words]
        variables = self._environment | command.environment
        with log.open("wb") as output:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=variables
            )

    def __exit__(self, *_exc: object) -> None:
        while pids := self.processes():
            for pid in pids:
                send(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        for child in self._children:
            child.wait()

    @property
    def launchers(self) -> list[int]:
        return [child.pid for child in self._children]

    def processes(self) -> dict[int, int | None]:
        """Return the living processes, each with the rank that it is, or None."""
        # Of a process that has just been started, the kernel does not tell the variables yet.
        pids: dict[int, int | None] = {child.pid: None for child in self._children if child.poll() is None}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended meanwhile
                pairs = (entry.partition("=") for entry in path.read_bytes().decode(errors="replace").split("\0"))
                variables = {name: value for name, _, value in pairs}
                if variables.get(TAG) == self._tag:
                    rank = next((variables[name] for name in RANK_NAMES if name in variables), None)
                    pids[int(path.parent.name)] = None if rank is None else int(rank)
        return pids

    def ranks(self) -> list[int]:
        """Return the processes of the two ranks. That of rank 0 is the launcher, where it starts the others."""
        by_rank = {rank: pid for pid, rank in self.processes().items() if rank is not None}
        return [by_rank.get(0, self._children[0].pid), by_rank[1]]

    def wait_for(self, condition: Callable[[], object], limit_s: float) -> float | None:
        """Return after how many seconds a condition is true, or there is no process left; None: not in time."""
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < limit_s:
            if condition() or not self.processes():
                return passed_s
            time.sleep(POLL_S)
        return None

    def begin_listening(self) -> None:
        """From here on, `said` returns what is said."""
        self._said_before = [log.stat().st_size for log in self._logs]

    def said(self, is_apart: bool = False) -> str:
        """Return what was said since `begin_listening`; `is_apart`: on the first host alone."""
        parts = [log.read_bytes()[begin:] for log, begin in zip(self._logs, self._said_before, strict=True)]
        return b"".join(parts[: 1 if is_apart else None]).decode(errors="replace")

    def exit_codes(self) -> list[int | None]:
        """Return those of what was started; None: it has not ended."""
        living = self.processes()
        return [child.poll() if child.pid in living else child.wait() for child in self._children]

    def last_checkpoint(self) -> float:
        """Return when the newest checkpoint was written that can be loaded, in seconds since 1970; 0: there is none."""
        return next((written for written, path in list_checkpoints(self._out) if is_loadable(path)), 0.0)


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def find_blame(text: str) -> str:
    """Return the last line that says that it was rank 1, "" if none does.

    Of torchrun's table only the root cause counts, and any other line counts more.
    """
    text = ROW_OF_TORCHRUN.sub(r"host \1, rank ", OTHERS_OF_TORCHRUN.sub("", text))
    lines = [line.strip() for line in text.splitlines() if BLAME.search(SPEAKER.sub("", line))]
    lines.sort(key=lambda line: not line.startswith("host "))
    return lines[-1] if lines else ""


def list_checkpoints(out: Path) -> list[tuple[float, Path]]:
    """List when each checkpoint of any of the systems was written, and its path, the newest first."""
    checkpoints = []
    for pattern in CHECKPOINTS:
        for path in out.glob(pattern):
            with suppress(OSError, ValueError):  # it was replaced meanwhile, or has no files yet
                checkpoints.append((max(file.stat().st_mtime for file in files_of(path)), path))
    return sorted(checkpoints, reverse=True)


def files_of(checkpoint: Path) -> Iterator[Path]:
    yield from (path for path in checkpoint.rglob("*") if path.is_file()) if checkpoint.is_dir() else (checkpoint,)


def is_loadable(checkpoint: Path) -> bool:
    try:
        names = {path.name for path in files_of(checkpoint)}
        if checkpoint.is_dir() and not {"model.safetensors", "optimizer.bin", "random_states_1.pkl"} <= names:
            return False
        for path in files_of(checkpoint):
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                load_file(path)
            else:
                torch.load(path, map_location="cpu", weights_only=False)  # it is of our own runs
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        return False
    return True


def cell(its: Mapping[str, Any], cap_s: float) -> str:
    """Tell in a table's cell what a system did under a fault.

    Args:
        its: Of the record: what its runs have in common.
        cap_s: How long each was waited for.
    """
    number, count = its["survived"], len(its["runs"])
    if number == count:
        return "trains on" if its["usable"] else "trains on, without a new checkpoint"
    words = [f"{shown(its['gone_s'], 1)} s" if its["gone_s"] else f"> {cap_s:g} s"]
    if its["gone_s"] and its["capped"]:
        words[0] += f", but {its['capped']} of {count} > {cap_s:g} s"
    if not its["gone_s"] and its["others_gone_s"]:
        words = [f"{shown(its['others_gone_s'], 1)} s, but rank 1 > {cap_s:g} s"]
    if number:
        words[0] = f"trains on in {number} of {count} runs, else ends: {words[0]}"
    if its["exit_codes"]:
        words.append(f"exit code {', '.join(its['exit_codes'])}")
    if its["blames_rank_1"]:
        words.append("names rank 1" + (" and its host" if its["names_its_host"] else ""))
    words.append(f"{its['lost_s']['median']:.1f} s lost" if its["usable"] else "no checkpoint left")
    return "; ".join(words)
