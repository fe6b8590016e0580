"""The secret that the processes of a job share, so that they believe each other and nobody else.

Whoever reaches the port of a store may write to it. So each value has a tag (HMAC-SHA-256 of its name and itself) that
only a process can make which can read a file of mode 600, on a filesystem that all nodes share. The secret itself is
never sent.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from .. import clock
from ..foreign import READ
from ..fsio import make_folder
from .store import CrewError

logger = logging.getLogger(__name__)

VARIABLE = "DATAPIPE_SECRET_FILE"
_NUM_DIGITS = 64  # of a secret, and of a tag
_WRITE_S = 10.0  # how long the process that makes the file may take to write to it
_LOOK_S = 0.05
_NO_SECRET = 0o400  # mode of an empty file, by which the process that has made it says that it cannot write there
_REMEDY = f"set {VARIABLE} to a file, which need not exist yet, in a folder of yours that all nodes share"


class StrangerError(CrewError):
    """A value in the store is not of a process of this job."""


def choose_file(run: Path | None = None) -> Path:
    """Return where the secret is: what the environment says, or in the folder of a run, or in the user's home."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    if run is not None:
        return run / ".secret"
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local" / "state", "datapipe", "secret")


class _NoRoomError(OSError):
    """The secret cannot be written."""


def read_secret(path: Path, makes_it: bool = True, patience_s: float = _WRITE_S) -> bytes:
    """Read the secret. The first process makes the file, which no other user can read.

    Where nothing can be written to a run's folder, the secret is the one in the user's home: a run may
    need no room, and else says itself what is wrong.

    Args:
        path: Path of the file.
        makes_it: Whether to make it if it is not there; else it is waited for.
        patience_s: Time to wait for the process that makes it, in seconds.

    Returns:
        The secret, as hexadecimal digits.

    Raises:
        CrewError: It cannot be made or read, or other users could have read or written it.
    """
    deadline = clock.now() + patience_s
    try:
        if makes_it:
            _make(path)
        while True:
            secret = _read(path)
            if len(secret) == _NUM_DIGITS:
                return secret
            if clock.now() > deadline:
                raise CrewError("holds no whole secret: remove it", path=path)
            time.sleep(_LOOK_S)
    except _NoRoomError as error:
        own = choose_file()
        if path == own:
            raise _explain(path, error) from error
        logger.info("%s cannot be written: the processes of this job share the secret in %s", path, own)
        return read_secret(own, makes_it, patience_s)
    except OSError as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: OSError) -> CrewError:
    what = "is a link" if error.errno == errno.ELOOP else error.strerror or str(error)
    return CrewError(f"{what}: the processes of a job share a secret in it; {_REMEDY}", path=path)


def _make(path: Path) -> None:
    """Make the file, unless there is one. Raises _NoRoomError."""
    try:
        make_folder(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if os.path.lexists(path):  # another process has made it
            return
        raise _NoRoomError(error.errno, error.strerror) from error
    try:
        os.write(fd, secrets.token_hex(_NUM_DIGITS // 2).encode())
    except OSError:
        os.fchmod(fd, _NO_SECRET)  # which `_read` finds, here and on other nodes
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    """Read what is there of the secret; b"" before there is a file. Raises _NoRoomError."""
    try:
        fd = os.open(path, READ)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise CrewError(f"is not a file of mode 600 of this user's: remove it, or {_REMEDY}", path=path)
        if not info.st_size and stat.S_IMODE(info.st_mode) == _NO_SECRET:
            raise _NoRoomError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return file.read(_NUM_DIGITS + 1)


class SignedStore:
    """A key-value store of torch's, of which only what processes with the secret have written is read.

    Args:
        store: The store.
        prefix: Prefix of its keys, which is signed as well.
        secret: Secret that the processes share.
        place: Words that say where the store and the secret are, for messages.
    """

    def __init__(self, store: dist.Store, prefix: str, secret: bytes, place: str) -> None:
        self._raw, self._store, self.prefix = store, dist.PrefixStore(prefix, store), prefix
        self._secret, self._place = secret, place

    def below(self, name: str, store: dist.Store | None = None) -> SignedStore:
        """Return a part of the store, or of another one with the same keys and secret.

        Args:
            name: Name of the part.
            store: The other one.
        """
        return SignedStore(store or self._raw, f"{self.prefix}/{name}", self._secret, self._place)

    def _sign(self, key: str, value: bytes) -> bytes:
        name = f"{self.prefix}/{key}".encode()
        content = len(name).to_bytes(8, "little") + name + value
        return hmac.new(self._secret, content, hashlib.sha256).hexdigest().encode()

    def set(self, key: str, value: str) -> None:
        data = value.encode()
        self._store.set(key, (self._sign(key, data) + data).decode())

    def set_first(self, key: str, value: str) -> bytes:
        """Set a value, unless there is one; return that which counts. Raises what `get` does."""
        data = value.encode()
        self._store.compare_set(key, "", (self._sign(key, data) + data).decode())
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        """Return a value. Raises StrangerError where no process with the secret has written it."""
        return self._open(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> Sequence[bytes]:
        """Do what `get` does, for several keys."""
        return [self._open(key, value) for key, value in zip(keys, self._store.multi_get(keys), strict=True)]

    def _open(self, key: str, value: bytes) -> bytes:
        tag, data = value[:_NUM_DIGITS], value[_NUM_DIGITS:]
        if not hmac.compare_digest(tag, self._sign(key, data)):
            raise StrangerError(
                f"{key!r} at {self._place} was not written by a process of this job: a stranger has connected "
                f"(then set another MASTER_PORT), or a node sees another file there: {_REMEDY}"
            )
        return data
