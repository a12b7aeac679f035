"""Which segments any rank has touched: three numbers while that is as in the last window, else a count per parameter.

If every rank has touched what it touched in the last window, or one of them all that any had touched then and none of
them more, the union is the last one's. Otherwise ranks send counts: in a collective of their own if they did not expect
it, and from then on with everything else, until the union stays the same. So a window has one collective, except the
first one after a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .sender import ChunkSender

Fields = dict[str, Sequence[float] | float]


class Touched:
    """The agreement of data parallel ranks about which segments hold sums.

    Args:
        parameters: How many parameters the accumulator has, frozen ones too: counts have the same size on every rank,
            whatever is frozen where.
        sender: Knows when gradients came, of which rank 0 tells the others.
        tells: Whether this is rank 0.
    """

    def __init__(self, parameters: int, sender: ChunkSender, tells: bool) -> None:
        self._parameters = parameters
        self._sender = sender
        self._tells = tells
        self._counts = True  # whether the next vector has counts
        self._own = b""  # touched by this rank in the last window
        self._any = b""  # touched by any rank in the last window

    def knows(self, own: bytes) -> bool:
        """Whether this rank knows the union without asking: it has touched everything, as before."""
        return not self._counts and own == self._any and 0 not in own

    def fields(self, own: bytes) -> Fields:
        """Return the fields of the next vector.

        Args:
            own: For each segment, in the order of buffers, 1 if this rank has touched it.
        """
        if self._counts:
            return self._counted(own)
        whole = own == self._any
        beyond = not whole and (len(own) != len(self._any) or bool(_bits(own) & ~_bits(self._any)))
        return {"whole": whole, "beyond": beyond, "changed": own != self._own}

    def agree(
        self, own: bytes, found: Mapping[str, Sequence[float]], sum_: Callable[[Fields], Mapping[str, Sequence[float]]]
    ) -> bytes:
        """Conclude what any rank has touched from the fields' sums; collective if they do not tell.

        Args:
            own: As in `fields`.
            found: The sums.
            sum_: Sums fields over ranks; collective.

        Returns:
            What any rank has touched, as `own`.
        """
        settled = not self._counts and not found["beyond"][0] and (found["whole"][0] or not found["changed"][0])
        if settled:
            self._sender.agree(())
            self._own = own
            return self._any
        if not self._counts:
            found = sum_(self._counted(own))
        count = len(own)
        touched = bytes(number > 0 for number in found["touched"][:count])
        self._sender.agree(found["came"][:count])
        self._counts = self._sender.learning or touched != self._any
        self._own, self._any = own, touched
        return touched

    def _counted(self, own: bytes) -> Fields:
        frozen = [0.0] * (self._parameters - len(own))
        came = self._sender.came() if self._tells else [0.0] * len(own)
        return {"touched": [*own, *frozen], "came": [*came, *frozen]}


def _bits(touched: bytes) -> int:
    return int.from_bytes(touched, "little")
