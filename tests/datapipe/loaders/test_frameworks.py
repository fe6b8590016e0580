"""A loader is a plain iterable in others' training loops: DDP, accelerate, Lightning, on two ranks."""

import json
import os
from pathlib import Path

import pytest

from datapipe.sampling.order import permutation
from tests.waiting import limit_s

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("accelerate", "lightning")]


@pytest.mark.ranks
@pytest.mark.parametrize("framework", ["ddp", *SLOW])
def test_two_ranks_see_every_sample_once(start_ranks, packed_folders, tmp_path, monkeypatch, framework):
    if framework != "ddp":
        pytest.importorskip(framework)
    monkeypatch.setitem(os.environ, "ACCELERATE_USE_CPU", "true")
    program = Path(__file__).parent / "children" / f"trains_by_{framework}.py"
    job = start_ranks(2, program, packed_folders["tar"] / "train", tmp_path)
    _, errors = job.communicate(limit_s())
    assert job.returncode == 0, errors
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["weights"] == pytest.approx(ranks[1]["weights"], rel=1e-6)
    for epoch in range(2):
        steps = [[batch for number, batch in rank["seen"] if number == epoch] for rank in ranks]
        assert len(steps[0]) == len(steps[1]) == 7
        together = [sample for a, b in zip(*steps, strict=True) for sample in (*a, *b)]
        assert together == permutation(61, 4, epoch)[:56].tolist()
