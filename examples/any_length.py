"""Text of very unequal length on a device that is too small for it: stock runs out of memory or pads, ours trains.

    python examples/any_length.py --out any_length.png

The samples are paragraphs from the sources of Python's standard library, 8 to 1,024 bytes long, and a window has 64 of
them. The device is simulated: `LiveBytes` raises torch.OutOfMemoryError when more
bytes of tensors are alive than it has. The same GPT is trained four times: with the micro-batch size that fits the
usual lengths, which dies at the first long ones; with the size that fits the longest sample there is; by
`FusedAccumulator.backward_batch`, which splits each window so that it fits; and with the whole window at once on a
device without a limit, as the truth. Losses of all runs are the same but for rounding, as far as they get.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import accumkernels as ak
from accumkernels.demo.gpt import GPT, TRAINING_FILES, Batch, read_samples
from accumkernels.splitting.memory import LiveBytes, format_bytes

LONGEST = 1024  # bytes of a sample
WINDOW = 64  # samples
MIB = 2**20


def read_texts() -> list[bytes]:
    """Paragraphs of the standard library, in a random order."""
    texts = read_samples(TRAINING_FILES, longest=LONGEST)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    return [texts[index] for index in order.tolist()]


class Collate:
    """Pads samples to the longest of them, and counts.

    Attributes:
        micro_batches: How many it made.
        padded: Their elements, padding included.
    """

    def __init__(self) -> None:
        self.micro_batches = self.padded = 0

    def __call__(self, samples: Sequence[bytes]) -> Batch:
        """Make a micro-batch."""
        batch = Batch.collate(samples, torch.device("cpu"))
        self.micro_batches += 1
        self.padded += batch.inputs.numel()
        return batch


class Run(NamedTuple):
    """What training came to.

    Attributes:
        model: As far as it was trained.
        losses: Mean loss of each window, in nats per byte.
        made: What its micro-batches came to, those included that ran out of memory.
        end: What ended it; None if all windows were trained.
        report: What was said in the end.
    """

    model: GPT
    losses: list[float]
    made: Collate
    end: str | None
    report: str


Step = Callable[[ak.FusedAccumulator, GPT, list[bytes], Collate], None]


def fixed(size: int) -> Step:
    """Micro-batches of `size` samples in the order in which they come, as in any loop."""

    def step(acc: ak.FusedAccumulator, model: GPT, samples: list[bytes], collate: Collate) -> None:
        for start in range(0, len(samples), size):
            batch = collate(samples[start : start + size])
            acc.backward(model(batch.inputs, batch.targets), weight=batch.tokens)

    return step


def whole_batch(acc: ak.FusedAccumulator, model: GPT, samples: list[bytes], collate: Collate) -> None:
    """One call: as many micro-batches as it takes, each padded to its own longest."""
    acc.backward_batch(samples, lambda b: (model(b.inputs, b.targets), b.tokens), collate=collate)


def train(step: Step, windows: Sequence[list[bytes]], limit: int | None) -> Run:
    """Train a new GPT on a device of `limit` bytes until memory runs out."""
    torch.manual_seed(0)
    model = GPT(width=64, depth=2, context=LONGEST)
    acc = ak.FusedAccumulator(model, memory_limit=limit)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=2e-3, fused=True)
    live, losses, end = LiveBytes(limit), [], None
    live.add([*model.parameters(), *acc.flat_buffers])
    made = Collate()
    try:
        with live:
            for samples in windows:
                step(acc, model, samples, made)
                acc.step(optimizer, max_norm=1.0)
                losses.append(float(acc.metrics()["loss"]))
    except torch.OutOfMemoryError as error:
        end = str(error)
    run = Run(model, losses, made, end, repr(acc))
    acc.remove()
    return run


def draw(path: Path, runs: dict[str, Run], lengths: list[int]) -> None:
    """Write the picture, a PNG of 900 x 380 pixels: the samples' lengths, and losses over windows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    left.hist(lengths, bins=32, color="#0072B2")
    left.set_xlabel("bytes of a sample")
    left.set_ylabel("samples")
    styles = ("#999999", 5.0, "-"), ("#D55E00", 1.8, "-"), ("#009E73", 1.8, (0, (1, 1))), ("#0072B2", 1.8, (0, (3, 2)))
    for (name, run), (colour, width, line) in zip(runs.items(), styles, strict=True):
        right.plot(run.losses, color=colour, linewidth=width, linestyle=line, label=name)
        if run.end is not None:
            last = len(run.losses) - 1
            right.plot(
                [max(last, 0)], [run.losses[-1] if run.losses else math.log(256)], "x", color=colour, ms=10, mew=3
            )
    right.set_xlabel("window (optimizer step)")
    right.set_ylabel("loss, nats per byte")
    right.set_title("x: out of memory")
    right.legend()
    right.grid(alpha=0.3)
    figure.savefig(path, format="png")


def flat(model: GPT) -> Tensor:
    """Concatenate all parameters."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main(argv: list[str] | None = None) -> int:
    """Train four times, print a table and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--limit", type=int, default=48, help="MiB of the simulated device (default: 48)")
    parser.add_argument("--usual", type=int, default=16, help="samples that usually fit at once (default: 16)")
    parser.add_argument("--longest", type=int, default=2, help="of the longest samples (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("any_length.png"), help="default: any_length.png")
    arguments = parser.parse_args(argv)
    texts = read_texts()[: arguments.windows * WINDOW]
    windows = [texts[start : start + WINDOW] for start in range(0, len(texts), WINDOW)]
    limit = arguments.limit * MIB
    runs = {
        "whole window, no limit": train(fixed(WINDOW), windows, None),
        f"micro-batches of {arguments.usual}": train(fixed(arguments.usual), windows, limit),
        f"micro-batches of {arguments.longest}": train(fixed(arguments.longest), windows, limit),
        "backward_batch": train(whole_batch, windows, limit),
    }
    truth = runs["whole window, no limit"]
    torch.manual_seed(0)
    start = flat(GPT(width=64, depth=2, context=LONGEST))
    way = (flat(truth.model) - start).norm()
    print(f"a device of {format_bytes(limit)}; samples of {min(map(len, texts))} to {max(map(len, texts))} bytes")
    print(f"{'':<24} windows   micro-batches   padding   parameters, from those of the whole window")
    for name, run in runs.items():
        tokens = sum(map(len, texts[: len(run.losses) * WINDOW]))
        padding = f"{run.made.padded / tokens - 1:.0%}" if tokens else "-"
        distance = f"{(flat(run.model) - flat(truth.model)).norm() / way:.1e} of the way it went"
        end = distance if run.end is None else f"died: {run.end}"
        print(f"{name:<24} {len(run.losses):4d}/{len(windows)} {run.made.micro_batches:15d} {padding:>9}   {end}")
    print(runs["backward_batch"].report)
    draw(arguments.out, runs, list(map(len, texts)))
    print(f"{arguments.out} written")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is small: threads would wait for each other
    raise SystemExit(main())
