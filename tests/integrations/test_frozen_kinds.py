"""Models with a quantised or otherwise unusual frozen parameter, handed over whole to each trainer, as in stock."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.frozen import KINDS, Adapted, trainable
from tests.support.models import batch, relative_error
from tests.support.trainers import make, quiet_trainer

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread", "fresh_state"),
    pytest.mark.filterwarnings("ignore"),
]

STEPS, WINDOWS, SIZE = 2, 3, 4
# accelerate and Lightning move models to their device, which torch refuses on the meta device.
MOVABLE = [kind for kind in KINDS if kind != "meta"]


def micro_batches():
    """Whole windows of equal micro-batches, of which all trainers take the right mean."""
    return [batch(SIZE, seed=i) for i in range(STEPS * WINDOWS)]


def sgd(model):
    """Over what is trained, as the recipes for adapters have it."""
    return torch.optim.SGD(trainable(model), lr=0.1)


def accelerate(model, ours, _):
    """A loop."""
    package = "accumkernels.integrations.accelerate" if ours else "accelerate"
    accelerator = make(importlib.import_module(package).Accelerator, steps=STEPS)
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    for x, y in micro_batches():
        with accelerator.accumulate(prepared):
            accelerator.backward(mse_loss(prepared(x), y))
            optimizer.step()
            optimizer.zero_grad()


def lightning(model, ours, _):
    """Automatic optimization."""
    import lightning.pytorch as pl

    from accumkernels.integrations.lightning import FusedAccumulation

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, xy, index):
            return mse_loss(self.model(xy[0]), xy[1])

        def configure_optimizers(self):
            return sgd(self.model)

    loader = torch.utils.data.DataLoader(micro_batches(), batch_size=None)
    quiet_trainer(*([FusedAccumulation()] if ours else []), steps=STEPS).fit(Module(), loader)


def transformers(model, ours, folder):
    """A model that returns its loss."""
    import transformers as package

    from accumkernels.integrations.transformers import Trainer

    class Returns(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, labels):
            return {"loss": mse_loss(self.model(x), labels)}

    arguments = package.TrainingArguments(
        folder, per_device_train_batch_size=SIZE, gradient_accumulation_steps=STEPS, num_train_epochs=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, max_grad_norm=0.0, lr_scheduler_type="constant",
    )  # fmt: skip
    samples = [{"x": x[i], "labels": y[i]} for x, y in micro_batches() for i in range(SIZE)]
    cls = Trainer if ours else package.Trainer
    cls(model=Returns(), args=arguments, train_dataset=samples, optimizers=(sgd(model), None)).train()


@pytest.mark.parametrize("kind", MOVABLE)
@pytest.mark.parametrize("train", [accelerate, lightning, transformers], ids=lambda train: train.__name__)
def test_a_whole_model(train, kind, tmp_path):
    """What is trained ends where it does in stock, up to rounding."""
    pytest.importorskip(train.__name__)
    start, stock, ours = Adapted(kind), Adapted(kind), Adapted(kind)
    train(stock, False, tmp_path)
    train(ours, True, tmp_path)
    assert relative_error(trainable(ours), trainable(stock)) < 1e-6
    assert relative_error(trainable(ours), trainable(start)) > 1e-2
