"""Parquet files, listed: which columns hold images, their paths and labels, and what the others say of splits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from ..errors import MissingBackendError, SourceError
from ..splits import SplitRule
from .labels import LABEL_COLUMN, check_same_classes
from .listing import Listing
from .paths import check_inside
from .split_columns import Columns, Said

if TYPE_CHECKING:
    import pyarrow

_IMAGES = ("image", "img")
_LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
_PATHS = ("path", "file", "filename", "file_name", "image_path")
_STRINGS = ("string", "large_string", "string_view")  # Arrow's types


def _find_columns(path: str, schema: pyarrow.Schema, label_column: str | None) -> tuple[str, str | None]:
    """Find the column of the images' bytes, and that of the labels (None: there is none).

    Raises SourceError if there is none of images, or they do not hold what they should.
    """
    if double := next((name for name, count in Counter(schema.names).items() if count > 1), None):
        raise SourceError(f"has two columns {double}: rename one", path=path)
    image = next((name for name in _IMAGES if name in schema.names), None)
    labels = _LABELS if label_column is None else (label_column,)
    label = next((name for name in labels if name in schema.names), None)
    if image is None or (label_column and label is None):
        raise SourceError(_describe_lack(schema, label_column), path=path)
    column = _bytes_column(schema, image)
    if column is None:
        raise SourceError(f"column {image} holds no encoded images, but {schema.field(image).type}", path=path)
    if label is not None and not _may_be_labels(schema, label):
        kind = schema.field(label).type
        raise SourceError(f"column {label} holds no whole numbers or names, but {kind}", path=path)
    return column, label


def _other_columns(schema: pyarrow.Schema, column: str, label: str | None, label_column: str | None) -> list[str]:
    """List the columns that may hold images or labels, too, and are not read."""
    usual = (*_IMAGES, *(() if label_column else _LABELS))
    others = dict.fromkeys((*usual, *(name for name in schema.names if _bytes_column(schema, name))))
    return [name for name in others if name in schema.names and name not in (column.split(".")[0], label)]


def _describe_lack(schema: pyarrow.Schema, label_column: str | None) -> str:
    """Say that a file has no column of images, or none of labels, and what to do. `label_column`: the user's."""
    expected = f"image ({', '.join(_IMAGES)}) and label ({', '.join((label_column,) if label_column else _LABELS)})"
    advice = ""
    if not set(_IMAGES) & set(schema.names):
        if images := [name for name in schema.names if _bytes_column(schema, name)]:
            advice = f": rename the column of the images ({' or '.join(images)}) to image"
    elif left := [name for name in schema.names if name not in _IMAGES and _may_be_labels(schema, name)]:
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


def _rival_columns(schema: pyarrow.Schema, label: str | None) -> list[str]:
    """List the columns that may be of labels as well as that one; if it is called so, only `Label` beside `label`."""
    from pyarrow import types

    if label is None:
        return []
    alike = [name for name in schema.names if LABEL_COLUMN.fullmatch(name) and name != label]
    rivals = [name for name in alike if label not in ("label", "labels") or name.lower() == label]
    return [name for name in rivals if not types.is_nested(schema.field(name).type)]


def _path_column(schema: pyarrow.Schema) -> str | None:
    """Return the column of the images' paths, or None."""
    from pyarrow import types

    for name in (*_IMAGES, *_PATHS):
        kind = schema.field(name).type if name in schema.names else None
        if kind is not None and types.is_struct(kind) and kind.get_field_index("path") >= 0:
            return f"{name}.path"
        if name in _PATHS and str(kind) in _STRINGS:
            return name
    return None


def _class_names(schema: pyarrow.Schema, label: str | None) -> list[str]:
    """Return a column's class names that Hugging Face's `datasets` has written into the schema; [] if it has not."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def import_parquet(path: Path | str) -> ModuleType:
    """Import Arrow's reader. Raises MissingBackendError, which names the file, without it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingBackendError.for_extra("Parquet files need pyarrow", "parquet", path) from error
    return pyarrow.parquet


