"""The callback's `split`, and its form for manual optimization, against the big batch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.models import batch, big_batch_grads, mlp, relative_error
from tests.support.trainers import fp16_plugins, quiet_trainer

pl = pytest.importorskip("lightning.pytorch")

from accumkernels.integrations.lightning import FusedAccumulation  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice
]

EXACT = 1e-12  # gradients in fp64
HALF = 2e-3  # of matrix products in fp16
MOST = 3  # samples that fit


class Regression(pl.LightningModule):
    """Has memory for few samples; SGD of rate 1 moves it by the gradient itself."""

    def __init__(self, dtype=torch.float64, none=()):
        super().__init__()
        self.net = mlp(dtype)
        self.none = none
        self.ran, self.outputs, self.indices = [], [], []

    def loss(self, data):
        x, y = data
        if len(x) > MOST:
            raise torch.OutOfMemoryError(f"{len(x)} samples")
        self.ran.append(len(x))
        return mse_loss(self.net(x).to(y.dtype), y)

    def training_step(self, data, index):
        if index in self.none:
            return None
        loss = self.loss(data)
        self.indices.append(index)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "size": len(data[0])}

    def on_train_batch_end(self, outputs, data, index):
        self.outputs.append(outputs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(module, samples, *, size=8, steps=1, dtype=torch.float64, **keywords):
    """Train on batches of `size` samples; the Trainer."""
    callback = keywords.pop("callback", None) or FusedAccumulation(**keywords.pop("options", {"split": "auto"}))
    trainer = quiet_trainer(callback, steps=steps, **keywords)
    data = torch.utils.data.TensorDataset(*batch(samples, dtype))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=size))
    return trainer


def moved(module, dtype=torch.float64):
    """By the gradient of the one window."""
    return [before - after for before, after in zip(mlp(dtype).parameters(), module.net.parameters(), strict=True)]


@pytest.mark.parametrize("split", ["auto", 2, {"micro_batch": 3}], ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_big_batch(steps, split):
    """One window of unequal batches; what `training_step` logs and returns is the mean over all samples."""
    module = Regression()
    size = 13 if steps == 1 else 5
    trainer = fit(module, 13, size=size, steps=steps, options={"split": split})
    x, y = batch(13, torch.float64)
    assert relative_error(moved(module), big_batch_grads(mlp(torch.float64), x, y)) < EXACT
    assert sum(module.ran) == 13
    loss = mse_loss(mlp(torch.float64)(x), y).item()
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(loss, rel=1e-6)  # Lightning has it in fp32
    assert module.indices == sorted(module.indices)
    first = mse_loss(mlp(torch.float64)(x[:size]), y[:size]).item()
    assert float(module.outputs[0]["loss"]) == pytest.approx(first / steps, rel=1e-12)


def test_weights_and_skipped_batches():
    """The callback's weight holds for each part, and a step that returns None counts nothing."""
    module = Regression(none=(1,))
    fit(module, 16, steps=2, options={"split": "auto", "weight": lambda data: data[1][:, 0].abs().sum()})
    x, y = (t[:8] for t in batch(16, torch.float64))
    sums = [torch.zeros_like(p) for p in module.parameters()]
    parts = [slice(start, start + 2) for start in range(0, 8, 2)]  # as memory has split them
    weights = [y[part, 0].abs().sum() for part in parts]
    for part, weight in zip(parts, weights, strict=True):
        for total, grad in zip(sums, big_batch_grads(mlp(torch.float64), x[part], y[part]), strict=True):
            total += grad * weight / sum(weights)
    assert module.ran == [2, 2, 2, 2]
    assert relative_error(moved(module), sums) < EXACT


def test_fp16_and_clipping():
    """Autocast holds in each part, the loss scale in each backward, and the norm is the big batch's."""
    module = Regression(torch.float32)
    fit(module, 8, dtype=torch.float32, plugins=fp16_plugins(), gradient_clip_val=0.1)
    truth = big_batch_grads(mlp(), *batch(8))
    norm = torch.cat([g.flatten() for g in truth]).norm()
    assert relative_error(moved(module, torch.float32), [g * 0.1 / norm for g in truth]) < HALF


def test_manual_optimization():
    """The callback's method takes the place of `manual_backward`."""

    class Manual(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, data, index):
            callback = FusedAccumulation.of(self.trainer)
            self.outputs.append(callback.backward_batch(data, self.loss))
            if index == 1:
                self.optimizers().step()

        def on_train_batch_end(self, *args):
            pass

    module = Manual()
    fit(module, 13, callback=FusedAccumulation())
    assert relative_error(moved(module), big_batch_grads(mlp(torch.float64), *batch(13, torch.float64))) < EXACT
    assert [sum(report.sizes) for report in module.outputs] == [8, 5]
    with pytest.raises(ValueError, match="needs automatic optimization"):
        fit(Manual(), 8)


def test_manual_form_in_automatic_optimization():
    """An error that names the other form."""

    class Wrong(Regression):
        def training_step(self, data, index):
            FusedAccumulation.of(self.trainer).backward_batch(data, self.loss)

    with pytest.raises(RuntimeError, match="automatic optimization pass FusedAccumulation.split='auto'"):
        fit(Wrong(), 8, callback=FusedAccumulation())


def test_the_strategy_is_restored():
    """Another fit without the callback is Lightning's."""
    trainer = fit(Regression(), 8)
    assert "training_step" not in vars(trainer.strategy)


class Logs(Regression):
    """Logs after each batch."""

    def on_train_batch_end(self, outputs, data, index):
        self.log("seen", float(len(data[0])), on_step=False, on_epoch=True)


def test_what_is_logged_after_a_batch_counts_by_all_of_its_samples():
    """And not by those of its last part."""
    trainer = fit(Logs(), 11, steps=2)
    assert trainer.callback_metrics["seen"].item() == pytest.approx((8 * 8 + 3 * 3) / 11)


class Initialized(Regression):
    """Sets its weights when training is about to begin, through .data, which no version shows."""

    def on_fit_start(self):
        for p in self.parameters():
            p.data.fill_(0.25)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_weights_that_are_set_before_training_are_those_of_masters():
    """A first step that moves nothing leaves them as they are."""
    module = Initialized(torch.bfloat16)
    callback = FusedAccumulation(master_weights=True)
    fit(module, 3, dtype=torch.bfloat16, callback=callback, precision="bf16-true")
    assert all((p == 0.25).all() for p in module.parameters())
