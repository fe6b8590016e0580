"""Train two epochs with Lightning."""

import lightning
import torch

from datapipe.loaders import Batch
from tests.datapipe.loaders.children.small_training import Net, finish, loss_of, open_part


class Module(lightning.LightningModule):
    """The network, and how to train it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        return loss_of(self.net, batch, self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


class Epochs(lightning.Callback):
    """Tell the loader which epoch begins."""

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        loader.set_epoch(trainer.current_epoch)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
    callbacks=[Epochs()],
)
module = Module()
with open_part() as loader:
    trainer.fit(module, loader)
finish(module.net)
