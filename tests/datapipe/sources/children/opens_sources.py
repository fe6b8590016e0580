"""Open sources with little memory, and print a line for each, a JSON string: what its SourceError says.

Arguments: the bytes that opening may take, and the sources.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datapipe.errors import SourceError
from datapipe.sources import open_source
from tests.datapipe.sources.children.little_memory import limit_memory


def main(num_bytes: str, *paths: str) -> None:
    limit_memory(int(num_bytes))
    for path in paths:
        try:
            open_source(Path(path))
            said = "is opened"
        except SourceError as error:
            said = str(error)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
