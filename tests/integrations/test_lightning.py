"""Lightning's Trainer with and without the callback: equal where Lightning is right, right where it is not."""

from __future__ import annotations

import contextlib
import logging
import os
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.backends import same_bits
from tests.support.models import batch, big_batch_grads, mlp, relative_error
from tests.support.trainers import SCALE, fp16_plugins, quiet_trainer

pl = pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402

import accumkernels as ak  # noqa: E402
from accumkernels.integrations.lightning import FusedAccumulation  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice: more workers, a GPU, a logger
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SIZE = 3  # samples of a micro-batch
CLIPPED = {"rtol": 1e-5, "atol": 1e-7}  # norms are summed in another order
ROUNDING = 1e-6  # gradients in fp32 against fp64; measured 1e-7


class Regression(pl.LightningModule):
    """Notes gradients at the hooks, skips the batches of `none`, spoils the losses of `bad`."""

    def __init__(self, optimizer=torch.optim.AdamW, lr=0.01, dtype=torch.float32, bad=(), none=(), **options):
        super().__init__()
        self.net = mlp(dtype)
        self.make = lambda: optimizer(self.parameters(), lr=lr, **options)
        self.bad, self.none = bad, none
        self.seen = []

    def training_step(self, data, index):
        x, y = data
        if index in self.none:
            return None
        loss = nn.functional.mse_loss(self.net(x).float(), y.float())
        return loss * torch.inf if index in self.bad else loss

    def on_before_optimizer_step(self, optimizer):
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])

    def configure_optimizers(self):
        optimizer = self.make()
        scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}
        return [optimizer], [scheduler]


class Manual(Regression):
    """Four micro-batches to a window, counted by hand; without the callback the usual recipe.

    Args:
        usual: Divide by 4 and clear gradients, as Lightning's documentation has it.
    """

    def __init__(self, usual, clip=None, algorithm="norm", **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.usual, self.clip, self.algorithm = usual, clip, algorithm

    def training_step(self, data, index):
        optimizer = self.optimizers()
        loss = super().training_step(data, index)
        self.manual_backward(loss / 4 if self.usual else loss)
        if (index + 1) % 4 == 0:
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip, self.algorithm)
            optimizer.step()
            if self.usual:
                optimizer.zero_grad()


class Adversarial(Regression):
    """FGM: a second loss, at weights moved along the gradient of the first, is added to it in `on_after_backward`.

    Args:
        manual: Whether optimization is, and `training_step` does this itself.
    """

    def __init__(self, manual=False):
        super().__init__(torch.optim.SGD, lr=1.0)
        self.automatic_optimization = not manual

    def training_step(self, data, index):
        self.data = data
        loss = super().training_step(data, index)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.attack(1)
        if index % 4 == 3:
            self.optimizers().step()
        return None

    def attack(self, steps):
        weight = self.net[0].weight
        step = weight.grad / weight.grad.norm()  # AttributeError where there is none
        with torch.no_grad():
            weight.add_(step)
        (super().training_step(self.data, -1) / steps).backward()
        with torch.no_grad():
            weight.sub_(step)


class AdversarialHook(Adversarial):
    """In automatic optimization."""

    def on_after_backward(self):
        self.attack(self.trainer.accumulate_grad_batches)


class NewTokens(Regression):
    """Textual inversion: rows of a weight stay as they are, since their gradient is set to zero after each backward."""

    def on_after_backward(self):
        self.net[0].weight.grad[:3] = 0


def loader(samples, size=SIZE):
    """Always the same samples in the same order."""
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(samples)), batch_size=size)


def fp16():
    """On the CPU Lightning makes bf16 of precision="16-mixed", but for a plugin."""
    return {"plugins": fp16_plugins()}


def fit(model, samples, *callbacks, **options):
    """Train; the model and the Trainer."""
    one = quiet_trainer(*callbacks, **options)
    one.fit(model, loader(samples))
    return model, one


