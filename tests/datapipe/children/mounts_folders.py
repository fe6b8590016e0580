"""Make folders, mount a filesystem on each, and print as what kind datapipe sees them. Arguments: the folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from datapipe.fsio import mounted_as

if __name__ == "__main__":
    for name in sys.argv[1:]:
        os.mkdir(name)
        subprocess.run(["mount", "-t", "ramfs", "ramfs", name], check=True)
    for name in sys.argv[1:]:
        print(mounted_as(Path(name)))
