"""Print the help of `datapipe` and of each command named, and as JSON what it has loaded that takes long."""

from __future__ import annotations

import json
import sys

from datapipe.cli import main

HEAVY = {"torch", "numpy", "h5py", "lmdb", "PIL", "simplejpeg", "matplotlib"}

if __name__ == "__main__":
    commands = [[], *([name] for name in sys.argv[1:])]
    codes = []
    for command in commands:
        sys.argv = ["datapipe", *command, "--help"]
        codes.append(main())
    print(json.dumps(sorted(HEAVY & set(sys.modules))))
    sys.exit(max(codes))
