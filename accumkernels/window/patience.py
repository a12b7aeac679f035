"""Notices loops in which no window ends: half-swapped ones, which train nothing and would say nothing."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref

_log = logging.getLogger(__name__)

FEW = 10  # micro-batches of a loop that was meant to train
MANY = 1000  # micro-batches of a window that few mean; and LONGER times those of the longest window before
LONGER = 10

_never_ended: set[Patience] = set()  # of this process: accumulators with at least FEW micro-batches and no end


class Patience:
    """How long the windows of one accumulator may become before something is said.

    A long window may be meant, so this only warns, once while it is open, and once when the process ends, if it ends
    without an exception. An accumulator that is gone counts, too, since a loop in a function is over by then; not if
    another one ends a window later: then it was a probe, and the program trains.

    Args:
        owner: The accumulator, held weakly.

    Attributes:
        limit: The number of micro-batches at which the open window calls `see`.
        longest: How many the longest window had that ended; only a longer one calls `end`.
    """

    def __init__(self, owner: object = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._excused = False
        self.limit = FEW
        self.longest = 0
        self._dropped = 0  # micro-batches of dropped windows, before the first that ended
        self._process = os.getpid()
        self._warned = False

    def see(self, count: int) -> None:
        """Look at an open window that has reached the limit with `count` micro-batches."""
        if self.longest == 0 and not self._excused:
            _never_ended.add(self)
        if count < MANY:
            self.limit = MANY
            return
        self.limit = sys.maxsize
        if not self._warned:
            self._warned = True
            before = f"the longest before had {self.longest}" if self.longest else "none has ended yet"
            _log.warning(
                "this window has %d micro-batches, and %s: nothing is trained until acc.step(optimizer), or "
                "acc.finalize(optimizer) and the optimizer's own step, ends it. A window that is meant to be that long "
                "is right as it is",
                count,
                before,
            )

    def end(self, count: int, used: bool) -> None:
        """See a window of `count` micro-batches end, or be dropped if it was not `used`."""
        if used:
            _never_ended.discard(self)
            _never_ended.difference_update([other for other in _never_ended if other.is_gone()])
            self.longest = count
        elif self.longest == 0:
            self._dropped += count
            if self._dropped >= FEW and not self._excused:
                _never_ended.add(self)
        self.limit = max(MANY, LONGER * self.longest) if self.longest or self in _never_ended else FEW

    def excuse(self) -> None:
        """Say nothing when the process ends: the sums were read, saved or loaded, or are not wanted any more."""
        self._excused = True
        _never_ended.discard(self)

    def is_gone(self) -> bool:
        """Whether its accumulator is."""
        return self._owner is not None and self._owner() is None

    def is_of_this_process(self) -> bool:
        """Whether this process made it; a fork has copies."""
        return self._process == os.getpid()


@atexit.register
def _warn_at_exit() -> None:
    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    if not failed and any(map(Patience.is_of_this_process, _never_ended)):
        _log.warning(
            "the process ends, and no window of a FusedAccumulator with %d micro-batches or more has ever ended: what "
            "it accumulated has trained nothing. End each window by acc.step(optimizer), or acc.finalize(optimizer), "
            "the optimizer's own step and acc.zero_()",
            FEW,
        )
