"""Run `datapipe` with a later protocol between nodes."""

import sys

from datapipe.cli import main
from datapipe.staging import together

together.PROTOCOL += 1
sys.exit(main())
