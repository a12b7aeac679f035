"""The window of FusedAccumulator: weighted means against the big batch, first touch, unused and tied parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, big_batch_grads, mlp, relative_error

BACKENDS = ["native", "reference", "triton"]
# Relative L2 error of a mean of a few gradients: fp32 has 2**-24 per rounding, and a handful of roundings.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def grads_of(acc: ak.FusedAccumulator) -> list[torch.Tensor]:
    """What the optimizer will see."""
    return [p.grad for p in acc.parameters()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [[6], [3, 3], [1, 4, 2], [7, 1, 1, 5]], ids=str)
def test_weighted_mean_is_the_big_batch(backend, dtype, sizes):
    """Unequal micro-batches weighted by their sizes give the gradient of one batch that holds them all."""
    model = mlp(dtype)
    x, y = batch(sum(sizes), dtype)
    acc = ak.FusedAccumulator(model, backend=backend)
    for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
        acc.backward(mse_loss(model(xs), ys), weight=len(xs))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < TOLERANCE[dtype]
    assert acc.weight.item() == sum(sizes)
    assert acc.micro_batches == len(sizes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_weight_is_the_mean_over_micro_batches(backend):
    """With weight 1 a window of any length, a short last one too, is the mean of its micro-batch gradients."""
    model = mlp()
    x, y = batch(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    acc = ak.FusedAccumulator(model, backend=backend)
    for window in ([0, 1, 2], [3]):
        expected = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for i in window:
            rows = slice(3 * i, 3 * i + 3)
            for total, g in zip(expected, big_batch_grads(model, x[rows], y[rows]), strict=True):
                total += g / len(window)
            acc.backward(mse_loss(model(x[rows]), y[rows]))
        acc.finalize(optimizer)
        assert relative_error(grads_of(acc), expected) < TOLERANCE[torch.float32]
        optimizer.step()
        acc.zero_()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.05, 100.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_step_trains_like_the_big_batch(optimizer_class, fused, max_norm, scaled):
    """Five windows of step() leave the parameters that five big-batch steps of stock torch leave."""
    model = mlp()
    twin = copy.deepcopy(model)
    x, y = batch(13)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    acc = ak.FusedAccumulator(model, scaler=scaler)
    kwargs = {"lr": 0.05, "fused": fused} | ({"momentum": 0.9} if optimizer_class is torch.optim.SGD else {})
    optimizer, stock = optimizer_class(acc.parameters(), **kwargs), optimizer_class(twin.parameters(), **kwargs)
    for _ in range(5):
        for xs, ys in zip(x.split([4, 1, 8]), y.split([4, 1, 8]), strict=True):
            acc.backward(mse_loss(model(xs), ys), weight=len(xs))
        norm = acc.step(optimizer, max_norm=max_norm)
        mse_loss(twin(x), y).backward()
        if max_norm is None:
            assert norm is None
        else:
            expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        stock.step()
        stock.zero_grad()
        assert not acc.step_was_skipped
        assert all(p.grad is None for p in model.parameters())
    # The gradients agree to 1e-6; Adam's division by sqrt(v) may enlarge that where a gradient is near zero.
    assert relative_error(list(model.parameters()), list(twin.parameters())) < 1e-4


def test_long_form_equals_step():
    """finalize, clip, scaler.step, update, zero_ do what step does."""
    models = [mlp(), mlp()]
    x, y = batch(9)
    for form, model in zip(("step", "long"), models, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        acc = ak.FusedAccumulator(model, scaler=scaler)
        optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01)
        for _ in range(4):
            for rows in (slice(0, 2), slice(2, 9)):
                scaler.scale(mse_loss(model(x[rows]), y[rows])).backward()
                acc.accumulate(weight=rows.stop - rows.start)
            if form == "step":
                acc.step(optimizer, max_norm=0.1)
            else:
                acc.finalize(optimizer)
                acc.clip_grad_norm_(0.1)
                scaler.step(optimizer)
                scaler.update()
                acc.zero_()
    assert relative_error(list(models[0].parameters()), list(models[1].parameters())) < 1e-6


class TwoHeads(nn.Module):
    """Only one of two heads is used in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, head):
        """Use the head of that name."""
        return getattr(self, head)(self.body(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_parameters_keep_no_grad(backend):
    """A parameter without gradient in the window has .grad None, and weight decay and momentum leave it alone."""
    torch.manual_seed(0)
    model = TwoHeads()
    x, y = batch(4)
    acc = ak.FusedAccumulator(model, backend=backend)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, weight_decay=0.5)
    for head in ("a", "b", "a"):
        idle = model.b if head == "a" else model.a
        before = idle.weight.detach().clone()
        acc.backward(mse_loss(model(x, head), y))
        acc.backward(mse_loss(model(x, head), y))
        acc.finalize(optimizer)
        assert idle.weight.grad is None
        assert model.body.weight.grad is not None
        optimizer.step()
        acc.zero_()
        assert torch.equal(idle.weight, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_touch_after_an_idle_window_leaves_no_stale_sum(backend):
    """After a window of rest a head starts its next from nothing, also when first touched by a second micro-batch."""
    torch.manual_seed(0)
    model = TwoHeads()
    x, y = batch(4)
    acc = ak.FusedAccumulator(model, backend=backend)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    for heads in (["a", "b"], ["a", "a"], ["a", "b"]):
        for head in heads:
            acc.backward(mse_loss(model(x, head), y))
        acc.finalize(optimizer)
        twin = copy.deepcopy(model).double()
        for p in twin.parameters():
            p.grad = None
        for head in heads:
            (mse_loss(twin(x.double(), head), y.double()) / len(heads)).backward()
        expected = [p.grad for p in twin.parameters() if p.grad is not None]
        assert relative_error([p.grad for p in model.parameters() if p.grad is not None], expected) < 1e-6
        acc.zero_()


def test_tied_parameters_are_summed_once():
    """A weight used by two layers is one segment, and its gradient the sum over both uses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    model[1].weight = model[0].weight
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    acc.backward(mse_loss(model(x[:2]), y[:2]), weight=2)
    acc.backward(mse_loss(model(x[2:]), y[2:]), weight=4)
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6


def test_two_backwards_before_one_accumulate_are_one_micro_batch():
    """Two losses of one micro-batch add up, as in torch; micro-batches are counted by accumulate calls."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    mse_loss(model(x[:3]), y[:3]).backward()
    mse_loss(model(x[3:]), y[3:]).backward()
    acc.accumulate()
    assert acc.micro_batches == 1
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), [2 * g for g in big_batch_grads(model, x, y)]) < 1e-6


