"""What files and folders are asked."""

import os

from datapipe import fsio


def test_an_entry_that_does_not_answer_hides_no_other(tmp_path, monkeypatch):
    """A mount point whose server is gone can be listed, but not looked at."""

    class Entry:
        def __init__(self, entry):
            self.name, self._entry = entry.name, entry

        def stat(self, follow_symlinks):
            if self.name == "dead":
                raise OSError(107, "Transport endpoint is not connected")
            return self._entry.stat(follow_symlinks=follow_symlinks)

    class Scan:
        def __init__(self, folder):
            self._scanning = scandir(folder)

        def __enter__(self):
            return map(Entry, sorted(self._scanning, key=lambda entry: entry.name))

        def __exit__(self, *_):
            self._scanning.close()

    for name in ("a", "dead", "z"):
        (tmp_path / name).mkdir()
    scandir = os.scandir
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", Scan)
        names = [path.name for path in fsio.list_folders(tmp_path)]
    assert names == ["a", "z"]
