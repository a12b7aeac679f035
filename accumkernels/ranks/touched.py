"""Which segments any rank has touched: three numbers while that is as in the last window, else a count per parameter.

If every rank has touched what it touched in the last window, or one of them all that any had touched then and none of
them more, the union is the last one's. Otherwise ranks send counts: in a collective of their own if they did not expect
it, and from then on with everything else, until the union stays the same. So a window has one collective, except the
first one after a change.

Counts also tell which segments every rank could give back, because their parameters are frozen. Where none are sent,
the same is touched as before, so hardly anything was frozen since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .sender import ChunkSender

_IDLE = 2.0**-32  # what a segment that a rank could give back adds to its count: exact in fp64, and never a whole one

Fields = dict[str, Sequence[float] | float]


class Touched:
    """The agreement of data parallel ranks about which segments hold sums.

    Args:
        parameters: How many parameters the accumulator has, frozen ones too: counts have the same size on every rank,
            whatever is frozen where.
        sender: Knows when gradients came, of which rank 0 tells the others.
        rank: This rank's number.
        size: The number of ranks.
    """

    def __init__(self, parameters: int, sender: ChunkSender, rank: int, size: int) -> None:
        self._parameters = parameters
        self._sender = sender
        self._rank = rank
        self._size = size
        self.follow()

    def follow(self) -> None:
        """Begin with a layout of which nothing is known."""
        self._counts = True  # whether the next vector has counts
        self._own = b""  # touched by this rank in the last window
        self._any = b""  # touched by any rank in the last window

    def knows(self, own: bytes) -> bool:
        """Whether this rank knows the union without asking: it has touched everything, as before."""
        return not self._counts and own == self._any and 0 not in own

    def fields(self, own: bytes, idle: bytes = b"") -> Fields:
        """Return the fields of the next vector.

        Args:
            own: For each segment, in the order of buffers, 1 if this rank has touched it.
            idle: The same, 1 if this rank could give it back; empty for none.
        """
        if self._counts:
            return self._counted(own, idle)
        whole = own == self._any
        beyond = not whole and (len(own) != len(self._any) or bool(_bits(own) & ~_bits(self._any)))
        return {"whole": whole, "beyond": beyond, "changed": own != self._own}

    def agree(
        self,
        own: bytes,
        idle: bytes,
        found: Mapping[str, Sequence[float]],
        sum_: Callable[[Fields], Mapping[str, Sequence[float]]],
    ) -> tuple[bytes, bytes]:
        """Conclude what any rank has touched from the fields' sums; collective if they do not tell.

        Args:
            own: As in `fields`.
            idle: As in `fields`.
            found: The sums.
            sum_: Sums fields over ranks; collective.

        Returns:
            What any rank has touched, as `own`, and what all ranks could give back, as `idle`.
        """
        settled = not self._counts and not found["beyond"][0] and (found["whole"][0] or not found["changed"][0])
        if settled:
            self._sender.agree(())
            self._own = own
            return self._any, b""
        if not self._counts:
            found = sum_(self._counted(own, idle))
        count = len(own)
        touched = bytes(number >= 1 for number in found["touched"][:count])
        idle = bytes(number == self._size * _IDLE for number in found["touched"][:count])
        self._sender.agree(found["came"][:count])
        self._counts = self._sender.learning or touched != self._any
        self._own, self._any = own, touched
        return touched, idle

    def _counted(self, own: bytes, idle: bytes) -> Fields:
        frozen = [0.0] * (self._parameters - len(own))
        touched = [t + i * _IDLE for t, i in zip(own, idle or bytes(len(own)), strict=True)]
        came = self._sender.came() if self._rank == 0 else [0.0] * len(own)
        return {"touched": [*touched, *frozen], "came": [*came, *frozen]}


def _bits(touched: bytes) -> int:
    return int.from_bytes(touched, "little")
