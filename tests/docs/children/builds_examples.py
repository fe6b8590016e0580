"""Take a step with the network and the optimizer of the worked example "fashion-mnist-tiny", of the code in FOLDER."""

import sys

import torch


def take_step(folder: str) -> None:
    """Print which network and which optimizer have changed all parameters."""
    import trainer
    from trainer import models, optim
    from trainer.config.recipe import built_in, load_recipe

    assert str(trainer.__file__).startswith(folder)
    assert "fashion-mnist-tiny" in built_in()
    recipe = load_recipe("fashion-mnist-tiny")
    network = models.build(recipe.model.name, num_classes=10, in_channels=1)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer = optim.build(recipe.optimizer, network)
    network(torch.ones(2, 1, recipe.data.size, recipe.data.size)).logsumexp(1).sum().backward()
    optimizer.step()
    assert not any(old.equal(new) for old, new in zip(before, network.parameters(), strict=True))
    print(type(network).__name__, type(optimizer).__name__)


if __name__ == "__main__":
    for name in [name for name in sys.modules if name.partition(".")[0] in ("datapipe", "trainer")]:
        del sys.modules[name]  # a server's, which are not the folder's
    sys.path.insert(0, sys.argv[1])
    take_step(sys.argv[1])
