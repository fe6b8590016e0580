"""Meet another process of a job at a port, and say what is wrong: RANK PORT SECRET."""

import sys
from pathlib import Path

from datapipe.cluster import Placement
from datapipe.jobgroup.rendezvous import open_crew
from datapipe.jobgroup.store import CrewError

rank, port, secret = sys.argv[1:]
try:
    with open_crew(Placement(int(rank), 2, "localhost", int(port), job="7"), 100, secret=Path(secret)) as crew:
        print(crew.gather_from_ranks("subject", f"of {rank}"))
except CrewError as error:
    print(type(error).__name__, error)
