"""The public data sets that `fetch` gets: one entry of `DATASETS` each.

Imports nothing that takes time to load: `datapipe fetch --help` names them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteDataSet:
    """Where a data set comes from: its files lie at `address`/NAME, perhaps also in a Debian package."""

    address: str
    files: dict[str, str]  # the sha256 sum of each, by its name
    package: str = ""  # Debian's, in whose folder they are
    package_folder: str = ""  # without a leading slash


# Sums: Fashion-MNIST's from Debian's package 0.0~git20200523.55506a9-1, which has upstream's files; CIFAR's
# as Keras checks them (keras.datasets.cifar10, cifar100), for https://www.cs.toronto.edu/~kriz/cifar.html.
DATASETS = {
    "fashion-mnist": RemoteDataSet(
        address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        files={
            "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
            "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
            "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        },
        package="dataset-fashion-mnist",
        package_folder="usr/share/datasets/fashion-mnist",
    ),
    "cifar10": RemoteDataSet(
        address="https://www.cs.toronto.edu/~kriz",
        files={"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
    ),
    "cifar100": RemoteDataSet(
        address="https://www.cs.toronto.edu/~kriz",
        files={"cifar-100-python.tar.gz": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"},
    ),
}
