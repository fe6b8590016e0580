"""What only a GPU can show; the same tests on the CPU show that they can pass.

On a machine with a GPU: `bash tools/test.sh tests/gpu`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from datapipe.images.recode import RecodeOptions
from datapipe.loaders import normalise, open_loader
from datapipe.loaders.batch_slots import ImageSlots
from datapipe.loaders.delivery import HostDelivery
from datapipe.packing import PackOptions, pack
from datapipe.sampling.augment import Augment
from tests.ports import free_ports
from tests.processes import Ranks, clean_environment
from trainer.step.mixing import MixedBatch, mix

HAVE_GPU = torch.cuda.is_available()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture(scope="module")
def sample(tmp_path_factory, sample_dir):
    folder = tmp_path_factory.mktemp("gpu") / "packed"
    pack(sample_dir, folder, PackOptions(workers=1))
    return folder


def test_batches_arrive_whole(packed_folders, device):
    """Many batches, kept while later ones reuse the host's memory, against a loader that stays on the CPU."""
    folder = packed_folders["tar"] / "train"
    with (
        open_loader(folder, 4, size=160, device=device) as loader,
        open_loader(folder, 4, size=160, threads=1) as reference,
    ):
        for epoch in range(3):
            loader.set_epoch(epoch)
            reference.set_epoch(epoch)
            kept = list(loader)
            for mine, theirs in zip(kept, reference, strict=True):
                assert mine.images.device.type == mine.labels.device.type == device.type
                assert mine.images.is_contiguous(memory_format=torch.channels_last)
                for name in ("images", "labels", "samples", "valid"):
                    assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name))


@pytest.mark.gpu
def test_batches_are_copied_beside_what_is_computed():
    delivery = HostDelivery(ImageSlots, (4, 8, 8, 3), torch.device("cuda", 0))
    slots = delivery.new_slots(np.arange(4), 4)
    slots.images[:] = 7
    torch.cuda._sleep(2_000_000_000)  # about a second
    computed = torch.cuda.Event()
    computed.record()
    batch = delivery.finish(slots, None)
    delivery.drain()  # waits for the copy alone
    assert not computed.query()
    assert (batch.images.cpu() == 7).all()


@pytest.mark.gpu
def test_dali_decodes_beside_what_is_computed(packed_folders):
    pytest.importorskip("nvidia.dali")
    with open_loader(packed_folders["tar"] / "train", 8, size=64, backend="dali", device="cuda") as loader:
        batches = iter(loader)
        next(batches)  # memory is reserved
        torch.cuda._sleep(2_000_000_000)  # about a second
        computed = torch.cuda.Event()
        computed.record()
        images = next(batches).images
        assert not computed.query()
    assert images.any()


@pytest.mark.gpu
def test_mixed_images_keep_their_channels_last():
    images = torch.rand(4, 3, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
    batch = MixedBatch(images, torch.arange(4, device="cuda"), torch.ones(4, dtype=torch.bool, device="cuda"))
    for alphas in ((0.4, 0.0), (0.0, 1.0)):
        assert mix(batch, *alphas, (0, 1)).images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("crop", ["random_resized", "none"])
def test_dali_gives_the_batches_of_the_processor(packed_folders, device, crop):
    """Samples, labels, windows and flips; pixels by nvJPEG, with its own rounding of chroma."""
    pytest.importorskip("nvidia.dali")
    settings = {"size": 64, "augment": Augment(crop), "last": "pad", "seed": 2}
    with (
        open_loader(packed_folders["tar"] / "train", 16, backend="dali", device=device, **settings) as loader,
        open_loader(packed_folders["tar"] / "train", 16, threads=1, **settings) as reference,
    ):
        for epoch in range(2):
            loader.set_epoch(epoch)
            reference.set_epoch(epoch)
            for mine, theirs in zip(loader, reference, strict=True):
                assert mine.images.device.type == device.type
                assert mine.images.is_contiguous(memory_format=torch.channels_last)
                for name in ("labels", "samples", "valid"):
                    assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name))
                difference = (mine.images.cpu().int() - theirs.images.int()).abs().float()
                assert difference.mean((1, 2, 3)).max() < 4 and not mine.images[~mine.valid].any()


def test_stored_pixels_are_cut_on_the_device(image_folder, tmp_path, device):
    pack(image_folder, tmp_path, PackOptions(format="npy", workers=1, recode=RecodeOptions(store="raw", size=96)))
    settings = {"size": 64, "augment": Augment("random_resized"), "seed": 1}
    with (
        open_loader(tmp_path / "train", 16, device=device, **settings) as loader,
        open_loader(tmp_path / "train", 16, **settings) as reference,
    ):
        assert type(loader.decoder).__name__ == ("PixelCopier" if device.type == "cuda" else "Painter")
        for mine, theirs in zip(loader, reference, strict=True):
            assert mine.images.device.type == device.type
            assert (mine.images.cpu().int() - theirs.images.int()).abs().max() <= 1
            assert torch.equal(mine.labels.cpu(), theirs.labels)


def test_normalise(device):
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    settings = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    torch.testing.assert_close(normalise(images.to(device), *settings).cpu(), normalise(images, *settings))


