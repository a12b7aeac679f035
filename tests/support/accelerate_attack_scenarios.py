"""What ranks run to break accelerate's adapter; test_attacks_on_ranks.py holds each to one process on all the data."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.support import ranks
from tests.support.accelerate_scenarios import accelerator, ends
from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import MAX_VALUE, STEPS, Heads, environment, item, items, parameters, sgd

EXACT = (
    "clipped by value",
    "gradients changed",
    "gradients changed, sharded",
    "gradients replaced",
    "validation",
    "validation, sharded",
    "zero_grad",
    "zero_grad, sharded",
    "unused",
    "unused, not said",
    "static graph",
    "checkpointing",
    "checkpointing, reentrant",
    "checkpointing, sharded",
)
COMPILED = ("compiled", "compiled before", "compiled, sharded")  # slow: on two ranks alone


def loop(
    rank, size, before=None, after=None, model=mlp, uneven=True, wrapped=None, fsdp2=False, weight=None, **options
):
    """accelerate's loop with weights: the parameters.

    Args:
        rank: This one.
        size: How many there are.
        before: Called with the accelerator, the model and the number of a micro-batch, before its forward.
        after: Called with the accelerator, the model and the optimizer, after its backward.
        model: Makes it.
        uneven: Whether the last rank has one micro-batch less.
        wrapped: Makes of the prepared model what is called.
        fsdp2: Whether it is sharded.
        weight: Called with the number of a micro-batch and its inputs; by default what they number.
        **options: Of `accelerator`.
    """
    one = accelerator(fsdp2=fsdp2, **options)
    numbers = items(size, rank, uneven=uneven)
    module = model()
    module, optimizer = one.prepare(module, sgd(module.parameters()))
    call = module if wrapped is None else wrapped(module)
    for index, i in enumerate(numbers):
        x, y = item(i)
        with contextlib.suppress(ArithmeticError), ends(one, index + 1 == len(numbers)), one.accumulate(module):
            if before is not None:
                before(one, call, index)
            one.backward(mse_loss(call(x), y), weight=len(x) if weight is None else weight(index, x))
            if after is not None:
                after(one, call, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    values = parameters(module)
    one.free_memory()
    return values


def ddp(**settings):
    """Of accelerate's DistributedDataParallel."""
    from accelerate.utils import DistributedDataParallelKwargs

    return {"kwargs_handlers": [DistributedDataParallelKwargs(**settings)]}


class Checkpointed(nn.Module):
    """mlp, whose first layers are run again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, x):
        return self.net[3:](checkpoint(self.net[:3], x.requires_grad_(), use_reentrant=self.reentrant))


def accelerate_attacks(rank, size):
    """By name: parameters, or what was raised."""
    environment(rank, size)
    last = rank == size - 1

    def clips(one, model, optimizer):
        one.clip_grad_value_(model.parameters(), MAX_VALUE)

    def doubles(one, model, optimizer):
        for p in model.parameters():
            assert (p.grad is not None) == one.sync_gradients
            if one.sync_gradients:
                p.grad.mul_(2)

    def replaces(one, model, optimizer):
        for p in model.parameters():
            if one.sync_gradients:
                p.grad = p.grad * 2

    def fails(one, model, index):
        if last and index == 1:
            raise ArithmeticError("a batch of this rank is bad")

    def validates(one, model, index):
        if index != 2:
            return
        model.eval()
        with torch.no_grad():
            one.gather_for_metrics(mse_loss(model(item(index)[0]), item(index)[1]))
        model.train()

    def clears(one, model, optimizer):
        if not one.sync_gradients:
            optimizer.zero_grad()
            model.zero_grad()

    def changes(one, model, index):
        if index == 1:
            one.gradient_accumulation_steps = STEPS + 1

    def compiled(model):
        return torch.compile(model, backend="eager")

    found = {
        "clipped by value": loop(rank, size, after=clips),
        "clipped by value, sharded": message(loop, rank, size, after=clips, fsdp2=True, uneven=False),
        "gradients changed": loop(rank, size, after=doubles),
        "gradients changed, sharded": loop(rank, size, after=doubles, fsdp2=True, uneven=False),
        "gradients replaced": loop(rank, size, after=replaces),
        "a step fails": loop(rank, size, before=fails),
        "validation": loop(rank, size, before=validates),
        "validation, sharded": loop(rank, size, before=validates, fsdp2=True, uneven=False),
        "zero_grad": loop(rank, size, after=clears),
        "zero_grad, sharded": loop(rank, size, after=clears, fsdp2=True, uneven=False),
        "unused": loop(rank, size, model=Heads, **ddp(find_unused_parameters=True)),
        "unused, not said": loop(rank, size, model=Heads),
        "static graph": loop(rank, size, **ddp(static_graph=True)),
        "checkpointing": loop(rank, size, model=lambda: Checkpointed(False)),
        "checkpointing, reentrant": loop(rank, size, model=lambda: Checkpointed(True)),
        "checkpointing, sharded": loop(rank, size, model=lambda: Checkpointed(False), fsdp2=True, uneven=False),
        "steps changed": loop(rank, size, before=changes, uneven=False),
    }
    if size == 2:
        found |= {
            "compiled": loop(rank, size, wrapped=compiled),
            "compiled before": loop(rank, size, model=lambda: compiled(mlp())),
            "compiled, sharded": loop(rank, size, wrapped=compiled, fsdp2=True, uneven=False),
        }
    return found


def accelerate_saved_inside(rank, size):
    """After two of four micro-batches, by `save_state`."""
    environment(rank, size)
    with prepared() as (one, model, optimizer):
        steps(one, model, optimizer, items(size)[0][rank::size][:2])
        one.save_state(str(ranks.shared / f"inside-a-window-{size}"))
        one.wait_for_everyone()


def accelerate_resumed_inside(rank, size):
    """What `accelerate_saved_inside` has saved, and the rest of its window."""
    environment(rank, size)
    return rest_of_a_window(ranks.shared / f"inside-a-window-{size}", items(size)[0][2 * size :][rank::size])


def accelerate_resumed_from_four(rank, size):
    """What four ranks have saved inside a window, on another number of them."""
    environment(rank, size)
    return rest_of_a_window(ranks.shared / "inside-a-window-4", items(4)[0][2 * 4 :][rank::size])


def rest_of_a_window(folder, numbers):
    """The parameters after the window that was saved and has these micro-batches left on this rank."""
    with prepared(seed=1) as (one, model, optimizer):
        one.load_state(str(folder))
        steps(one, model, optimizer, numbers, ends_window=True)
        return parameters(model)


@contextlib.contextmanager
def prepared(seed=0):
    """With more steps to a window than are ever taken, and the accumulator in its checkpoints."""
    one = accelerator(steps=100)
    model = mlp(seed=seed)
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    one.register_for_checkpointing(one.accumulator)
    yield one, model, optimizer
    one.free_memory()


def steps(one, model, optimizer, numbers, ends_window=False):
    """Of accelerate's loop."""
    for index, i in enumerate(numbers):
        x, y = item(i)
        with ends(one, ends_window and index + 1 == len(numbers)), one.accumulate(model):
            one.backward(mse_loss(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
