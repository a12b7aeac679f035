"""master_weights=True: what a loop writes to the model's weights is taken over into their masters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils._python_dispatch import TorchDispatchMode

import accumkernels as ak
from tests.buffers.test_masters import HALVES, Mixed, window
from tests.support.models import batch, mlp, relative_error


def set_data_twice(model):
    """The second assignment may get the memory that the first has freed."""
    for p in model.parameters():
        p.data = p.data * 2
        p.data = p.data.clamp(-0.1, 0.1)


@torch.inference_mode()
def in_inference_mode(model):
    """Torch counts versions of normal tensors there, too."""
    for p in model.parameters():
        p.mul_(0.5)


def each(edit):
    """An edit of all parameters, without a graph."""

    @torch.no_grad()
    def run(model):
        for p in model.parameters():
            edit(p)

    return run


EDITS = {
    "clamp": each(lambda p: p.clamp_(-0.1, 0.1)),
    "normalised rows": each(lambda p: p.copy_(normalize(p.float(), dim=-1))),
    "one element": lambda model: nn.init.zeros_(model[0].weight[0, :1]),
    "detached": lambda model: model[2].weight.detach().mul_(0.5),
    "other weights": lambda model: model.load_state_dict(mlp(seed=5).state_dict()),
    "set data": lambda model: setattr(model[0].weight, "data", model[0].weight.data * 2),
    "set data twice": set_data_twice,
    "from a vector": lambda model: nn.utils.vector_to_parameters(
        torch.linspace(-1, 1, 148).to(model[0].weight.dtype), model.parameters()
    ),
    "inference mode": in_inference_mode,
}


def values(tensors):
    """Copies, without a graph."""
    return [t.detach().clone() for t in tensors]


def train(acc, model, optimizer, windows=2):
    """A few windows, after which masters have bits that the model has not."""
    for seed in range(windows):
        window(acc, model, seed)
        acc.step(optimizer)


def step(acc, model, optimizer, edit):
    """An edit between windows."""
    edit(model)
    window(acc, model)
    acc.step(optimizer)


def in_a_window(acc, model, optimizer, edit):
    """An edit between micro-batches."""
    window(acc, model)
    edit(model)
    window(acc, model)
    acc.step(optimizer)


def long_form(acc, model, optimizer, edit):
    """An edit of what finalize has seen already; stepped twice."""
    window(acc, model)
    acc.finalize(optimizer)
    edit(model)
    optimizer.step()
    optimizer.step()
    acc.zero_()


def closure(acc, model, optimizer, edit):
    """An edit by a closure, which hooks before the step have not seen."""

    def run():
        edit(model)
        window(acc, model)
        acc.finalize(optimizer)

    optimizer.step(run)
    acc.zero_()


def without_hooks(acc, model, optimizer, edit):
    """An edit before a step that calls no hook before it, as a compiled one."""
    window(acc, model)
    edit(model)
    acc.finalize(optimizer)
    type(optimizer).step.__wrapped__(optimizer)
    acc._store.masters.after_step(optimizer, False)
    acc.zero_()


@pytest.mark.parametrize("form", [step, in_a_window, long_form, closure, without_hooks])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("edit", EDITS)
def test_taken_over_element_by_element(edit, dtype, form):
    """With a learning rate of 0: masters of elements that were edited are the model's values, all others are kept."""
    model = mlp(dtype)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    train(acc, model, optimizer)
    before, masters = values(model.parameters()), values(acc.parameters())
    assert not any(torch.equal(p.float(), master) for p, master in zip(before, masters, strict=True))
    edited = copy.deepcopy(model)
    EDITS[edit](edited)
    optimizer.param_groups[0]["lr"] = 0.0
    form(acc, model, optimizer, EDITS[edit])
    for old, new, p, was, master in zip(
        before, edited.parameters(), model.parameters(), masters, acc.parameters(), strict=True
    ):
        assert torch.equal(master, torch.where(old == new, was, new.float()))
        assert torch.equal(p, new)
    assert any(not torch.equal(was, master) for was, master in zip(masters, acc.parameters(), strict=True))


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("edit", ["clamp", "normalised rows"])
def test_loops_that_edit_after_each_step(edit, optimizer_class):
    """Clipped weights (WGAN) and normalised rows (nGPT) follow the same loop in fp32 as far as bf16 can."""
    weights = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Linear(16, 4, bias=False).to(dtype)
        acc = ak.FusedAccumulator(model, master_weights=True)
        optimizer = optimizer_class(acc.parameters(), lr=0.5 if optimizer_class is torch.optim.SGD else 0.05)
        for _ in range(8):
            for _ in range(2):
                x, y = torch.randn(8, 16).to(dtype), torch.randint(4, (8,))
                acc.backward(cross_entropy(model(x).float(), y))
            acc.step(optimizer)
            EDITS[edit](model)
        weights.append(values(model.parameters()))
    assert relative_error(weights[1], weights[0]) < 0.02


