"""From "out of memory" to the batch size of the paper: fit, plan, train, and compare with the big batch.

    python examples/fit_plan_train.py

A small GPT learns Python's standard library with 64 samples per optimizer step, on a device with too little memory for
them. A limit on the bytes of tensors stands in for the device, so that this runs anywhere. For a real GPU, leave out
`memory_limit`.
"""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

import torch
from torch import nn

import accumkernels as ak
from accumkernels.demo.gpt import GPT, IGNORE, TRAINING_FILES, Batch, read_samples
from accumkernels.splitting.memory import LiveBytes, format_bytes

DEVICE = torch.device("cpu")
LEARNING_RATE = 1e-3


def collate(samples: list[bytes]) -> dict[str, Any]:
    """Return the keyword arguments of the model."""
    batch = Batch.collate(samples, DEVICE)
    return {"inputs": batch.inputs, "targets": batch.targets}


def train_big(model: nn.Module, windows: list[list[bytes]]) -> list[float]:
    """Train with each window as one batch, as one would if memory sufficed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for samples in windows:
        loss = model(**collate(samples))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_accumulated(model: nn.Module, windows: list[list[bytes]], plan: ak.AccumulationPlan) -> list[float]:
    """Train with the same windows in micro-batches, weighted by the number of bytes their mean loss is taken over."""
    accumulator = ak.FusedAccumulator(model)
    optimizer = torch.optim.AdamW(accumulator.parameters(), lr=LEARNING_RATE)
    losses = []
    for samples in windows:
        total = tokens = 0.0
        for piece in plan.split(collate(samples)):
            weight = int((piece["targets"] != IGNORE).sum())
            loss = model(**piece)
            accumulator.backward(loss, weight=weight)
            total, tokens = total + float(loss.detach()) * weight, tokens + weight
        accumulator.step(optimizer)
        losses.append(total / tokens)
    return losses


def main(argv: list[str] | None = None) -> int:
    """Run all four steps; return 0 if both trainings agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-mib", type=int, default=64, help="memory of the simulated device (default: 64)")
    parser.add_argument("--target", type=int, default=64, help="samples per optimizer step (default: 64)")
    parser.add_argument("--windows", type=int, default=10, help="optimizer steps (default: 10)")
    arguments = parser.parse_args(argv)
    limit, target = arguments.limit_mib * 2**20, arguments.target

    torch.manual_seed(0)
    model = GPT().to(DEVICE)
    samples = read_samples(TRAINING_FILES)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    windows = [[samples[i] for i in order[n * target : (n + 1) * target]] for n in range(arguments.windows)]
    longest = sorted(samples, key=len, reverse=True)

    def make_batch(n: int) -> dict[str, Any]:
        return collate(longest[:n])  # the largest possible batch: no other one needs more memory

    print(f"1. The batch of {target} does not fit in {format_bytes(limit)}, predicted without allocating any of it:\n")
    report = ak.memory_report(model, torch.optim.AdamW(model.parameters()), make_batch, target, fake=True)
    print(f"{report}\n")
    try:
        with LiveBytes(limit) as live:
            live.add(model.parameters())
            train_big(copy.deepcopy(model), windows[:1])
        print("... but this one does: choose a smaller --limit-mib to see the journey.\n")
    except torch.OutOfMemoryError as error:
        print(f"and tried: {error}\n")

    print("2. Fit: the largest micro-batch, with the accumulator's buffers and 5 % to spare.\n")
    size = ak.find_batch_size(
        model,
        DEVICE,
        dataset_size=target,
        make_batch=make_batch,
        optimizer_fn=torch.optim.AdamW,
        mode="binsearch",
        num_iterations=2,
        accumulate=2,
        memory_limit=limit,
        margin=0.05,
    )
    print(f"{size!r}, peak {format_bytes(size.peak_bytes)}; the fastest of those tried is {size.fastest}\n")

    plan = ak.plan(target, size)
    print(f"3. Plan.\n\n{plan}\n")

    print(f"4. Train {len(windows)} windows under the limit, and as big batches without one.\n")
    twin = copy.deepcopy(model)
    with LiveBytes(limit) as live:
        live.add(model.parameters())
        accumulated = train_accumulated(model, windows, plan)
    big = train_big(twin, windows)
    print("window   big batch   accumulated")
    for index, (a, b) in enumerate(zip(big, accumulated, strict=True), 1):
        print(f"{index:>6}   {a:9.6f}   {b:11.6f}")
    difference = max(abs(a - b) for a, b in zip(big, accumulated, strict=True))
    agree = math.isfinite(difference) and difference < 1e-3
    print(f"\nlargest difference {difference:.1e}: {'the same' if agree else 'NOT the same'} but for rounding")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
