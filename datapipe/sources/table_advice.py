"""How to read images by the tables beside them, where folders were refused. What is advised was tried."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..console import format_some
from ..errors import DatapipeError, SettingError
from ..split_names import SPLIT_OF, TRAIN, split_words
from ..split_patterns import options_of
from ..splits import AmbiguousSplitError, SplitRule
from . import csv
from .label_advice import advise_listing
from .labels import LABEL_COLUMN
from .listing import LeftOut, Listing
from .roots import folders_in, tables_in
from .tables_beside import sample_rows

COLUMNS = "a CSV file with the columns path, label and, if need be, split"


def advise_tables(source: Path, listing: Listing) -> str:
    """Say how to read the images by a table, if there is one that may have their labels."""
    tables = tables_in(source)
    inside = [f"{name}/{table}" for name in folders_in(source) for table in tables_in(source / name)]
    if not tables and inside:
        return f"if {inside[0]} has labels of the images beside it, write {COLUMNS}, of all, and give that"
    if not tables:
        by_path = f"{text}; " if (text := advise_listing(source)) else ""
        return f"{by_path}if a table has their classes, give that, {COLUMNS}"
    by_name = {name: its.pop() for name in tables if len(its := {SPLIT_OF[word] for word in split_words(name)}) == 1}
    splits = [options_of(by_name)] if len(by_name) > 1 and TRAIN in by_name.values() else []
    columns = [] if listing.label_column else _label_columns(source, list(by_name) if splits else tables)
    for of_splits, column in itertools.product(["", *splits], ["", *columns]):
        rule = SplitRule.parse(shlex.split(of_splits)[1::2])
        if _can_read(source, replace(listing, rule=rule, label_column=column or listing.label_column), len(tables)):
            named = [f"--label-column {shlex.quote(column)}"] if column else []
            typed = " ".join(["--kind csv", *named, *filter(None, [of_splits])])
            return f"if {_have(list(by_name) if of_splits else tables)} their labels, type {typed}"
    return f"if {_have(tables)} their labels, {_find_fault(source, listing, tables)}"


def _find_fault(source: Path, listing: Listing, tables: Sequence[str]) -> str:
    """Say what has to be done before tables can be read."""
    they = "it" if len(tables) == 1 else "them"
    try:
        with without_log():
            csv.load(source, "csv", replace(listing, left_out=LeftOut()))
    except AmbiguousSplitError as error:
        if len(tables) > 1:
            return f"they have to be read with --kind csv and options: {error.why}"
    except (DatapipeError, SettingError) as error:
        fault = str(error).removeprefix(f"{source}: ").removeprefix(f"{source}/")
        return f"--kind csv reads {they} once this is settled: {fault}"
    return f"write {COLUMNS}, and give that"


@contextmanager
def without_log() -> Iterator[None]:
    """Log nothing of what is tried, since it is not packed yet."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _have(tables: Sequence[str]) -> str:
    return f"{format_some(tables)} {'have' if len(tables) > 1 else 'has'}"


def _label_columns(source: Path, tables: Sequence[str]) -> list[str]:
    """Return the column that alone may hold the labels in each of several tables; none if there are others."""
    headers = [[name.strip() for name in next(sample_rows(source / table), [])] for table in tables]
    named = [[name for name in header if LABEL_COLUMN.fullmatch(name)] for header in headers]
    return named[0] if len(named[0]) == 1 and all(names == named[0] for names in named) else []


def _can_read(source: Path, listing: Listing, num_tables: int) -> bool:
    """Whether tables name images that are there, and have their labels, or a single table says what to type next."""
    listing = replace(listing, left_out=LeftOut())
    try:
        with without_log():
            splits = csv.load(source, "csv", listing).splits
    except AmbiguousSplitError:
        if num_tables > 1:
            return False
        return _can_read(source, replace(listing, rule=SplitRule.parse(["train=."])), 2)
    except (DatapipeError, SettingError):
        return False
    return bool(splits) and all(len(samples) and os.path.exists(samples.where(0)) for samples in splits.values())
