"""What an overflow does in each mode, against fp64 models of the contract."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import accumkernels as ak
from accumkernels.window.micro_batch import _over
from tests.support.models import batch, mlp

BACKENDS = ["native", "reference", "triton"]
INF = float("inf")


def window(acc, params, grads, weights):
    """Accumulate given gradients (None: the parameter gets none)."""
    for micro_batch, weight in zip(grads, weights, strict=True):
        for p, g in zip(params, micro_batch, strict=True):
            p.grad = None if g is None else g.to(p.dtype).clone()
        acc.accumulate(weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 1], [1, 2], [0, 2]], ids=str)
def test_bad_micro_batches_leave_neither_gradient_nor_weight(backend, bad):
    """overflow="microbatch": the window is the weighted mean of the good micro-batches; the buffers hold stale NaN."""
    p = nn.Parameter(torch.zeros(70))
    acc = ak.FusedAccumulator([p], overflow="microbatch", backend=backend)
    optimizer = torch.optim.SGD([p], lr=1.0)
    acc.flat_buffers[0].fill_(math.nan)
    weights = [1.0, 2.0, 4.0]
    grads = [torch.randn(70) for _ in weights]
    expected = sum(w * g.double() for i, (w, g) in enumerate(zip(weights, grads, strict=True)) if i not in bad)
    total = sum(w for i, w in enumerate(weights) if i not in bad)
    for i in bad:
        grads[i][-1] = INF
    window(acc, [p], [[g] for g in grads], weights)
    assert acc.micro_batches == 3
    assert acc.weight.item() == total
    assert acc.found_inf.item() == 1.0
    acc.finalize(optimizer)
    torch.testing.assert_close(p.grad.double(), expected / total, rtol=1e-5, atol=1e-6)
    optimizer.step()
    acc.zero_()
    torch.testing.assert_close(p.detach().double(), -expected / total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["step", "long"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("all_bad", [False, True])
def test_microbatch_mode_steps_and_backs_off_once(form, fused, all_bad):
    """The step happens unless every micro-batch was bad; the scale backs off once either way."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    acc = ak.FusedAccumulator(model, scaler=scaler, overflow="microbatch")
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, fused=fused)
    for factor in (INF, INF if all_bad else 1.0, INF):
        acc.backward(mse_loss(model(x), y) * factor)
    if form == "step":
        acc.step(optimizer, max_norm=1.0)
    else:
        acc.finalize(optimizer)
        acc.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        acc.zero_()
    assert acc.step_was_skipped == all_bad
    assert scaler.get_scale() == 32.0
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert all(moved) != all_bad
    assert any(moved) != all_bad
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_first_touch_stores_zeros(backend):
    """A parameter reached only by dropped micro-batches has a zero .grad, not the last window's sum."""
    a, b = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(40))
    acc = ak.FusedAccumulator([a, b], overflow="microbatch", backend=backend)
    optimizer = torch.optim.SGD([a, b], lr=0.0)
    window(acc, [a, b], [[torch.ones(40), torch.ones(40)]], [1])
    acc.step(optimizer)
    window(acc, [a, b], [[torch.full((40,), INF), torch.ones(40)], [None, torch.ones(40)]], [1, 1])
    acc.finalize(optimizer)
    assert torch.equal(a.grad, torch.zeros(40))
    assert torch.equal(b.grad, torch.ones(40))


def test_a_sum_that_overflows_skips_in_microbatch_mode_too():
    """Finite gradients whose fp32 sum is infinite cannot be dropped any more: the step is skipped."""
    p = nn.Parameter(torch.zeros(3))
    acc = ak.FusedAccumulator([p], overflow="microbatch")
    optimizer = torch.optim.SGD([p], lr=1.0)
    window(acc, [p], [[torch.full((3,), 3e38)], [torch.full((3,), 3e38)]], [1, 1])
    acc.step(optimizer)
    assert acc.step_was_skipped
    assert torch.equal(p, torch.zeros(3))


