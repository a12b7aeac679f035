"""What tests of recipes share: the figure of docs/integrations.md that they are held to, and what differs from it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.doc_blocks import ROOT, run_page
from tests.support.models import relative_error

PAGE = ROOT / "docs" / "integrations.md"


def rows() -> list[list[str]]:
    """The cells of the page's table, a list per row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def figure(software: str) -> float:
    """The largest difference that the page gives for a software: `< 1e-6` in the cell before the last."""
    (cell,) = [row[-2] for row in rows() if row[0].strip("`") == software]
    found = re.search(r"< (\d+e-\d+)", cell)
    assert found, f"{PAGE.name}: {software} has no figure in {cell!r}"
    return float(found[1])


def check(software: str, found: float, stock: float | None = None) -> None:
    """Hold a difference to the page's figure; printed, to see how near it is: pytest -rP."""
    print(f"{software}: {found:.1e} from the truth" + ("" if stock is None else f", stock {stock:.1e}"))
    assert found < figure(software), f"{found:.1e}, and {PAGE.name} says < {figure(software):.0e}"


def recipe(name: str) -> dict[str, Any]:
    """What the code of a recipe's page defines."""
    return run_page(ROOT / "docs" / "recipes" / f"{name}.md")


def difference(start: nn.Module, ours: nn.Module, truth: nn.Module) -> float:
    """How far the parameters of two models are apart, relative to the way from `start` to the truth."""
    begin = list(start.parameters())
    ways = [[p.detach().double() - b.detach().double() for p, b in zip(m.parameters(), begin, strict=True)]
            for m in (ours, truth)]  # fmt: skip
    return relative_error(*ways)


def classifier() -> nn.Module:
    """A small model of five inputs and three classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of these sizes for `classifier`."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def together(window: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A window's micro-batches as one batch, in float64."""
    return torch.cat([x for x, _ in window]).double(), torch.cat([y for _, y in window])


def train_big(
    model: nn.Module,
    windows: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    optimizer_of: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    before_step: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """Train a copy in float64, one backward per window, in plain torch; returns the copy.

    Args:
        model: Stays as it is.
        windows: What `loss_of` gets, one per step.
        loss_of: The mean loss over a window.
        optimizer_of: Makes the optimizer.
        before_step: Called when `.grad` is there.
    """
    twin = copy.deepcopy(model).double()
    optimizer = optimizer_of(list(twin.parameters()))
    for window in windows:
        loss_of(twin, window).backward()
        before_step(twin)
        optimizer.step()
        optimizer.zero_grad()
    return twin
