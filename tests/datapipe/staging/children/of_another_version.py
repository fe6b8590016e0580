"""Run `datapipe` with a later protocol between nodes."""

import sys

from datapipe.cli import main
from datapipe.staging import multi_node

multi_node.PROTOCOL += 1
sys.exit(main())
