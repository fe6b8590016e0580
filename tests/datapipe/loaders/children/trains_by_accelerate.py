"""Train two epochs with accelerate."""

import torch
from accelerate import Accelerator

from tests.datapipe.loaders.children.small_training import Net, finish, loss_of, open_part

accelerator = Accelerator(cpu=True)
net = Net()
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
with open_part() as loader:  # sharded already: not prepared
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            accelerator.backward(loss_of(model, batch, epoch))
            optimizer.step()
            optimizer.zero_grad()
finish(accelerator.unwrap_model(model))
accelerator.end_training()