def bits_agree(one, two):
    """Of all parameters."""
    return all(same_bits(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def sgd(**options):
    """A model moved by the gradient itself."""
    return Regression(torch.optim.SGD, lr=1.0, **options)


def adversarial_gradient(samples):
    """The mean over a window's micro-batches of the gradients of both losses, by hand."""
    model = mlp()
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for x, y in loader(samples):
        grads = torch.autograd.grad(nn.functional.mse_loss(model(x), y), params)
        other = mlp()
        with torch.no_grad():
            other[0].weight.add_(grads[0] / grads[0].norm())
        others = torch.autograd.grad(nn.functional.mse_loss(other(x), y), list(other.parameters()))
        for into, *found in zip(total, grads, others, strict=True):
            into += sum(found) * SIZE / samples
    return total


def moved(model):
    """The gradient of the one window of SGD with rate 1."""
    return [p - q for p, q in zip(mlp().parameters(), model.parameters(), strict=True)]


PRECISIONS = {"fp32": dict, "bf16": lambda: {"precision": "bf16-mixed"}, "fp16": fp16}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipped_by_value(precision):
    """`gradient_clip_val` and `gradient_clip_algorithm`."""
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    stock, _ = fit(Regression(), 8 * SIZE, **options, **PRECISIONS[precision]())
    ours, _ = fit(Regression(), 8 * SIZE, FusedAccumulation(), **options, **PRECISIONS[precision]())
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CLIPPED)
    unclipped, _ = fit(Regression(), 8 * SIZE, FusedAccumulation(), **PRECISIONS[precision]())
    assert not bits_agree(ours, unclipped)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fused_optimizers_are_clipped(precision):
    """As unfused ones.

    Lightning refuses in mixed precision, since a fused optimizer may unscale by itself; in bf16 too, where nothing is
    scaled (https://github.com/Lightning-AI/pytorch-lightning/issues/21435).
    """
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Regression(fused=True), 4 * SIZE, gradient_clip_val=0.05, **PRECISIONS[precision]())
    options = {"gradient_clip_val": 0.05}
    ours, _ = fit(Regression(fused=True), 8 * SIZE, FusedAccumulation(), **options, **PRECISIONS[precision]())
    stock, _ = fit(Regression(), 8 * SIZE, **options, **PRECISIONS[precision]())
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # and the fused AdamW rounds otherwise


def test_another_window_per_epoch():
    """GradientAccumulationScheduler changes `accumulate_grad_batches` while it trains."""
    stock, _ = fit(Regression(), 8 * SIZE, GradientAccumulationScheduler({0: 2, 1: 8}), steps=1, epochs=2)
    both = [GradientAccumulationScheduler({0: 2, 1: 8}), FusedAccumulation()]
    ours, one = fit(Regression(), 8 * SIZE, *both, steps=1, epochs=2)
    assert bits_agree(ours, stock)
    assert one.global_step == 5


def test_batches_without_a_loss():
    """`training_step` may return None: the others are averaged; a window of none is skipped."""
    x, y = batch(4 * SIZE)
    truth = big_batch_grads(mlp(), torch.cat([x[:SIZE], x[2 * SIZE :]]), torch.cat([y[:SIZE], y[2 * SIZE :]]))
    ours, _ = fit(sgd(none=(1,)), 4 * SIZE, FusedAccumulation())
    assert relative_error(moved(ours), truth) < ROUNDING
    last, _ = fit(sgd(none=(3,)), 4 * SIZE, FusedAccumulation(), **fp16())
    assert relative_error(moved(last), big_batch_grads(mlp(), x[: 3 * SIZE], y[: 3 * SIZE])) < 5e-3  # in fp16
    nothing, _ = fit(sgd(none=(0, 1, 2, 3)), 4 * SIZE, FusedAccumulation())
    assert bits_agree(nothing.net, mlp())