def test_backward_passes_keywords_on():
    """retain_graph and inputs reach Tensor.backward."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    loss = mse_loss(model(x), y)
    acc.backward(loss, retain_graph=True)
    acc.backward(loss, inputs=[model[0].weight])
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    full = big_batch_grads(model, x, y)
    assert relative_error([model[0].weight.grad], [full[0]]) < 1e-6
    assert relative_error([model[4].bias.grad], [full[5] / 2]) < 1e-6


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("moment", ["start", "between", "end"])
def test_zero_grad_of_the_optimizer_breaks_nothing(set_to_none, moment):
    """optimizer.zero_grad() before, between and after micro-batches leaves the window as it is."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for _ in range(2):
        if moment == "start":
            optimizer.zero_grad(set_to_none=set_to_none)
        for rows in (slice(0, 3), slice(3, 6)):
            acc.backward(mse_loss(model(x[rows]), y[rows]))
            if moment == "between":
                optimizer.zero_grad(set_to_none=set_to_none)
        acc.finalize(optimizer)
        assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6
        optimizer.step()
        if moment == "end":
            optimizer.zero_grad(set_to_none=set_to_none)
        acc.zero_()


def test_discard_after_an_exception_in_backward():
    """A micro-batch that failed in backward is dropped, and the window is as it was before it."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    acc.backward(mse_loss(model(x[:3]), y[:3]))

    def fail(grad):
        raise torch.OutOfMemoryError("no memory left")

    out = model(x)
    handle = model[0].weight.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        acc.backward(mse_loss(out, y))
    handle.remove()
    acc.discard()
    acc.backward(mse_loss(model(x[3:]), y[3:]))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6


def test_weight_given_as_tensor_and_divisor():
    """0-d tensors serve as weight and divisor; divisor replaces the sum of weights (sum-reduced losses)."""
    model = mlp()
    x, y = batch(7)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for rows in (slice(0, 2), slice(2, 7)):
        acc.backward(mse_loss(model(x[rows]), y[rows], reduction="sum"), weight=torch.tensor(1))
    acc.finalize(optimizer, divisor=torch.tensor(float(y.numel())))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6


@pytest.mark.parametrize("make", [
    lambda: mlp().to(memory_format=torch.contiguous_format),
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last),
    lambda: nn.ParameterList([nn.Parameter(torch.randn(4, 6).t()), nn.Parameter(torch.randn(3, 8)[:, ::2])]),
], ids=["contiguous", "channels_last", "transposed and sliced"])  # fmt: skip
def test_main_grad_is_strided_like_the_parameter(make):
    """Views of the buffer have the parameter's shape and order of dimensions; their elements are not permuted."""
    model = make()
    acc = ak.FusedAccumulator(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p, memory_format=torch.contiguous_format)
    expected = [p.grad.clone() for p in model.parameters()]
    acc.accumulate()
    for p, e in zip(model.parameters(), expected, strict=True):
        assert acc.main_grad(p).stride() == torch.empty_like(p).stride()
        assert torch.equal(acc.main_grad(p), e)


