"""Images that a table names otherwise than by their paths from its folder.

By an id without extension, without the folder, with backslashes, by an address (`gs://bucket/…`, `C:\\…`), or by a path
on another machine (`/home/me/…`). They are taken for images below the folder if each is the end of the path of exactly
one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from ..console import format_count, format_some
from .file_names import is_hidden, is_image
from .listing import is_folder
from .paths import is_inside, real_path
from .split_columns import splits_of

ELSEWHERE = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*:)?[/\\]+")  # how an address on another machine begins
NAMED = 3  # names that a message gives

Places = dict[str, list[str]]  # images' paths below the folder, by their last part with and without extension


class NamedImages:
    """The images below a folder, as a table may name them. They are listed once, when the first name is looked up."""

    def __init__(self, folder: str, bounds: str | None) -> None:
        """Keep the folder, and the one that links must not leave (None: links may lead anywhere)."""
        self._folder = folder
        self._bounds = bounds

    def find(self, names: Sequence[str], table: str = "") -> list[list[str]]:
        """Find the images that a table names.

        Names may be whole paths, of which the extension lacks, or the ends of paths: the first reading by which each is
        exactly one image, or else the one by which most are. Of an address the first parts may lack below the folder.

        Args:
            names: Names of images that the table has.
            table: Name of the table: one that speaks of a split may name those in folders that speak of it.

        Returns:
            The paths of the images that each name may mean, below the folder.
        """
        texts = [_clean(name) for name in names]
        is_address = any(map(ELSEWHERE.match, names))
        places = self._places(texts)
        best: list[list[str]] = []
        most = (-1, -1)
        for skipped in range(max(text.count("/") for text in texts) + 1 if is_address else 1):
            ends = ["/".join(text.split("/")[min(skipped, text.count("/")) :]) for text in texts]
            for matches in _readings(ends, places, splits_of(table)):
                num_clear = sum(len(of_name) == 1 for of_name in matches), sum(map(bool, matches))
                if num_clear > most:
                    best, most = matches, num_clear
                if num_clear[0] == len(texts):
                    return matches
        return best

    def advise(self, name: str) -> str:
        """Say how a path that names no file should be written, if an image is called as its last part; "": none is."""
        places = self._places([_clean(name)])
        if not places:
            return ""
        advice = "write it so in the table, whose paths begin in its folder and are whole"
        above = os.path.dirname(self._folder)
        if os.path.lexists(os.path.join(above, name)):
            advice = f"put the table into {above}, where its paths begin, and give it there"
        return f"{name} names no file, and {min(min(places.values()))} does: {advice}"

    def _places(self, texts: Iterable[str]) -> Places:
        """List the images whose names, with or without extension, are the last parts of some texts."""
        names = set(map(_last, texts))
        places: Places = {}
        for path in self._paths:
            file = _last(path)
            for name in {file, file.rpartition(".")[0]} & names:
                places.setdefault(name, []).append(path)
        return places

    @cached_property
    def _paths(self) -> list[str]:
        real_bounds = None if self._bounds is None else real_path(self._bounds)
        paths, folders, linked = [], [""], {real_path(self._folder)}
        while folders:
            inner = folders.pop()
            with suppress(OSError), os.scandir(os.path.join(self._folder, inner)) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    path = os.path.join(inner, entry.name)
                    if is_image(entry.name):
                        paths.append(path)
                    elif is_folder(entry) and not entry.is_symlink():
                        folders.append(path)
                    elif is_folder(entry):
                        real = real_path(entry.path)
                        if real not in linked and (real_bounds is None or is_inside(real, real_bounds)):
                            linked.add(real)
                            folders.append(path)
        return sorted(paths)


def _readings(ends: Sequence[str], places: Places, splits: set[str]) -> Iterator[list[list[str]]]:
    """Yield the images of each name as a whole path, as the end of one, and as that of one in a folder of a split."""
    by_end = [[place for place in places.get(_last(end), ()) if _is_end(end, place)] for end in ends]
    yield [
        [place for place in matches if place.count("/") == end.count("/")]
        for end, matches in zip(ends, by_end, strict=True)
    ]
    yield by_end
    if splits:
        yield [[place for place in matches if splits_of(os.path.dirname(place)) == splits] for matches in by_end]


def describe_doubt(matches: Mapping[str, Sequence[str]], num_rows: int) -> str:
    """Say which names of a table are not those of exactly one image.

    Args:
        matches: The images that each of them may mean.
        num_rows: Number of all names.

    Returns:
        The text, with what to do.
    """
    missing = [name for name, places in matches.items() if not places]
    several = [f"{name} ({' and '.join(places[:2])})" for name, places in matches.items() if places]
    texts = []
    if missing:
        texts.append(f"{len(missing)} without an image, such as {format_some(missing[:NAMED])}")
    if several:
        texts.append(f"{len(several)} with several, such as {format_some(several[:NAMED])}")
    advice = "write their paths from the table's folder into it" if several else "add the images, or remove the rows"
    return f"of {format_count(num_rows, 'name')}, {'; '.join(texts)}: {advice}"


def _clean(name: str) -> str:
    return ELSEWHERE.sub("", name, count=1).replace("\\", "/").strip("/")


def _last(text: str) -> str:
    return text.rpartition("/")[2]


def _is_end(end: str, place: str) -> bool:
    place = place if is_image(end) else place.rpartition(".")[0]
    return place == end or place.endswith(f"/{end}")
