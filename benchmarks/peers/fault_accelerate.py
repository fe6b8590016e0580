"""The same training by accelerate. `accelerate launch --cpu` starts several ranks by mpirun alone, so torchrun does.

torchrun --nproc-per-node 2 -m benchmarks.peers.fault_accelerate --data DIR --out DIR --epochs N --batch-size B
"""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

from benchmarks.peers.fault_task import Images, arguments, build_network, build_optimizer, compute_loss


def main() -> None:
    settings = arguments()
    project = ProjectConfiguration(str(settings.out), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    network = build_network()
    loader = DataLoader(Images(settings.data), settings.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(network, build_optimizer(network), loader)
    saved = sorted(settings.out.glob("checkpoints/checkpoint_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    begin = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        begin = project.iteration = int(saved[-1].name.rpartition("_")[2]) + 1
    for epoch in range(begin, settings.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            accelerator.backward(compute_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state()
        accelerator.print(f"epoch {epoch + 1}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
