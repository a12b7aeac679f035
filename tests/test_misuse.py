"""Thirty ways to swap a loop by half: each ends in an error or a warning that says what to change.

A misuse is a loop over windows; it runs until it raises or ends. What looks like one and is meant: `test_meant.py`.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

import accumkernels as ak
from tests.support.loop import K, Loop


def stock_step_kept(**options):
    """The optimizer's own step after acc.backward."""
    loop = Loop(**options)
    for window in loop.windows():
        loop.accumulate(window)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def stock_scaler_kept(fused=False):
    """The scaler's step after acc.backward."""
    loop = Loop(scaled=True, fused=fused)
    for window in loop.windows():
        loop.accumulate(window)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()


def stock_step_before_ours():
    """Both steps."""
    loop = Loop()
    for window in loop.windows():
        loop.accumulate(window)
        loop.optimizer.step()
        loop.acc.step(loop.optimizer)


def step_without_finalize(**options):
    """The long form, where finalize was forgotten."""
    loop = Loop(**options)
    for window in loop.windows():
        for x, y in window:
            loop.loss(x, y).backward()
            loop.acc.accumulate()
        loop.optimizer.step()
        loop.acc.zero_()


def closure_without_finalize():
    """An optimizer that calls a closure, which leaves its window open."""
    loop = Loop()

    def closure():
        for x, y in loop.windows(1)[0]:
            loop.acc.backward(loop.loss(x, y))
        return loop.loss(x, y)

    loop.optimizer.step(closure)


def lbfgs():
    """An optimizer that needs a closure, in step."""
    loop = Loop()
    optimizer = torch.optim.LBFGS(loop.acc.parameters())
    loop.accumulate()
    loop.acc.step(optimizer)


def norm_kept():
    """Torch's norm before acc.step, of what a loop finds."""
    loop = Loop()
    for window in loop.windows():
        loop.accumulate(window)
        get_total_norm(p.grad for p in loop.model.parameters() if p.grad is not None)
        loop.acc.step(loop.optimizer)


def clipping_kept(clip=nn.utils.clip_grad_norm_, **options):
    """Torch's clipping before acc.step."""
    loop = Loop(**options)
    for window in loop.windows():
        loop.accumulate(window)
        clip(loop.model.parameters(), 1e-3)
        loop.acc.step(loop.optimizer)


def model_clipped(clip=nn.utils.clip_grad_norm_):
    """Torch's clipping of the model's parameters, whose gradients are on their masters."""
    loop = Loop(dtype=torch.bfloat16, master_weights=True)
    for window in loop.windows():
        loop.accumulate(window)
        loop.acc.finalize(loop.optimizer)
        clip(loop.model.parameters(), 1e-3)
        loop.optimizer.step()
        loop.acc.zero_()


def clip_before_finalize():
    """Our own in the wrong order."""
    loop = Loop()
    loop.accumulate()
    loop.acc.clip_grad_norm_(1.0)


def divided(how):
    """The division by K left in place."""
    loop = Loop()
    for window in loop.windows():
        for x, y in window:
            loop.acc.backward(how(loop.loss(x, y)))
        loop.acc.step(loop.optimizer)


def scaled_twice():
    """scaler.scale left in place."""
    loop = Loop(scaled=True)
    for x, y in loop.windows(1)[0]:
        loop.acc.backward(loop.scaler.scale(loop.loss(x, y)))


def scaled_twice_in_parts():
    """The same in a loss of coupled samples."""
    loop = Loop(scaled=True)
    x, y = loop.windows(1)[0][0]
    loop.acc.backward_coupled(x.split(1), loop.model, lambda rows: loop.scaler.scale(mse_loss(rows, y)))


def unknown_scaler():
    """A scaled loss, and an accumulator that was built without the scaler."""
    loop = Loop(scaled=True, known=False)
    for x, y in loop.windows(1)[0]:
        loop.acc.backward(loop.scaler.scale(loop.loss(x, y)))


def unknown_scaler_in_long_form(fused=False):
    """The same, clipped before torch's scaler unscales."""
    loop = Loop(scaled=True, known=False, fused=fused)
    for window in loop.windows():
        loop.accumulate_scaled(window)
        loop.acc.finalize(loop.optimizer)
        loop.acc.clip_grad_norm_(1e-3)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.acc.zero_()


