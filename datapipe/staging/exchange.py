"""Each node reads its share of the chunks from the shared filesystem, and sends it to all others.

In a *round*, each node gives one chunk. Reading the chunks of the next rounds, sending those of this one, and writing
those of the last overlap.
"""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from ..console import Progress
from ..streams import Moved, work_on_files
from .crew import Crew
from .options import StageOptions
from .plan import Chunk, cut, share_reads
from .transfer import Transfer

READERS = 2  # threads that read this node's chunks
AHEAD = 3  # chunks that are read ahead
ROUNDS = 2  # rounds in memory: one is received while the other is written
ROUND_BYTES = 512 << 20  # the most that a round takes: with more than 64 nodes, chunks are smaller
LEAST_BYTES = 256 << 10  # but not smaller than this
LOOK_S = 0.2

Round = tuple[int | None, ...]  # by node, the number of the chunk that it gives


def chunk_bytes_for(num_nodes: int, chunk_bytes: int) -> int:
    """Return the size of a chunk, with which a round of so many nodes fits into memory.

    Args:
        num_nodes: how many nodes give a chunk each.
        chunk_bytes: the size asked for.
    """
    room = ROUND_BYTES // num_nodes
    return min(chunk_bytes, max(LEAST_BYTES, 1 << (room.bit_length() - 1)))


def exchange(files: list[Transfer], chunk_bytes: int, crew: Crew, source: Path, options: StageOptions) -> list[int]:
    """Get what this node lacks of some files from the others, and read for them what they lack.

    Args:
        files: all of the data sets, the same on each node.
        chunk_bytes: size of a chunk, of `chunk_bytes_for`.
        crew: the nodes, connected.
        source: the folder of the data sets, for messages.
        options: of the staging.

    Returns:
        By file, the bytes that this node has read from the source.

    Raises:
        CrewError: Another node is gone. What has landed until then stays.
        DatapipeError, OSError: This node cannot read, or cannot write.
    """
    chunks = cut([file.source.info.size_bytes for file in files], chunk_bytes)
    mine = [any(files[extent.file].lacks(extent) for extent in chunk) for chunk in chunks]
    missing = np.array([_unpack(text, len(chunks)) for text in crew.gather("missing", _pack(mine))])
    shares = share_reads(missing, max(1, options.chunk_bytes // chunk_bytes))
    return _Exchange(files, chunks, shares, crew, options).run(source)


def _pack(flags: list[bool]) -> str:
    return base64.b64encode(zlib.compress(np.packbits(flags).tobytes())).decode()


def _unpack(text: str, count: int) -> np.ndarray:
    """Return bool[count]."""
    packed = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    return np.unpackbits(packed, count=count).astype(bool)


class _Exchange:
    """The rounds of an exchange: this node's reads, one thread that sends and receives, and threads that write."""

    def __init__(
        self, files: list[Transfer], chunks: list[Chunk], shares: list[list[int]], crew: Crew, options: StageOptions
    ) -> None:
        self._files, self._chunks, self._crew, self._options = files, chunks, crew, options
        self._rounds: list[Round] = list(zip_longest(*shares))
        self._mine = shares[crew.index]
        self._room_bytes = max((sum(extent.size for extent in chunk) for chunk in chunks), default=0)
        self._read = [0] * len(files)  # bytes, by file
        self._lock = threading.Lock()
        self._may_read = threading.Semaphore(AHEAD)
        self._may_receive = threading.Semaphore(ROUNDS)
        self._received: dict[int, torch.Tensor] = {}  # by round: uint8[nodes, room]
        self._to_write = [len(self._crew)] * len(self._rounds)  # chunks of a round that are not written yet
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self, source: Path) -> list[int]:
        threading.Thread(target=self._send_and_receive, name="datapipe-exchange", daemon=True).start()
        writes = [(number, node) for number in range(len(self._rounds)) for node in range(len(self._crew))]
        total = sum(
            sum(extent.size for extent in self._chunks[chunk])
            for chunks in self._rounds
            for chunk in chunks
            if chunk is not None
        )
        written = work_on_files(
            self._write, writes, lambda _: self._files[0].landing.target, self._options.timeout_s, self._options.streams
        )
        try:
            with closing(written), Progress(f"staging {source}", total, "B") as progress:
                for num_bytes in written:
                    progress.advance(num_bytes)
        finally:
            self._ended.set()
        return self._read

    # --- this node's reads, ahead of the rounds ---

    def _read_chunk(self, number: int, moved: Moved) -> torch.Tensor:
        """Read a chunk for all: uint8[room]."""
        self._wait(lambda: self._may_read.acquire(timeout=LOOK_S), moved)
        data = torch.empty(self._room_bytes, dtype=torch.uint8)
        room, begin = memoryview(data.numpy().data), 0
        for extent in self._chunks[number]:
            moved(self._files[extent.file].source.path)
            count = self._files[extent.file].read(extent, room[begin : begin + extent.size], moved)
            begin += extent.size
            with self._lock:
                self._read[extent.file] += count
        return data

    def _read_ahead(self) -> Generator[torch.Tensor, None, None]:
        def path_of(number: int) -> Path:
            return self._files[self._chunks[number][0].file].source.path

        with closing(work_on_files(self._read_chunk, self._mine, path_of, self._options.timeout_s, READERS)) as chunks:
            yield from chunks

    # --- the rounds ---

    def _send_and_receive(self) -> None:
        try:
            with closing(self._read_ahead()) as reads:
                nothing = torch.empty(self._room_bytes, dtype=torch.uint8)
                for number, chunks in enumerate(self._rounds):
                    gives = chunks[self._crew.index] is not None
                    mine = next(reads) if gives else nothing
                    self._wait(lambda: self._may_receive.acquire(timeout=LOOK_S), _ignore)
                    received = torch.empty((len(self._crew), self._room_bytes), dtype=torch.uint8)
                    self._crew.exchange(mine, received)
                    self._received[number] = received
                    if gives:
                        self._may_read.release()
        except BaseException as error:
            self._error = error

    # --- writing ---

    def _write(self, item: tuple[int, int], moved: Moved) -> int:
        """Write what a node gave in a round; return its bytes."""
        number, node = item
        self._wait(lambda: number in self._received, moved)
        chunk, begin = self._rounds[number][node], 0
        room = memoryview(self._received[number][node].numpy().data)
        for extent in () if chunk is None else self._chunks[chunk]:
            file = self._files[extent.file]
            if file.lacks(extent):
                moved(file.landing.target)
                count = file.land(extent, room[begin : begin + extent.size], moved)
                with self._lock:
                    self._read[extent.file] += count
            begin += extent.size
        with self._lock:
            self._to_write[number] -= 1
            if not self._to_write[number]:
                del self._received[number]
                self._may_receive.release()
        return begin

    def _wait(self, until: Callable[[], bool], moved: Moved) -> None:
        """Wait until something is true. Raises what has ended the rounds."""
        while not until():
            if self._error is not None:
                raise self._error
            if self._ended.is_set():
                raise RuntimeError("the exchange has ended")
            moved()
            self._ended.wait(LOOK_S / 20)


def _ignore(path: Path | None = None) -> None:
    """Do nothing: nobody watches."""
