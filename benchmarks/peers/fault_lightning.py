"""The same training by Lightning, which starts the ranks of this node itself.

python -m benchmarks.peers.fault_lightning --data DIR --out DIR --epochs N --batch-size B
"""

from __future__ import annotations

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.peers.fault_task import Images, arguments, build_network, build_optimizer, compute_loss


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = build_network()

    def training_step(self, batch: tuple[Tensor, Tensor], _batch_idx: int) -> Tensor:
        loss = compute_loss(self.network, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.network)


def main() -> None:
    settings = arguments()
    trainer = Trainer(
        max_epochs=settings.epochs,
        accelerator="cpu",
        strategy="ddp",
        devices=settings.ranks_per_node,
        num_nodes=settings.nodes,
        default_root_dir=settings.out,
        plugins=[LightningEnvironment()],  # what it finds by itself, where mpi4py is not there without an MPI library
        callbacks=[ModelCheckpoint(settings.out, save_last=True)],
        enable_progress_bar=False,
    )
    loader = DataLoader(Images(settings.data), settings.batch_size, shuffle=True, drop_last=True)
    trainer.fit(Classifier(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
