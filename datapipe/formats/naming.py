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
EXTENSIONS = {
    "jpeg": "jpg",
    "png": "png",
    "pnm": "pnm",
    "pnm+lz4": "pnm.lz4",
    "pnm+zstd": "pnm.zst",
}
IMAGES = ("jpg", "jpeg", "png")
LABELS = ("cls", "json")
LABEL_FIELDS = ("label", "cls", "class", "class_id")


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name into key and extension, at the first dot of its last part.

    Both are "" for a name whose last part begins with a dot: WebDataset ignores it.
    """
    folder, slash, file = name.removeprefix("./").rpartition("/")
    base, _, extension = file.partition(".")
    return (folder + slash + base, extension.lower()) if base else ("", "")


def read_label(path: str, key: str, contents: Mapping[str, bytes]) -> str:
    """Read a sample's label as it is written: a whole number, or a class name.

    Args:
        path: The archive, for messages.
        key: The sample's key, for messages.
        contents: What the sample's label files hold, by extension (those of LABELS); `cls` takes precedence.

    Returns:
        The label as text; not empty.

    Raises:
        SourceError: There is no label, or it cannot be read.
    """
    if "cls" in contents:
        text = contents["cls"].strip()
        if not (match := re.fullmatch(rb"(-?[0-9]+)(\.0*)?", text)):
            raise SourceError(f"its .cls holds no whole number, but {text[:20]!r}", path=path, key=key)
        return match[1].decode()
    if "json" not in contents:
        raise SourceError("has an image, but no label (.cls or .json)", path=path, key=key)
    try:
        content = json.loads(contents["json"])
    except (ValueError, RecursionError) as error:
        raise SourceError(f"its .json cannot be read: {error}", path=path, key=key) from error
    fields = content if isinstance(content, dict) else {}
    label = next((fields[name] for name in LABEL_FIELDS if name in fields), None)
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if isinstance(label, bool) or not isinstance(label, int | str) or label == "":
        message = f"its .json has no whole number or name under any of {', '.join(LABEL_FIELDS)}"
        raise SourceError(message, path=path, key=key)
    return str(label)
