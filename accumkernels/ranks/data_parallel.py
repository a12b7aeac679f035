"""Data parallel windows: one small collective for all scalars, and the flat buffers in chunks.

A window's communication does not depend on the number of its micro-batches. At its end every rank

* puts its sum of weights, its flags and what must be alike in one fp64 vector, which is summed
  (`all_reduce_stats`): all ranks then divide by the same number, and all step or all skip. Its size depends neither on
  the number of ranks (agreement.py) nor, in a settled layout, on that of parameters (sender.py);
* sums the flat buffers, chunk by chunk, several in flight, so that inspecting one chunk (norm, overflow, division)
  overlaps with the communication of the next (`reduce`).

Every rank issues the same collectives of the same sizes, whatever its window was like: it reduces whole buffers, with
zeros for untouched segments. With `release="backward"` the chunks come first, since the last micro-batch may send them
during its backward, over a group of the library's own (a user's collective may come in between). Otherwise the vector
comes first, so that the divisor is there when the chunks are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..ops.schema import State
from .agreement import ANY, SAME_CLIPPING, SAME_WINDOW, SUM, Agreement, Alike, Table
from .base import GlobalStats, LocalStats, Ranks, next_key
from .group import Group
from .sender import ChunkSender, Fields, Sent, Touched


class DataParallel(Ranks):
    """Ranks that each hold all parameters, and reduce their flat buffers once per window.

    Args:
        group: The group to sum over.
        parameters: How many parameters the accumulator has, frozen ones too.
        early: Whether the last micro-batch of a window may send chunks; the same on all ranks.
    """

    ends_together = True
    reduces_sums = True
    sender: ChunkSender

    def __init__(self, group: Group, parameters: int, early: bool) -> None:
        self.size = group.size
        self.rank = group.rank
        self.sender = ChunkSender(group, early)
        self.weight_key = next_key(self.size)
        self._group = group
        self._touched = Touched(parameters, self.size)

    def __str__(self) -> str:
        return str(self._group)

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """See `Ranks`."""
        self.sender.follow(buffers)
        self._touched.follow()

    # ---- at the end of a window

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine all ranks' reports; collective.

        The host reads the result if that needs no wait for a device (on the CPU), or if it must: other ranks may have
        touched more segments, or the layout grew.

        Raises:
            RuntimeError: parameters were unfrozen on some ranks only.
        """
        self.sender.send_before_stats(report.sent)

        # Sum one vector, which has the same length on every rank, whatever is frozen where.
        device, own = report.state.device, report.touched
        host_reads = device.type == "cpu" or report.divisor is not None or not self._touched.knows(own)
        touched = self._touched.fields(own, report.idle)
        values = report._asdict() | {
            "squares": None if report.squares is None else report.squares[0],
            "loss": report.loss_sums,
            "measuring": report.squares is not None,
            "marked": report.sent.marked,
            "unmarked": not report.sent.marked and report.micro_batches > 0 and not report.dropped,
            "placed": len(own),
        }
        table = {**_TABLE, **dict.fromkeys(touched, SUM)}
        found = Agreement(table, values | touched, self._group, device, host_reads)

        # Without the host, the device concludes that a window dropped by any rank is empty, and that different windows,
        # norms, divisors or limits count as overflow.
        dropped, all_measure = found["dropped"], found["measuring"][0] == self.size
        stats = GlobalStats(
            state=torch.where(dropped, 0.0, found.flagged(found["state"], found.is_wrong())),
            divisor=report.divisor,
            squares=None if report.squares is None else torch.where(all_measure, found["squares"][0], torch.nan),
            loss=torch.where(dropped, 0.0, found["loss"]),
        )

        # The host concludes the rest, where it may look.
        if not host_reads:
            self.sender.note_same_layout()
            return stats
        if "placed" in found.wrong():  # even the sums of ranks that hold others have no common layout
            raise RuntimeError(found.error())
        self.sender.note_same_layout()
        sums = found.sums
        any_touched, idle = self._touched.combine(own, report.idle, sums, functools.partial(self._sum, device))
        return stats._replace(
            idle=idle,
            touched=None if any_touched == own else any_touched,
            dropped=sums["dropped"][0] > 0,
            weight=sums["state"][State.WEIGHT],
            error=found.error() or _different_marks(*sums["marked"], *sums["unmarked"]),
        )

    def _sum(self, device: torch.device, fields: Fields) -> dict[str, list[float]]:
        """Sum fields over ranks, for the host; collective."""
        return Agreement(dict.fromkeys(fields, SUM), fields, self._group, device).sums

    def reduce(self, sent: Sent, inspect: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """See `Ranks`; `inspect` gets chunks while the next are being sent. Then module buffers are shared."""
        self.sender.send_rest(sent, inspect)
        self._group.share()

    # ---- checkpoints

    def joined(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """See `Ranks`; collective."""
        return self._group.sum(tensor, largest)


_TABLE: Table = {
    "state": SUM,
    "squares": SUM,
    "loss": SUM,
    "dropped": ANY,
    "measuring": SUM,
    "marked": SUM,
    "unmarked": SUM,
    **SAME_WINDOW,
    "placed": Alike("parameters were unfrozen on some ranks only: by rank, {} are accumulated", int),
    "divisor": Alike("divisor must be that of the whole window, over all ranks; by rank it is {} (0.0: none)"),
    **SAME_CLIPPING,
}


def _different_marks(marked: float, unmarked: float) -> str | None:
    """Say that some ranks have marked their last micro-batch and others not."""
    if not (marked and unmarked):
        return None
    return (
        f"the last micro-batch was marked (last=True, acc.window) on {int(marked)} ranks, and not on "
        f"{int(unmarked)} others that ran micro-batches: mark it on all of them, or on none"
    )
