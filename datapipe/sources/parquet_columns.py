"""Which columns of a Parquet file hold images, their paths and labels: by its schema."""

from __future__ import annotations

import json
from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING

from ..errors import SourceError
from .labels import LABEL_COLUMN

if TYPE_CHECKING:
    import pyarrow

IMAGES = ("image", "img")
LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
PATHS = ("path", "file", "filename", "file_name", "image_path")
STRINGS = ("string", "large_string", "string_view")  # Arrow's types


def find_columns(path: str, schema: pyarrow.Schema, label_column: str | None) -> tuple[str, str | None]:
    """Find the columns that are read.

    Args:
        path: The file, for messages.
        schema: Schema of the file.
        label_column: The column of labels that the user names.

    Returns:
        The column of the images' bytes, and that of the labels (None: there is none).

    Raises:
        SourceError: There is none of images, or they do not hold what they should.
    """
    if double := next((name for name, count in Counter(schema.names).items() if count > 1), None):
        raise SourceError(f"has two columns {double}: rename one", path=path)
    image = next((name for name in IMAGES if name in schema.names), None)
    labels = LABELS if label_column is None else (label_column,)
    label = next((name for name in labels if name in schema.names), None)
    if image is None or (label_column and label is None):
        raise SourceError(describe_lack(schema, label_column), path=path)
    column = _bytes_column(schema, image)
    if column is None:
        raise SourceError(f"column {image} holds no encoded images, but {schema.field(image).type}", path=path)
    if label is not None and not _may_be_labels(schema, label):
        kind = schema.field(label).type
        raise SourceError(f"column {label} holds no whole numbers or names, but {kind}", path=path)
    return column, label


def other_columns(schema: pyarrow.Schema, column: str, label: str | None, label_column: str | None) -> list[str]:
    """List the columns that may hold images or labels, too, and are not read.

    Args:
        schema: Schema of the file.
        column: Column of the images' bytes.
        label: Column of the labels; None: there is none.
        label_column: Column of labels that the user names.

    Returns:
        Their names.
    """
    usual = (*IMAGES, *(() if label_column else LABELS))
    others = dict.fromkeys((*usual, *(name for name in schema.names if _bytes_column(schema, name))))
    return [name for name in others if name in schema.names and name not in (column.split(".")[0], label)]


def describe_lack(schema: pyarrow.Schema, label_column: str | None) -> str:
    """Say that a file has no column of images, or none of labels, and what to do. `label_column`: the user's."""
    expected = f"image ({', '.join(IMAGES)}) and label ({', '.join((label_column,) if label_column else LABELS)})"
    advice = ""
    if not set(IMAGES) & set(schema.names):
        if images := [name for name in schema.names if _bytes_column(schema, name)]:
            advice = f": rename the column of the images ({' or '.join(images)}) to image"
    elif left := [name for name in schema.names if name not in IMAGES and _may_be_labels(schema, name)]:
        advice = f": say which has the labels with --label-column {quote(left[0]) if len(left) == 1 else 'NAME'}"
    return f"has not both columns, {expected}, but {', '.join(schema.names)}{advice}"


def _bytes_column(schema: pyarrow.Schema, name: str) -> str | None:
    """Return the column of bytes that one holds, which may be images: itself, or its field; None: it holds none."""
    from pyarrow import types

    kind = schema.field(name).type
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, name = kind.field("bytes").type, f"{name}.bytes"
    return name if types.is_binary(kind) or types.is_large_binary(kind) else None


def _may_be_labels(schema: pyarrow.Schema, name: str) -> bool:
    from pyarrow import types

    kind = schema.field(name).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string
    return any(test(kind) for test in tests)


def rival_columns(schema: pyarrow.Schema, label: str | None) -> list[str]:
    """List the columns that may be of labels as well as that one; if it is called so, only `Label` beside `label`."""
    from pyarrow import types

    if label is None:
        return []
    alike = [name for name in schema.names if LABEL_COLUMN.fullmatch(name) and name != label]
    rivals = [name for name in alike if label not in ("label", "labels") or name.lower() == label]
    return [name for name in rivals if not types.is_nested(schema.field(name).type)]


def path_column(schema: pyarrow.Schema) -> str | None:
    """Return the column of the images' paths, or None."""
    from pyarrow import types

    for name in (*IMAGES, *PATHS):
        kind = schema.field(name).type if name in schema.names else None
        if kind is not None and types.is_struct(kind) and kind.get_field_index("path") >= 0:
            return f"{name}.path"
        if name in PATHS and str(kind) in STRINGS:
            return name
    return None


def class_names(schema: pyarrow.Schema, label: str | None) -> list[str]:
    """Return a column's class names that Hugging Face's `datasets` has written into the schema; [] if it has not."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
