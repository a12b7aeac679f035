"""What ranks agree on when a window ends: a table of fields with rules, and the one driver of all such tables.

The driver packs a rank's values into one vector, sums it over ranks, and concludes: on the device, without the host,
whether anything differs that must not; on the host, where it looks, in which words all ranks raise that.

The vector's size depends on its fields alone, not on the number of ranks. What must be alike on all ranks is compared
by sums that are exact: a float goes as the four 16-bit integers x that its bits are made of, and the sum of their
squares. Over N ranks `N sum x^2 - (sum x)^2` is the sum of `(x_i - x_j)^2` over all pairs of ranks: 0 if all are equal,
and at least N - 1 if one differs. fp64 holds both sums exactly, and rounds their difference by less than (N - 1) / 2
for up to 200,000 ranks, so that half of N - 1 tells the two apart. If all ranks have seen that anything differs, they
ask in a collective of its own which rank has which value.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.parameters import move
from ..ops.schema import State
from .group import Group

_WIDTH = 5  # numbers for a value that is compared: four parts of its bits, and the sum of their squares
_LISTED = 16  # most ranks whose values a message lists one by one
_FLAGS = slice(State.FOUND_INF, None, State.POISONED - State.FOUND_INF)  # these two

# ---- The rules of fields. A table lists fields by name. What must be alike lies behind all others in the vector. The
# first field of the table that is wrong is the error.

ByRank = Mapping[str, Sequence[float]]  # all ranks' values of what must be alike

SUM = "sum"  # numbers that are added up
ANY = "any"  # a flag: whether any rank has set it
DIFFERS = "differs"  # a number that may differ, bit for bit: whether it does


class Alike(NamedTuple):
    """The rule of a value that must be the same on all ranks, bit for bit.

    Attributes:
        text: The error, with `{}` for the values by rank.
        shown: Converts a value for the text; or makes all of it, from all ranks' values.
        if_counted: Whether it may differ in a window that comes to nothing.
        if_any: A field of the rule ANY, without which it may differ; empty for none.
        nearly: Whether it may differ by rounding: sums that ranks have made in other orders.
    """

    text: str
    shown: type | Callable[[ByRank], str] = float
    if_counted: bool = False
    if_any: str = ""
    nearly: bool = False


class Never(NamedTuple):
    """The rule of a flag that no rank may set.

    Attributes:
        text: The error.
    """

    text: str


Table = Mapping[str, str | Alike | Never]


# ---- The driver


class Agreement:
    """What ranks have agreed on by one sum of all their values; making it is collective.

    Args:
        table: The same on all ranks.
        values: For each field a tensor, a list, a number, a bool or None, which is 0.0, with the same length on all
            ranks. What must be alike is a number, fp64 0-d or None. There may be values of no field.
        group: The ranks.
        device: Where the vector is summed.
        host_reads: Whether this rank's host reads the result.
    """

    def __init__(
        self, table: Table, values: Mapping[str, Any], group: Group, device: torch.device, host_reads: bool = True
    ) -> None:
        self._table = table
        self._group = group
        plain: dict[str, Any] = {"host_reads": host_reads}
        self._compared: dict[str, Tensor | float] = {}
        self._shown: dict[str, Any] = {}  # what an error needs besides
        for name, rule in table.items():
            if rule == DIFFERS:
                self._compared[name] = _number(values[name])
            elif not isinstance(rule, Alike):
                plain[name] = values[name]
            elif rule.nearly:
                self._shown[name] = values[name]
                self._compared |= {f"{name} {i}": _number(cell) for i, cell in enumerate(_cells(values[name]))}
            else:
                self._compared[name] = _number(values[name])
        numbers: list[float] = []
        tensors: list[tuple[int, Tensor]] = []  # with their offsets in the vector
        self._slices: dict[str, slice] = {}
        for name, value in [*plain.items(), *((name, _parts(value)) for name, value in self._compared.items())]:
            start = len(numbers)
            if isinstance(value, Tensor):
                tensors.append((start, value.reshape(-1)))
                numbers += [0.0] * value.numel()
            elif isinstance(value, Sequence):
                numbers += value
            else:
                numbers.append(0.0 if value is None else float(value))
            self._slices[name] = slice(start, len(numbers))
        self._vector = move(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device)  # in one copy
        for start, tensor in tensors:
            self._vector[start : start + tensor.numel()] = move(tensor, device)
        group.sum(self._vector)
        sums = self._vector[len(numbers) - _WIDTH * len(self._compared) :].view(-1, _WIDTH)
        spread = group.size * sums[:, 4] - sums[:, :4].square().sum(1)
        self._differs = spread > (group.size - 1) / 2

    def __getitem__(self, name: str) -> Tensor:
        """Return the sum's view, or 0-d bool for a flag and for what may differ."""
        if self._table[name] == DIFFERS:
            return self._differs[list(self._compared).index(name)]
        view = self._vector[self._slices[name]]
        return view if self._table[name] == SUM else view[0] > 0

    def _wrong(self, differs: Iterable[Any], flag: Callable[[str], Any], counts: Any) -> dict[str, Any]:
        """Map fields to whether they differ, or are set, and must not; all are bools, or all are on the device.

        Args:
            differs: Whether each compared value does.
            flag: Returns a field of the rule ANY.
            counts: Whether the window comes to anything.
        """
        rows, found = iter(differs), {}
        for name, rule in self._table.items():
            if rule == DIFFERS:
                next(rows)
            elif isinstance(rule, Alike):
                found[name] = next(rows) & next(rows) if rule.nearly else next(rows)
                if rule.if_any:
                    found[name] = found[name] & flag(rule.if_any)
                if rule.if_counted:
                    found[name] = found[name] & counts
            elif isinstance(rule, Never):
                found[name] = flag(name)
        return found

    # ---- what the device concludes

    def is_wrong(self, nothing: Tensor | None = None) -> Tensor:
        """Whether anything is wrong, 0-d bool; `nothing`: whether the window comes to nothing."""
        counts = True if nothing is None else ~nothing
        return torch.stack(list(self._wrong(self._differs.unbind(), self.__getitem__, counts).values())).any()

    def flagged(self, state: Tensor, wrong: Tensor) -> Tensor:
        """Return a state with the flags of all ranks' (`state`), which are set if anything is `wrong`: an overflow."""
        state = state.clone()
        state[_FLAGS] = ((self["state"][_FLAGS] > 0) | wrong).double()
        return state

    # ---- what the host concludes, where it looks

    @functools.cached_property
    def _read(self) -> list[float]:
        return torch.cat([self._vector, self._differs.double()]).tolist()

    @functools.cached_property
    def sums(self) -> dict[str, list[float]]:
        """All fields as numbers; flags are counts of ranks, and what is compared comes in its parts."""
        return {name: self._read[cells] for name, cells in self._slices.items()}

    def wrong(self, nothing: bool = False) -> list[str]:
        """List what is wrong, in the table's order; `nothing`: as in `differ`."""
        differs = map(bool, self._read[self._vector.numel() :])
        found = self._wrong(differs, lambda name: self.sums[name][0] > 0, not nothing)
        return [name for name, is_different in found.items() if is_different]

    def error(self, nothing: bool = False) -> str | None:
        """Say what ranks disagree about; None if it is nothing. Collective if it is something and all ranks look."""
        wrong = self.wrong(nothing)
        if not wrong:
            return None
        rule: Any = self._table[wrong[0]]
        if isinstance(rule, Never):
            return rule.text
        values = {name: 0.0 if v is None else float(v) for name, v in {**self._compared, **self._shown}.items()}
        if self.sums["host_reads"][0] < self._group.size:
            mine = ", ".join(f"{name}={values[name]}" for name in wrong if name in values)
            return (
                "ranks differ in what must be the same on all of them at a window's end: "
                f"rank {self._group.rank} has {mine}"
            )
        found = self._by_rank(values)
        shown = listed(list(map(rule.shown, found[wrong[0]]))) if isinstance(rule.shown, type) else rule.shown(found)
        return str(rule.text.format(shown))

    def _by_rank(self, values: Mapping[str, float]) -> ByRank:
        """Ask all ranks for these values; collective."""
        table = torch.zeros(len(values), self._group.size, dtype=torch.float64, device="cpu")
        table[:, self._group.rank] = torch.tensor(list(values.values()), dtype=torch.float64, device="cpu")
        table = move(table, self._vector.device)
        self._group.sum(table)
        return dict(zip(values, table.tolist(), strict=True))


