"""`python -m datapipe`: what launchers such as torchrun start."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
