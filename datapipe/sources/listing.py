"""How a source is listed: what the user says of it, and what was left out."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..console import format_count, printable
from ..errors import SettingError, SourceError
from ..fsio import atomic_write, side_by_side
from ..split_names import TEST, TRAIN, VAL, split_words
from ..splits import SplitRule
from .file_names import is_harmless, is_hidden, is_image, is_partial

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
HIDDEN = "hidden, or a system's"
PARTIAL = "of a transfer that has not ended, so images may be missing: run that again, or remove them"
_HUB = ".cache", "huggingface"  # what `hf download --local-dir` writes: notes of its own, and files that are not whole
_NOT_NAMED = "not named by any --split"
_LISTERS = 32
_NAMED = 10  # paths that are named for each reason


def is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder, or leads to one; not if it is a link in a circle, say, which opening it reports."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _name(path: str) -> str:
    """Return the last part of a path, of a file or of an archive and a member."""
    return path.rpartition("/")[2].rpartition(": ")[2]


def folders_in(path: Path) -> list[str]:
    """List the folders in a folder, sorted, without those that are hidden."""
    with os.scandir(path) as entries:
        named = [entry for entry in entries if not is_hidden(entry.name) and not is_image(entry.name)]
        return sorted(entry.name for entry in named if is_folder(entry))


def list_at_once(function: Callable[[_Item], _Result], files: Iterable[_Item]) -> list[_Result]:
    """Return what `function` says of each file, of many at once: that hides a shared filesystem's latency."""
    with ThreadPoolExecutor(_LISTERS) as pool:
        return list(pool.map(function, files))


class LeftOut:
    """What a listing leaves out: the paths, by the reason. Threads may add at the same time."""

    def __init__(self) -> None:
        self._reasons: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def add(self, path: str, reason: str) -> None:
        """Add what is left out: its path, and what it is; what is called as of a transfer is PARTIAL."""
        self.add_all([path], reason)

    def add_all(self, paths: Iterable[str], reason: str) -> None:
        """Add several of one reason. Those that are named as harmless files are passed over, unless it is HIDDEN."""
        self._add((path for path in paths if reason == HIDDEN or not is_harmless(_name(path))), reason)

    def _add(self, paths: Iterable[str], reason: str) -> None:
        with self._lock:
            for path in paths:
                self._reasons.setdefault(PARTIAL if is_partial(_name(path)) else reason, set()).add(path)

    def add_members(self, archive: str, others: Iterable[tuple[str, str]]) -> None:
        """Add members of an archive: what each is, and its name."""
        for reason, name in others:
            self.add(f"{archive}: {name}", reason)

    def add_hidden_member(self, archive: str, name: str) -> None:
        """Add a member of an archive that is hidden, unless it is harmless."""
        if not is_harmless(_name(name)):
            self.add(f"{archive}: {name}", HIDDEN)

    def add_entries(self, folder: Path, reason: str, known: Collection[str] = (), hidden_only: bool = False) -> None:
        """Add what lies in a folder, except what is known, or harmless.

        Args:
            folder: The folder.
            reason: Description of the entries, if they are not hidden.
            known: Names of the entries that are taken, or counted elsewhere.
            hidden_only: Whether to add only entries that are hidden.
        """
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name in known or (hidden_only and not is_hidden(name)):
                    continue
                if name == _HUB[0] and is_folder(entry) and os.listdir(entry.path) == [_HUB[1]]:
                    self._add(map(str, Path(entry.path).glob("**/*.incomplete")), PARTIAL)
                elif not is_harmless(name) or is_folder(entry):
                    self._add([os.path.join(folder, name)], HIDDEN if is_hidden(name) else reason)

    def add_unnamed(self, root: Path, names: Iterable[tuple[str, str]], reason: str) -> None:
        """Add what nothing names and lies beside what is named, or beside a folder above that: one scan per folder.

        Args:
            root: The folder that the names begin in.
            names: The folder, below `root`, and the name of each.
            reason: Description of the entries that nothing names.
        """
        known: dict[str, set[str]] = {"": set()}
        for folder, name in names:
            if folder in known:  # most are in a folder that was seen before
                known[folder].add(name)
            elif not os.path.isabs(folder) and folder.split("/", 1)[0] != "..":
                known[folder] = {name}
                while folder:
                    folder, name = os.path.split(folder)
                    known.setdefault(folder, set()).add(name)

        def add_folder(folder: str) -> None:
            try:
                self.add_entries(root / folder, reason, known[folder])
            except (FileNotFoundError, NotADirectoryError):
                pass  # reading its images reports it
            except OSError as error:
                raise SourceError(f"cannot be listed: {error.strerror}", path=root / folder) from error

        side_by_side(add_folder, sorted(known))

    def paths(self, source: Path) -> dict[str, list[str]]:
        """Return the paths that were left out, sorted, by reason. Those in the source begin below it."""
        above = f"{source if source.is_dir() else source.parent}/"
        return {
            reason: sorted({path.removeprefix(above) for path in paths})
            for reason, paths in sorted(self._reasons.items())
            if paths
        }

    def write(self, source: Path, file: Path) -> None:
        """Write all that is left out of a source to a file, as lines of JSON, sorted by reason and path."""
        with atomic_write(file, alone=False) as out:
            for reason, paths in self.paths(source).items():
                out.writelines(f"{json.dumps({'reason': reason, 'path': path})}\n".encode() for path in paths)

    def lines(self, source: Path) -> list[str]:
        """Say what is left out, in a line per reason."""
        return [
            f"{format_count(len(paths), 'entry', 'entries')} ({reason}): {printable(', '.join(paths[:_NAMED]))}"
            + (f" and {format_count(len(paths) - _NAMED, 'other')} (--left-out FILE lists all)" * (len(paths) > _NAMED))
            for reason, paths in self.paths(source).items()
        ]


