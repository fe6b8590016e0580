"""Each node reads its share of the chunks from the shared filesystem, and sends it to all others.

In a *round*, each node gives one chunk. Reading the chunks of the next rounds, sending those of this one, and writing
those of the last overlap.
"""

from __future__ import annotations

import base64
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from .. import clock
from ..console import Progress
from ..errors import StagingError
from ..jobgroup.gloo import NodeGroup
from ..jobgroup.group import Crew
from ..jobgroup.mpi import MpiGroup
from ..watched import Moved, work_on_files
from .options import Request
from .plan import cut_files, needed_bytes, share_reads
from .transfer import Transfer

READERS = 2  # threads that read this node's chunks
AHEAD = 3  # chunks that are read ahead
_ROUNDS = 2  # rounds in memory: one is received while the other is written
ROUND_BYTES = 512 << 20  # the most that a round takes: with more than 64 nodes, chunks are smaller
LEAST_BYTES = 256 << 10  # but not smaller than this
_LOOK_S = 0.2


def chunk_bytes_for(num_nodes: int, chunk_bytes: int) -> int:
    """Return the size of a chunk, at most `chunk_bytes`, with which a round of so many nodes fits into memory."""
    room = ROUND_BYTES // num_nodes
    return min(chunk_bytes, max(LEAST_BYTES, 1 << (room.bit_length() - 1)))


def exchange(files: list[Transfer], crew: Crew, address: str, request: Request) -> None:
    """Get what this node lacks of some files from the others, and read for them what they lack.

    Args:
        files: Files of all data sets, the same on each node.
        crew: Nodes, which this connects.
        address: Address of this one.
        request: Data sets that the files belong to.

    Raises:
        CrewError: Another node is gone. What has landed until then stays, and no thread is at work on it any more.
        DatapipeError, OSError: This node cannot read, or cannot write.
    """
    timeout_s = request.options.timeout_s
    is_mpi = request.options.transport == "mpi"
    group = MpiGroup(crew, timeout_s) if is_mpi else NodeGroup(crew, address, timeout_s)
    _Exchange(files, group, crew, request).run()


def _pack(flags: list[bool]) -> str:
    return base64.b64encode(zlib.compress(np.packbits(flags).tobytes())).decode()


def _unpack(text: str, count: int) -> np.ndarray:
    """Return bool[count]."""
    packed = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    return np.unpackbits(packed, count=count).astype(bool)