class Comparisons(TorchDispatchMode):
    """Counts tensors that are compared."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.ne.Tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
def test_own_writes_are_no_edits(fused):
    """Steps of several optimizers, by hand and twice, skipped ones, unfrozen layers, loads: no weight is read."""
    model = Mixed(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    acc = ak.FusedAccumulator(model, master_weights=True, scaler=scaler)
    masters = list(acc.parameters())
    optimizers = [torch.optim.AdamW(part, lr=0.01, fused=fused) for part in (masters[:2], masters[2:])]
    with Comparisons() as comparisons:
        for seed in range(4):
            window(acc, model, seed, factor=float("inf") if seed == 1 else 1.0)
            acc.step(*optimizers)
            assert acc.step_was_skipped == (seed == 1)
            model.base.requires_grad_(seed >= 1)
        window(acc, model)
        acc.finalize(*optimizers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.step()
        acc.zero_()
        acc.load_state_dict(acc.state_dict())
        acc.refresh_masters()
        window(acc, model)
        acc.step(*optimizers)
    assert comparisons.count == 0
    model.body.weight.data = model.body.weight.data.clone()
    with Comparisons() as comparisons:
        window(acc, model)
        acc.step(*optimizers)
    assert comparisons.count == 1  # of the one parameter that may have been edited


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_keeps_the_edit(fused):
    """An overflow leaves the model as it was edited, and the next step goes on from there."""
    model = mlp(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    acc = ak.FusedAccumulator(model, scaler=scaler, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, fused=fused)
    train(acc, model, optimizer)
    EDITS["other weights"](model)
    edited = values(model.parameters())
    window(acc, model, factor=float("inf"))
    acc.step(optimizer)
    assert acc.step_was_skipped
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), edited, strict=True))
    window(acc, model)
    acc.finalize(optimizer)
    grads = [master.grad.clone() for master in acc.parameters()]
    scaler.step(optimizer)
    for master, e, grad in zip(acc.parameters(), edited, grads, strict=True):
        torch.testing.assert_close(master, e.float() - 0.1 * grad, rtol=1e-6, atol=1e-7)


def test_an_edit_before_a_checkpoint():
    """The saved masters have it, and the resumed run is the uninterrupted one bit for bit, in any order of loading."""
    runs = []
    for order in ((), ("model", "acc"), ("acc", "model")):
        model = mlp(torch.bfloat16)
        acc = ak.FusedAccumulator(model, master_weights=True)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        train(acc, model, optimizer)
        EDITS["clamp"](model)
        if order:
            saved = {"model": copy.deepcopy(model.state_dict()), "acc": acc.state_dict()}
            model = mlp(torch.bfloat16, seed=9)
            acc = ak.FusedAccumulator(model, master_weights=True)
            optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
            for name in order:
                {"model": model, "acc": acc}[name].load_state_dict(saved[name])
            assert all(torch.equal(p, saved["model"][name]) for name, p in model.state_dict().items())
        train(acc, model, optimizer)
        runs.append(values([*model.parameters(), *acc.parameters()]))
    for resumed in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(resumed, runs[0], strict=True))


@pytest.mark.parametrize("saves", [False, True])
def test_averaged_weights_that_are_saved(saves):
    """Put into the model for its checkpoint, and taken out: masters keep the bits that the model has not."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01)
    train(acc, model, optimizer)
    weights = values(model.parameters())
    each(lambda p: p.mul_(0.5))(model)
    averaged = values(model.parameters())
    if saves:
        saved = acc.state_dict()["masters"]
        assert all(torch.equal(a.bfloat16(), b) for a, b in zip(saved.values(), averaged, strict=True))
    for p, weight in zip(model.parameters(), weights, strict=True):
        p.detach().copy_(weight)
    window(acc, model)
    acc.step(optimizer)
    twin = mlp(torch.bfloat16)
    theirs = ak.FusedAccumulator(twin, master_weights=True)
    other = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    train(theirs, twin, other)
    window(theirs, twin)
    theirs.step(other)
    assert all(map(torch.equal, acc.parameters(), theirs.parameters()))


