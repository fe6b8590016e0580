"""Which device a run takes, and that it takes none unasked where the GPUs cannot be used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from datapipe import doctor
from datapipe.cluster import Placement
from datapipe.errors import SettingError
from datapipe.loaders import device
from datapipe.loaders.device import Driver, explain_unseen_gpus, read_driver
from tests.processes import clean_environment, open_server
from trainer.errors import TrainingError
from trainer.ranks import connection
from trainer.ranks.device import check_own_gpus, choose_device, explain_unlike
from trainer.ranks.heartbeat import Watch

WITHOUT_CUDA = torch.version.cuda is None
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)  Wed Aug 13\n"
COMPILER = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"


def tree(root: Path, version: str | None = PROPRIETARY.format("535.104.05"), gpus: int = 2, nodes: int = 0) -> Path:
    """What the driver shows, as files under `root`."""
    proc = root / "proc/driver/nvidia"
    for number in range(gpus):
        (proc / f"gpus/0000:{number:02x}:00.0").mkdir(parents=True)
    if version is not None:
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "version").write_text(version + COMPILER)
    (root / "dev").mkdir(parents=True)
    for name in ["nvidiactl", "nvidia-uvm", "nvidia-caps", *(f"nvidia{number}" for number in range(nodes))]:
        (root / "dev" / name).touch()
    return root


@pytest.fixture
def no_gpu(monkeypatch):
    """To torch; and CUDA_VISIBLE_DEVICES hides none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({}, Driver("535.104.05", 2)),
        ({"version": OPEN.format("580.82.07")}, Driver("580.82.07", 2)),
        ({"nodes": 1}, Driver("535.104.05", 1)),  # a container, which has one of the two
        ({"version": None, "gpus": 0, "nodes": 3}, Driver("", 3)),
        ({"version": "something else\n"}, Driver("", 2)),
        ({"gpus": 0}, None),  # a driver without GPUs
        ({"version": None, "gpus": 0}, None),
    ],
)
def test_what_the_driver_shows(tmp_path, shown, expected):
    assert read_driver(tree(tmp_path, **shown)) == expected
    assert read_driver(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("driver", "version", "cuda", "says"),
    [
        ("535.104.05", "2.13.0+cpu", None, ["without CUDA", "torch==2.13.0+cu126 ", "/whl/cu126"]),
        ("580.82.07", "2.13.0+cpu", None, ["without CUDA", "/whl/cu130"]),
        ("", "2.13.0+cpu", None, ["without CUDA", "/whl/cu126"]),
        ("535.104.05", "2.13.0+cu130", "13.0", ["CUDA 13.0", "needs driver 580", "torch==2.13.0+cu126 ", "/whl/cu126"]),
        ("575.57", "2.14.0+cu132", "13.2", ["CUDA 13.2", "needs driver 580", "/whl/cu126"]),
        ("470.199.02", "2.13.0+cu126", "12.6", ["needs driver 525", "no build works", "525 or newer"]),
        ("470.199.02", "2.13.0+cpu", None, ["without CUDA", "no build works"]),
        ("580.82.07", "2.13.0+cu130", "13.0", ["CUDA 13.0", "and says: ", "--gpus all"]),
        ("535.104.05", "2.13.0+cu126", "12.6", ["CUDA 12.6", "and says: "]),
        ("", "2.13.0+cu130", "13.0", ["and says: "]),
    ],
)
def test_what_to_install(driver, version, cuda, says):
    reason = device._reason(Driver(driver, 1), version, cuda)
    assert [part for part in says if part not in reason] == [], reason
    assert ("pip install" in reason) == ("/whl/" in "".join(says))


