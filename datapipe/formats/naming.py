"""Names of files in archives: extensions by encoding, and WebDataset's rule of keys, images and labels.

The rule: https://github.com/webdataset/webdataset#the-webdataset-format. Of a sample's JSON only the label is read, a
whole number or a name under one of LABEL_FIELDS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ..errors import SourceError

# WebDataset takes what follows the key's first dot for the kind of content.
EXTENSIONS = {"jpeg": "jpg", "png": "png", "pnm": "pnm", "pnm+lz4": "pnm.lz4", "pnm+zstd": "pnm.zst"}
IMAGES = ("jpg", "jpeg", "png")
LABELS = ("cls", "json")
LABEL_FIELDS = ("label", "cls", "class", "class_id")
WHOLE_WITH_POINT, FRACTION = re.compile(r"-?[0-9]+(\.0*)?"), re.compile(r"-?[0-9]*\.[0-9]*[1-9][0-9]*")
_WHOLE = re.compile("-?[0-9]{1,4000}")  # as many digits as int() takes


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name into key and extension, at the first dot of its last part.

    Both are "" for a name whose last part begins with a dot: WebDataset ignores it.
    """
    folder, slash, file = name.removeprefix("./").rpartition("/")
    base, _, extension = file.partition(".")
    return (folder + slash + base, extension.lower()) if base else ("", "")


def read_fields(
    path: str, key: str, contents: Mapping[str, bytes], label_column: str | None = None
) -> tuple[str, dict[str, object]]:
    """Read a sample's label and JSON.

    Args:
        path: The archive, for messages.
        key: The sample's key, for messages.
        contents: Contents of the sample's label files, by extension (those of LABELS).
        label_column: The only one that counts: "cls" or a field of the JSON; None: as they are usually called.

    Returns:
        The label as it is written, a whole number or a class name, not empty; and all fields of the JSON. Of a number
        and a name the first counts, where `cls` comes first.

    Raises:
        SourceError: The label is missing or cannot be read, or two numbers or two names differ.
    """
    fields: dict[str, object] = {}
    labels: dict[str, str] = {}  # by where they stand
    if "cls" in contents and label_column in (None, "cls"):
        text = contents["cls"].decode("utf-8", "replace").strip()
        if not text.isprintable() or not text or FRACTION.fullmatch(text):
            raise SourceError(f"its .cls holds no whole number or name, but {text[:20]!r}", path=path, key=key)
        labels[".cls"] = text.partition(".")[0] if WHOLE_WITH_POINT.fullmatch(text) else text
    elif "json" not in contents:
        raise SourceError("has an image, but no label (.cls or .json)", path=path, key=key)
    if "json" in contents:
        try:
            content = json.loads(contents["json"])
            fields = content if isinstance(content, dict) else {}
        except (ValueError, RecursionError) as error:
            if not labels:
                raise SourceError(f"its .json cannot be read: {error}", path=path, key=key) from error
    names = LABEL_FIELDS if label_column is None else (label_column,)
    for name in names:
        if name not in fields or (label_column and labels):
            continue
        label = fields[name]
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if not isinstance(label, bool) and isinstance(label, int | str) and label != "":
            labels[f"{name} of .json"] = str(label)
        elif not labels:
            break  # the first that is there counts
    if not labels:
        message = f"its .json has no whole number or name under any of {', '.join(names)}"
        raise SourceError(message, path=path, key=key)
    _check_same(path, key, labels)
    return next(iter(labels.values())), fields


def _check_same(path: str, key: str, labels: Mapping[str, str]) -> None:
    """Raise SourceError for two numbers, or two names, that differ. A number and a name may mean the same."""
    if len(labels) == 1:
        return
    for is_number in (True, False):
        alike = {where: text for where, text in labels.items() if bool(_WHOLE.fullmatch(text)) == is_number}
        if len({int(text) if is_number else text for text in alike.values()}) > 1:
            said = " and ".join(f"{where} says {text!r}" for where, text in alike.items())
            raise SourceError(
                f"has labels that differ: {said}; say which counts, as datapipe pack --label-column "
                f"{next(iter(alike)).partition(' ')[0].removeprefix('.')}",
                path=path,
                key=key,
            )
