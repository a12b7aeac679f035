"""Frozen parameters of every kind that trained models have beside trainable ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def _zeros(dtype: torch.dtype) -> Tensor:
    return torch.zeros(3, 5).to(dtype)


KINDS: dict[str, Callable[[], Tensor]] = {
    "uint8": lambda: torch.randint(255, (3, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
    **{
        str(d).removeprefix("torch."): lambda d=d: _zeros(d) for d in (torch.int8, torch.int32, torch.int64, torch.bool)
    },
    "fp8": lambda: _zeros(torch.float8_e4m3fn),
    "complex": lambda: _zeros(torch.complex64),
    "bfloat16": lambda: _zeros(torch.bfloat16),
    "meta": lambda: torch.zeros(3, 5, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
}
CAN_BE_UNFROZEN = ("fp8", "complex", "meta", "sparse")  # and cannot be accumulated
NOT_SENT = ("meta", "sparse")  # between ranks


class Adapted(nn.Module):
    """A frozen base, registered first, and a trainable adapter. A base of uint8 is a quantised weight, as in QLoRA."""

    def __init__(self, kind: str = "uint8") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Parameter(KINDS[kind](), requires_grad=False)
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, 5]` to `[n, 3]`."""
        y = self.b(self.a(x))
        return y + nn.functional.linear(x, self.base.to(x.dtype) / 255 - 0.5) if self.base.dtype == torch.uint8 else y


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What stock loops give their optimizers."""
    return [p for p in model.parameters() if p.requires_grad]