@pytest.mark.parametrize("clip", [(), (0.05, "norm"), (0.01, "value")])
def test_manual_optimization(clip):
    """`manual_backward` and `optimizer.step()`, without division and zero_grad; the Trainer counts the steps."""
    stock, one = fit(Manual(True, *clip), 8 * SIZE, steps=1, precision="bf16-mixed")
    ours, two = fit(Manual(False, *clip), 8 * SIZE, FusedAccumulation(), steps=1, precision="bf16-mixed")
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CLIPPED)
    for a, b in zip(ours.seen[1], stock.seen[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # of weights that differ by `CLIPPED`
    assert two.global_step == one.global_step == 2


def test_manual_optimization_is_clipped_in_fp16():
    """By the norm of the gradient itself.

    Lightning clips what still carries the scale (https://github.com/Lightning-AI/pytorch-lightning/pull/19536).
    """
    ours, _ = fit(Manual(False, 0.05), 4 * SIZE, FusedAccumulation(), steps=1, **fp16())
    norm = torch.cat([grad.flatten() for grad in ours.seen[0]]).norm().item()
    assert norm == pytest.approx(0.05, rel=1e-3)
    stock, _ = fit(Manual(True, 0.05), 4 * SIZE, steps=1, **fp16())
    norm = torch.cat([grad.flatten() for grad in stock.seen[0]]).norm().item()
    assert norm == pytest.approx(0.05 / SCALE, rel=1e-3)  # clipped before, unscaled after


def test_master_weights_and_checkpoints(tmp_path):
    """A bf16 model trained through fp32 masters, in one go and in two: the same bits."""

    def parts():
        model = Regression()
        return model, FusedAccumulation(master_weights=True), ModelCheckpoint(tmp_path, save_top_k=-1)

    options = {"precision": "bf16-true", "enable_checkpointing": True, "epochs": 2}
    model, callback, checkpoint = parts()
    whole, one = fit(model, 8 * SIZE, callback, checkpoint, **options)
    assert all(p.dtype == torch.bfloat16 for p in whole.parameters())
    model, callback, checkpoint = parts()
    two = quiet_trainer(callback, checkpoint, **options)
    path = tmp_path / "epoch=0-step=2.ckpt"
    assert "callbacks" in torch.load(path, weights_only=True)
    two.fit(model, loader(8 * SIZE), ckpt_path=str(path))
    assert two.global_step == one.global_step == 4
    assert bits_agree(model, whole)


class Saving(Regression):
    """Its data are numbered. Saves at one moment of the batch of a number, as a signal's handler may (SLURM's)."""

    def __init__(self, moment, path, number=2, **options):
        super().__init__(torch.optim.SGD, lr=0.1, **options)
        self.moment, self.path, self.number = moment, path, number
        self.ran, self.masters = [], []

    def save(self, moment):
        if moment == self.moment and self.ran[-1] == self.number:
            self.masters = [p.clone() for p in FusedAccumulation.of(self.trainer).accumulator.parameters()]
            self.trainer.save_checkpoint(self.path)

    def training_step(self, data, index):
        self.ran.append(index)
        x, y = batch(SIZE, seed=index)
        out = self.net(x.to(self.net[0].weight.dtype))
        out.register_hook(lambda grad: self.save("backward"))
        return nn.functional.mse_loss(out.float(), y)

    def on_after_backward(self):
        self.save("after")

    def on_before_optimizer_step(self, optimizer):
        self.seen.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])
        self.save("step")


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(("moment", "number"), [("backward", 2), ("after", 2), ("step", 3)])
def test_saved_inside_a_batch(moment, number, masters, tmp_path, caplog):
    """Lightning runs that batch again when it resumes, and so its window has only the rest, as Lightning's own has."""
    options = {"precision": "bf16-true" if masters else None}
    path = tmp_path / "inside.ckpt"
    model, _ = fit(Saving(moment, path, number), 8 * SIZE, FusedAccumulation(master_weights=masters), **options)
    plain, _ = fit(Saving(None, path), 8 * SIZE, FusedAccumulation(master_weights=masters), **options)
    assert bits_agree(model, plain)
    said = [record.getMessage() for record in caplog.records if "inside of a batch" in record.getMessage()]
    assert len(said) == 1
    assert f"after {4 if moment == 'step' else number + (moment == 'after')} micro-batches" in said[0]
    saved = torch.load(path, weights_only=True)
    kept = saved["callbacks"]["FusedAccumulation"]["masters"]
    assert all(same_bits(a, b) for a, b in zip(kept.values(), model.masters, strict=True)) if masters else not kept
    resumed = Saving(None, path)
    quiet_trainer(FusedAccumulation(master_weights=masters), **options).fit(
        resumed, loader(8 * SIZE), ckpt_path=str(path)
    )
    rest = list(range(number, 4))
    assert resumed.ran[: len(rest)] == rest
    start = Regression()
    start.load_state_dict(saved["state_dict"])
    batches = [batch(SIZE, seed=index) for index in rest]
    expected = big_batch_grads(start.net, *map(torch.cat, zip(*batches, strict=True)))
    # In bf16 the forward rounds, to a part in 256.
    assert relative_error(resumed.seen[0], expected) < (0.02 if masters else ROUNDING)


def test_resumed_between_clipping_and_step(tmp_path):
    """A window that was left there when it was saved is an error at the next backward, as it is without resuming."""

    class Clips(Regression):
        def __init__(self):
            super().__init__(torch.optim.SGD, lr=0.1)
            self.automatic_optimization = False

        def training_step(self, data, index):
            self.manual_backward(super().training_step(data, index))
            if index == 1:
                self.clip_gradients(self.optimizers(), 1.0, "norm")

        def on_train_batch_end(self, outputs, data, index):
            if index == 1:
                self.trainer.save_checkpoint(tmp_path / "clipped.ckpt")

    with pytest.raises(RuntimeError, match="step the optimizer before"):
        fit(Clips(), 4 * SIZE, FusedAccumulation(), steps=1)
    with pytest.raises(RuntimeError, match="loaded as finalized"):
        quiet_trainer(FusedAccumulation(), steps=1).fit(
            Clips(), loader(4 * SIZE), ckpt_path=str(tmp_path / "clipped.ckpt")
        )


