"""Pipeline parallel training on sequences of unequal lengths: stages on two ranks, held to one process.

    torchrun --nproc-per-node 2 examples/pipeline.py

Each rank has two stages of the demo's GPT, and an interleaved 1F1B schedule runs them on four chunks of a micro-batch
at a time. Every step of the schedule is one micro-batch of a window, and losses are sums over tokens, which the window
divides by their number. All stages are clipped by one norm, follow one loss scale, and step or skip together. At the
end rank 0 trains the same windows alone and compares: the results are the same up to rounding.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy, pad

import accumkernels as ak
from accumkernels.demo.gpt import CONTEXT, HEADS, IGNORE, TRAINING_FILES, VOCABULARY, WIDTH, Batch, Block, read_samples

STAGES = 4  # two on each of two ranks: rank r has stages r and r + 2
CHUNKS = 4  # of a micro-batch, which the schedule runs one after another
MICRO_BATCH_SIZE = 8
MICRO_BATCHES = 3  # of a window


class Stage(nn.Module):
    """One block of a GPT; the first embeds bytes, the last scores them.

    Args:
        index: Which of the stages.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.block = Block(WIDTH, HEADS)
        self.head = nn.Linear(WIDTH, VOCABULARY) if index == STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[samples, CONTEXT]` bytes, or features, to features, or logits `[samples, CONTEXT, VOCABULARY]`."""
        x = self.block(x if self.embedding is None else self.embedding(x))
        return x if self.head is None else self.head(x)


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Over all tokens. Chunks have different numbers of them, so a mean over chunks would not be one over tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def window(samples: Sequence[bytes], number: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of a window's micro-batches, padded to one length, as a schedule needs them."""
    pairs = []
    for i in range(MICRO_BATCHES):
        first = (number * MICRO_BATCHES + i) * MICRO_BATCH_SIZE % (len(samples) - MICRO_BATCH_SIZE)
        batch = Batch.collate(samples[first : first + MICRO_BATCH_SIZE], device)
        missing = (0, CONTEXT - batch.inputs.shape[1])
        pairs.append((pad(batch.inputs, missing), pad(batch.targets, missing, value=IGNORE)))
    return pairs


def train_in_stages(windows: int, device: torch.device) -> list[Tensor]:
    """Train this rank's stages; the parameters of all, from first to last, on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    samples, scaler = read_samples(TRAINING_FILES), torch.amp.GradScaler(device.type, init_scale=2.0**8)
    places = range(rank, STAGES, size)
    modules = nn.ModuleList(Stage(index) for index in places).to(device)
    stages = [PipelineStage(m, index, STAGES, device) for m, index in zip(modules, places, strict=True)]
    schedule = ScheduleInterleaved1F1B(
        stages,
        n_microbatches=CHUNKS,
        loss_fn=lambda logits, targets: scaler.scale(sum_of_losses(logits, targets)),
        scale_grads=False,  # True where losses are means
    )
    # After the stages, and over the ranks of all of them.
    acc = ak.FusedAccumulator(modules, scaler=scaler, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, momentum=0.9)

    for number in range(windows):
        tokens = 0
        for inputs, targets in window(samples, number, device):
            if rank == 0:
                schedule.step(inputs)
            elif rank == size - 1:
                schedule.step(target=targets)
            else:
                schedule.step()
            acc.accumulate()  # after every step of the schedule, on every rank
            tokens += int((targets != IGNORE).sum())
        acc.step(optimizer, max_norm=1.0, divisor=tokens)

    everyones: list[list[list[Tensor]]] = [[] for _ in range(size)]
    dist.all_gather_object(everyones, [[p.detach().cpu() for p in m.parameters()] for m in modules])
    return [p for index in range(STAGES) for p in everyones[index % size][index // size]]


def train_alone(windows: int, device: torch.device) -> list[Tensor]:
    """Train the whole model on the same data in one process."""
    samples = read_samples(TRAINING_FILES)
    model = nn.Sequential(*(Stage(index) for index in range(STAGES))).to(device)
    acc = ak.FusedAccumulator(model, process_group=False)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, momentum=0.9)
    for number in range(windows):
        tokens = 0
        for inputs, targets in window(samples, number, device):
            acc.backward(sum_of_losses(model(inputs), targets))
            tokens += int((targets != IGNORE).sum())
        acc.step(optimizer, max_norm=1.0, divisor=tokens)
    return [p.detach().cpu() for p in model.parameters()]


def main(argv: list[str] | None = None) -> int:
    """Train on all ranks, then on rank 0 alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=5, help="optimizer steps (default: 5)")
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=5))
    start = [p.detach() for index in range(STAGES) for p in Stage(index).parameters()]
    ours = train_in_stages(arguments.windows, device)
    if dist.get_rank() == 0:
        alone = train_alone(arguments.windows, device)
        moved = max((a - b).abs().max().item() for a, b in zip(start, ours, strict=True))
        apart = max((a - b).abs().max().item() for a, b in zip(alone, ours, strict=True))
        print(
            f"{STAGES} stages on {dist.get_world_size()} ranks and one process differ by {apart:.2g} at most; "
            f"training moved parameters by {moved:.2g}"
        )
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
