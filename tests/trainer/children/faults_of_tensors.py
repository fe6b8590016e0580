"""Prints how many page faults tensors take that come after others of their size: faults_of_tensors.py HOW ROUNDS BYTES

HOW "kept": the process keeps freed memory. Exit code 3: it cannot.
"""

import resource
import sys

from trainer.ranks.memory import keep_freed_memory

if __name__ == "__main__":
    how, rounds, size = sys.argv[1], *map(int, sys.argv[2:])
    if how == "kept" and not keep_freed_memory():
        sys.exit(3)
    import torch

    faults = []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensor = torch.ones(size // 4)
        del tensor
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(sum(faults[2:]))
