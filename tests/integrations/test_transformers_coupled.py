"""Losses that couple samples in transformers' Trainer: a window as one batch."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import relative_error
from tests.support.towers import Towers, data, truth
from tests.support.trainers import fp16_on_the_cpu

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accumkernels.integrations.transformers_coupled import CoupledAccumulationMixin  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread", "fresh_state")]

EXACT = 1e-12  # fp64 rounding
# Encodings and the gradients of weights are rounded to 16 bit in both.
AUTOCAST = {"bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}
STEPS = 3
SIZES = [4, 1, 3, 2, 4]  # of micro-batches: two windows, of which the second is short
MAX_NORM = 0.05


class Pairs(torch.utils.data.Dataset):
    """Micro-batches, one to an item."""

    def __init__(self, dtype):
        self.batches = [[part[:size] for part in data(seed, dtype)] for seed, size in enumerate(SIZES)]

    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        return dict(zip(("images", "texts"), self.batches[index], strict=True))


class Model(Towers):
    """As the Trainer calls it."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.eval().train = lambda mode=True: self  # dropout has a test of its own

    def forward(self, images, texts):
        return self.encode((images, texts))


class Ours(CoupledAccumulationMixin, transformers.Trainer):
    """Changes its inputs, as some Trainers do."""

    def encode(self, model, inputs):
        return model(inputs.pop("images"), inputs.pop("texts"))

    def coupled_loss(self, images, texts):
        return self.model.loss(images, texts)

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(folder, cls=Ours, dtype=torch.float64, scaler=False, model=None, dataset=None, **arguments):
    """Train for one epoch with SGD of rate 1; the Trainer."""
    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": STEPS,
        "num_train_epochs": 1,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "remove_unused_columns": False,
        **arguments,
    }
    model = Model(dtype) if model is None else model
    trainer = cls(
        model=model,
        args=transformers.TrainingArguments(str(folder), **settings),
        train_dataset=Pairs(dtype) if dataset is None else dataset,
        data_collator=lambda items: items[0],
        optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if scaler:
        fp16_on_the_cpu(trainer.accelerator)
    trainer.train()
    return trainer


def expected(clip=None):
    """Movement and losses of two big batches, in fp64."""
    model, losses, norms = Towers().eval(), [], []
    for start in range(0, len(SIZES), STEPS):
        whole = [torch.cat(parts) for parts in zip(*Pairs(torch.float64).batches[start : start + STEPS], strict=True)]
        grads, loss = truth(model, [whole], [0])
        losses += loss
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm().item())
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.data -= grad * min(1.0, (clip or float("inf")) / (norms[-1] + 1e-6))  # as torch
    return way(model), losses, norms


def way(model, dtype=torch.float64):
    """By how much the parameters have moved."""
    return [before - after for before, after in zip(Towers(dtype).parameters(), model.parameters(), strict=True)]


def logged(trainer, key):
    """Per window."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


class Looks(transformers.TrainerCallback):
    """Looks at gradients, so that they are averaged before the step."""

    def on_pre_optimizer_step(self, *_, model, **__):
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("clip", [None, MAX_NORM])
def test_the_big_batch(tmp_path, clip, looks):
    """Unequal micro-batches and a short last window; what is logged is its loss, and its norm."""

    class Watched(Ours):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, callbacks=[Looks] if looks else [], log_windows=True, **kwargs)

    trainer = train(tmp_path, Watched, max_grad_norm=clip or 0.0)
    moved, losses, norms = expected(clip)
    assert relative_error(way(trainer.model), moved) < EXACT
    assert logged(trainer, "loss") == pytest.approx(losses, abs=1e-4)  # rounded by the Trainer
    assert logged(trainer, "accumulator/loss") == pytest.approx(losses, rel=1e-6)
    assert logged(trainer, "accumulator/weight") == [1, 1]
    if clip is not None:
        assert [float(norm) for norm in logged(trainer, "grad_norm")] == pytest.approx(norms, rel=1e-6)


def test_plain_accumulation_is_something_else(tmp_path):
    """The reason for the mixin."""

    class Stock(transformers.Trainer):
        _get_train_sampler = Ours._get_train_sampler

        def compute_loss(self, model, inputs, **_):
            return self.model.loss(*model(**inputs))

    assert relative_error(way(train(tmp_path, Stock).model), expected()[0]) > 0.1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(tmp_path, precision):
    """As accelerate's backward of the big batch, which the stock Trainer has with micro-batches of a whole window."""
    options = {"dtype": torch.float32, "bf16": precision == "bf16", "scaler": precision == "fp16"}
    ours = train(tmp_path, **options)

    class Stock(transformers.Trainer):
        """The same windows, by the Trainer's own accumulation of one micro-batch."""

        _get_train_sampler = Ours._get_train_sampler

        def compute_loss(self, model, inputs, **_):
            return self.model.loss(*model(**inputs))

        def get_train_dataloader(self):
            pairs = self.train_dataset.batches
            windows = [pairs[:STEPS], pairs[STEPS:]]
            whole = [dict(zip(("images", "texts"), map(torch.cat, zip(*w, strict=True)), strict=True)) for w in windows]
            return torch.utils.data.DataLoader(whole, batch_size=1, collate_fn=lambda items: items[0])

    stock = train(tmp_path, Stock, **{**options, "gradient_accumulation_steps": 1})
    moved = [way(trainer.model, torch.float32) for trainer in (ours, stock)]
    assert relative_error(*moved) < AUTOCAST[precision]
    assert relative_error(moved[1], expected()[0]) > 1e-4  # 16 bit, indeed


def test_dropout(tmp_path):
    """The second pass has the random numbers of the first."""

    class Random(Model):
        def __init__(self, dtype):
            Towers.__init__(self, dtype)

    class Seeds(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.manual_seed(3)

    class Seeded(Ours):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, callbacks=[Seeds], **kwargs)

    trainer = train(tmp_path, Seeded, model=Random(torch.float64), max_steps=1)
    model = Towers()
    batches = Pairs(torch.float64).batches[:STEPS]  # which seeds, too
    torch.manual_seed(3)
    encoded = [model.encode(pair) for pair in batches]
    model.loss(*map(torch.cat, zip(*encoded, strict=True))).backward()
    assert relative_error(way(trainer.model), [p.grad for p in model.parameters()]) < EXACT


def test_both_methods_are_needed(tmp_path):
    """Or nothing would be trained."""

    class Half(CoupledAccumulationMixin, transformers.Trainer):
        def encode(self, model, inputs):
            return model(**inputs)

    with pytest.raises(TypeError, match=r"Half must define coupled_loss\(\)"):
        train(tmp_path, Half)