@pytest.mark.parametrize(
    ("backend", "kind"), [("cpu", "pictures"), ("dali", "pictures"), ("cpu", "pixels"), ("resident", "pixels")]
)
def test_steps_do_not_wait_for_the_gpu(sample, packed_folders, device, backend, kind):
    """From batch to update without a synchronisation."""
    from trainer import models

    if backend == "dali":
        pytest.importorskip("nvidia.dali")
    folder, size = (packed_folders["tar"], 64) if kind == "pictures" else (sample, 28)
    with open_loader(folder / "train", 8, size=size, backend=backend, device=device) as loader:
        mean, std = (0.286,) * loader.channels, (0.353,) * loader.channels
        network = models.build("resnet8", num_classes=10, in_channels=loader.channels)
        network.to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        try:
            for number, batch in enumerate(islice(loader, 7)):
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    logits = network(normalise(batch.images, mean, std))
                torch.nn.functional.cross_entropy(logits.float(), batch.labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 2 and device.type == "cuda":  # kernels are chosen, and memory reserved, in the first steps
                    torch.cuda.set_sync_debug_mode("error")
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert number == 6


@pytest.mark.parametrize(("solver", "inv_dtype"), [("eigen", None), ("cholesky", None), ("cholesky", "bfloat16")])
def test_kfac_is_that_of_the_processor(device, solver, inv_dtype):
    from trainer import models
    from trainer.kfac import KFAC

    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 24, 24), torch.randint(10, (16,))
    found = []
    for place in (torch.device("cpu"), device):
        torch.manual_seed(0)
        network = models.build("resnet8", num_classes=10, in_channels=3).to(place, memory_format=torch.channels_last)
        settings = {"damping": 0.1, "factor_update_steps": 1, "inv_update_steps": 1}
        preconditioner = KFAC(network, solver=solver, inv_dtype=inv_dtype, **settings)
        for _ in range(2):
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(x.to(place)), y.to(place)).backward()
            preconditioner.step()
        found.append(torch.cat([parameter.grad.flatten().cpu() for parameter in network.parameters()]))
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()  # TF32


@pytest.mark.gpu
@pytest.mark.parametrize("inv_dtype", [None, "bfloat16"])
def test_kfac_does_not_wait_for_the_gpu(inv_dtype):
    from trainer import models
    from trainer.kfac import KFAC

    device = torch.device("cuda")
    network = models.build("resnet8", num_classes=10, in_channels=3).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    settings = {"solver": "cholesky", "inv_dtype": inv_dtype, "factor_update_steps": 2, "inv_update_steps": 2}
    preconditioner = KFAC(network, **settings)
    x, y = torch.randn(16, 3, 24, 24, device=device), torch.randint(10, (16,), device=device)
    try:
        for number in range(12):
            if number == 5:
                torch.cuda.set_sync_debug_mode("error")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = network(x)
            torch.nn.functional.cross_entropy(logits.float(), y).backward()
            preconditioner.step()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


PRECISIONS = [pytest.param("cpu", "off", marks=pytest.mark.slow)]
PRECISIONS += [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("off", "tf32", "bf16", "fp16")]


@pytest.mark.parametrize(("place", "precision"), PRECISIONS)
def test_training_reaches_a_target(sample, tmp_path, place, precision):
    """The shipped recipe on the tests' sample, and then resumed: the run is complete, so nothing is trained."""
    command = [
        sys.executable, "-m", "trainer", "train", "fashion-mnist-resnet8", "--data", str(sample), "--out",
        str(tmp_path / "run"), "--set", "train.epochs=8", "--set", "train.target_accuracy=0.6",
        "--set", "train.batch_size=64", "--set", f"train.precision={precision}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["device"].startswith("cuda" if HAVE_GPU else place)  # a GPU is used without being asked for
    assert lines[-1]["status"] == "target_reached" and lines[-1]["accuracy"] >= 0.6
    sections = lines[-1]["time_s"]
    assert sum(sections.values()) == pytest.approx(lines[-1]["elapsed_s"], rel=0.05)
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert again.returncode == 0 and "accuracy" in again.stdout


@pytest.mark.ranks
def test_two_ranks_share_a_device(server, device):
    """Gradients, also in bfloat16, K-FAC with gradients at their owners, and states that are continued from."""
    world = clean_environment(MASTER_ADDR="localhost", MASTER_PORT=str(free_ports()), WORLD_SIZE="2")
    program = Path(__file__).with_name("two_ranks.py")
    ranks = Ranks([server.start(program, f"{device.type}", env=world | {"RANK": str(rank)}) for rank in range(2)])
    _, errors = ranks.communicate(timeout=300)
    assert ranks.returncode == 0, errors[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here, and NCCL gives each rank one of its own")
def test_a_rank_that_fails_is_gone_while_the_other_waits_in_nccl(sample, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(sample, damaged)
    for shard in (damaged / "train").glob("*.tar"):
        content = bytearray(shard.read_bytes())
        content[512 : len(content) // 2] = bytes(len(content) // 2 - 512)
        shard.write_bytes(content)
    port = str(free_ports())
    ranks = []
    try:
        for rank, folder in enumerate((sample, damaged)):
            command = [
                sys.executable, "-m", "trainer", "train", "fashion-mnist-resnet8", "--data", str(folder),
                "--out", str(tmp_path / "run"), "--set", "train.batch_size=64", "--set", "data.backend=cpu",
            ]  # fmt: skip
            env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        _, err = ranks[1].communicate(timeout=120)
        assert ranks[1].returncode == 1 and "error: " in err and str(damaged) in err, err
    finally:
        for child in ranks:  # NCCL does not tell the other one; a launcher would end it
            child.kill()
            child.communicate()