def unknown_scaler_and_our_step():
    """The same, and nobody unscales."""
    loop = Loop(scaled=True, known=False)
    for window in loop.windows():
        loop.accumulate_scaled(window)
        loop.acc.step(loop.optimizer)


def unscaled():
    """scaler.unscale_ left in place."""
    loop = Loop(scaled=True)
    loop.accumulate()
    loop.scaler.unscale_(loop.optimizer)
    loop.acc.step(loop.optimizer)


def never_scaled():
    """scaler.scale deleted with the rest, in the long form."""
    loop = Loop(scaled=True)
    for x, y in loop.windows(1)[0]:
        loop.loss(x, y).backward()
        loop.acc.accumulate()


def update_after_step():
    """scaler.update left in place after acc.step."""
    loop = Loop(scaled=True)
    loop.accumulate()
    loop.acc.step(loop.optimizer)
    loop.scaler.update()


def update_between(fused=False, accumulators=1):
    """scaler.update after each of two optimizers, as in Lightning Fabric: the second would unscale once more."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused) for module in model]
    modules, groups = ([model], [optimizers]) if accumulators == 1 else (list(model), [[o] for o in optimizers])
    accs = [ak.FusedAccumulator(module, scaler=scaler) for module in modules]
    for x, y in (torch.randn(2, 5), torch.randn(2, 3)), (torch.randn(2, 5), torch.randn(2, 3)):
        scaler.scale(mse_loss(model(x), y)).backward()
        for acc in accs:
            acc.accumulate()
    for acc, group in zip(accs, groups, strict=True):
        acc.finalize(*group)
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()


def without_update():
    """scaler.update forgotten in the long form."""
    loop = Loop(scaled=True)
    for window in loop.windows():
        loop.accumulate_scaled(window)
        loop.acc.finalize(loop.optimizer)
        loop.scaler.step(loop.optimizer)
        loop.acc.zero_()


def counted_twice():
    """acc.accumulate after acc.backward, which includes it."""
    loop = Loop()
    for window in loop.windows():
        for x, y in window:
            loop.acc.backward(loop.loss(x, y))
            loop.acc.accumulate()
        assert loop.acc.micro_batches == K
        loop.acc.step(loop.optimizer)


def zero_grad_between():
    """zero_grad between each backward and accumulate."""
    loop = Loop()
    for window in loop.windows():
        for x, y in window:
            loop.loss(x, y).backward()
            loop.optimizer.zero_grad()
            loop.acc.accumulate()
        loop.acc.step(loop.optimizer)


def optimizers_in_backward():
    """Hooks that step each parameter as soon as it has its gradient, as torch's tutorial and torchtune have them."""
    loop = Loop()
    own = {param: torch.optim.AdamW([param]) for param in loop.model.parameters()}

    def step(param):
        own[param].step()
        own[param].zero_grad()

    for param in own:
        param.register_post_accumulate_grad_hook(step)
    for x, y in loop.windows(1)[0]:
        loop.acc.backward(loop.loss(x, y))
    loop.acc.step(loop.optimizer)


def zero_grad_before_step():
    """zero_grad between finalize and the step."""
    loop = Loop()
    for window in loop.windows():
        loop.accumulate(window)
        loop.acc.finalize(loop.optimizer)
        loop.optimizer.zero_grad()
        loop.optimizer.step()
        loop.acc.zero_()


def zero_in_every_micro_batch():
    """Each zero_grad became a zero_, which drops the window."""
    loop = Loop()
    for window in loop.windows():
        for x, y in window:
            loop.acc.zero_()
            loop.acc.backward(loop.loss(x, y))
        loop.acc.step(loop.optimizer)


def zero_before_step():
    """zero_ in the place before the step."""
    loop = Loop()
    for window in loop.windows():
        loop.accumulate(window)
        loop.acc.zero_()
        loop.acc.step(loop.optimizer)


