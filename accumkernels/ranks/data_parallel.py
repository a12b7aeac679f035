"""Data parallel windows: one small collective for all scalars, and the flat buffers in chunks.

A window's communication does not depend on the number of its micro-batches. At its end every rank

* puts its sum of weights, flags and touched segments in one fp64 vector, which is summed
  (`all_reduce_stats`): all ranks then divide by the same number, and all step or all skip;
* sums the flat buffers, chunk by chunk, several in flight, so that inspecting one chunk (norm, overflow, division)
  overlaps with the communication of the next (`reduce`).

Every rank issues the same collectives of the same sizes, whatever its window was like: it reduces whole buffers, with
zeros for untouched segments. With `release="backward"` the chunks come first, since the last micro-batch may send them
during its backward, over a group of the library's own (a user's collective may come in between). Otherwise the vector
comes first, so that the divisor is there when the chunks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..ops.schema import State
from .base import GlobalStats, LocalStats, Ranks
from .group import Group
from .packing import Packer, different_limits, different_windows
from .sender import ChunkSender


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
        self._group = group
        self._parameters = parameters
        self._placed = 0  # number of segments at the last agreement

    def __str__(self) -> str:
        return str(self._group)

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """See `Ranks`."""
        self.sender.follow(buffers)

    def share_from(self, shared: Callable[[], list[Tensor]]) -> None:
        """See `Ranks`."""
        self._group.share_from(shared)

    # ---- at the end of a window

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine all ranks' reports; collective.

        The host reads the result if that needs no wait for a device (on the CPU), or if it must: a segment untouched
        here may be touched on other ranks, or the layout grew.

        Raises:
            RuntimeError: parameters were unfrozen on some ranks only.
        """
        self.sender.send_before_stats()

        # Sum one vector, which has the same length on every rank, whatever is frozen where.
        device = report.state.device
        placed = len(report.touched)
        frozen = [0.0] * (self._parameters - placed)
        came = self.sender.came() if self.rank == 0 else [0.0] * placed
        packer = Packer(self.rank, self.size, device)
        packer.add(
            state=report.state,
            squares=None if report.squares is None else report.squares[0],
            loss=report.loss_sums,
            dropped=report.dropped,
            measuring=report.squares is not None,
            marked=self.sender.marked,
            unmarked=not self.sender.marked and report.micro_batches > 0 and not report.dropped,
            touched=[*report.touched, *frozen],
            came=[*came, *frozen],
        )
        packer.add_by_rank(
            placed=placed, window=report.window, norms=report.norms, divisor=report.divisor, limit=report.limit
        )
        packed = packer.reduce(self._group.sum)

        # Without the host, the device concludes that a window dropped by any rank is empty, and that different windows,
        # norms, divisors or limits count as overflow.
        differs = packed.differ("window", "norms", "divisor", "limit")
        state, loss = packed["state"], packed["loss"]
        flags = state[State.FOUND_INF :: State.POISONED - State.FOUND_INF]  # these two
        flags.copy_((flags > 0) | differs)
        dropped, measuring = packed["dropped"], packed["measuring"]
        agreement = GlobalStats(
            state=torch.where(dropped > 0, 0.0, state),
            divisor=None if report.divisor is None else packed["divisor"][0, 0],
            squares=None
            if report.squares is None
            else torch.where(measuring[0] == self.size, packed["squares"][0], torch.nan),
            loss=torch.where(dropped > 0, 0.0, loss),
        )

        # The host concludes the rest, where it may look.
        grown, self._placed = placed != self._placed, placed
        learning = self.sender.learns()
        if device.type != "cpu" and all(report.touched) and not grown and not learning and report.divisor is None:
            return agreement
        found = packed.on_host()
        if len(set(found["placed"])) > 1:
            raise RuntimeError(
                "parameters were unfrozen on some ranks only: by rank, "
                f"{[int(n) for n in found['placed']]} are accumulated"
            )
        self.sender.agree(found["came"][:placed])
        return agreement._replace(
            touched=[count > 0 for count in found["touched"][:placed]],
            dropped=found["dropped"][0] > 0,
            weight=found["state"][State.WEIGHT],
            error=_disagreement(found),
        )

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
    if differ := different_windows(found["window"]):
        return differ
    if len(set(found["divisor"])) > 1:
        return f"divisor must be that of the whole window, over all ranks; by rank it is {found['divisor']} (0.0: none)"
    (marked,), (unmarked,) = found["marked"], found["unmarked"]
    if marked and unmarked:
        return (
            f"the last micro-batch was marked (last=True, acc.window) on {int(marked)} ranks, and not on "
            f"{int(unmarked)} others that ran micro-batches: mark it on all of them, or on none"
        )
    return different_limits(found["norms"], found["limit"])
