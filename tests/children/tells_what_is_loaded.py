"""Run a command: MODULE,… COMMAND ARGUMENT…; then print those of the modules that are loaded."""

import contextlib
import runpy
import sys

names, command, *arguments = sys.argv[1:]
sys.argv = [command, *arguments]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
    runpy.run_module(command, run_name="__main__", alter_sys=True)
print(*(name for name in names.split(",") if name in sys.modules))
