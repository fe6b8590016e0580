"""Scaling from metrics that are written here: rates, segments of resumed runs, and what failed."""

import csv
import json
import math

import pytest

from datapipe.errors import DatapipeError, SettingError
from tests.trainer.measuring.test_runs import recipe, seed
from tests.trainer.reporting.test_report import end, epoch, header, train, write
from trainer.measuring.runs import Outcome, read_outcome
from trainer.measuring.scaling import read_scales, write_scaling
from trainer.measuring.segments import Segment, split_run, tabulate

ONE_RUN = "one run: its spread is not known"


def resume(step: int, ranks: int) -> dict:
    return {"event": "resume", "step": step, "world_size": ranks, "elapsed_s": 1.0}


def outcomes(folder, ranks: int, *rates: float) -> list[Outcome]:
    runs = [seed(folder / f"ranks-{ranks}", i, images_per_s=rate, world_size=ranks) for i, rate in enumerate(rates)]
    return [read_outcome(run) for run in runs]


def resumed(folder) -> Outcome:
    """Two epochs on 4 ranks, one and a half on 2 and then back on 4, where the third is done to its end."""
    lines = [epoch(1, 0.3, images_per_s=4000.0), epoch(2, 0.4, images_per_s=1000.0), resume(200, 2)]
    lines += [train(step, images_per_s=1500.0) for step in range(210, 251, 10)]
    lines += [resume(250, 4), *(train(step, images_per_s=5000.0) for step in range(260, 301, 10))]
    lines += [epoch(3, 0.5, images_per_s=7.0), end()]
    return read_outcome(write(folder, header(world_size=4, recipe=recipe()), *lines))


def test_a_whole_run_is_one_segment(tmp_path):
    (outcome,) = outcomes(tmp_path, 2, 3000.0)
    assert split_run(outcome.run) == [Segment(2, (0, 200), 3000.0)]


def test_resumed_on_as_many_ranks_it_is_whole(tmp_path):
    run = read_outcome(write(tmp_path / "run", header(), epoch(1, 0.5), resume(100, 1), epoch(2, 0.9), end())).run
    assert split_run(run) == [Segment(1, (0, 200), 2345.6)]


def test_each_segment_is_rated_as_what_it_was(tmp_path):
    """Equally many images at 4,000/s and at 1,000/s are 1,600/s; an epoch that two segments share rates neither."""
    segments = split_run(resumed(tmp_path / "run").run)
    assert [(part.ranks, part.steps) for part in segments] == [(4, (0, 200)), (2, (200, 250)), (4, (250, 300))]
    assert [part.images_per_s for part in segments] == pytest.approx([1600, 1500, 5000])


def test_a_segment_too_short_for_a_line(tmp_path):
    run = read_outcome(write(tmp_path / "run", header(), epoch(1, 0.5), resume(100, 2), end())).run
    assert [part.images_per_s for part in split_run(run)] == [2000.0, pytest.approx(math.nan, nan_ok=True)]


def test_the_table(tmp_path):
    scales = {ranks: outcomes(tmp_path, ranks, *rates) for ranks, rates in ((2, (1900.0, 2100.0)), (4, (3000.0,) * 3))}
    scales[4].append(resumed(tmp_path / "ranks-4" / "seed-3"))
    two, four, *segments = tabulate(scales)
    assert (two.num_runs, two.images_per_s.mean, two.images_per_s.std) == (2, 2000, pytest.approx(141.42, abs=0.01))
    assert (two.speed_up, two.efficiency, two.images_per_s_per_rank) == (2, 1, 1000)  # the fewest ranks are the ideal
    assert (four.num_runs, four.speed_up, four.efficiency, four.images_per_s_per_rank) == (3, 3, 0.75, 750)
    assert four.note == "without 1 resumed on other numbers"
    assert [(row.ranks, row.segment) for row in segments] == [
        (4, "seed-3, steps 0 to 200"),
        (2, "seed-3, steps 200 to 250"),
        (4, "seed-3, steps 250 to 300"),
    ]
    assert [row.efficiency for row in segments] == pytest.approx([0.4, 0.75, 1.25])
    assert segments[0].note == "part of a run begun on 4, in ranks-4"