class _Exchange:
    """The rounds of an exchange: this node's reads, one thread that sends and receives, and threads that write."""

    def __init__(self, files: list[Transfer], group: NodeGroup | MpiGroup, crew: Crew, request: Request) -> None:
        self._files, self._request, self._options = files, request, request.options
        self._group, self._index, self._num_nodes = group, crew.index, len(crew)
        chunk_bytes = files[0].landing.chunk_bytes
        self._chunks = chunks = cut_files([file.source.info.size_bytes for file in files], chunk_bytes)
        mine = [any(files[extent.file].lacks(extent) for extent in chunk) for chunk in chunks]
        missing = np.array([_unpack(text, len(chunks)) for text in crew.gather("missing", _pack(mine))])
        shares = share_reads(missing, max(1, self._options.chunk_bytes // chunk_bytes))
        self._rounds = list(zip_longest(*shares))  # of each, by node, the number of the chunk that it gives, or None
        self._mine = shares[self._index]
        self._room_bytes = max((sum(extent.size for extent in chunk) for chunk in chunks), default=0)
        self._lock = threading.Lock()
        self._num_sent = 0  # of this node's chunks
        self._may_receive = threading.Semaphore(_ROUNDS)
        self._received: dict[int, torch.Tensor] = {}  # by round: uint8[nodes, room]
        self._spare: dict[int, list[torch.Tensor]] = {1: [], self._num_nodes: []}  # by chunks: memory to use again
        self._to_write = [self._num_nodes] * len(self._rounds)  # chunks of a round that are not written yet
        self._num_writing = 0  # threads that are at work on this node's files
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Exchange all chunks. Raises what `exchange` does."""
        threading.Thread(target=self._send_and_receive, name="datapipe-exchange", daemon=True).start()
        writes = [(number, node) for number in range(len(self._rounds)) for node in range(self._num_nodes)]
        target, options = self._files[0].landing.target, self._options
        written = work_on_files(self._write, writes, lambda _: target, options.timeout_s, options.num_streams)
        total = needed_bytes([self._chunks[chunk] for chunks in self._rounds for chunk in chunks if chunk is not None])
        try:
            with closing(written), Progress(f"staging {self._request.source}", total, "B") as progress:
                for num_bytes in written:
                    progress.advance(num_bytes)
        finally:
            with self._lock:
                self._ended.set()
            self._wait_for_writers()

    def _wait_for_writers(self) -> None:
        """Wait until no thread is at work on this node's files. Raises StagingError when one hangs."""
        deadline = clock.now() + self._options.timeout_s
        while self._num_writing:
            if clock.now() > deadline:
                raise StagingError("a write does not end", path=self._files[0].landing.target.parent)
            time.sleep(_LOOK_S)

    def _take_room(self, num_chunks: int) -> torch.Tensor:
        """Return memory for chunks: uint8[num_chunks, room]; only at first is it new, which the kernel must clear."""
        try:
            return self._spare[num_chunks].pop()
        except IndexError:
            return torch.empty((num_chunks, self._room_bytes), dtype=torch.uint8)

    # --- this node's reads, ahead of the rounds ---

    def _read_chunk(self, item: tuple[int, int], moved: Moved) -> torch.Tensor:
        """Read a chunk for all: uint8[1, room]. `item`: its place among this node's, and its number."""
        place, number = item
        self._wait(lambda: place < self._num_sent + AHEAD, moved)
        data = self._take_room(1)
        room, begin = memoryview(data[0].numpy().data), 0
        for extent in self._chunks[number]:
            file = self._files[extent.file]
            moved(file.source.path)
            self._count(file, file.read(extent, room[begin : begin + extent.size], moved))
            begin += extent.size
        return data

    def _count(self, file: Transfer, num_bytes: int) -> None:
        with self._lock:
            file.copied_bytes += num_bytes

    def _path_of(self, item: tuple[int, int]) -> Path:
        return self._files[self._chunks[item[1]][0].file].source.path

    # --- the rounds ---

    def _send_and_receive(self) -> None:
        try:
            items = list(enumerate(self._mine))
            reads = work_on_files(self._read_chunk, items, self._path_of, self._options.timeout_s, READERS)
            with closing(reads):
                nothing = self._take_room(1)
                for number, chunks in enumerate(self._rounds):
                    gives = chunks[self._index] is not None
                    mine = next(reads) if gives else nothing
                    self._wait(lambda: self._may_receive.acquire(timeout=_LOOK_S), lambda *_: None)
                    received = self._take_room(self._num_nodes)
                    self._group.exchange(mine[0], received)
                    self._received[number] = received
                    self._num_sent += gives
                    if gives:
                        self._spare[1].append(mine)
        except BaseException as error:
            self._error = error

    # --- writing ---

    def _write(self, item: tuple[int, int], moved: Moved) -> int:
        """Write what a node gave in a round; return its bytes."""
        number, node = item
        self._wait(lambda: number in self._received, moved)
        with self._lock:
            if self._ended.is_set():
                raise RuntimeError("the exchange has ended")
            self._num_writing += 1
        try:
            return self._write_chunk(number, node, moved)
        finally:
            with self._lock:
                self._num_writing -= 1

    def _write_chunk(self, number: int, node: int, moved: Moved) -> int:
        chunk, begin = self._rounds[number][node], 0
        room = memoryview(self._received[number][node].numpy().data)
        complete = []
        for extent in () if chunk is None else self._chunks[chunk]:
            file = self._files[extent.file]
            if file.lacks(extent):
                moved(file.landing.target)
                if file.landing.write(extent.offset, room[begin : begin + extent.size]):
                    complete.append(file)
            begin += extent.size
        with self._lock:
            self._to_write[number] -= 1
            if not self._to_write[number]:
                self._spare[self._num_nodes].append(self._received.pop(number))
                self._may_receive.release()
        for file in complete:  # which takes long: the next round does not wait for it
            self._count(file, file.finish(moved))
        return begin

    def _wait(self, until: Callable[[], bool], moved: Moved) -> None:
        """Wait until something is true. Raises what has ended the rounds."""
        while not until():
            if self._error is not None:
                raise self._error
            if self._ended.is_set():
                raise RuntimeError("the exchange has ended")
            moved()
            self._ended.wait(_LOOK_S / 20)
