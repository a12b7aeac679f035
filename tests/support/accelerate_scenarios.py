"""What ranks run in accelerate's loop."""

from __future__ import annotations

import argparse
import contextlib
import unittest.mock

import torch
from torch.nn.functional import mse_loss

from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import (
    KINDS,
    LR,
    MAX_NORM,
    STEPS,
    environment,
    full,
    item,
    items,
    loader,
    parameters,
    sgd,
)
from tests.support.trainers import fsdp2_on_the_cpu, make


def accelerator(cls=None, precision="fp32", steps=STEPS, options=None, fsdp2=False, **keywords):
    """Ours, or stock's, anew."""
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    from accumkernels.integrations.accelerate import fuse

    keywords.setdefault("dataloader_config", DataLoaderConfiguration(even_batches=False))
    one = make(accelerate.Accelerator, "no" if precision == "fp32" else precision, steps, **keywords)
    if fsdp2:
        fsdp2_on_the_cpu(one, precision)
    return one if cls == "stock" else fuse(one, **(options or {}))


def accelerate_loop(rank, size, precision="fp32", clip=None, fsdp2=False, optimizer_fn=sgd, bad=(), **keywords):
    """The loop of accelerate's documentation, with weights; parameters, norms, skipped steps, scale."""
    one = accelerator(precision=precision, fsdp2=fsdp2, **keywords)
    model = mlp()
    numbers = items(size, rank, uneven=not fsdp2)
    model, optimizer = one.prepare(model, optimizer_fn(model.parameters()))
    data = loader(numbers)
    history = []
    for index, (x, y) in enumerate(data):
        with ends(one, index + 1 == len(numbers)), one.accumulate(model):
            loss = mse_loss(model(x).float(), y)
            loss = loss * torch.inf if (rank, index) in bad else loss
            one.backward(loss, weight=len(x))
            if one.sync_gradients and clip is not None:
                history.append(float(full(one.clip_grad_norm_(model.parameters(), clip))))
            optimizer.step()
            optimizer.zero_grad()
            if one.sync_gradients and bad:
                history.append(optimizer.step_was_skipped)
    scale = None if one.scaler is None else one.scaler.get_scale()
    values = parameters(model)
    one.free_memory()
    return values, history, scale


@contextlib.contextmanager
def ends(one, last):
    """Whether accelerate is to believe that a loader, which it has sharded, has given its last micro-batch."""
    loader = argparse.Namespace(end_of_dataloader=last, remainder=-1)
    one.gradient_state._add_dataloader(loader)
    yield
    one.gradient_state._remove_dataloader(loader)


def accelerate_ddp(rank, size):
    """Every precision, clipped or not, in every release."""
    environment(rank, size)
    found = {kind: accelerate_loop(rank, size, *kind) for kind in KINDS}
    found["backward"] = accelerate_loop(rank, size, options={"release": "backward", "bucket_bytes": 64})
    found["fused"] = accelerate_loop(
        rank, size, clip=MAX_NORM, optimizer_fn=lambda p: torch.optim.SGD(p, LR, fused=True)
    )
    return found


def accelerate_fsdp2(rank, size):
    """Sharded."""
    environment(rank, size)
    found = {kind: accelerate_loop(rank, size, *kind, fsdp2=True) for kind in KINDS}
    found["overflow"] = accelerate_loop(rank, size, "fp16", fsdp2=True, bad={(size - 1, 1)})
    return found


def accelerate_overflow(rank, size):
    """On the last rank, in its second micro-batch: all skip the window, and step the next."""
    environment(rank, size)
    return {kind: accelerate_loop(rank, size, kind, bad={(size - 1, 1)}) for kind in ("fp32", "fp16")}


def accelerate_failed_backward(rank, size):
    """Each rank's second backward fails halfway and is run again; twice, with one optimizer and with two."""
    environment(rank, size)
    found = {}
    for name, parts in (("one", 1), ("again", 1), ("two", 2), ("two again", 2)):
        one = accelerator()
        model = mlp()
        halves = list(model.parameters())[:2], list(model.parameters())[2:]
        groups = [list(model.parameters())] if parts == 1 else halves
        model, *optimizers = one.prepare(model, *(sgd(group) for group in groups))
        numbers = items(size, rank, uneven=False)
        for index, (x, y) in enumerate(loader(numbers)):
            for fails in (True, False) if index == 1 else (False,):
                with contextlib.suppress(torch.OutOfMemoryError), ends(one, index + 1 == len(numbers)):
                    with one.accumulate(model):
                        loss = mse_loss(model(x), y)
                        hook = halves[0][0].register_hook(_out_of_memory) if fails else None
                        try:
                            one.backward(loss, weight=len(x))
                        finally:
                            if hook is not None:
                                hook.remove()
                        for optimizer in optimizers:
                            optimizer.step()
                            optimizer.zero_grad()
                if fails:
                    one.step -= 1  # accelerate counts the block that is run again
        found[name] = parameters(model), [], None
        one.free_memory()
    return found


