"""Intervals against scipy, against their definition, and against their promise: to cover the truth 95 times in 100."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.measuring.statistics import Estimate, describe, mean_difference, mean_ratio, student_quantile

VALUES = st.lists(st.floats(0.01, 1e4), min_size=2, max_size=8)
SIMULATIONS = 4000


@given(st.floats(1, 5000))
def test_quantiles(freedom):
    from scipy import stats  # which takes a second, in each worker

    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


@given(VALUES)
def test_a_mean(values):
    from scipy import stats

    sample = describe(values)
    assert (sample.num, sample.mean) == (len(values), pytest.approx(np.mean(values)))
    assert sample.std == pytest.approx(np.std(values, ddof=1), abs=1e-9)
    if sample.std > 1e-9 * sample.mean:
        interval = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert (sample.low, sample.high) == pytest.approx(interval, rel=1e-6, abs=1e-9)


@given(VALUES, VALUES)
def test_a_difference_is_welchs(a, b):
    from scipy import stats

    estimate = mean_difference(a, b)
    if min(np.std(values) / max(values) for values in (a, b)) > 1e-6:  # scipy warns of less
        interval = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
        assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-6)
    assert estimate.value == pytest.approx(np.mean(b) - np.mean(a), abs=1e-9)


@given(VALUES, VALUES, st.floats(0.1, 10))
def test_a_ratio(a, b, factor):
    """The other way round it is the inverse, and in other units the same."""
    from scipy import stats

    ratio, inverse = mean_ratio(a, b), mean_ratio(b, a)
    assert ratio.value == pytest.approx(stats.gmean(b) / stats.gmean(a))
    assert ratio.low <= ratio.value <= ratio.high
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx(
        (-math.log(inverse.high), -math.log(inverse.low)), abs=1e-6
    ) or math.inf in (ratio.high, inverse.high)
    scaled = mean_ratio([factor * value for value in a], [factor * value for value in b])
    assert scaled.value == pytest.approx(ratio.value)


def test_what_is_unknown():
    assert describe([]).num == 0 and math.isnan(describe([]).mean)
    assert describe([3.0]).mean == 3.0 and math.isnan(describe([3.0]).low)
    assert math.isnan(mean_ratio([], [1.0]).value)
    single = mean_ratio([2.0], [3.0, 3.1])
    assert single.value == pytest.approx(1.5247, abs=1e-3) and math.isnan(single.low)
    assert not single.is_beyond_noise(1.0)


def test_without_any_spread():
    assert mean_difference([2.0, 2.0], [3.0, 3.0]) == Estimate(1.0, 1.0, 1.0)
    assert mean_difference([2.0, 2.0], [3.0, 3.0]).is_beyond_noise(0.0)
    assert not mean_difference([2.0, 2.0], [2.0, 2.0]).is_beyond_noise(0.0)


def test_hardly_any_spread_and_a_wide_one():
    tiny = [1.0, 1.0 + 2**-52]
    assert mean_difference(tiny, tiny).value == 0
    assert mean_ratio([1e-300, 1e300], [1e-300, 1e300]).high == math.inf


@pytest.mark.parametrize("num", [3, 5])
def test_the_mean_is_covered(num):
    draws = np.random.default_rng(num).normal(10, 2, (SIMULATIONS, num))
    samples = [describe(values) for values in draws.tolist()]
    assert 0.93 <= np.mean([sample.low <= 10 <= sample.high for sample in samples]) <= 0.97


@pytest.mark.parametrize(("sizes", "spreads"), [((5, 5), (0.1, 0.1)), ((5, 5), (0.05, 0.3)), ((4, 8), (0.3, 0.1))])
def test_the_ratio_is_covered(sizes, spreads):
    """Also with another spread on each side, for which Student's own interval of two samples is not made."""
    random = np.random.default_rng(sum(sizes))
    a, b = (
        np.exp(random.normal(math.log(mean), spread, (SIMULATIONS // 2, size)))
        for mean, size, spread in zip((100, 70), sizes, spreads, strict=True)
    )
    estimates = [mean_ratio(*pair) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    assert 0.93 <= np.mean([estimate.low <= 0.7 <= estimate.high for estimate in estimates]) <= 0.97


def test_equal_means_are_seldom_called_different():
    random = np.random.default_rng(7)
    a, b = random.normal(0.9, 0.01, (2, SIMULATIONS // 2, 5)).tolist()
    differ = [mean_difference(*pair).is_beyond_noise(0.0) for pair in zip(a, b, strict=True)]
    assert 0.03 <= np.mean(differ) <= 0.07
