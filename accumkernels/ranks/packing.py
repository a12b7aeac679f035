"""The one vector that ranks sum when a window ends: named fields go in, and named views of the sum come out.

Only this module packs and unpacks a rank's report, and compares what must be alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..buffers.devices import move

_Value = Tensor | Sequence[float] | float | None  # None: 0.0, if this rank has none


class Packer:
    """Collects the fields of a vector, which lie in it in the order of their addition.

    All ranks add the same fields of the same sizes. Numbers go to the device in one copy.

    Args:
        rank: This rank's row in fields with a row for each rank.
        size: Number of rows in such fields.
        device: Where the vector is summed.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._rank = rank
        self._size = size
        self._device = device
        self._numbers: list[float] = []
        self._tensors: list[tuple[int, Tensor]] = []  # with their offsets in the vector
        self._fields: dict[str, tuple[int, int, bool]] = {}  # start, end, whether there is a row for each rank

    def add(self, **fields: _Value) -> None:
        """Add fields that are summed over ranks."""
        self._add(fields, False)

    def add_by_rank(self, **fields: _Value) -> None:
        """Add fields in which each rank fills its own row."""
        self._add(fields, True)

    def _add(self, fields: dict[str, _Value], by_rank: bool) -> None:
        row, rows = (self._rank, self._size) if by_rank else (0, 1)
        for name, value in fields.items():
            start = len(self._numbers)
            if isinstance(value, Tensor):
                numbers = [0.0] * value.numel()
                self._tensors.append((start + row * len(numbers), value.reshape(-1)))
            else:
                numbers = list(value) if isinstance(value, Sequence) else [0.0 if value is None else float(value)]
            nothing = [0.0] * len(numbers)
            self._numbers += nothing * row + numbers + nothing * (rows - row - 1)
            self._fields[name] = start, len(self._numbers), by_rank

    def reduce(self, sum_: Callable[[Tensor], object]) -> Packed:
        """Sum the vector in place with the given function; collective."""
        vector = move(torch.tensor(self._numbers, dtype=torch.float64, device="cpu"), self._device)
        for start, tensor in self._tensors:
            vector[start : start + tensor.numel()] = move(tensor, self._device)
        sum_(vector)
        return Packed(vector, self._fields, self._size)


class Packed:
    """The fields after they were summed."""

    def __init__(self, vector: Tensor, fields: dict[str, tuple[int, int, bool]], size: int) -> None:
        self._vector = vector
        self._fields = fields
        self._size = size

    def __getitem__(self, name: str) -> Tensor:
        """Return a field's view: `[width]`, or `[ranks, width]` if there is a row for each rank."""
        start, end, by_rank = self._fields[name]
        field = self._vector[start:end]
        return field.view(self._size, -1) if by_rank else field

    def differ(self, *names: str) -> Tensor:
        """Whether any of these fields differs between ranks; 0-d bool."""
        return torch.cat([self[name] != self[name][:1] for name in names]).any()

    def on_host(self) -> dict[str, list[float]]:
        """Return all fields as numbers, in one read; for fields by rank, the first column."""
        values = self._vector.tolist()
        found = {}
        for name, (start, end, by_rank) in self._fields.items():
            found[name] = values[start : end : (end - start) // self._size if by_rank else 1]
        return found


def different_windows(numbers: Sequence[float]) -> str | None:
    """Say that ranks, whose windows have these numbers, do not end the same window."""
    if len(set(numbers)) == 1:
        return None
    return (
        f"ranks are in different windows, by rank {[int(n) for n in numbers]}: load states on all ranks that were "
        "saved in the same window, and end each window on all ranks"
    )


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
    return f"max_norm must be the same on all ranks; by {place} it is {', '.join(given)}"
