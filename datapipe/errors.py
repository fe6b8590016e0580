"""What can go wrong.

DatapipeError            data, disk or network: exit code 1
├── SourceError          the raw data set cannot be used as it is
├── FetchError           a data set could not be downloaded, or is not the one expected
├── ManifestError        no data set here, or one that this version cannot read
├── ShardCorruptError    a shard does not hold the bytes that were packed
│   └── ShardReadError   it is missing, cut short, or cannot be read
├── StagingError         a copy to local disk could not be made
├── DecodeError          a sample's bytes are no readable image
└── MissingBackendError  a library or program that this needs is not installed
SettingError             a bad setting (also a ValueError): exit code 2
"""

from __future__ import annotations

from pathlib import Path


class DatapipeError(Exception):
    """Root of every error about data.

    `path`, `shard` and `key` say where, as far as known, and are part of the message.
    """

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

    def __reduce__(self):  # crosses process boundaries with its keyword arguments
        return _rebuild, (type(self), self.message, self.path, self.shard, self.key)

    def __str__(self) -> str:
        where = [str(self.path)] if self.path is not None else []
        where += [f"shard {self.shard}"] if self.shard is not None else []
        where += [f"key {self.key}"] if self.key is not None else []
        return ": ".join([", ".join(where), self.message] if where else [self.message])


def _rebuild(kind, message, path, shard, key):
    return kind(message, path=path, shard=shard, key=key)


class SourceError(DatapipeError):
    """The raw data set cannot be used as it is."""


class FetchError(DatapipeError):
    """A data set could not be downloaded, or is not the one expected."""


class ManifestError(DatapipeError):
    """There is no data set here, or one that this version cannot read."""


class ShardCorruptError(DatapipeError):
    """A shard does not hold the bytes that were packed."""


class ShardReadError(ShardCorruptError):
    """A shard is missing, cut short, or cannot be read."""


class StagingError(DatapipeError):
    """A copy to local disk could not be made."""


class DecodeError(DatapipeError):
    """A sample's bytes are not a readable image."""


class MissingBackendError(DatapipeError):
    """A library or program that this needs is not installed; the message names what to install."""

    @classmethod
    def for_extra(cls, message: str, extra: str, path: Path | str | None = None) -> MissingBackendError:
        """Make the error for a library of one of the extras in pyproject.toml.

        The command in its message is quoted, as zsh needs it, and installs this project from its checkout.
        """
        return cls(f"{message}: in the folder of the project's pyproject.toml, pip install '.[{extra}]'", path=path)


class SettingError(ValueError):
    """A setting out of its range: names the field, the value and what is allowed."""
