"""A batch of texts of very unequal length: fixed micro-batches, Composer's rule, and `backward_batch`.

    python -m benchmarks.whole_batch [--csv FILE]

The texts are paragraphs from the sources of Python's standard library, and every method trains on the same windows of
them. The device is simulated: a micro-batch with more padded elements than CAPACITY raises torch.OutOfMemoryError when
its forward has run, as a real one would. "fixed" is the largest micro-batch that fits if all of it is of the longest
length. "halved" is Composer's rule for `device_train_microbatch_size="auto"`: one size for the whole run that begins
with the whole window; an error halves it, and the window is run again from its start. "by hand" runs the micro-batches
of "budget" in a plain loop of `acc.backward`: the difference is what the call itself takes. Windows of the methods take
turns; the first WARM_UP of each are not counted, which is where "auto" and "halved" learn.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import accumkernels as ak
from accumkernels.demo.gpt import GPT, PADDING_STEP, TRAINING_FILES, Batch, read_samples

from .harness.arguments import command_line, usable
from .harness.live_storages import LiveStorages
from .harness.machine import environment
from .harness.results import Row, write_csv
from .harness.tables import Table, track

LONGEST = 512  # bytes of a text
WINDOW = 64  # texts
CAPACITY = 4 * LONGEST  # padded elements that fit
WARM_UP = 3  # windows
WIDTH, DEPTH = 128, 4
COLUMNS = (
    *("method", "window", "longest", "capacity", "parameters", "device", "dtype", "samples_per_second"),
    *("to_fixed", "to_fixed_low", "to_fixed_high", "micro_batches", "padded_to_real", "tries_out_of_memory", "peak_MB"),
    *("threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


def padded_length(text: bytes) -> float:
    """Elements of a row, as `Batch.collate` pads it."""
    return math.ceil(len(text) / PADDING_STEP) * PADDING_STEP


class Device:
    """Pads texts, and runs the model where memory is small.

    Attributes:
        micro_batches: Forwards that fitted.
        padded: Their elements.
        failed: Forwards that did not.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.micro_batches = self.padded = self.failed = 0

    def collate(self, texts: Sequence[bytes]) -> Batch:
        """Pad to the longest."""
        return Batch.collate(texts, torch.device("cpu"))

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """Mean loss and its weight.

        Raises:
            torch.OutOfMemoryError: The micro-batch is too large.
        """
        loss = self.model(batch.inputs, batch.targets)
        if batch.inputs.numel() > CAPACITY:
            self.failed += 1
            raise torch.OutOfMemoryError(f"{batch.inputs.numel()} padded elements, {CAPACITY} fit")
        self.micro_batches += 1
        self.padded += batch.inputs.numel()
        return loss, batch.tokens


class Method:
    """One way to run a window, with a model, an accumulator and an optimizer of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(width=WIDTH, depth=DEPTH, context=LONGEST)
        self.device = Device(self.model)
        self.acc = ak.FusedAccumulator(self.model)
        self.optimizer = torch.optim.AdamW(self.acc.parameters(), lr=1e-3, fused=True)

    def prepare(self, texts: list[bytes]) -> None:
        """Do what is not timed."""

    def window(self, texts: list[bytes]) -> None:
        """Accumulate a window and step."""
        self.accumulate(texts)
        self.acc.step(self.optimizer, max_norm=1.0)

    def accumulate(self, texts: list[bytes]) -> None:
        """Accumulate a window."""
        raise NotImplementedError

    def in_parts(self, parts: Sequence[Sequence[bytes]]) -> None:
        """Accumulate these micro-batches."""
        for part in parts:
            loss, tokens = self.device.loss(self.device.collate(part))
            self.acc.backward(loss, weight=tokens)


class Fixed(Method):
    """Micro-batches for the longest text there may be."""

    def accumulate(self, texts: list[bytes]) -> None:
        """In the order in which they come."""
        size = CAPACITY // LONGEST
        self.in_parts([texts[start : start + size] for start in range(0, len(texts), size)])


class Halved(Method):
    """Composer's rule."""

    size = WINDOW

    def accumulate(self, texts: list[bytes]) -> None:
        """Again from the start, until all micro-batches have fitted."""
        while True:
            try:
                self.in_parts([texts[start : start + self.size] for start in range(0, len(texts), self.size)])
                return
            except torch.OutOfMemoryError:
                self.acc.zero_()
                self.size //= 2