def test_what_failed_and_what_is_too_much(tmp_path):
    scales = {1: outcomes(tmp_path, 1, 1000.0), 2: [], 4: outcomes(tmp_path, 4, 1000.0, 1000.0), 8: []}
    scales[4][1].run.end["status"] = "failed"
    scales[4][1].attempts.append({"exit_code": 1, "nodes": 1, "cores": 2})
    scales[8] = [Outcome("seed-0", None, [{"exit_code": 2, "nodes": 2, "cores": 2}])]
    rows = {row.ranks: row for row in tabulate(scales)}
    assert rows[2].note == "failed before it began"
    assert rows[4].note == "1 of 2 finished; exit code 1; one run: its spread is not known; more ranks than cores, 2"
    assert rows[8].note == "failed; 0 of 1 finished; exit code 2; more ranks than cores, 4"
    assert (rows[8].nodes, rows[1].nodes) == (2, None)
    assert math.isnan(rows[8].efficiency) and rows[4].efficiency == 0.25


def test_what_still_trains_has_not_failed(tmp_path):
    scales = {1: outcomes(tmp_path, 1, 1000.0), 2: outcomes(tmp_path, 2, 1000.0)}
    scales[2][0].run.end = None
    (_, two) = tabulate(scales)
    assert two.note == "0 of 1 finished"


def test_nothing_can_be_rated():
    (row,) = tabulate({2: []})
    assert math.isnan(row.speed_up)


def test_weak_scaling_says_batch_and_rate(tmp_path):
    scales = {}
    for ranks, rule in ((1, "linear"), (4, "none")):
        begin = header(world_size=ranks, global_batch_size=128 * ranks, peak_lr=0.1 * ranks, recipe=recipe())
        begin["recipe"] |= {"optimizer": {"lr_scaling": rule}}
        run = write(tmp_path / f"ranks-{ranks}" / "seed-0", begin, epoch(1, 0.5), end())
        scales[ranks] = [read_outcome(run)]
    one, four = tabulate(scales)
    assert one.note == f"batch 128, 128 per rank, learning rate 0.1 (scaled: linear); {ONE_RUN}"
    assert four.note == f"batch 512, 128 per rank, learning rate 0.4 (not scaled); {ONE_RUN}"
    assert tabulate({1: scales[1]})[0].note == ONE_RUN  # all alike


def test_files(tmp_path):
    for ranks, rates in ((1, (1000.0, 1100.0)), (2, (1800.0, 1900.0)), (8, ())):
        (tmp_path / f"ranks-{ranks}").mkdir()
        outcomes(tmp_path, ranks, *rates)
    resumed(tmp_path / "ranks-2" / "seed-2")
    table, code = write_scaling(tmp_path)
    assert code == 1  # 8 ranks have failed
    assert (tmp_path / "scaling.txt").read_text() == table
    rows = list(csv.DictReader((tmp_path / "scaling.csv").read_text().splitlines()))
    assert [row["ranks"] for row in rows] == ["1", "2", "4", "2", "4", "8"]
    assert (rows[0]["images_per_s"], rows[-1]["images_per_s"]) == ("1050.0", "")
    assert float(rows[1]["efficiency"]) == pytest.approx(1850 / 2100)
    values = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert values[1]["images_per_s"]["num"] == 2 and values[-1]["speed_up"] is None
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "scaling.pdf").read_bytes().startswith(b"%PDF")


def test_only_failures_are_drawn_too(tmp_path):
    (tmp_path / "ranks-2").mkdir()
    assert write_scaling(tmp_path)[1] == 1


def test_no_scales(tmp_path):
    (tmp_path / "ranks-x").mkdir()
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DatapipeError, match="holds no folder ranks-N"):
            read_scales(folder)


def test_other_targets(tmp_path):
    outcomes(tmp_path, 1, 1000.0)
    seed(tmp_path / "ranks-2", 0, recipe=recipe(target_accuracy=0.5))
    with pytest.raises(SettingError, match=r"\(ranks-1, seed-0\) and \(ranks-2, seed-0\) cannot be compared: target"):
        read_scales(tmp_path)
