"""Means, differences and ratios with their 95 % intervals. Pure.

A mean's interval is Student's (1908). That of a difference of two means is Welch's (1947, Biometrika 34, 28–35), whose
variances need not be equal, with Satterthwaite's degrees of freedom (1946, Biometrics Bulletin 2, 110–114). A ratio is
one of geometric means: the difference of the means of logarithms, with Welch's interval, taken back. Seconds and rates
vary by factors, so that their logarithms are nearer to normal; A/B is 1/(B/A), interval included; and the interval is
finite whatever the noise, which Fieller's (1954), for a ratio of arithmetic means, is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np

_COVERAGE = 0.95
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True)
class Sample:
    """What is known of a figure from several runs. NaN is what is unknown: of no values, or of the spread of one.

    Attributes:
        num: Number of values.
        mean: Mean of the values.
        std: Standard deviation of the values, that of a sample (n - 1).
        low: Lower end of the 95 % interval of the mean.
        high: Upper end of the 95 % interval of the mean.
    """

    num: int
    mean: float = math.nan
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Estimate:
    """A difference or a ratio, and its 95 % interval, which is NaN where one side has a single value."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def is_beyond_noise(self, neutral: float) -> bool:
        """Return whether the interval leaves out `neutral`, the value of no difference; False without an interval."""
        return self.low > neutral or self.high < neutral


def describe(values: Sequence[float]) -> Sample:
    """Return the mean of finite values, their spread, and the interval of the mean."""
    if not values:
        return Sample(0)
    mean = fmean(values)
    if len(values) == 1:
        return Sample(1, mean)
    std = stdev(values)
    half = student_quantile(len(values) - 1) * std / math.sqrt(len(values))
    return Sample(len(values), mean, std, mean - half, mean + half)


def mean_difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return the mean of `b` less that of `a`, with Welch's interval; NaN where a side has no value."""
    if not a or not b:
        return Estimate(math.nan)
    difference = fmean(b) - fmean(a)
    if len(a) == 1 or len(b) == 1:
        return Estimate(difference)
    variances = stdev(a) ** 2 / len(a), stdev(b) ** 2 / len(b)
    total = sum(variances)
    if total == 0:
        return Estimate(difference, difference, difference)
    share = variances[0] / total
    freedom = 1 / (share**2 / (len(a) - 1) + (1 - share) ** 2 / (len(b) - 1))
    half = student_quantile(freedom) * math.sqrt(total)
    return Estimate(difference, difference - half, difference + half)


def mean_ratio(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return the geometric mean of `b` over that of `a`, all above 0, with its interval; NaN where a side is empty."""
    logs = mean_difference([math.log(value) for value in a], [math.log(value) for value in b])
    return Estimate(*(_exp(value) for value in (logs.value, logs.low, logs.high)))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:  # the interval of two runs may be as wide as that
        return math.inf


@cache
def student_quantile(freedom: float) -> float:
    """Return t such that Student's t lies between -t and t with a probability of 95 %.

    With T = √ν tan θ the density is cos(θ)^(ν-1) up to a factor, so smooth that Gauss–Legendre quadrature gives its
    integral to the last digits; the angle is found by bisection.

    Args:
        freedom: Degrees of freedom, ν, from 1; need not be whole.
    """
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high = 0.0, math.pi / 2
    while (angle := (low + high) / 2) not in (low, high):
        part = angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (freedom - 1))
        low, high = (angle, high) if part < _COVERAGE * whole else (low, angle)
    return math.sqrt(freedom) * math.tan(angle)