class Auto(Method):
    """What has shown to fit."""

    options: dict[str, Any] = {}

    def accumulate(self, texts: list[bytes]) -> None:
        """In one call."""
        self.acc.backward_batch(texts, self.device.loss, collate=self.device.collate, **self.options)


class Budget(Auto):
    """The capacity is known, and what a text takes of it."""

    options = {"budget": CAPACITY, "cost": padded_length}


class ByHand(Method):
    """The micro-batches of `Budget` in a loop."""

    def prepare(self, texts: list[bytes]) -> None:
        """Pack as `Budget` does, by a call with a model that takes no time."""
        self.parts: list[list[bytes]] = []
        small = torch.nn.Linear(1, 1)

        def collate(part: list[bytes]) -> Tensor:
            self.parts.append(part)
            return torch.ones(1)

        with ak.FusedAccumulator(small) as acc:
            acc.backward_batch(texts, lambda one: (small(one).sum(), 1), collate=collate, **Budget.options)

    def accumulate(self, texts: list[bytes]) -> None:
        """In the same order."""
        self.in_parts(self.parts)


METHODS: dict[str, Callable[[], Method]] = {
    "fixed": Fixed,
    "halved": Halved,
    "auto": Auto,
    "budget": Budget,
    "by hand": ByHand,
}


def windows_of(count: int) -> list[list[bytes]]:
    """Texts in a random order, cut into windows."""
    texts = read_samples(TRAINING_FILES, longest=LONGEST)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    return [[texts[order[(w * WINDOW + i) % len(order)]] for i in range(WINDOW)] for w in range(count)]


def peak(method: Method, texts: list[bytes]) -> int:
    """The most bytes alive in a window."""
    live = LiveStorages()
    live.add([*method.model.parameters(), *method.acc.flat_buffers])
    method.prepare(texts)
    with live:
        method.window(texts)
    return live.peak


def measure(count: int, about: Row) -> list[Row]:
    """A row for each method; windows take turns."""
    windows = windows_of(WARM_UP + count)
    methods = {name: make() for name, make in METHODS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for texts in track(windows, f"{len(windows)} windows"):
        for name, method in methods.items():
            method.prepare(texts)
            start = time.perf_counter()
            method.window(texts)
            seconds[name].append(time.perf_counter() - start)
    real = sum(len(text) for texts in windows for text in texts)
    rows: list[Row] = []
    for name, method in methods.items():
        counted = seconds[name][WARM_UP:]
        ratios = sorted(f / s for f, s in zip(seconds["fixed"][WARM_UP:], counted, strict=True))
        quarter = len(ratios) // 4
        device = method.device
        row: Row = {
            **about,
            "method": name,
            "window": WINDOW,
            "longest": LONGEST,
            "capacity": CAPACITY,
            "parameters": sum(p.numel() for p in method.model.parameters()),
            "dtype": "fp32",
            "samples_per_second": float(f"{WINDOW * len(counted) / sum(counted):.4g}"),
            "to_fixed": float(f"{statistics.median(ratios):.3g}"),
            "to_fixed_low": float(f"{ratios[quarter]:.3g}"),
            "to_fixed_high": float(f"{ratios[-1 - quarter]:.3g}"),
            "micro_batches": float(f"{device.micro_batches / len(windows):.3g}"),
            "padded_to_real": float(f"{device.padded / real:.3g}"),
            "tries_out_of_memory": device.failed,
        }
        row["peak_MB"] = float(f"{peak(method, windows[-1]) / 1e6:.4g}")
        rows.append({column: row[column] for column in COLUMNS})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--windows", type=int, default=16, help="that are counted")
    arguments = parser.parse_args(argv)
    device = usable(arguments.device, arguments.threads)
    if device.type != "cpu":
        parser.error("--device: memory is simulated, on the CPU only")
    rows = measure(arguments.windows, environment(device))
    write_csv(arguments.csv, rows)
    first = rows[0]
    table = Table(
        f"{WINDOW} texts of up to {LONGEST} bytes, {CAPACITY} padded elements fit, {first['parameters']:,} parameters; "
        f"torch {first['torch']}, {first['device']}",
        ("method", "samples/s", "to fixed", "quartiles", "micro-batches", "padded to real", "tries", "peak, MB"),
    )
    for row in rows:
        quartiles = f"{row['to_fixed_low']} to {row['to_fixed_high']}"
        names = ("micro_batches", "padded_to_real", "tries_out_of_memory", "peak_MB")
        table.add(row["method"], row["samples_per_second"], row["to_fixed"], quartiles, *(row[n] for n in names))
    table.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
