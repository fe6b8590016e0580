"""Recipes: what is refused, and in which words."""

import inspect
import re
import tomllib
from contextlib import nullcontext

import pytest
import torch
from pydantic import BaseModel

from datapipe.errors import SettingError
from datapipe.loaders import open_loader
from trainer.config.explain import section_classes
from trainer.config.recipe import Recipe, built_in, check_resumable, load_recipe, parse
from trainer.optim import kfac
from trainer.optim.schedules import last_change, multiplier

NAMES = [
    "cifar10-resnet32",
    "cifar10-resnet32-kfac",
    "cifar10-speedrun",
    "fashion-mnist-resnet20",
    "fashion-mnist-resnet20-kfac",
    "fashion-mnist-resnet8",
    "fashion-mnist-speedrun",
    "imagenet-resnet50",
    "imagenet-resnet50-fast16",
    "imagenet-resnet50-fast24",
    "imagenet-resnet50-fast32",
    "imagenet-resnet50-kfac",
    "imagenet-resnet50-mild",
    "imagenet-resnet50-mild-kfac",
    "imagenet-resnet50-mlperf-lars",
]


def test_built_in_recipes_are_valid_and_name_their_source():
    assert list(built_in()) == NAMES
    for name in NAMES:
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.source


def test_every_setting_has_a_description_which_the_reference_page_shows():
    sections = [kind for name in Recipe.model_fields for kind in section_classes(Recipe, name)]
    assert len(sections) > 10
    for section in [Recipe, *sections]:
        if issubclass(section, BaseModel):  # `name` and `source` are not sections
            assert [name for name, field in section.model_fields.items() if not field.description] == [], section


def test_published_settings():
    recipe = load_recipe("cifar10-resnet32")
    assert (recipe.train.batch_size, recipe.train.epochs, recipe.optimizer.lr) == (128, 200, 0.1)
    assert (recipe.schedule.milestones, recipe.optimizer.weight_decay) == ((100, 150), 1e-4)
    recipe = load_recipe("imagenet-resnet50")
    assert (recipe.optimizer.lr_scaling, recipe.optimizer.lr_batch_size) == ("linear", 256)
    assert (recipe.schedule.warmup_epochs, recipe.schedule.milestones) == (5, (30, 60, 80))