def test_raise_names_the_parameters_and_keeps_the_window():
    """overflow="raise": the window is as it was, the bad .grads are dropped, and training goes on."""
    model = mlp()
    x, y = batch(4)
    acc = ak.FusedAccumulator(model, overflow="raise")
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x[:2]), y[:2]))
    mse_loss(model(x), y).backward()
    model[2].weight.grad[0, 0] = INF
    model[4].bias.grad[-1] = math.nan
    with pytest.raises(FloatingPointError, match=r"2\.weight, 4\.bias$"):
        acc.accumulate()
    assert all(p.grad is None for p in model.parameters())
    assert (acc.micro_batches, acc.weight.item()) == (1, 1.0)
    acc.backward(mse_loss(model(x[2:]), y[2:]))
    acc.finalize(optimizer)
    twin = copy.deepcopy(model)
    mse_loss(twin(x), y).backward()
    torch.testing.assert_close(model[2].weight.grad, twin[2].weight.grad)


def test_none_checks_nothing():
    """overflow=None: found_inf stays 0 and the step is taken, as torch without a scaler does."""
    p = nn.Parameter(torch.zeros(3))
    acc = ak.FusedAccumulator([p], overflow=None)
    optimizer = torch.optim.SGD([p], lr=1.0)
    window(acc, [p], [[torch.tensor([1.0, INF, 1.0])]], [1])
    assert acc.found_inf.item() == 0.0
    acc.step(optimizer)
    assert not acc.step_was_skipped
    assert p.tolist() == [-1.0, -INF, -1.0]


@pytest.mark.parametrize("overflow", ["window", "microbatch"])
def test_a_micro_batch_of_weight_zero(overflow):
    """It touches its parameters and its overflow counts, but it adds nothing."""
    p = nn.Parameter(torch.zeros(3))
    acc = ak.FusedAccumulator([p], overflow=overflow)
    optimizer = torch.optim.SGD([p], lr=1.0)
    window(acc, [p], [[torch.ones(3)], [torch.full((3,), 5.0)]], [1, 0])
    assert acc.found_inf.item() == 0
    window(acc, [p], [[torch.full((3,), INF)]], [0])
    assert acc.found_inf.item() == 1
    acc.step(optimizer)
    assert acc.step_was_skipped == (overflow == "window")
    assert p.tolist() == ([0.0] * 3 if overflow == "window" else [-1.0] * 3)


def test_the_report_is_of_the_last_bad_micro_batch():
    """overflow_report names who overflowed last, also after later good micro-batches and windows."""
    model = mlp()
    acc = ak.FusedAccumulator(model, overflow="microbatch")
    assert acc.overflow_report() == []
    params = list(model.parameters())
    for bad in (0, 3, None):
        grads = [torch.full_like(p, INF if i == bad else 1.0) for i, p in enumerate(params)]
        window(acc, params, [grads], [1])
    assert acc.overflow_report() == ["2.bias"]
    acc.zero_()
    assert acc.overflow_report() == ["2.bias"]


NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0, -7.0, INF, -INF, math.nan])


@settings(max_examples=150, deadline=None)
@given(
    grads=st.lists(
        st.tuples(st.lists(st.none() | st.lists(NUMBERS, min_size=3, max_size=3), min_size=2, max_size=2),
                  st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([1.0, 8.0, 1024.0])),
        max_size=5,
    ),
    overflow=st.sampled_from(["window", "microbatch"]),
    stale=st.booleans(),
)  # fmt: skip
def test_any_window_follows_the_contract(grads, overflow, stale):
    """Random gradients, gaps, weights, scale changes and overflows against a plain Python model of the contract."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6)
    scaler.scale(torch.zeros(()))
    with ak.FusedAccumulator(params, scaler=scaler, overflow=overflow) as acc:
        if stale:
            acc.flat_buffers[0].fill_(math.nan)
        sums: list[list[float] | None] = [None, None]
        total, bad_any = 0.0, False
        for micro_batch, weight, scale in grads:
            scaler.update(scale)
            for p, g in zip(params, micro_batch, strict=True):
                p.grad = None if g is None else torch.tensor(g) * scale
            acc.accumulate(weight)
            if micro_batch == [None, None]:
                continue  # counts nothing
            bad = any(not math.isfinite(v) for g in micro_batch if g is not None for v in g)
            bad_any |= bad
            used = not (bad and overflow == "microbatch")
            total += weight * used
            for i, g in enumerate(micro_batch):
                if g is not None:
                    sums[i] = [s + (weight * v if used else 0.0) for s, v in zip(sums[i] or [0.0] * 3, g, strict=True)]
        optimizer = torch.optim.SGD(params, lr=1.0)
        scale = scaler.get_scale()
        if grads and sums == [None, None]:
            with pytest.raises(RuntimeError, match="no gradient was found"):
                acc.step(optimizer)
            return
        acc.step(optimizer)
        skipped = total == 0 or (overflow == "window" and bad_any)
        assert acc.step_was_skipped == skipped
        assert scaler.get_scale() == (scale / 2 if bad_any else scale)
        for p, s in zip(params, sums, strict=True):
            expected = torch.zeros(3) if s is None or skipped else -torch.tensor(s, dtype=torch.float64) / total
            torch.testing.assert_close(p.detach().double(), expected.double(), rtol=1e-6, atol=0)


class NoReads(TorchDispatchMode):
    """Refuses every op that makes the host wait for a tensor's value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Raise for the ops behind item() and bool()."""
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError(f"{func} reads a value back")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("overflow", [None, "window", "microbatch"])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("scaled", [False, True])
def test_no_value_is_read_back(overflow, backend, scaled):
    """backward, accumulate and a fused optimizer's step never wait for a value."""
    model = mlp()
    x, y = batch(3)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    acc = ak.FusedAccumulator(model, scaler=scaler, overflow=overflow, backend=backend)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with NoReads():
            acc.backward(mse_loss(model(x), y))
            acc.backward(mse_loss(model(x), y), weight=3)
            acc.step(optimizer, max_norm=1.0)


