"""acc.noise_scale(): unbiased estimates of |G|^2 and tr(Sigma), from windows with a known answer."""

import math

import pytest
import torch

import accumkernels as ak
from tests.support.backends import BACKENDS

SIZES = (40, 60)
MEAN = 0.3  # of every element's gradient
DEVIATION = torch.linspace(0.5, 3.0, sum(SIZES), dtype=torch.float64)  # of one sample's gradient, per element
TRACE = float((DEVIATION**2).sum())
GRAD_SQUARED_NORM = sum(SIZES) * MEAN**2


def build(**kwargs):
    """Parameters whose gradients the tests choose."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    acc = ak.FusedAccumulator(params, **kwargs)
    return acc, params, torch.optim.SGD(params, lr=0.0)


def accumulate(acc, params, gradient, weight):
    """One micro-batch whose loss has this gradient, fp64 `[sum(SIZES)]`."""
    acc.backward((torch.cat(params) * gradient.float()).sum(), weight)


def sample_mean(generator, count):
    """The mean gradient over `count` independent samples."""
    noise = torch.randn(sum(SIZES), generator=generator, dtype=torch.float64)
    return MEAN + DEVIATION * noise / math.sqrt(count)


@pytest.mark.parametrize("weights", [(4, 4), (1, 2, 5, 8), (3, 3, 3, 3, 3, 3, 3, 3)], ids=str)
@pytest.mark.parametrize("overflow", [None, "window", "microbatch"])
def test_known_covariance(weights, overflow):
    """Within 15 % after 300 windows, also of unequal micro-batches, scaled losses and windows that overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    acc, params, optimizer = build(noise_scale=True, overflow=overflow, scaler=scaler)
    generator = torch.Generator().manual_seed(0)
    for window in range(300):
        for weight in weights:
            accumulate(acc, params, sample_mean(generator, weight), weight)
        if overflow is not None and window % 10 == 0:
            accumulate(acc, params, torch.full((sum(SIZES),), math.inf, dtype=torch.float64), 5)
        acc.step(optimizer)
    noise = acc.noise_scale()
    assert noise.windows == (270 if overflow == "window" else 300)
    # 100 independent elements and 270 windows: the estimates' own deviation is 1 % for the trace, 3 % for |G|^2.
    assert noise.trace == pytest.approx(TRACE, rel=0.15)
    assert noise.grad_squared_norm == pytest.approx(GRAD_SQUARED_NORM, rel=0.15)
    assert float(noise) == pytest.approx(TRACE / GRAD_SQUARED_NORM, rel=0.15)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["step", "long"])
def test_formula(backend, form):
    """One window against the contract's formula in fp64, for every backend, with a norm clipped."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.zeros(n, device=backend.device)) for n in SIZES]
    acc = ak.FusedAccumulator(params, noise_scale=True, backend=backend.name)
    optimizer = torch.optim.SGD(params, lr=0.0)
    weights = torch.tensor([2.0, 0.0, 7.0, 1.0], dtype=torch.float64)  # a weight of zero does not count in K
    gradients = torch.stack([sample_mean(generator, 1).float().double() for _ in weights])
    for gradient, weight in zip(gradients, weights.tolist(), strict=True):
        acc.backward((torch.cat(params) * gradient.to(params[0])).sum(), weight)
    if form == "step":
        acc.step(optimizer, max_norm=0.1)
    else:
        acc.finalize(optimizer)
        acc.clip_grad_norm_(0.1)
        acc.zero_()
    total = weights.sum()
    mean = (weights[:, None] * gradients).sum(0) / total
    trace = ((weights * gradients.square().sum(1)).sum() - total * mean.square().sum()) / 2
    noise = acc.noise_scale()
    assert noise.windows == 1
    assert noise.trace == pytest.approx(trace.item(), rel=1e-5)  # the window's sum is fp32
    assert noise.grad_squared_norm == pytest.approx((mean.square().sum() - trace / total).item(), rel=1e-4)


def test_on_from_the_first_call():
    """Before, nothing is measured; the window in which it is turned on does not count; nan until one does."""
    acc, params, optimizer = build()
    generator = torch.Generator().manual_seed(2)

    def window(count):
        for _ in range(count):
            accumulate(acc, params, sample_mean(generator, 1), 1.0)
        acc.step(optimizer)

    window(2)
    accumulate(acc, params, sample_mean(generator, 1), 1.0)
    first = acc.noise_scale()
    assert math.isnan(float(first))
    assert math.isnan(first.trace)
    assert first.windows == 0
    assert "windows=0" in repr(first)
    window(1)
    assert acc.noise_scale().windows == 0
    window(2)
    assert acc.noise_scale().windows == 1
    window(1)  # a single micro-batch says nothing about variance
    assert acc.noise_scale().windows == 1
    assert first.windows == 0  # a snapshot
    acc.zero_()
    window(3)
    assert acc.noise_scale().windows == 2


@pytest.mark.parametrize("own", [False, True], ids=["in a hook", "after own buckets"])
def test_on_while_a_micro_batch_is_under_way(own):
    """Its window, which would lack a part of that micro-batch, does not count; the next one is right."""
    acc, params, optimizer = build(release="backward", bucket_bytes=4)
    generator = torch.Generator().manual_seed(5)
    for window in range(2):
        pair = [sample_mean(generator, 1) for _ in range(2)]
        for index, gradient in enumerate(pair):
            turns_on, x = not (window or index), torch.cat(params)
            if turns_on and not own:
                x.register_hook(lambda _: acc.noise_scale() and None)
            loss = (x * gradient.float()).sum()
            if own:
                loss.backward()
                assert turns_on is False or math.isnan(acc.noise_scale().trace)
                acc.accumulate()
            else:
                acc.backward(loss)
        acc.step(optimizer)
    assert acc.noise_scale().windows == 1
    assert acc.noise_scale().trace == pytest.approx(float((pair[0] - pair[1]).square().sum() / 2), rel=1e-5)


def test_half_life():
    """With a half-life of one window the mean is 2/3 the second window and 1/3 the first."""
    acc, params, optimizer = build(noise_scale=1)
    traces = []
    for seed in (3, 4):
        generator = torch.Generator().manual_seed(seed)
        pair = [sample_mean(generator, 1) for _ in range(2)]
        for gradient in pair:
            accumulate(acc, params, gradient, 1.0)
        acc.step(optimizer)
        traces.append(float((pair[0] - pair[1]).square().sum() / 2))
    assert acc.noise_scale().trace == pytest.approx((traces[0] + 2 * traces[1]) / 3, rel=1e-5)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_a_wrong_half_life(value):
    """Names the value and what is accepted."""
    with pytest.raises(ValueError, match="noise_scale must be True, False or a positive half-life"):
        build(noise_scale=value)


def test_a_half_life_that_is_no_number():
    """A string is no half-life."""
    with pytest.raises(TypeError, match="noise_scale must be a bool or a number of windows, got '"):
        build(noise_scale="yes")