def test_the_accumulator_in_hooks():
    """While `fit` runs, it is there for the module."""
    seen = []

    class Looks(Regression):
        def on_train_batch_end(self, *_):
            callback = FusedAccumulation.of(self.trainer)
            assert callback.accumulators == [callback.accumulator]
            seen.append(callback.accumulator.micro_batches)

    fit(Looks(), 3 * SIZE, pl.Callback(), FusedAccumulation())
    assert seen[:2] == [1, 2]


def test_what_fit_leaves():
    """Model, optimizer and precision plugin are free afterwards, also after an exception; `fit` works again."""
    callback = FusedAccumulation(master_weights=True)
    model, one = fit(Regression(), 4 * SIZE, callback, precision="bf16-true")
    assert {id(p) for group in one.optimizers[0].param_groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }
    with pytest.raises(RuntimeError, match="only while"):
        _ = callback.accumulator
    ak.FusedAccumulator(model).remove()
    names = {"optimizer_step", "clip_gradients", "clip_grad_by_norm", "backward", "post_backward"}
    assert not names & set(vars(one.precision_plugin))

    class Fails(Regression):
        def training_step(self, data, index):
            raise ZeroDivisionError

    failing = Fails()
    with pytest.raises(ZeroDivisionError):
        fit(failing, 4 * SIZE, callback)
    ak.FusedAccumulator(failing).remove()
    again, _ = fit(sgd(), 4 * SIZE, FusedAccumulation())
    assert relative_error(moved(again), big_batch_grads(mlp(), *batch(4 * SIZE))) < ROUNDING


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_checkpoint_after_fit_lacks(masters, fails, tmp_path, caplog):
    """Masters and an open window are gone, which is said; nothing is said where nothing is."""

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, data, index):
            if fails and index == 5:
                raise ZeroDivisionError

    one = quiet_trainer(FusedAccumulation(master_weights=masters), Stops(), precision="bf16-true")
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        one.fit(Regression(), loader(8 * SIZE))
    assert caplog.records == []
    one.save_checkpoint(tmp_path / "after.ckpt")
    gone = ["the fp32 masters"] * masters + ["2 micro-batches of a window"] * fails
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(gone)
    assert all(f"leaves out {' and '.join(gone)}:" in message for message in said)


def test_errors():
    """What it does not drive is refused before training."""
    one = quiet_trainer()
    one.strategy.__class__ = type("FSDPStrategy", (pl.strategies.Strategy,), {"model": None})
    with pytest.raises(ValueError, match="FSDPStrategy.*ModelParallelStrategy"):
        FusedAccumulation().on_fit_start(one, Regression())
    with pytest.raises(TypeError, match="LBFGS"):
        fit(Regression(torch.optim.LBFGS, lr=0.1), 4 * SIZE, FusedAccumulation())


def test_other_package():
    """The Trainer of pytorch_lightning has other classes: what is wrong is the package, not the strategy."""
    # Its import would give other tests its loggers.
    other = type("Trainer", (), {"__module__": "pytorch_lightning.trainer.trainer"})
    with pytest.raises(TypeError, match="import lightning.pytorch where you import pytorch_lightning"):
        FusedAccumulation().on_fit_start(other(), Regression())


@pytest.mark.parametrize("manual", [False, True])
def test_fgm(manual, caplog):
    """With the option, the gradient of both losses; without it, what to do is said once, and it raises."""
    make = Adversarial if manual else AdversarialHook
    options = {"steps": 1} if manual else {}
    model, _ = fit(make(manual), 4 * SIZE, FusedAccumulation(release="microbatch"), **options)
    assert relative_error(moved(model), adversarial_gradient(4 * SIZE)) < 1e-5  # the attack magnifies rounding
    assert caplog.records == []
    with pytest.raises(AttributeError, match="NoneType"):
        fit(make(manual), 4 * SIZE, FusedAccumulation(), **options)
    (found,) = caplog.records
    assert "needs FusedAccumulation(release='microbatch')" in found.getMessage()
    assert manual or found.getMessage().startswith("accumkernels: AdversarialHook.on_after_backward() finds")


def attack(model):
    """FGM that passes by a gradient of None."""
    for p in model.parameters():
        (lambda p: None if p.grad is None else p.data.add_(p.grad))(p)


class Attack:
    """The same in a class."""

    def run(self, model):
        attack(model)


