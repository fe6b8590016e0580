"""Every built-in recipe, scaled down, to its last step: photographs stand in for ImageNet, noise for the others."""

import numpy as np
import pytest
from PIL import Image

from datapipe.packing import PackOptions, pack
from trainer.config.recipe import Recipe, built_in, load_recipe
from trainer.run.run import RunOptions, run

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def data_sets(packed_folders, tmp_path_factory):
    """Return folders of packed data by the first word of a recipe's name."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name, shape in {"cifar10": (32, 32, 3), "fashion": (28, 28)}.items():
        for split, count in (("train", 40), ("val", 10)):
            for i in range(count):
                path = folder / "raw" / name / split / f"class{i % 10}" / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(path)
        pack(folder / "raw" / name, folder / name, PackOptions(workers=1))
    return {"imagenet": packed_folders["tar"], "cifar10": folder / "cifar10", "fashion": folder / "fashion"}


def scaled_down(recipe: Recipe) -> list[str]:
    """Return changes with which a recipe takes seconds, and has all its parts, except for large networks."""
    changes = ["train.epochs=2", "train.log_every=1", "train.target_accuracy=none", "train.compile=false"]
    changes += ["optimizer.lr=0.01", "data.threads=1", "train.batch_size=16"]
    if recipe.optimizer.preconditioner != "none":
        changes += ["kfac.factor_update_steps=1", "kfac.inv_update_steps=3", "model.name=resnet8"]
    if recipe.ema.half_life_steps:
        changes += ["ema.half_life_steps=2", "ema.update_every_steps=1"]
    if recipe.data.start_size:
        changes += ["data.start_size=32", "data.grow=[0, 0.5]"]
    if recipe.name.startswith("imagenet"):
        changes += ["data.size=48", "model.name=resnet8"]
        changes += ["data.eval_size=64"] if recipe.data.eval_size else []
    return changes


@pytest.mark.parametrize("name", built_in())
def test_a_recipe_runs_to_its_end(name, data_sets, tmp_path, metrics):
    run_to_its_end(load_recipe(name, scaled_down(load_recipe(name))), data_sets, tmp_path, metrics)


LARGE = [name for name in built_in() if "model.name=resnet8" in scaled_down(load_recipe(name))]


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_trains_its_own_network(name, data_sets, tmp_path, metrics):
    own = load_recipe(name)
    changes = [*scaled_down(own), f"model.name={own.model.name}"]
    changes += ["kfac.inv_update_steps=9"] if own.optimizer.preconditioner != "none" else []
    run_to_its_end(load_recipe(name, changes), data_sets, tmp_path, metrics)


def run_to_its_end(recipe, data_sets, tmp_path, metrics):
    name = recipe.name
    assert run(recipe, data_sets[name.split("-")[0]], tmp_path / "run", RunOptions(device="cpu")) == 0
    lines = metrics(tmp_path / "run")
    assert lines[-1]["status"] == "completed"
    assert lines[-1]["accuracy"] is not None
    steps = [line for line in lines if line["event"] == "train"]
    epochs = [line for line in lines if line["event"] == "epoch"]
    assert [line["epoch"] for line in epochs] == [1, 2]
    assert len(steps) == epochs[-1]["step"] == lines[0]["train_samples"] // recipe.train.batch_size * 2
    assert all(line["loss"] is not None for line in steps)
    assert any(line["event"] == "kfac" for line in lines) == (recipe.optimizer.preconditioner != "none")
