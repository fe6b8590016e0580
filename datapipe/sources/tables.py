"""Tables that are text: their rows, and which columns hold the paths of images and their labels.

They are UTF-8, or UTF-16 with its mark. Commas separate the columns, or semicolons or tabs if the first line has no
comma. The first row names the columns, unless it is one of data: then they are called by their numbers, from 1.
"""

from __future__ import annotations

import codecs
import csv
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import IO, Any, NamedTuple

from ..console import format_some
from ..errors import SourceError
from ..split_names import is_split_name
from .file_names import TEXT_TABLES, is_hidden, is_image, may_have_labels
from .listing import Listing
from .split_columns import is_column

logger = logging.getLogger(__name__)

_SEPARATORS = {";": "semicolons", "\t": "tabs"}  # other than commas
_LONE_CR = "its lines end in a carriage return alone: write line feeds, as tr '\\r' '\\n' does"
_MAX_LINE_BYTES = 1 << 20  # a path has 4,096 at most
_BLOCKS = 8  # of a table that are read, over all of its length
_BLOCK_BYTES = 1 << 16
PATHS = ("path", "file", "filename", "image", "image_path", "file_name", "file_path", "filepath", "image_file",
         "image_name", "img", "img_path")  # fmt: skip
LABELS = ("label", "class", "target", "category")

_CountImages = Callable[[Sequence[str]], int]


def tables_in(path: Path) -> list[str]:
    """List the tables of text in a folder, sorted; none if it cannot be listed."""
    with suppress(OSError):
        names = [name for name in os.listdir(path) if name.lower().endswith(TEXT_TABLES) and not is_hidden(name)]
        return sorted(filter(may_have_labels, names))
    return []


