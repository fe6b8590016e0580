"""Models against published parameter counts and torchvision's parameter names."""

import math

import pytest
import torch

from datapipe.errors import SettingError
from trainer import models
from trainer.models.resnet import Blur, MaxBlurPool
from trainer.models.whitened import patch_moments
from trainer.optim.sgd import Settings


@pytest.mark.parametrize(
    ("name", "num_classes", "count"),
    [
        ("resnet20", 10, 269_722),
        ("resnet32", 10, 464_154),
        ("resnet18", 1000, 11_689_512),
        ("resnet50", 1000, 25_557_032),
    ],
)
def test_parameter_counts(name, num_classes, count):
    model = models.build(name, num_classes=num_classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("name", models.REGISTRY)
@pytest.mark.parametrize("in_channels", [1, 3])
def test_every_model_takes_grey_and_colour(name, in_channels):
    model = models.build(name, num_classes=7, in_channels=in_channels)
    assert model(torch.randn(2, in_channels, 33, 29)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "blur_pool"),
    [(name, blur) for name in models.REGISTRY for blur in {False, name not in models.WITHOUT_STRIDES}],
)
def test_the_smallest_input(name, blur_pool):
    model, smallest = models.build(name, num_classes=7, blur_pool=blur_pool), models.SMALLEST_INPUT.get(name, 8)
    for size in range(smallest, smallest + 9):  # odd ones, too
        assert model(torch.randn(2, 3, size, size)).shape == (2, 7)
    if name in models.SMALLEST_INPUT:
        with pytest.raises(RuntimeError, match="too small"):
            model(torch.randn(2, 3, smallest - 1, smallest - 1))


def torchvision_keys(blocks, convolutions):
    """state_dict keys of torchvision's resnet, written down from its naming alone."""
    bn = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    keys = ["conv1.weight", *(f"bn1.{part}" for part in bn)]
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            at = f"layer{stage}.{block}"
            for i in range(1, convolutions + 1):
                keys += [f"{at}.conv{i}.weight", *(f"{at}.bn{i}.{part}" for part in bn)]
            if block == 0 and (stage > 1 or convolutions == 3):
                keys += [f"{at}.downsample.0.weight", *(f"{at}.downsample.1.{part}" for part in bn)]
    return [*keys, "fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("name", "blocks", "convolutions"), [("resnet18", [2, 2, 2, 2], 2), ("resnet50", [3, 4, 6, 3], 3)]
)
def test_parameters_have_torchvisions_names(name, blocks, convolutions):
    model = models.build(name, num_classes=1000)
    assert list(model.state_dict()) == torchvision_keys(blocks, convolutions)


def test_stride_is_in_the_3x3_and_blocks_start_as_the_identity():
    model = models.build("resnet50", num_classes=10)
    first = model.layer2[0]
    assert [first.conv1.stride, first.conv2.stride, first.downsample[0].stride] == [(1, 1), (2, 2), (2, 2)]
    x = torch.rand(1, 256, 8, 8)  # not negative, so that the last ReLU changes nothing
    assert torch.equal(model.layer1[1].eval()(x), x)


