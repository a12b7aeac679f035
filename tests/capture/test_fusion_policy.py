"""When weights are fused, what an overflow in them does, and that nothing else about a window changes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.capture.fused import gemm
from accumkernels.capture.fused.functions import SlotWeight
from tests.support.backends import same_bits
from tests.support.made import weight_gradients
from tests.support.models import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

LARGE = 512  # a weight of LARGE * LARGE elements is fused by default
INF = float("inf")


def net(width=LARGE, dtype=torch.float32):
    """A large embedding, a large linear layer and a small one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(width + 1, width), nn.Linear(width, width), nn.Linear(width, 3)).to(dtype)


def loss_of(model, factor=1.0, autocast=None):
    """A scalar that `factor` multiplies, so that gradients are as large as it."""
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        return (model(torch.tensor([[1, 2, 2, 5]])).float() * factor).sum()


def fused(acc):
    """How many elements are, by its repr."""
    return int(repr(acc).partition("elements: ")[2].partition(" fused")[0].replace(",", ""))


EMBEDDING, LINEAR, SMALL = (LARGE + 1) * LARGE, LARGE * LARGE, 3 * LARGE
RULES = [  # options, elements that are fused in the second micro-batch
    ({}, EMBEDDING + LINEAR),  # two large weights are more than the default's bucket
    ({"bucket_bytes": 2**22}, 0),  # whole micro-batches: a model below a bucket's size is as it always was
    ({"release": "auto", "bucket_bytes": 1000}, EMBEDDING + LINEAR),
    ({"release": "backward"}, EMBEDDING + LINEAR),
    ({"release": "microbatch"}, 0),
    ({"release": "microbatch", "fuse_weight_gradients": True}, EMBEDDING + LINEAR + SMALL),
    ({"release": "backward", "fuse_weight_gradients": True}, EMBEDDING + LINEAR + SMALL),
    ({"release": "backward", "fuse_weight_gradients": False}, 0),
    ({"release": "backward", "overflow": None}, EMBEDDING + LINEAR),
    ({"fuse_weight_gradients": True, "overflow": "microbatch", "release": "microbatch"}, 0),
    ({"fuse_weight_gradients": True, "overflow": "raise", "release": "microbatch"}, 0),
    ({"fuse_weight_gradients": True, "noise_scale": True, "release": "microbatch"}, 0),
    ({"release": "backward", "scaler": 2.0**3}, EMBEDDING),
    ({"release": "backward", "scaler": 2.0**3, "fuse_weight_gradients": True}, EMBEDDING + LINEAR + SMALL),
]


