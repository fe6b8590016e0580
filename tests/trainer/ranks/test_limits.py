"""Until when a run may take."""

import pytest

from datapipe.errors import SettingError
from trainer.ranks.limits import find_end, parse_limit

JOB = {"SLURM_JOB_END_TIME": "1500"}


@pytest.mark.parametrize(
    ("environ", "max_time", "end"),
    [({}, None, None), ({}, "5", 1300), (JOB, None, 1500), (JOB, "5", 1300), (JOB, "10", 1500)],
)
def test_the_earlier_of_the_jobs_end_and_the_users_limit_counts(environ, max_time, end):
    assert find_end(environ, max_time, now=1000) == end


def test_half_a_minute_is_kept_for_the_last_checkpoint():
    assert parse_limit("--time", "0:31") == 31
    with pytest.raises(SettingError, match="--time 0:30: is 30 s, of which 30 s are kept"):
        parse_limit("--time", "0:30")
