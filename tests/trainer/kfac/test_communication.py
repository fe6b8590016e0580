"""Flat buffers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.kfac.communication import Message, cut_range, flatten_messages, unflatten_messages


@given(st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_what_is_packed_comes_out_again(n, groups, symmetric):
    matrix = torch.randn(groups, n, n)
    matrix = matrix + matrix.mT if symmetric else matrix
    parts = [Message(matrix, symmetric), Message(torch.randn(3))]
    flat = flatten_messages(parts)
    assert len(flat) == groups * (n * (n + 1) // 2 if symmetric else n * n) + 3
    into = [Message(torch.empty_like(part.tensor), part.symmetric) for part in parts]
    unflatten_messages(flat, into)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(into, parts, strict=True))


@given(st.lists(st.integers(0, 9), min_size=1), st.data())
def test_a_range_is_cut_where_sections_end(sizes, data):
    total = sum(sizes)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    section_of = [number for number, size in enumerate(sizes) for _ in range(size)]
    parts = cut_range(sizes, start, stop)
    for number, part in enumerate(parts):
        assert section_of[start:stop][part] == [n for n in section_of[start:stop] if n == number]
    assert sum(part.stop - part.start for part in parts) == stop - start
