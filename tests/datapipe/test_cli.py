"""The `datapipe` command as a user meets it."""

import inspect
import json
import os
import re
import select
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import typer.testing

from datapipe import cli, names
from datapipe.cli import app
from datapipe.dataset import DataSet
from datapipe.dataset.index import RECORD, write_index, write_keys
from datapipe.dataset.manifest import FileInfo, Manifest, ShardInfo
from datapipe.errors import MissingBackendError
from datapipe.fsio import checksum
from datapipe.images.codec import read_header
from datapipe.images.recode import RecodeOptions
from datapipe.loaders import open_loader
from datapipe.packing import PackOptions
from datapipe.packing.options import SHARD_MIB
from datapipe.public_data import DATASETS
from tests.processes import clean_environment
from tests.waiting import limit_s

CHILDREN = Path(__file__).with_name("children")
COMMANDS = ["fetch", "pack", "convert", "info", "verify", "stage", "bench", "doctor"]
# What a command takes by name, and where the names come from.
CHOICES = {
    ("fetch", "NAME"): DATASETS,
    ("pack", "--format"): names.FORMATS,
    ("pack", "--kind"): ["auto", *names.KINDS],
    ("pack", "--store"): names.STORES,
    ("pack", "--compress"): names.COMPRESSIONS,
    ("pack", "--check"): names.CHECKS,
    ("pack", "--labels"): names.LABELS,
    ("convert", "--format"): names.CONVERTED,
    ("stage", "--mode"): names.STAGE_MODES,
    ("stage", "--transport"): names.TRANSPORTS,
    ("bench", "--backend"): names.BACKENDS,
    ("bench", "--order"): names.ORDERS,
    ("bench", "--crop"): names.CROPS,
    ("bench", "--io"): names.IOS,
}


