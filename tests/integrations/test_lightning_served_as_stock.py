"""What Lightning serves beyond the plain loop: served with the callback too, with what Lightning gives as the truth."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.support.backends import same_bits
from tests.support.models import batch, mlp
from tests.support.trainers import quiet_trainer

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # noqa: E402

from accumkernels.integrations.lightning import FusedAccumulation  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SIZE = 3


class Module(pl.LightningModule):
    """A backbone and a head; `made` makes the optimizers."""

    def __init__(self, made=None, batch_size=SIZE):
        super().__init__()
        net = mlp()
        self.backbone, self.head = net[:2], net[2:]
        self.made = made or (lambda module: torch.optim.AdamW(module.parameters(), lr=0.01))
        self.batch_size = batch_size

    def loss(self, data):
        return mse_loss(self.head(self.backbone(data[0])), data[1])

    def training_step(self, data, index):
        return self.loss(data)

    def configure_optimizers(self):
        return self.made(self)

    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(*batch(8 * SIZE))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)


def both(make, *callbacks, **options):
    """Trained by Lightning alone, and with the callback."""
    models = []
    for ours in (False, True):
        model = make()
        extra = [make_callback() for make_callback in callbacks]
        quiet_trainer(*extra, *([FusedAccumulation()] if ours else []), **options).fit(model)
        models.append(model)
    return models


def assert_close(one, two):
    """And something was trained."""
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not all(same_bits(a, b) for a, b in zip(one.parameters(), mlp().parameters(), strict=False))


def test_backbone_finetuning():
    """The head alone for an epoch; then the optimizer gets the backbone's parameters."""
    assert_close(
        *both(
            lambda: Module(lambda module: torch.optim.AdamW(module.head.parameters(), lr=0.01)),
            lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
            epochs=3,
        )
    )


def test_model_pruning():
    """After each epoch parameters have other names."""
    assert_close(
        *both(
            lambda: Module(lambda module: torch.optim.SGD(module.parameters(), lr=0.1)),
            lambda: ModelPruning("l1_unstructured", amount=0.3),
            epochs=3,
        )
    )


@pytest.mark.parametrize("reads", [False, True])
def test_weight_averaging_with_batchnorm(reads):
    """The extra pass, in which nothing runs backward, leaves the averaged weights, whose step in Lightning is stale."""
    averaged = []

    class Normalized(Module):
        def __init__(self):
            super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
            self.head = nn.Sequential(nn.BatchNorm1d(9), *self.head)

        def on_train_batch_start(self, batch, index):
            if self.trainer.current_epoch == 3:
                averaged.append([p.detach().clone() for p in self.parameters()])

    ours = Normalized()
    if reads:
        ours.on_train_batch_end = lambda *_: None
    before = [p.detach().clone() for p in ours.parameters()]
    quiet_trainer(FusedAccumulation(), StochasticWeightAveraging(1e-2, swa_epoch_start=1), epochs=3).fit(ours)
    assert len(averaged) == 8
    assert all(same_bits(a, p) for a, p in zip(averaged[0], ours.parameters(), strict=True))
    assert not any(map(same_bits, before, ours.parameters()))


def test_a_parameter_that_nobody_steps(caplog):
    """Is left alone, with one warning."""
    with caplog.at_level(logging.WARNING, "accumkernels"):
        stock, ours = both(lambda: Module(lambda module: torch.optim.SGD(module.head.parameters(), lr=0.1)), epochs=2)
    assert_close(stock, ours)
    assert same_bits(ours.backbone[0].weight, mlp()[0].weight)
    assert sum("no optimizer steps" in record.message for record in caplog.records) == 1


