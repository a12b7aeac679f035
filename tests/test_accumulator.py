"""FusedAccumulator as a whole: windows against the big batch, the order of calls, its life beside models and others."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, big_batch_grads, grads_of, mlp, relative_error

BACKENDS = ["native", "reference", "triton"]
# Relative L2 error of a mean of a few gradients: fp32 has 2**-24 per rounding, and a handful of roundings.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


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


def test_a_dropped_accumulator_frees_its_parameters():
    """Without references an accumulator is gone at once, and another may take its place."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    del acc
    ak.FusedAccumulator(model)


def test_repr_and_logging_tell_where_it_stands(caplog):
    """repr names parameters, bytes, backend, position and norm in a line, and str has a row for each."""
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
    assert "\n" not in repr(acc)
    heading, *rows = str(acc).splitlines()
    assert heading == "FusedAccumulator"
    assert [row.split()[0] for row in rows] == ["holds", "last", "overflow", "release", "window", "last"]
    assert len({len(row) - len(row[16:].lstrip()) for row in rows}) == 1, "values do not stand below each other"
    assert rows[-1].split()[-1] == f"{norm.item():.6g}"


def test_order_of_calls():
    """Calls out of order are RuntimeErrors that say the right one."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) before finalize\(\)"):
        acc.clip_grad_norm_(1.0)
    acc.finalize(optimizer)
    for call in (lambda: acc.accumulate(), lambda: acc.finalize(optimizer), lambda: acc.step(optimizer)):
        with pytest.raises(RuntimeError, match=r"after finalize\(\).*zero_\(\)"):
            call()
    with pytest.raises(RuntimeError, match=r"backward\(\) after finalize\(\)"):
        acc.backward(mse_loss(model(x), y))
    acc.zero_()
    mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"'0.weight' has a .grad that was never accumulated"):
        acc.step(optimizer)
    acc.discard()
    acc.step(optimizer)


@pytest.mark.parametrize("frozen", [False, True])
def test_two_accumulators_on_one_parameter(frozen):
    """The second one is refused with the parameter's name, until the first lets go; it may be unfrozen later."""
    model = mlp().requires_grad_(not frozen)
    first = ak.FusedAccumulator(model)
    with pytest.raises(RuntimeError, match="'0.weight' already has a FusedAccumulator"):
        ak.FusedAccumulator(model)
    first.remove()
    with ak.FusedAccumulator(model):
        pass
    ak.FusedAccumulator(model)


def test_disjoint_accumulators_over_one_model():
    """Two accumulators over different parameters of a model live side by side."""
    model = mlp()
    first, second = ak.FusedAccumulator(model[0]), ak.FusedAccumulator([*model[2].parameters(), *model[4].parameters()])
    x, y = batch(3)
    mse_loss(model(x), y).backward()
    first.accumulate()
    second.accumulate()
    first.step(torch.optim.SGD(first.parameters(), lr=0.1))
    second.step(torch.optim.SGD(second.parameters(), lr=0.1))


def test_sparse_gradient_is_named():
    """A sparse gradient is refused before anything is added."""
    model = nn.Sequential(nn.Embedding(4, 5, sparse=True), nn.Linear(5, 3))
    acc = ak.FusedAccumulator(model)
    model(torch.tensor([0, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of '0.weight' is sparse.*pass sparse=False"):
        acc.accumulate()
    assert acc.weight.item() == 0


@pytest.mark.parametrize("release", ["auto", "microbatch"])
@pytest.mark.parametrize("sparse_first", [False, True])
def test_a_refused_micro_batch_leaves_no_trace(release, sparse_first):
    """Where the first of two flat buffers refuses it; what was added to the first alone breaks the window."""
    dtypes = [torch.float64, torch.float32][:: -1 if sparse_first else 1]
    plain, table = nn.Parameter(torch.ones(4, dtype=dtypes[0])), nn.Parameter(torch.ones(5, 3, dtype=dtypes[1]))
    acc = ak.FusedAccumulator([table, plain] if sparse_first else [plain, table], release=release)

    def loss(sparse, factor):
        rows = nn.functional.embedding(torch.tensor([1, 2]), table, sparse=sparse)
        return (plain * factor).sum() + rows.sum().to(plain.dtype)

    acc.backward(loss(False, 1.0))
    with pytest.raises(RuntimeError, match="is sparse"):
        acc.backward(loss(True, 100.0))
    acc.discard()
    if not sparse_first:
        with pytest.raises(RuntimeError, match="this window is broken"):
            acc.step(torch.optim.SGD(acc.parameters(), lr=1.0))
        acc.zero_()
        acc.backward(loss(False, 1.0))
    assert acc.main_grad(plain).tolist() == [1, 1, 1, 1]
    assert acc.weight.item() == acc.micro_batches == 1
    acc.step(torch.optim.SGD(acc.parameters(), lr=1.0))
    assert plain.tolist() == [0, 0, 0, 0]
    assert acc.metrics()["loss"] == 10


def test_a_model_with_an_accumulator_pickles_and_copies():
    """Copies and pickles of the model know nothing of the accumulator."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ak.FusedAccumulator(twin)
        assert torch.equal(twin[0].weight, model[0].weight)
    assert acc.micro_batches == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_accumulator_is_not_copied(copied):
    """It says why, also as an attribute of what is copied."""
    holder = types.SimpleNamespace(acc=ak.FusedAccumulator(mlp()))
    for thing in (holder.acc, holder):
        if copied is not copy.copy or thing is not holder:
            with pytest.raises(TypeError, match="cannot be copied or pickled: it belongs to its parameters"):
                copied(thing)
