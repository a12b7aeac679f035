"""master_weights=True: fp32 masters of 16-bit parameters, stepped by any optimizer, rounded back into the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.backends import BACKENDS
from tests.support.models import Lookahead, batch, mlp

HALVES = [torch.float16, torch.bfloat16]


class Mixed(nn.Module):
    """A 16-bit body, an fp32 norm and a frozen 16-bit base."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(5, 9).to(dtype).requires_grad_(False)
        self.body = nn.Linear(9, 3).to(dtype)
        self.norm = nn.LayerNorm(9)
        self.dtype = dtype

    def forward(self, x):
        return self.body(self.norm(self.base(x.to(self.dtype)).float()).to(self.dtype))


def window(acc, model, seed=0, factor=1.0):
    """Three micro-batches."""
    dtype = next(model.parameters()).dtype
    for step in range(3):
        x, y = batch(4, seed=10 * seed + step)
        acc.backward(mse_loss(model(x.to(dtype)).float(), y) * factor, weight=1 + step)


def test_parameters_are_masters_in_the_order_given():
    """fp32 copies of 16-bit parameters, all others themselves; a frozen one's master takes no memory."""
    model = Mixed(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    for (name, p), target in zip(model.named_parameters(), acc.parameters(), strict=True):
        assert target.dtype == torch.float32
        assert target.shape == p.shape
        assert target.is_leaf
        assert (target is p) == name.startswith("norm")
        if not name.startswith("base"):
            assert torch.equal(target, p.float())
            assert target.requires_grad
    base = next(acc.parameters())
    assert base.untyped_storage().nbytes() == 4
    masters = [
        t for t in acc.parameters() if t.requires_grad and t is not model.norm.weight and t is not model.norm.bias
    ]
    assert len({t.untyped_storage().data_ptr() for t in masters}) == 1  # one flat buffer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", ["step", "long"])
def test_model_is_the_rounded_master(backend, dtype, form):
    """After each step, to the last bit; .grads of masters are views of the accumulation buffer."""
    model = mlp().to(backend.device, dtype)
    acc = ak.FusedAccumulator(model, master_weights=True, backend=backend.name)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01)
    x, y = (t.to(backend.device) for t in batch(4))
    for _ in range(3):
        acc.backward(mse_loss(model(x.to(dtype)).float(), y))
        if form == "step":
            acc.step(optimizer)
        else:
            acc.finalize(optimizer)
            for p, master in zip(model.parameters(), acc.parameters(), strict=True):
                assert p.grad is None
                assert master.grad.data_ptr() == acc.main_grad(p).data_ptr() == acc.main_grad(master).data_ptr()
            optimizer.step()
            acc.zero_()
        for p, master in zip(model.parameters(), acc.parameters(), strict=True):
            assert torch.equal(p, master.to(dtype))
            assert not torch.equal(p.float(), master)
            assert master.grad is None


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("fused", [False, True])
def test_follows_its_fp32_twin(optimizer_class, fused):
    """Gradients of the rounded model, an fp32 twin stepped with them: the masters are that twin, step for step."""
    if optimizer_class is torch.optim.RMSprop and fused:
        optimizer_class, fused = torch.optim.Adagrad, True
    model = mlp().to(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    twin = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    kwargs = {"lr": 0.01, **({"fused": True} if fused else {})}
    optimizer, twin_optimizer = optimizer_class(acc.parameters(), **kwargs), optimizer_class(twin, **kwargs)
    for seed in range(10):
        with torch.no_grad():
            probe = copy.deepcopy(model)
        grads = [torch.zeros_like(t, dtype=torch.float64) for t in twin]
        for step in range(3):
            x, y = batch(4, seed=10 * seed + step)
            probe.zero_grad()
            mse_loss(probe(x.bfloat16()).float(), y).backward()
            for total, p in zip(grads, probe.parameters(), strict=True):
                total += (1 + step) * p.grad.double()
        for t, total in zip(twin, grads, strict=True):
            t.grad = (total / 6).float()
        twin_optimizer.step()
        window(acc, model, seed)
        acc.step(optimizer)
        for t, master in zip(twin, acc.parameters(), strict=True):
            torch.testing.assert_close(master, t, rtol=1e-4, atol=1e-5)  # fp32 rounding, amplified where Adam divides


def test_bf16_model_trains_like_fp32():
    """AdamW(fused) with masters over 60 windows: the loss of the fp32 model within bf16 rounding of the forward."""
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = mlp().to(dtype)
        acc = ak.FusedAccumulator(model, master_weights=True)
        optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01, fused=True)
        for _ in range(60):
            window(acc, model)
            acc.step(optimizer)
        x, y = batch(4, seed=0)
        losses[dtype] = mse_loss(model(x.to(dtype)).float(), y).item()
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.05)