def test_help_has_an_example_and_loads_nothing_heavy():
    """What takes time to load is not loaded: the clock itself does not matter to a test."""
    line = [sys.executable, CHILDREN / "asks_for_help.py", *COMMANDS, "cache"]
    done = subprocess.run(line, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert re.findall(r"Example:  datapipe (\w+)", done.stdout) == ["pack", *COMMANDS, "cache"]


def run(*arguments):
    return typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_every_choice_of_every_command_is_a_registrys():
    shown = {}
    assert {command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)
    for name in COMMANDS:
        for option, choices in re.findall(r"^ +(--[\w-]+) <([\w|-]+\|[\w|-]+)>", run(name, "--help").output, re.M):
            shown[name, option] = choices.split("|")
    assert f"One of {', '.join(DATASETS)}." in run("fetch", "--help").output
    assert shown | {("fetch", "NAME"): list(DATASETS)} == {place: list(names) for place, names in CHOICES.items()}


@pytest.mark.parametrize(("name", "option"), CHOICES)
def test_a_name_that_no_registry_has_is_refused_with_those_that_are_allowed(name, option):
    places = ["x", "y"][: 1 if name == "bench" else 2]
    done = run(name, *(["magic", "y"] if option == "NAME" else [*places, option, "magic"]))
    assert done.exit_code == 2 and f"'{option}'" in done.output and "'magic'" in done.output
    assert all(choice in done.output for choice in CHOICES[name, option])


SPELT = {"timeout_s": "timeout"}  # how the command says an option, where it is not by the same name
# Options of the library that the command computes, or that another part of it sets.
NOT_ASKED_FOR = {"recode", "headerless"}
NOT_CONVERTED = {
    "label_column",
    "path_column",
    "kind",
    "seed",
    "max_bad",
    "outside",
    "memory",
    "split",
    "labels",
    "strict",
    "left_out",
}  # the source's own, or without a meaning


def defaults(kind):
    return {field.name: field.default for field in fields(kind) if field.name not in NOT_ASKED_FOR}


def shown_defaults(command, names):
    parameters = inspect.signature(command).parameters
    return {name: parameters[SPELT.get(name, name)].default for name in names}


def test_pack_has_every_option_of_the_library_with_its_default():
    expected = defaults(PackOptions) | defaults(RecodeOptions)
    del expected["split"]  # none: None here
    del expected["task"]  # a factory's; None here: as the launcher says
    expected["shard_mib"] = SHARD_MIB  # which the library takes for None
    assert shown_defaults(cli.pack, expected) == expected
    assert shown_defaults(cli.pack, ["task", "split"]) == {"task": None, "split": None}


def test_convert_has_every_option_that_a_conversion_uses():
    expected = {name: value for name, value in defaults(PackOptions).items() if name not in NOT_CONVERTED}
    expected |= {"format": inspect.Parameter.empty, "task": None}  # asked for; as the launcher says
    assert shown_defaults(cli.convert, expected) == expected


def test_bench_opens_the_loader_with_its_own_defaults():
    loader = inspect.signature(open_loader).parameters
    expected = {name: loader[name].default for name in ("order", "io", "threads")}
    assert shown_defaults(cli.bench, expected) == expected
    assert shown_defaults(cli.bench, ["backend"]) == {"backend": loader["backend"].default}
    assert inspect.signature(cli.bench).parameters["device"].default == "cpu"  # None, which is the CPU


def test_a_new_format_is_a_file_and_a_line(image_folder, tmp_path):
    """In a new interpreter, whose command reads the names of the formats after that line."""
    line = [sys.executable, CHILDREN / "has_a_new_format.py", image_folder, tmp_path / "out"]
    done = subprocess.run(line, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "train" / "shard-000000.toy").read_bytes().startswith(b"toy:\x89PNG")
    assert Manifest.read(tmp_path / "out" / "train").format == "toy"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pack"], 2, "SOURCE"),
        (["pack", "{raw}", "{tmp}/out", "--format", "rar"], 2, "'rar'"),
        (["pack", "{raw}", "{tmp}/out", "--shard-mib", "0"], 2, "--shard-mib: 0"),
        (["pack", "{raw}", "{tmp}/out", "--shard-mib", "big"], 2, "--shard-mib"),
        (["pack", "{tmp}/nothing", "{tmp}/out"], 2, "does not exist"),
        (["pack", "{tmp}", "{tmp}/out"], 2, "packed into itself"),
        (["pack", "{packed}", "{tmp}/out"], 2, "datapipe convert"),
        (["pack", "{raw}", "{packed}"], 2, "--overwrite"),
        (["pack", "{tmp}/nothing", "{packed}"], 2, "nothing: does not exist"),
        (["pack", "{raw}", "{tmp}/file/out"], 2, "file"),
        (["info", "{tmp}"], 2, "no data set here (the folder is not packed: datapipe pack makes"),
        (["info", "{tmp}/sets"], 2, "the folder holds data sets: choose one of a, b"),
        (["info", "{tmp}/unfinished"], 1, "the pack is unfinished: run the same command again"),
        (["verify", "{tmp}/nothing"], 2, "nothing: no data set here (the folder does not exist)"),
        (["verify", "{tmp}/file"], 2, "file: no data set here (it is a file)"),
        (["convert", "{tmp}/file", "{tmp}/out", "--format", "zip"], 2, "no data set here (it is a file)"),
        (["convert", "{packed}", "{tmp}/out"], 2, "--format"),
        (["convert", "{packed}", "{tmp}/out", "--format", "npy"], 2, "'npy' is not one of tar, "),
        (["fetch", "cifar10", "{tmp}/file"], 2, "is a file; allowed: a folder"),
        (["stage", "{packed}", "{tmp}/file"], 2, "is a file"),
        (["stage", "{packed}", "{packed}/x"], 2, "into itself"),
        (["bench", "{packed}", "--size", "0"], 2, "--size: 0"),
        (["bench", "{packed}", "--epochs", "0"], 2, "--epochs"),
        (["bench", "{packed}", "--step-ms", "-1"], 2, "--step-ms"),
        (["bench", "{packed}", "--threads", "-2"], 2, "--threads: -2"),
        (["pack", "{raw}", "{tmp}/out", "--max-bad", "x"], 2, "--max-bad: 'x'"),
        (["pack", "{raw}", "{tmp}/out", "--compress", "lz4"], 2, "--compress: 'lz4' needs --store raw"),
        (["pack", "{raw}", "{tmp}/out", "--seed", "-1"], 2, "--seed: -1"),
        (["pack", "{raw}", "{tmp}/out", "--timeout", "-1"], 2, "--timeout: -1"),
        (["pack", "{raw}", "{tmp}/out", "--memory", "8 apples"], 2, "--memory: '8 apples' is not a size"),
        (["verify", "{packed}", "--timeout", "0"], 2, "--timeout: 0"),
        (["pack", "{raw}", "{raw}/train/out"], 2, "packed into itself"),
        (["pack", "{raw}", "{packed}/train/more"], 2, "inside a packed data set"),
        (["stage", "{raw}", "{tmp}/local"], 2, "the folder is not packed"),
        (["bench", "{packed}", "--batch-size", "100"], 2, "batch of 100 is larger than the data set of 61"),
        (["bench", "{packed}", "--backend", "magic"], 2, "magic"),
        (["unpack"], 2, "unpack"),
        (["doctor", "{tmp}/nothing"], 2, "nothing: does not exist"),
        (["bench", "{tmp}/nothing"], 2, "the folder does not exist"),
        (["stage", "{tmp}/nothing", "{tmp}/local"], 2, "the folder does not exist"),
        (["cache", "list", "{tmp}/nothing"], 2, "nothing: is not a folder"),
        (["cache", "pin", "{tmp}/nothing"], 2, "nothing: is not a folder"),
    ],
)
def test_mistakes_get_a_clear_answer(command, image_folder, packed_folders, tmp_path, arguments, code, message):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "unfinished" / ".pack").mkdir(parents=True)
    (tmp_path / "sets").mkdir()
    for name in ("b", "a"):
        (tmp_path / "sets" / name).symlink_to(packed_folders["tar"])
    places = {"raw": image_folder, "packed": packed_folders["tar"], "tmp": tmp_path}
    done = command("datapipe", *(argument.format(**places) for argument in arguments))
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob("manifest.json"))


