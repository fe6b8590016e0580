"""Open a cache: stage a data set to it, or join those that are using a part of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ..dataset.manifest import MANIFEST, read_content
from ..errors import DatapipeError, OtherNodeError, SettingError, StagingError
from ..foreign import check_folder
from ..fsio import OWN_MODE, PRIVATE_MODE, make_folder
from ..streams import in_time
from .cache import remove_earlier
from .copy import stage_copies
from .local_copy import LocalCopy, compute_digest
from .options import StageOptions


def stage_or_join(
    source: Path, cache: Path, options: StageOptions, holds: ExitStack | None, joins: bool
) -> tuple[Path, bool]:
    """Do what `stage_once` does, unless a part is enough.

    Args:
        source: the data set.
        cache: a node-local folder, see `stage_once`.
        options: how to copy.
        holds: nobody removes the copy until this is closed, or the process ends.
        joins: whether a part is enough: not to wait for a process that is copying in the background, and not to refuse
            a folder that has room for a part only.

    Returns:
        The folder of the copy, and whether it is whole.
    """
    with errors_name_the_node():
        content = in_time(lambda: read_content(source), source / MANIFEST, options.timeout_s)
        name = source.resolve().name
        folders = cache, cache / name, cache / f"{name}-{compute_digest(content)}"
        copies = [LocalCopy.of_content(source, folder, content) for folder in folders]
        copy = next((copy for copy in copies if copy.is_named()), copies[-1])
        if copy.has_slots() and not joins:
            raise SettingError(f"cache: {copy.target} has room for a part only; this needs the whole data set")
        check_folder(copy.target)  # a part is not checked as a whole: only the samples' short checksums are compared
        if copy.has_slots() or (joins and copy.may_be_used()):
            copy.touch()
            return copy.target, False
        make_folder(cache.parent, PRIVATE_MODE)
        make_folder(cache, OWN_MODE)
        is_own = copy.target.parent == cache
        options = replace(options, evict=is_own)
        (staged,) = stage_copies(source, copy.target, [copy], options, trusts=True, holds=holds, checks_beside=False)
        if staged.copied_bytes and is_own:
            remove_earlier(source, copy.target, content)
    return copy.target, True


@contextmanager
def errors_name_the_node() -> Iterator[None]:
    """Add this node's name to errors that name no other: a job's log has those of many."""
    try:
        yield
    except OtherNodeError:
        raise
    except DatapipeError as error:
        error.message += f" (on {socket.gethostname()})"
        raise
    except OSError as error:
        message = f"{error.strerror or error} (errno {error.errno}, on {socket.gethostname()})"
        raise StagingError(message, path=error.filename) from error
