"""A one-file GPT with DistributedDataParallel, torch.compile, clipping and a cosine schedule, stock and swapped.

python examples/loops/gpt.py        # or make example-loops/gpt
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from compare import compare
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOWS, STEPS, BATCH, LENGTH, VOCABULARY = 8, 4, 4, 32, 64


class GPT(nn.Module):
    """Two causal blocks; a forward returns the mean loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Both are int64 `[samples, length]`."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]], mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def loader() -> Iterator[tuple[Tensor, Tensor]]:
    """Arithmetic sequences modulo the vocabulary, with a stride for each sample."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        starts = torch.randint(VOCABULARY, (STEPS, BATCH, 1), generator=generator)
        strides = torch.randint(1, 8, (STEPS, BATCH, 1), generator=generator)
        tokens = ((starts + strides * torch.arange(LENGTH + 1)) % VOCABULARY).to(DEVICE)
        yield from ((rows[:, :-1], rows[:, 1:]) for rows in tokens)


def compiled(ddp: nn.Module) -> nn.Module:
    """Inductor on a GPU; on a CPU a backend that needs no C++ compiler."""
    return torch.compile(ddp, backend="inductor" if DEVICE == "cuda" else "aot_eager")


def groups(model: nn.Module) -> list[dict]:
    """Weight decay for matrices only."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def stock() -> Iterator[float]:
    """The usual loop."""
    ddp = DistributedDataParallel(GPT().to(DEVICE))
    model = compiled(ddp)
    optimizer = torch.optim.AdamW(groups(ddp), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, WINDOWS)
    total = 0.0
    for index, (x, y) in enumerate(loader(), 1):
        with ddp.no_sync() if index % STEPS else contextlib.nullcontext():
            loss = model(x, y) / STEPS
            loss.backward()
        total += loss.item()
        if index % STEPS == 0:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield total
            total = 0.0


def swapped() -> Iterator[float]:
    """The accumulator keeps DistributedDataParallel silent, and reduces once per window."""
    ddp = DistributedDataParallel(GPT().to(DEVICE))
    model = compiled(ddp)
    acc = ak.FusedAccumulator(ddp)
    optimizer = torch.optim.AdamW(groups(ddp), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, WINDOWS)
    for window in acc.windows(loader(), STEPS):
        total = 0.0
        for x, y in window:
            loss = model(x, y)
            acc.backward(loss)
            total += loss.item() / STEPS
        acc.step(optimizer, max_norm=1.0)
        scheduler.step()
        yield total


def main() -> int:
    """Train both as the only rank of a group, or as one of those that torchrun starts."""
    if dist.is_torchelastic_launched():
        dist.init_process_group()
        if DEVICE == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        status = compare(stock, swapped)
    else:
        with tempfile.NamedTemporaryFile() as file:
            dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
            status = compare(stock, swapped)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
