"""How many steps an epoch has."""

import pytest

from datapipe.sampling.order import num_steps


@pytest.mark.parametrize(
    ("num_samples", "last", "steps"),
    [(15, "pad", 4), (16, "pad", 4), (17, "pad", 5), (1, "pad", 1), (15, "drop", 3), (16, "drop", 4), (17, "drop", 4)],
)
def test_the_last_batch_is_dropped_or_filled_up_and_never_of_padding_alone(num_samples, last, steps):
    assert num_steps(num_samples, 4, last) == steps
