"""`trainer`, disturbed at a chosen moment: disturbed.py WHAT STEP RANK, and then the words of the command.

WHAT happens to this rank before the update of this step; "best": it is killed where it would keep a checkpoint as the
best; "part": where it would send or gather the parts of this step's checkpoint; "file": where that is complete, except
for its name; "nan": the loss of this step is not a number, once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from typing import Any

from torch import Tensor

from datapipe.loaders import Batch
from trainer.checkpoints import file
from trainer.cli import main
from trainer.run import loop, objective, saving
from trainer.run.job import Job
from trainer.run.state import State

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT, "stop": signal.SIGSTOP}
ERRORS = {"surprise": ZeroDivisionError("a surprise"), "second Ctrl-C": KeyboardInterrupt(), "exit": SystemExit(143)}


def _kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disturb(what: str, chosen: int) -> None:
    """Have it happen in this process, in the chosen step."""
    real_update, real_loss, real_copy = loop._update, objective.batch_loss, saving._copy
    left = [chosen]

    def update(job: Job, state: State, *step: Any) -> None:
        if state.step + 1 == chosen and what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
        if state.step + 1 == chosen and what in ERRORS:
            raise ERRORS[what]
        real_update(job, state, *step)

    def batch_loss(job: Job, batch: Batch, step: int, *answers: list[Tensor]) -> Tensor:
        loss = real_loss(job, batch, step, *answers)
        if step + 1 == chosen and left:
            left.clear()
            return loss * math.nan
        return loss

    def copy(job: Job, state: State, *rest: Any, **options: Any) -> Any:
        if state.step == chosen:
            if what == "part":
                saving.gather = _kill
            else:
                file.move_earlier = _kill
        return real_copy(job, state, *rest, **options)

    if what in ("part", "file"):
        saving._copy = copy
    elif what == "best":
        saving.keep_best = _kill
    elif what == "nan":
        objective.batch_loss = batch_loss
    else:
        loop._update = update


if __name__ == "__main__":
    what, step, rank = sys.argv[1:4]
    del sys.argv[1:4]
    if os.environ.get("RANK", "0") == rank or rank == "all":
        disturb(what, int(step))
    sys.exit(main())