def test_small_updates_are_not_lost():
    """256 steps of 2**-10 on weights of one: bf16 alone would not move, a master arrives at 0.75."""
    weight = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    acc = ak.FusedAccumulator([weight], master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=2.0**-10)
    for _ in range(256):
        acc.backward(weight.float().sum())
        acc.step(optimizer)
    assert torch.equal(weight, torch.full((100,), 0.75, dtype=torch.bfloat16))


def test_4096_bf16_gradients_of_about_one():
    """fp32 sums keep what bf16 .grad loses: stock is off by more than half, ours by less than 1e-6."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    stock = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    acc = ak.FusedAccumulator([weight], master_weights=True)
    exact = torch.zeros(64, dtype=torch.float64)
    for _ in range(4096):
        grad = (1 + 0.1 * torch.randn(64, generator=generator)).bfloat16()
        (weight * grad).sum().backward()
        (stock * grad).sum().backward()
        acc.accumulate()
        exact += grad.double()
    error = (acc.main_grad(weight).double() - exact).norm() / exact.norm()
    assert error < 1e-6
    assert (stock.grad.double() - exact).norm() / exact.norm() > 0.5


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_parameters_train_with_a_grad_scaler(fused):
    """Stock torch refuses ("Attempting to unscale FP16 gradients"); an overflow leaves masters and model alone."""
    model = mlp().half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    acc = ak.FusedAccumulator(model, scaler=scaler, master_weights=True)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01, fused=fused)
    losses = []
    for seed in range(20):
        before = [p.clone() for p in model.parameters()]
        window(acc, model, factor=float("inf") if seed == 3 else 1.0)
        acc.step(optimizer, max_norm=1.0)
        assert acc.step_was_skipped == (seed == 3)
        if seed == 3:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        x, y = batch(4, seed=0)
        losses.append(mse_loss(model(x.half()).float(), y).item())
    assert losses[-1] < 0.9 * losses[0]
    assert scaler.get_scale() == 2.0**9


def test_an_optimizer_over_the_model_is_refused():
    """It would train nothing: named, with what to do."""
    model = mlp().bfloat16()
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window(acc, model)
    with pytest.raises(RuntimeError, match=r"no optimizer .* owns '0.weight'.*acc\.parameters\(\)"):
        acc.step(optimizer)


def test_param_groups():
    """Groups keep order, options and names; tensors become masters."""
    model = Mixed(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    groups = [
        {"params": [model.body.weight, model.norm.weight], "weight_decay": 0.1},
        {"params": (p for p in (model.body.bias,)), "lr": 0.5},
        {"params": model.norm.bias},
    ]
    targets = dict(zip((n for n, _ in model.named_parameters()), acc.parameters(), strict=True))
    translated = acc.param_groups(groups)
    assert translated[0]["params"][0] is targets["body.weight"]
    assert translated[0]["params"][1] is model.norm.weight
    assert translated[0]["weight_decay"] == 0.1
    assert translated[1]["params"][0] is targets["body.bias"]
    assert translated[1]["lr"] == 0.5
    assert translated[2]["params"][0] is model.norm.bias
    optimizer = torch.optim.AdamW(translated, lr=0.01)
    window(acc, model)
    acc.step(optimizer)
    assert torch.equal(model.body.weight, targets["body.weight"].bfloat16())
    plain = ak.FusedAccumulator(mlp())
    group = {"params": [1], "lr": 2}
    assert plain.param_groups([group]) == [group]


@pytest.mark.parametrize("master_weights", [False, True])
def test_wrong_param_groups(master_weights):
    """Named by their number, with masters and without."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=master_weights)
    good = {"params": [model[0].weight]}
    with pytest.raises(ValueError, match="group 1 has no 'params' key"):
        acc.param_groups([good, {"lr": 0.1}])
    with pytest.raises(TypeError, match="group 0 must be a dict, got Parameter"):
        acc.param_groups(model.parameters())


