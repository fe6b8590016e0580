"""The errors, and the exit codes they lead to.

DatapipeError            data, disk or network: exit code 1
├── SourceError          the raw data set cannot be used as it is
├── FetchError           a data set could not be downloaded, or is not the expected one
├── ManifestError        no data set here, or one that this version cannot read
├── ShardCorruptError    a shard does not hold the bytes that were packed
│   └── ShardReadError   it is missing, cut short, or cannot be read
├── StagingError         a copy to local disk could not be made
│   └── OtherNodeError   because of another node, which the message names
├── DecodeError          a sample's bytes are not a readable image
├── WrongPathError       a path that was given leads nowhere, or to something else (also a SourceError, ManifestError
│                        and StagingError): exit code 2
└── MissingBackendError  a library or program that this needs is not installed
SettingError             a bad setting (also a ValueError): exit code 2
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any


class DatapipeError(Exception):
    """Root of every error about data.

    Args:
        message: Description of what is wrong.
        path: File or folder, if known. It begins the message, as do the following.
        shard: Name of the shard, if known.
        key: Key of the sample, if known.
    """

    has_lines = False  # whether the message is several lines, which a command prints as such

    def __init__(
        self,
        message: str,
        *,
        path: Path | str | None = None,
        shard: str | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message, path, shard, key)
        self.message, self.path, self.shard, self.key = message, path, shard, key

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the keyword arguments when the error is sent to another process."""
        return partial(type(self), path=self.path, shard=self.shard, key=self.key), (self.message,)

    def __str__(self) -> str:
        where = [str(self.path)] if self.path is not None else []
        where += [f"shard {self.shard}"] if self.shard is not None else []
        where += [f"key {self.key}"] if self.key is not None else []
        return ": ".join([", ".join(where), self.message] if where else [self.message])


class SourceError(DatapipeError):
    """The raw data set cannot be used as it is."""


class FetchError(DatapipeError):
    """A data set could not be downloaded, or is not the expected one."""

    has_lines = True


class ManifestError(DatapipeError):
    """There is no data set here, or one that this version cannot read."""


class ShardCorruptError(DatapipeError):
    """A shard does not hold the bytes that were packed."""


class ShardReadError(ShardCorruptError):
    """A shard is missing, cut short, or cannot be read."""


class StagingError(DatapipeError):
    """A copy to local disk could not be made."""


class OtherNodeError(StagingError):
    """Staging has failed on another node, which the message names."""


class WrongPathError(SourceError, ManifestError, StagingError):
    """A path that was given leads nowhere, or to something else than what was asked for."""


class DecodeError(DatapipeError):
    """A sample's bytes are not a readable image."""


class MissingBackendError(DatapipeError):
    """A library or program that this needs is not installed; the message names what to install."""

    @classmethod
    def for_extra(cls, message: str, extra: str, path: Path | str | None = None) -> MissingBackendError:
        """Return the error for a missing library that one of the extras in pyproject.toml brings.

        Args:
            message: Description of what is missing.
            extra: Name of the extra in pyproject.toml.
            path: Path of the file that needs it, if any.
        """
        return cls(f"{message}: {how_to_install(extra)}", path=path)


class SettingError(ValueError):
    """A setting is out of its range; the message names it, its value and what is allowed."""

    has_lines = False  # as in DatapipeError


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml: from the checkout, and quoted as zsh needs it."""
    return f"in the folder of the project's pyproject.toml, pip install '.[{extra}]'"
