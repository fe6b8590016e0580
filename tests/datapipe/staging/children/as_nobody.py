"""Run another child, or "datapipe", as the user nobody: NAME ARGUMENTS.

What is imported only when it is needed may lie where only root can read, so all is read before.
"""

import importlib
import os
import sys
from pathlib import Path

from datapipe.cli import main

NOBODY = 65534

importlib.import_module("datapipe.loaders.cpu")
name = sys.argv[1]
program = None if name == "datapipe" else compile(Path(__file__).with_name(f"{name}.py").read_text(), name, "exec")
os.setgroups([])
os.setresgid(NOBODY, NOBODY, NOBODY)
os.setresuid(NOBODY, NOBODY, NOBODY)
sys.argv = sys.argv[1:]
if program is None:
    sys.exit(main())
exec(program, {"__name__": "__main__"})
