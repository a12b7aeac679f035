"""Corners between the accumulator, optimizers, the scaler and torch's global state, each once a silent mistake."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.buffers.flat import FlatBuffer
from accumkernels.window.end import End
from accumkernels.window.noise_scale import NoiseMeter
from tests.support.models import batch, mlp, relative_error

INF = float("inf")


def test_default_device_does_not_matter():
    """Tables for the host stay on the host whatever torch's default device is."""
    model = mlp()
    with torch.device("meta"):
        acc = ak.FusedAccumulator(model)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.1))


def test_built_in_inference_mode():
    """Buffers are ordinary tensors wherever they are made."""
    model = mlp()
    with torch.inference_mode():
        acc = ak.FusedAccumulator(model)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.1), max_norm=1.0)


def test_finalized_in_inference_mode():
    """Steps and the update come after it; GradScaler adds one optimizer's verdict into the other's, in place."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2:])]
    before = model[0].weight.detach().clone()
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    with torch.inference_mode():
        acc.finalize(*optimizers)
    acc.clip_grad_norm_(1e-9)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    acc.zero_()
    assert not acc.step_was_skipped
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [0, 1])
def test_two_accumulators_feed_one_optimizer(bad):
    """The worst verdict counts: an overflow in either skips the step and backs the scale off once."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accs = [ak.FusedAccumulator(model[0], scaler=scaler), ak.FusedAccumulator(model[2:], scaler=scaler)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(3)
    scaler.scale(mse_loss(model(x), y)).backward()
    (model[0] if bad == 0 else model[4]).weight.grad[0, 0] = INF
    for acc in accs:
        acc.accumulate()
    for acc in accs:
        acc.finalize(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_foreign_parameters_with_gradients_are_refused():
    """An optimizer's parameter outside the accumulator would be stepped scaled and summed: an error before anything."""
    model = mlp()
    acc = ak.FusedAccumulator(model[0], scaler=torch.amp.GradScaler("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(RuntimeError, match=r"parameter of shape \(7, 9\) with a .grad of its own"):
        acc.step(optimizer)


def test_a_frozen_parameter_that_was_replaced_is_named():
    """Identity is checked for frozen parameters too."""
    model = mlp()
    model[4].requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    model[4].weight = nn.Parameter(torch.zeros(3, 7))
    with pytest.raises(RuntimeError, match=r"'4.weight' was replaced"):
        acc.accumulate()


def test_a_changed_memory_format_is_drift():
    """Views of the buffer would no longer be strided like the parameter, and fused kernels index memory."""
    model = nn.Conv2d(3, 4, 3)
    acc = ak.FusedAccumulator(model)
    model.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match=r"'weight' was strided .* now \(AK05\)"):
        acc.accumulate()


def test_a_forgotten_update_costs_nothing():
    """finalize refuses before it divides, and works once scaler.update() was called."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu")
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    for _ in range(2):
        acc.backward(mse_loss(model(x), y))
        if acc.micro_batches and scaler._per_optimizer_states:
            with pytest.raises(RuntimeError, match=r"scaler.update\(\)"):
                acc.finalize(optimizer)
            scaler.update()
        acc.finalize(optimizer)
        scaler.step(optimizer)
        acc.zero_()


def test_step_hooks_see_the_averaged_gradient():
    """A pre-hook that clips or logs finds what finalize would hand out, also with fused optimizers, in grad mode."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, fused=True)
    seen = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append((torch.is_grad_enabled(), model[0].weight.grad.detach().clone()))
    )
    x, y = batch(3)
    expected = torch.autograd.grad(mse_loss(model(x), y), model[0].weight)[0]
    for _ in range(4):
        acc.backward(mse_loss(model(x), y), weight=8)
    acc.step(optimizer)
    enabled, grad = seen[0]
    assert enabled
    torch.testing.assert_close(grad, expected)


def test_an_exception_in_the_optimizer_leaves_averaged_gradients():
    """Whoever goes on by hand after a failed step finds what finalize promises."""

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError("no memory for state")

    Failing.__module__ = "torch.optim.sgd"  # folded like torch's own
    model = mlp()
    acc = ak.FusedAccumulator(model)
    x, y = batch(3)
    expected = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
    for _ in range(4):
        acc.backward(mse_loss(model(x), y), weight=8)
    with pytest.raises(MemoryError):
        acc.step(Failing(acc.parameters(), lr=0.1, fused=True))
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-6
    acc.zero_()


def test_control_c_before_a_fused_optimizer_divides(monkeypatch):
    """The window is saved as averaged, and is."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="microbatch", noise_scale=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=1.0, fused=True)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(3)
    expected = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
    for _ in range(4):
        acc.backward(mse_loss(model(x), y), weight=8)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(NoiseMeter, "end_window", interrupt)
        acc.step(optimizer)
    state = acc.state_dict()
    acc.zero_()
    acc.load_state_dict(state)
    acc.step(optimizer)
    moved = [old - p for old, p in zip(before, model.parameters(), strict=True)]
    assert relative_error(moved, expected) < 1e-6


def test_control_c_while_gradients_are_handed_out(monkeypatch):
    """Some parameters have their `.grad`, others not: no optimizer steps the former alone."""
    model = mlp()
    model[2].double()  # a buffer of its own
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    sum(p.double().square().sum() for p in model.parameters()).backward()
    acc.accumulate()
    given, expose = [], FlatBuffer.expose

    def interrupt(buffer):
        given.append(buffer)
        if len(given) == 2:
            raise KeyboardInterrupt
        return expose(buffer)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FlatBuffer, "expose", interrupt)
        acc.finalize(optimizer)
    assert any(p.grad is not None for p in model.parameters())
    for goes_on in (optimizer.step, lambda: acc.step(optimizer), lambda: acc.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"acc\.zero_\(\)"):
            goes_on()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    acc.zero_()
    assert all(p.grad is None for p in model.parameters())


def test_all_frozen():
    """Without trainable parameters windows are empty, in both forms, until something is unfrozen."""
    model = mlp().requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.finalize(optimizer)
    acc.zero_()
    acc.step(optimizer)
    with pytest.raises(RuntimeError, match="no parameter requires a gradient"):
        acc.accumulate()
    model.requires_grad_(True)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    assert not acc.step_was_skipped


def test_zero_weight_in_the_long_form_moves_nothing():
    """Without a scaler to skip the step, no .grad is handed out."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, weight_decay=1.0)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y), weight=0)
    acc.finalize(optimizer)
    optimizer.step()
    assert acc.step_was_skipped
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_unfreezing_inside_a_window():
    """The parameter counts from the next window on, and the message says so."""
    model = mlp()
    model[4].requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    model[4].requires_grad_(True)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(RuntimeError, match=r"unfrozen inside a window.*acc.discard\(\)"):
        acc.step(optimizer)
    acc.discard()
    acc.step(optimizer)


def test_unscale_of_another_models_optimizer_is_no_business_of_ours():
    """A discriminator with a stock loop may be unscaled, and not yet stepped, while the generator accumulates."""
    generator, discriminator = mlp(), mlp(seed=1)
    scaler = torch.amp.GradScaler("cpu")
    acc = ak.FusedAccumulator(generator, scaler=scaler)
    ours = torch.optim.SGD(acc.parameters(), lr=0.1)
    theirs = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    x, y = batch(3)
    scaler.scale(mse_loss(discriminator(x), y)).backward()
    scaler.unscale_(theirs)
    acc.backward(mse_loss(generator(x), y))
    acc.finalize(ours)
    scaler.step(theirs)
    scaler.step(ours)
    scaler.update()


def test_a_removed_accumulator_takes_nothing():
    """After remove() another accumulator has the parameters; the old one refuses to work."""
    model = mlp()
    old = ak.FusedAccumulator(model)
    old.remove()
    new = ak.FusedAccumulator(model)
    x, y = batch(3)
    for call in (old.accumulate, lambda: old.backward(mse_loss(model(x), y))):
        with pytest.raises(RuntimeError, match=r"after remove\(\)"):
            call()
    new.backward(mse_loss(model(x), y))


def test_zero_takes_back_what_the_scaler_was_told():
    """A dropped window's overflow does not back the scale off in the next."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    first, second = (torch.optim.SGD(acc.parameters(), lr=0.1) for _ in range(2))
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y) * INF)
    acc.finalize(first)
    acc.zero_()
    acc.backward(mse_loss(model(x), y))
    acc.step(second)
    assert scaler.get_scale() == 8.0


def test_a_16_bit_mean_overflows_in_both_forms():
    """Clipping does not hide that the mean itself rounds to infinity."""
    for form in ("step", "long"):
        p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        with ak.FusedAccumulator([p]) as acc:
            optimizer = torch.optim.SGD([p], lr=1.0)
            p.grad = torch.full_like(p, 60000.0)
            acc.accumulate(weight=2)
            if form == "step":
                acc.step(optimizer, max_norm=1.0, divisor=1.0)
            else:
                acc.finalize(optimizer, divisor=1.0)
                acc.clip_grad_norm_(1.0)
            assert acc.step_was_skipped


def test_grad_dtype_of_16_bit_parameters():
    """A parameter that wants its `.grad` in fp32 gets the sums unrounded; the others round."""
    model = mlp(torch.bfloat16)
    model[0].weight.grad_dtype = torch.float32
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, foreach=False)
    x, y = batch(3, torch.bfloat16)
    for _ in range(3):
        acc.backward(mse_loss(model(x), y))
    acc.finalize(optimizer)
    acc.clip_grad_norm_(1e-3)
    weight = model[0].weight
    assert weight.grad.dtype == torch.float32
    assert weight.grad.data_ptr() == acc.main_grad(weight).data_ptr()
    assert torch.equal(model[2].weight.grad, acc.main_grad(model[2].weight).bfloat16())


@pytest.mark.parametrize("weight", [1e-50, 1e300])
def test_weights_beyond_fp32_never_make_nan(weight):
    """A sum of weights that fp32 cannot hold skips the step."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y), weight=weight)
    acc.step(optimizer)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    with pytest.raises(ValueError, match="weight must be"):
        acc.accumulate(10**400)


def test_a_window_given_up_is_in_nobodys_way():
    """After remove() inside a window, a stock loop steps and clips what it has computed itself."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.remove()
    mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_fused_sgd_with_a_frozen_parameter_reads_nothing_back(monkeypatch):
    """Only momentum that this window would make is worth a synchronisation."""
    model = mlp()
    model[0].requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, momentum=0.9, fused=True)
    x, y = batch(3)
    asked, was_skipped = [], End.was_skipped
    monkeypatch.setattr(End, "was_skipped", lambda end: asked.append(end) or was_skipped(end))
    for _ in range(3):
        acc.backward(mse_loss(model(x), y))
        acc.step(optimizer)
    assert len(asked) == 1


def test_accumulate_without_gradients_warns_once(caplog):
    """acc.backward() and then acc.accumulate() halves the mean: say so."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.accumulate()
    acc.accumulate()
    assert caplog.text.count("accumulate() found no gradient") == 1


def test_no_reference_cycles_with_the_scaler():
    """With the cycle collector off, verdicts die with the window."""
    import gc
    import weakref

    model = mlp()
    scaler = torch.amp.GradScaler("cpu")
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    gc.disable()
    try:
        acc.backward(mse_loss(model(x), y))
        acc.finalize(optimizer)
        judged = weakref.ref(acc.engine.window.outcome.verdict.exact)
        scaler.step(optimizer)
        scaler.update()
        acc.zero_()
        acc.engine.ending.last = acc.engine.ending.last._replace(verdict=None)
        assert judged() is None
    finally:
        gc.enable()
    assert copy.deepcopy(model) is not None


@pytest.mark.parametrize("options", [{}, {"overflow": "microbatch"}], ids=str)
def test_gradients_of_zeros_without_memory(options):
    """Forward-mode derivatives leave them for parameters that the derivative does not depend on."""
    scale, shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    acc = ak.FusedAccumulator([scale, shift], **options)
    x = torch.arange(3.0)
    for loss in (
        lambda: (scale * (x + shift)).square().mean(),
        lambda: torch.func.jvp(lambda x: scale * (x + shift), (x,), (torch.ones(3),))[1].square().mean(),
    ):
        acc.backward(loss())
    acc.finalize()
    assert torch.equal(scale.grad, (2 / 3 * x.square() + 2 / 3) / 2)
    assert torch.equal(shift.grad, 2 / 3 * x / 2)