class OnIterator(Module):
    """Takes batches itself, and calls backward on the loss itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, dataloader_iter):
        optimizer = self.optimizers()
        for _ in range(2):
            data, _, _ = next(dataloader_iter)
            (self.loss(data) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_that_takes_an_iterator():
    """What `.grad` holds at `optimizer.step()` is stepped."""
    assert_close(*both(OnIterator, steps=1))


def test_weights_of_an_iterator():
    """Are refused before training: what it has given may not be the batch of the loss."""
    with pytest.raises(ValueError, match=r"weight=...\) with training_step\(dataloader_iter\)"):
        quiet_trainer(FusedAccumulation(weight=len), steps=1).fit(OnIterator())


@pytest.mark.parametrize("how", ["step", "clip"])
def test_around_the_trainer(how):
    """torch's optimizer, or torch's clipping, in manual optimization: the error names what Lightning has for it."""

    class Around(Module):
        automatic_optimization = False

        def training_step(self, data, index):
            self.manual_backward(self.loss(data))
            if how == "step":
                self.optimizers(use_pl_optimizer=False).step()
            else:
                nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    with pytest.raises(RuntimeError, match="In a trainer, (step the optimizer that it has|clip by its own means)"):
        quiet_trainer(FusedAccumulation(), steps=1).fit(Around())


def halve(module):
    """An edit of `.grad` that passes by None."""
    for p in module.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def hooked_callback(kind):
    """A callback whose own `on_before_optimizer_step` halves gradients."""
    callback = kind()
    callback.on_before_optimizer_step = lambda trainer, module, optimizer: halve(module)
    return callback


HOOKS = {
    "lambda callback": lambda: LambdaCallback(on_before_optimizer_step=lambda _, module, optimizer: halve(module)),
    "of a callback": lambda: hooked_callback(pl.Callback),
    "of Lightning's callback": lambda: hooked_callback(Timer),
    "on_before_optimizer_step": lambda module: lambda optimizer: halve(module),
    "configure_gradient_clipping": lambda module: lambda *_, **__: halve(module),
}


@pytest.mark.parametrize("where", HOOKS)
def test_hooks_of_objects(where):
    """A hook that an object has for itself, not by its class, changes gradients too."""

    def make():
        module = Module(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        if hasattr(module, where):
            setattr(module, where, HOOKS[where](module))
        return module

    assert_close(*both(make, *([] if hasattr(pl.LightningModule, where) else [HOOKS[where]])))


def test_gradients_after_a_checkpoint(tmp_path):
    """They stay until Lightning clears them, as where none is saved."""

    class Looks(Module):
        def look(self):
            seen[-1].append([p.grad.clone() for p in self.parameters()])

        def on_train_batch_end(self, outputs, data, index):
            if index % 4 == 3:
                self.look()

        def on_before_zero_grad(self, optimizer):
            if self.trainer.global_step:
                self.look()

    seen = []
    for ours in (False, True):
        seen.append([])
        callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=1), *([FusedAccumulation()] if ours else [])]
        quiet_trainer(*callbacks, enable_checkpointing=True, epochs=2).fit(Looks())
    assert len(seen[0]) == 7
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-7)


class EditsInStep(Module):
    """Changes gradients after the closure, or at its end."""

    def __init__(self, wraps=False):
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        self.wraps = wraps

    def optimizer_step(self, epoch, index, optimizer, closure):
        def wrapped():
            loss = closure()
            halve(self)
            return loss

        if self.wraps:
            super().optimizer_step(epoch, index, optimizer, wrapped)
        else:
            loss = wrapped()
            optimizer.step(lambda: loss)


BY_VALUE = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("options", [{}, BY_VALUE, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("wraps", [False, True])
def test_optimizer_step_edits_gradients(wraps, options, caplog):
    """Those that the optimizer then steps with."""
    assert_close(*both(lambda: EditsInStep(wraps), epochs=2, **options))
    assert caplog.records == []


@pytest.mark.parametrize("splits", [False, True])
def test_optimizer_step_that_finds_no_gradients(splits, caplog):
    """As where it counts micro-batches itself: said once, and by the function's name."""

    class Counts(EditsInStep):
        def optimizer_zero_grad(self, epoch, index, optimizer):
            optimizer.zero_grad()

    callback = FusedAccumulation(split=2) if splits else FusedAccumulation()
    quiet_trainer(callback).fit((EditsInStep if splits else Counts)())
    (found,) = caplog.records
    assert found.getMessage().startswith("accumkernels: halve(), which reads .grad, finds no .grad")


class EditsInBackward(Module):
    """Changes gradients at its end."""

    def __init__(self):
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))

    def backward(self, loss):
        loss.backward()
        halve(self)


