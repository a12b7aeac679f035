"""release="backward": gradients are added while backward runs, with the numbers of "microbatch"."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import accumkernels as ak
from accumkernels.capture.inbox import MicroBatch
from accumkernels.ops import reference
from tests.support.backends import BACKENDS
from tests.support.buckets import BUCKETS, Boom, Checkpointed, Tied, hooks, train
from tests.support.models import batch, big_batch_grads, grads_of, mlp, relative_error


@pytest.mark.parametrize("make", [mlp, Tied, lambda: Checkpointed(False)], ids=["mlp", "tied", "checkpointed"])
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("form", ["step", "bare"])
def test_same_bits_as_microbatch(make, bucket_bytes, scaled, form):
    """Whatever the bucket: weights, overflow, skipped steps, unused and tied parameters."""
    expected = train(make, "microbatch", scaled=scaled, form=form)
    actual = train(make, "backward", bucket_bytes, scaled=scaled, form=form)
    assert all(torch.equal(a, e) for a, e in zip(actual[0], expected[0], strict=True))
    assert actual[1] == expected[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend):
    """The sums of several buckets are those of plain torch."""
    model = mlp()
    x, y = batch(5)
    sums = []
    for device, name, release in (("cpu", "reference", "microbatch"), (backend.device, backend.name, "backward")):
        twin = copy.deepcopy(model).to(device)
        acc = ak.FusedAccumulator(twin, release=release, bucket_bytes=100, backend=name)
        for step in range(3):
            acc.backward(mse_loss(twin(x.to(device) + step), y.to(device)), weight=step)
        sums.append([acc.main_grad(p).cpu().clone() for p in twin.parameters()])
    for a, e in zip(*sums, strict=True):
        torch.testing.assert_close(a, e, rtol=0 if backend.device.type == "cpu" else 1e-5, atol=1e-6)


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_reentrant_checkpointing(bucket_bytes):
    """Hooks fire once per reentrant part: the parts are summed in fp32, which rounds elsewhere than .grad does."""
    expected = train(lambda: Checkpointed(True), "microbatch")
    actual = train(lambda: Checkpointed(True), "backward", bucket_bytes)
    for a, e in zip(actual[0], expected[0], strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_two_backwards_are_one_micro_batch(bucket_bytes):
    """Two bare backwards, one accumulate: summed once, counted once."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=bucket_bytes)
    x, y = batch(4)
    twin = copy.deepcopy(model).double()
    for _ in range(2):
        mse_loss(model(x), y).backward()
        mse_loss(twin(x.double()), y.double()).backward()
    acc.accumulate()
    assert acc.micro_batches == 1
    assert acc.weight.item() == 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(acc.main_grad(p).double(), q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("ours", [True, False])
def test_gradients_with_graphs(backend, bucket_bytes, ours):
    """Those of `create_graph=True` are added like any others: nobody differentiates the sums."""
    model = mlp().to(backend.device)
    x, y = (t.to(backend.device) for t in batch(4))
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=bucket_bytes, backend=backend.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle between a parameter and such a `.grad`
        if ours:
            acc.backward(mse_loss(model(x), y), create_graph=True)
        else:
            mse_loss(model(x), y).backward(create_graph=True)
            acc.accumulate()
    sums = [acc.main_grad(p) for p in model.parameters()]
    assert not any(s.requires_grad for s in sums)
    assert relative_error(sums, big_batch_grads(model, x, y)) < 1e-6


@pytest.mark.parametrize("ours", [True, False])
def test_buffers_that_were_released(ours):
    """The first bucket makes them anew, whoever runs the backward."""
    model = mlp()
    x, y = batch(4)
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1)
    acc.release_buffers()
    if ours:
        acc.backward(mse_loss(model(x), y))
    else:
        mse_loss(model(x), y).backward()
        acc.accumulate()
    assert relative_error([acc.main_grad(p) for p in model.parameters()], big_batch_grads(model, x, y)) < 1e-6


class Alive:
    """Counts the bytes of weight gradients that are alive, and the most there ever were."""

    def __init__(self):
        self.bytes = self.peak = 0

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, nbytes):
        self.bytes -= nbytes


