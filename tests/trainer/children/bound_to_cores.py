"""`trainer`, bound to some cores: bound_to_cores.py CORE,CORE,… and then the words of the command."""

import os
import sys

from trainer.cli import main

if __name__ == "__main__":
    os.sched_setaffinity(0, map(int, sys.argv.pop(1).split(",")))
    sys.exit(main())
