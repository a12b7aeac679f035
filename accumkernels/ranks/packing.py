"""The one vector that ranks sum when a window ends: named fields go in, and named views of the sum come out.

Its size depends on its fields alone, not on the number of ranks. What must be alike on all ranks is compared by sums
that are exact: a float goes as the four 16-bit integers x that its bits are made of, and the sum of their squares. Over
N ranks `N sum x^2 - (sum x)^2` is the sum of `(x_i - x_j)^2` over all pairs of ranks: 0 if all are equal, and at least
N - 1 if one differs. fp64 holds both sums exactly, and rounds their difference by less than (N - 1) / 2 for up to
200,000 ranks, so that half of N - 1 tells the two apart. If all ranks have seen that anything differs, they ask in a
collective of its own which rank has which value.

Only this module packs and unpacks a rank's report, and compares what must be alike on all ranks.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.devices import move

_Value = Tensor | Sequence[float] | float | None  # None: 0.0, if this rank has none
_WIDTH = 5  # numbers for a value that is compared: four parts of its bits, and the sum of their squares
_LISTED = 16  # most ranks whose values a message lists one by one


class Packer:
    """Collects the fields of a vector, which lie in it in the order of their addition.

    All ranks add the same fields of the same sizes. Numbers go to the device in one copy.

    Args:
        rank: This rank's number.
        size: The number of ranks.
        device: Where the vector is summed.
        looks: Whether this rank's host reads the result.
    """

    def __init__(self, rank: int, size: int, device: torch.device, looks: bool = True) -> None:
        self._rank = rank
        self._size = size
        self._device = device
        self._numbers: list[float] = []
        self._tensors: list[tuple[int, Tensor]] = []  # with their offsets in the vector
        self._fields: dict[str, tuple[int, int]] = {}  # start and end
        self._alike: dict[str, Tensor | float] = {}  # what is compared, behind the fields
        self.add(looks=looks)

    def add(self, **fields: _Value) -> None:
        """Add fields that are summed over ranks."""
        for name, value in fields.items():
            start = len(self._numbers)
            if isinstance(value, Tensor):
                self._tensors.append((start, value.reshape(-1)))
                self._numbers += [0.0] * value.numel()
            elif isinstance(value, Sequence):
                self._numbers += value
            else:
                self._numbers.append(0.0 if value is None else float(value))
            self._fields[name] = start, len(self._numbers)

    def add_alike(self, **values: Tensor | float | None) -> None:
        """Add values of which ranks find out whether they are all equal, bit for bit; a tensor is fp64 0-d."""
        for name, value in values.items():
            number: Any = value.tolist() if isinstance(value, Tensor) and value.is_cpu else value  # no op
            self._alike[name] = 0.0 if number is None else number + 0.0  # 0.0 of -0.0

    def reduce(self, sum_: Callable[[Tensor], object]) -> Packed:
        """Sum the vector in place with the given function; collective."""
        tensors, numbers = self._tensors, self._numbers
        end = len(numbers)
        for value in self._alike.values():
            if isinstance(value, Tensor):
                bits = value.reshape(1).view(torch.int16).double()
                tensors.append((len(numbers), torch.cat([bits, bits.square().sum(0, keepdim=True)])))
                numbers += [0.0] * _WIDTH
            else:
                numbers += _compared(value)
        vector = move(torch.tensor(numbers, dtype=torch.float64, device="cpu"), self._device)
        for start, tensor in tensors:
            vector[start : start + tensor.numel()] = move(tensor, self._device)
        sum_(vector)
        return Packed(vector, self._fields, end, self._alike, self._rank, self._size, sum_)


@functools.lru_cache(maxsize=64)
def _compared(value: float) -> tuple[float, ...]:
    """Return the parts of a float's bits, and the sum of their squares."""
    parts = struct.unpack("=4h", struct.pack("=d", value))
    return (*parts, sum(part * part for part in parts))


class Found(NamedTuple):
    """What the host read of a vector.

    Attributes:
        sums: The fields.
        differs: Names of the values that are not the same on all ranks.
    """

    sums: dict[str, list[float]]
    differs: list[str]


