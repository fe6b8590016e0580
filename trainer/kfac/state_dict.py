"""The states of all ranks, merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .curvature_block import CurvatureBlock


def merge_state_dicts(
    states: Sequence[dict[str, Any]], own: dict[str, Any], blocks: Mapping[str, CurvatureBlock]
) -> dict[str, dict[str, Any]]:
    """Return the states of all layers, by name.

    Args:
        states: The states of all ranks that there were.
        own: A state of the preconditioner that is to have them: each must have its keys and its solver.
        blocks: The layers that they must have together, by name.

    Raises:
        ValueError: The states have other layers, shapes or another solver, or are not all of one step.
    """
    if not all(isinstance(state, dict) for state in states):
        raise ValueError("states: not dictionaries; call load_state_dict(*states)")
    lacking = {key for state in states for key in own.keys() - state.keys()}
    if lacking or not states:
        raise ValueError(f"states: none, or not those of a preconditioner (lacking: {', '.join(sorted(lacking))})")
    for name in ("steps", "factor_update_steps"):
        values = sorted({state[name] for state in states})
        if len(values) > 1:
            raise ValueError(f"states: of different runs or steps, with {name} = {', '.join(map(str, values))}")
    solvers = {state["solver"] for state in states}
    if solvers != {own["solver"]}:
        raise ValueError(f"solver: the state is of {', '.join(sorted(solvers))}, not {own['solver']}")
    layers = {name: layer for state in states for name, layer in state["layers"].items()}
    missing, unknown = sorted(blocks.keys() - layers.keys()), sorted(layers.keys() - blocks.keys())
    if missing or unknown:
        raise ValueError(f"layers: the states (of all ranks?) lack {missing}, and have {unknown} besides")
    for name, block in blocks.items():
        shapes = layers[name].get("shapes")
        if shapes != block.layer.shapes():
            raise ValueError(f"layer {name}: the state's factors are {shapes}, not {block.layer.shapes()}")
        if lacking := block.state_dict().keys() - layers[name].keys():
            raise ValueError(f"layer {name}: the state lacks {', '.join(sorted(lacking))}")
    return layers
