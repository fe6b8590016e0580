"""`trainer`, with a package in a folder: with_package.py FOLDER, and then the words of the command."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.path.insert(0, sys.argv.pop(1))
    sys.exit(main())
