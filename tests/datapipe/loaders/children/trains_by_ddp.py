"""Train two epochs with PyTorch's DistributedDataParallel."""

import torch
import torch.distributed as dist
import torch.distributed.nn  # else gloo's threads outlive the group (see trainer/ranks/world.py)

from tests.datapipe.loaders.children.small_training import Net, finish, loss_of, open_part

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with open_part() as loader:
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            loss_of(model, batch, epoch).backward()
            optimizer.step()
            optimizer.zero_grad()
finish(model.module)
del model, optimizer  # as above
dist.destroy_process_group()