def test_backward_edits_gradients(caplog):
    """Of more than a bucket, too; where gradients are added while it runs, that is said once."""
    stock, ours = EditsInBackward(), EditsInBackward()
    quiet_trainer(steps=1).fit(stock)
    quiet_trainer(FusedAccumulation(bucket_bytes=64), steps=1).fit(ours)
    assert_close(stock, ours)
    assert caplog.records == []
    quiet_trainer(FusedAccumulation(release="backward")).fit(EditsInBackward())
    (found,) = caplog.records
    assert found.getMessage().startswith("accumkernels: halve(), which reads .grad, finds no .grad")


class AddsTheHead(pl.Callback):
    """After the first window; backward has left gradients in it."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4:
            trainer.optimizers[0].add_param_group({"params": list(pl_module.head.parameters())})


def test_zero_grad_clears_a_late_parameter():
    """Which the accumulator does not know when a callback adds it."""
    stock, ours = (Module(lambda module: torch.optim.SGD(module.backbone.parameters(), lr=0.1)) for _ in range(2))
    quiet_trainer(AddsTheHead()).fit(stock)
    quiet_trainer(FusedAccumulation(), AddsTheHead()).fit(ours)
    assert_close(stock, ours)


class Swaps(Module):
    """The Trainer gets another optimizer before a batch of the second epoch."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_start(self, data, index):
        if self.trainer.current_epoch == 1 and index == self.at:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


@pytest.mark.parametrize("at", [0, 4])
def test_another_optimizer(at, caplog):
    """Between windows: it gets the gradients."""
    assert_close(*both(lambda: Swaps(at), epochs=3))
    assert caplog.records == []


class Merges(Module):
    """Manual: steps the second of two optimizers, and goes on in the same batch with one for all parameters."""

    def __init__(self):
        super().__init__(lambda module: [torch.optim.SGD(part.parameters(), lr=0.1) for part in module.children()])
        self.automatic_optimization = False

    def step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def training_step(self, data, index):
        if index == 0:
            self.step(self.optimizers()[1], mse_loss(self.head(self.backbone(data[0]).detach()), data[1]))
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]
        self.step(self.optimizers(), self.loss(data))


def test_fewer_optimizers_inside_a_batch():
    """Those that were stepped in it are gone when the batch's metrics are logged."""
    stock, ours = Merges(), Merges()
    quiet_trainer(steps=1).fit(stock)
    quiet_trainer(FusedAccumulation(metrics=True), steps=1).fit(ours)
    assert_close(stock, ours)


def test_another_optimizer_inside_a_window():
    """Is refused: its step would not see what was accumulated for the last one."""
    with pytest.raises(RuntimeError, match="other optimizers after 2 micro-batches"):
        quiet_trainer(FusedAccumulation(), epochs=2).fit(Swaps(2))


class Penalized(Module):
    """Runs a backward of its own in each batch, which Lightning does not divide."""

    def training_step(self, data, index):
        (0.1 * sum(p.square().sum() for p in self.parameters())).backward()
        return self.loss(data)


@pytest.mark.parametrize("options", [{}, {"release": "backward", "bucket_bytes": 64}])
def test_backwards_of_its_own(options):
    """They add to the trainer's gradients, whenever those are taken."""
    stock, ours = (Penalized(lambda module: torch.optim.SGD(module.parameters(), lr=0.1)) for _ in range(2))
    quiet_trainer().fit(stock)
    quiet_trainer(FusedAccumulation(**options)).fit(ours)
    assert_close(stock, ours)


def test_callbacks_of_lightning_read_no_gradients():
    """So averaging goes on in the optimizer's own pass, after which there is none; nor do subclasses without a hook."""
    left = []

    class Longer(Timer):
        def on_train_epoch_end(self, trainer, module):
            left.extend(p.grad is not None for p in module.parameters())

    quiet_trainer(FusedAccumulation(), Timer(), Longer()).fit(Module())
    assert left and not any(left)


class NeedsClosure(torch.optim.SGD):
    """Evaluates it once, and keeps the loss."""

    def step(self, closure):
        """Of SGD."""
        self.loss = closure()
        return super().step()


def test_an_optimizer_that_needs_a_closure():
    """Lightning gives it one; here its backward has run before."""
    assert_close(*both(lambda: Module(lambda module: NeedsClosure(module.parameters(), lr=0.1))))


class CallsClosure(torch.optim.SGD):
    """Does not ask whether there is one."""

    def step(self, closure=None):
        """Of SGD."""
        self.loss = closure()
        return super().step()


