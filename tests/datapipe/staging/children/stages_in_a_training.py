"""Stage in the middle of a training, which has a process group: SOURCE LOCAL."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from datapipe.cluster import placement
from datapipe.staging import StageOptions, stage

dist.init_process_group("gloo")
stage(
    Path(sys.argv[1]),
    Path(sys.argv[2] + os.environ["RANK"]),
    StageOptions(placement=placement(os.environ), chunk_mib=1),
)
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
dist.destroy_process_group()
