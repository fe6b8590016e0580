"""Run `datapipe` and be killed when one of its functions is called: MODULE NAME before|after ARGUMENTS."""

import importlib
import os
import signal
import sys

from datapipe.cli import main

module, path, moment = sys.argv[1:4]
owner = importlib.import_module(f"datapipe.{module}")
*classes, name = path.split(".")
for part in classes:
    owner = getattr(owner, part)
function = getattr(owner, name)


def end(*arguments: object, **options: object) -> None:
    """Do it or not, and be killed."""
    if moment == "after":
        function(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)


setattr(owner, name, end)
del sys.argv[1:4]
sys.exit(main())
