"""Spans of time: their union and shares against a count of moments, and the trace as a viewer reads it."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trainer.reporting.trace import ROWS, Span, chrome_trace, compute_shares, length, union

moments = st.integers(0, 60)
intervals = st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair)))
spans = st.lists(st.builds(lambda row, pair: Span(row, row, *pair), st.sampled_from(ROWS), intervals), max_size=30)


@given(st.lists(intervals, max_size=20))
def test_a_union_covers_the_same_moments_once(given_intervals):
    covered = {moment for begin, end in given_intervals for moment in range(begin, end)}
    merged = union(given_intervals)
    assert {moment for begin, end in merged for moment in range(begin, end)} == covered
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    assert length(given_intervals) == len(covered)


@given(spans)
def test_each_moment_of_the_steps_counts_for_one_row(some):
    some = [*some, Span("data", "wait", 10, 20), Span("host", "step", 20, 50)]  # these follow each other without a gap
    some = [span for span in some if span.row not in ("data", "host") or span.name in ("wait", "step")]
    count = dict.fromkeys(ROWS, 0)
    for moment in range(10, 50):
        under_way = {span.row for span in some if span.begin_us <= moment < span.end_us}
        count[next(row for row in ("compute", "data", "communication", "host") if row in under_way)] += 1
    assert compute_shares(some) == {row: its / 40 for row, its in count.items()}


@given(st.lists(spans, min_size=1, max_size=3))
def test_a_trace_has_each_span_once_and_none_overlaps_on_its_track(by_rank):
    events = chrome_trace(by_rank, [f"host{rank}" for rank in range(len(by_rank))])["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank, its in enumerate(by_rank):
        found = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        as_spans = [Span(e["cat"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in found]
        assert sorted(as_spans) == sorted(its)
        assert all(names[rank, e["tid"]] == e["cat"] for e in found)
        for track in {e["tid"] for e in found}:
            on_it = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["tid"] == track)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(on_it))
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"rank {rank} (host{rank})" for rank in range(len(by_rank))]
