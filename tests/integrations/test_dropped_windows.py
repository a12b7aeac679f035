"""What a loop or a hook drops by `zero_grad` is dropped, with what the trainers themselves give as the truth."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.backends import same_bits
from tests.support.models import batch, mlp
from tests.support.trainers import Samples, gpt2, make, quiet_trainer

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from accumkernels.integrations import accelerate as of_accelerate  # noqa: E402
from accumkernels.integrations import transformers as of_transformers  # noqa: E402
from accumkernels.integrations.lightning import FusedAccumulation  # noqa: E402
from tests.support.dropping_modules import MODULES, SIZE, STEPS, LeavesStepsOut, Module, NeverClears, momentum  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread", "fresh_state"),
    pytest.mark.filterwarnings("ignore"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SCALE = 2.0**10


def adamw(params, **options):
    """Its size of a step does not follow the number of micro-batches that were dropped."""
    return torch.optim.AdamW(params, lr=0.01, **options)


def assert_close(stock, ours):
    """Sums in another order; and something was trained."""
    for a, b in zip(stock.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not all(same_bits(a, b) for a, b in zip(stock.parameters(), mlp().parameters(), strict=True))


# ---- Lightning, whose own zero_grad comes before the first backward of a window


def lightning_of(module, *callbacks, scaler=None, **options):
    """Trained for three epochs."""
    plugins = None if scaler is None else [MixedPrecision("16-mixed", "cpu", scaler)]
    quiet_trainer(*callbacks, steps=STEPS, epochs=3, plugins=plugins, **options).fit(module)
    return module


@pytest.mark.parametrize("optimizer", [momentum, adamw])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_lightning(kind, scaled, clip, optimizer, caplog):
    """Nothing of it is in a later window, and nothing is said."""
    models = []
    with caplog.at_level(logging.WARNING, "accumkernels"):
        for callbacks in ((), (FusedAccumulation(),)):
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if scaled else None
            models.append(lightning_of(kind(optimizer), *callbacks, scaler=scaler, gradient_clip_val=clip))
    assert_close(*models)
    assert not [record for record in caplog.records if record.name.startswith("accumkernels")]


def test_lightning_does_not_clear(caplog):
    """A module that never clears, and one that counts micro-batches itself: said once, and nothing is dropped."""

    class Counts(Module):
        def optimizer_step(self, epoch, index, optimizer, closure):
            super().optimizer_step(epoch, index, optimizer, closure) if index % 2 else closure()

        def optimizer_zero_grad(self, epoch, index, optimizer):
            if index % 2 == 0:
                optimizer.zero_grad()

    modules = []
    for callbacks in ((), (FusedAccumulation(),)):
        modules.append(module := Counts(adamw))
        quiet_trainer(*callbacks, steps=1, epochs=3).fit(module)
    assert_close(*modules)  # a mean in place of a sum, which Adam's steps do not follow
    lightning_of(NeverClears(momentum), FusedAccumulation())
    assert [r.message.partition("()")[0] for r in caplog.records if r.name.startswith("accumkernels")] == [
        "accumkernels: Counts.optimizer_zero_grad",
        "accumkernels: NeverClears.optimizer_zero_grad",
    ]


def test_lightning_shows_what_was_stepped():
    """Until Lightning clears it, to hooks that run before."""
    seen = []

    class Looks(LeavesStepsOut):
        def on_before_zero_grad(self, optimizer):
            seen[-1].append([p.grad.clone() for p in self.parameters() if p.grad is not None])

        def optimizer_zero_grad(self, epoch, index, optimizer):
            self.on_before_zero_grad(optimizer)
            optimizer.zero_grad()
            self.on_before_zero_grad(optimizer)

    for callbacks in ((), (FusedAccumulation(),)):
        seen.append([])
        lightning_of(Looks(momentum), *callbacks)
    stock, ours = ([list(grads) for grads in looks] for looks in seen)
    assert any(ours)
    for index in (0, 1, 2, 6, 7, 8):  # windows after the first and after one that was stepped
        for a, b in zip(stock[index], ours[index], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", MODULES)
def test_lightning_splits_batches(kind):
    """Into parts whose backwards have run when Lightning's zero_grad comes."""
    ours = lightning_of(kind(momentum), FusedAccumulation(split=2))
    assert_close(lightning_of(kind(momentum)), ours)


def test_lightning_drops_overflows():
    """A hook that drops what is not finite: the scale falls all the same, and then trains."""

    class Drops(Module):
        def on_before_optimizer_step(self, optimizer):
            if not all(p.grad.isfinite().all() for p in self.parameters()):
                optimizer.zero_grad()

    found = []
    for callbacks in ((), (FusedAccumulation(),)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
        found.append((lightning_of(Drops(momentum), *callbacks, scaler=scaler), scaler.get_scale()))
    assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] < 2.0**19


