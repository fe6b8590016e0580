"""How many images may be bad."""

import pytest

from datapipe.packing import PackOptions


@pytest.mark.parametrize(
    ("max_bad", "allowed"), [("0", 0), (3, 3), ("12", 12), ("0%", 0), ("0.1%", 2), ("100%", 2500), ("0.01%", 0)]
)
def test_a_number_or_a_share_in_percent(max_bad, allowed):
    assert PackOptions(max_bad=max_bad).bad_allowed(2500) == allowed