class Watched(torch.autograd.Function):
    """A matrix product whose weight gradient is watched from the moment it exists."""

    @staticmethod
    def forward(ctx, x, weight, alive):
        ctx.save_for_backward(x, weight)
        ctx.alive = alive
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_weight = x.t() @ grad
        ctx.alive.watch(of_weight)
        return grad @ weight.t(), of_weight, None


@pytest.mark.parametrize("release", ["microbatch", "backward", "auto"])
@pytest.mark.parametrize("bucket_layers", [1, 3])
def test_gradients_die_young(release, bucket_layers):
    """Never more than the bucket and one gradient alive with "backward"; all of them with "microbatch"."""
    layers, size = 12, 64 * 64 * 4
    weights = [nn.Parameter(torch.randn(64, 64) / 8) for _ in range(layers)]
    acc = ak.FusedAccumulator(weights, release=release, bucket_bytes=bucket_layers * size)
    alive = Alive()
    for _ in range(3):
        x = torch.ones(2, 64)
        for weight in weights:
            x = Watched.apply(x, weight, alive)
        acc.backward(x.sum())
        assert alive.bytes == 0
    # The engine holds the gradient of the hook that runs: the bucket is complete with it.
    assert alive.peak == (layers * size if release == "microbatch" else bucket_layers * size)


def test_gradients_that_arrive_in_bits_fill_the_bucket_to_its_bound():
    """Gradients of unequal sizes: at most bucket_bytes and the largest gradient."""
    sizes = [3, 64, 7, 50, 1, 33, 64, 12]
    weights = [nn.Parameter(torch.randn(4, n)) for n in sizes]
    bucket_bytes = 40 * 16
    acc = ak.FusedAccumulator(weights, release="backward", bucket_bytes=bucket_bytes)
    alive = Alive()
    x = torch.ones(2, 4)
    acc.backward(sum(Watched.apply(x, weight, alive).sum() for weight in weights))
    assert alive.bytes == 0
    assert 0 < alive.peak <= bucket_bytes + 64 * 16


class Awaiting:
    """A sink that wants every gradient at once."""

    def __init__(self, acc, buckets):
        self.flush_at = {(buffer, index) for buffer in acc.engine.store.buffers for index in buffer.all_indices}
        self._buckets = buckets

    def add(self, bucket, micro_batch):
        self._buckets.append(bucket)


def test_buckets_are_as_large_as_they_may_be(monkeypatch):
    """Of 592 bytes of gradients one bucket of at least 300, and the rest; also after smaller ones."""
    added, add = [], reference.accumulate_
    monkeypatch.setattr(
        reference, "accumulate_", lambda *args, **options: (added.append(args[2]), add(*args, **options))
    )
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=300, backend="reference")
    x, y = batch(3)
    for _ in range(2):
        added.clear()
        acc.backward(mse_loss(model(x), y))
        sizes = [sum(grad.nbytes for grad in grads) for grads in added if grads]
        assert sum(sizes) == 592
        assert len(sizes) == 2 and sizes[0] >= 300
        smaller = []
        inbox = acc.engine.runner.captures.inbox
        inbox.begin(MicroBatch(1.0, 1), Awaiting(acc, smaller), holds_leaves=False)
        mse_loss(model(x), y).backward()
        inbox.end()
        assert len(smaller) > 2
        acc.zero_()


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("form", ["backward", "bare"])
def test_the_last_bucket_counts_the_micro_batch(monkeypatch, form, weight):
    """In the op that adds it: a model of one bucket runs one op for each micro-batch."""
    calls, add = [], reference.accumulate_
    monkeypatch.setattr(reference, "accumulate_", lambda *args, **options: (calls.append(1), add(*args, **options)))
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", backend="reference")
    x, y = batch(3)
    for micro_batches in (1, 2):
        if form == "backward":
            acc.backward(mse_loss(model(x), y), weight)
        else:
            weight = 1.0
            mse_loss(model(x), y).backward()
            acc.accumulate()
        assert len(calls) == micro_batches
        assert acc.weight.item() == weight * micro_batches
    expected = big_batch_grads(model, x, y)
    sums = [acc.main_grad(p).double() / acc.weight for p in model.parameters()]
    assert relative_error(sums, expected) < 1e-6


