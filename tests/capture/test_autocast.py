"""The autocast route: the bits of stock autocast, without its casts."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import accumkernels as ak
from accumkernels.demo.model import GPT
from tests.support.backends import same_bits

HALVES = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    """Convolutions in channels_last, a norm that autocast leaves alone, a linear head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, groups=2)
        self.head = nn.Linear(8, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x.to(memory_format=torch.channels_last))))
        return self.head(self.body(x).mean((2, 3)))


class TiedLM(nn.Module):
    """Embedding and head share one parameter in two slots: one is read as fp32, the other through a cast."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embedding(ids))))


class TiedByFunction(TiedLM):
    """The embedding's weight is cast outside of the module that has it: its gradient goes the ordinary way."""

    def forward(self, ids):
        return F.linear(torch.tanh(self.body(self.embedding(ids))), self.embedding.weight)


class Twice(nn.Module):
    """A module called twice, and a weight shared by two modules: their gradients meet in 16 bit."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.other = nn.Linear(16, 16)
        self.other.weight = self.inner.weight
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.other(torch.tanh(self.inner(torch.tanh(self.inner(x))))))


class Checkpointed(nn.Module):
    """A block that is run again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
        self.out = nn.Linear(16, 4)
        self.reentrant = reentrant

    def forward(self, x):
        return self.out(checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=self.reentrant))


class Functional(nn.Module):
    """A weight that its own module casts, and another module reads as it is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.inner(x)) + self.inner.weight.sum() + F.linear(x, self.inner.weight).sum()


class Island(nn.Module):
    """Autocast inside forward, switched off for one module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.island = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)
        self.dtype = torch.bfloat16

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            x = self.inner(x)
            with torch.autocast("cpu", enabled=False):
                x = self.island(x.float())
            return self.out(x)


def random_ids(step):
    """Token ids."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(50, (3, 7), generator=generator),)


def vectors(step):
    """A batch of vectors."""
    return (torch.randn(3, 16, generator=torch.Generator().manual_seed(step)),)


def images(step):
    """A batch of images."""
    return (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step)),)


def bytes_and_targets(step):
    """Input of the demo model."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(256, (2, 9), generator=generator), torch.randint(256, (2, 9), generator=generator)


MODELS = {  # model, inputs, parameters that take the route
    "gpt": (GPT, bytes_and_targets, 17),
    "conv": (Net, images, 6),
    "tied": (TiedLM, random_ids, 3),
    "tied by function": (TiedByFunction, random_ids, 2),
    "twice": (Twice, vectors, 5),
    "checkpoint": (lambda: Checkpointed(False), vectors, 6),
    "reentrant checkpoint": (lambda: Checkpointed(True), vectors, 6),
    "functional": (Functional, vectors, 3),
    "island": (Island, vectors, 4),
    "lstm": (lambda: nn.LSTM(16, 8), vectors, None),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)), vectors, 1),
}


def loss_of(output):
    """A scalar of any model's output."""
    output = output[0] if isinstance(output, tuple) else output
    return output.float().square().mean() * 3


def sums(make, inputs, dtype=torch.bfloat16, micro_batches=3, windows=2, form="backward", scaled=False, **kwargs):
    """Main gradients of each window, after training steps between; the accumulator; the model."""
    torch.manual_seed(0)
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6) if scaled else None
    acc = ak.FusedAccumulator(model, scaler=scaler, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = []
    for window in range(windows):
        for step in range(micro_batches):
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model(*inputs(10 * window + step)))
            if form == "backward":
                acc.backward(loss, weight=1 + step)
            else:
                (loss if scaler is None else scaler.scale(loss)).backward()
                acc.accumulate()
        results += [acc.main_grad(p).clone() for p in model.parameters()]
        acc.step(optimizer)
    return results + [p.detach().clone() for p in model.parameters()], acc, model


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_as_autocast(name, dtype):
    """Sums and trained parameters, for every kind of model; and the route was taken where it can be."""
    make, inputs, routed = MODELS[name]
    if name == "lstm" and dtype == torch.float16:
        dtype = torch.bfloat16  # the CPU has no fp16 LSTM
    if name == "island" and dtype == torch.float16:
        make = functools.partial(_island, torch.float16)
    expected, _, _ = sums(make, inputs, dtype, scaled=True, autocast_route=False)
    actual, acc, _ = sums(make, inputs, dtype, scaled=True)
    assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))
    if routed is not None:
        assert f"autocast route for {routed} parameters" in repr(acc)


