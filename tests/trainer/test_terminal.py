"""What two ranks write to a terminal."""

import os
import threading
from subprocess import DEVNULL

import pytest

from tests.processes import clean_environment
from tests.waiting import limit_s


class Terminal:
    """A terminal of 100 columns; `device` is for the programs, `text()` all that they wrote there, after their end."""

    def __init__(self) -> None:
        self._ours, self.device = os.openpty()
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._ours, 65536):
                self._chunks.append(chunk)
        except OSError:  # Linux says so where no program has the terminal any more
            pass

    def text(self) -> str:
        os.close(self.device)
        self._reader.join(limit_s())
        os.close(self._ours)
        return b"".join(self._chunks).decode(errors="replace")


@pytest.mark.ranks
def test_one_rank_draws_a_bar(server, packed, recipe_file, port, tmp_path):
    line = ["-m", "trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run"]
    line += ["--set", "train.epochs=2"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TERM": "xterm", "COLUMNS": "100"}
    terminals = [Terminal(), Terminal()]
    children = [
        server.start(*line, env=clean_environment(**shared, RANK=str(rank)), stdout=DEVNULL, stderr=terminal.device)
        for rank, terminal in enumerate(terminals)
    ]
    try:
        codes = [child.wait(limit_s()) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait(limit_s())
        first, second = (terminal.text() for terminal in terminals)
    assert codes == [0, 0], first + second
    bars = [line for line in first.split("\r") if "━" in line]
    assert all(any(f"epoch {number} of 2" in line for line in bars) for number in (1, 2)), first
    assert "━" not in second and "epoch" not in second, second
