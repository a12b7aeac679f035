"""Losses of texts and of padded rows in split batches, held to the whole batch or expected to be refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.models import grads_of, relative_error
from tests.support.splitting import truth

SINGLE = 2e-6  # of float32, in which sums are
WORDS = 32
LENGTHS = 3, 40, 7, 12, 5, 33
REAL = torch.arange(10) < torch.tensor([10, 9, 9, 2, 3, 10])[:, None]  # padded rows


class Text(nn.Module):
    """A language model with all that a forward may leave behind: dropout's random numbers, statistics, counters."""

    def __init__(self, rate=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(WORDS, 16), nn.BatchNorm1d(16)
        self.drop, self.head = nn.Dropout(rate), nn.Linear(16, WORDS)
        self.calls = 0

    def forward(self, ids):
        """Logits."""
        self.calls += 1
        x = self.embed(ids)
        self.norm(x.flatten(0, 1))
        return self.head(self.drop(x))


def texts(lengths=LENGTHS, seed=0):
    """Token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (length,), generator=generator) for length in lengths]


def check_split(acc, model, batch, loss, right, micro_batch=2):
    """A loss that is right is that of the whole batch; another is refused, and nothing is added."""
    if not right:
        with pytest.raises(ValueError, match="the loss is not a mean over samples.* with class weights"):
            acc.backward_batch(batch, loss, micro_batch=micro_batch)
        assert acc.micro_batches == 0
        return
    acc.backward_batch(batch, loss, micro_batch=micro_batch)
    acc.finalize()
    grads = [g for g in truth(model, lambda twin: loss(batch, twin))[1] if g is not None]
    assert relative_error([g for g in grads_of(acc) if g is not None], grads) < SINGLE
