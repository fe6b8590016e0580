"""Load epoch after epoch without a `with`: FOLDER BACKEND. Say so at each batch."""

import sys

from datapipe.loaders import open_loader

loader = open_loader(sys.argv[1], 4, backend=sys.argv[2], size=224)
while True:
    for _ in loader:
        print("batch", flush=True)
        sys.stdin.readline()  # until the test has seen it