def read_rows(table: Path, file: io.BufferedReader) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line, and the cells, of each row that is not blank. Raises SourceError."""
    lines = _lines(table, file)
    first = next(lines, "")
    separator = next((mark for mark in _SEPARATORS if mark in first and "," not in first), ",")
    if separator in _SEPARATORS:
        logger.info("%s: its columns are separated by %s", table, _SEPARATORS[separator])
    rows = csv.reader(chain([first], lines), delimiter=separator, strict=True)
    try:
        for row in filter(None, rows):
            yield rows.line_num, row
    except csv.Error as error:
        why = _LONE_CR if "\r" in first.rstrip("\r\n") else error
        raise SourceError(f"line {max(1, rows.line_num)}: {why}", path=table) from error


def _lines(table: Path, file: io.BufferedReader) -> Iterator[str]:
    is_wide = file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    source: IO[Any] = io.TextIOWrapper(file, "utf-16", newline="\n") if is_wide else file
    number = 1
    try:
        for number, line in enumerate(iter(partial(source.readline, _MAX_LINE_BYTES + 1), source.read(0)), 1):
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(f"has more than {_MAX_LINE_BYTES} bytes")
            text = line if isinstance(line, str) else line.decode("utf-8-sig" if number == 1 else "utf-8")
            if "\0" in text:
                raise ValueError("holds NUL bytes, so it is not text in UTF-8: save it as UTF-8")
            yield text
    except UnicodeDecodeError as error:
        why = f"is not text in {error.encoding}: save it as UTF-8; if in Latin-1, iconv -f latin1 -t utf-8 does so"
        raise SourceError(f"line {number}: {why}", path=table) from error
    except ValueError as error:
        raise SourceError(f"line {number}: {error}", path=table) from error


def sample_rows(path: Path) -> Iterator[list[str]]:
    """Read some rows of a table, the first included; none if it cannot be read, or is a link."""
    delimiter = ""
    with suppress(csv.Error):
        for lines in sample_lines(path):
            delimiter = delimiter or max(",;\t", key=lines[0].count)
            yield from csv.reader(lines, delimiter=delimiter)


def sample_lines(path: Path) -> Iterator[list[str]]:
    """Read some blocks of lines of a text, the first included; none if it cannot be read, or is a link."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            size = os.fstat(fd).st_size
            for start in range(0, size, max(_BLOCK_BYTES, -(-size // _BLOCKS))):
                file.seek(start)
                lines = file.read(_BLOCK_BYTES).decode("utf-8-sig" if not start else "utf-8", "replace").splitlines()
                lines = lines[start > 0 : None if start + _BLOCK_BYTES >= size else -1]
                if lines:
                    yield lines


# --- columns ----------------------------------------------------------------------------------------


class Header(NamedTuple):
    """The columns of a table."""

    names: list[str]  # lower case, each another
    path: int
    label: int | None  # None: there is none
    others: list[str]  # other candidates for these two
    is_named: bool  # whether the first row has the names

    def describe(self) -> str:
        """Say which columns are read."""
        by_number = "" if self.is_named else "its first row is one of data, and columns are called by their numbers: "
        labels = "" if self.label is None else f", and labels in {self.names[self.label]}"
        return f"{by_number}paths are in column {self.names[self.path]}{labels}"

    def describe_lack(self, label_column: str | None) -> str:
        """Say that labels are missing, and what to type."""
        usual = (label_column,) if label_column else LABELS
        left = [name for at, name in enumerate(self.names) if at != self.path and not is_column(name)]
        name = quote(left[0]) if len(left) == 1 else "NAME"
        advice = f": say which it is with --label-column {name}" if left else ": there is no other column"
        return f"names no column of labels ({', '.join(usual)}), but {', '.join(self.names)}{advice}"


def find_columns(rows: Sequence[Sequence[str]], listing: Listing, count_images: _CountImages) -> Header:
    """Return the columns of a table. Raises ValueError if none has paths, or several may have them.

    Args:
        rows: First rows of the table.
        listing: Listing with the names that the user gives.
        count_images: Function that counts those of some cells that name an image, without an extension, say.
    """
    first = [cell.strip() for cell in rows[0]] if rows else []
    names = [cell.lower() for cell in first]
    columns = [[row[at].strip() for row in rows if len(row) == len(first)] for at in range(len(first))]
    path, label = _named(listing.path_column, PATHS, names), _named(listing.label_column, LABELS, names)
    likely = [path] if path is not None else []
    if path is None:
        may_be = {at: column[1:] or column for at, column in enumerate(columns) if at != label}
        likely = [at for at, cells in may_be.items() if all(map(is_image, cells))]
        likely = likely or [at for at, cells in may_be.items() if _are_ids(cells, count_images)]
    is_usual = path is not None and names[path] in PATHS
    if not is_usual and any(_is_data(columns[at], count_images) for at in likely):
        return _by_number(first, columns, likely, listing)
    if path is None and (listing.path_column or len(likely) != 1) and not _is_list(names, listing):
        raise ValueError(_describe_doubt(names, likely, listing))
    at = path if path is not None else likely[0] if likely else 0
    others = [
        name
        for chosen, usual, place in ((listing.path_column, PATHS, path), (listing.label_column, LABELS, label))
        for name in usual
        if not chosen and name in names and place is not None and name != names[place]
    ]
    distinct = [f"{name} ({n + 1})" if (n := names[:at].count(name)) else name for at, name in enumerate(names)]
    return Header(distinct, at, label, others, True)


def _named(chosen: str | None, usual: Sequence[str], names: list[str]) -> int | None:
    """Return the column that the user names, or that is called as usual; None: there is none."""
    allowed = (chosen.strip().lower(),) if chosen else usual
    name = next((name for name in allowed if name in names), None)
    if name is not None and names.count(name) > 1:
        raise ValueError(f"names two columns {name}")
    return None if name is None else names.index(name)


def _are_ids(cells: Sequence[str], count_images: _CountImages) -> bool:
    return 0 < len(cells) == len(set(cells)) and 2 * count_images(cells) >= len(cells)  # some may be missing


def _is_data(column: Sequence[str], count_images: _CountImages) -> bool:
    """Whether the first cell of a column of paths is one of them, and not its name."""
    first, *below = column
    return is_image(first) or (not (below and all(map(is_image, below))) and count_images([first]) > 0)


def _is_list(names: Sequence[str], listing: Listing) -> bool:
    """Whether a table is a list of images, such as those of a test split, whose labels are not told."""
    return len(names) == 1 and not listing.path_column and names[0].isidentifier()


def _describe_doubt(names: Sequence[str], likely: Sequence[int], listing: Listing) -> str:
    if listing.path_column:
        return f"names no column of paths ({listing.path_column.strip().lower()}), but {', '.join(names) or 'none'}"
    if len(likely) > 1:
        which = format_some([names[at] for at in likely])
        return f"{which} may hold the paths: say which it is with --path-column {quote(names[likely[0]])}"
    advice = "; say which it is with --path-column NAME"
    if len(names) == 1:
        advice = "; commas, semicolons or tabs must separate the columns"
    return f"names no column of paths ({', '.join(PATHS)}), but {', '.join(names) or 'none'}{advice}"


def _by_number(first: list[str], columns: list[list[str]], likely: list[int], listing: Listing) -> Header:
    """Return the columns of a table whose first row is one of data."""
    names = [str(number) for number in range(1, len(first) + 1)]
    path, label = (
        _numbered(option, column, first, likely[0])
        for option, column in (("path", listing.path_column), ("label", listing.label_column))
    )
    path = likely[0] if path is None and len(likely) == 1 else path
    left = [
        at
        for at, column in enumerate(columns)
        if at != path and any(column) and not all(is_split_name(cell) for cell in column)
    ]
    label = left[0] if label is None and len(left) == 1 else label
    for option, place, may_be in (("path", path, likely), ("label", label, left)):
        if place is None and may_be:
            which = " and ".join(names[at] for at in may_be)
            raise ValueError(
                f"is a row of data, not of names ({', '.join(first)}), and columns {which} may hold the {option}s: say "
                f"which with --{option}-column {names[may_be[-1]]}"
            )
    assert path is not None
    return Header(names, path, label, [], False)


def _numbered(option: str, chosen: str | None, first: list[str], example: int) -> int | None:
    if chosen is None:
        return None
    if not (chosen.isdecimal() and 1 <= int(chosen) <= len(first)):
        at = first.index(chosen) if chosen in first else example
        raise ValueError(
            f"is a row of data, not of names ({', '.join(first)}), so columns are called by their numbers: name "
            f"that of {option}s with --{option}-column NUMBER, such as {at + 1} for {first[at]}"
        )
    return int(chosen) - 1