def test_set_values():
    changes = [
        "train.epochs=7",
        "model.name=resnet20",
        "optimizer.lr=1",
        "data.flip=false",
        "train.target_accuracy=none",
        'schedule={name="cosine", warmup_epochs=1}',
        "data.crop=none",
    ]
    recipe = load_recipe("fashion-mnist-resnet8", changes)
    assert (recipe.train.epochs, recipe.model.name, recipe.optimizer.lr) == (7, "resnet20", 1.0)
    assert (recipe.data.flip, recipe.train.target_accuracy, recipe.data.crop) == (False, None, "none")
    assert (recipe.schedule.name, recipe.schedule.warmup_epochs) == ("cosine", 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.epoch=3", ["train.epoch", "3", "did you mean epochs"]),
        ("train.epochs=many", ["train.epochs", "'many'", "integer"]),
        ("train.epochs=2.5", ["train.epochs", "2.5", "integer"]),
        ("train.epochs=0", ["train.epochs", "0", "greater than or equal to 1"]),
        ("train.seed=true", ["train.seed", "True", "integer"]),
        ("train.target_accuracy=90", ["train.target_accuracy", "90", "less than or equal to 1"]),
        ("optimizer.lr=inf", ["optimizer.lr", "finite"]),
        ("optimizer.lr=-0.1", ["optimizer.lr", "-0.1", "greater than 0"]),
        ("optimizer.nesterov=1", ["optimizer.nesterov", "1", "boolean"]),
        ("optimizer.momentum=0", ["optimizer", "nesterov", "momentum"]),
        ("optimizer.lr_scaling=linear", ["optimizer", "lr_batch_size"]),
        ("optimizer.name=adam", ["optimizer.name", "'adam'", "sgd"]),
        ("model.name=vgg", ["model.name", "'vgg'", "resnet8, resnet20"]),
        ("schedule.name=sine", ["schedule.name", "'sine'", "cosine", "onecycle"]),
        ("schedule.gamma=0.1", ["schedule.gamma", "0.1", "peak_at"]),
        ("data.mean=[0.1, 0.2]", ["data", "mean has 2", "std 1"]),
        ("data.mean=[7]", ["data.mean[0]", "7", "less than or equal to 1"]),
        ("data.cache=", ["data.cache = ''", "at least 1 character"]),
        ("data.max_bad=-1", ["data.max_bad", "-1", "greater than or equal to 0"]),
        ("data.timeout_s=0", ["data.timeout_s", "0", "greater than 0"]),
        ("data.io=fast", ["data.io", "'fast'", "'cached', 'mmap' or 'direct'"]),
        ("data.backend=ffcv", ["data.backend", "'ffcv'", "cpu, dali, webdataset"]),
        ("data.order=random", ["data.order", "'random'", "full, blocks"]),
        ("data.order=3", ["data.order", "3", "full, blocks"]),
        ("data.crop=middle", ["data.crop", "'middle'", "random_resized"]),
        ("data.seed=1", ["data.seed", "did you mean train.seed?"]),
        ("optimizer.damping=1", ["optimizer.damping", "did you mean kfac.damping?"]),
        ("trian.epochs=3", ["trian", "did you mean train"]),
        ("epochs=3", ["epochs", "did you mean train.epochs?"]),
        (
            "optimizer={name='lamb', lr=1, momentum=0}",
            ["momentum", "for lamb", "--set 'optimizer={name=\"lamb\", lr=…}'"],
        ),
        ("schedule={name='constant', warmup_epochs=3}", ["train", "epochs = 3", "schedule.warmup_epochs = 3"]),
        ("data.start_size=40", ["data", "start_size = 40", "size = 28"]),
        ("data.start_size=20", ["data", 'start_size must be "none"', 'backend = "resident"']),
        ("data.eval_size=32", ["data", 'eval_size must be "none"', 'backend = "resident"']),
        ("data.grow=[0.8, 0.4]", ["data.grow", "[0.8, 0.4]", "first"]),
        ("data.grow=[0.8, 1.4]", ["data.grow[1]", "1.4", "less than or equal to 1"]),
        ("data.area=[0, 1]", ["data.area[0]", "0", "greater than 0"]),
        ("data.mixup=-1", ["data.mixup", "-1", "greater than or equal to 0"]),
        ("data.flip=sometimes", ["data.flip", "'sometimes'", "alternate"]),
        ("train.loss=mse", ["train.loss", "'mse'", "cross_entropy, bce"]),
        ("ema.half_life_steps=0", ["ema.half_life_steps", "0", "greater than 0"]),
        ("optimizer.max_grad_norm=0", ["optimizer.max_grad_norm", "0", "greater than 0"]),
        ("optimizer={name='lars', lr=1, preconditioner='kfac'}", ["kfac", "kl_clip", "lars", "none"]),
        ("train=3", ["train", "3"]),
        ("name.x=3", ["name.x=3", "not a section"]),
        ("epochs", ["epochs", "section.key=value"]),
        ("=3", ["section.key=value"]),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(SettingError) as caught:
        load_recipe("fashion-mnist-resnet8", [change])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)  # one mistake, one line
    assert "Settings(" not in str(caught.value)


@pytest.mark.parametrize("name", ["size", "start_size", "eval_size"])
def test_a_network_that_pools_three_times_needs_more_than_eight_pixels(name):
    changes = ["data.backend=cpu", "data.crop=random_resized", "data.size=12"]
    with pytest.raises(SettingError, match=rf'^model: name = "whitened" takes 9 pixels or more, not data\.{name} = 8$'):
        load_recipe("cifar10-speedrun", [*changes, f"data.{name}=8"])
    load_recipe("cifar10-speedrun", [*changes, f"data.{name}=9"])