@pytest.mark.parametrize("overflow", [None, "window", "microbatch"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"release": "backward", "bucket_bytes": 1},
        {"release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": True},
        {"fuse_weight_gradients": True},
        {"noise_scale": True},
    ],
    ids=str,
)
def test_no_value_is_read_back_with_options(options, casts, scaled, overflow):
    """Nor where gradients are taken from the graph, by products or in 16 bits, and in the loop's own backwards."""
    if overflow == "microbatch":
        options = {name: value for name, value in options.items() if name not in ("release", "bucket_bytes")}
    model = mlp()
    x, y = batch(3)
    x.requires_grad_()
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    acc = ak.FusedAccumulator(model, scaler=scaler, overflow=overflow, **options)

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            return mse_loss(model(x).float(), y)

    with NoReads():
        acc.backward(loss())
        acc.backward(loss(), weight=3.0)
        (loss() if scaler is None else scaler.scale(loss())).backward()
        acc.accumulate()


def test_the_loss_scale_stays_on_its_device():
    """In what products are multiplied by: comparing a scale there with zero would wait for it."""
    with FakeTensorMode():
        scale = torch.full((), 8.0, device="cuda")
        for weight in (2.0, torch.full((), 2.0, device="cuda", dtype=torch.float64)):
            assert _over(weight, scale).device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("overflow", [None, "window", "microbatch"])
def test_no_synchronisation_on_a_gpu(overflow):
    """A whole window, device weight and fused step included, passes torch's sync debug mode."""
    model = mlp().cuda()
    x, y = (t.cuda() for t in batch(3))
    scaler = torch.amp.GradScaler("cuda")
    acc = ak.FusedAccumulator(model, scaler=scaler, overflow=overflow)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, fused=True)
    weight = torch.tensor(2.0, device="cuda")
    for i in range(3):
        torch.cuda.set_sync_debug_mode("error" if i else "default")  # the first window builds kernels and state
        try:
            acc.backward(mse_loss(model(x), y), weight=weight)
            acc.backward(mse_loss(model(x), y))
            acc.step(optimizer, max_norm=1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not acc.step_was_skipped


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("why", ["nan", "weight 0"])
def test_windows_that_never_step_are_named(caplog, scaled, why):
    """A loss can be finite though its gradients are not; stock shows it in the weights. A step ends the count."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if scaled else None
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)

    def window(bad):
        out = model(torch.ones(4, 5)).mean()
        loss = (out * 0).sqrt() if bad and why == "nan" else out
        acc.backward(loss, weight=0.0 if bad and why == "weight 0" else 1.0)
        acc.step(optimizer)

    for windows in (49, 20, 50, 100):
        window(False)
        for _ in range(windows):
            window(True)
        assert acc.step_was_skipped
    window(False)
    (said, _) = [r.getMessage() for r in caplog.records if "took no step" in r.getMessage()]
    assert said.startswith("accumkernels: 50 windows in a row took no step, so that nothing is trained")


def test_a_window_without_micro_batches_is_not_counted(caplog):
    """It has nothing to step by, as when another network has its turn."""
    acc = ak.FusedAccumulator(mlp())
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for _ in range(60):
        acc.step(optimizer)
    assert not caplog.records
