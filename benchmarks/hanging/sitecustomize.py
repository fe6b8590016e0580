"""Makes reads of rank 1 wait for as long as the file HANG exists. Python imports this from PYTHONPATH.

`bench_faults.py` puts it there, for all who train alike: reads of a filesystem that has stopped to answer.
"""

import os
import time

HANG, RANK = os.environ.get("HANG", ""), os.environ.get("RANK", os.environ.get("LOCAL_RANK"))


def wait_first(read):
    def wait_and_read(*arguments):
        while os.path.exists(HANG):
            time.sleep(0.1)
        return read(*arguments)

    return wait_and_read


if HANG and RANK == "1":
    os.pread, os.preadv = wait_first(os.pread), wait_first(os.preadv)
