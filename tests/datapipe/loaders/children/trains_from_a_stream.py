"""Train on the ranks of a job from a FOLDER of 41 streamed samples, and count that each was seen once."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # else gloo's threads outlive the group (see trainer/ranks/world.py)

from datapipe.loaders import open_loader

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3 * 16 * 16, 2))
seen = torch.zeros(64)
with open_loader(sys.argv[1], 2, backend="webdataset", size=16, rank=rank, world_size=num_ranks, last="pad") as loader:
    for batch in loader:
        model(batch.images.flatten(1).float()).sum().backward()  # an all-reduce: waits for every rank
        seen[batch.labels[batch.valid]] += 1
dist.all_reduce(seen)
assert seen.tolist() == [1.0] * 41 + [0.0] * 23, seen
print("done", rank)
del model  # as above
dist.destroy_process_group()
