"""As a sitecustomize.py on the way of `trainer train`: each step takes so long that a minute is too short for all."""

import sys
import time
from typing import Any

if "trainer" in "".join(sys.orig_argv) and "train" in sys.orig_argv:
    from trainer.run import loop

    real_update = loop._update

    def update(*arguments: Any) -> None:
        real_update(*arguments)
        time.sleep(0.15)

    loop._update = update
