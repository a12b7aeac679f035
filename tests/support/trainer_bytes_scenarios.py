"""What trainers on ranks send, and when."""

from __future__ import annotations

import contextlib
import unittest.mock

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import STEPS, environment, item, items, parameters, sgd
from tests.support.trainer_loops import TRAINERS, Accelerate, Lightning, accelerator


@contextlib.contextmanager
def counted():
    """Bytes that all-reduces send, and how many there are."""
    sent, original = [], torch.distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce
    try:
        yield sent
    finally:
        torch.distributed.all_reduce = original


def accelerate_bytes(rank, size):
    """What a window sends, with ours; a window of accelerate's `no_sync` sends each gradient once."""
    environment(rank, size)
    one = accelerator()
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    with counted() as sent:
        for i in items(size)[0][rank::size]:
            x, y = item(i)
            with one.accumulate(model):
                before = len(sent)
                one.backward(mse_loss(model(x), y), weight=len(x))
                assert one.sync_gradients or len(sent) == before
                optimizer.step()
    one.free_memory()
    return sent, one.step


@contextlib.contextmanager
def chunks_sent():
    """A list that gets ("backward", bytes) for each chunk that goes out while a backward runs, "after" for others."""
    from accumkernels.ranks.group import Group

    sent, original = [], Group.send

    def send(self, piece, dtype):
        when = "after" if torch._C._current_graph_task_id() == -1 else "backward"
        sent.append((when, piece.nbytes))
        return original(self, piece, dtype)

    with unittest.mock.patch.object(Group, "send", send):
        yield sent


SMALL = {"release": "backward", "bucket_bytes": 256}  # of which the model's gradients fill several


def sent_in_backward(rank, size):
    """What each trainer sends while backward runs, by itself, and where it may not; and what comes out of it."""
    environment(rank, size)
    loops = {name: lambda t=trainer: t.run(rank, size, options=SMALL) for name, trainer in TRAINERS.items()}
    loops["without"] = lambda: Accelerate.run(rank, size, options={"release": "microbatch"})
    loops["static graph"] = lambda: Lightning.run(rank, size, options=SMALL, **Lightning.ddp(static_graph=True))
    found = {}
    for name, loop in loops.items():
        with chunks_sent() as sent:
            found[name] = loop().values, sent
    return found


def accelerate_ends_otherwise(rank, size):
    """The last rank leaves out the backward of the micro-batch that ends the window, after others of its own."""
    environment(rank, size)
    left_out = {(STEPS - 1) * size + size - 1}
    return Accelerate.run(rank, size, numbers=items(size)[0], options=SMALL, without=left_out).values


class CalledTwice(nn.Module):
    """Its second layer is checkpointed twice, in a way in which its parameters get two gradients in one backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x.square().mean()


def reentrant_checkpointing(rank, size):
    """A layer called twice, which DistributedDataParallel refuses; and what the option makes of it."""
    environment(rank, size)
    found = {}
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    twin = DistributedDataParallel(CalledTwice())
    found["stock"] = message(lambda: twin(x).backward())
    for name, options in (("default", SMALL), ("microbatch", {"release": "microbatch"})):
        one = accelerator(options=options, steps=1)
        model = CalledTwice()
        model, optimizer = one.prepare(model, sgd(model.parameters()))
        found[name] = message(lambda one=one, model=model: one.backward(model(x)))
        if name == "microbatch":
            optimizer.step()
            found["values"] = parameters(model)
        one.free_memory()
        assert all(p.grad is None for p in model.parameters()) or name == "microbatch"
    return found