def test_an_optimizer_that_calls_a_closure():
    """Lightning always gives one."""
    assert_close(*both(lambda: Module(lambda module: CallsClosure(module.parameters(), lr=0.1))))


class Sam(torch.optim.Optimizer):
    """As https://github.com/davda54/sam: evaluates the closure at weights that it has moved along the gradient."""

    def __init__(self, params, lr):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def first_step(self):
        """Move."""
        self.moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.before = [p.detach().clone() for p in self.moved]
        norm = torch.stack([p.grad.norm() for p in self.moved]).norm()
        with torch.no_grad():
            for p in self.moved:
                p.add_(p.grad, alpha=(0.5 / norm).item())
        self.zero_grad()

    def second_step(self):
        """Move back, and step."""
        with torch.no_grad():
            for p, before in zip(self.moved, self.before, strict=True):
                p.copy_(before)
        self.base.step()

    def step(self, closure):
        """Of the gradients that are there."""
        self.first_step()
        closure()
        self.second_step()


class WholeSam(Sam):
    """Evaluates the closure at the weights as they are, too."""

    def step(self, closure):
        """Of no gradients."""
        closure()
        super().step(closure)


class Sharp(Module):
    """A step with a closure in manual optimization, which may have run before; `drops` gradients in it."""

    def __init__(self, kind, runs=False, drops=False, **options):
        super().__init__(lambda module: kind(module.parameters(), lr=0.1), **options)
        self.automatic_optimization = False
        self.runs, self.drops = runs, drops

    def training_step(self, data, index):
        optimizer = self.optimizers()

        def closure():
            if self.drops:
                optimizer.zero_grad()
            loss = self.loss(data)
            self.manual_backward(loss)
            return loss

        if self.runs:
            closure()
        optimizer.step(closure=closure)
        optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer):
        self.steps = getattr(self, "steps", 0) + 1


@pytest.mark.parametrize(
    "arguments",
    [
        (Sam, True),
        (Sam, True, True),
        (WholeSam,),
        (WholeSam, False, True),
        (NeedsClosure,),
        (NeedsClosure, True, True),
        (torch.optim.SGD,),
    ],
)
def test_closures_in_manual_optimization(arguments, caplog):
    """Are run where the optimizer evaluates them: SAM steps by the gradient at weights that it has moved."""
    stock, ours = both(lambda: Sharp(*arguments), steps=1)
    assert_close(stock, ours)
    assert ours.steps == stock.steps
    assert caplog.records == []


def test_sam_where_closures_have_run():
    """An error, where one at other weights cannot be run: in automatic optimization, and with masters."""
    with pytest.raises(TypeError, match="after it has changed weights or gradients, as SAM"):
        quiet_trainer(FusedAccumulation()).fit(Module(lambda module: Sam(module.parameters(), lr=0.1)))
    callback = FusedAccumulation(master_weights=True)
    with pytest.raises(TypeError, match="after it has changed weights or gradients, as SAM"):
        quiet_trainer(callback, steps=1, precision="bf16-true").fit(Sharp(Sam, True))


class SharpInParts(Sharp):
    """SAM's two methods, each after a backward."""

    def training_step(self, data, index):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(data))
        optimizer.first_step()
        self.manual_backward(self.loss(data))
        optimizer.second_step()
        optimizer.zero_grad()


def test_methods_of_optimizers_that_read_gradients(caplog):
    """Find them with the option; without it, they are named before they fail."""
    stock, ours = SharpInParts(Sam), SharpInParts(Sam)
    quiet_trainer(steps=1).fit(stock)
    quiet_trainer(FusedAccumulation(release="microbatch"), steps=1).fit(ours)
    assert_close(stock, ours)
    assert caplog.records == []
    with pytest.raises(RuntimeError, match="non-empty TensorList"):
        quiet_trainer(FusedAccumulation(), steps=1).fit(SharpInParts(Sam))
    (found,) = caplog.records
    assert found.getMessage().startswith("accumkernels: Sam.first_step(), which reads .grad, finds no .grad")


class ForgetsClosure(torch.optim.SGD):
    """Does not call it, which Lightning refuses: its own test_optimizer_step_no_closure_raises."""

    def step(self, closure=None):
        """Of SGD."""
        return super().step()


