"""Load epoch after epoch: FOLDER SETTINGS. Print that the loader is open, and then the samples of each batch."""

import importlib
import json
import sys

from datapipe import watched
from datapipe.console import run
from datapipe.loaders import open_loader

settings = {"batch_size": 8, "size": 24, "threads": 2} | json.loads(sys.argv[2])
if settings.get("backend") == "webdataset":
    importlib.import_module("webdataset")  # before its seconds count
watched.WARN_S = 0.5


def load() -> None:
    with open_loader(sys.argv[1], **settings) as loader:
        print("opened", flush=True)
        while True:
            for batch in loader:
                print(*batch.samples.tolist(), flush=True)


sys.exit(run(load))
