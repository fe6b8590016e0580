"""Files and folders that other users may have made, or may change: what is believed, and what is refused.

Believed is what this user or root owns, if no others can write to it, and if the same holds of each folder above it. To
a folder such as /tmp others may write if it is sticky (mode 1777): nobody removes or renames there what is another
user's. Links on the way count as folders: whose they are matters, and so does where they lead.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from .errors import StagingError

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # no link is followed, and a pipe does not block
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 64 << 20  # a larger file of another user is not a note of ours
_MAX_LINKS = 40  # as the kernel follows
_ADVICE = "choose a folder of your own, such as one that mkdir -m 700 makes"


def check_folder(folder: Path) -> None:
    """Raise StagingError where other users could change what lies in a folder, or put another in its place.

    Args:
        folder: It need not exist; then the folders above it are checked that do.

    Raises:
        StagingError: It, a folder above it, or a link that leads to it is another user's, or others can write to it;
            says which, and what to do.
    """
    place, steps, num_links = Path("/"), [*reversed(folder.absolute().parts[1:])], 0
    while steps:
        if (step := steps.pop()) == "..":
            place = place.parent
            continue
        try:
            info = os.lstat(place / step)
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # this user makes it, or cannot use it
            return
        if problem := find_problem(info):
            which = "" if place / step == folder.absolute() else f", and {folder} lies in it"
            raise StagingError(f"{problem}{which}: {_advise(info, place / step)}", path=place / step)
        if stat.S_ISLNK(info.st_mode):
            num_links += 1
            if num_links > _MAX_LINKS:
                raise StagingError(f"too many links: {_ADVICE}", path=folder)
            target = Path(os.readlink(place / step))
            place = Path("/") if target.is_absolute() else place
            steps += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        else:
            place /= step


def check_file(path: Path) -> None:
    """Raise StagingError where a file that exists is a link, another user's, or others can write to it."""
    with suppress(FileNotFoundError, NotADirectoryError):
        info = os.lstat(path)
        problem = find_problem(info) or ("" if stat.S_ISREG(info.st_mode) else "is not a plain file")
        if problem:
            raise StagingError(f"{problem}: remove it, or choose another folder", path=path)


def find_problem(info: os.stat_result, owner: int | None = None) -> str:
    """Say why a file, folder or link is not believed; "" if it is.

    Args:
        info: Result of lstat(2) for the file, folder or link.
        owner: User whose it may be, besides root (default: this user).
    """
    is_folder, user = stat.S_ISDIR(info.st_mode), os.geteuid() if owner is None else owner
    if info.st_uid not in (0, user) and not (is_folder and _is_unknown_root(info.st_uid)):
        return f"is user {user_name(info.st_uid)}'s, who could change it"
    if stat.S_ISLNK(info.st_mode) or (is_folder and info.st_mode & stat.S_ISVTX):
        return ""
    is_writable = info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _is_private(info.st_gid))
    return f"can be changed by other users (mode {stat.S_IMODE(info.st_mode):04o})" if is_writable else ""


def _advise(info: os.stat_result, path: Path) -> str:
    is_mine = info.st_uid == os.geteuid() and not stat.S_ISLNK(info.st_mode)
    return f"chmod go-w {path}, or {_ADVICE}" if is_mine else _ADVICE


@functools.cache
def _is_private(gid: int) -> bool:
    """Return whether a group has only its user, as most systems give one to each; or only root."""
    with suppress(KeyError):
        name = user_name(os.geteuid())
        group = grp.getgrgid(gid)
        return gid == 0 or (group.gr_name == name and {*group.gr_mem} <= {name})
    return gid == 0


@functools.cache
def _is_unknown_root(uid: int) -> bool:
    """Return whether a number stands for root, too: in containers that map only this user, all others are "nobody"."""
    with suppress(OSError, ValueError):
        begins = [int(line.split()[0]) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        return 0 not in begins and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())
    return False


def user_name(uid: int) -> str:
    """Return a user's name; the number where the node knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def open_own(path: Path, flags: int = 0) -> int:
    """Open a file of this user's for reading and writing, and make it if it is not there.

    Args:
        path: Path of the file.
        flags: Further flags of open(2).

    Returns:
        Its descriptor.

    Raises:
        StagingError: It is another user's, who could change it, or not a plain file.
        OSError: It cannot be opened.
    """
    try:
        fd = os.open(path, _OPEN | flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link: remove it, or choose another folder", str(path)) from error
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
        os.close(fd)
        raise StagingError("is not a file that this user has made; remove it, or choose another folder", path=path)
    return fd


def open_plain(path: Path) -> tuple[int, bool]:
    """Open a plain file, not a link, which another user could have planted.

    Args:
        path: Path of the file.

    Returns:
        Its descriptor, and whether it can be written to, and this user made it.

    Raises:
        OSError: There is none.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd, is_writable = os.open(path, os.O_RDWR | flags), True
    except OSError:
        fd, is_writable = os.open(path, READ), False
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise OSError(0, "is not a plain file")
    return fd, is_writable and info.st_uid == os.geteuid() and info.st_nlink == 1


def read_own(path: Path, owner: int | None = None) -> bytes:
    """Read a file that is believed.

    Args:
        path: Path of the file.
        owner: User whose file it may be, besides root (default: this user).

    Returns:
        Its content.

    Raises:
        StagingError: It is another user's, or others can write to it.
        OSError: There is none, or it is a link, or not a plain file.
    """
    with os.fdopen(open_plain(path)[0], "rb") as file:
        info = os.fstat(file.fileno())
        if problem := find_problem(info, owner):
            raise StagingError(f"{problem}, so it is not believed: remove it, or choose another folder", path=path)
        return file.read(_MAX_BYTES if info.st_uid != os.geteuid() else -1)


def read_note(path: Path, dir_fd: int | None = None) -> bytes:
    """Read a small file of any user's. Raises OSError for a link, and for what is not a plain file.

    Args:
        path: Path of the file.
        dir_fd: Folder that it is relative to, if any.

    Returns:
        Its content, up to _MAX_BYTES for a file that is not this user's.
    """
    with open(os.open(path, READ, dir_fd=dir_fd), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{path} is not a plain file")
        return file.read(-1 if info.st_uid == os.geteuid() else _MAX_BYTES)


def open_regular(path: str | Path, flags: int, dir_fd: int | None = None) -> int:
    """Open a file that another process may have made: an `opener` for `open`, which does not wait for a pipe's writer.

    Args:
        path: Path of the file; links are followed.
        flags: Flags of open(2).
        dir_fd: Folder that it is relative to, if any.

    Returns:
        The descriptor.

    Raises:
        OSError: It cannot be opened, or is not a file: a pipe, say, or a device.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "is a pipe, a device or a folder, not a file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """Read a file that another process may have made. Raises OSError as `open_regular` does."""
    with open(path, "rb", opener=open_regular) as file:
        return file.read()