def test_all_mistakes_are_told_at_once():
    with pytest.raises(SettingError, match=r"(?s)train\.epochs.*optimizer\.lr|optimizer\.lr.*train\.epochs"):
        load_recipe("fashion-mnist-resnet8", ["train.epochs=0", "optimizer.lr=0"])


def test_how_to_change_the_kind_is_told_once():
    with pytest.raises(SettingError) as caught:
        load_recipe("fashion-mnist-resnet8", ["optimizer.name=lamb"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4 and all("unknown setting for lamb" in line for line in lines[1:3])
    assert lines[3] == "  another kind needs the whole section: --set 'optimizer={name=\"lamb\", lr=…}'"


def test_missing_section_and_bad_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nepochs = 3\nbatch_size = 8\n")
    with pytest.raises(SettingError, match="model is missing"):
        load_recipe(str(path))
    path.write_text("[train\n")
    with pytest.raises(SettingError, match=r"mine\.toml is not TOML"):
        load_recipe(str(path))
    with pytest.raises(SettingError, match="built in: cifar10-resnet32"):
        load_recipe("cifar10")


def test_resuming_may_change_when_to_stop_but_not_what_is_learnt():
    old = load_recipe("cifar10-resnet32")
    longer = ["train.epochs=300", "train.target_accuracy=0.9"]
    with pytest.raises(SettingError, match=r"milestones was \(100.0, 150.0\) and is \(150.0, 225.0\)\.") as caught:
        check_resumable(old, load_recipe("cifar10-resnet32", longer))
    (to_type,) = re.findall(r"To keep its schedule: --set (.*?\])\. Resuming", str(caught.value))
    check_resumable(old, load_recipe("cifar10-resnet32", [*longer, to_type]))
    check_resumable(old, load_recipe("cifar10-resnet32", [*longer, "schedule.for_epochs=none"]))
    changes = ["optimizer.lr=0.2", "train.seed=1", "data.threads=3"]
    with pytest.raises(SettingError) as caught:
        check_resumable(old, load_recipe("cifar10-resnet32", changes))
    assert "optimizer.lr was 0.1 and is 0.2; train.seed was 0 and is 1." in str(caught.value)
    # Images that grow do so at the same fractions of more epochs.
    growing = ["data.backend=cpu", "data.start_size=16", "data.crop=random_resized"]
    for changes in ([], growing):
        before = load_recipe("fashion-mnist-resnet8", ['schedule={name="constant"}', *changes])
        longer = load_recipe("fashion-mnist-resnet8", ['schedule={name="constant"}', *changes, "train.epochs=9"])
        with pytest.raises(SettingError, match=r"train\.epochs was 3") if changes else nullcontext():
            check_resumable(before, longer)
    one_cycle = load_recipe("fashion-mnist-resnet8")  # its learning rates depend on the number of epochs
    with pytest.raises(SettingError, match=r"train\.epochs was 3 and is 9"):
        check_resumable(one_cycle, load_recipe("fashion-mnist-resnet8", ["train.epochs=9"]))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_for_any_number_of_epochs(name):
    own, written = load_recipe(name), tomllib.loads(built_in()[name].read_text())["schedule"]
    for key in written.keys() & {"warmup_epochs", "milestones"}:  # to the bit
        assert getattr(own.schedule, key) == (tuple(written[key]) if key == "milestones" else written[key])
    length = own.train.epochs
    for epochs in (1, 2, length - 1, 10 * length):
        scaled = load_recipe(name, [f"train.epochs={epochs}"])
        assert scaled == parse(scaled.model_dump(mode="json")), "what a checkpoint holds scales again"
        if epochs == 10 * length:  # each of its steps has the rate of the tenth of it
            for step in range(0, 10 * length, 7):
                rates = [multiplier(r.schedule, step, n, r.train.epochs) for r, n in ((own, 10), (scaled, 1))]
                assert rates[0] == pytest.approx(rates[1])


def test_what_is_typed_is_meant_for_this_run(caplog):
    with caplog.at_level("INFO"):
        recipe = load_recipe("imagenet-resnet50", ["train.epochs=9", "schedule.milestones=[4, 6]"])
    assert (recipe.schedule.milestones, recipe.schedule.warmup_epochs, recipe.schedule.for_epochs) == ((4, 6), 0.5, 9)
    assert caplog.messages == ["9 epochs, not 90: schedule.warmup_epochs = 0.5, not 5"]
    changes = ["train.epochs=9", "schedule.milestones=[40, 60]", "schedule.for_epochs=90"]  # unless it says for which
    assert load_recipe("imagenet-resnet50", changes).schedule.milestones == (4, 6)
    whole = load_recipe("imagenet-resnet50", ["train.epochs=9", 'schedule={name="step", milestones=[4]}'])
    assert (whole.schedule.milestones, whole.schedule.for_epochs) == ((4,), None)


def test_kfacs_schedules_scale_with_the_run(tmp_path):
    recipe = built_in()["cifar10-resnet32-kfac"].read_text().replace("damping = 0.003", "damping = [[0, 3], [10, 0.3]]")
    (tmp_path / "mine.toml").write_text(recipe)
    scaled = load_recipe(str(tmp_path / "mine.toml"), ["train.epochs=5"]).kfac
    assert (scaled.damping, scaled.inv_update_steps) == (((0, 3.0), (0.5, 0.3)), ((0, 10),))


@pytest.mark.parametrize(
    ("schedule", "kfac"), [("milestones = [2, 5]", ""), ("warmup_epochs = 5", ""), ("", "damping = [[0, 1], [5, 2]]")]
)
def test_epochs_that_stay_say_what_to_type_for_a_shorter_run(tmp_path, schedule, kfac):
    text = built_in()["cifar10-resnet32-kfac"].read_text()
    kind = "step" if "milestones" in schedule else "constant"
    text = re.sub(r"\[schedule\][^\[]*\[35, 75, 90\]\ngamma = 0.1", f'[schedule]\nname = "{kind}"\n{schedule}', text)
    (tmp_path / "mine.toml").write_text(text.replace("damping = 0.003", kfac))
    change = "train.epochs=4"
    assert load_recipe(str(tmp_path / "mine.toml"), ["train.epochs=6"])
    with pytest.raises(
        SettingError, match=r"^train: epochs = 4: must be more than .*5.* for 100 epochs with "
    ) as caught:
        load_recipe(str(tmp_path / "mine.toml"), [change])
    to_type = str(caught.value).split("--set ")[-1]
    recipe = load_recipe(str(tmp_path / "mine.toml"), [change, to_type])
    assert 0.2 in (recipe.schedule.warmup_epochs, last_change(recipe.schedule)[1], recipe.kfac.damping[-1][0])


def test_what_a_recipe_leaves_out_the_loader_decides():
    assert load_recipe("imagenet-resnet50").data.loader_settings() == {"backend": "cpu"}
    given = {"threads": 2, "backend": "dali", "cache": "/local", "io": "mmap", "block_mib": 4}
    given |= {"max_bad": 0, "retries": 0, "timeout_s": 9.0}
    changes = [f"data.{name}={value}" for name, value in given.items()]
    assert load_recipe("fashion-mnist-resnet8", changes).data.loader_settings() == given
    assert given.keys() <= inspect.signature(open_loader).parameters.keys()
    assert load_recipe("fashion-mnist-resnet8", ["data.max_bad=none"]) == load_recipe("fashion-mnist-resnet8")


def test_resuming_may_change_what_the_loader_bears_but_not_the_order():
    old = load_recipe("cifar10-resnet32")
    changes = ["data.cache=/local", "data.io=direct", "data.max_bad=3", "data.retries=9", "data.timeout_s=60"]
    check_resumable(old, load_recipe("cifar10-resnet32", changes))
    with pytest.raises(SettingError, match=r"data\.block_mib was None and is 4"):
        check_resumable(old, load_recipe("cifar10-resnet32", ["data.block_mib=4"]))


def test_settings_of_kfac_that_nothing_uses_are_refused():
    with pytest.raises(SettingError, match=r'^kfac: without optimizer\.preconditioner = "kfac" or "ekfac" nothing'):
        load_recipe("fashion-mnist-resnet8", ["kfac.damping=0.1"])
    load_recipe("fashion-mnist-resnet8", ["kfac.damping=0.1", "optimizer.preconditioner=ekfac"])
    load_recipe("cifar10-resnet32-kfac", ["kfac={}", "optimizer.preconditioner=none"])
    with pytest.raises(SettingError, match=r"^optimizer\.preconditioner = 'kfca'"):
        load_recipe("fashion-mnist-resnet8", ["kfac.damping=0.1", "optimizer.preconditioner=kfca"])


@pytest.mark.parametrize("name", ["damping", "factor_update_steps", "inv_update_steps"])
def test_kfacs_schedules_end_before_the_run(name):
    changes = [f"kfac.{name}=[[0, 5], [100, 50]]"]
    with pytest.raises(
        SettingError, match=rf"epochs = 100: must be more than 100, from which kfac\.{name} has its last"
    ):
        load_recipe("cifar10-resnet32-kfac", changes)
    load_recipe("cifar10-resnet32-kfac", [*changes, "train.epochs=101"])


def test_kfac_changes_with_the_epoch():
    changes = ["kfac.damping=[[0, 0.03], [10, 0.003]]", "kfac.inv_update_steps=[[0, 1], [2.5, 50]]"]
    recipe = load_recipe("cifar10-resnet32-kfac", [*changes, "kfac.kl_clip=none"])
    assert recipe.kfac.kl_clip is None and recipe.kfac.factor_update_steps == ((0, 1),)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    preconditioner = kfac.build("kfac", recipe.kfac, model, None, 1)
    found = []
    for epoch in (0, 2.4, 2.5, 9.99, 10, 90):
        kfac.set_for_step(preconditioner, recipe.kfac, epoch, lr=epoch / 10)
        found.append((preconditioner.damping, preconditioner.inv_update_steps, preconditioner.lr))
    assert found[:4] == [(0.03, 1, 0), (0.03, 1, 0.24), (0.03, 50, 0.25), (0.03, 50, 0.999)]
    assert found[4:] == [(0.003, 50, 1), (0.003, 50, 9)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("factor_decay", 0.5), ("kl_clip", 0.25), ("solver", "cholesky"), ("factor_fraction", 0.25),
     ("spatially_uncorrelated", True), ("inv_dtype", "bfloat16"), ("local_factors", True)],
)  # fmt: skip
def test_settings_of_a_recipe_reach_kfac(name, value):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    recipe = load_recipe("cifar10-resnet32-kfac", [f"kfac.{name}={str(value).lower()}"])
    assert getattr(load_recipe("cifar10-resnet32-kfac").kfac, name) != value
    assert getattr(kfac.build("kfac", recipe.kfac, model, None, 1).settings, name) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("kfac.damping=0", "kfac.damping[0][1] = 0: must be greater than 0"),
        ("kfac.damping=[[1, 0.1]]", "epochs that rise from 0"),
        ("kfac.damping=[[0, 0.1], [0, 0.2]]", "epochs that rise from 0"),
        ("kfac.inv_update_steps=1.5", "kfac.inv_update_steps[0][1] = 1.5: must be a valid integer"),
        ("kfac.solver=qr", "kfac.solver = 'qr'"),
        ("kfac.dampin=1", "did you mean damping?"),
        ("optimizer.preconditioner=adam", "unknown preconditioner; allowed: none, kfac, ekfac"),
    ],
)
def test_bad_settings_of_kfac_are_named(change, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        load_recipe("cifar10-resnet32-kfac", [change])


def test_the_input_grows_between_two_epochs():
    def sizes(epochs, *changes):
        data = load_recipe("imagenet-resnet50", [f"data.{change}" for change in changes]).data
        return [data.size_at(epoch, epochs) for epoch in range(epochs)]

    assert sizes(3) == [224] * 3
    assert sizes(10, "start_size=112", "size=176", "grow=[0.4, 0.8]") == [112] * 5 + [128, 144, 160, 176, 176]
    assert sizes(10, "start_size=160", "size=192", "grow=[0.7, 0.9]", "size_step=32") == [160] * 9 + [192]
    assert sizes(4, "start_size=150", "grow=[0.5, 0.5]") == [150, 150, 224, 224]
    assert sizes(4, "start_size=150", "grow=[0, 1]", "size_step=100") == [150, 150, 150, 200]
    assert sizes(2, "start_size=100", "grow=[1, 1]") == [100, 100]


@pytest.mark.parametrize(("epochs", "at_160"), [(16, 12), (24, 19), (32, 25)])
def test_the_fast_recipes_grow_when_their_source_does(epochs, at_160):
    """There 160 grows to 192 from epoch 11 to 13, 17 to 20, and 23 to 27, by what is nearest to a multiple of 32."""
    data = load_recipe(f"imagenet-resnet50-fast{epochs}").data
    assert [data.size_at(epoch, epochs) for epoch in range(epochs)] == [160] * at_160 + [192] * (epochs - at_160)


@pytest.mark.parametrize(("change", "allowed"), [("gradient_dtype=bfloat16", "float32"), ("powersgd_rank=2", "none")])
def test_gradients_that_kfac_sends_itself_are_sent_as_they_are(change, allowed):
    changes = ["optimizer.preconditioner=kfac", "kfac.grad_worker_fraction=0", f"train.{change}"]
    name = change.partition("=")[0]
    with pytest.raises(SettingError, match=rf'^train: {name} must be "{allowed}" with kfac\.grad_worker_fraction'):
        load_recipe("fashion-mnist-resnet8", changes)
    load_recipe("fashion-mnist-resnet8", [*changes, "kfac.grad_worker_fraction=1"])
    load_recipe("fashion-mnist-resnet8", changes[2:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["compile_mode=max-autotune"], 'train: compile_mode = "max-autotune" needs compile = true'),
        (["compile=true", "compile_mode=reduce-overhead", "accumulation_steps=2"],
         'train: compile_mode must be "default" with accumulation_steps = 2'),
        (["powersgd_rank=1", "gradient_dtype=bfloat16"], 'train: powersgd_rank must be "none" with gradient_dtype'),
        (["powersgd_rank=1", "precision=fp16"], 'train: powersgd_rank must be "none" with precision = "fp16"'),
        (["powersgd_rank=1", "when_diverged=skip"], 'train: powersgd_rank must be "none" with when_diverged = "skip"'),
        (["powersgd_start_step=1"], "train.powersgd_start_step = 1"),
        (["powersgd_rank=0"], "train.powersgd_rank = 0"),
        (["compile=true", "compile_mode=fast"], "max-autotune"),
        (["compile=true", "compile_mode=max-autotune", "deterministic=true"],
         'train: compile_mode = "max-autotune" chooses kernels by their speed'),
    ],
)  # fmt: skip
def test_ways_to_compile_and_to_send_that_do_not_go_together(changes, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        load_recipe("fashion-mnist-resnet8", [f"train.{change}" for change in changes])
