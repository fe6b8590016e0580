"""Processes that wait for each other: who is silent is named, and who lives may take its time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from datapipe import clock
from datapipe.cluster import Placement
from datapipe.jobgroup import group as crew_module
from datapipe.jobgroup.group import Crew
from datapipe.jobgroup.store import CrewError, LeftError

PLACE_1 = Placement(rank=1, world_size=3, master="node0")


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def crew(store: dist.Store) -> Iterator[Crew]:
    """The first of three processes, which may be silent for 100 s."""
    crew = Crew("rank", "test", (store, store), Placement(world_size=3, master="node0"), timeout_s=100.0)
    yield crew
    crew._heart.stop()


def test_a_silent_process_is_named_and_one_that_lives_is_waited_for(crew, store, monkeypatch) -> None:
    """Process 1 has stopped. Process 2 lives, and answers after more time than a process may be silent."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += 5
        assert now[0] < 1000, "it waits for ever"
        store.set("beat/2", json.dumps([now[0], None]))
        if now[0] >= 300:
            store.set("subject/2", json.dumps("of 2"))

    monkeypatch.setattr(clock, "now", lambda: now[0])
    monkeypatch.setattr(crew_module, "time", SimpleNamespace(sleep=sleep))
    store.set("beat/1", json.dumps([7, None]))
    with pytest.raises(CrewError, match=r"^process 1 did not answer for 100 s \(timeout_s\)$"):
        crew.gather_from_ranks("subject", "of 0")
    assert 100 < now[0] < 150
    now[0] = 0.0
    store.set("subject/1", json.dumps("of 1"))
    assert crew.gather_from_ranks("subject", "of 0") == ["of 0", "of 1", "of 2"]
    assert now[0] >= 300


def test_after_a_broken_connection_the_silent_process_is_named(crew, store, monkeypatch) -> None:
    beats = iter(range(100))

    def sleep(_: float) -> None:
        store.set("beat/2", json.dumps([next(beats), None]))

    monkeypatch.setattr(crew_module, "time", SimpleNamespace(sleep=sleep))
    store.set("beat/1", json.dumps([7, None]))
    assert crew.explain(RuntimeError("reset by peer")).startswith("process 1 ")
    assert crew.missing == [1]
    store.set("left/1", "its disk is full")
    assert crew.explain(RuntimeError("reset by peer")) == "process 1 has left: its disk is full"


def test_a_process_that_is_done_is_not_named(crew, store, monkeypatch) -> None:
    """It is as silent as one that is lost."""
    monkeypatch.setattr(crew_module, "time", SimpleNamespace(sleep=lambda _: None))
    for rank in (1, 2):
        store.set(f"beat/{rank}", json.dumps([7, None]))
    store.set("bye/1", "")
    assert crew.explain(RuntimeError("reset by peer")).startswith("process 2 does not answer")
    assert sorted(crew.missing) == [1, 2]  # neither is waited for


def test_who_leaves_before_all_have_come_is_named_at_once(crew, store) -> None:
    """Although it has answered, and process 2 has not. Where all have answered, who left did so after that."""
    store.set("subject/1", json.dumps("of 1"))
    crew_module.Crew.leave(SimpleNamespace(_ask=lambda question, _: question(), _store=store, placement=PLACE_1), "why")
    with pytest.raises(LeftError, match=r"^process 1 has left: why$"):
        crew.gather_from_ranks("subject", "of 0")
    store.set("subject/2", json.dumps("of 2"))
    assert crew.gather_from_ranks("subject", "of 0") == ["of 0", "of 1", "of 2"]


def test_a_process_that_is_cut_off_does_not_wait_long_for_an_explanation(crew, monkeypatch) -> None:
    """Not as long as another may be silent: nothing else may end it meanwhile."""
    real, limits = crew._ask, []

    def ask(question, limit_s=None):
        limits.append(limit_s)
        return real(question, limit_s)

    monkeypatch.setattr(crew, "_ask", ask)
    monkeypatch.setattr(crew_module, "time", SimpleNamespace(sleep=lambda _: None))
    assert "does not answer" in crew.explain(RuntimeError("no route to host"))
    assert set(limits) == {crew_module.LISTEN_S}
