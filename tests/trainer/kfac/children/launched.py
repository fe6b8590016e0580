"""Learns from a batch of its own, and prints the sum of its gradients: launched.py [connect] [independent]."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

from trainer.kfac import KFAC

if "connect" in sys.argv:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
torch.manual_seed(sum(int(os.environ.get(name, 0)) for name in ("RANK", "OMPI_COMM_WORLD_RANK")))
try:
    preconditioner = KFAC(network, independent="independent" in sys.argv)
except ValueError as error:
    sys.exit(f"refused: {error}")
model = nn.parallel.DistributedDataParallel(network) if "connect" in sys.argv else network
model(torch.randn(8, 4)).square().mean().backward()
preconditioner.step()
gradients = [parameter.grad for parameter in network.parameters()]
total = sum(gradient.sum().item() for gradient in gradients if gradient is not None)
os.write(1, f"trained {total}\n".encode())  # in one piece: torchrun has print() write each word by itself
os._exit(0)  # gloo's threads may abort a process that ends while their group is there
