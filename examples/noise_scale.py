"""How large a batch is worth it: draw the critical batch size while the demo's GPT learns.

    python examples/noise_scale.py --out noise_scale.png

`FusedAccumulator(noise_scale=...)` measures the norms of the micro-batches' gradients and of their sum in the pass
that adds them. The noise scale follows from these norms. Up to it, a batch k times as large takes nearly k times fewer
steps; far beyond it, a larger batch only costs more (McCandlish et al. 2018, arXiv:1812.06162). It is small at the
beginning, where all samples pull the same way, so training may start with a smaller batch than it ends with.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

import accumkernels as ak
from accumkernels.demo.gpt import CONTEXT, GPT, TRAINING_FILES, Batch, read_samples

MICRO_BATCH_SIZE = 4
HALF_LIFE = 10  # windows; a measurement this old counts half


def measure(windows: int, accumulation_steps: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Train, and return the mean loss (nats per byte) and the noise scale (samples) after each window.

    All samples have the same length, so each counts the same and is one unit of the noise scale.
    """
    torch.manual_seed(seed)
    model = GPT()
    accumulator = ak.FusedAccumulator(model, noise_scale=HALF_LIFE)
    optimizer = torch.optim.AdamW(accumulator.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    samples = [sample for sample in read_samples(TRAINING_FILES) if len(sample) == CONTEXT]
    plan = ak.plan(MICRO_BATCH_SIZE * accumulation_steps, MICRO_BATCH_SIZE)
    generator = torch.Generator().manual_seed(seed)

    def loader():
        while True:
            order = torch.randperm(len(samples), generator=generator).tolist()
            for start in range(0, len(order) - MICRO_BATCH_SIZE + 1, MICRO_BATCH_SIZE):
                chosen = [samples[index] for index in order[start : start + MICRO_BATCH_SIZE]]
                yield Batch.collate(chosen, torch.device("cpu"))

    losses: list[float] = []
    scales: list[float] = []
    for _, window in zip(range(windows), plan.windows(loader()), strict=False):
        total = 0.0
        for batch in window:
            loss = model(batch.inputs, batch.targets)
            accumulator.backward(loss, weight=MICRO_BATCH_SIZE)
            total += float(loss.detach())
        accumulator.step(optimizer, max_norm=1.0)
        losses.append(total / len(window))
        scales.append(float(accumulator.noise_scale()))
    return losses, scales


def draw(path: Path, losses: list[float], scales: list[float], batch_size: int) -> None:
    """Write the picture as a PNG of 1080 x 600 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    positive = [scale if scale > 0 else math.nan for scale in scales]
    axes.semilogy(steps, positive, color="#0072B2", linewidth=2, label="critical batch size, as measured")
    axes.axhline(batch_size, color="#999999", linestyle="--", label=f"batch size trained with: {batch_size}")
    axes.set_xlabel("window (optimizer step)")
    axes.set_ylabel("samples")
    axes.set_title("The batch size that is worth it, over training")
    axes.grid(alpha=0.3, which="both")
    other = axes.twinx()
    other.plot(steps, losses, color="#D55E00", alpha=0.7, label="training loss (right)")
    other.set_ylabel("loss (nats per byte)")
    lines = [*axes.get_lines(), *other.get_lines()]
    figure.legend(lines, [str(line.get_label()) for line in lines], loc="outside lower center", ncols=3)
    figure.savefig(path, format="png")


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=150, help="optimizer steps (default: 150)")
    parser.add_argument("--accumulation-steps", type=int, default=8, help="micro-batches per window (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("noise_scale.png"), help="default: noise_scale.png")
    arguments = parser.parse_args(argv)
    losses, scales = measure(arguments.windows, arguments.accumulation_steps)
    print("window    loss   critical batch size (samples)")
    shown = sorted({round(index * (len(losses) - 1) / 10) for index in range(11)})
    for index in shown:
        print(f"{index + 1:>6}  {losses[index]:6.3f}   {scales[index]:.4g}")
    draw(arguments.out, losses, scales, MICRO_BATCH_SIZE * arguments.accumulation_steps)
    print(f"{arguments.out} written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
