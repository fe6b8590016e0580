"""What is said of K-FAC where it does nothing."""

import math

import pytest

from trainer.reporting.changes import advise_kfac, describe_kfac


@pytest.mark.parametrize(
    ("clipped", "clip_steps", "cosine", "words"),
    [
        (899, 1000, 0.5, []),
        (900, 1000, 0.5, ["kl_clip (now auto) bound 90% of 1,000 steps", "a lower optimizer.lr, or a higher kl_clip"]),
        (0, 0, 0.5, []),
        (10, 1000, 0.97, ["kfac.damping below 0.003", "0.97, so that K-FAC hardly did more than scale"]),
        (0, 0, math.nan, []),
    ],
)  # fmt: skip
def test_advice(clipped, clip_steps, cosine, words):
    lines = advise_kfac(clipped, clip_steps, cosine, "auto", 0.003)
    assert len(lines) == bool(words) and all(word in lines[0] for word in words)


def test_both_may_be_so():
    assert len(advise_kfac(5, 5, 1.0, 1e-3, 1.0)) == 2


def test_in_words():
    assert describe_kfac(1234, 2000, 0.875) == "K-FAC: the clip bound 1,234 of 2,000 steps; median cosine 0.88"
    assert describe_kfac(0, 0, 0.5) == "K-FAC: no step had a clip; median cosine 0.50"
