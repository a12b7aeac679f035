"""What all trainers on ranks train, and what `torchrun` sets for them.

A micro-batch is an item of the data, so that sizes differ. Item `i` belongs to rank `i % size`, as accelerate shards.
"""

from __future__ import annotations

import logging
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import batch, mlp

STEPS = 4
LR = 0.5
MAX_NORM = 0.2  # clips in every window
MAX_VALUE = 0.05  # clips a part of every window's gradient
KINDS = [("fp32", None), ("fp32", MAX_NORM), ("bf16", None), ("fp16", None), ("fp16", MAX_NORM)]


def item(i):
    """Micro-batch `i`, of 1 to 7 samples."""
    return batch(1 + (3 * i + i // 2) % 7, seed=100 + i)


class Heads(nn.Module):
    """mlp with two heads more, of which a micro-batch of an odd size uses one, and none the other."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.odd, self.never = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        out = self.net(x)
        return self.odd(out) if len(x) % 2 else out


def items(size, rank=None, uneven=True):
    """Numbers of the micro-batches of a rank; of windows of all ranks without one.

    Two windows; the second is short, and `uneven` gives the last rank one micro-batch less.
    """
    n = (STEPS + 2) * size - uneven
    if rank is not None:
        return list(range(rank, n, size))
    return [list(range(STEPS * size)), list(range(STEPS * size, n))]


class Items(torch.utils.data.Dataset):
    """Micro-batches; a loader that takes one at a time and no collation gives them as they are.

    Args:
        numbers: Of the micro-batches, in their order.
        keys: Names of the inputs and the targets, if they are to be a dict.
        bad: Numbers of those whose targets, and so their losses, are infinite.
        make: Makes of a number a micro-batch.
    """

    def __init__(self, numbers, keys=None, bad=(), make=item):
        self.numbers, self.keys, self.bad, self.make = numbers, keys, bad, make

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        x, y = self.make(self.numbers[index])
        pair = x, y + torch.inf if self.numbers[index] in self.bad else y
        return pair if self.keys is None else dict(zip(self.keys, pair, strict=True))


def loader(numbers, make=item):
    """One micro-batch at a time."""
    return torch.utils.data.DataLoader(Items(numbers, make=make), batch_size=1, collate_fn=lambda one: one[0])


def sgd(params):
    """Its parameters are sums of gradients."""
    return torch.optim.SGD(params, lr=LR)


def parameters(model):
    """Values by name, whole where they are sharded."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name.removeprefix("net."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in inner.named_parameters()
    }


def full(tensor):
    """Whole where it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def environment(rank, size):
    """What `torchrun` sets; the process group is there already."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="here", GROUP_RANK="0", NODE_RANK="0",
    )  # fmt: skip
