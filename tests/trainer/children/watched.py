"""`trainer`, in which a rank does what the others have to notice: watched.py WHAT, and then the words of the command.

"hangs": rank 1 stands still for ever in its third step. "flips": in the place of its second update, a bit of its
weights changes as well. "slow": its forward passes take a tenth of a second longer. "computes": the last rank computes
for ever in its third step, where no handler of Python's can run, once there is a file "computes".
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainer.cli import main
from trainer.ranks import heartbeat
from trainer.run import loop, objective

RANK, WORLD_SIZE = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
STEP = 2  # from 0


def behave(what: str) -> None:
    """Have it happen in this process."""
    real_loss, real_update = objective.batch_loss, loop._update
    updates = []

    def batch_loss(job: Any, batch: Any, step: int, *answers: Any) -> Any:
        if what == "slow":
            time.sleep(0.1)
        while what == "hangs" and step == STEP:
            time.sleep(1)
        if what == "computes" and step == STEP:
            Path("computes").touch()
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second call waits for ever, and no signal interrupts it
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        return real_loss(job, batch, step, *answers)

    def update(job: Any, *arguments: Any) -> None:
        real_update(job, *arguments)
        updates.append(1)
        if len(updates) == STEP:
            weight = next(parameter for name, parameter in job.module.named_parameters() if "fc" in name)
            weight.data.flatten()[:1].view(torch.int32).bitwise_xor_(1 << 3)

    if what == "flips":
        loop._update = update
    else:
        objective.batch_loss = batch_loss


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what == "slow":
        heartbeat.COMPARE_S = 4
    if (WORLD_SIZE - 1 if what == "computes" else 1) == RANK:
        behave(what)
    sys.exit(main())
