"""Fetch CIFAR-10 as if it were one file at an address. Arguments: the address, the file's name and sha256, a folder."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from datapipe import console, fetch, public_data

if __name__ == "__main__":
    address, name, digest, folder = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us ignore it
    public_data.DATASETS["cifar10"] = public_data.RemoteDataSet(address, {name: digest})
    sys.exit(console.run(lambda: fetch.fetch("cifar10", Path(folder))))
