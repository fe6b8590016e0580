"""A loader is a plain iterable in others' training loops: DDP, accelerate, Lightning, on two ranks by torchrun."""

import json
import os
import subprocess
import sys

import pytest

from datapipe.sampling.order import permutation

# torch.distributed.nn, and the end of the model: else gloo's threads outlive the group (see trainer/distributed.py).
DDP = """
import torch, torch.distributed as dist, torch.distributed.nn
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with loader_of(rank, ranks) as loader:
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            note(epoch, batch)
finish(model.module)
del model, optimizer
dist.destroy_process_group()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
with loader_of(accelerator.process_index, accelerator.num_processes) as loader:  # sharded already: not prepared
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            note(epoch, batch)
finish(accelerator.unwrap_model(model))
accelerator.end_training()
"""

LIGHTNING = """
import os, torch
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, _):
        note(self.current_epoch, batch)
        return loss_of(self.net, batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.01)
class Epochs(lightning.Callback):
    def on_train_epoch_start(self, trainer, module):
        loader.set_epoch(trainer.current_epoch)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[Epochs()],
)
module = Module()
with loader_of(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as loader:
    trainer.fit(module, loader)
finish(module.net)
"""

COMMON = """
import json, sys, torch
from datapipe.loaders import open_loader
torch.manual_seed(0)
seen = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 16 * 16, 3)
    def forward(self, x):
        return self.layer(x)
def loader_of(rank, ranks):
    return open_loader(sys.argv[1], 8 // ranks, size=16, seed=4, rank=rank, world_size=ranks)
def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch.images.flatten(1).float() / 255), batch.labels)
def note(epoch, batch):
    seen.append((epoch, batch.samples.tolist()))
def finish(net):
    import os
    weights = [p.detach().flatten().double().sum().item() for p in net.parameters()]
    with open(f"{sys.argv[2]}/{os.environ['RANK']}.json", "w") as file:
        json.dump({"seen": seen, "weights": weights}, file)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("framework", ["ddp", "accelerate", "lightning"])
def test_two_ranks_see_every_sample_once(packed_folders, tmp_path, framework):
    if framework != "ddp":
        pytest.importorskip(framework)
    body = {"ddp": DDP, "accelerate": ACCELERATE, "lightning": LIGHTNING}[framework]
    (tmp_path / "child.py").write_text(COMMON + body)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(tmp_path / "child.py"), str(packed_folders["tar"] / "train"), str(tmp_path)]  # fmt: skip
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["weights"] == pytest.approx(ranks[1]["weights"], rel=1e-6)
    for epoch in range(2):
        steps = [[batch for number, batch in rank["seen"] if number == epoch] for rank in ranks]
        assert len(steps[0]) == len(steps[1]) == 7
        together = [sample for a, b in zip(*steps, strict=True) for sample in (*a, *b)]
        assert together == permutation(61, 4, epoch)[:56].tolist()
