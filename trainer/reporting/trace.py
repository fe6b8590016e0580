"""What a few steps of a run were spent on, on all its ranks: as a trace for Perfetto, and as shares. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

ROWS = "data", "host", "compute", "communication"
Interval = tuple[float, float]


class Span(NamedTuple):
    """Something that took time: from `begin_us` to `end_us`, in microseconds on the first rank's clock."""

    row: str
    name: str
    begin_us: float
    end_us: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same.

    >>> union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return how much of the time intervals cover together."""
    return sum(end - begin for begin, end in union(intervals))


def compute_shares(spans: Sequence[Span]) -> dict[str, float]:
    """Return which share of the time one rank spent on each of ROWS; together they are 1.

    What overlaps counts once, for the first of these that was under way: computing, waiting for data, communication
    (which is thus what no computation hid), and the host's own work, which is also all the rest.
    """
    whole = [(span.begin_us, span.end_us) for span in spans if span.row in ("data", "host")]
    covered: list[Interval] = []
    shares, before = {}, 0.0
    for row in ("compute", "data", "communication"):
        covered += [(span.begin_us, span.end_us) for span in spans if span.row == row]
        now = length(_clip(covered, whole))
        shares[row], before = now - before, now
    total = length(whole)
    shares["host"] = total - before
    return {row: shares[row] / total for row in ROWS}


def _clip(intervals: Iterable[Interval], bounds: Sequence[Interval]) -> list[Interval]:
    first, last = min(begin for begin, _ in bounds), max(end for _, end in bounds)
    return [(max(begin, first), min(end, last)) for begin, end in intervals if begin < last and end > first]


def chrome_trace(spans_by_rank: Sequence[Sequence[Span]], hosts: Sequence[str]) -> dict[str, Any]:
    """Return a trace in Chrome's format, which Perfetto opens: a process for each rank, in it a track for each row.

    Args:
        spans_by_rank: Spans of each rank.
        hosts: Name of each rank's host.
    """
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(spans_by_rank):
        name = f"rank {rank} ({hosts[rank]})" if hosts else f"rank {rank}"
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
        for number, row in enumerate(ROWS):
            tracks = _into_tracks([span for span in spans if span.row == row])
            for i, track in enumerate(tracks):
                tid = 100 * number + i
                events.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": row}})
                index = {"sort_index": tid}
                events.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_sort_index", "args": index})
                events += [
                    {
                        "ph": "X",
                        "pid": rank,
                        "tid": tid,
                        "cat": row,
                        "name": span.name,
                        "ts": round(span.begin_us, 3),
                        "dur": round(span.end_us - span.begin_us, 3),
                    }
                    for span in track
                ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _into_tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide spans into as few lists as it takes for none to overlap in one: a track shows nothing else."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin_us):
        track = next((track for track in tracks if track[-1].end_us <= span.begin_us), None)
        if track is None:
            tracks.append(track := [])
        track.append(span)
    return tracks