class Passing(Manual):
    """Manual optimization; what is derived may look at `.grad` after a backward."""

    def __init__(self):
        super().__init__(usual=False)
        self.attack = type("Derived", (Attack,), {})()

    def training_step(self, data, index):
        self.manual_backward(Regression.training_step(self, data, index))
        self.optimizers().step()


class InFunction(Passing):
    """In a function of the file."""

    def training_step(self, data, index):
        super().training_step(data, index)
        attack(self.net)


class InMember(Passing):
    """In the base of an attribute's class, and what that calls."""

    def training_step(self, data, index):
        super().training_step(data, index)
        self.attack.run(self.net)


class InMethod(Passing):
    """In a method of its own."""

    def training_step(self, data, index):
        super().training_step(data, index)
        self.norm()

    def norm(self):
        return sum(p.grad.norm() for p in self.parameters() if p.grad is not None)


class Penalty(Passing):
    """Asks torch for a gradient, not a tensor."""

    def training_step(self, data, index):
        super().training_step(data, index)
        x = data[0].requires_grad_()
        torch.autograd.grad(self.net(x).sum(), x)


@pytest.mark.parametrize("kind", [InFunction, InMember, InMethod, Penalty, Passing])
def test_code_that_skips_missing_gradients(kind, caplog):
    """It runs, and says nothing: where it would find none is said once, at the start, naming the function."""
    fit(kind(), 2 * SIZE, FusedAccumulation(release="microbatch"), steps=1)
    assert caplog.records == []
    fit(kind(), 2 * SIZE, FusedAccumulation(), steps=1)
    names = {InFunction: "attack", InMember: "attack", InMethod: "InMethod.norm"}
    assert [r.getMessage().partition(" finds")[0] for r in caplog.records] == [
        f"accumkernels: {names[k]}(), which reads .grad," for k in (kind,) if k in names
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_textual_inversion(precision):
    """Gradients edited after each backward, in any precision; `.grad` is gone when the batch has ended."""
    stock, _ = fit(NewTokens(), 8 * SIZE, **PRECISIONS[precision]())
    later = []

    class After(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            later.extend(p.grad is None for p in module.parameters() if trainer.fit_loop._should_accumulate())

    callback = FusedAccumulation(release="microbatch")
    ours, _ = fit(NewTokens(), 8 * SIZE, callback, After(), **PRECISIONS[precision]())
    before, after = mlp()[0].weight[:3], ours.net[0].weight[:3]
    assert bits_agree(ours, stock)
    assert not torch.equal(mlp()[0].weight[3:], ours.net[0].weight[3:])
    torch.testing.assert_close(after, before * (1 - 0.01 * 0.01) ** 2)  # AdamW's decay alone
    assert len(later) == 6 * 6 and all(later)


def test_edits_of_every_backward_in_manual_optimization():
    """Two losses of a batch are two micro-batches: each is taken with what was done to its gradient."""

    class Edited(Manual):
        def training_step(self, data, index):
            optimizer = self.optimizers()
            for factor in (1, 3):
                self.manual_backward(Regression.training_step(self, data, index))
                for p in self.parameters():
                    p.grad.mul_(factor)
            if index % 2 == 1:
                optimizer.step()

    model = Edited(usual=False, optimizer=torch.optim.SGD, lr=1.0)
    fit(model, 2 * SIZE, FusedAccumulation(release="microbatch"), steps=1)
    expected = big_batch_grads(mlp(), *batch(2 * SIZE))
    assert relative_error(moved(model), [2 * grad for grad in expected]) < ROUNDING


@pytest.mark.parametrize("then", ["auto", "ddp"])
@pytest.mark.parametrize("first", ["auto", "ddp"])
@mock.patch.dict(os.environ)  # where Fabric leaves an address
def test_fabric(first, then, tmp_path):
    """The long form with the module that Fabric has set up; what is saved inside a window loads into any other."""
    x, y = batch(9)
    whole = mlp()
    for strategy, parts in (first, [(0, 2), (2, 6)]), (then, [(6, 9)]):
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        try:
            model = mlp()
            module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
            with ak.FusedAccumulator(module) as acc:
                if parts[0][0] > 0:
                    fabric.load(tmp_path / "state", {"acc": acc})
                for begin, end in parts:
                    fabric.backward(nn.functional.mse_loss(module(x[begin:end]), y[begin:end]))
                    acc.accumulate(weight=end - begin)
                fabric.save(tmp_path / "state", {"acc": acc})
                acc.finalize(optimizer.optimizer)
                optimizer.step()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    found = [before - after for before, after in zip(whole.parameters(), model.parameters(), strict=True)]
    assert relative_error(found, big_batch_grads(whole, x, y)) < ROUNDING
