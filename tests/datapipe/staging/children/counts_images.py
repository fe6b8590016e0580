"""Load an epoch, and print how many images it has, and whether slots, if there are any, may be written to.

SOURCE CACHE [SETTINGS as JSON]
"""

import json
import sys

from datapipe.console import run
from datapipe.loaders import open_loader
from datapipe.loaders.engine import Engine
from datapipe.loaders.indexed import IndexedSource


def count() -> None:
    source, cache, settings = sys.argv[1], sys.argv[2], json.loads((*sys.argv, "{}")[3])
    with open_loader(source, cache=cache, **{"batch_size": 4, "size": 16, "threads": 1, **settings}) as loader:
        assert isinstance(loader, Engine) and isinstance(loader.source, IndexedSource)
        slots = loader.source.data_set.slots
        print(sum(len(batch.labels) for batch in loader), bool(slots and slots.is_writable))


sys.exit(run(count))
