"""What `datapipe doctor` and `datapipe bench` say."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from datapipe.bench import CONSUMER, bench, find_limit, format_result
from datapipe.dataset.manifest import Manifest
from datapipe.doctor import FILE_BYTES, advice, doctor
from datapipe.errors import DatapipeError
from datapipe.fsio import mounted_as
from datapipe.images.recode import RecodeOptions
from datapipe.loaders.device import Driver, dali_extra
from datapipe.packing import PackOptions, pack
from tests.processes import clean_environment

FILESYSTEM = {"kind": "ext4", "free_bytes": 1, "metadata_per_s": 90_000.0, "direct": True,
              "sequential_mb_per_s": 3000.0, "random_mb_per_s": 2500.0}  # fmt: skip
NODE = {"cores": 16, "memory_bytes": 1, "shm_bytes": 0, "gpus": [], "unseen_gpus": None, "dali_extra": "dali"}
DECODERS = {"simplejpeg": "1.9", "dali": None}


@pytest.mark.parametrize(
    "filesystem, node, decoders, says",
    [
        ({}, {}, {}, ["stage: no", 'order: "full"', "backend: cpu (no GPU", "threads: 16, "]),
        ({"kind": "lustre"}, {}, {}, ["stage: yes (lustre is shared", '"blocks" where there is no room']),
        ({"kind": "nfs4"}, {}, {}, ["stage: yes (nfs4 is shared"]),
        ({"kind": "fuse.sshfs"}, {}, {}, ["stage: yes (fuse.sshfs is shared"]),
        ({"metadata_per_s": 180.0}, {}, {}, ["stage: yes (180 metadata operations per second)"]),
        ({"random_mb_per_s": 90.0}, {}, {}, ["stage: no", 'order: "blocks" (random reads reach 3%']),
        ({"metadata_per_s": None}, {}, {}, ["stage: no"]),
        ({}, {"gpus": ["H100"] * 4}, {"dali": "2.4"}, ["backend: dali (GPU and DALI 2.4", "threads: 4 for each of 4"]),
        ({}, {"gpus": ["H100"]}, {}, ["backend: cpu; with DALI", "pip install '.[dali]'"]),
        ({}, {"gpus": ["V100"], "dali_extra": "dali12"}, {}, ["backend: cpu; with DALI", "pip install '.[dali12]'"]),
        ({}, {"unseen_gpus": "why"}, {}, ["backend: cpu (torch sees no GPU)", "GPUs: why"]),
    ],
)  # fmt: skip
def test_advice(filesystem, node, decoders, says):
    lines = advice(FILESYSTEM | filesystem, NODE | node, DECODERS | decoders)
    for part in says:
        assert any(part in line for line in lines), (part, lines)


@pytest.mark.parametrize(
    ("driver", "extra"),
    [(None, "dali"), (Driver("", 1), "dali"), (Driver("535.104.05", 1), "dali12"), (Driver("580.65", 8), "dali")],
)
def test_dali_fits_the_driver(driver, extra):
    assert dali_extra(driver) == extra


def test_kind_of_filesystem():
    assert mounted_as(Path("/proc/self")) == "proc"


def test_doctor_measures_and_leaves_nothing(tmp_path, command):
    done = command("datapipe", "doctor", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    filesystem, node = found["filesystem"], found["node"]
    assert filesystem["kind"] == mounted_as(tmp_path) != "unknown"
    assert filesystem["metadata_per_s"] > 0 and filesystem["sequential_mb_per_s"] > 0 < filesystem["random_mb_per_s"]
    assert node["cores"] == len(os.sched_getaffinity(0)) and node["memory_bytes"] > 0
    assert found["decoders"]["simplejpeg"] and len(found["advice"]) == 4
    assert list(tmp_path.iterdir()) == []
    done = command("datapipe", "doctor", tmp_path)
    assert done.returncode == 0 and done.stdout.count("advice: ") == 4
    for bad, message in ((tmp_path / "nowhere", "does not exist"), (__file__, "is not a folder")):
        done = command("datapipe", "doctor", bad)
        assert done.returncode == 2 and message in done.stderr


def test_doctor_of_a_data_set(packed_folders, tmp_path, command, mounted):
    """Where it lies on a shared filesystem, it says how to stage it, and what that costs."""
    mounted.calm()
    shutil.copytree(packed_folders["tar"], mounted.backing / "data")
    size = sum(Manifest.read(mounted.backing / "data" / split).size_bytes for split in ("train", "val"))
    line = ["datapipe", "doctor", mounted.path / "data", "--nodes", "4", "--network-mbps", "1000", "--local", tmp_path]
    done = command(*line, "--json")
    assert done.returncode == 0, done.stderr
    staging = json.loads(done.stdout)["staging"]
    assert staging["mode"] == "exchange" and staging["data_bytes"] == size and staging["copy_bytes"] == 4 * size
    assert staging["exchange_s"] >= staging["one_node_s"] > 0 and staging["free_bytes"] > size
    done = command(*line)
    said = done.stdout
    assert "advice: mode: exchange, in which" in said and "\n  copy: " in said and "at 1,000 MB/s" in said, done
    job = command("datapipe", "doctor", mounted.path / "data", "--json", env=os.environ | {"SLURM_JOB_NUM_NODES": "3"})
    assert json.loads(job.stdout)["staging"]["num_nodes"] == 3


def test_doctor_of_a_data_set_on_a_local_disk(packed_folders, command):
    done = command("datapipe", "doctor", packed_folders["tar"], "--nodes", "4", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    if found["advice"][0].startswith("stage: no"):
        assert found["staging"]["mode"] == "none" and "where they are read fast" in found["advice"][-1]


@pytest.mark.parametrize(("option", "value"), [("--nodes", "0"), ("--network-mbps", "0"), ("--network-mbps", "nan")])
def test_doctor_with_bad_settings(tmp_path, command, option, value):
    done = command("datapipe", "doctor", tmp_path, option, value)
    assert done.returncode == 2 and f"{option}: " in done.stderr and "allowed: " in done.stderr, done.stderr


def test_doctor_of_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DatapipeError, match="cannot be written to, and holds no large file to read"):
        doctor(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(FILE_BYTES)
    filesystem = doctor(tmp_path)["filesystem"]
    assert filesystem["metadata_per_s"] is None and filesystem["sequential_mb_per_s"] > 0


READ_ONLY = {"read-only": "ro", "full": "size=1m"}


@pytest.mark.parametrize("kind", READ_ONLY)
def test_doctor_where_nothing_large_can_be_written(tmp_path, command, kind):
    """On filesystems of their own, not on one that says so."""
    mount = f'mount -t tmpfs -o {READ_ONLY[kind]} tmpfs {tmp_path} && "$@"; code=$?; ls -A {tmp_path}; exit $code'
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if os.geteuid() != 0 or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("needs root, and the right to mount")
    done = command("datapipe", "doctor", tmp_path, prefix=prefix)
    why = {"read-only": "Read-only file system", "full": "No space left on device"}[kind]
    assert done.returncode == 1 and done.stdout == ""
    assert f"{tmp_path}: cannot be written to, and holds no large file to read: {why}" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_names_the_stage(packed_folders):
    result = bench(packed_folders["tar"], "cpu", 8, 2, 128, threads=1)
    assert result["limit"] in ("decode", "resize", "window", "read", "other")
    stages = result["stages_s"]
    assert {"read", "window", "decode", "resize", "other", "queue_full", "queue_empty"} <= set(stages)
    busy = sum(stages[name] for name in ("read", "window", "decode", "resize", "other"))
    took = sum(row["seconds"] for row in result["epochs"])
    assert 0 < busy <= 1.2 * took + 0.2 and result["first_batch_s"] > 0
    assert any("limited by" in line for line in format_result(result))


def test_bench_streams_tar_shards(packed_folders, image_folder, command, tmp_path):
    pytest.importorskip("webdataset")
    result = bench(packed_folders["tar"], "webdataset", 8, 2, 32, threads=2)
    assert [row["images"] for row in result["epochs"]] == [56, 56] and result["first_batch_s"] > 0
    stages = result["stages_s"]
    assert all(stages[name] > 0 for name in ("read", "window", "decode", "resize")) and result["limit"] in stages
    assert "for room" in format_result(result)[-1]
    pack(image_folder, tmp_path / "raw", PackOptions(recode=RecodeOptions(store="raw", size=16)))
    for folder, arguments, message in (
        (packed_folders["tar"], ["--order", "blocks"], "order: 'blocks' has no meaning for backend: 'webdataset'"),
        (packed_folders["tar"], ["--io", "direct"], "io: 'direct' has no meaning for backend: 'webdataset'"),
        (packed_folders["hdf5"], [], "holds hdf5 shards"),
        (tmp_path / "raw", [], "holds raw pixels"),
    ):
        done = command("datapipe", "bench", folder, "--backend", "webdataset", *arguments)
        assert done.returncode == 2 and message in done.stderr and not done.stdout, done.stderr


def test_bench_with_an_emulated_accelerator(packed_folders, command):
    result = bench(packed_folders["tar"], "cpu", 8, 1, 16, step_s=0.01, crop="none", threads=2)
    assert 0 < result["utilisation"] < 1
    assert result["wanted_images_per_s"] == pytest.approx(800)
    assert result["enough_cores"] == pytest.approx(800 / result["images_per_cpu_s"])
    done = command("datapipe", "bench", packed_folders["tar"], "--step-ms", "1", "--epochs", "1", "--batch-size", "8",
                   "--order", "blocks", "--io", "mmap", "--crop", "random_resized")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "utilisation" in done.stdout and "cores like these would be enough" in done.stdout


@pytest.mark.parametrize(("waited", "limit"), [(0.0, CONSUMER), (0.05, CONSUMER), (0.06, "decode"), (1.0, "decode")])
def test_what_limits_a_loader(waited, limit):
    assert find_limit({"read": 1.0, "decode": 3.0, "resize": 2.0, "queue_empty": 9.0}, waited) == limit
    assert find_limit({}, 1.0) == "the loader, which measures no stages"


def test_bench_with_bad_settings(packed_folders, command):
    done = command("datapipe", "bench", packed_folders["tar"], "--order", "sorted")
    assert done.returncode == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_mounts_may_have_any_name(tmp_path):
    names = [b"x\xe9", "a\u00a0b".encode(), b"tab\t", b"back\\slash", b"two words"]
    child = Path(__file__).parent / "children" / "mounts_folders.py"
    prefix = ["unshare", "--mount", "true"]
    if subprocess.run(prefix, check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    command = [*prefix[:-1], sys.executable, child, *(os.fsencode(tmp_path) + b"/" + name for name in names)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment())
    assert done.stdout.split() == ["ramfs"] * len(names), done.stderr
