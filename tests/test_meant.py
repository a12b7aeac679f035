"""What looks like a misuse and is meant is left alone, and a misuse is told once and can be made good."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.loop import K, Loop
from tests.support.models import mlp


def with_another_optimizer():
    """A second model with a stock loop of its own, scaler and clipping included, inside our windows."""
    loop, other = Loop(scaled=True), mlp(seed=1)
    optimizer, scaler = torch.optim.AdamW(other.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    for window in loop.windows():
        for x, y in window:
            loop.acc.backward(loop.loss(x, y))
            scaler.scale(mse_loss(other(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            nn.utils.clip_grad_norm_([], 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        loop.acc.step(loop.optimizer)


def with_a_step_of_another_accumulator():
    """Whose fused optimizer has a scale, between our clipping and our step."""
    loop, other = Loop(), mlp(seed=1)
    theirs = ak.FusedAccumulator(other)
    optimizer = torch.optim.AdamW(theirs.parameters(), fused=True)
    for window in loop.windows():
        loop.accumulate(window)
        loop.acc.finalize(loop.optimizer)
        loop.acc.clip_grad_norm_(1.0)
        for x, y in window:
            theirs.backward(mse_loss(other(x), y))
        theirs.step(optimizer, max_norm=1.0)
        loop.optimizer.step()
        loop.acc.zero_()


def clipping_each_micro_batch():
    """In the long form gradients of a micro-batch are there to be clipped, and after finalize those of the window."""
    loop = Loop(scaled=True)
    for window in loop.windows():
        for x, y in window:
            loop.scaler.scale(loop.loss(x, y)).backward()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 10.0)
            loop.acc.accumulate()
        loop.acc.finalize(loop.optimizer)
        nn.utils.clip_grad_value_(loop.model.parameters(), 0.1)
        assert nn.utils.clip_grad_norm_(loop.model[0].parameters(), 1.0) > 0
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.acc.zero_()


def changing_gradients_after_clipping():
    """Noise on clipped gradients, without any scaler for this optimizer."""
    loop = Loop()
    for window in loop.windows():
        loop.accumulate(window)
        loop.acc.finalize(loop.optimizer)
        loop.acc.clip_grad_norm_(1.0)
        for p in loop.model.parameters():
            p.grad.add_(0.01)
        loop.optimizer.step()
        loop.acc.zero_()


def means_of_as_many_losses():
    """K losses of one batch, added up and divided by their number, as both directions of a contrastive loss are."""
    loop = Loop()
    for window in loop.windows():
        for x, y in window:
            loop.acc.backward(sum(loop.loss(x, y) for _ in window) / len(window))
        loop.acc.step(loop.optimizer)
        for x, y in window:
            first, *others = [loop.loss(x, y) for _ in window]
            for other in others:
                first = first + other
            loop.acc.backward(first * (1 / len(window)))
        loop.acc.step(loop.optimizer)


def one_loss_divided_by_the_number_of_all():
    """A first loss that counts less than the others."""
    loop = Loop()
    for window in loop.windows():
        for index, (x, y) in enumerate(window):
            loss = loop.loss(x, y)
            loop.acc.backward(loss / K if index == 0 else loss)
        loop.acc.step(loop.optimizer)


def divisions_of_other_numbers():
    """A mean over 3 of its own, a penalty's factor, and K with a divisor that says so."""
    loop = Loop()
    for how, divisor in ((lambda loss: loss / 3, None), (lambda loss: 0.5 * loss, None), (lambda loss: loss / K, 1)):
        for x, y in loop.windows(1)[0]:
            loop.acc.backward(how(loop.loss(x, y)))
        loop.acc.step(loop.optimizer, divisor=divisor)


def a_factor_in_a_batch_that_is_split_in_two():
    """Half of a square, as textbooks have it."""
    loop = Loop()
    batch = torch.randn(2 * K, 5), torch.randn(2 * K, 3)
    loop.acc.backward_batch(batch, lambda part: 0.5 * loop.loss(*part), budget=K)
    loop.acc.step(loop.optimizer)