@pytest.fixture
def unprivileged(server):
    """unprivileged(*arguments) runs `datapipe` that may not do what a file's mode forbids."""
    return lambda *arguments: server.run(CHILDREN / "may_not_override.py", *arguments)


def test_a_folder_that_may_not_be_written_to(unprivileged, image_folder, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    done = unprivileged("pack", image_folder, locked / "out")
    assert done.returncode == 1 and "Permission denied" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["info", "verify", "stage", "bench", "convert", "pack"])
def test_a_folder_that_may_not_be_read(unprivileged, packed_folders, tmp_path, name):
    """Neither the whole nor one split: to leave that out would be to say that all is well with the other."""
    more = {"stage": [tmp_path / "local"], "convert": [tmp_path / "out", "--format", "zip"], "pack": [tmp_path / "out"]}
    folder = Path(shutil.copytree(packed_folders["tar"], tmp_path / "packed"))
    for locked in (folder / "train", folder):
        locked.chmod(0)
        done = unprivileged(name, folder, *more.get(name, []))
        locked.chmod(0o755)
        assert done.returncode == 1 and "Permission denied" in done.stderr, done.stderr
        assert str(locked) in done.stderr and "Traceback" not in done.stderr and not done.stdout
        assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_what_mkfs_left_is_no_split(unprivileged, packed_folders, tmp_path):
    folder = Path(shutil.copytree(packed_folders["tar"], tmp_path / "packed"))
    (folder / "lost+found").mkdir(mode=0)
    done = unprivileged("info", folder)
    (folder / "lost+found").rmdir()
    assert done.returncode == 0 and "packed/train: 61 images of 3 classes in " in done.stdout, done


def test_pack_json(command, image_folder, tmp_path):
    done = command("datapipe", "pack", image_folder, tmp_path / "out", "--format", "hdf5", "--json", "--workers", 2)
    assert done.returncode == 0, done.stderr
    splits = json.loads(done.stdout)["splits"]
    assert {name: split["num_samples"] for name, split in splits.items()} == {"train": 61, "val": 10}


