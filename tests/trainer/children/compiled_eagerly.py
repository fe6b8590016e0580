"""`trainer`, whose networks are compiled to what they were: compiled_eagerly.py, then the words of the command.

With RANK_THAT_FAILS, the compiler of that rank fails.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from trainer.cli import main

COMPILE = nn.Module.compile


def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
    if os.environ["RANK"] == os.environ.get("RANK_THAT_FAILS"):
        raise RuntimeError("no compiler here")
    return graph


def compile_eagerly(module: nn.Module, **_: Any) -> None:
    COMPILE(module, backend=backend)


if __name__ == "__main__":
    nn.Module.compile = compile_eagerly  # type: ignore[method-assign, assignment]
    sys.exit(main())