def test_frozen_again():
    """A layer that is edited while it is frozen again goes on from there when it is unfrozen."""
    model = Mixed(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    with torch.no_grad():
        model.base.weight.mul_(0.5)  # it has no master yet
    model.base.requires_grad_(True)
    train(acc, model, optimizer)
    model.base.requires_grad_(False)
    with torch.no_grad():
        model.base.weight.fill_(0.25)
    train(acc, model, optimizer)
    assert torch.equal(model.base.weight, torch.full((9, 5), 0.25, dtype=torch.bfloat16))
    assert torch.equal(next(acc.parameters()), torch.full((9, 5), 0.25))


def test_a_shared_weight():
    """An edit through either module is one edit of one master."""
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    with torch.no_grad():
        model[1].weight[2] = 3
    acc.backward(model(torch.randn(4, 5).bfloat16()).float().square().mean())
    acc.step(optimizer)
    assert torch.equal(model[0].weight[2].float(), torch.full((5,), 3.0))
    (master,) = acc.parameters()
    assert torch.equal(master[2], torch.full((5,), 3.0))


@pytest.mark.parametrize("long_form", [False, True])
def test_slices_of_one_tensor_with_an_optimizer_each(long_form):
    """They share a version counter, and rounding one is no edit of the other."""
    flat = torch.linspace(-1, 1, 16).bfloat16()
    slices = [nn.Parameter(part) for part in flat.split(8)]
    truth = [part.float() for part in flat.clone().split(8)]
    with ak.FusedAccumulator(slices, master_weights=True) as acc:
        masters = list(acc.parameters())
        optimizers = [torch.optim.SGD([master], lr=2**-6) for master in masters]
        for _ in range(3):
            with torch.no_grad():  # an edit of one, which the other's step does not hide
                slices[1][3] += 1
            truth[1][3] = slices[1][3].item()
            acc.backward((slices[0].sum() - 2 * slices[1].sum()).float())
            if long_form:
                acc.finalize(*optimizers)
                for optimizer in optimizers:
                    optimizer.step()
                acc.zero_()
            else:
                acc.step(*optimizers)
            truth = [truth[0] - 2**-6, truth[1] + 2**-5]
            for param, master, values in zip(slices, masters, truth, strict=True):
                assert torch.equal(master, values)
                assert torch.equal(param, values.bfloat16())


@pytest.mark.parametrize("name", ["channels last", "not dense"])
def test_strides(name):
    """Edits of parameters whose memory order is not that of their indices."""
    if name == "channels last":
        weight = torch.randn(4, 3, 2, 2, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    else:
        weight = torch.randn(6, 8, dtype=torch.bfloat16)[:, ::2]
    weight = nn.Parameter(weight)
    acc = ak.FusedAccumulator([weight], master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    with torch.no_grad():
        weight[1] = torch.arange(float(weight[1].numel())).view(weight[1].shape)
    expected = weight.detach().clone()
    acc.backward(weight.float().square().sum())
    acc.step(optimizer)
    assert torch.equal(weight, expected)
    (master,) = acc.parameters()
    assert torch.equal(master, expected.float())


def test_an_edit_of_masters_stays():
    """Values that somebody writes to masters are stepped, and rounded into the model, which nobody has edited."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    with torch.no_grad():
        for master in acc.parameters():
            master.fill_(0.1)
    window(acc, model)
    acc.step(optimizer)
    assert all(torch.equal(m, torch.full_like(m, 0.1)) for m in acc.parameters())
    assert all(torch.equal(p, torch.full_like(p, 0.1)) for p in model.parameters())


@torch.no_grad()
def halve(acc):
    """An edit of masters that no step makes, as weight decay by hand."""
    for master in acc.parameters():
        master.mul_(0.5)


@pytest.mark.parametrize("form", ["step", "long", "optimizer"])
def test_edits_of_a_weight_and_its_master(form):
    """The master's was lost where noise was put on a weight and taken off again: an error, and nothing has changed."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    train(acc, model, optimizer)
    halve(acc)
    window(acc, model)
    with torch.no_grad():
        model[0].weight.add_(1)
        model[0].weight.sub_(1)
    before = values([*acc.parameters(), *model.parameters()])
    with pytest.raises(RuntimeError, match=r"'0.weight' and its fp32 master were both edited.*acc.refresh_masters\(\)"):
        {
            "step": lambda: acc.step(optimizer),
            "long": lambda: acc.finalize(optimizer),
            "optimizer": lambda: (acc.zero_(), optimizer.step()),
        }[form]()
    assert all(map(torch.equal, [*acc.parameters(), *model.parameters()], before))
    acc.refresh_masters()
    assert all(torch.equal(m, p.float()) for m, p in zip(acc.parameters(), model.parameters(), strict=True))
    if form != "optimizer":
        acc.step(optimizer, max_norm=1.0)
        assert not acc.step_was_skipped


def test_equal_edits_of_a_weight_and_its_master():
    """As of a checkpoint in fp32 that is loaded into both: neither is lost, and masters keep their bits."""
    model, truth = mlp(torch.bfloat16), mlp(seed=9)
    acc = ak.FusedAccumulator(model, master_weights=True)
    with torch.no_grad():
        for master, value in zip(acc.parameters(), truth.parameters(), strict=True):
            master.copy_(value)
    model.load_state_dict(truth.state_dict())
    window(acc, model)
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.0))
    assert all(map(torch.equal, acc.parameters(), truth.parameters()))


def test_equal_edits_that_leave_nan(caplog):
    """As of a diverged critic that is clipped, with its masters: no edit is lost, and nothing is said."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    with torch.no_grad():
        for p in (*acc.parameters(), *model.parameters()):
            p.fill_(torch.nan)
    window(acc, model)
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.0))
    assert not any("was edited without a step" in record.getMessage() for record in caplog.records)
    assert all(p.isnan().all() for p in (*acc.parameters(), *model.parameters()))


def test_an_edit_of_a_weight_whose_master_was_loaded():
    """While it was frozen, which is no edit of the master's."""
    trained = mlp(torch.bfloat16)
    with ak.FusedAccumulator(trained, master_weights=True) as acc:
        train(acc, trained, torch.optim.SGD(acc.parameters(), lr=0.1))
        state = acc.state_dict()
    model = mlp(torch.bfloat16)
    model[0].requires_grad_(False)
    acc = ak.FusedAccumulator(model, master_weights=True)
    model.load_state_dict(trained.state_dict())
    acc.load_state_dict(state)
    model[0].requires_grad_(True)
    window(acc, model)
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.0))
    assert torch.equal(model[0].weight, torch.full_like(model[0].weight, 0.25))
    assert torch.equal(next(acc.parameters()), torch.full_like(state["masters"]["0.weight"], 0.25))