def test_what_is_pending_and_what_is_in_grad_are_one_micro_batch():
    """A gradient that no hook took, as one that is set by hand, is added beside those of the last bucket."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward")
    x, y = batch(3)
    expected = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
    mse_loss(model(x), y).backward()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    acc.accumulate()
    assert acc.micro_batches == 1 and acc.weight.item() == 1
    for index, (p, grad) in enumerate(zip(model.parameters(), expected, strict=True)):
        assert p.grad is None
        assert torch.equal(acc.main_grad(p), grad + 1 if index == 0 else grad)


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("form", ["backward", "bare"])
def test_an_exception_in_backward_breaks_the_window(bucket_bytes, form):
    """accumulate, backward and finalize raise until zero_(), which mends."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=bucket_bytes)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    loss = mse_loss(model[2:](Boom.apply(model[:2](x))), y)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        acc.backward(loss) if form == "backward" else loss.backward()
    if form == "bare":
        acc.discard()  # some were added already: it cannot be undone
    for call in (
        acc.accumulate,
        lambda: acc.finalize(optimizer),
        lambda: acc.step(optimizer),
        lambda: acc.backward(y.sum()),
    ):
        with pytest.raises(RuntimeError, match=r"this window is broken: a backward raised.*acc\.zero_\(\)"):
            call()
    acc.zero_()
    assert all(p.grad is None for p in model.parameters())
    expected = copy.deepcopy(model)
    mse_loss(expected(x), y).backward()
    acc.backward(mse_loss(model(x), y))
    acc.finalize(optimizer)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("form", ["backward", "bare"])
def test_a_gradient_refused_after_buckets(form):
    """What was added before it breaks the window, also where nobody discards the micro-batch."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 100))
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1000)
    loss = model(torch.tensor([0, 2])).sum()
    if form == "bare":
        loss.backward()
    with pytest.raises(RuntimeError, match="gradient of '0.weight' is sparse"):
        acc.backward(loss) if form == "backward" else acc.accumulate()
    with pytest.raises(RuntimeError, match="this window is broken"):
        acc.accumulate()


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_inside_another(bucket_bytes, fails):
    """That of reentrant checkpointing ends before the one around it, whose exception breaks the window all the same."""
    first, second = nn.Linear(5, 5), nn.Linear(5, 3)
    acc = ak.FusedAccumulator(nn.ModuleList([first, second]), release="backward", bucket_bytes=bucket_bytes)
    x, y = batch(3)
    between = first(x).tanh()
    loss = mse_loss(checkpoint(second, Boom.apply(between) if fails else between, use_reentrant=True), y)
    if fails:
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            loss.backward()
        for undo in (lambda: None, acc.discard):
            undo()
            with pytest.raises(RuntimeError, match="this window is broken"):
                acc.accumulate()
        return
    loss.backward(retain_graph=True)
    acc.accumulate()
    loss.backward()
    acc.accumulate()
    acc.finalize()
    assert relative_error(grads_of(acc), big_batch_grads(nn.Sequential(first, nn.Tanh(), second), x, y)) < 1e-6
    loss = mse_loss(second(first(x).tanh()), y)
    loss.backward()  # torch's alone until the next window
    acc.zero_()
    acc.backward(mse_loss(second(first(x).tanh()), y))
    acc.finalize()


def test_a_backward_that_reaches_nothing_has_ended():
    """It counts as a micro-batch whose gradient is zero, and what is discarded after it breaks nothing."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward")
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.backward(nn.Parameter(torch.ones(())) * 2)
    acc.discard()
    acc.finalize()
    expected = [g / 2 for g in big_batch_grads(model, x, y)]
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-6


def test_discard_before_anything_was_added():
    """A micro-batch that is pending as a whole can be dropped like any other."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward")
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    kept = [acc.main_grad(p).clone() for p in model.parameters()]
    mse_loss(model(x), y).backward()
    acc.discard()
    assert acc.micro_batches == 1
    acc.accumulate(0.0)
    assert all(torch.equal(acc.main_grad(p), k) for p, k in zip(model.parameters(), kept, strict=True))


def test_a_hook_that_finds_no_grad():
    """Another hook has taken the gradient before: the parameter is not touched."""
    model = mlp()
    last = model[-1].bias

    def steal(param):
        param.grad = None

    last.register_post_accumulate_grad_hook(steal)
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.finalize(optimizer)
    assert last.grad is None
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("weight", [2.0, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_weight_must_be_known_before_backward(weight):
    """After a bare backward only 1 is taken, and acc.backward does not join an earlier one with another weight."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1)
    x, y = batch(3)
    mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"pass the weight to acc\.backward\(loss, weight\)"):
        acc.accumulate(weight)
    with pytest.raises(RuntimeError, match="an earlier backward of this micro-batch was added with weight 1"):
        acc.backward(mse_loss(model(x), y), weight)
    acc.accumulate(1)
    assert acc.micro_batches == 1


