"""What fits a card that you do not have: a step of GPT-2 by kind of memory, predicted with fake tensors.

    python -m benchmarks.fits [--csv FILE]
    python -m benchmarks.fits --device cuda --csv FILE   # measured, by the allocator of a GPU that has the memory
    python -m benchmarks.pictures FILE

README's picture: a batch of 64 texts at once, half of it, and the 64 as 8 micro-batches of 8 with FusedAccumulator,
without and with `cpu_offload`.
Nothing is allocated or computed, and no GPU is needed: `ak.memory_report(fake=True)` says what it sees, and what not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import accumkernels as ak
from accumkernels.demo.gpt import GPT

from .harness.arguments import command_line
from .harness.machine import environment
from .harness.results import Row, write_csv
from .harness.tables import Table, track
from .methods.training import SIZES, Size

PARTS = ("parameters", "gradients", "accumulators", "optimizer", "activations", "workspace")  # of a MemoryReport
LENGTH = 256  # tokens of a text
LIMIT = 12 * 10**9  # bytes of the card in the picture


class Way(NamedTuple):
    """How a step sees its batch.

    Attributes:
        name: In the picture.
        micro_batch: Texts of a forward.
        accumulate: Micro-batches to a step of FusedAccumulator; None for a step of stock torch.
        cpu_offload: Of FusedAccumulator.
    """

    name: str
    micro_batch: int
    accumulate: int | None = None
    cpu_offload: bool = False


WAYS = (
    Way("64 at once", 64),
    Way("32 at once", 32),
    Way("64 as 8 x 8, accumkernels", 8, 8),
    Way("accumkernels, cpu_offload", 8, 8, cpu_offload=True),
)


class Logits(GPT):
    """The GPT up to its logits, so that inputs and targets come apart."""

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Without the loss."""
        return self.logits(inputs)


def report(way: Way, size: Size, length: int = LENGTH, measured: bool = False) -> ak.MemoryReport:
    """Of a step under bf16 autocast with fused AdamW, as on a CUDA device, or `measured` on one."""
    with torch.device("cuda" if measured else "meta"):
        model = Logits(size.vocabulary, size.width, size.depth, size.heads, length)
    return ak.memory_report(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        lambda n: tuple(torch.randint(size.vocabulary, (n, length)) for _ in range(2)),
        way.micro_batch,
        loss_fn=lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
        amp_dtype=torch.bfloat16,
        accumulate=way.accumulate,
        cpu_offload=way.cpu_offload,
        device="cuda",
        fake=not measured,
    )


def rows(model: str, length: int = LENGTH, device: str = "cpu") -> list[Row]:
    """One for each way, in GB of 10**9 bytes: predicted, or measured on a GPU."""
    size = SIZES[model]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Logits(*size[:4], length).parameters())
    measured = device == "cuda"
    said = environment(torch.device(device))
    about = {key: said[key] for key in (*(["device"] if measured else []), "torch", "commit", "date")}
    found = []
    for way in track(WAYS, "measuring" if measured else "predicting"):
        parts = report(way, size, length, measured)
        row: Row = {"model": model, "parameters": parameters, "tokens_per_text": length, "dtype": "bf16"}
        row |= {"way": way.name, "origin": "measured" if measured else "predicted", "limit_GB": LIMIT / 1e9}
        row |= {f"{part}_GB": round(getattr(parts, part) / 1e9, 3) for part in PARTS}
        row |= {"total_GB": round(parts.total / 1e9, 3)} | about
        found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="gpt2", choices=SIZES)
    arguments = parser.parse_args(argv)
    found = rows(arguments.model, device=arguments.device)
    table = Table(f"GB at the peak of a step; limit {LIMIT / 1e9:g} GB", ("way", "", *PARTS, "total"))
    for row in found:
        table.add(
            str(row["way"]), str(row["origin"]).upper(), *(f"{row[f'{part}_GB']:.2f}" for part in (*PARTS, "total"))
        )
    table.print()
    write_csv(arguments.csv, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
