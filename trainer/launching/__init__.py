"""Batch scripts that stage a data set, train a recipe, and continue: by Slurm, PBS, mpirun or torchrun."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from datapipe.checks import check_apart, check_name, checked_int
from datapipe.cluster import parse_time_limit
from datapipe.console import format_count, printable
from datapipe.errors import SettingError
from datapipe.fsio import atomic_write, make_folder

from ..config.recipe import load_recipe
from ..ranks.limits import SHORTEST_S, parse_limit
from ..reporting.runlog import FAILED_HOSTS

SCHEDULERS = "slurm", "pbs", "mpi", "local"
_MAX_RESTARTS = 20
# What a shell, a scheduler or an editor would act on, or hide; also what reverses text, and bytes that are not UTF-8.
_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_SUBMIT = {"slurm": "sbatch", "pbs": "qsub", "local": "bash"}


@dataclass(frozen=True)
class Launch:
    """What a script trains, and on what. Raises SettingError for a setting out of its range.

    Attributes:
        recipe: Name of a built-in recipe, or path of a .toml file.
        data: Packed data set: the folder that holds train/ and val/.
        out: Folder of the run.
        scheduler: Scheduler of the script: slurm, pbs, mpi or local.
        nodes: Number of nodes, from 1.
        gpus_per_node: Number of GPUs of each node, each of which has a rank; 0: one rank per node, on the processor.
        stage: Folder on each node's own disk, to which the data set is staged first; None: it is not staged.
        time: Longest time of the job, as Slurm writes it, such as 4:00:00; None: the site's default.
        max_restarts: Number of times that the script continues by itself: when the time is over, and with Slurm also
            when a rank has failed, without its node.
        changes: Settings of the recipe to change, such as "train.epochs=3".
        local_checkpoints: Folder on each node's own disk, to which checkpoints are written first; None: they are not.
        options: Further options of sbatch or qsub, such as "--account=abc".
        path: Folder of the programs, for the script's PATH; None: PATH as it is where the script is submitted.
    """

    recipe: str
    data: Path
    out: Path
    scheduler: str = "slurm"
    nodes: int = 1
    gpus_per_node: int = 0
    stage: Path | None = None
    time: str | None = None
    max_restarts: int | None = None
    changes: tuple[str, ...] = ()
    local_checkpoints: Path | None = None
    options: tuple[str, ...] = ()
    path: Path | None = None

    def __post_init__(self) -> None:
        self._check_characters()
        check_name("--scheduler", self.scheduler, SCHEDULERS)
        checked_int("--nodes", self.nodes, 1)
        checked_int("--gpus-per-node", self.gpus_per_node, 0)
        if self.max_restarts is not None:
            checked_int("--max-restarts", self.max_restarts, 0)
        if self.time is not None:
            parse_limit("--time", self.time)
        if self.scheduler == "local" and self.nodes != 1:
            raise SettingError(f"--nodes {self.nodes}: is 1 with --scheduler local; for hosts without a scheduler, mpi")
        if self.scheduler in ("slurm", "pbs"):
            if re.search(r"[\s%'\"\\]", str(self.out)):
                raise SettingError(
                    f"--out {self.out}: {self.scheduler}'s options take no blanks, quotes or % in a path"
                )
        elif self.options or self.max_restarts is not None:
            name = "--option" if self.options else "--max-restarts"
            raise SettingError(f"{name}: has no meaning with --scheduler {self.scheduler}")
        for option in self.options:
            if not option.startswith("-"):
                raise SettingError(f"--option {option!r}: begins with a hyphen, such as --option=--account=abc")

        check_apart("--out", self.out, "--data", self.data)
        for option, folder in (("--stage", self.stage), ("--local-checkpoints", self.local_checkpoints)):
            if folder is not None:
                check_apart(option, folder, "--data", self.data)
                check_apart(option, folder, "--out", self.out)

    def _check_characters(self) -> None:
        """Raise SettingError for a text with control characters: a line break in a comment would begin a command."""
        texts = [("RECIPE", self.recipe), ("--data", self.data), ("--out", self.out), ("--stage", self.stage)]
        texts += [("--time", self.time), ("--local-checkpoints", self.local_checkpoints), ("PATH", self.path)]
        texts += [("--set", change) for change in self.changes] + [("--option", option) for option in self.options]
        for name, text in texts:
            if text is not None and (character := _CONTROL.search(str(text))):
                raise SettingError(
                    f"{name} {printable(str(text))}: has the control character {printable(character[0])}, which no "
                    "script may contain; allowed: a text, or a path, without it"
                )

    @property
    def script(self) -> Path:
        """Where the script is written: in the run's folder."""
        return self.out / f"launch.{ {'slurm': 'sbatch', 'pbs': 'pbs'}.get(self.scheduler, 'sh') }"

    def render(self) -> str:
        """Return the script's text. Raises SettingError for a recipe that is wrong, or that the ranks cannot share."""
        seconds = parse_time_limit(self.time) if self.time else 0
        where = [*([] if self.scheduler == "local" else [format_count(self.nodes, "node")])]
        where += [format_count(self.gpus_per_node, "GPU") if self.gpus_per_node else "the processor"]
        values: dict[str, Any] = {
            **vars(self),
            "max_restarts": _MAX_RESTARTS if self.max_restarts is None else self.max_restarts,
            "name": re.sub(r"[^A-Za-z0-9_.-]", "_", Path(self.recipe).stem)[:15],  # what PBS takes at most
            "size": " with ".join(where) + (" each" if self.nodes > 1 and self.gpus_per_node else ""),
            "ranks_per_node": max(1, self.gpus_per_node),
            "batch_size": self._read_batch_size(),
            "failed_hosts": shlex.quote(str(self.out / FAILED_HOSTS)),
            "data": shlex.quote(str(self.data)),
            "stage": self.stage and shlex.quote(str(self.stage)),
            "path": self.path and shlex.quote(str(self.path)),
            "run": shlex.quote(str(self.out)),
            "script": shlex.quote(str(self.script)),
            "log": self.out / ("slurm-%j.log" if self.scheduler == "slurm" else ""),
            "finds": "finds the copies, and " if self.stage else "",
            "seconds": seconds,
            "shortest": SHORTEST_S,
            "walltime": f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}",
            "arguments": shlex.join(self._arguments()),
        }
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("trainer.launching", "."),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        return environment.get_template(f"{self.scheduler}.jinja").render(values)

    def _read_batch_size(self) -> int:
        """Return the recipe's global batch size. Raises SettingError where the ranks cannot share it equally."""
        size, ranks = load_recipe(self.recipe, self.changes).train.batch_size, self.nodes * max(1, self.gpus_per_node)
        if size % ranks:
            given = f"--nodes {self.nodes}" + (f" --gpus-per-node {self.gpus_per_node}" if self.gpus_per_node else "")
            raise SettingError(
                f"{given}: are {ranks} ranks, and train.batch_size = {size} is not a multiple of that; allowed: as "
                "many as share it equally, or another one by --set train.batch_size=N"
            )
        return size

    def _arguments(self) -> list[str]:
        device = [] if self.gpus_per_node else ["--device", "cpu"]
        data = str(self.stage or self.data)
        local = ["--local-checkpoints", str(self.local_checkpoints)] if self.local_checkpoints else []
        changes = [word for change in self.changes for word in ("--set", change)]
        return [self.recipe, "--data", data, "--out", str(self.out), "--resume", *device, *local, *changes]

    def write(self, overwrite: bool = False) -> Path:
        """Write the script; return its path.

        Args:
            overwrite: Whether another script may be there, which somebody may have edited.

        Raises:
            SettingError: There is one; there is no data set, or OUT is a file; or as `render`. Nothing is written then.
            OSError: It cannot be written.
        """
        text = self.render().encode()
        for split in ("train", "val"):
            if not (self.data / split).is_dir():
                raise SettingError(
                    f"--data {self.data}: {split}/ is not there, as seen from here; allowed: the folder of a packed "
                    "data set, which holds train/ and val/, on a filesystem that all nodes share"
                )
        if self.out.exists() and not self.out.is_dir():
            raise SettingError(f"--out {self.out}: is a file; allowed: a folder, or what does not exist yet")
        make_folder(self.out)
        if not overwrite and self.script.exists() and self.script.read_bytes() != text:
            raise SettingError(f"{self.script}: is another script, perhaps edited; --overwrite replaces it")
        with atomic_write(self.script) as file:
            file.write(text)
        return self.script

    def submit(self) -> int:
        """Hand the written script to sbatch or qsub; with the scheduler "local", run it.

        Returns:
            The exit code of sbatch, qsub or the script.

        Raises:
            SettingError: That program is not here, or the scheduler is "mpi", whose hosts the script does not know.
        """
        program = _SUBMIT.get(self.scheduler)
        if program is None:
            raise SettingError(f"--submit: run it by  bash {self.script} --hostfile hosts")
        try:
            return subprocess.run([program, str(self.script)], check=False).returncode
        except FileNotFoundError as error:
            raise SettingError(
                f"--submit: there is no {program} here; on a login node, {program} {self.script}"
            ) from error