@pytest.mark.slow
@pytest.mark.skipif(not WITHOUT_CUDA, reason="a build with CUDA is installed")
def test_pip_does_what_the_message_says():
    """Without the build in its name, pip takes the torch that is installed for the one that is asked for."""
    reason = device._reason(Driver("535.104.05", 1), torch.__version__, None)
    words = reason.partition("pip install ")[2].split()
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", words[0]]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}  # no constraints of a site
    environ = own | {"PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert "already satisfied" not in done.stdout and "No matching distribution" in done.stderr, done.stdout


def test_gpus_that_were_hidden_are_none(tmp_path, no_gpu):
    root = tree(tmp_path)
    assert "535.104.05 has 2 GPU(s) here, and torch sees none" in explain_unseen_gpus({}, root)
    for value in ("0,1", " 1", "0,-1", "GPU-8932f937-d72c", "MIG-GPU-8932f937-d72c/1/2"):
        assert explain_unseen_gpus({"CUDA_VISIBLE_DEVICES": value}, root) is not None
    for value in ("", "-1", " ", "-1,0", "NoDevFiles", "none"):
        assert explain_unseen_gpus({"CUDA_VISIBLE_DEVICES": value}, root) is None
    assert explain_unseen_gpus({}, tmp_path / "nowhere") is None


def test_devices_that_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(SettingError, match="--device gpu: allowed: auto, cpu, cuda"):
        choose_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(SettingError, match="--device cuda: there is no GPU"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("count", "ranks", "gpus"),
    [
        (4, 4, [0, 1, 2, 3]),  # each rank sees all GPUs of its node
        (1, 4, [0, 0, 0, 0]),  # each sees its own
        (2, 4, [0, 1, 0, 1]),  # those of its socket
        (8, 2, [0, 1]),
    ],
)
def test_each_rank_has_a_gpu(monkeypatch, count, ranks, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert [choose_device("auto", rank, ranks).index for rank in range(ranks)] == gpus


def test_two_ranks_with_one_gpu_are_refused(monkeypatch):
    check_own_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1"), ("b", ""), ("b", "")])
    with pytest.raises(SettingError, match="ranks 1 and 3 would share a GPU of b"):
        check_own_gpus([("a", "GPU-1"), ("b", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(SettingError, match="3 GPUs for 4 ranks"):
        choose_device("auto", 0, 4)


@pytest.mark.skipif(not WITHOUT_CUDA, reason="this build of torch sees GPUs")
def test_no_device_is_chosen_where_the_gpus_cannot_be_used(tmp_path, no_gpu, monkeypatch):
    """Nor does the doctor keep silent."""
    monkeypatch.setattr("trainer.ranks.device.explain_unseen_gpus", lambda: explain_unseen_gpus(os.environ, root))
    monkeypatch.setattr(device, "explain_unseen_gpus", lambda: explain_unseen_gpus(os.environ, root))
    root = tree(tmp_path)
    for asked in ("auto", "cuda"):
        with pytest.raises(SettingError, match=rf"--device {asked}: .*has 2 GPU\(s\).*/whl/cu126.* --device cpu"):
            choose_device(asked)
    assert choose_device("cpu").type == "cpu"
    assert "driver 535.104.05 has 2 GPU(s)" in doctor._node()["unseen_gpus"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto").type == "cpu" and doctor._node()["unseen_gpus"] is None


@pytest.fixture
def on_a_gpu_node(tmp_path):
    """Run a command where /proc/driver shows a driver of CUDA 12: mounted in a namespace of its own."""
    if shutil.which("unshare") is None or os.geteuid() != 0 or not Path("/proc/driver").is_dir():
        pytest.skip("needs root, unshare and /proc/driver")
    driver = tree(tmp_path / "node") / "proc/driver"
    script = f'mount --bind "{driver}" /proc/driver && exec "$@"'
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    env = clean_environment()
    del env["CUDA_VISIBLE_DEVICES"]
    with open_server(env, prefix=prefix) as server:
        yield lambda *words, **changes: server.run("-m", *words, env=env | changes)


@pytest.mark.slow
@pytest.mark.skipif(not WITHOUT_CUDA, reason="this build of torch sees GPUs")
def test_a_run_is_refused_where_the_gpus_cannot_be_used(on_a_gpu_node, recipe_file, packed, tmp_path):
    command = ["trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run", "--set", "train.epochs=1"]
    for asked in ((), ("--device", "cuda")):
        done = on_a_gpu_node(*command, *asked)
        assert done.returncode == 2, done.stderr
        assert "driver 535.104.05 has 2 GPU(s)" in done.stderr and "/whl/cu126" in done.stderr
        assert "--device cpu" in done.stderr and "Traceback" not in done.stderr
        assert not (tmp_path / "run").exists()
    done = on_a_gpu_node(*command, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    done = on_a_gpu_node(*command[:6], tmp_path / "asked", *command[7:], "--device", "cpu")
    assert done.returncode == 0, done.stderr
    done = on_a_gpu_node("datapipe", "doctor", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "advice: GPUs: NVIDIA's driver 535.104.05 has 2 GPU(s)" in done.stdout and "/whl/cu126" in done.stdout


@pytest.mark.parametrize(("asked", "given"), [("cuda", 2), (torch.device("cuda"), 2), ("cuda:1", 1), ("cuda:0", 0)])
def test_a_loader_takes_the_current_gpu_where_none_is_numbered(monkeypatch, asked, given):
    """By its number: in the loader's threads, and for DALI, another one is current."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert device.resolve_device(asked) == torch.device("cuda", given)


def test_gpus_of_unlike_kinds_are_told_of(monkeypatch, caplog):
    """And the device of a rank is the one that NCCL is told of."""
    assert explain_unlike(["cuda (A)"] * 3) == explain_unlike([]) == ""
    given = {}

    def init(backend, **options):
        given.update(options, backend=backend)
        raise ValueError("as far as this test goes")

    class Crew(SimpleNamespace):
        def __len__(self) -> int:
            return 1  # process that meets others

        def gather_from_ranks(self, _, mine):
            return [[mine[0], f"GPU-{rank}", f"cuda ({model})", ""] for rank, model in enumerate("AABA")]

    crew = Crew(hosts_of_ranks=["a", "a", "b", "b"], open_store=str)
    for name, result in {"is_available": True, "device_count": 2, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-3"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A")
    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    for rank in (3, 0):
        crew.local_ranks = [2, 3] if rank else [0, 1]
        with pytest.raises(TrainingError, match="as far as this test goes"):
            connection._meet(crew, Placement(rank, 4), "auto", Watch())
        assert given["device_id"] == torch.device("cuda", rank % 2) and given["backend"] == "cpu:gloo,cuda:nccl"
        words = "unlike kinds (cuda (A) on 3 ranks, first 0; cuda (B) on 1 rank, first 2): a step takes as long as"
        assert (words in caplog.text) == (rank == 0)


def test_gpus_that_one_process_leaves_idle_are_told_of(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for count in (1, 8):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        for asked in ("cpu", "auto"):
            caplog.clear()
            with connection.connected(Placement(), asked) as world:
                assert world.device.type == ("cpu" if asked == "cpu" else "cuda")
            said = "7 of 8 GPUs stay idle, as this is a single process: torchrun --nproc-per-node 8 " in caplog.text
            assert said == (count == 8 and asked == "auto")
