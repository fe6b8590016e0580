"""`python -m trainer`, which `torchrun -m trainer` needs."""

import sys

from .cli import main

sys.exit(main())