def test_shortcut_is_option_a():
    block = models.build("resnet8", num_classes=10).layer2[0].eval()
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.rand(1, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_only_filters_and_matrices_decay(name):
    model = models.build(name, num_classes=10)
    decayed, plain = Settings(lr=0.1, weight_decay=0.1).parameter_groups(model)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sum(len(group["params"]) for group in (decayed, plain)) == len(names)
    assert all(
        ".bias" in names[id(p)] or "bn" in names[id(p)] or "downsample.1" in names[id(p)] for p in plain["params"]
    )
    assert all(names[id(p)].endswith("weight") and "bn" not in names[id(p)] for p in decayed["params"])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sides", [(8, 8), (7, 5), (1, 2)])
def test_a_blur_is_the_binomial_filter(stride, sides):
    x = torch.randn(2, 3, *sides, dtype=torch.float64)
    torch.testing.assert_close(Blur(stride)(x), binomial(x, stride))


@pytest.mark.parametrize("name", [name for name in models.REGISTRY if name not in models.WITHOUT_STRIDES])
def test_blurring_changes_no_parameter_and_less_than_dropping_pixels_when_an_image_moves(name):
    """The claim of the paper: the output hardly changes when an image moves by a pixel."""
    torch.manual_seed(0)
    plain, blurred = (models.build(name, num_classes=7, blur_pool=blur).eval() for blur in (False, True))
    assert [(key, value.shape) for key, value in plain.state_dict().items()] == [
        (key, value.shape) for key, value in blurred.state_dict().items()
    ]
    blurred.load_state_dict(plain.state_dict())
    x = torch.randn(8, 3, 65, 65)
    changes = []
    for model in (plain, blurred):
        with torch.no_grad():
            a, b = model(x[..., :64, :64]), model(x[..., :64, 1:])
        assert a.shape == (8, 7)
        changes.append(((a - b).norm() / (a - a.mean(0)).norm()).item())
    assert changes[1] < changes[0]


def test_a_blurred_projection_is_the_blur_and_then_the_projection():
    block = models.build("resnet50", num_classes=7, blur_pool=True).layer2[0].eval()
    x = torch.randn(2, 256, 9, 9)
    weight = block.downsample[1].weight
    expected = torch.nn.functional.conv2d(Blur()(x), weight, None, stride=2)
    torch.testing.assert_close(block.downsample[2](expected), block.downsample(x))


def binomial(x, stride):
    line = torch.tensor([0.25, 0.5, 0.25], dtype=x.dtype)
    weight = torch.outer(line, line).expand(x.shape[1], 1, 3, 3)
    return torch.nn.functional.conv2d(x, weight, None, stride, padding=1, groups=x.shape[1])


def test_pooling_blurs_the_maxima_of_all_places():
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), value=-math.inf)
    maxima = padded.unfold(2, 3, 1).unfold(3, 3, 1).amax((-2, -1))
    torch.testing.assert_close(MaxBlurPool()(x), binomial(maxima, 2))


@pytest.mark.parametrize(("name", "layer"), [("resnet18", "conv1"), ("resnet50", "conv2"), ("resnet8", "conv1")])
def test_a_convolution_that_drops_pixels_sees_them_blurred(name, layer):
    block, torch_layer = models.build(name, num_classes=7, blur_pool=True).double().layer2[0].eval(), {}
    convolution = getattr(block, layer)
    convolution.register_forward_hook(lambda module, inputs, output: torch_layer.update(x=inputs[0], y=output))
    x = torch.randn(2, block.conv1.in_channels, 8, 8, dtype=torch.float64)
    block(x)
    before = x if layer == "conv1" else torch.relu(block.bn1(block.conv1(x)))
    torch.testing.assert_close(torch_layer["x"], binomial(before, 1))
    assert torch_layer["y"].shape[-2:] == (4, 4)


def test_a_small_networks_shortcut_drops_pixels_after_the_blur():
    block = models.build("resnet8", num_classes=7, blur_pool=True).double().layer2[0].eval()
    for parameter in block.bn2.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64)
    expected = torch.zeros(2, 32, 4, 4, dtype=torch.float64)
    expected[:, 8:24] = binomial(x, 2)
    torch.testing.assert_close(block(x), expected.relu())


@pytest.mark.parametrize("name", models.WITHOUT_STRIDES)
def test_a_network_without_strides_has_nothing_to_blur(name):
    with pytest.raises(SettingError, match=rf"model\.blur_pool: {name}"):
        models.build(name, num_classes=7, blur_pool=True)


@pytest.mark.parametrize("channels", [1, 3])
def test_whitened_patches_have_unit_covariance(channels):
    torch.manual_seed(0)
    images = 10 * torch.nn.functional.avg_pool2d(torch.randn(50, channels, 22, 22), 3, 1)  # neighbours are correlated
    model = models.build("whitened_small", num_classes=7, in_channels=channels)
    model.whiten(patch_moments(images))
    with torch.no_grad():
        outputs = model.patches(images).double().permute(0, 2, 3, 1).flatten(0, 2)
    half = outputs.shape[1] // 2
    assert half == 4 * channels
    torch.testing.assert_close(outputs[:, :half], -outputs[:, half:])
    covariance = outputs[:, :half].T @ outputs[:, :half] / len(outputs)
    torch.testing.assert_close(covariance, torch.eye(half, dtype=torch.float64), atol=1e-3, rtol=0)
    assert not model.patches.weight.requires_grad