def _island(dtype):
    model = Island()
    model.dtype = dtype
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["backward", "bare"])
def test_released_in_backward(name, form):
    """release="backward" on the route, and loops of the user's own."""
    make, inputs, _ = MODELS[name]
    expected, _, _ = sums(make, inputs, form=form, autocast_route=False)
    actual, acc, _ = sums(make, inputs, form=form, release="backward", bucket_bytes=200)
    if name == "gpt" and form == "backward":
        assert "autocast route for 17 parameters" in repr(acc)  # the tied embedding too
    # Gradients that come in parts are added part by part.
    exact = name not in ("functional", "reentrant checkpoint") and (name, form) != ("gpt", "backward")
    for a, e in zip(actual, expected, strict=True):
        assert same_bits(a, e) if exact else torch.allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("route", ["auto", True])
@pytest.mark.parametrize("name", MODELS)
def test_bare_loops(name, route):
    """scaler.scale(loss).backward(), acc.accumulate()."""
    make, inputs, _ = MODELS[name]
    expected, _, _ = sums(make, inputs, form="bare", scaled=True, autocast_route=False)
    actual, _, _ = sums(make, inputs, form="bare", scaled=True, autocast_route=route)
    assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))


def trained(windows=2, **kwargs):
    """A model on the route, its accumulator and optimizer, after some windows."""
    torch.manual_seed(0)
    model = Twice()
    acc = ak.FusedAccumulator(model, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(windows):
        acc.backward(forward(model, step))
        acc.step(optimizer)
    return model, acc, optimizer


def forward(model, step=0, dtype=torch.bfloat16):
    """The loss under autocast."""
    with torch.autocast("cpu", dtype=dtype):
        return loss_of(model(*vectors(step)))


def count_casts(run):
    """How many times an fp32 matrix was cast to 16 bit."""

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        casts = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and args[0].shape[0] == args[0].shape[1]:
                Count.casts += 1
            return out

    with Count():
        run()
    return Count.casts


def test_nothing_is_cast_or_widened():
    """From the third forward on there is no cast of a weight, and .grad is never made."""
    model, acc, optimizer = trained()
    seen = []
    assert count_casts(lambda: acc.backward(forward(model))) == 0
    model.inner.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    acc.backward(forward(model))
    assert seen == [torch.float32]  # a hook that waits for .grad gets it
    acc.step(optimizer)


@pytest.mark.parametrize("route", ["auto", True])
def test_grad_in_a_loop_of_ones_own(route):
    """In auto mode fp32 .grads are left where the user may look for them, True takes them."""
    model, acc, _ = trained(autocast_route=route)
    twin = copy.deepcopy(model)
    forward(twin).backward()
    forward(model).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if route == "auto":
            assert torch.equal(p.grad, q.grad)
        else:
            assert p.grad is None
    acc.accumulate()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(acc.main_grad(p), q.grad)


@pytest.mark.parametrize("route", ["auto", True])
def test_two_backwards_before_one_accumulate(route):
    """Each is widened before they are added, as .grad would be; not added in 16 bit."""
    model, acc, _ = trained(autocast_route=route)
    twin = copy.deepcopy(model)
    for step in range(2):
        forward(twin, step).backward()
        forward(model, step).backward()
    acc.accumulate()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(acc.main_grad(p), q.grad)


def edit_in_place(p):
    """In place, under no_grad."""
    with torch.no_grad():
        p.mul_(0.5)


def edit_data(p):
    """Behind autograd's back, to another address."""
    p.data = p.data * 0.5


def load(p):
    """As load_state_dict does."""
    with torch.no_grad():
        p.copy_(p * 0.5)


@pytest.mark.parametrize("edit", [edit_in_place, edit_data, load])
def test_edits_in_mid_window_are_seen(edit):
    """load_state_dict, swapped averages, in-place edits: the next forward uses the new values."""
    model, acc, _ = trained()
    acc.backward(forward(model))
    for p in model.parameters():
        edit(p)
    assert torch.equal(forward(model), forward(copy.deepcopy(model)))


def test_evaluation_between_micro_batches():
    """Under no_grad, in another dtype, without autocast: the parameters themselves."""
    model, acc, _ = trained()
    acc.backward(forward(model))
    for p in model.parameters():
        p.data.mul_(0.5)  # an average swapped in behind torch's back
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(forward(model), forward(twin))
    assert torch.equal(forward(model, dtype=torch.float16), forward(twin, dtype=torch.float16))
    assert torch.equal(loss_of(model(*vectors(0))), loss_of(twin(*vectors(0))))


def test_a_backward_through_old_values_notices():
    """A graph from before an edit: an error, not gradients at the wrong place."""
    model, acc, _ = trained()
    stale = forward(model)
    edit_in_place(model.inner.weight)
    fresh = forward(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    acc.discard()
    acc.backward(fresh)


def test_slots_hold_parameters_outside_forward():
    """Also after an exception in forward; a state_dict never has 16 bits."""
    model, acc, _ = trained()
    params = dict(model.named_parameters())

    def boom(*_):
        raise ValueError("planted")

    handle = model.out.register_forward_pre_hook(boom)
    with pytest.raises(ValueError, match="planted"):
        forward(model)
    handle.remove()
    assert dict(model.named_parameters()) == params
    assert all(t.dtype == torch.float32 for t in model.state_dict().values())
    acc.backward(forward(model))


@pytest.mark.parametrize("release", ["microbatch", "backward"])
def test_discard_and_overflow(release):
    """What was taken goes with the micro-batch."""
    model, acc, optimizer = trained(release=release, bucket_bytes=2**20, autocast_route=True)
    acc.backward(forward(model))
    before = [acc.main_grad(p).clone() for p in model.parameters()]
    forward(model, 1).backward()
    acc.discard()
    acc.accumulate(0)
    assert all(torch.equal(acc.main_grad(p), b) for p, b in zip(model.parameters(), before, strict=True))
    forward(model, 1).backward()
    with pytest.raises(RuntimeError, match="gradients of a backward were never counted"):
        acc.finalize(optimizer)


def test_overflow_in_16_bits_is_found():
    """An infinity in a 16-bit gradient drops the micro-batch and names its parameters."""
    torch.manual_seed(0)
    model = Twice()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    acc = ak.FusedAccumulator(model, scaler=scaler, overflow="microbatch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    acc.backward(forward(model, dtype=torch.float16))
    acc.backward(forward(model, dtype=torch.float16) * 1e6)
    assert acc.found_inf.item() == 1
    assert acc.weight.item() == 1
    assert "inner.weight" in acc.overflow_report()
    acc.step(optimizer)
    assert scaler.get_scale() == 1.0


def test_gradient_hooks_keep_their_parameter():
    """A tensor hook that changes the gradient still does."""
    model, acc, _ = trained()
    model.out.weight.register_hook(lambda g: g * 0)
    acc.backward(forward(model))
    assert not acc.main_grad(model.out.weight).any()
    assert acc.main_grad(model.inner.weight).any()


def test_backward_after_finalize_is_torchs():
    """Between finalize and step a backward adds to .grad."""
    model, acc, optimizer = trained()
    acc.backward(forward(model))
    acc.finalize(optimizer)
    expected = [p.grad.clone() for p in model.parameters()]
    twin = copy.deepcopy(model)
    forward(twin).backward()
    forward(model).backward()
    for p, q, e in zip(model.parameters(), twin.parameters(), expected, strict=True):
        assert torch.equal(p.grad, e + q.grad)


def test_a_forward_between_step_and_zero_sees_the_step():
    """Torch's fused optimizers do not count as in-place changes; a loop may clear gradients right before backward."""
    model, acc, _ = trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    acc.backward(forward(model))
    acc.finalize(optimizer)
    optimizer.step()
    twin = copy.deepcopy(model)
    loss, expected = forward(model), forward(twin)
    assert torch.equal(loss, expected)
    acc.zero_()
    acc.backward(loss)
    expected.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(acc.main_grad(p), q.grad)


def test_copies_and_pickles_of_the_model():
    """They run, know nothing of the accumulator, and need no accumkernels to load."""
    model, acc, _ = trained()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(forward(twin), forward(model))
        forward(twin).backward()
        assert all(p.grad is not None for p in twin.parameters())
    assert b"accumkernels.capture.autocast" not in pickle.dumps(model)
    assert acc.micro_batches == 0


def test_remove_takes_off_every_hook():
    """And the model goes on without."""
    model, acc, _ = trained()
    acc.remove()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    forward(model).backward()
    assert all(p.grad is not None for p in model.parameters())
    again = ak.FusedAccumulator(model)
    del again, acc


@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_fall_back(compiled_first, whole):
    """torch.compile of the model or of a part, before or after: ordinary gradients there, the right ones everywhere."""
    torch.manual_seed(0)
    model = Twice()
    twin = copy.deepcopy(model)
    acc = None if compiled_first else ak.FusedAccumulator(model)
    if whole:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        model.out.compile(backend="aot_eager")
        compiled = model
    acc = acc or ak.FusedAccumulator(compiled)
    for step in range(3):
        acc.backward(forward(compiled, step), weight=1)
        forward(twin, step).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(acc.main_grad(p), q.grad, rtol=2e-2, atol=2e-2)  # compiled bf16 rounds elsewhere
    torch._dynamo.reset()


def test_true_needs_a_module():
    """A list of parameters has no forward."""
    with pytest.raises(ValueError, match="autocast_route=True needs params to be a module"):
        ak.FusedAccumulator([nn.Parameter(torch.ones(2))], autocast_route=True)


def test_unfrozen_parameters_join():
    """A layer unfrozen later takes the route from its next forward on."""
    torch.manual_seed(0)
    model = Twice()
    model.out.requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for unfreeze in (False, True):
        model.out.requires_grad_(unfreeze)
        for step in range(3):
            twin = copy.deepcopy(model)
            acc.backward(forward(model, step))
            forward(twin, step).backward()
            if step == 0:
                expected = [q.grad for q in twin.parameters()]
                for p, e in zip(model.parameters(), expected, strict=True):
                    assert e is None or torch.equal(acc.main_grad(p), e)
        acc.step(optimizer)


def test_gradients_with_respect_to_parameters():
    """torch.autograd.grad finds the parameters of a model on the route, as do backward's inputs."""
    model, acc, _ = trained()
    twin = copy.deepcopy(model)
    loss = forward(model)
    ours = torch.autograd.grad(loss, [model.out.weight], retain_graph=True)
    theirs = torch.autograd.grad(forward(twin), [twin.out.weight])
    assert torch.equal(ours[0], theirs[0])
    acc.backward(loss, inputs=[model.out.weight])
    assert torch.equal(acc.main_grad(model.out.weight), theirs[0])
    assert acc._store.buffers[0].touched.count(1) == 1


def test_one_autocast_context_for_two_backwards():
    """The graph's shadow outlives the first backward, as autocast's cached cast does."""
    model, acc, _ = trained()
    twin = copy.deepcopy(model)
    for net, backward in ((model, acc.backward), (twin, lambda loss: loss.backward())):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for step in range(2):
                backward(loss_of(net(*vectors(step))))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(acc.main_grad(p), q.grad, rtol=0, atol=0)


class TwoWeights(nn.Module):
    """A module with two weights and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.enter, self.bias)), self.leave)


def test_a_bias_comes_with_its_weight_and_no_weight_waits_for_another():
    """With buckets a module's weights are released each by itself, and one function takes a weight and a bias."""
    model = TwoWeights()
    with ak.FusedAccumulator(model, autocast_route=True, release="backward", bucket_bytes=1) as acc:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, 16)).square().mean()
            functions, waiting = set(), [loss.grad_fn]
            while waiting:
                node = waiting.pop()
                leaves = [following for following, _ in node.next_functions if following is not None]
                if node.name() == "_TakeBackward":
                    functions.add(frozenset(id(leaf.variable) for leaf in leaves))
                else:
                    waiting += leaves
            acc.backward(loss)
    assert functions == {frozenset({id(model.enter), id(model.bias)}), frozenset({id(model.leave)})}
