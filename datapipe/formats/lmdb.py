"""LMDB shards: one environment file with the entries `key.jpg` -> image and `key.cls` -> the label in ASCII.

The file is laid out here, as LMDB 0.9 (data version 1, 64-bit, little-endian) would do it, because LMDB itself writes
through a memory map of the whole file. The structures are those of libraries/liblmdb/mdb.c: MDB_meta on the first two
pages, MDB_page and MDB_node in a B+tree of the entries in the order of their names. A value too large for a node lies
in one piece on overflow pages of its own, which are written as it comes; the tree's pages follow at the end.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from ..images import Buffer
from ..images.codec import ImageHeader
from . import Finished
from .naming import EXTENSIONS

SUFFIX = ".lmdb"
PAGE_BYTES = 4096
# Half a page of padding behind each image, and the names and the label in the leaves.
OVERHEAD_BYTES = PAGE_BYTES // 2 + 128

MAGIC, DATA_VERSION = 0xBEEFC0DE, 1
_MAX_NAME_BYTES = 511  # MDB_MAXKEYSIZE
MAX_VALUE_BYTES = 0xFFFFFFFF  # MAXDATASIZE
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8  # flags of a page
BIG_DATA = 1  # flag of a node: its value is the number of the overflow page where the data begins
INTEGER_KEY = 8  # flag of the tree of free pages

PAGE_HEADER = struct.Struct("<Q 2x H 2H")  # number, flags, lower and upper bound of the free space
OVERFLOW_HEADER = struct.Struct("<Q 2x H I")  # number, flags, count of pages
NODE_HEADER = struct.Struct("<I 2H")  # size of the value, flags, size of the name
TREE = struct.Struct("<I 2H 5Q")  # page size or 0, flags, depth, pages (branch, leaf, overflow), entries, root
# A page's number, flags; magic, data version, address, size of the map, two trees; last page, transaction.
META_PAGE = struct.Struct("<Q 2x H 4x 2I 2Q 48s 48s 2Q")

NUM_METAS = 2
NO_PAGE = 0xFFFFFFFFFFFFFFFF
FREE_PAGES = TREE.pack(PAGE_BYTES, INTEGER_KEY, 0, 0, 0, 0, 0, NO_PAGE)  # none
NO_ENTRIES = TREE.pack(0, 0, 0, 0, 0, 0, 0, NO_PAGE)
# me_nodemax: two nodes, with their pointers, fit on any page.
MAX_NODE_BYTES = (PAGE_BYTES - PAGE_HEADER.size) // 2 - 2

Node = tuple[bytes, bytes, int]  # name, content, and which image its value is: -1 for none


class Writer:
    """Lays out an LMDB shard."""

    head = bytes(NUM_METAS * PAGE_BYTES)

    def __init__(self) -> None:
        self._num_pages = NUM_METAS
        self._offsets: list[int] = []
        self._nodes: list[Node] = []

    def add(self, key: str, label: int, data: Buffer, header: ImageHeader) -> Sequence[Buffer]:
        name, size = f"{key}.{EXTENSIONS[header.encoding]}".encode(), len(data)
        if len(name) > _MAX_NAME_BYTES:
            raise ValueError(f"the name {name.decode()!r} has {len(name)} bytes, LMDB holds {_MAX_NAME_BYTES}")
        if size > MAX_VALUE_BYTES:
            raise ValueError(f"{name.decode()!r} has {size} bytes, LMDB holds values up to {MAX_VALUE_BYTES}")
        label_name, text = f"{key}.cls".encode(), b"%d" % label
        self._nodes.append((label_name, _leaf_node(label_name, text, len(text), 0), -1))
        if NODE_HEADER.size + len(name) + size <= MAX_NODE_BYTES:
            self._nodes.append((name, _leaf_node(name, data, size, 0), len(self._offsets)))
            self._offsets.append(0)  # replaced in `finish`, when the leaf has a place
            return ()
        page = self._num_pages
        num_bytes = OVERFLOW_HEADER.size + size
        num_pages = -(-num_bytes // PAGE_BYTES)
        self._nodes.append((name, _leaf_node(name, page.to_bytes(8, "little"), size, BIG_DATA), -1))
        self._offsets.append(page * PAGE_BYTES + OVERFLOW_HEADER.size)
        self._num_pages += num_pages
        return OVERFLOW_HEADER.pack(page, OVERFLOW, num_pages), data, bytes(num_pages * PAGE_BYTES - num_bytes)

    def finish(self) -> Finished:
        self._nodes.sort()
        tree = _Tree(self._nodes, self._num_pages)
        for image, offset in tree.inline:
            self._offsets[image] = offset
        last_page = self._num_pages + len(tree.pages) - 1
        num_pages = len(tree.pages) - tree.num_leaves, tree.num_leaves, self._num_pages - NUM_METAS
        root = last_page if tree.pages else NO_PAGE
        entries = TREE.pack(0, 0, tree.depth, *num_pages, len(self._nodes), root)
        # As after the file's creation and one transaction: LMDB takes the page of the later one.
        map_bytes = (last_page + 1) * PAGE_BYTES
        metas = _meta_page(0, map_bytes, NO_ENTRIES, NUM_METAS - 1) + _meta_page(1, map_bytes, entries, last_page)
        return Finished(b"".join(tree.pages), {0: metas}, self._offsets, {})


class _Tree:
    """The pages of a B+tree of sorted `nodes`: the leaves first, the root last."""

    def __init__(self, nodes: list[Node], first_page: int) -> None:
        self.pages: list[bytes] = []
        self.inline: list[tuple[int, int]] = []  # an image in a leaf, and its place in the file
        self.depth = 0
        self._first_page = first_page
        nodes = self._add_level(LEAF, nodes)
        self.num_leaves = len(self.pages)
        while len(nodes) > 1:
            nodes = self._add_level(BRANCH, nodes)

    def _add_level(self, flags: int, nodes: list[Node]) -> list[Node]:
        """Put the nodes on pages; return the nodes of the level above, one per page."""
        parents = []
        for group in _group_by_page(nodes):
            number = self._first_page + len(self.pages)
            parents.append((group[0][0], _branch_node(group[0][0], number), -1))
            contents = [content for _, content, _ in group]
            if flags == BRANCH:  # the first child is for all names before the second's: it needs no name itself
                contents[0] = contents[0][:6] + bytes(2)
            places = [PAGE_BYTES - end for end in accumulate(map(len, contents))]
            self.pages.append(_tree_page(number, flags, contents, places))
            for (name, _, image), place in zip(group, places, strict=True):
                if image >= 0:
                    self.inline.append((image, number * PAGE_BYTES + place + NODE_HEADER.size + len(name)))
        self.depth += bool(parents)
        return parents


def _group_by_page(nodes: list[Node]) -> list[list[Node]]:
    """Group nodes by page, as many as fit with a pointer each. A branch must have at least two children."""
    groups: list[list[Node]] = []
    room = 0
    for node in nodes:
        needed = len(node[1]) + 2
        if needed > room:
            groups.append([])
            room = PAGE_BYTES - PAGE_HEADER.size
        groups[-1].append(node)
        room -= needed
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-1].insert(0, groups[-2].pop())
    return groups


def _tree_page(number: int, flags: int, nodes: list[bytes], places: list[int]) -> bytes:
    """Build a page. Pointers to the nodes, in order, grow up from its beginning; the nodes grow down from its end."""
    lower, upper = PAGE_HEADER.size + 2 * len(places), places[-1]
    pointers = struct.pack(f"<{len(places)}H", *places)
    return PAGE_HEADER.pack(number, flags, lower, upper) + pointers + bytes(upper - lower) + b"".join(nodes[::-1])


def _leaf_node(name: bytes, value: Buffer, size: int, flags: int) -> bytes:
    node = b"".join((NODE_HEADER.pack(size, flags, len(name)), name, value))
    return node + b"\0" if len(node) % 2 else node


def _branch_node(name: bytes, page: int) -> bytes:
    """Build a branch's node. The page's number takes six bytes: mn_lo, mn_hi and mn_flags of MDB_node."""
    return (page | len(name) << 48).to_bytes(8, "little") + name + bytes(len(name) % 2)


def _meta_page(number: int, map_bytes: int, entries: bytes, last_page: int) -> bytes:
    """Build a meta page, whose number is also that of the transaction that wrote it."""
    meta = META_PAGE.pack(number, META, MAGIC, DATA_VERSION, 0, map_bytes, FREE_PAGES, entries, last_page, number)
    return meta.ljust(PAGE_BYTES, b"\0")


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield key, image and label of every sample, through the package lmdb."""
    import lmdb

    with lmdb.open(os.fsencode(path), subdir=False, readonly=True, lock=False) as env, env.begin() as transaction:
        for name, value in transaction.cursor():
            key, _, extension = name.decode().partition(".")
            if extension != "cls":
                yield key, value, int(transaction.get(f"{key}.cls".encode(), b""))
