"""The rows of a table that is text: UTF-8, or UTF-16 with its mark.

Commas separate the columns, or semicolons or tabs if the first line has no comma.
"""

from __future__ import annotations

import codecs
import csv
import io
import logging
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from ..errors import SourceError

logger = logging.getLogger(__name__)

SEPARATORS = {";": "semicolons", "\t": "tabs"}  # other than commas
LONE_CR = "its lines end in a carriage return alone: write line feeds, as tr '\\r' '\\n' does"
MAX_LINE_BYTES = 1 << 20  # a path has 4,096 at most


def read_rows(table: Path, file: io.BufferedReader) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line, and the cells, of each row that is not blank. Raises SourceError."""
    lines = _lines(table, file)
    first = next(lines, "")
    separator = next((mark for mark in SEPARATORS if mark in first and "," not in first), ",")
    if separator in SEPARATORS:
        logger.info("%s: its columns are separated by %s", table, SEPARATORS[separator])
    rows = csv.reader(chain([first], lines), delimiter=separator, strict=True)
    try:
        for row in filter(None, rows):
            yield rows.line_num, row
    except csv.Error as error:
        why = LONE_CR if "\r" in first.rstrip("\r\n") else error
        raise SourceError(f"line {max(1, rows.line_num)}: {why}", path=table) from error


def _lines(table: Path, file: io.BufferedReader) -> Iterator[str]:
    is_wide = file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    source: IO[Any] = io.TextIOWrapper(file, "utf-16", newline="\n") if is_wide else file
    number = 1
    try:
        for number, line in enumerate(iter(partial(source.readline, MAX_LINE_BYTES + 1), source.read(0)), 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"has more than {MAX_LINE_BYTES} bytes")
            text = line if isinstance(line, str) else line.decode("utf-8-sig" if number == 1 else "utf-8")
            if "\0" in text:
                raise ValueError("holds NUL bytes, so it is not text in UTF-8: save it as UTF-8")
            yield text
    except UnicodeDecodeError as error:
        why = f"is not text in {error.encoding}: save it as UTF-8; if in Latin-1, iconv -f latin1 -t utf-8 does so"
        raise SourceError(f"line {number}: {why}", path=table) from error
    except ValueError as error:
        raise SourceError(f"line {number}: {error}", path=table) from error
