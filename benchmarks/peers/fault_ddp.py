"""A training by DistributedDataParallel, as one writes it by hand: a checkpoint after each epoch, and resuming.

torchrun --nproc-per-node 2 -m benchmarks.peers.fault_ddp --data DIR --out DIR --epochs N --batch-size B
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.fault_task import Images, arguments, build_network, build_optimizer, compute_loss


def main() -> None:
    settings = arguments()
    dist.init_process_group("gloo")
    images = Images(settings.data)
    sampler = DistributedSampler(images)
    loader = DataLoader(images, settings.batch_size, sampler=sampler, drop_last=True)
    network = build_network()
    optimizer = build_optimizer(network)
    path, begin = settings.out / "checkpoint.pt", 0
    if path.exists():
        content = torch.load(path, weights_only=True)
        network.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        begin = content["epoch"]
    model = DistributedDataParallel(network)
    for epoch in range(begin, settings.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            compute_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            settings.out.mkdir(exist_ok=True)
            content = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(content, path.with_suffix(".partial"))
            os.replace(path.with_suffix(".partial"), path)
            print(f"epoch {epoch + 1}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