@dataclass(frozen=True)
class Listing:
    """How to list a source.

    Attributes:
        outside: Whether to follow links and paths that lead out of the source.
        rule: Rule by which splits are told apart.
        labels: Meaning of the labels, one of `names.LABELS`.
        label_column: The column of a table's labels; None: as it is usually called.
        path_column: The column of a table's paths of images; None: as it is usually called.
        left_out: Record of what was left out so far.
    """

    outside: bool = False
    rule: SplitRule = field(default_factory=SplitRule)
    labels: str = "auto"
    label_column: str | None = None
    path_column: str | None = None
    left_out: LeftOut = field(default_factory=LeftOut)

    def bounds(self, source: Path) -> str | None:
        """Return the folder that links must not leave; None: they may lead anywhere (see `paths`)."""
        return None if self.outside or not source.is_dir() else str(source)

    def divide(self, names: Sequence[str], source: Path) -> dict[str, list[str]]:
        """Divide names by split, "train" and "val": see `SplitRule`. Without a val split, a test split is val."""
        if not self.rule.patterns and not any(map(split_words, names)):
            self.rule.check_own_name(source)
        return self.choose(self.rule.divide(names, source), names)

    def choose(
        self,
        splits: Mapping[str, list[str]],
        names: Sequence[str],
        unlabelled: Collection[str] = (),
        keep_test: bool = False,
        left_out: Callable[[str], Iterable[str]] = lambda name: [name],
    ) -> dict[str, list[str]]:
        """Return the names of "train" and "val" of the splits that there are, and count what is left out.

        Args:
            splits: Names of each split, as `SplitRule.divide` returned them.
            names: All names that were divided.
            unlabelled: Names that have no labels: a test split of them is left out.
            keep_test: Whether a test split that takes the place of val keeps its own name.
            left_out: Function that lists what of a name is left out.
        """

        def leave_out(names: Iterable[str], reason: str) -> None:
            for name in names:
                self.left_out.add_all(left_out(name), reason)

        chosen = dict(splits)
        test = chosen.pop(TEST, [])
        if test and VAL in chosen:
            leave_out(test, f"of a test split, and {chosen[VAL][0]} is taken for val")
            test = []
        if bare := [name for name in test if name in unlabelled]:
            leave_out(bare, "of a test split, without labels")
            test = [name for name in test if name not in unlabelled]
        if test:
            chosen[TEST if keep_test else VAL] = test
        if self.rule.patterns:
            named = {name for of_split in chosen.values() for name in of_split}
            leave_out((name for name in names if name not in named), _NOT_NAMED)
        return {split: chosen[split] for split in (TRAIN, VAL, TEST) if split in chosen}

    def count_beside(self, source: Path, splits: Mapping[str, Sequence[Path]]) -> None:
        """Count what is hidden in a source, and what lies beside the folders of splits if the user has named them."""
        self.left_out.add_entries(source, HIDDEN, hidden_only=True)
        chosen = [os.path.relpath(folder, source) for folders in splits.values() for folder in folders]
        if self.rule.patterns and "." not in chosen:
            self.left_out.add_unnamed(source, map(os.path.split, chosen), _NOT_NAMED)

    def check_columns(self, kind: str, path: Path) -> None:
        """Raise SettingError if the user names a column that a source of a kind does not have."""
        both = ("label", self.label_column, ["csv", "parquet", "webdataset"]), ("path", self.path_column, ["csv"])
        for name, column, kinds in both:
            if column is not None and kind not in kinds:
                advice = "; if a table there has the labels, add --kind csv" if kind == "imagefolder" else ""
                raise SettingError(f"{name}_column: it is for {', '.join(kinds)}, and {path} is {kind}{advice}")

    def refuse_options(self, kind: str) -> None:
        """Raise SettingError if the user says what splits or labels are, for a kind that has its own."""
        for name, is_given in (("split", self.rule.patterns), ("labels", self.labels != "auto")):
            if is_given:
                raise SettingError(f"{name}: {kind} has its own; leave --{name} out, or say with --kind what is meant")

    def report(self, path: Path, strict: bool) -> None:
        """Log what was left out. Raises SourceError for it if `strict`."""
        lines = self.left_out.lines(path)
        for line in lines:
            logger.warning("%s: left out %s", path, line)
        if strict and lines:
            raise SourceError(f"--strict: something of it would be left out: {'; '.join(lines)}", path=path)