def test_bench_json(command, packed_folders):
    done = command("datapipe", "bench", packed_folders["tar"], "--batch-size", 8, "--epochs", 2, "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert [e["images"] for e in row["epochs"]] == [56, 56]
    seconds = sum(e["seconds"] for e in row["epochs"])
    assert row["images_per_s"] == pytest.approx(112 / seconds)
    assert row["images_per_cpu_s"] > 0 and 0 <= row["wait_s"] <= seconds


def test_info_of_an_index_as_large_as_imagenets(command, tmp_path):
    """1.28 million samples: the answer's figures are right, and nothing but the index is looked at."""
    n = 1_281_167
    records = np.zeros(n, RECORD)
    records["size"] = 1 + np.arange(n) % 200_000
    ends = records["size"].cumsum(dtype=np.uint64)
    records["offset"] = ends - records["size"]
    records["label"] = np.arange(n) % 1000
    records["width"], records["height"] = 500, 375
    write_index(tmp_path, records)
    write_keys(tmp_path, [f"{i}" for i in range(n)])
    files = [
        FileInfo(name=name, size_bytes=(tmp_path / name).stat().st_size, xxh3_128=checksum(tmp_path / name))
        for name in ("index.npy", "keys.txt")
    ]
    shard = ShardInfo(name="shard-000000.tar", size_bytes=int(ends[-1]), xxh3_128="0" * 32, num_samples=n)
    Manifest(
        format="tar", kind="imagefolder", split="train", num_samples=n, classes=[f"n{i:08}" for i in range(1000)],
        channels=3, width=None, height=None, seed=0, shard_mib=256, shards=[shard], files=files,
    ).write(tmp_path)  # fmt: skip
    assert (tmp_path / "index.npy").stat().st_size <= 32 * n + 1000
    (row,) = json.loads(command("datapipe", "info", tmp_path, "--json").stdout)
    assert row["num_samples"] == n and row["num_classes"] == 1000
    assert row["image_bytes_mean"] == pytest.approx(records["size"].mean())


def test_info_in_an_ascii_locale(command, tmp_path, encoded, photo):
    """Where nothing makes UTF-8 of it: a × is not a reason to fail, nor is a name that cannot be printed."""
    (tmp_path / "raw" / "é").mkdir(parents=True)
    (tmp_path / "raw" / "é" / "0.png").write_bytes(encoded(photo(12, 8, 1), "PNG"))
    out = tmp_path / os.fsdecode(b"out\xe9")
    ascii_only = clean_environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    calls = ["pack", tmp_path / "raw", out], ["info", out], ["verify", out], ["verify", out / "no"]
    for arguments in calls:
        done = command("datapipe", *arguments)
        assert "Traceback" not in done.stderr and r"out\udce9" in done.stdout + done.stderr
        assert done.returncode == 2 * (arguments[-1] == out / "no")
        assert arguments[0] != "info" or "12×8" in done.stdout
    for arguments in (calls[1], calls[3]):
        done = command("datapipe", *arguments, env=ascii_only)
        assert "Traceback" not in done.stderr and r"out\udce9" in done.stdout + done.stderr
        assert done.returncode == 2 * (arguments[-1] == out / "no")
        assert arguments[0] != "info" or r"12\xd78" in done.stdout


def test_progress_is_a_line_in_a_log_and_a_bar_on_a_terminal(server, image_folder, tmp_path):
    import pty

    line = "-m", "datapipe", "pack", image_folder
    log = server.run(*line, tmp_path / "a", "--workers", 1)
    assert log.returncode == 0 and "\x1b" not in log.stderr
    main_end, child_end = pty.openpty()
    env = clean_environment(TERM="xterm")
    child = server.start(*line, tmp_path / "b", "--workers", 1, env=env, stdout=subprocess.DEVNULL, stderr=child_end)
    os.close(child_end)
    screen = b""
    while select.select([main_end], [], [], limit_s())[0]:
        try:
            part = os.read(main_end, 4096)
        except OSError:
            break
        if not part:
            break
        screen += part
    os.close(main_end)
    assert child.wait(limit_s()) == 0 and b"packing" in screen and b"images/s" in screen


def test_the_shell_completes_commands_options_and_names():
    """As typer's own scripts ask: by a variable, with what is typed so far."""
    for typed, expected in {
        "datapipe ver": ["verify"],
        "datapipe pack raw out --for": ["--format"],
        "datapipe pack raw out --format t": ["tar", "tfrecord"],
        "datapipe fetch ci": ["cifar10", "cifar100"],
    }.items():
        words = typed.split(" ")
        env = {"_DATAPIPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
        done = typer.testing.CliRunner().invoke(app, [], prog_name="datapipe", env=env)
        assert done.stdout.split() == expected, done.output


def test_a_mistyped_name_is_asked_about():
    assert "; did you mean tfrecord?" in run("pack", "x", "y", "--format", "tfrecrd").output
    assert "--resize" in run("pack", "x", "y", "--resiz", "max=1").output


def test_a_share_says_who_made_it(image_folder, tmp_path, caplog):
    """The elements of a job array, one of which packs this source: each would leave two thirds out."""
    array = {"ID": "5", "MIN": "5", "MAX": "7", "STEP": "1", "COUNT": "3"}
    env = {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
    line = ["pack", str(image_folder), str(tmp_path / "out"), "--shard-mib", "1"]
    with caplog.at_level("INFO"):
        done = typer.testing.CliRunner().invoke(app, line, env=env)
    said = "task 0 of 3 (as set by Slurm job array; --task 0/1 packs everything here)"
    assert done.exit_code == 0 and done.stdout.startswith(f"{said} is done; other tasks have "), done
    assert f"{tmp_path / 'out'}: this is {said}" in caplog.text


CHANNELS = {  # options, and the channels that a loader gives of train, which is in colour, and val, which is grey
    "own": ([], [3, 1]),
    "grey": (["--channels", 1], [1, 1]),
    "rgb": (["--channels", 3], [3, 3]),
    "small": (["--channels", 1, "--resize", "max=20"], [1, 1]),
    "npy": (["--channels", 3, "--store", "raw", "--size", 20, "--format", "npy"], [3, 3]),
}


def test_colour_in_train_and_grey_in_val(tmp_path, photo, encoded):
    for split, grey in (("train", False), ("val", True)):
        (tmp_path / "raw" / split / "a").mkdir(parents=True)
        for i in range(2):
            (tmp_path / "raw" / split / "a" / f"{i}.jpg").write_bytes(encoded(photo(40, 30, i, grey=grey)))
    read = {}
    for name, (options, channels) in CHANNELS.items():
        assert run("pack", tmp_path / "raw", tmp_path / name, *options).exit_code == 0
        read[name] = []
        for split in ("train", "val"):
            with open_loader(tmp_path / name / split, batch_size=2, size=20, train=False, threads=1) as loader:
                read[name].append(next(iter(loader)).images)
        assert [images.shape[1] for images in read[name]] == channels, name
    assert (read["rgb"][0] == read["own"][0]).all() and (read["rgb"][1] == read["own"][1]).all()
    shards = [(tmp_path / name / "train" / "shard-000000.tar").read_bytes() for name in ("own", "grey", "rgb")]
    assert shards[0] == shards[1] == shards[2]  # files are stored as they are
    with DataSet(tmp_path / "small" / "train") as data_set:
        assert read_header(data_set.read(0)).channels == 1  # what is re-encoded has no colour to be left out
    assert run("convert", tmp_path / "rgb", tmp_path / "zip", "--format", "zip").exit_code == 0
    assert Manifest.read(tmp_path / "zip" / "val").channels == 3


@pytest.mark.parametrize("options", [["--format", "tfrecord"], ["--store", "raw", "--compress", "lz4"]])
@pytest.mark.parametrize("task", [None, "0/2"])
def test_a_missing_package_is_told_before_anything_is_done(image_folder, tmp_path, monkeypatch, options, task):
    for package in ("crc32c", "lz4", "lz4.frame"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("datapipe.packing.open_source", lambda *_: pytest.fail("the source was listed"))
    done = run("pack", image_folder, tmp_path / "out", *options, *(["--task", task] if task else []))
    assert isinstance(done.exception, MissingBackendError) and "pip install" in str(done.exception)
    assert not (tmp_path / "out").exists()