def test_gradients_that_were_never_counted():
    """finalize after a bare backward: an error, not a silent loss."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match="gradients of a backward were never counted"):
        acc.finalize(optimizer)
    acc.accumulate()
    acc.finalize(optimizer)


@pytest.mark.parametrize("release", ["backward", "auto"])
def test_a_weight_is_that_of_its_own_backward(release):
    """A loop's own backward after weighted ones, one of which failed, counts 1."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release=release, bucket_bytes=1)
    x, y = batch(6)
    with pytest.raises(torch.OutOfMemoryError):
        acc.backward(mse_loss(model[2:](Boom.apply(model[:2](x))), y), weight=5)
    acc.zero_()
    acc.backward(mse_loss(model(x[:2]), y[:2]), weight=2)
    for row in range(2, 6):
        mse_loss(model(x[row]), y[row]).backward()
        assert [p.grad is None for p in model.parameters()] == [release == "backward"] * 6
        acc.accumulate()
    acc.finalize()
    assert relative_error([p.grad for p in model.parameters()], big_batch_grads(model, x, y)) < 1e-6


@pytest.mark.parametrize("overflow", ["microbatch", "raise"])
def test_modes_that_need_the_whole_micro_batch(overflow):
    """Refused, with the reason."""
    with pytest.raises(ValueError, match=f"overflow='{overflow}' needs release='microbatch' or 'auto': whether"):
        ak.FusedAccumulator(mlp(), release="backward", overflow=overflow)


@pytest.mark.parametrize("bucket_bytes", [1, 100])
def test_noise_scale_in_buckets(bucket_bytes):
    """A micro-batch's squared norm is the sum over its buckets."""
    found = []
    for release in ("microbatch", "backward"):
        torch.manual_seed(0)
        model = mlp()
        acc = ak.FusedAccumulator(model, release=release, bucket_bytes=bucket_bytes, noise_scale=True)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for step in range(6):
            x, y = batch(3, seed=step)
            acc.backward(mse_loss(model(x), y), weight=1 + step % 2)
            if step % 3 == 2:
                acc.step(optimizer)
        found.append(acc.noise_scale())
    assert found[1].windows == found[0].windows == 2
    assert found[1].trace == pytest.approx(found[0].trace, rel=1e-9)
    assert found[1].grad_squared_norm == pytest.approx(found[0].grad_squared_norm, rel=1e-9)


def test_noise_scale_leaves_out_windows_whose_gradients_come_in_parts():
    """The squared norm of a sum is not the sum of the squared norms of its parts; the next window counts again."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1, noise_scale=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    for backwards, windows in ((2, 0), (1, 1), (2, 1)):
        for _ in range(2):
            for _ in range(backwards):
                mse_loss(model(x), y).backward()
            acc.accumulate()
        acc.step(optimizer)
        assert acc.noise_scale().windows == windows


def test_unfrozen_parameters_get_hooks():
    """Parameters unfrozen between windows are released in backward, too."""
    model = mlp()
    model[0].requires_grad_(False)
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    model[0].requires_grad_(True)
    mse_loss(model(x), y).backward()  # no hook yet: accumulate takes it
    acc.accumulate()
    acc.backward(mse_loss(model(x), y))
    expected = copy.deepcopy(model)
    mse_loss(expected(x), y).backward()
    acc.finalize(optimizer)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_backward_after_finalize_is_torchs():
    """Between finalize and step nothing is taken: a penalty's backward adds to .grad, as in torch."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.finalize(optimizer)
    before = [p.grad.clone() for p in model.parameters()]
    sum(p.sum() for p in model.parameters()).backward()
    assert all(torch.equal(p.grad, b + 1) for p, b in zip(model.parameters(), before, strict=True))


