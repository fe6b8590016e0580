"""`trainer`, disturbed as by disturbed.py, which says when it takes the ranks' connections down.

leaving.py "works", or "blocks": that does not come back, as under NCCL while other ranks are in a collective; then what
disturbed.py takes.
"""

import os
import signal
import sys

import torch.distributed as dist

from tests.trainer.children.disturbed import disturb
from trainer.cli import main

destroy = dist.destroy_process_group


def blocks(group: dist.ProcessGroup | None = None) -> None:
    print("destroying", flush=True)
    while True:
        signal.pause()


def works(group: dist.ProcessGroup | None = None) -> None:
    print("destroying", flush=True)
    destroy(group)


if __name__ == "__main__":
    how, what, step, rank = sys.argv[1:5]
    del sys.argv[1:5]
    dist.destroy_process_group = {"blocks": blocks, "works": works}[how]
    if os.environ["RANK"] == rank:
        disturb(what, int(step))
    sys.exit(main())
