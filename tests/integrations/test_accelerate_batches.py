"""`accelerator.backward_batch` against the big batch in float64, with memory that runs out where a test says so."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.backends import same_bits
from tests.support.models import batch, big_batch_grads, mlp, relative_error
from tests.support.trainers import make

pytest.importorskip("accelerate")

from accumkernels.integrations.accelerate import Accelerator  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread", "fresh_state")]

EXACT = 1e-12  # gradients in fp64
# Of the way that parameters go, which is a tenth of them, and of matrix products in 16 bit.
ROUNDING = {"no": 5e-6, "fp16": 2e-3, "bf16": 2e-2}


def short_of_memory(model, most):
    """Let forwards of more than `most` samples run out of memory."""

    def check(module, inputs):
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError(f"{len(inputs[0])} samples")

    model.register_forward_pre_hook(check)
    return model


def prepared(accelerator, model, lr=1.0):
    """The prepared model and optimizer, which moves parameters by the gradient itself."""
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def gradients(optimizer):
    """As the loop would find them."""
    return [p.grad for p in optimizer.param_groups[0]["params"]]


def mean_loss(model):
    """Of a part, in full precision."""
    return lambda part: mse_loss(model(part[0]).to(part[1].dtype), part[1])


@pytest.mark.parametrize("inside", [True, False], ids=["accumulate", "plain"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_big_batch_whatever_the_split(steps, inside):
    """Batches of unequal sizes, each split where memory runs out: one window."""
    accelerator = make(Accelerator, steps=steps)
    model = short_of_memory(mlp(torch.float64), most=3)
    x, y = batch(16, torch.float64)
    whole = mlp(torch.float64)
    truth = big_batch_grads(whole, x, y)
    wrapped, optimizer = prepared(accelerator, model)
    sizes = (16,) if steps == 1 else (8, 7, 1)
    losses = []
    for part in zip(x.split(sizes), y.split(sizes), strict=True):
        if inside:
            with accelerator.accumulate(wrapped):
                report = accelerator.backward_batch(part, mean_loss(wrapped))
        else:
            report = accelerator.backward_batch(part, mean_loss(wrapped))
        assert sum(report.sizes) == len(part[0])
        assert max(report.sizes) <= 3
        losses.append(float(report.loss) * len(part[0]))
    if not inside:
        accelerator.unscale_gradients()
    assert relative_error(gradients(optimizer), truth) < EXACT
    assert sum(losses) / 16 == pytest.approx(mse_loss(whole(x), y).item(), rel=EXACT)
    assert accelerator.window_metrics()["accumulator/weight"] == 16


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_mixed_precision_and_clipping(precision):
    """The prepared model's autocast and the scaler's scale hold in each part; the norm is the big batch's."""
    accelerator = make(Accelerator, precision)
    x, y = batch(12)
    truth = big_batch_grads(mlp(), x, y)
    model, optimizer = prepared(accelerator, short_of_memory(mlp(), most=5))
    norms = []
    for part in zip(x.split(3), y.split(3), strict=True):
        with accelerator.accumulate(model):
            accelerator.backward_batch(part, mean_loss(model), micro_batch=2)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    norm = torch.cat([g.flatten() for g in truth]).norm().item()
    moved = [p - q for p, q in zip(mlp().parameters(), model.parameters(), strict=True)]
    assert norms == [pytest.approx(norm, rel=ROUNDING[precision])]
    assert relative_error(moved, [g * 0.1 / norm for g in truth]) < ROUNDING[precision]


def test_a_batch_that_fits_is_a_micro_batch():
    """Bit for bit as `backward` with its weight."""
    x, y = batch(12)
    models = []
    for whole in (False, True):
        accelerator = make(Accelerator, "bf16")
        model, optimizer = prepared(accelerator, mlp())
        for part in zip(x.split((5, 1, 4, 2)), y.split((5, 1, 4, 2)), strict=True):
            with accelerator.accumulate(model):
                if whole:
                    assert accelerator.backward_batch(part, mean_loss(model)).sizes == [len(part[0])]
                else:
                    accelerator.backward(mean_loss(model)(part), weight=len(part[0]))
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    assert all(same_bits(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_options_and_weights():
    """A list of samples with `collate`, and a loss that says what it averages."""
    accelerator = make(Accelerator, steps=1)
    model, optimizer = prepared(accelerator, mlp(torch.float64))
    x, y = batch(10, torch.float64)
    counts = torch.tensor([3.0, 1, 0, 2, 5, 1, 1, 4, 2, 1], dtype=torch.float64)
    samples = list(zip(x, y, counts, strict=True))

    def loss_fn(part):
        inputs, targets, weights = part
        errors = (model(inputs) - targets).square().mean(dim=1)
        return (errors * weights).sum() / weights.sum(), weights.sum()

    report = accelerator.backward_batch(
        samples, loss_fn, collate=torch.utils.data.default_collate, cost=[1.0] * 10, budget=4
    )
    assert sorted(report.sizes) == [3, 3, 4]
    accelerator.unscale_gradients()
    twin = mlp(torch.float64)
    ((twin(x) - y).square().mean(dim=1) * counts).sum().div(counts.sum()).backward()
    assert relative_error(gradients(optimizer), [p.grad for p in twin.parameters()]) < EXACT


def test_several_optimizers_and_none():
    """An error that says what to do."""
    accelerator = make(Accelerator)
    with pytest.raises(RuntimeError, match="backward_batch.. with 0 optimizers"):
        accelerator.backward_batch(batch(2), lambda part: part[0].sum())
    models = mlp(), mlp()
    accelerator.prepare(*models, *(torch.optim.SGD(m.parameters(), lr=1.0) for m in models))
    with pytest.raises(RuntimeError, match="backward_batch.. with 2 optimizers"):
        accelerator.backward_batch(batch(2), lambda part: models[0](part[0]).sum())


def test_twice_inside_one_accumulate():
    """As two backwards are."""
    accelerator = make(Accelerator)
    model, _ = prepared(accelerator, mlp())
    with accelerator.accumulate(model), pytest.raises(RuntimeError, match="twice inside one"):
        for _ in range(2):
            accelerator.backward_batch(batch(2), mean_loss(model))


def test_a_sample_that_does_not_fit_leaves_the_window_usable():
    """Skipped by the loop, whose next batch counts alone."""
    accelerator = make(Accelerator, steps=1)
    model, optimizer = prepared(accelerator, short_of_memory(mlp(torch.float64), most=0))
    with pytest.raises(torch.OutOfMemoryError, match="one sample of cost 1"):
        accelerator.backward_batch(batch(2, torch.float64), mean_loss(model))
    model._forward_pre_hooks.clear()
    x, y = batch(4, torch.float64, seed=3)
    accelerator.backward_batch((x, y), mean_loss(model))
    accelerator.unscale_gradients()
    assert relative_error(gradients(optimizer), big_batch_grads(mlp(torch.float64), x, y)) < EXACT
