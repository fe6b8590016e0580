"""Stopping on a signal, at a step that all ranks agree on."""

from __future__ import annotations

import signal
import time

from .distributed import World, max_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGREE_EVERY = 10  # steps: agreeing costs a message, and schedulers wait 30 s or more before they kill
# Launchers pass on the Ctrl-C that the terminal has already sent: that is not a second one.
IMPATIENT_AFTER_S = 3.0


class StopSignal:
    """A context in which SIGTERM and Ctrl-C only set a flag, of which `agreed` informs all ranks at the same step.

    The handler saves nothing, as it may run in the middle of anything. A second Ctrl-C, seconds after the first,
    interrupts at once. `number` is the signal that was agreed on, 0 if none.
    """

    def __init__(self, world: World) -> None:
        self.number = 0
        self._world = world
        self._received = 0
        self._received_at = 0.0

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._received and now - self._received_at > IMPATIENT_AFTER_S:
            raise KeyboardInterrupt
        if not self._received:
            self._received, self._received_at = number, now

    def agreed(self, step: int) -> bool:
        """Return whether any rank received a signal. All ranks must call this, with the same rising `step`."""
        if not self.number and (self._world.world_size == 1 or step % AGREE_EVERY == 0):
            self.number = max_over_ranks(self._world, self._received)
        return self.number != 0
