"""Keep a loader open until the input ends: SOURCE CACHE [SETTINGS as JSON]."""

import json
import sys

from datapipe.loaders import open_loader

source, cache, settings = sys.argv[1], sys.argv[2], json.loads((*sys.argv, "{}")[3])
loader = open_loader(source, cache=cache, **{"batch_size": 4, "size": 16, **settings})
print("open", flush=True)
sys.stdin.read()
