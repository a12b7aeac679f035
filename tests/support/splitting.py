"""Memory errors planted in whole batches, and the truth about their gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accumkernels.splitting.memory import CountedMemory

ERRORS = (
    lambda: torch.OutOfMemoryError("planted"),
    lambda: MemoryError("planted"),
    lambda: RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
)


def room(nbytes):
    """A `memory_limit` that leaves so many bytes beside what is alive now."""
    return f"{CountedMemory(torch.device('cpu'), None).alive() + nbytes} B"


class Planted(TorchDispatchMode):
    """Raises at the ops with the given numbers, counted while a try of several samples runs; before an op has run.

    Args:
        at: Numbers of ops.
        error: Makes what is raised.

    Attributes:
        count: Ops so far.
        size: Samples of the part that runs; none fails below two, so that every batch can be run.
        raised: How many errors were raised.
    """

    def __init__(self, at, error=ERRORS[0]):
        super().__init__()
        self.at, self.error = set(at), error
        self.count = self.size = self.raised = 0

    def watch(self, acc):
        """Raise nothing between micro-batches."""
        accumulate = acc.engine.runner.accumulate

        def counted(*args):
            accumulate(*args)
            self.size = 0

        acc.engine.runner.accumulate = counted

    def tick(self):
        """Count one op, or call of the user's."""
        if self.size > 1:
            self.count += 1
            if self.count in self.at:
                self.raised += 1
                self.size = 0
                raise self.error()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tick()
        return func(*args, **(kwargs or {}))


def truth(model, loss_of):
    """Gradients of the whole batch's loss, by stock torch in float64."""
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    loss = loss_of(twin)
    loss.backward()
    return loss.item(), [p.grad for p in twin.parameters()]


class Lengths(nn.Module):
    """A model of texts whose activations grow with their lengths."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head = nn.Embedding(16, 32), nn.Linear(32, 64), nn.Linear(64, 16)

    @staticmethod
    def samples(lengths, seed):
        """Token ids of such lengths."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(1, 16, (length,), generator=generator) for length in lengths]

    @staticmethod
    def collate(samples):
        """Padded to the longest with token 0."""
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, ids):
        """The mean over tokens, and their number."""
        logits = self.head(torch.tanh(self.hidden(self.embed(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=0), (ids != 0).sum()

    def mean(self, samples):
        """Of a whole batch."""
        return self.loss(self.collate(samples))[0]
