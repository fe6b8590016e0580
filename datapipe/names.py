"""The names of all that is chosen by name: the commands, the library and recipes take them from here.

Imports nothing that takes time to load, so that `--help` answers at once.
"""

from __future__ import annotations

from typing import Literal, get_args

Crop = Literal["auto", "random_resized", "pad", "none"]
Flip = bool | Literal["alternate"]
Io = Literal["cached", "mmap", "direct"]

# Of the shards: each is a module in `formats`.
FORMATS = ("tar", "hdf5", "lmdb", "zip", "tfrecord", "npy")
CONVERTED = tuple(name for name in FORMATS if name != "npy")  # those that hold any image; npy holds nothing but pixels
# Of raw data sets: the module in `sources` for each, in the order in which `auto` asks them. An ImageFolder is whatever
# is nothing else.
KINDS = {
    "idx": "idx",
    "cifar10": "cifar",
    "cifar100": "cifar",
    "imagenet": "imagenet",
    "webdataset": "webdataset",
    "parquet": "parquet",
    "csv": "csv",
    "imagefolder": "imagefolder",
}
# What labels are that a table or an archive gives (see `sources.labels`).
LABELS = ("auto", "names", "numbers")
# How images are checked, stored and compressed (see `recode`).
CHECKS, STORES, COMPRESSIONS = ("header", "decode"), ("encoded", "raw"), ("lz4", "zstd")
# How nodes stage (see `staging`).
STAGE_MODES = ("auto", "copy", "exchange", "slice")
TRANSPORTS = ("gloo", "mpi")
# Of a loader: each backend is a module in `loaders`.
BACKENDS = ("cpu", "dali", "webdataset", "resident")
ORDERS = ("full", "blocks")
CROPS, IOS = get_args(Crop), get_args(Io)