def _number(value: Tensor | float | None) -> Tensor | float:
    number: Any = value.tolist() if isinstance(value, Tensor) and value.is_cpu else value  # no op
    return 0.0 if number is None else number + 0.0  # 0.0 of -0.0


def _parts(value: Tensor | float) -> Tensor | tuple[float, ...]:
    """Return the parts of a float's bits, and the sum of their squares."""
    if isinstance(value, Tensor):
        bits = value.reshape(1).view(torch.int16).double()
        return torch.cat([bits, bits.square().sum(0, keepdim=True)])
    return _parts_of_number(value)


@functools.lru_cache(maxsize=64)
def _parts_of_number(value: float) -> tuple[float, ...]:
    parts = struct.unpack("=4h", struct.pack("=d", value))
    return (*parts, sum(part * part for part in parts))


def _cells(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a value lies in two grids of 2**40 cells per power of two, shifted by half a cell.

    Values that differ by rounding share a cell of at least one grid.
    """
    bits = value.view(torch.int64)
    return (bits >> 12).double(), ((bits + 2**11) >> 12).double()


# ---- Values by rank, and the errors that all kinds of ranks share


def listed(values: Sequence[object]) -> str:
    """Write down the values of all ranks; of many ranks, the most frequent values and where they are."""
    if len(values) <= _LISTED:
        return f"[{', '.join(map(str, values))}]"
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    found = sorted(ranks.items(), key=lambda item: -len(item[1]))
    parts = [f"{value} on {_named(having)}" for value, having in found[:_LISTED]]
    return ", ".join(parts) + (f" and {len(found) - _LISTED} more values" if len(found) > _LISTED else "")


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks (the first is {ranks[0]})"


SAME_WINDOW: Table = {
    "window": Alike(
        "ranks are in different windows, by rank {}: load states on all ranks that were saved in the same window, and "
        "end each window on all ranks: by the optimizer's step, also where a rank leaves a micro-batch out, or dropped "
        "by all of them (AK30)",
        int,
    ),
    "resumed": ANY,
    "loaded": Alike(
        "some ranks have resumed this window inside and others have not, by rank {}: load on all ranks what was saved "
        "at the same moment; state_dict(reduced=True) makes one state for all (AK31)",
        lambda found: listed([kind == max(found["loaded"]) for kind in found["loaded"]]),
        if_any="resumed",
    ),
}


def _limits(found: ByRank) -> str:
    given = [
        "none" if n == 0 else f"{limit}" if n == 1 else f"a list of {int(n) - 1} for {limit} together"
        for n, limit in zip(found["norms"], found["limit"], strict=True)
    ]
    values = listed(given)
    return values[1:-1] if values[0] == "[" else values


# Whatever is clipped, since each norm may be a collective; and then for stages of a pipeline.
SAME_CLIPPING, SAME_CLIPPING_OF_STAGES = (
    {
        name: Alike(f"max_norm must be the same on all ranks; by {rank} it is {{}}", _limits)
        for name in ("norms", "limit")
    }
    for rank in ("rank", "stage rank")
)