def test_lightning_runs_out_of_memory_while_it_adds(monkeypatch):
    """A module that goes on to its next batch has dropped the failed one's gradients."""

    class Skips(pl.LightningModule):
        fails = ()

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.model = mlp()

        def training_step(self, data, index):
            if index == 1 and not self.fails:
                return
            with contextlib.suppress(torch.OutOfMemoryError), monkeypatch.context() as patch:
                if index == 1:
                    patch.setattr(*self.fails, runs_out)
                self.manual_backward(mse_loss(self.model(data[0]), data[1]))
            if index != 1:
                self.optimizers().step()

        def configure_optimizers(self):
            return momentum(self.parameters())

    loader = torch.utils.data.DataLoader([batch(SIZE, seed=i) for i in range(3)], batch_size=None)
    models = []
    for fails in ((), ("accumkernels.window.micro_batch.MicroBatchRunner.accumulate",)):
        module = Skips()
        module.fails = fails
        quiet_trainer(FusedAccumulation(), steps=1).fit(module, loader)
        models.append(module.model)
    assert_close(*models)


# ---- accelerate


@pytest.mark.parametrize("how", ["optimizer", "zeros", "model"])
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("counts", [True, False])
def test_accelerate(counts, precision, overflow, how):
    """Between clipping and the step, as where norms are too large; counted by accelerate or by the loop."""
    found = []
    for cls in (accelerate.Accelerator, of_accelerate.Accelerator):
        accelerator = make(cls, precision, steps=STEPS if counts else 1)
        model = mlp()
        model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
        for i in range(4 * STEPS):
            x, y = batch(SIZE, seed=i)
            with accelerator.accumulate(model) if counts else contextlib.nullcontext():
                loss = mse_loss(model(x).float(), y) / (1 if counts else STEPS)
                accelerator.backward(loss * 1e38 if overflow and i // STEPS == 1 else loss)
                if i % STEPS == STEPS - 1:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    if i // STEPS in (1, 2):
                        model.zero_grad() if how == "model" else optimizer.zero_grad(set_to_none=how == "optimizer")
                if counts or i % STEPS == STEPS - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append((model, accelerator.scaler and accelerator.scaler.get_scale()))
    assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_accelerate_leaves_steps_out():
    """A window that was dropped and not stepped is no part of the next, and of no checkpoint."""
    accelerator = make(of_accelerate.Accelerator)
    model = mlp()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    for window in range(2):
        for i in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(batch(SIZE, seed=i)[0]), batch(SIZE, seed=i)[1]))
                if window == 1:
                    optimizer.step()
                if accelerator.sync_gradients:
                    optimizer.zero_grad(set_to_none=False)
        if window == 0:
            assert not optimizer.window.state_dict()["sums"]
    twin = mlp()
    sum(mse_loss(twin(batch(SIZE, seed=i)[0]), batch(SIZE, seed=i)[1]) / STEPS for i in range(STEPS)).backward()
    momentum(twin.parameters()).step()
    assert_close(twin, model)


def runs_out(*_):
    """Of memory."""
    raise torch.OutOfMemoryError("planted")


class RunsOut(torch.optim.SGD):
    """In a step."""

    def step(self, closure=None):
        """Once."""
        if self.defaults.pop("runs_out", False):
            runs_out()
        return super().step(closure)


RunsOut.__module__ = "torch.optim.sgd"  # clipped in its own pass, as torch's


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_accelerate_runs_out_of_memory_in_a_step(again, reads):
    """The loop catches it, and steps again, clipped as before, or drops the window; then it goes on."""
    found = []
    for cls in (accelerate.Accelerator, of_accelerate.Accelerator):
        accelerator = make(cls, steps=STEPS)
        if cls is of_accelerate.Accelerator:
            accelerator.reads_gradients = reads
        model = mlp()
        model, optimizer = accelerator.prepare(model, RunsOut(model.parameters(), lr=0.5, fused=True))
        for i in range(3 * STEPS):
            x, y = batch(SIZE, seed=i)
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.optimizer.defaults["runs_out"] = i // STEPS == 1
                try:
                    optimizer.step()
                except torch.OutOfMemoryError:
                    if again:
                        optimizer.step()
                optimizer.zero_grad()
        found.append(model)
    assert_close(*found)