def by_hand(acc, model, write):
    """An update that no optimizer makes."""
    window(acc, model)
    acc.finalize()
    with torch.no_grad():
        for p in acc.parameters():
            write(p, p.grad)
    acc.zero_()


def by_lookahead(acc, model, form):
    """The outer optimizer moves weights after the inner one's step has rounded them."""
    optimizer = Lookahead(torch.optim.SGD(acc.parameters(), lr=0.1))
    window(acc, model)
    if form == "step":
        acc.step(optimizer)
        return
    acc.finalize(optimizer)
    optimizer.step()
    acc.zero_()


UNSEEN = {
    "by hand": lambda acc, model: by_hand(acc, model, lambda p, grad: p.sub_(grad, alpha=0.1)),
    "by hand, data": lambda acc, model: by_hand(acc, model, lambda p, grad: p.data.sub_(grad, alpha=0.1)),
    "lookahead": lambda acc, model: by_lookahead(acc, model, "step"),
    "lookahead, long form": lambda acc, model: by_lookahead(acc, model, "long"),
}


@pytest.mark.parametrize("update", UNSEEN)
def test_updates_without_a_step_of_torch_are_rounded(update):
    """When the window ends, since no hook shows them."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        UNSEEN[update](acc, model)
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(model.parameters(), acc.parameters(), strict=True))
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_an_update_by_hand_that_rounds_by_itself():
    """Its values stay; a parameter that has other ones would lose them, and is named."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    for seed in range(2):
        window(acc, model, seed)
        acc.finalize()
        with torch.no_grad():
            for p, master in zip(model.parameters(), acc.parameters(), strict=True):
                p.copy_(master.sub_(master.grad, alpha=0.1))
        if seed == 0:
            acc.zero_()
    with torch.no_grad():
        model[2].weight.clamp_(-0.1, 0.1)
    with pytest.raises(RuntimeError, match=r"'2.weight' was edited before its master.*edit weights after acc.zero_"):
        acc.zero_()
    acc.zero_()
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(model.parameters(), acc.parameters(), strict=True))


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_a_closure_sees_the_masters_that_its_optimizer_has_moved(line_search):
    """Inside of one step, so that the losses of bf16 weights are near those of fp32 weights."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = mlp(dtype)
        acc = ak.FusedAccumulator(model, master_weights=True)
        optimizer = torch.optim.LBFGS(acc.parameters(), lr=0.5, max_iter=10, line_search_fn=line_search)

        def closure(acc=acc, model=model, optimizer=optimizer):
            acc.zero_()
            window(acc, model)
            acc.finalize(optimizer)
            return acc.metrics()["loss"]

        losses.append([float(optimizer.step(closure)) for _ in range(3)])
        acc.zero_()
    assert losses[0][2] < 0.5 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_two_optimizers_round_what_they_own():
    """Each optimizer's step rounds its masters, and no other's."""
    model = mlp().bfloat16()
    acc = ak.FusedAccumulator(model, master_weights=True)
    masters = list(acc.parameters())
    first, second = torch.optim.SGD(masters[:2], lr=0.1), torch.optim.SGD(masters[2:], lr=0.1)
    before = [p.clone() for p in model.parameters()]
    window(acc, model)
    acc.finalize(first, second)
    first.step()
    changed = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert changed[:2] == [True, True]
    assert not any(changed[2:])
    second.step()
    acc.zero_()
    for p, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(p, master.bfloat16())


def test_unfrozen_parameters_get_their_master():
    """The placeholder an optimizer has owned from the start gets memory, values and gradients."""
    model = Mixed(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    window(acc, model)
    acc.step(optimizer)
    model.base.requires_grad_(True)
    before = model.base.weight.clone()
    window(acc, model)
    acc.step(optimizer)
    master = next(acc.parameters())
    assert not torch.equal(model.base.weight, before)
    assert torch.equal(model.base.weight, master.bfloat16())


def test_refresh_masters_takes_the_models_values():
    """After model.load_state_dict, which a step would otherwise undo."""
    model = mlp().bfloat16()
    acc = ak.FusedAccumulator(model, master_weights=True)
    model.load_state_dict(mlp(seed=5).bfloat16().state_dict())
    acc.refresh_masters()
    for p, master in zip(model.parameters(), acc.parameters(), strict=True):
        assert torch.equal(p.float(), master)
    ak.FusedAccumulator(mlp()).refresh_masters()


def test_a_backward_through_old_values_notices():
    """Rounding into the model counts as an in-place change, as an optimizer's step does."""
    model = mlp().bfloat16()
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(4)
    stale = mse_loss(model(x.bfloat16()).float(), y)
    window(acc, model)
    acc.step(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_channels_last_and_transposed_parameters():
    """Masters are strided like their parameters."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).bfloat16().to(memory_format=torch.channels_last)
    model.other = nn.Parameter(torch.randn(6, 4).bfloat16().t())
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(model(torch.randn(2, 3, 5, 5).bfloat16()).float().square().sum() + model.other.float().square().sum())
    acc.step(optimizer)
    for p, master in zip(model.parameters(), acc.parameters(), strict=True):
        assert master.stride() == p.stride()
        assert torch.equal(p, master.bfloat16())


def test_remove_stops_following_optimizers():
    """After remove() an optimizer's step leaves the model alone."""
    model = mlp().bfloat16()
    acc = ak.FusedAccumulator(model, master_weights=True)
    masters = list(acc.parameters())
    optimizer = torch.optim.SGD(masters, lr=0.1)
    acc.remove()
    before = [p.clone() for p in model.parameters()]
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_both_memory_options_together():
    """release="backward" and masters: the numbers of each alone."""
    results = []
    for release in ("microbatch", "backward"):
        model = mlp().bfloat16()
        acc = ak.FusedAccumulator(model, master_weights=True, release=release, bucket_bytes=64)
        optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01, fused=True)
        for seed in range(3):
            window(acc, model, seed)
            acc.step(optimizer)
        results.append([m.detach().clone() for m in acc.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_two_parameters_in_the_same_memory():
    """As a decoder whose `weight.data` is the encoder's: the master rounded last would undo the step of the other."""
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4, bias=False), "decoder": nn.Linear(4, 4, bias=False)}).bfloat16()
    model["decoder"].weight.data = model["encoder"].weight.data
    with pytest.raises(ValueError, match="'decoder.weight' and 'encoder.weight' are two parameters in the same memory"):
        ak.FusedAccumulator(model, master_weights=True)
    ak.FusedAccumulator(model).remove()  # whose optimizer adds to the same memory twice, as in stock
    model["decoder"].requires_grad_(False)
    ak.FusedAccumulator(model, master_weights=True).remove()
    empty = [nn.Parameter(torch.ones(4).bfloat16()[:0]) for _ in range(2)]
    halves = [nn.Parameter(half) for half in torch.ones(4).bfloat16().split(2)]
    ak.FusedAccumulator([*empty, *halves], master_weights=True)


