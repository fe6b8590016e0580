"""Load from a SHARD of a FOLDER that hangs; put a GOOD one in its place; load in a forked process, too.

The exit code is that of the forked process: 7 if each of its samples is valid.
"""

import os
import sys
import threading

from datapipe.loaders import open_loader
from datapipe.loaders.engine import Engine
from datapipe.loaders.indexed import IndexedSource
from tests.waiting import wait_until

folder, shard, good = sys.argv[1:]
with open_loader(folder, 61, size=24, threads=2, train=False) as loader:
    assert isinstance(loader, Engine) and isinstance(loader.source, IndexedSource)
    reader = loader.source.data_set.reader
    threading.Thread(target=lambda: next(iter(loader)), daemon=True).start()
    wait_until(reader.oldest)
    os.replace(good, shard)
    if not os.fork():
        loader.set_epoch(0)
        (batch,) = loader
        os._exit(7 if batch.valid.all() else 1)
    code = os.waitstatus_to_exitcode(os.wait()[1])
sys.exit(code)
