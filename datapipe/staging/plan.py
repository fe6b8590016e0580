"""What has to be copied, in which pieces, in which order, and by whom (pure).

A *chunk* is what a thread copies at a time, or what one node reads for all: a part of a large file, or several small
files. So ten thousand small shards are copied as fast as ten large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np


class Extent(NamedTuple):
    """Neighbouring bytes of a file."""

    file: int  # its number among all files of the copy
    offset: int  # in bytes
    size: int


Chunk = tuple[Extent, ...]


def cut_files(sizes: Sequence[int], chunk_bytes: int) -> list[Chunk]:
    """Cut files into chunks, in the order of the files.

    A file larger than a chunk begins a chunk of its own, so that its chunks begin at multiples of `chunk_bytes`.

        >>> for chunk in cut_files([25, 3, 4, 4], chunk_bytes=10): print([tuple(extent) for extent in chunk])
        [(0, 0, 10)]
        [(0, 10, 10)]
        [(0, 20, 5)]
        [(1, 0, 3), (2, 0, 4)]
        [(3, 0, 4)]

    Args:
        sizes: Sizes of the files, in bytes. An empty file has an extent without bytes.
        chunk_bytes: Size of a chunk in bytes, at least 1.
    """
    chunks: list[Chunk] = []
    group: list[Extent] = []
    room = chunk_bytes
    for file, size in enumerate(sizes):
        if group and size > room:
            chunks.append(tuple(group))
            group, room = [], chunk_bytes
        if size > chunk_bytes:
            offsets = range(0, size, chunk_bytes)
            chunks += [(Extent(file, offset, min(chunk_bytes, size - offset)),) for offset in offsets]
        else:
            group.append(Extent(file, 0, size))
            room -= size
    return [*chunks, tuple(group)] if group else chunks


def stagger(chunks: Sequence[Chunk], node: int, num_nodes: int, width: int) -> list[Chunk]:
    """Return the order in which a node copies chunks: `width` files at a time, each node beginning with others.

    So a node's threads read from several storage targets, and nodes that begin together do not queue at the same one.

    Args:
        chunks: Chunks, as `cut_files` returns them.
        node: Number of the node, from 0.
        num_nodes: Number of nodes that copy the same files.
        width: Number of files at a time, from 1.
    """
    files: list[list[Chunk]] = []  # a group of small files counts as one
    for chunk in chunks:
        if files and files[-1][0][0].file == chunk[0].file:
            files[-1].append(chunk)
        else:
            files.append([chunk])
    first = node * len(files) // num_nodes
    files = files[first:] + files[:first]
    rows = (zip_longest(*files[i : i + width]) for i in range(0, len(files), width))
    return [chunk for row in rows for column in row for chunk in column if chunk is not None]


def share_reads(missing: np.ndarray, run: int) -> list[list[int]]:
    """Divide the chunks that nodes lack: each is read by one node, and sent to all.

    A chunk that some node has is read from such a node's own disk.

        >>> share_reads(np.array([[True, True, True, True, False], [True, True, True, False, False]]), run=1)
        [[0, 2], [1, 3]]

    Args:
        missing: Table, bool[nodes, chunks], of whether a node lacks a chunk.
        run: Number of neighbouring chunks that a node reads, from 1.

    Returns:
        Numbers of the chunks that each node reads, by node, in ascending order. No chunk that nobody lacks.
    """
    num_nodes = len(missing)
    readers = np.full(missing.shape[1], -1)
    nowhere = np.flatnonzero(missing.all(axis=0))
    readers[nowhere] = np.arange(len(nowhere)) // run % num_nodes
    for turn, chunk in enumerate(np.flatnonzero(missing.any(axis=0) & ~missing.all(axis=0))):
        holders = np.flatnonzero(~missing[:, chunk])
        readers[chunk] = holders[turn % len(holders)]
    return [np.flatnonzero(readers == node).tolist() for node in range(num_nodes)]


def needed_bytes(chunks: Sequence[Chunk]) -> int:
    """Return the bytes of some chunks."""
    return sum(extent.size for chunk in chunks for extent in chunk)
