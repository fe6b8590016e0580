"""What K-FAC did to a run's steps, in words, and what to change where that was nothing. Pure."""

from __future__ import annotations

from typing import Any

NEARLY_ALL = 0.9  # the share of the steps from which on the clip decides their length
HARDLY_TURNED = 0.95  # the median cosine from which on gradients are hardly more than scaled


def describe_kfac(clipped: float, clip_steps: float, cosine: float) -> str:
    """Return what K-FAC did, as a clause.

    Args:
        clipped: Steps that `kl_clip` made shorter.
        clip_steps: Steps that had a clip.
        cosine: Median over the layers of the cosine between the raw and the preconditioned gradient.
    """
    clip = f"the clip bound {clipped:,.0f} of {clip_steps:,.0f} steps" if clip_steps else "no step had a clip"
    return f"K-FAC: {clip}; median cosine {cosine:.2f}"


def advise_kfac(clipped: float, clip_steps: float, cosine: float, kl_clip: Any, damping: float) -> list[str]:
    """Return what to change where the clip decides nearly every step, and where gradients keep their direction.

    Args:
        clipped: Steps that `kl_clip` made shorter.
        clip_steps: Steps that had a clip.
        cosine: Median over the layers of the cosine between the raw and the preconditioned gradient.
        kl_clip: The recipe's.
        damping: Damping at the end of the run.
    """
    lines = []
    if clip_steps and clipped >= NEARLY_ALL * clip_steps:
        share = f"{clipped / clip_steps:.0%} of {clip_steps:,.0f} steps"
        lines.append(
            f"kfac.kl_clip (now {kl_clip}) bound {share}, so that it decided how long they were, and the learning rate "
            "and its schedule did not: a lower optimizer.lr, or a higher kl_clip, lets them"
        )
    if cosine >= HARDLY_TURNED:
        lines.append(
            f"kfac.damping below {damping:.2g}: the median cosine between raw and preconditioned gradients was "
            f"{cosine:.2f}, so that K-FAC hardly did more than scale them"
        )
    return lines