def test_master_weights_must_be_a_bool():
    """A truthy string is a mistake."""
    with pytest.raises(TypeError, match="master_weights must be a bool, got '"):
        ak.FusedAccumulator(mlp(), master_weights="yes")


def test_release_buffers():
    """Freed between windows, allocated by the next accumulate; not inside a window."""
    for release in ("microbatch", "backward"):
        model = mlp()
        acc = ak.FusedAccumulator(model, release=release, bucket_bytes=1)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        twin = copy.deepcopy(model)
        other = ak.FusedAccumulator(twin)
        twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for seed in range(3):
            window(acc, model, seed)
            with pytest.raises(RuntimeError, match=r"release_buffers\(\) inside a window"):
                acc.release_buffers()
            acc.step(optimizer)
            acc.release_buffers()
            acc.release_buffers()
            assert acc.flat_buffers == []
            with pytest.raises(RuntimeError, match=r"release_buffers\(\) freed the buffers"):
                acc.main_grad(model[0].weight)
            repr(acc)
            window(other, twin, seed)
            other.step(twin_optimizer)
        acc.step(optimizer)  # an empty window needs none
        acc.finalize(optimizer)
        assert acc.clip_grad_norm_(1.0) == 0
        acc.zero_()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
        acc.remove()
        other.remove()


