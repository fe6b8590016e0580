"""How a source is listed: what the user says of it, and what was left out."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..console import format_count, printable
from ..errors import SettingError, SourceError
from ..splits import TEST, TRAIN, VAL, SplitRule, split_words

logger = logging.getLogger(__name__)

HIDDEN = "hidden, or a system's"
EXTENSIONS = (".jpg", ".jpeg", ".png")
# What systems leave beside images without asking, in lower case: those of macOS, Windows, Linux, Synology, QNAP. All
# that begins with a dot is hidden, too.
JUNK = {"__macosx", "network trash folder", "temporary items", "icon\r"}
JUNK |= {"$recycle.bin", "recycler", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini"}
JUNK |= {"lost+found", "__pycache__", "@eadir", "@tmp", "#recycle", "#snapshot", "~snapshot"}
JUNK |= {"@recycle", "@recently-snapshot", "@__thumb", "@sharebin"}


def is_image(name: str) -> bool:
    """Whether a file is named as an image."""
    return name.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or the work of a system."""
    return name.startswith(".") or name.lower() in JUNK


def is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder, or leads to one; not if it is a link in a circle, say, which opening it reports."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_in_hidden(path: str) -> bool:
    """Whether a path in an archive has a hidden part."""
    return any(is_hidden(part) for part in path.split("/") if part not in (".", ".."))


class LeftOut:
    """What a listing leaves out: how much, and the first, for each reason. Threads may add at the same time."""

    def __init__(self) -> None:
        self._reasons: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def add(self, first: str, reason: str, count: int = 1) -> None:
        """Count what is left out.

        Args:
            first: The path of the first.
            reason: What each of them is.
            count: How many there are.
        """
        with self._lock:
            before, was_first = self._reasons.get(reason, (0, first))
            self._reasons[reason] = before + count, min(first, was_first)

    def add_members(self, archive: str, others: Iterable[tuple[str, str]]) -> None:
        """Add members of an archive: what each is, and its name."""
        for reason, name in others:
            self.add(f"{archive}: {name}", reason)

    def lines(self) -> list[str]:
        """Say what is left out, in a line per reason."""
        return [
            f"{format_count(count, 'entry', 'entries')} ({reason}){', the first' * (count > 1)}: {printable(first)}"
            for reason, (count, first) in sorted(self._reasons.items())
        ]


@dataclass(frozen=True)
class Listing:
    """How to list a source.

    Attributes:
        outside: Follow links and paths that lead out of the source.
        rule: How splits are told apart.
        labels: What labels are, one of `names.LABELS`.
        left_out: What was left out so far.
    """

    outside: bool = False
    rule: SplitRule = field(default_factory=SplitRule)
    labels: str = "auto"
    left_out: LeftOut = field(default_factory=LeftOut)

    def divide(self, names: Sequence[str], source: Path) -> dict[str, list[str]]:
        """Divide names by split, "train" and "val": see `SplitRule`. Without a val split, a test split is val."""
        if not self.rule.patterns and not any(map(split_words, names)):
            self.rule.check_own_name(source)
        splits = self.rule.divide(names, source)
        test = splits.pop(TEST, [])
        if test and VAL in splits:
            self.left_out.add(test[0], f"of a test split, and {splits[VAL][0]} is taken for val", len(test))
        elif test:
            splits[VAL] = test
        if self.rule.patterns:
            chosen = {name for of_split in splits.values() for name in of_split}
            for name in names:
                if name not in chosen:
                    self.left_out.add(name, "not named by any --split")
        return {split: splits[split] for split in (TRAIN, VAL) if split in splits}

    def refuse_options(self, kind: str) -> None:
        """Raise SettingError if the user says what splits or labels are, for a kind that has its own."""
        for name, is_given in (("split", self.rule.patterns), ("labels", self.labels != "auto")):
            if is_given:
                raise SettingError(f"{name}: {kind} has its own; leave --{name} out, or say with --kind what is meant")

    def report(self, path: Path, strict: bool) -> None:
        """Log what was left out. Raises SourceError for it if `strict`."""
        lines = self.left_out.lines()
        for line in lines:
            logger.warning("%s: left out %s", path, line)
        if strict and lines:
            raise SourceError(f"--strict: something of it would be left out: {'; '.join(lines)}", path=path)
