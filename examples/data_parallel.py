"""Data parallel training on sequences of unequal lengths: every token counts the same, whichever rank it is on.

    torchrun --nproc-per-node 2 examples/data_parallel.py

Each rank trains the demo's GPT in DistributedDataParallel on its own samples. A FusedAccumulator turns off
communication in micro-batches and reduces once per window. At the end rank 0 trains the same windows alone and
compares: the results are the same up to rounding. (DistributedDataParallel itself takes the mean over ranks of means
over tokens, in which a token counts more on a rank with few tokens.)
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.demo.gpt import GPT, TRAINING_FILES, Batch, read_samples

MICRO_BATCH_SIZE = 4
MICRO_BATCHES = 3  # per rank and window


def micro_batch(samples: Sequence[bytes], index: int, device: torch.device) -> Batch:
    """Return the samples of micro-batch `index`, which counts over windows, ranks and micro-batches."""
    first = index * MICRO_BATCH_SIZE % (len(samples) - MICRO_BATCH_SIZE)
    return Batch.collate(samples[first : first + MICRO_BATCH_SIZE], device)


def train(
    model: torch.nn.Module, ranks: range, size: int, windows: int, device: torch.device, process_group: object = None
) -> list[torch.Tensor]:
    """Train on the data of the given ranks and return the final parameters."""
    samples = read_samples(TRAINING_FILES)
    accumulator = ak.FusedAccumulator(model, process_group=process_group, release="backward")
    optimizer = torch.optim.SGD(accumulator.parameters(), lr=0.1, momentum=0.9)
    loader = (
        micro_batch(samples, (window * size + rank) * MICRO_BATCHES + step, device)
        for window in range(windows)
        for rank in ranks
        for step in range(MICRO_BATCHES)
    )
    for window in accumulator.windows(loader, len(ranks) * MICRO_BATCHES):
        for batch in window:
            loss = model(batch.inputs, batch.targets)  # the mean over tokens
            accumulator.backward(loss, weight=batch.tokens)
        accumulator.step(optimizer, max_norm=1.0)
    values = [p.detach().clone() for p in accumulator.parameters()]
    accumulator.remove()
    return values


def main(argv: list[str] | None = None) -> int:
    """Train on all ranks, then on rank 0 alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=5, help="optimizer steps (default: 5)")
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=5))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(rank)  # DistributedDataParallel gives all ranks the parameters of rank 0
    model = DistributedDataParallel(GPT().to(device))
    start = [p.detach().clone() for p in model.parameters()]
    ours = train(model, range(rank, rank + 1), size, arguments.windows, device)
    if rank == 0:
        with torch.no_grad():
            for param, value in zip(model.parameters(), start, strict=True):
                param.copy_(value)
        alone = train(model.module, range(size), size, arguments.windows, device, process_group=False)
        moved = max((a - b).abs().max().item() for a, b in zip(start, ours, strict=True))
        apart = max((a - b).abs().max().item() for a, b in zip(alone, ours, strict=True))
        print(f"{size} ranks and one process differ by {apart:.2g} at most; training moved parameters by {moved:.2g}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