@pytest.mark.gpu
def test_a_model_over_two_devices():
    """One buffer per device; the step is the one-device model's."""
    model = mlp()
    twin = copy.deepcopy(model)
    model[:2].to("cuda")
    acc = ak.FusedAccumulator(model)
    assert sorted(b.device.type for b in acc.flat_buffers) == ["cpu", "cuda"]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)]
    x, y = batch(4)
    acc.backward(mse_loss(model[2:](model[:2](x.cuda()).cpu()), y), weight=4)
    acc.step(optimizers[0], max_norm=0.1)
    mse_loss(twin(x), y).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    optimizers[1].step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-4, atol=1e-6)


def test_masters_of_two_accumulators_in_one_optimizer():
    """The second finds `.grad`s of the first's masters, which are no strangers."""
    model = mlp(torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    accs = [ak.FusedAccumulator(part, master_weights=True) for part in (model[0], model[2:])]
    optimizer = torch.optim.SGD([p for acc in accs for p in acc.parameters()], lr=0.1)
    x, y = batch(3)
    mse_loss(model(x.bfloat16()).float(), y).backward()
    for acc in accs:
        acc.accumulate()
    for acc in accs:
        acc.finalize(optimizer)
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


class Interrupted(torch.optim.Optimizer):
    """By Ctrl-C, after the first parameter."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        """Moves it without a new version, as torch's fused kernels do."""
        self.param_groups[0]["params"][0].data.add_(1.0)
        raise KeyboardInterrupt


@pytest.mark.parametrize("long_form", [False, True])
def test_control_c_in_a_step(long_form):
    """The model has the weights that the optimizer has, as without masters: at once, or in the next window."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    old = [p.detach().clone() for p in model.parameters()]
    x, y = batch(3, torch.bfloat16)
    acc.backward(mse_loss(model(x), y))
    optimizer = Interrupted(acc.parameters())
    with pytest.raises(KeyboardInterrupt):
        if long_form:
            acc.finalize(optimizer)
            optimizer.step()
        acc.step(optimizer)
    if long_form:
        acc.zero_()
    new = list(model.parameters())
    torch.testing.assert_close(new[0], old[0] + 1, rtol=0.01, atol=0.01)
    assert all(torch.equal(a, b) for a, b in zip(new[1:], old[1:], strict=True))
    acc.zero_()


def test_an_edit_before_another_optimizer_raises():
    """A hook's, of weights that were stepped, as a GAN's that are clipped: it stays."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    first, *rest = acc.parameters()
    weight = model[0].weight
    stepped, raises = torch.optim.SGD([first], lr=1.0), Interrupted(rest)

    @torch.no_grad()
    def clip(*_):
        weight.clamp_(-0.01, 0.01)

    stepped.register_step_post_hook(clip)
    x, y = batch(3, torch.bfloat16)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(KeyboardInterrupt):
        acc.step(stepped, raises)
    acc.zero_()
    assert weight.abs().max() < 0.011