def sums_over_their_own_number():
    """As many samples in each micro-batch as the window has micro-batches, in forms of a mean over them."""
    loop = Loop()
    x, y = torch.randn(K, 5), torch.randn(K, 3)
    for how in (
        lambda out: (out - y).square().sum() / K,
        lambda out: mse_loss(out, y, reduction="sum") / len(x),
        lambda out: nn.functional.kl_div(out.log_softmax(1), y.softmax(1), reduction="batchmean"),
        lambda out: ((out - y).square().sum(1) * torch.ones(K)).sum() / torch.ones(K).sum(),
    ):
        for _ in range(K):
            loop.acc.backward(how(loop.model(x)))
        loop.acc.step(loop.optimizer)


def dropped_once():
    """A window dropped after an exception, in the middle of a run."""
    loop = Loop()
    for index, window in enumerate(loop.windows()):
        loop.accumulate(window)
        if index == 1:
            loop.acc.zero_()
        loop.acc.step(loop.optimizer)


def closure_that_finalizes():
    """An optimizer that calls a closure, called twice."""
    loop = Loop()

    def closure():
        loop.acc.zero_()
        for x, y in loop.windows(1)[0]:
            loop.acc.backward(loop.loss(x, y))
        loop.acc.finalize(loop.optimizer)
        return loop.loss(x, y)

    loop.optimizer.step(closure)
    loop.optimizer.step(closure)


def scaler_that_unscales_means():
    """A stock scaler over an accumulator that does not know it is right as long as nothing is clipped."""
    loop = Loop(scaled=True, known=False)
    for window in loop.windows():
        loop.accumulate_scaled(window)
        loop.acc.finalize(loop.optimizer)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.acc.zero_()


def backward_of_its_own():
    """Of one loss before acc.backward of another; the last window has a single micro-batch."""
    loop = Loop()
    for count in (K, 1):
        for x, y in loop.windows(1)[0][:count]:
            loop.loss(x, y).backward()
            loop.acc.backward(loop.loss(x, y))
        loop.acc.step(loop.optimizer)


def leftovers_dropped(drop):
    """Another loss's gradients, dropped before the window."""
    loop = Loop(release="microbatch")
    for window in loop.windows():
        mse_loss(loop.model(window[0][0]), window[0][1]).backward()
        drop(loop)
        loop.accumulate(window)
        loop.acc.step(loop.optimizer)


def leftovers_dropped_by_zero():
    """In the way that works for buckets, too."""
    leftovers_dropped(lambda loop: loop.acc.zero_())


def leftovers_filled_with_zeros():
    """In the way of torch 1."""
    leftovers_dropped(lambda loop: loop.optimizer.zero_grad(set_to_none=False))


def of_a_generator(drop):
    """A GAN in which the discriminator loses what the generator's loss leaves there, before its own backward.

    Args:
        drop: Called with the discriminator's `Loop`.
    """
    loop, generator = Loop(), nn.Linear(5, 5)
    theirs = ak.FusedAccumulator(generator)
    for window in loop.windows():
        for x, y in window:
            theirs.backward(loop.loss(generator(x), y))
            drop(loop)
            loop.acc.backward(loop.loss(x, y))
        loop.acc.step(loop.optimizer)
        theirs.zero_()


def generators_gradients_dropped():
    """Set to None."""
    of_a_generator(lambda loop: loop.optimizer.zero_grad())


def generators_gradients_filled_with_zeros():
    """In the way of torch 1."""
    of_a_generator(lambda loop: loop.optimizer.zero_grad(set_to_none=False))


def one_loss_counted_by_two():
    """A loss that reaches the parameters of two accumulators, each of which counts what is its own."""
    loop, below = Loop(), nn.Linear(5, 5)
    theirs = ak.FusedAccumulator(below)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for window in loop.windows():
        for x, y in window:
            loop.acc.backward(loop.loss(below(x), y))
            theirs.accumulate()
        loop.acc.step(loop.optimizer)
        theirs.step(optimizer)


