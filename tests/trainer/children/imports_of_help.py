"""`trainer`, which then prints those of the dear modules that it has imported."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    code = main()
    print([name for name in ("torch", "numpy", "matplotlib", "trainer.config.recipe") if name in sys.modules])
    sys.exit(code)
