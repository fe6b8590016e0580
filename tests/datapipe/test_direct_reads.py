"""`datapipe doctor` on a filesystem that lets files be opened past the page cache, and refuses to read them so."""

import errno
import fcntl
import itertools
import os

import pytest

from datapipe import doctor


@pytest.mark.parametrize("num_read", [0, 1, 2])  # a daemon that passes the flag on has memory where malloc puts it
def test_reads_go_through_the_page_cache_where_they_cannot_bypass_it(tmp_path, monkeypatch, num_read):
    read, numbers = os.preadv, itertools.count()

    def refuse(fd, *arguments):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and next(numbers) >= num_read:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(fd, *arguments)

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(doctor, "FILE_BYTES", doctor.SEQUENTIAL_BYTES)
    is_direct, sequential_mb_per_s, random_mb_per_s = doctor._reads(tmp_path)
    assert not is_direct and sequential_mb_per_s > 0 and random_mb_per_s > 0
    assert not any(tmp_path.iterdir())
