"""Learning rates as tables."""

import math

import pytest

from trainer.optim.schedules import (
    ConstantSchedule,
    CosineSchedule,
    OneCycleSchedule,
    PolynomialSchedule,
    StepSchedule,
    last_change,
    multiplier,
    scaled_lr,
)

STEPS = 10  # an epoch

TABLES = [
    (ConstantSchedule(name="constant"), 4, {0: 1.0, 39: 1.0}),
    (ConstantSchedule(name="constant", warmup_epochs=1.0), 4, {0: 0.0, 5: 0.5, 9: 0.9, 10: 1.0}),
    (ConstantSchedule(name="constant", warmup_epochs=0.45, warmup_start=0.5), 1, {0: 0.5, 4: 0.9, 5: 1.0}),
    (StepSchedule(name="step", milestones=(1.0, 2.5)), 4, {9: 1.0, 10: 0.1, 24: 0.1, 25: 0.01, 39: 0.01}),
    (StepSchedule(name="step", milestones=(2.0,), gamma=0.5, warmup_epochs=1.0), 3, {0: 0, 10: 1, 20: 0.5}),
    (CosineSchedule(name="cosine"), 4, {0: 1.0, 10: (1 + math.sqrt(0.5)) / 2, 20: 0.5, 40: 0.0}),
    (CosineSchedule(name="cosine", warmup_epochs=2.0, final=0.2), 4, {10: 0.5, 20: 1.0, 30: 0.6, 40: 0.2}),
    (OneCycleSchedule(name="onecycle", peak_at=0.25), 4, {0: 0.0, 5: 0.5, 10: 1.0, 25: 0.5, 40: 0.0}),
    (OneCycleSchedule(name="onecycle", peak_at=0.5, start=0.2, final=0.1), 2, {0: 0.2, 10: 1.0, 20: 0.1}),
    (PolynomialSchedule(name="polynomial"), 4, {0: 1.0, 10: 0.75**2, 20: 0.25, 40: 0.0}),
    (
        PolynomialSchedule(name="polynomial", power=1.0, warmup_epochs=2.0, final=0.2),
        4,
        {10: 0.5, 20: 1, 30: 0.6, 40: 0.2},
    ),
]


@pytest.mark.parametrize(("settings", "epochs", "table"), TABLES)
def test_multiplier(settings, epochs, table):
    found = {step: multiplier(settings, step, STEPS, epochs) for step in table}
    assert found == pytest.approx(table)


def test_warm_up_that_fills_the_whole_run_leaves_no_division_by_zero():
    settings = CosineSchedule(name="cosine", warmup_epochs=2.0)
    assert [multiplier(settings, step, STEPS, 2) for step in (0, 19)] == pytest.approx([0.0, 0.95])


@pytest.mark.parametrize(
    ("scaling", "batch", "expected"),
    [("none", 8192, 0.1), ("linear", 8192, 3.2), ("linear", 64, 0.025), ("sqrt", 1024, 0.2), ("sqrt", 64, 0.05)],
)
def test_scaled_lr(scaling, batch, expected):
    assert scaled_lr(0.1, scaling, batch, 256) == pytest.approx(expected)


def test_unscaled_lr_needs_no_batch():
    assert scaled_lr(0.1, "none", 512, None) == 0.1


def test_where_a_schedule_changes_last():
    assert last_change(StepSchedule(name="step", milestones=(3.0, 7.5))) == ("milestones", 7.5)
    assert last_change(StepSchedule(name="step", milestones=(3.0,), warmup_epochs=5.0)) == ("warmup_epochs", 5.0)
    assert last_change(CosineSchedule(name="cosine", warmup_epochs=2.0)) == ("warmup_epochs", 2.0)
    assert last_change(OneCycleSchedule(name="onecycle"))[1] == 0
