"""A peer in a process of its own: `python -m benchmarks.peers NAME CORPUS TASK`.

For each line on standard input, an epoch's number, it goes through that epoch and answers with a line of
JSON: images, wall_s and cpu_s (of this process and its children), those until the first batch came, open_s, the seconds
that opening took, checks of what came, and the decoder (or null).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.measure import open_answers, timed
from benchmarks.peers import Task, describe_decoder, open_peer


def measure(batches: Iterable, task: Task) -> dict:
    """Go through one epoch. Raises ValueError when the batches are not what the task asks for."""
    images = labels_sum = 0
    batches = iter(batches)
    with timed() as seconds:
        with timed() as waiting:
            batch = next(batches)
        while batch is not None:  # one is kept at a time: a loader may have room for few
            images_BCHW, labels_B = batch
            images += len(images_BCHW)
            labels_sum += int(labels_B.sum())
            batch = next(batches, None)
    shape = (task.channels, task.size, task.size)
    if images_BCHW.shape[1:] != shape or str(images_BCHW.dtype) != "torch.uint8":
        raise ValueError(f"batches are {images_BCHW.dtype}{list(images_BCHW.shape)}, not uint8[B, *{shape}]")
    return {
        "images": images,
        **seconds,
        **{f"first_{name}": value for name, value in waiting.items()},
        "mean_label": labels_sum / images,
        "last": [images_BCHW.float().mean((1, 2, 3)).tolist(), labels_B.tolist()],  # each image's brightness and label
    }


def main() -> int:
    name, corpus, task = sys.argv[1], Path(sys.argv[2]), Task(**json.loads(sys.argv[3]))
    tell = open_answers()
    decoder = describe_decoder(name)  # imports what there is to import
    with timed() as opening:
        epochs = open_peer(name, corpus, task)
    for line in sys.stdin:
        tell(measure(epochs(int(line)), task) | {"open_s": opening["wall_s"], "decoder": decoder})
    return 0


if __name__ == "__main__":
    sys.exit(main())
