"""Mount the testbed's filesystem, so that the system asks it when a file is closed, too: ITS-FOLDER BACKING MOUNT."""

import importlib
import sys

sys.path.insert(0, sys.argv.pop(1))
slowfs = importlib.import_module("slowfs")
slowfs.SlowFS.flush = lambda *_: 0
slowfs.main()