@pytest.mark.parametrize("reads", [True, False])
def test_accelerate_does_not_step_a_part_of_a_micro_batch(reads):
    """That of a window's first backward, which ran out of memory: an error, as after any other of a window's."""
    options = {"release": "backward", "bucket_bytes": 1}
    accelerator = make(of_accelerate.Accelerator, steps=1, accumulator_options=options)
    accelerator.reads_gradients = reads
    model = mlp()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    x, y = batch(SIZE)
    with accelerator.accumulate(model):
        hook = model[0].bias.register_hook(runs_out)
        with pytest.raises(torch.OutOfMemoryError):
            accelerator.backward(mse_loss(model(x), y))
        hook.remove()
        with pytest.raises(RuntimeError, match="this window is broken"):
            optimizer.step()
        optimizer.zero_grad()
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
    twin = mlp()
    mse_loss(twin(x), y).backward()
    momentum(twin.parameters()).step()
    assert_close(twin, model)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_accelerate_drops_a_stepped_window_by_its_accumulator(precision):
    """By `accumulator.zero_()` in place of `optimizer.zero_grad()`: the windows after it are as they are."""
    accelerator, twin = make(of_accelerate.Accelerator, precision, steps=1), mlp()
    model = mlp()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    stock = momentum(twin.parameters())
    for i in range(4):
        x, y = batch(SIZE, seed=i)
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            accelerator.accumulator.zero_()
        stock.zero_grad()
        mse_loss(twin(x), y).backward()
        stock.step()
    tolerance = 5e-3 if precision == "fp16" else 1e-5  # activations in fp16
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_accelerate_forgets_the_clipping_of_a_step_that_failed():
    """A window that is dropped by its accumulator takes with it what the next step would have clipped by."""
    accelerator, twin = make(of_accelerate.Accelerator, steps=1), mlp()
    accelerator.reads_gradients = False
    model = mlp()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    x, y = batch(SIZE)
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        hook = optimizer.optimizer.register_step_pre_hook(interrupts)
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
        hook.remove()
        accelerator.accumulator.zero_()
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
    mse_loss(twin(x), y).backward()
    momentum(twin.parameters()).step()
    assert_close(twin, model)


@pytest.mark.parametrize("again", [False, True], ids=["", "step"])
def test_accelerate_steps_a_window_that_its_accumulator_opened(again):
    """`zero_()` inside `accumulate` opens a window like any other: once it is stepped, the loop goes on."""
    accelerator, twin = make(of_accelerate.Accelerator, steps=1), mlp()
    model = mlp()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    other = momentum(twin.parameters())
    x, y = batch(SIZE)
    for _ in range(3):
        with accelerator.accumulate(model):
            accelerator.accumulator.zero_()
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            if again:  # without gradients: as in stock, nothing moves
                accelerator.accumulator.zero_()
                optimizer.step()
        other.zero_grad()
        mse_loss(twin(x), y).backward()
        other.step()
    assert_close(twin, model)


def interrupts(*_):
    """As Ctrl-C there does."""
    raise KeyboardInterrupt


def test_accelerate_is_interrupted_after_a_step(monkeypatch):
    """The window is stepped or cleared before the next; what it left in `.grad` is no part of that."""
    accelerator, twin = make(of_accelerate.Accelerator, steps=1), mlp()
    model = mlp()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    stock = momentum(twin.parameters())
    for i in range(3):
        x, y = batch(SIZE, seed=i)
        stock.zero_grad()
        mse_loss(twin(x), y).backward()
        stock.step()
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                if i == 1:
                    patch.setattr("accumkernels.integrations.window.weakref.ref", interrupts)
                optimizer.step()
        if i == 1:
            with pytest.raises(RuntimeError, match="step the optimizer before"), accelerator.accumulate(model):
                pass
            optimizer.zero_grad()
    assert_close(twin, model)


def test_accelerate_is_interrupted_while_optimizers_count(monkeypatch):
    """The micro-batch is lost for those that have not counted it; its gradients are in no later one."""
    models = []
    for interrupted in (False, True):
        accelerator, pair = make(of_accelerate.Accelerator, steps=2), [mlp(), mlp()]
        prepared = accelerator.prepare(*pair, *(momentum(model.parameters()) for model in pair))
        for i in range(3):
            x, y = batch(SIZE, seed=i)
            with contextlib.suppress(KeyboardInterrupt), accelerator.accumulate(*pair), monkeypatch.context() as patch:
                loss = mse_loss(pair[0](x), y) + mse_loss(pair[1](x), y)
                if i == 1 and interrupted:
                    patch.setattr("accumkernels.integrations.several.take_all", interrupts)
                if i != 1 or interrupted:
                    accelerator.backward(loss)
                    for optimizer in prepared[2:]:
                        optimizer.step()
                        optimizer.zero_grad()
            if i == 1:
                accelerator.step = 1  # that micro-batch did not count
        models.append(torch.nn.ModuleList(pair))
    assert_close(*models)


# ---- transformers


class Drops(transformers.TrainerCallback):
    """The gradients of the second window."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Before the step."""
        if state.global_step == 1:
            model.zero_grad()


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3])
def test_transformers(max_grad_norm, tmp_path):
    """By a callback, after clipping."""
    models = []
    for cls in (transformers.Trainer, of_transformers.Trainer):
        model = gpt2()
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=STEPS,
            max_grad_norm=max_grad_norm,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            num_train_epochs=1,
        )
        trainer = cls(
            model=model,
            args=arguments,
            train_dataset=Samples(6 * STEPS),
            optimizers=(momentum(model.parameters()), None),
            callbacks=[Drops()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        models.append(model)
    for a, b, c in zip(*(model.parameters() for model in (*models, gpt2())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert not same_bits(a, c)