def test_an_optimizer_that_forgets_its_closure():
    """Is stepped all the same, for the backward has run; a hook that leaves the whole step out is refused as ever."""
    stock, _ = both(lambda: Module(lambda module: torch.optim.SGD(module.parameters(), lr=0.1)))
    ours = Module(lambda module: ForgetsClosure(module.parameters(), lr=0.1))
    quiet_trainer(FusedAccumulation()).fit(ours)
    assert_close(stock, ours)
    ours.optimizer_step = lambda *_, **__: None
    with pytest.raises(MisconfigurationException, match="closure hasn't been executed"):
        quiet_trainer(FusedAccumulation()).fit(ours)


def test_validation_inside_a_window():
    """Keeps the sums, as Lightning keeps `.grad`, which here is None.

    So its own test_validation_during_gradient_accumulation_window fails.
    """
    seen = []

    class Validates(Module):
        def on_validation_start(self):
            seen.append([p.grad for p in self.parameters()])

        def validation_step(self, data, index):
            self.loss(data)

        def val_dataloader(self):
            return self.train_dataloader()

    assert_close(*both(Validates, steps=4, val_check_interval=3, num_sanity_val_steps=0))
    assert all(grad is not None for grad in seen[0])  # of stock's, after three of four batches
    assert all(grad is None for grad in seen[2])


class Gan(pl.LightningModule):
    """As in Lightning's documentation: the first loss reaches both networks; `toggles` or clears."""

    def __init__(self, toggles):
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.generator, self.discriminator = mlp(seed=1), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        with torch.no_grad():
            for p in self.discriminator.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))

    def training_step(self, data, index):
        x, y = data
        of_generator, of_discriminator = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        self.manual_backward(-self.discriminator(self.generator(x)).mean())
        of_generator.step()
        if self.toggles:
            self.untoggle_optimizer(of_generator)
            self.toggle_optimizer(of_discriminator)
        of_discriminator.zero_grad()
        self.manual_backward(self.discriminator(self.generator(x).detach()).mean() - self.discriminator(y).mean())
        self.clip_gradients(of_discriminator, 0.1, "norm")
        of_discriminator.step()
        if self.toggles:
            self.untoggle_optimizer(of_discriminator)

    def configure_optimizers(self):
        return [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (self.generator, self.discriminator)]

    def train_dataloader(self):
        return Module.train_dataloader(self)

    batch_size = SIZE


class SeveralLosses(Module):
    """Backwards of several losses before a step, in one batch or over batches."""

    def __init__(self, per_batch, every=1, summed=False):
        super().__init__()
        self.automatic_optimization = False
        self.per_batch, self.every, self.summed = per_batch, every, summed

    def training_step(self, data, index):
        optimizer = self.optimizers()
        losses = [self.loss(data) * (number + 1) for number in range(self.per_batch)]
        for loss in [sum(losses)] if self.summed else losses:
            self.manual_backward(loss)
        if (index + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ({"per_batch": 2}, {}, True),
        ({"per_batch": 2, "every": 2}, {}, True),
        ({"per_batch": 2, "summed": True}, {}, False),
        ({"per_batch": 1, "every": 2}, {}, False),
        ({"per_batch": 2}, {"weight": lambda data: len(data[0])}, False),
    ],
)
def test_losses_that_are_averaged_are_named(caplog, arguments, options, said):
    """Several losses of one batch, which stock adds up and the callback averages; nothing is said of micro-batches."""
    quiet_trainer(FusedAccumulation(**options), steps=1, epochs=2).fit(SeveralLosses(**arguments))
    texts = [r.getMessage() for r in caplog.records if "call manual_backward of their sum" in r.getMessage()]
    assert len(texts) == said


def test_the_sum_of_losses_is_stocks():
    """What the warning says to do."""

    def trained(module, *callbacks):
        torch.manual_seed(0)
        quiet_trainer(*callbacks, steps=1, epochs=2).fit(module)
        return module

    made = lambda module: torch.optim.SGD(module.parameters(), lr=0.01)  # noqa: E731
    stock, ours = SeveralLosses(2), SeveralLosses(2, summed=True)
    ours.load_state_dict(stock.state_dict())
    stock.made = ours.made = made
    assert_close(trained(ours, FusedAccumulation()), trained(stock))