def test_hooks_leave_with_the_accumulator():
    """remove(), leaving `with`, or dropping the accumulator takes off every hook; copies of the model have none."""
    model = mlp()
    with ak.FusedAccumulator(model, release="backward") as acc:
        assert hooks(model) == 6
        assert hooks(copy.deepcopy(model)) == 0
        assert hooks(pickle.loads(pickle.dumps(model))) == 0
    assert hooks(model) == 0
    acc = ak.FusedAccumulator(model, release="backward")
    acc.remove()
    assert hooks(model) == 0
    acc = ak.FusedAccumulator(model, release="backward")
    gone = weakref.ref(acc)
    del acc
    gc.collect()
    assert gone() is None
    assert hooks(model) == 0
    x, y = batch(3)
    mse_loss(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
def test_side_streams_on_a_gpu():
    """Branches of the forward on streams of their own: the same bits as one after the other."""
    device = torch.device("cuda")

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
            self.streams = [torch.cuda.Stream() for _ in range(4)]

        def forward(self, x, parallel):
            outputs, main = [], torch.cuda.current_stream()
            for part, stream in zip(self.parts, self.streams, strict=True):
                stream = stream if parallel else main
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    outputs.append(part(x))
            for stream in self.streams:
                main.wait_stream(stream)
            return torch.stack(outputs).sum()

    model = Branches().to(device)
    results = []
    for release, parallel in [("microbatch", False), ("backward", True)]:
        with ak.FusedAccumulator(model, release=release, bucket_bytes=1) as acc:
            for step in range(20):
                acc.backward(model(torch.full((64, 512), 1.0 + step, device=device), parallel))
            results.append([acc.main_grad(p).clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("form", ["step", "bare"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_others_find_their_gradients(when, form):
    """Registered before or after the accumulator, and changing `.grad`; the rest still goes in buckets."""
    model, twin = mlp().double(), mlp().double()
    twin.load_state_dict(model.state_dict())
    watched = model[0].weight

    def shrink(param):
        param.grad.mul_(0.1)

    def register():
        watched.register_post_accumulate_grad_hook(shrink)

    if when == "before":
        register()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1)
    if when == "after":
        register()
    x, y = (t.double() for t in batch(6))
    for rows in (slice(0, 3), slice(3, 6)):
        loss = mse_loss(model(x[rows]), y[rows])
        loss.backward() if form == "bare" else acc.backward(loss)
        if form == "bare":
            assert all(p is watched or p.grad is None for p in model.parameters())
            acc.accumulate()
    acc.finalize()
    mse_loss(twin(x), y).backward()
    twin[0].weight.grad.mul_(0.1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)  # fp64 sums of two terms


@pytest.mark.parametrize("long_form", [False, True])
def test_hooks_on_the_nodes_of_leaves_find_their_gradients(long_form):
    """On AccumulateGrad, as Megatron and older FSDP have them, which keep the nodes."""
    model = mlp()
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    found = []
    for node, param in zip(nodes, model.parameters(), strict=True):
        node.register_hook(lambda *_, param=param: found.append(None if param.grad is None else param.grad.clone()))
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1)
    x, y = batch(3)
    loss = mse_loss(model(x), y)
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    found.clear()
    if long_form:
        loss.backward()
        acc.accumulate()
    else:
        acc.backward(loss)
    assert len(found) == 6 and all(grad is not None for grad in found)
    acc.finalize()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_gradients_of_another_loss_discarded_before_the_window(bucket_bytes):
    """A generator's loss leaves gradients in buckets of the discriminator: before anything counts, all can go."""
    generator, discriminator = nn.Linear(5, 5), mlp()
    options = {"release": "backward", "bucket_bytes": bucket_bytes}
    ours, theirs = (ak.FusedAccumulator(model, **options) for model in (generator, discriminator))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for turn in range(2):
        x, y = batch(3, seed=turn)
        ours.backward(mse_loss(discriminator(generator(x)), y), weight=3)
        ours.step(optimizer)
        theirs.discard()
        theirs.backward(mse_loss(discriminator(x), y), weight=3)
        theirs.finalize()
        assert relative_error(grads_of(theirs), big_batch_grads(discriminator, x, y)) < 1e-6
        theirs.zero_()


def test_a_window_that_was_to_be_dropped_is_dropped_after_such_a_discard():
    """The promise that step() skips holds for the window, whatever else is discarded in it."""
    model = mlp()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=4)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(3)
    acc.discard(window=True)
    mse_loss(model(x), y).backward()
    acc.discard()
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    assert acc.step_was_skipped
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