def zero_grad_for_zero():
    """zero_grad in place of zero_ at the end of the long form."""
    loop = Loop()
    for window in loop.windows():
        loop.accumulate(window)
        loop.acc.finalize(loop.optimizer)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def generator_without_freezing(micro_batches=K, first=False, **options):
    """A GAN whose zero_grad was deleted: the generator's loss leaves gradients in the discriminator.

    Args:
        micro_batches: Of each window.
        first: Whether the generator's loss comes before the discriminator's in each micro-batch, not after its window.
        **options: Of the discriminator's accumulator.
    """
    loop, generator = Loop(**options), nn.Linear(5, 5)
    theirs = ak.FusedAccumulator(generator)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for window in loop.windows():
        for x, y in window[:micro_batches]:
            if first:
                theirs.backward(loop.loss(generator(x), y))
            loop.acc.backward(loop.loss(x, y))
        loop.acc.step(loop.optimizer)
        for x, y in () if first else window[:micro_batches]:
            theirs.backward(loop.loss(generator(x), y))
        theirs.step(optimizer)


def stock_generator_without_freezing(micro_batches=K, **options):
    """The same of a generator that has no accumulator."""
    loop, generator = Loop(**options), nn.Linear(5, 5)
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
    for window in loop.windows():
        loop.accumulate(window[:micro_batches])
        loop.acc.step(loop.optimizer)
        for x, y in window[:micro_batches]:
            loop.loss(generator(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def never_accumulated():
    """loss.backward() left in place, and acc.step."""
    loop = Loop()
    for x, y in loop.windows(1)[0]:
        loop.loss(x, y).backward()
    loop.acc.step(loop.optimizer)


def other_parameters(**options):
    """The optimizer was built over some of the parameters, or those that masters stand for."""
    loop = Loop(**options)
    loop.accumulate()
    loop.acc.step(loop.optimizer)


def other_model():
    """The loss is that of a copy of the model, as after EMA or compile gone wrong."""
    loop = Loop()
    other = copy.deepcopy(loop.model)
    for x, y in loop.windows(1)[0]:
        loop.acc.backward(mse_loss(other(x), y))
    loop.acc.step(loop.optimizer)


def converted_later():
    """The model is converted after the accumulator was built."""
    loop = Loop()
    loop.model.to(torch.bfloat16)
    for x, y in loop.windows(1)[0]:
        loop.acc.backward(mse_loss(loop.model(x.bfloat16()), y.bfloat16()))


def two_accumulators():
    """One in each epoch."""
    loop = Loop()
    ak.FusedAccumulator(loop.model)


def called(call):
    """A single call with something else than it takes."""
    loop = Loop()
    x, y = loop.windows(1)[0][0]
    loop.acc.backward(loop.loss(x, y))
    call(loop, loop.loss(x, y))


def late_accumulate():
    """accumulate with the loss in place of a weight."""
    loop = Loop()
    for x, y in loop.windows(1)[0]:
        loss = loop.loss(x, y)
        loss.backward()
        loop.acc.accumulate(loss)


def bucket_weight():
    """A weight that comes after its gradients were added."""
    loop = Loop(release="backward")
    for x, y in loop.windows(1)[0]:
        loop.loss(x, y).backward()
        loop.acc.accumulate(len(x))


class Misuse(NamedTuple):
    """A loop, and its outcome: an exception, or None for a warning; and words of its message."""

    loop: Callable[[], None]
    error: type[BaseException] | None
    words: str


def of(function, *args, **kwargs):
    """A loop with arguments."""
    return lambda: function(*args, **kwargs)


MISUSES = {
    "stock step": Misuse(stock_step_kept, RuntimeError, "AdamW.step() inside a window"),
    "stock step, buckets": Misuse(of(stock_step_kept, release="backward"), RuntimeError, "inside a window"),
    "stock step, masters": Misuse(
        of(stock_step_kept, dtype=torch.bfloat16, master_weights=True), RuntimeError, "inside a window"
    ),
    "scaler.step": Misuse(stock_scaler_kept, AssertionError, "No inf checks were recorded for this optimizer"),
    "scaler.step, fused": Misuse(of(stock_scaler_kept, fused=True), RuntimeError, "inside a window"),
    "both steps": Misuse(stock_step_before_ours, RuntimeError, "Call acc.step(optimizer) instead"),
    "no finalize": Misuse(step_without_finalize, RuntimeError, "acc.finalize(optimizer) before"),
    "no finalize, buckets": Misuse(of(step_without_finalize, release="backward"), RuntimeError, "inside a window"),
    "no finalize in a closure": Misuse(closure_without_finalize, RuntimeError, "acc.finalize(optimizer) before"),
    "closure": Misuse(lbfgs, TypeError, "step() cannot drive LBFGS"),
    "clip_grad_norm_": Misuse(clipping_kept, RuntimeError, "call acc.step(optimizer, max_norm=...)"),
    "clip_grad_value_": Misuse(
        of(clipping_kept, lambda *args: nn.utils.clip_grad_value_(*args)), RuntimeError, "finds no .grad"
    ),
    "clip_grad_value_, imported": Misuse(of(clipping_kept, clip_grad_value_), RuntimeError, "finds no .grad"),
    "clip_grads_with_norm_": Misuse(
        of(clipping_kept, lambda *args: clip_grads_with_norm_(*args, total_norm=torch.ones(()))),
        RuntimeError,
        "clip_grads_with_norm_) inside a window",
    ),
    "get_total_norm": Misuse(norm_kept, RuntimeError, "get_total_norm, clip_grads_with_norm_) inside a window"),
    "clip_grad_norm_, masters": Misuse(model_clipped, RuntimeError, "Pass acc.parameters() in place of model.param"),
    "clip_grad_value_, masters": Misuse(of(model_clipped, clip_grad_value_), RuntimeError, "Pass acc.parameters()"),
    "clip before finalize": Misuse(clip_before_finalize, RuntimeError, "clip_grad_norm_() before finalize()"),
    "loss / K": Misuse(of(divided, lambda loss: loss / K), None, "pass the plain loss, acc.backward(loss)"),
    "loss * (1 / K)": Misuse(of(divided, lambda loss: loss * (1 / K)), None, "was divided by 4"),
    "loss / tensor": Misuse(of(divided, lambda loss: loss / torch.tensor(K)), None, "was divided by 4"),
    "a factor of the loss's own": Misuse(of(divided, lambda loss: loss / K), None, "by definition, as 0.5 * mse"),
    "scaled twice": Misuse(scaled_twice, RuntimeError, "pass the plain loss, acc.backward(loss), not"),
    "scaled twice, coupled": Misuse(scaled_twice_in_parts, RuntimeError, "pass the plain loss"),
    "unknown scaler": Misuse(unknown_scaler, RuntimeError, "FusedAccumulator(..., scaler=scaler)"),
    "unknown scaler, clipped": Misuse(unknown_scaler_in_long_form, RuntimeError, "unscales gradients after acc.clip"),
    "unknown scaler, clipped, fused": Misuse(
        of(unknown_scaler_in_long_form, fused=True), RuntimeError, "unscales gradients after acc.clip"
    ),
    "unknown scaler, our step": Misuse(unknown_scaler_and_our_step, None, "FusedAccumulator(..., scaler=scaler)"),
    "unscale_": Misuse(unscaled, RuntimeError, "delete that line"),
    "never scaled": Misuse(never_scaled, RuntimeError, "call acc.backward(loss)"),
    "update after our step": Misuse(update_after_step, AssertionError, "No inf checks were recorded prior to update"),
    "update between two steps": Misuse(update_between, RuntimeError, "call scaler.update() once, after all steps"),
    "update between two steps, fused": Misuse(
        of(update_between, fused=True), RuntimeError, "call scaler.update() once, after all steps"
    ),
    "update between two accumulators' steps": Misuse(
        of(update_between, accumulators=2), RuntimeError, "finalize it right before its step"
    ),
    "no update": Misuse(without_update, RuntimeError, "call scaler.update()"),
    "counted twice": Misuse(counted_twice, None, "Delete acc.accumulate()"),
    "zero_grad before accumulate": Misuse(zero_grad_between, RuntimeError, "no gradient was found in any of this"),
    "optimizers in backward": Misuse(optimizers_in_backward, RuntimeError, "so does a hook that steps an optimizer"),
    "zero_grad before the step": Misuse(zero_grad_before_step, RuntimeError, "delete zero_grad() between finalize()"),
    "zero_ in every micro-batch": Misuse(zero_in_every_micro_batch, None, "delete zero_() before backward"),
    "zero_ before step": Misuse(zero_before_step, None, "before step()"),
    "zero_grad for zero_": Misuse(zero_grad_for_zero, RuntimeError, "call acc.zero_() to open a new window"),
    "a generator's gradients": Misuse(generator_without_freezing, RuntimeError, "module.requires_grad_(False)"),
    "a generator's gradients, one micro-batch": Misuse(
        of(generator_without_freezing, 1), RuntimeError, "by acc.discard()"
    ),
    "a generator's gradients, buckets": Misuse(
        of(generator_without_freezing, release="backward"), RuntimeError, "has a gradient of another loss"
    ),
    "a generator's loss first": Misuse(of(generator_without_freezing, first=True), RuntimeError, "as a generator's"),
    "a generator's loss first, one micro-batch": Misuse(
        of(generator_without_freezing, 1, first=True), RuntimeError, "as a generator's"
    ),
    "a generator's loss first, buckets": Misuse(
        of(generator_without_freezing, first=True, release="backward"), RuntimeError, "as a generator's"
    ),
    "a stock generator's gradients": Misuse(stock_generator_without_freezing, None, "module.requires_grad_(False)"),
    "a stock generator's gradients, one micro-batch": Misuse(
        of(stock_generator_without_freezing, 1), None, "by acc.zero_()"
    ),
    "a stock generator's gradients, buckets": Misuse(
        of(stock_generator_without_freezing, release="backward"), None, "gradients of another loss were there"
    ),
    "never accumulated": Misuse(never_accumulated, RuntimeError, "call acc.accumulate() after backward"),
    "some parameters": Misuse(
        of(other_parameters, build=lambda model: model[0].parameters()), RuntimeError, "build the optimizers over"
    ),
    "the model's, not masters": Misuse(
        of(other_parameters, build=nn.Module.parameters, dtype=torch.bfloat16, master_weights=True),
        RuntimeError,
        "build the optimizers over acc.parameters()",
    ),
    "a copy's loss": Misuse(other_model, RuntimeError, "reaches none of the accumulator's parameters"),
    "converted later": Misuse(converted_later, RuntimeError, "build a new FusedAccumulator"),
    "two accumulators": Misuse(two_accumulators, RuntimeError, "call its remove()"),
    "loss.item()": Misuse(
        of(called, lambda loop, loss: loop.acc.backward(loss.item())), TypeError, "loss must be a tensor"
    ),
    "no optimizer": Misuse(of(called, lambda loop, loss: loop.acc.step()), TypeError, "needs the optimizers"),
    "max_norm by position": Misuse(
        of(called, lambda loop, loss: loop.acc.step(loop.optimizer, 1.0)),
        TypeError,
        "1.0 is not an optimizer: write acc.step(optimizer, max_norm=1.0)",
    ),
    "scaler for optimizer": Misuse(
        of(called, lambda loop, loss: loop.acc.step(torch.amp.GradScaler("cpu"))),
        TypeError,
        "must be a torch.optim.Optimizer",
    ),
    "a weight for each sample": Misuse(
        of(called, lambda loop, loss: loop.acc.backward(loss, torch.ones(2))), ValueError, "0-d tensor"
    ),
    "a weight without a value": Misuse(
        of(called, lambda loop, loss: loop.acc.backward(loss, torch.ones((), device="meta"))),
        ValueError,
        "weight must have a value",
    ),
    "the loss as a weight": Misuse(late_accumulate, ValueError, "is it the loss?"),
    "no tokens": Misuse(of(called, lambda loop, loss: loop.acc.backward(loss, math.nan)), ValueError, "finite"),
    "a weight too late": Misuse(bucket_weight, RuntimeError, "acc.backward(loss, weight)"),
}


@pytest.mark.parametrize("misuse", [pytest.param(m, id=name) for name, m in MISUSES.items()])
def test_no_misuse_is_silent(misuse, caplog):
    """An exception, or exactly one warning, whose words say what to change."""
    if misuse.error is not None:
        with pytest.raises(misuse.error) as caught:
            misuse.loop()
        assert misuse.words in str(caught.value)
    else:
        with caplog.at_level(logging.WARNING, logger="accumkernels"):
            misuse.loop()
        (message,) = [record.getMessage() for record in caplog.records]
        assert message.startswith("accumkernels: ") and misuse.words in message


def test_there_are_thirty():
    """The table does not shrink."""
    assert len(MISUSES) >= 30
