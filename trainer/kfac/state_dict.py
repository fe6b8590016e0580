"""The states of all ranks, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .curvature_block import Block


def merged(states: Sequence[dict], keys: set[str], solver: str, blocks: Mapping[str, Block]) -> dict[str, dict]:
    """The states of all layers, of a preconditioner whose own state has these `keys`. Raises ValueError when they are
    not those of its layers, shapes and solver, or not of one step.
    """
    if not all(isinstance(state, dict) for state in states):
        raise ValueError("states: not dictionaries; call load_state_dict(*states)")
    lacking = {key for state in states for key in keys - state.keys()}
    if lacking or not states:
        raise ValueError(f"states: none, or not those of a preconditioner (lacking: {', '.join(sorted(lacking))})")
    for name in ("steps", "factor_update_steps"):
        values = sorted({state[name] for state in states})
        if len(values) > 1:
            raise ValueError(f"states: of different runs or steps, with {name} = {', '.join(map(str, values))}")
    solvers = {state["solver"] for state in states}
    if solvers != {solver}:
        raise ValueError(f"solver: the state is of {', '.join(sorted(solvers))}, not {solver}")
    layers = {name: saved for state in states for name, saved in state["layers"].items()}
    missing, unknown = sorted(blocks.keys() - layers.keys()), sorted(layers.keys() - blocks.keys())
    if missing or unknown:
        raise ValueError(f"layers: the states (of all ranks?) lack {missing}, and have {unknown} besides")
    for name, block in blocks.items():
        saved = layers[name].get("shapes")
        if saved != block.layer.shapes():
            raise ValueError(f"layer {name}: the state's factors are {saved}, not {block.layer.shapes()}")
        if lacking := block.state_dict().keys() - layers[name].keys():
            raise ValueError(f"layer {name}: the state lacks {', '.join(sorted(lacking))}")
    return layers