@pytest.mark.parametrize("rounds", [False, True])
def test_an_edit_of_masters_without_a_step_is_named(rounds, caplog):
    """Once: a forward on other weights than their masters' was wrong in silence, as of a critic that is clipped."""
    model, twin = mlp(torch.bfloat16), mlp(torch.float64)
    twin.load_state_dict(model.state_dict())
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer, stock = (torch.optim.SGD(p, lr=0.3) for p in (acc.parameters(), twin.parameters()))
    for seed in range(3):
        x, y = batch(8, torch.bfloat16, seed)
        acc.backward(mse_loss(model(x), y))
        acc.step(optimizer)
        stock.zero_grad()
        mse_loss(twin(x.double()), y.double()).backward()
        stock.step()
        with torch.no_grad():
            for p in (*acc.parameters(), *twin.parameters()):
                p.clamp_(-0.1, 0.1)
        if rounds:
            acc.load_state_dict(acc.state_dict())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (not rounds)
    assert all(".load_state_dict(acc.state_dict()) after the edit" in text for text in said)
    if rounds:
        assert relative_error(acc.parameters(), twin.parameters()) < 0.01


def test_an_edit_of_masters_is_rounded_by_loading():
    """As of schedule-free optimizers, which evaluate at other weights (docs/optimizers.md), inside a window too."""
    model = mlp(torch.bfloat16)
    with ak.FusedAccumulator(model, master_weights=True) as acc:
        acc.backward(mse_loss(model(batch(4, torch.bfloat16)[0]), batch(4, torch.bfloat16)[1]))
        with torch.no_grad():
            for master in acc.parameters():
                master.data.mul_(2.0)
        acc.load_state_dict(acc.state_dict())
        assert acc.micro_batches == 1
        before = mlp(torch.bfloat16).parameters()
        for p, master, old in zip(model.parameters(), acc.parameters(), before, strict=True):
            assert torch.equal(p, 2 * old)
            assert torch.equal(p, master.bfloat16())


@pytest.mark.parametrize("masters", [True, False])
def test_an_optimizer_with_modes_is_named(masters, caplog):
    """Once, since nothing tells when it moves masters; without masters it moves the model's own weights."""

    class ScheduleFree(torch.optim.SGD):
        def train(self):
            """Move the weights to where they are trained."""

        def eval(self):
            """Move them to where they are evaluated."""

    model = mlp(torch.bfloat16)
    with ak.FusedAccumulator(model, master_weights=masters) as acc:
        optimizer = ScheduleFree(acc.parameters(), lr=0.1)
        for _ in range(3):
            window(acc, model)
            acc.step(optimizer)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == masters
    assert all("eval() and train() of ScheduleFree move the fp32 masters alone" in text for text in said)


