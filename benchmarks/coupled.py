"""What a loss that couples samples needs in memory: the whole batch at once, or chunk by chunk.

    python -m benchmarks.coupled [--device cpu|cuda] [--csv FILE]

Two towers and an InfoNCE loss are trained with the whole batch, with `backward_coupled`, and with plain accumulation,
which has the memory of one chunk and another loss. Tensors are counted op by op, once per storage, in the second
window, when the optimizer's state exists. "activations" are all that is alive beside parameters, optimizer state, sums,
gradients and the batch itself: activations, encodings, similarities, and what the backward of the loss makes of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import accumkernels as ak

from .harness.arguments import command_line, usable
from .harness.live_storages import LiveStorages
from .harness.machine import environment
from .harness.results import Row, write_csv
from .harness.tables import Table, track

Pair = tuple[Tensor, Tensor]
WIDTH, DEPTH, ENCODING = 768, 8, 96
WHOLE, PLAIN, COUPLED = "whole batch", "plain accumulation", "backward_coupled"
COLUMNS = (
    *("method", "pairs", "chunk", "parameters", "device", "dtype", "activations_peak_MB", "activations_to_whole"),
    *("peak_MB", "threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


class Towers(nn.Module):
    """Two deep towers and the temperature of their similarities."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(
                *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())),
                nn.Linear(width, ENCODING),
            )
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def encode(self, pair: Pair) -> Pair:
        """Both `[n, width]` to `[n, ENCODING]`, of length 1."""
        return normalize(self.first(pair[0]), dim=1), normalize(self.second(pair[1]), dim=1)

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """InfoNCE in both directions."""
        similarities = self.log_scale.exp() * first @ second.T
        own = torch.arange(len(similarities), device=first.device)
        return (cross_entropy(similarities, own) + cross_entropy(similarities.T, own)) / 2


def _whole(acc: ak.FusedAccumulator, towers: Towers, chunks: list[Pair], batch: Pair) -> None:
    acc.backward(towers.loss(*towers.encode(batch)))


def _plain(acc: ak.FusedAccumulator, towers: Towers, chunks: list[Pair], batch: Pair) -> None:
    for chunk in chunks:
        acc.backward(towers.loss(*towers.encode(chunk)))


def _coupled(acc: ak.FusedAccumulator, towers: Towers, chunks: list[Pair], batch: Pair) -> None:
    acc.backward_coupled(chunks, towers.encode, towers.loss)


METHODS: dict[str, Callable[[ak.FusedAccumulator, Towers, list[Pair], Pair], None]] = {
    WHOLE: _whole,
    PLAIN: _plain,
    COUPLED: _coupled,
}


class Peaks(LiveStorages):
    """The most bytes that were alive after any op, and those beside what is held and gradients.

    Args:
        held: Lists tensors that live on between windows.
        gradients: Bytes that gradients have; no activation must have as many.
    """

    def __init__(self, held: Callable[[], Iterable[Tensor]], gradients: set[int]) -> None:
        super().__init__()
        self.activations = 0
        self._held = held
        self._gradients = gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        held = {tensor.untyped_storage()._cdata for tensor in self._held()}
        rest = (n for key, n in self.nbytes.items() if key not in held and n not in self._gradients)
        self.activations = max(self.activations, sum(rest))
        return result


def peaks(method: str, pairs: int, chunk: int, device: torch.device, towers: Towers) -> tuple[int, int]:
    """Bytes of one window at their peak: activations, and everything."""
    gc.collect()
    generator = torch.Generator(device).manual_seed(1)
    width = towers.first[0].in_features
    batch = tuple(torch.randn(pairs, width, device=device, generator=generator) for _ in range(2))
    acc = ak.FusedAccumulator(towers)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=1e-4, fused=True)

    def held() -> list[Tensor]:
        state = torch.utils._pytree.tree_leaves(list(optimizer.state.values()))
        return [*batch, *towers.parameters(), *acc.flat_buffers, *(leaf for leaf in state if isinstance(leaf, Tensor))]

    def window() -> None:
        METHODS[method](acc, towers, list(zip(*(part.split(chunk) for part in batch), strict=True)), batch)  # type: ignore[arg-type]
        acc.step(optimizer, max_norm=1.0)

    with acc:
        window()
        live = Peaks(held, {p.nbytes for p in towers.parameters()})
        live.add(held())
        with live:
            window()
    return live.activations, live.peak


def measure(pairs: int, chunks: Sequence[int], device: torch.device, about: Row) -> list[Row]:
    """A row for the whole batch, and one for each method and size of chunks."""
    cases = [(WHOLE, pairs), *((method, chunk) for chunk in chunks for method in (PLAIN, COUPLED))]
    rows: list[Row] = []
    for method, chunk in track(cases, f"{pairs} pairs"):
        torch.manual_seed(0)
        towers = Towers().to(device)
        activations, peak = peaks(method, pairs, chunk, device, towers)
        row: Row = {"method": method, "pairs": pairs, "chunk": chunk, "dtype": "fp32", **about}
        row["parameters"] = sum(p.numel() for p in towers.parameters())
        row["activations_peak_MB"] = float(f"{activations / 1e6:.5g}")
        row["peak_MB"] = float(f"{peak / 1e6:.5g}")
        rows.append(row)
    for row in rows:
        row["activations_to_whole"] = float(f"{row['activations_peak_MB'] / rows[0]['activations_peak_MB']:.3g}")  # type: ignore[operator]
    return [{column: row[column] for column in COLUMNS} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=512, help="of the batch")
    parser.add_argument("--chunks", default="32,128", help="sizes of chunks, comma-separated")
    arguments = parser.parse_args(argv)
    device = usable(arguments.device, arguments.threads)
    chunks = [int(size) for size in arguments.chunks.split(",")]
    rows = measure(arguments.pairs, chunks, device, environment(device))
    write_csv(arguments.csv, rows)
    first = rows[0]
    title = f"InfoNCE, {first['pairs']} pairs, {first['parameters']:,} parameters, fp32; MB"
    table = Table(
        f"{title}; torch {first['torch']}, {first['device']}",
        ("method", "pairs of a chunk", "activations, peak", "to the whole batch", "all, peak"),
    )
    for row in rows:
        names = ("chunk", "activations_peak_MB", "activations_to_whole", "peak_MB")
        table.add(str(row["method"]), *(f"{row[name]:,}" for name in names))
    table.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