@pytest.mark.parametrize(("options", "elements"), RULES, ids=str)
def test_what_is_fused(options, elements):
    """By default large weights, where gradients are added while backward runs, and no GradScaler decides."""
    options = dict(options)
    if "scaler" in options:
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=options["scaler"])
    model = net()
    acc = ak.FusedAccumulator(model, **options)
    acc.backward(loss_of(model), weight=2)
    loss = loss_of(model)
    made = weight_gradients(model, lambda: acc.backward(loss, weight=2))
    sizes = {"0.weight": EMBEDDING, "1.weight": LINEAR, "2.weight": SMALL}
    assert sum(sizes.values()) - sum(sizes[name] for name in made) == elements == fused(acc)
    twin = copy.deepcopy(model).double()
    loss_of(twin).backward()
    found = [acc.main_grad(p) / acc.weight for p in model.parameters()]
    assert relative_error(found, [p.grad for p in twin.parameters()]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("demand", [False, True])
def test_dtypes(dtype, demand):
    """By default linear weights of bf16 and fp32; fp16 and fp64 only on demand. Embeddings of every dtype."""
    model = net(dtype=dtype)
    acc = ak.FusedAccumulator(model, release="backward", fuse_weight_gradients=demand or "auto")
    acc.backward(loss_of(model, 2**-6))
    linear = LINEAR if demand or dtype == torch.bfloat16 else 0
    assert fused(acc) == EMBEDDING + linear + (SMALL if demand else 0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("amx", "fits"), [(True, True), (True, False), (False, True)])
def test_sums_that_stay_in_a_cache(monkeypatch, amx, fits, autocast):
    """With AMX, bf16 gradients of linear weights are made and added then; not embeddings', fp32, nor on demand."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    options = {"release": "backward", "autocast_route": True}
    param_dtype, cast = (torch.float32, torch.bfloat16) if autocast else (torch.bfloat16, None)
    model = net(dtype=param_dtype)
    nbytes = sum(b.nbytes for b in ak.FusedAccumulator(net(dtype=param_dtype)).flat_buffers)
    monkeypatch.setattr(gemm, "last_level_cache", lambda: 4 * nbytes - (0 if fits else 4))
    with ak.FusedAccumulator(model, **options) as acc:
        slots = []
        model[1].register_forward_pre_hook(lambda module, _: slots.append(type(module._parameters["weight"])))
        for _ in range(3):  # the route learns in the first
            acc.backward(loss_of(model, autocast=cast))
        assert fused(acc) == EMBEDDING + (0 if amx and fits else LINEAR)
        assert (slots[-1] is SlotWeight) == (not (amx and fits))  # what is not to be fused is left alone
    model = net()
    with ak.FusedAccumulator(model, **options) as acc:
        acc.backward(loss_of(model))
        assert fused(acc) == EMBEDDING + LINEAR
    model = net(dtype=torch.bfloat16)
    with ak.FusedAccumulator(model, fuse_weight_gradients=True, **options) as acc:
        acc.backward(loss_of(model))
        assert fused(acc) == EMBEDDING + LINEAR + SMALL


def test_noise_scale_later():
    """From the window on in which it is measured, micro-batches have gradients of their own."""
    model = net(8)
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True, release="microbatch")
    acc.noise_scale()
    loss = loss_of(model)
    assert len(weight_gradients(model, lambda: acc.backward(loss))) == 3


@pytest.mark.parametrize("scale", [2.0**4, 3.0])
@pytest.mark.parametrize("changes", [False, True])
def test_weights_and_loss_scales(scale, changes):
    """Fused sums are in the unit of all others, also when the scale changes inside the window."""
    model = net(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    acc = ak.FusedAccumulator(model, scaler=scaler, fuse_weight_gradients=True)
    twin = copy.deepcopy(model).double()
    expected = [torch.zeros_like(p) for p in twin.parameters()]
    for step, weight in enumerate((3.0, 0.25, torch.tensor(5.0))):
        acc.backward(loss_of(model, step + 1.0), weight=weight)
        for total, g in zip(
            expected, torch.autograd.grad(loss_of(twin, step + 1.0), list(twin.parameters())), strict=True
        ):
            total += float(weight) * g
        if changes:
            scaler.update(scale * 2)
    assert relative_error([acc.main_grad(p) for p in model.parameters()], expected) < 1e-6


def test_equal_weights_keep_their_bits():
    """A power of two times the sums, and the mean bit for bit."""
    means = []
    for weight in (1.0, 64.0):
        model = net(8)
        acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
        for step in range(4):
            acc.backward(loss_of(model, step + 0.3), weight=weight)
        acc.finalize(torch.optim.SGD(model.parameters(), lr=0.0))
        means.append([p.grad for p in model.parameters()])
    assert all(map(same_bits, *means))


@pytest.mark.parametrize("where", ["linear", "embedding"])
@pytest.mark.parametrize("ending", ["step", "clipped step", "finalize", "look", "state_dict"])
@pytest.mark.parametrize("scaled", [False, True])
def test_overflow_is_found_at_the_end(where, ending, scaled):
    """In the pass that ends the window: the step is skipped, the scale backs off once, and the report names the weight.

    Only a fused weight's gradient overflows: its layer's output is multiplied by infinity in one micro-batch of three.
    """
    torch.manual_seed(0)
    layer = nn.Linear(4, 5, bias=False) if where == "linear" else nn.Embedding(6, 5)
    model = nn.ModuleDict({"other": nn.Linear(4, 5), "layer": layer})
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**3) if scaled else None
    acc = ak.FusedAccumulator(model, scaler=scaler, fuse_weight_gradients=True)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1)
    x = torch.ones(2, 4) if where == "linear" else torch.tensor([1, 3])
    for factor in (1.0, INF, 1.0):
        acc.backward(model["other"](torch.ones(2, 4)).sum() + (model["layer"](x) * factor).sum())
    if ending == "look":
        assert acc.found_inf == 1
    if ending == "state_dict":
        twin = copy.deepcopy(model)
        state = acc.state_dict()
        acc = ak.FusedAccumulator(twin, scaler=scaler, fuse_weight_gradients=True)
        acc.load_state_dict(state)
        optimizer, model = torch.optim.AdamW(acc.parameters(), lr=0.1), twin
    if ending == "finalize":
        acc.finalize(optimizer)
        assert acc.found_inf == 1
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        acc.zero_()
    else:
        acc.step(optimizer, max_norm=1.0 if ending == "clipped step" else None)
        assert acc.step_was_skipped
    assert acc.overflow_report() == ["layer.weight"]
    assert all(map(same_bits, model.state_dict().values(), before.values()))
    if scaled:
        assert scaler.get_scale() == 4.0
    acc.backward(model["other"](torch.ones(2, 4)).sum() + model["layer"](x).sum())
    acc.step(optimizer)
    assert not acc.step_was_skipped


def test_the_report_names_all_of_the_window():
    """An ordinary gradient that was not finite in an earlier micro-batch, and a fused one."""
    model = nn.Linear(4, 5)
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    for factor in (1.0, INF, 1.0):
        acc.backward((model(torch.ones(2, 4)) * factor).sum())
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert acc.overflow_report() == ["weight", "bias"]
    assert acc.step_was_skipped
    acc.backward(model(torch.ones(2, 4)).sum())  # a window later, neither counts
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not acc.step_was_skipped


def test_an_overflow_that_was_dropped_is_forgotten():
    """With its window; the next one does not touch that layer, whose sum is still there."""
    model = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)])
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    acc.backward((model[0](torch.ones(2, 4)) * INF).sum())
    acc.zero_()
    acc.backward(model[1](torch.ones(2, 4)).sum())
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not acc.step_was_skipped


def test_overflow_none_looks_at_nothing():
    """As everywhere: found_inf stays 0."""
    model = nn.Linear(4, 5)
    acc = ak.FusedAccumulator(model, overflow=None, fuse_weight_gradients=True)
    acc.backward((model(torch.ones(2, 4)) * INF).sum())
    assert acc.found_inf == 0
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not acc.step_was_skipped


def test_weight_zero_still_counts_its_overflow():
    """Nothing is fused then: BLAS does not look at what it multiplies by zero."""
    model = nn.Linear(4, 5)
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    acc.backward(model(torch.ones(2, 4)).sum())
    acc.backward((model(torch.ones(2, 4)) * INF).sum(), weight=0)
    assert acc.found_inf == 1


def test_a_sum_in_fp16_that_overflows_is_finite_here():
    """The documented difference of True: an fp16 gradient is never rounded to fp16, so only the sum can overflow."""
    results = {}
    for demand in (False, True):
        model = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        acc = ak.FusedAccumulator(model, scaler=scaler, fuse_weight_gradients=demand, autocast_route=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for learned in (False, True):
            with torch.autocast("cpu", torch.float16):
                y = model(torch.full((32, 8), 16.0))
            acc.backward((y.float() * 0.25).sum())
            if not learned:
                acc.zero_()
        results[demand] = acc.main_grad(model.weight).clone()
        acc.step(optimizer)
        assert acc.step_was_skipped != demand  # 32 * 16 * 256 is more than fp16 holds
    assert results[True].eq(32 * 16 * 0.25).all()


def test_default_never_changes_what_a_scaler_decides():
    """The same scales as stock's loop, through overflows, with large weights and buckets."""
    decisions = []
    for ours in (False, True):
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        acc = ak.FusedAccumulator(model, scaler=scaler, release="backward") if ours else None
        scales = []
        for factor in (1.0, 1.0, 2.0**5, 1.0, 1.0, 1.0):
            for _ in range(2):
                loss = loss_of(model, factor, torch.float16)
                acc.backward(loss) if ours else scaler.scale(loss).backward()
            if ours:
                acc.step(optimizer)
            else:
                for p in model.parameters():
                    p.grad /= 2
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
        decisions.append(scales)
    assert decisions[0] == decisions[1]
    assert len(set(decisions[0])) > 1


def test_arguments():
    """Anything but "auto", True and False; True without a module."""
    with pytest.raises(ValueError, match="fuse_weight_gradients must be 'auto', True or False, got 'yes'"):
        ak.FusedAccumulator(net(2), fuse_weight_gradients="yes")
    with pytest.raises(ValueError, match="fuse_weight_gradients=True needs params to be a module"):
        ak.FusedAccumulator(list(net(2).parameters()), fuse_weight_gradients=True)
    acc = ak.FusedAccumulator(list(net(2).parameters()))
    assert fused(acc) == 0 and math.prod(acc.flat_buffers[0].shape) > 0