@pytest.mark.parametrize("form", ["pre-hook", "closure"])
def test_an_edit_inside_a_step_is_refused(form):
    """It finds the old weights in the model, which are about to be replaced; the next step goes on."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)

    def clamp(*args):
        with torch.no_grad():
            model[2].weight.clamp_(-0.1, 0.1)

    handle = None if form == "closure" else optimizer.register_step_pre_hook(clamp)
    window(acc, model)
    with pytest.raises(RuntimeError, match=r"'2.weight' was edited while SGD.step\(\) ran.*edit weights after"):
        if form == "pre-hook":
            acc.step(optimizer)
        else:
            acc.finalize(optimizer)
            optimizer.step(clamp)
    if handle is not None:
        handle.remove()
    acc.zero_()
    assert all(torch.equal(m.bfloat16(), p) for m, p in zip(acc.parameters(), model.parameters(), strict=True))
    clamp()
    edited = values(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    train(acc, model, optimizer, windows=1)
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), edited, strict=True))


@pytest.mark.parametrize("form", ["step", "long"])
@pytest.mark.parametrize("edits", ["nothing", "the model", "masters"])
def test_hooks_after_a_step_find_its_weights(form, edits):
    """As an EMA's; what they write to the model or to masters stays. None is left after `remove`."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    seen = []

    @torch.no_grad()
    def hook(*args):
        seen.append(values(model.parameters()))
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(model.parameters(), acc.parameters(), strict=True))
        if edits != "nothing":
            for p in model.parameters() if edits == "the model" else acc.parameters():
                p.data.clamp_(-0.1, 0.1) if edits == "masters" else p.clamp_(-0.1, 0.1)

    handle = optimizer.register_step_post_hook(hook)
    for seed in range(3):
        window(acc, model, seed)
        if form == "step":
            acc.step(optimizer)
        else:
            acc.finalize(optimizer)
            optimizer.step()
            acc.zero_()
        if edits == "nothing":
            assert all(torch.equal(p, s) for p, s in zip(model.parameters(), seen[-1], strict=True))
        else:
            assert all(p.abs().max() <= 0.1004 for p in model.parameters())
    acc.state_dict()
    optimizer.param_groups[0]["lr"] = 0.0
    train(acc, model, optimizer, windows=1)
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(model.parameters(), acc.parameters(), strict=True))
    assert not torch.equal(seen[0][0], seen[1][0])
    acc.remove()
    assert list(optimizer._optimizer_step_post_hooks) == [handle.id]


def test_another_dtype_is_refused_by_name():
    """As without an edit; what does not use the parameter goes on."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    train(acc, model, optimizer)
    masters = values(acc.parameters())
    model[0].weight.data = torch.zeros(9, 5)
    with pytest.raises(RuntimeError, match=r"'0.weight' was torch.bfloat16 at construction and is torch.float32 now"):
        window(acc, model.float())
    assert torch.equal(acc.state_dict()["masters"]["0.weight"], masters[0])
    acc.remove()
    assert torch.equal(next(acc.parameters()), masters[0])


def test_edits_through_data_need_refresh_masters():
    """No version counter and no address shows them."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)
    edited = values(model.parameters())
    acc.refresh_masters()
    window(acc, model)
    acc.step(optimizer)
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), edited, strict=True))
    assert all(torch.equal(m, e.float()) for m, e in zip(acc.parameters(), edited, strict=True))


def test_the_last_edit_before_remove():
    """A trainer's adapter gives the masters to the next accumulator."""
    model = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(model, master_weights=True)
    train(acc, model, torch.optim.SGD(acc.parameters(), lr=0.1))
    EDITS["other weights"](model)
    acc.remove()
    assert all(torch.equal(m.bfloat16(), p) for m, p in zip(acc.parameters(), model.parameters(), strict=True))


def test_another_models_optimizer_does_not_matter():
    """Its step neither looks at these weights nor takes their edits for its own."""
    model, other = mlp(torch.bfloat16), mlp()
    acc = ak.FusedAccumulator(model, master_weights=True)
    before = values(acc.parameters())
    EDITS["clamp"](model)
    x, y = batch(4)
    mse_loss(other(x), y).backward()
    with Comparisons() as comparisons:
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert comparisons.count == 0
    assert all(torch.equal(m, b) for m, b in zip(acc.parameters(), before, strict=True))