def _out_of_memory(grad):
    raise torch.OutOfMemoryError("no memory left")


def accelerate_empty_rank(rank, size):
    """Windows in which the last rank has no micro-batch, or none has; `.grad` left to the optimizer, and read."""
    environment(rank, size)
    found = {}
    for reads in (False, True):
        one = accelerator(steps=1)
        one.reads_gradients = reads
        model = mlp()
        model, optimizer = one.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
        norms, skipped = [], []
        for window in range(5):
            with one.accumulate(model):
                if window in (1, 3) or (rank < size - 1 and window in (0, 4)):
                    x, y = item(window + rank)
                    one.backward(mse_loss(model(x), y), weight=float(window != 4))
                norm = one.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                norms.append(float(norm))
                skipped.append(one.optimizer_step_was_skipped)
                optimizer.zero_grad()
        found[reads] = parameters(model), norms, skipped
        one.free_memory()
    return found


def accelerate_recipe(rank, size):
    """Their documented loop for token counts, by the import alone: sums, divided by the number over all ranks."""
    environment(rank, size)
    found = {}
    for name in ("stock", "ours"):
        one = accelerator("stock" if name == "stock" else None)
        model = mlp()
        model, optimizer = one.prepare(model, sgd(model.parameters()))
        for window in items(size, uneven=False):
            own = [item(i) for i in window[rank::size]]
            total = one.gather(torch.tensor(sum(len(x) for x, _ in own))).sum().item()
            for i, (x, y) in enumerate(own):
                with model.no_sync() if i + 1 < len(own) else contextlib.nullcontext():
                    loss = mse_loss(model(x), y, reduction="sum") / 3  # as many outputs as a sample has
                    one.backward(loss * STEPS * one.num_processes / total)
            assert next(model.parameters()).grad is not None
            optimizer.step()
            optimizer.zero_grad()
        found[name] = parameters(model)
        one.free_memory()
    return found


def accelerate_two_optimizers(rank, size):
    """One model, two optimizers, one clipping; and two models with one optimizer."""
    environment(rank, size)
    found = {}
    for kind in ("two optimizers", "two models"):
        one = accelerator()
        if kind == "two optimizers":
            model = mlp()
            parts = [
                [model[0].weight, model[4].weight],
                [p for p in model.parameters() if p.ndim == 1] + [model[2].weight],
            ]
            model, *optimizers = one.prepare(model, *(sgd(part) for part in parts))
            models = [model]
            call = model
        else:
            whole = mlp()
            first, second, optimizer = one.prepare(whole[:2], whole[2:], sgd(whole.parameters()))
            models, optimizers = [first, second], [optimizer]
            call = lambda x, first=first, second=second: second(first(x))  # noqa: E731
        norms = []
        numbers = items(size, rank)
        for index, i in enumerate(numbers):
            x, y = item(i)
            with ends(one, index + 1 == len(numbers)), one.accumulate(*models):
                one.backward(mse_loss(call(x), y), weight=len(x))
                if one.sync_gradients:
                    norms.append(one.clip_grad_norm_([p for m in models for p in m.parameters()], MAX_NORM).item())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        values = [value for m in models for value in parameters(m).values()]
        found[kind] = dict(zip(parameters(mlp()), values, strict=True)), norms, None
        one.free_memory()
    return found


def accelerate_refuses(rank, size):
    """What would hang or be wrong, on all ranks alike."""
    environment(rank, size)
    one = accelerator(steps=1)
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    found = {}

    def joins():
        with one.join_uneven_inputs([model], even_batches=False):
            pass

    with unittest.mock.patch.object(type(one), "multi_device", True):  # on CPUs, accelerate does not join anything
        found["join"] = message(joins)
    x, y = item(0)
    one.backward(mse_loss(model(x), y))
    found["two that sync"] = message(lambda: one.backward(mse_loss(model(x), y)))
    one.free_memory()
    both = mlp()
    found["shared"] = message(lambda: one.prepare(both, sgd(both.parameters()), sgd(both.parameters())))
    return found