def test_unfrozen_parameters_join_between_windows():
    """A frozen parameter takes no buffer until it is unfrozen; views handed out before stay where they are."""
    model = mlp()
    model[4].requires_grad_(False)
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    assert sum(b.numel() for b in acc.flat_buffers) < 200
    pointer = acc.main_grad(model[0].weight).data_ptr()
    with pytest.raises(ValueError, match="trainable"):
        acc.main_grad(model[4].weight)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    model[4].requires_grad_(True)
    acc.backward(mse_loss(model(x), y))
    acc.finalize(optimizer)
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6
    assert acc.main_grad(model[0].weight).data_ptr() == pointer
    assert len(acc.flat_buffers) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_get_gradients_rounded_once(dtype):
    """The sum is kept in fp32; .grad is its mean rounded to the parameter's dtype."""
    p = nn.Parameter(torch.zeros(5, dtype=dtype))
    acc = ak.FusedAccumulator([p])
    grads = [torch.randn(5).to(dtype) for _ in range(9)]
    for g in grads:
        p.grad = g.clone()
        acc.accumulate()
    acc.finalize(torch.optim.SGD([p], lr=0.1))
    assert torch.equal(p.grad, (torch.stack(grads).float().sum(0) / 9).to(dtype))
    norm = acc.clip_grad_norm_(0.5)
    mean = torch.stack(grads).double().mean(0)
    torch.testing.assert_close(norm.double(), mean.norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(p.grad, (mean * 0.5 / (mean.norm() + 1e-6)).to(dtype), rtol=0.01, atol=0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clip_grad_norm_is_torchs(norm_type):
    """Norm before clipping and clipped gradients equal torch.nn.utils.clip_grad_norm_'s."""
    model = mlp()
    twin = copy.deepcopy(model)
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    acc.backward(mse_loss(model(x), y))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    mse_loss(twin(x), y).backward()
    norm = acc.clip_grad_norm_(0.01, norm_type)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert relative_error(grads_of(acc), [p.grad for p in twin.parameters()]) < 1e-6


def test_several_optimizers_over_one_accumulator():
    """Optimizers named together are stepped each by themselves."""
    model = mlp()
    twin = copy.deepcopy(model)
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2, 4)]
    acc.backward(mse_loss(model(x), y))
    acc.finalize(*optimizers)
    for optimizer in optimizers:
        optimizer.step()
    acc.zero_()
    mse_loss(twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert relative_error(list(model.parameters()), list(twin.parameters())) < 1e-6


def test_empty_window_is_a_no_op():
    """A step without micro-batches changes neither parameters nor scale, and says that it skipped."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, weight_decay=1.0)
    assert acc.step(optimizer) is None
    assert acc.step(optimizer, max_norm=1.0).item() == 0
    assert acc.step_was_skipped
    assert scaler.get_scale() == 8.0
    acc.finalize(optimizer)
    scaler.step(optimizer)
    scaler.update()
    acc.zero_()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [None, "window"])
def test_zero_total_weight_is_a_no_op(fused, overflow):
    """A window whose weights sum to zero moves nothing: not the parameters, the scale or the growth tracker."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(6)
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)):
        with ak.FusedAccumulator(model, scaler=scaler, overflow=overflow) as acc:
            optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, weight_decay=1.0, fused=fused)
            acc.backward(mse_loss(model(x), y), weight=0)
            acc.step(optimizer)
            assert acc.step_was_skipped
            assert scaler is None or scaler.get_scale() == 8.0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_buffers_and_names_of_every_kind_of_params():
    """Modules, parameters, (name, parameter) pairs and param groups all serve; names are as documented."""
    model = mlp()
    groups = [{"params": list(model[0].parameters())}, {"params": [model[2].weight, model[2].bias], "lr": 0.1}]
    for params, name in (
        (model, "0.weight"),
        (list(model.parameters()), "param0"),
        (model.parameters(), "param0"),
        (model.named_parameters(), "0.weight"),
        (groups, "group0.param0"),
        (torch.compile(model), "0.weight"),
    ):
        with ak.FusedAccumulator(params) as acc:
            p = next(acc.parameters())
            assert p is model[0].weight
            p.grad = torch.full_like(p, float("inf"))
            acc.accumulate()
            assert acc.overflow_report() == [name]
            acc.zero_()


def test_a_dropped_accumulator_frees_its_parameters():
    """Without references an accumulator is gone at once, and another may take its place."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    del acc
    ak.FusedAccumulator(model)


def test_repr_and_logging_tell_where_it_stands(caplog):
    """repr names parameters, bytes, backend, position and norm; buffers are logged, nothing is printed."""
    caplog.set_level("DEBUG", logger="accumkernels")
    model = mlp()
    acc = ak.FusedAccumulator(model, backend="reference")
    x, y = batch(3)
    assert "flat buffer of 6 segments, 148 elements, torch.float32 on cpu" in caplog.text
    assert "6 parameters, 6 trainable, " in repr(acc)
    assert "backend reference on cpu" in repr(acc)
    assert "last norm none yet" in repr(acc)
    acc.backward(mse_loss(model(x), y))
    assert "1 micro-batches into the window" in repr(acc)
    norm = acc.step(torch.optim.SGD(acc.parameters(), lr=0.1), max_norm=1.0)
    assert f"last norm {norm.item():.6g}" in repr(acc)