@pytest.mark.parametrize("toggles", [False, True])
def test_two_optimizers(toggles):
    """Each has an accumulator; `zero_grad` of one clears what the other's loss has left."""
    assert_close(*both(lambda: Gan(toggles), steps=1, epochs=2))


@pytest.mark.parametrize("scaler", [False, True])
def test_metrics_are_logged(scaler, tmp_path):
    """Of every window, to the Trainer's logger; the loss as it was before it was divided and scaled."""
    callback = FusedAccumulation(weight=lambda data: len(data[0]), metrics=True)
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))] if scaler else None
    settings = {"log_every_n_steps": 1, "gradient_clip_val": 0.05, "plugins": plugins}
    one = quiet_trainer(callback, logger=CSVLogger(tmp_path, version=0), **settings)
    module, losses = Module(), []
    original = module.loss
    module.loss = lambda data: losses.append(original(data)) or losses[-1]
    one.fit(module)
    logged = one.logged_metrics
    assert logged["accumulator/loss"].item() == pytest.approx(sum(map(float, losses[-4:])) / 4, rel=1e-6)
    assert logged["accumulator/weight"] == 4 * SIZE
    assert logged["accumulator/micro_batches"] == 4
    assert logged["accumulator/grad_norm"] > 0.05
    assert logged["accumulator/step_skipped"] == 0
    assert "accumulator/windows_skipped" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_scale_batch_size(mode, tmp_path):
    """Lightning's finder beside the callback, and training after it."""
    found = []
    for ours in (False, True):
        model = Module(batch_size=1)
        one = quiet_trainer(*([FusedAccumulation()] if ours else []), default_root_dir=tmp_path)
        size = Tuner(one).scale_batch_size(model, mode=mode, max_trials=3, steps_per_trial=1)
        one.fit(model)
        found.append((size, model))
    assert found[0][0] == found[1][0] > 1
    assert_close(found[0][1], found[1][1])


class FindsLater(LearningRateFinder):
    """Before the first epoch, inside `fit`: https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html."""

    def on_fit_start(self, trainer, pl_module):
        """Not here."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            self.lr_find(trainer, pl_module)


def finder():
    """Of six steps, which would go beyond what the model trains."""
    return FindsLater(0.01, 1.0, num_training_steps=6, early_stop_threshold=None, update_attr=False)


def test_a_finder_inside_fit(tmp_path):
    """It trains without callbacks, as Lightning does."""
    found = []
    for callbacks in ([], [FusedAccumulation()]):
        one = finder()
        model = Module(lambda module: torch.optim.SGD(module.parameters(), lr=0.01))
        quiet_trainer(one, *callbacks, epochs=8, default_root_dir=tmp_path).fit(model)
        found.append(one.optimal_lr.results["loss"])
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_masters_after_a_finder_inside_fit(tmp_path):
    """They are restored as the model is, with the bits below the model's rounding."""

    class Ends(pl.Callback):
        def on_train_end(self, trainer, module):
            if any(one is self for one in trainer.callbacks):
                trained.append([p.clone() for p in FusedAccumulation.of(trainer).accumulator.parameters()])

    class In16Bit(Module):
        def loss(self, data):
            return super().loss([t.bfloat16() for t in data])

    trained = []
    for callbacks in ([], [finder()]):
        callbacks += [FusedAccumulation(master_weights=True), Ends()]
        one = quiet_trainer(*callbacks, epochs=8, precision="bf16-true", default_root_dir=tmp_path)
        one.fit(In16Bit(lambda module: torch.optim.SGD(module.parameters(), lr=0.01)))
    assert all(map(same_bits, *trained))
    assert all(p.dtype == torch.float32 for p in trained[0])


def test_optimizers_that_share_parameters(caplog):
    """Are left to Lightning, with a warning."""

    class Shared(Gan):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.01), torch.optim.SGD(self.parameters(), lr=0.02)]

    with caplog.at_level(logging.WARNING, "accumkernels"):
        assert_close(*both(lambda: Shared(False), steps=1))
    assert "SGD, SGD step the same parameters" in caplog.text


def test_without_an_optimizer():
    """Gradients are left to Lightning, too."""
    _, ours = both(lambda: Module(lambda module: None))
    assert same_bits(ours.head[0].weight, mlp()[2].weight)