MEANT = [
    generators_gradients_dropped,
    generators_gradients_filled_with_zeros,
    one_loss_counted_by_two,
    with_another_optimizer,
    with_a_step_of_another_accumulator,
    clipping_each_micro_batch,
    changing_gradients_after_clipping,
    means_of_as_many_losses,
    one_loss_divided_by_the_number_of_all,
    divisions_of_other_numbers,
    a_factor_in_a_batch_that_is_split_in_two,
    sums_over_their_own_number,
    dropped_once,
    closure_that_finalizes,
    scaler_that_unscales_means,
    backward_of_its_own,
    leftovers_dropped_by_zero,
    leftovers_filled_with_zeros,
]


@pytest.mark.parametrize("loop", MEANT, ids=lambda loop: loop.__name__)
def test_what_is_meant_is_left_alone(loop, caplog):
    """No error and no warning."""
    loop()
    assert caplog.records == []


def test_what_zero_grad_cannot_take_back_is_named(caplog):
    """With `release="backward"` a loss's own backward has added its gradients, as of adversarial samples."""
    loop = Loop(release="backward")
    for window in loop.windows():
        for x, y in window:
            loop.loss(x, y).backward()
            loop.model.zero_grad()
            loop.acc.backward(loop.loss(x, y))
        loop.acc.step(loop.optimizer)
    (record,) = caplog.records
    assert "zero_grad() in between cannot take them back" in record.getMessage()


def test_warnings_come_once(caplog):
    """In ten windows as in one."""
    loop = Loop()
    for window in loop.windows(10):
        for x, y in window:
            loop.acc.backward(loop.loss(x, y) / K)
        loop.acc.step(loop.optimizer)
    assert len(caplog.records) == 1


def test_gradients_of_another_accumulators_loss_are_an_error_once():
    """The micro-batch that was refused can be run again: without them, or with them if they are meant."""
    loop, generator = Loop(), nn.Linear(5, 5)
    theirs = ak.FusedAccumulator(generator)
    (x, y), (u, v) = loop.windows(1)[0][:2]
    theirs.backward(loop.loss(generator(x), y))
    left = loop.model[0].weight.grad.clone()
    with pytest.raises(RuntimeError, match=r"'0.weight' has a gradient of another loss.* that of 'weight', has left"):
        loop.acc.backward(loop.loss(x, y))
    assert torch.equal(loop.model[0].weight.grad, left)
    loop.acc.discard()
    loop.acc.backward(loop.loss(x, y))
    alone = loop.acc.main_grad(loop.model[0].weight).clone()
    theirs.backward(loop.loss(generator(u), v))
    left = loop.model[0].weight.grad.clone()
    loop.acc.backward(loop.loss(x, y))
    torch.testing.assert_close(loop.acc.main_grad(loop.model[0].weight), 2 * alone + left)


def test_after_an_error_the_window_goes_on():
    """The step that was refused can be done in the right way, and leaves what it should."""
    loop, twin = Loop(), Loop()
    (window,) = loop.windows(1)
    for each in (loop, twin):
        for x, y in window:
            each.acc.backward(each.loss(x, y))
    with pytest.raises(RuntimeError):
        loop.optimizer.step()
    with pytest.raises(RuntimeError):
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    for each in (loop, twin):
        each.acc.step(each.optimizer)
    assert all(map(torch.equal, loop.model.parameters(), twin.model.parameters()))


def test_removed_accumulators_say_nothing():
    """After remove(), a stock loop may go on with the same optimizer."""
    loop = Loop()
    x, y = loop.windows(1)[0][0]
    loop.acc.backward(loop.loss(x, y))
    loop.acc.remove()
    loop.loss(x, y).backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.optimizer.step()
