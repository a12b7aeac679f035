"""Data parallel windows: one small collective for all scalars, and the flat buffers in chunks.

A window's communication does not depend on the number of its micro-batches. At its end every rank

* puts its sum of weights, its flags and what must be alike in one fp64 vector, which is summed
  (`all_reduce_stats`): all ranks then divide by the same number, and all step or all skip. Its size depends neither on
  the number of ranks (packing.py) nor, in a settled layout, on that of parameters (touched.py);
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
from .base import GlobalStats, LocalStats, Ranks
from .group import Group
from .packing import Packer, different_limits, different_windows, listed
from .sender import ChunkSender
from .touched import Fields, Touched
from .weight_unit import next_key


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
        self._touched = Touched(parameters, self.sender, self.rank, self.size)

    def __str__(self) -> str:
        return str(self._group)

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """See `Ranks`."""
        self.sender.follow(buffers)
        self._touched.follow()

    def share_from(self, shared: Callable[[], list[Tensor]]) -> None:
        """See `Ranks`."""
        self._group.share_from(shared)

    # ---- at the end of a window

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine all ranks' reports; collective.

        The host reads the result if that needs no wait for a device (on the CPU), or if it must: other ranks may have
        touched more segments, or the layout grew.

        Raises:
            RuntimeError: parameters were unfrozen on some ranks only.
        """
        self.sender.send_before_stats()

        # Sum one vector, which has the same length on every rank, whatever is frozen where.
        device, own = report.state.device, report.touched
        looks = device.type == "cpu" or report.divisor is not None or not self._touched.knows(own)
        packer = Packer(self.rank, self.size, device, looks)
        packer.add(
            state=report.state,
            squares=None if report.squares is None else report.squares[0],
            loss=report.loss_sums,
            dropped=report.dropped,
            measuring=report.squares is not None,
            marked=self.sender.marked,
            unmarked=not self.sender.marked and report.micro_batches > 0 and not report.dropped,
            **self._touched.fields(own, report.idle),
        )
        packer.add_alike(
            window=report.window,
            resumed=report.resumed,
            placed=len(own),
            divisor=report.divisor,
            norms=report.norms,
            limit=report.limit,
        )
        packed = packer.reduce(self._group.sum)

        # Without the host, the device concludes that a window dropped by any rank is empty, and that different windows,
        # norms, divisors or limits count as overflow.
        state, loss = packed["state"], packed["loss"]
        flags = state[State.FOUND_INF :: State.POISONED - State.FOUND_INF]  # these two
        flags.copy_((flags > 0) | packed.differ())
        dropped, measuring = packed["dropped"], packed["measuring"]
        agreement = GlobalStats(
            state=torch.where(dropped > 0, 0.0, state),
            divisor=report.divisor,
            squares=None
            if report.squares is None
            else torch.where(measuring[0] == self.size, packed["squares"][0], torch.nan),
            loss=torch.where(dropped > 0, 0.0, loss),
        )

        # The host concludes the rest, where it may look.
        if not looks:
            self.sender.agree(())
            return agreement
        sums, differs = packed.on_host()
        if "placed" in differs:  # even the sums of ranks that hold others have no common layout
            raise RuntimeError(packed.explain(differs, _disagreement))
        touched, idle = self._touched.agree(own, report.idle, sums, functools.partial(self._sum, device))
        return agreement._replace(
            idle=idle,
            touched=None if touched == own else touched,
            dropped=sums["dropped"][0] > 0,
            weight=sums["state"][State.WEIGHT],
            error=packed.explain(differs, _disagreement) or _different_marks(*sums["marked"], *sums["unmarked"]),
        )

    def _sum(self, device: torch.device, fields: Fields) -> dict[str, list[float]]:
        """Sum fields over ranks, for the host; collective."""
        packer = Packer(self.rank, self.size, device)
        packer.add(**fields)
        return packer.reduce(self._group.sum).on_host().sums

    def reduce(self, look: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """See `Ranks`; `look` inspects chunks while the next are being sent. Then module buffers are shared."""
        self.sender.send_rest(look)
        self._group.share()

    # ---- checkpoints

    def joined(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """See `Ranks`; collective."""
        self._group.sum(tensor, largest)
        return tensor


def _disagreement(found: dict[str, list[float]]) -> str | None:
    """Describe what ranks disagree about."""
    if differ := different_windows(found):
        return differ
    if len(set(found["placed"])) > 1:
        return (
            "parameters were unfrozen on some ranks only: by rank, "
            f"{listed([int(n) for n in found['placed']])} are accumulated"
        )
    if len(set(found["divisor"])) > 1:
        return (
            f"divisor must be that of the whole window, over all ranks; by rank it is {listed(found['divisor'])} "
            "(0.0: none)"
        )
    return different_limits(found["norms"], found["limit"])


def _different_marks(marked: float, unmarked: float) -> str | None:
    """Say that some ranks have marked their last micro-batch and others not."""
    if not (marked and unmarked):
        return None
    return (
        f"the last micro-batch was marked (last=True, acc.window) on {int(marked)} ranks, and not on "
        f"{int(unmarked)} others that ran micro-batches: mark it on all of them, or on none"
    )