class ListedFile(NamedTuple):
    """A file, without its images."""

    path: str
    column: str  # with the images' bytes
    label: str | None  # the column; None: it has none
    labels: list[str]  # "": none
    classes: list[str]  # their names; empty if the file has none
    num_rows: list[int]  # of each row group
    num_bytes: list[int]  # of its images
    others: list[str]  # columns that may hold images or labels, too
    said: list[Said]  # of each row's split; empty: nothing
    paths: list[str]  # of the images, as the file gives them; empty: it does not, or they are not asked for
    lack: str  # what to say where its labels are needed, and it has none


def list_file(path: str, bounds: str | None, listing: Listing, with_paths: bool) -> ListedFile:
    """Return what a file says of its rows. Raises SourceError if it cannot be read, or in two ways.

    Args:
        path: The file.
        bounds: See `paths`.
        listing: Listing with what the user says of columns and splits.
        with_paths: Whether the images' paths are asked for.
    """
    label_column = listing.label_column
    check_inside(path, bounds)
    parquet = import_parquet(path)
    try:
        with parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            column, label = _find_columns(path, schema, label_column)
            labels = _texts(file, label) if label else [""] * metadata.num_rows
            for other in () if label_column else _rival_columns(schema, label):
                check_same_classes(path, (label or "", other), set(zip(labels, _texts(file, other), strict=True)))
            said = _said(file, listing.rule, {column.split(".")[0], label, *_PATHS})
            of_paths = _path_column(schema) if with_paths else None
            paths = _texts(file, of_paths) if of_paths else []
    except (OSError, ValueError, NotImplementedError) as error:  # Arrow's errors are subclasses
        raise SourceError(f"cannot be read: {error}", path=path) from error
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    leaf = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
    num_bytes = [group.column(leaf).total_uncompressed_size for group in groups]
    others = _other_columns(schema, column, label, label_column)
    lack = "" if label else _describe_lack(schema, label_column)
    num_rows, classes = [group.num_rows for group in groups], _class_names(schema, label)
    return ListedFile(path, column, label, labels, classes, num_rows, num_bytes, others, said, paths, lack)


def _texts(file: pyarrow.parquet.ParquetFile, column: str, group: int | None = None) -> list[str]:
    """Read a column, or a field of one (`image.path`), of a row group or of all, as texts; "" for null."""
    from pyarrow import compute

    groups = range(file.num_row_groups) if group is None else [group]
    values = file.read_row_groups(groups, columns=[column], use_threads=False).column(0)
    for part in column.split(".")[1:] if column not in file.schema_arrow.names else ():
        values = compute.struct_field(values, part)
    texts = (value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in values.to_pylist())
    return ["" if value is None else str(value) for value in texts]


def _said(file: pyarrow.parquet.ParquetFile, rule: SplitRule, others: Set[str | None]) -> list[Said]:
    """List what a file's columns, except some others, say of each row's split; nothing: [].

    Of a column of texts, the first row group often tells that it says nothing: the others are not read.
    """
    from pyarrow import types

    schema, columns, values = file.schema_arrow, Columns(rule), {}
    for name, kind in _fields((field.name, field.type) for field in schema if field.name not in others):
        is_named = columns.is_named(name)
        if is_named and (types.is_list(kind) or types.is_large_list(kind)):
            kind = kind.value_type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        is_simple = types.is_primitive(kind) or str(kind).endswith("binary")
        if not (str(kind) in _STRINGS or (is_named and is_simple) or _class_names(schema, name)):
            continue
        texts: list[str] = []
        for group in range(file.metadata.num_row_groups):
            of_group = _named(schema, name, _texts(file, name, group))
            if not columns.may_be(name, dict.fromkeys(of_group)):
                break
            texts += of_group
        else:
            values[name] = texts
    rows = zip(*values.values(), strict=True)
    return columns.keep([columns.said(zip(values, row, strict=True)) for row in rows])


def _fields(columns: Iterable[tuple[str, pyarrow.DataType]]) -> Iterator[tuple[str, pyarrow.DataType]]:
    """List columns' names and types, those of structs by field, as `meta.split`."""
    from pyarrow import types

    for name, kind in columns:
        if types.is_struct(kind):
            yield from _fields((f"{name}.{field.name}", field.type) for field in kind)
        else:
            yield name, kind


def _named(schema: pyarrow.Schema, column: str, texts: list[str]) -> list[str]:
    """Replace numbers by names, where Hugging Face's `datasets` has written these into the schema."""
    names = _class_names(schema, column)
    return [names[int(text)] if text.isdecimal() and int(text) < len(names) else text for text in texts]