class Packed:
    """The fields after they were summed, and whether what was compared is alike."""

    def __init__(
        self,
        vector: Tensor,
        fields: Mapping[str, tuple[int, int]],
        end: int,
        alike: Mapping[str, Tensor | float],
        rank: int,
        size: int,
        sum_: Callable[[Tensor], object],
    ) -> None:
        self._vector = vector
        self._fields = fields
        self._alike = alike
        self._rank = rank
        self._size = size
        self._sum = sum_
        sums = vector[end:].view(len(alike), _WIDTH)
        apart = size * sums[:, 4] - sums[:, :4].square().sum(1)
        self._differs = apart > (size - 1) / 2

    def __getitem__(self, name: str) -> Tensor:
        """Return a field's view."""
        start, end = self._fields[name]
        return self._vector[start:end]

    def differ(self, *names: str) -> Tensor:
        """Whether any of these values differs between ranks, 0-d bool; without names, any of all."""
        if not names:
            return self._differs.any()
        places = list(self._alike)
        return functools.reduce(torch.logical_or, [self._differs[places.index(name)] for name in names])

    def on_host(self) -> Found:
        """Return all fields as numbers, and what differs, in one read."""
        values = torch.cat([self._vector, self._differs.double()]).tolist()
        sums = {name: values[start:end] for name, (start, end) in self._fields.items()}
        differs = [name for name, differs in zip(self._alike, values[len(self._vector) :], strict=True) if differs]
        return Found(sums, differs)

    def explain(
        self,
        differs: Sequence[str],
        describe: Callable[[dict[str, list[float]]], str | None],
        **values: Tensor | float | None,
    ) -> str | None:
        """Say what ranks disagree about; None if `differs` is empty. Collective if it is not, and all ranks look.

        Args:
            differs: Names of values that differ and must not.
            describe: Makes the text of all ranks' values.
            **values: Further values that it needs of each rank.
        """
        if not differs:
            return None
        if self["looks"].item() == self._size:
            return describe(self._by_rank({**self._alike, **values}))
        mine = ", ".join(f"{name}={float(self._alike[name])}" for name in differs)
        return f"ranks differ in what must be the same on all of them at a window's end: rank {self._rank} has {mine}"

    def _by_rank(self, values: Mapping[str, Tensor | float | None]) -> dict[str, list[float]]:
        """Ask all ranks for these values; collective."""
        mine = [0.0 if value is None else float(value) for value in values.values()]
        table = torch.zeros(len(values), self._size, dtype=torch.float64, device="cpu")
        table[:, self._rank] = torch.tensor(mine, dtype=torch.float64, device="cpu")
        table = move(table, self._vector.device)
        self._sum(table)
        return dict(zip(values, table.tolist(), strict=True))


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


def different_windows(found: Mapping[str, Sequence[float]]) -> str | None:
    """Say that ranks do not end the same window, according to their `LocalStats`."""
    numbers, resumed = found["window"], found["resumed"]
    if len(set(numbers)) > 1:
        return (
            f"ranks are in different windows, by rank {listed([int(n) for n in numbers])}: load states on all ranks "
            "that were saved in the same window, and end each window on all ranks: by the optimizer's step, also where "
            "a rank leaves a micro-batch out, or dropped by all of them"
        )
    if len(set(resumed)) > 1:
        return (
            "some ranks have resumed this window inside and others have not, by rank "
            f"{listed([bool(r) for r in resumed])}: load on all ranks what was saved at the same moment; "
            "state_dict(reduced=True) makes one state for all"
        )
    return None


def different_limits(norms: Sequence[float], limits: Sequence[float], place: str = "rank") -> str | None:
    """Say that ranks do not clip alike, according to their `LocalStats`.

    Each norm is a collective if parameters are sharded or on several stages; otherwise replicas would diverge.
    """
    if len(set(norms)) == 1 and len(set(limits)) == 1:
        return None
    given = [
        "none" if n == 0 else f"{limit}" if n == 1 else f"a list of {int(n) - 1} for {limit} together"
        for n, limit in zip(norms, limits, strict=True)
    ]
    values = listed(given)
    return f"max_norm must be the same on all ranks; by {place} it is {values[1:-1] if values[0] == '[' else values}"
