"""accelerate's loop, with its Accelerator and with ours: equal where accelerate is right, right where it is not."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.support.backends import same_bits
from tests.support.models import batch, big_batch_grads, mlp, relative_error
from tests.support.trainers import make, reset

accelerate = pytest.importorskip("accelerate")

from accelerate.utils import GradientAccumulationPlugin  # noqa: E402

import accumkernels as ak  # noqa: E402
from accumkernels.integrations import optimizer_accumulator  # noqa: E402
from accumkernels.integrations.accelerate import Accelerator, fuse  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread", "fresh_state")]

STOCK = accelerate.Accelerator
SIZE = 3  # samples of a micro-batch
# The norms are summed in another order, so that clipped gradients differ in their last bits.
CLIPPED = {"rtol": 1e-5, "atol": 1e-7}
# Gradients in fp32 against the big batch in fp64; measured 1e-7.
ROUNDING = 1e-6


def loader(samples, size=SIZE):
    """Always the same samples in the same order."""
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(samples)), batch_size=size)


def sgd(params):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(params, lr=1.0)


def adamw(params):
    """Unfused."""
    return torch.optim.AdamW(params, lr=0.01)


def fused_adamw(params):
    """Does not step in Python what GradScaler skips, but in its kernel."""
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def train(accelerator, samples, optimizer_fn=adamw, clip=None, weigh=None, size=SIZE, bad=(), epochs=1, model=None):
    """The loop of accelerate's documentation; the model, and per window (norm, learning rate, step was skipped).

    `weigh` makes the weight of a micro-batch from its targets; losses of the `bad` micro-batches are infinite.
    """
    model = mlp() if model is None else model
    optimizer = optimizer_fn(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(samples, size), scheduler)
    history, index = [], 0
    for _ in range(epochs):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x).float(), y)
                loss = loss * torch.inf if index in bad else loss
                accelerator.backward(loss, **({} if weigh is None else {"weight": weigh(y)}))
                norm = None
                if accelerator.sync_gradients and clip is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip).item()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            index += 1
            if accelerator.sync_gradients:
                history.append((norm, scheduler.get_last_lr()[0], accelerator.optimizer_step_was_skipped))
    return model, history


def moved(model):
    """By how much SGD of rate 1 has moved the parameters of `mlp()`, negated: the gradient of the one window."""
    return [before - after for before, after in zip(mlp().parameters(), model.parameters(), strict=True)]


def test_a_skipped_step_of_a_fused_optimizer_is_seen():
    """The scheduler stays with the optimizer.

    accelerate takes a fused optimizer for stepped whatever its kernel did, and steps the scheduler
    (https://github.com/huggingface/accelerate/issues/4242).
    """
    _, theirs = train(make(STOCK, "fp16"), 4 * SIZE, fused_adamw, bad=(1,))
    _, mine = train(make(Accelerator, "fp16"), 4 * SIZE, fused_adamw, bad=(1,))
    assert mine == [(None, 0.01, True)]
    assert theirs == [(None, pytest.approx(0.009), False)]  # when this fails, accelerate has mended it


@pytest.mark.parametrize("scale", [8.0, 2.0**20])
def test_a_scaler_that_is_set_after_prepare_scales(scale):
    """As by trainers that keep one for each model (imagen-pytorch): the larger one skips windows, and backs off."""
    found = []
    for cls in (STOCK, Accelerator):
        accelerator = make(cls, "fp16", steps=1)
        model = mlp()
        model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        skipped = []
        for i in range(8):
            accelerator.scaler = optimizer.scaler = scaler
            accelerator.backward(mse_loss(model(batch(SIZE)[0]).half(), batch(SIZE, seed=i)[1].half()))
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
        found.append((skipped, scaler.state_dict(), moved(model)))
    (*theirs, expected), (*mine, ours) = found
    assert mine == theirs
    assert any(theirs[0]) == (scale > 8)
    assert relative_error(ours, expected) < ROUNDING


def test_another_scaler_is_set_between_a_step_and_its_scheduler():
    """The scheduler waits where the step was skipped, and the accumulator, which is the same, goes on counting."""
    found = []
    for cls in (STOCK, Accelerator):
        accelerator = make(cls, "fp16", steps=1)
        optimizer = sgd((model := mlp()).parameters())
        model, optimizer, scheduler = accelerator.prepare(
            model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        )
        seen = []
        for bad in (False, True, True, False):
            accelerator.backward(mse_loss(model(batch(SIZE)[0]), batch(SIZE)[1]) * (float("inf") if bad else 1.0))
            optimizer.step()
            optimizer.zero_grad()
            accelerator.scaler = optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scheduler.step()
            seen.append((accelerator.optimizer_step_was_skipped, *scheduler.get_last_lr()))
        found.append(seen)
    assert found[1] == found[0]
    assert accelerator.accumulator.metrics()["windows"] == 4
    assert accelerator.accumulator.metrics()["windows_skipped"] == 2
    assert accelerator.accumulator.state_dict()["window"]["number"] == 4


def test_a_scaler_that_is_set_inside_a_window_is_refused():
    """The same one is not another, nor is a disabled one another than None, or none before there is any."""
    assert Accelerator.__new__(Accelerator).scaler is None
    accelerator, model, optimizer = prepared()
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(batch(SIZE)[0]), batch(SIZE)[1]))
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    for loop_has_ended_it in (False, True):
        with pytest.raises(RuntimeError, match=r"accelerator\.scaler = .* inside a window.*after optimizer\.step\(\)"):
            accelerator.scaler = torch.amp.GradScaler("cpu")
        assert not accelerator.scaler.is_enabled()
        if not loop_has_ended_it:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(batch(SIZE)[0]), batch(SIZE)[1]))
    optimizer.step()
    accelerator.scaler = torch.amp.GradScaler("cpu")


def test_weights_that_the_accelerator_holds(caplog):
    """For loops that cannot pass a weight: the Trainer's of transformers.

    Two micro-batches' factor 1/2 and the half of before come to 1, and the loss that accelerate divides by 2 is no
    mistake of the user's.
    """
    accelerator = make(Accelerator, steps=2)
    accelerator.micro_batch_weight, accelerator.loss_divided_by = 5.0, 0.5
    ours, _ = train(accelerator, 2 * SIZE, sgd)
    doubled = [0.5 * grad for grad in big_batch_grads(mlp(), *batch(2 * SIZE))]
    assert relative_error(moved(ours), doubled) < ROUNDING
    assert caplog.records == []


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_window_without_weight(precision):
    """Is skipped, and no overflow."""
    accelerator = make(Accelerator, precision)
    ours, mine = train(accelerator, 4 * SIZE, fused_adamw, weigh=lambda y: 0.0)
    assert mine == [(None, 0.01, True)]
    assert all(same_bits(a, b) for a, b in zip(ours.parameters(), mlp().parameters(), strict=True))
    assert accelerator.scaler is None or accelerator.scaler.get_scale() == 2.0**10


def prepared(steps=2, **options):
    """An accelerator with model and optimizer."""
    accelerator = make(Accelerator, steps=steps, **options)
    model = mlp()
    return (accelerator, *accelerator.prepare(model, sgd(model.parameters())))


def backward(accelerator, model, seed=1, **kwargs):
    """A micro-batch."""
    x, y = batch(SIZE, seed=seed)
    accelerator.backward(nn.functional.mse_loss(model(x), y), **kwargs)


def test_grad_at_the_end_of_a_window():
    """From the last backward on `.grad` is the mean, for whoever looks or changes it; before it is None."""
    accelerator, model, optimizer = prepared()
    with accelerator.accumulate(model):
        backward(accelerator, model, seed=1)
        assert all(p.grad is None for p in model.parameters())
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0  # nothing to clip inside a window
        optimizer.step()
        optimizer.zero_grad()  # drops nothing inside a window
    with accelerator.accumulate(model):
        backward(accelerator, model, seed=2)
        (x1, y1), (x2, y2) = batch(SIZE, seed=1), batch(SIZE, seed=2)
        truth = big_batch_grads(model, torch.cat([x1, x2]), torch.cat([y1, y2]))
        assert relative_error([p.grad for p in model.parameters()], truth) < ROUNDING
        first, *others = model.parameters()
        accelerator.clip_grad_norm_([first], 1e-3)
        assert first.grad.norm().item() == pytest.approx(1e-3, rel=1e-3)
        assert relative_error([p.grad for p in others], truth[1:]) < ROUNDING
        accelerator.clip_grad_value_(model.parameters(), 1e-4)
        optimizer.step()
        assert first.grad is not None  # until the next window, as after any step
    assert max(change.abs().max().item() for change in moved(model)) == pytest.approx(1e-4, rel=1e-2)
    with accelerator.accumulate(model):  # nobody called zero_grad
        assert all(p.grad is None for p in model.parameters())
        backward(accelerator, model)


def test_a_window_can_be_dropped():
    """`zero_grad` in place of `step`."""
    accelerator, model, optimizer = prepared(steps=1)
    with accelerator.accumulate(model):
        backward(accelerator, model)
        optimizer.zero_grad()
    with accelerator.accumulate(model):
        backward(accelerator, model, seed=2)
        optimizer.step()
    assert relative_error(moved(model), big_batch_grads(mlp(), *batch(SIZE, seed=2))) < ROUNDING


def test_a_loader_that_ends_nothing(tmp_path):
    """With `sync_with_dataloader=False` a window goes on in the next epoch: in a resumed run, the same bits."""

    def build():
        reset()
        plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, mixed_precision="bf16")
        model = mlp()
        prepared = accelerator.prepare(model, adamw(model.parameters()), loader(6 * SIZE))
        accelerator.register_for_checkpointing(accelerator.accumulator)
        return (accelerator, *prepared)

    def epoch(accelerator, model, optimizer, data):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    one = build()
    epoch(*one)
    assert one[0].accumulator.micro_batches == 2
    one[0].save_state(str(tmp_path))
    epoch(*one)
    two = build()
    two[0].load_state(str(tmp_path))
    two[0].step = 6  # of accelerate's counter of micro-batches
    epoch(*two)
    assert two[0].accumulator.micro_batches == 0
    assert all(same_bits(a, b) for a, b in zip(one[1].parameters(), two[1].parameters(), strict=True))


def test_no_offload():
    """accelerate moves optimizers to the model's device, and its checkpoints do not know masters of all parameters."""
    accelerator = make(Accelerator, accumulator_options={"cpu_offload": True})
    model = mlp(torch.float32)
    with pytest.raises(ValueError, match="cpu_offload=True in a trainer: .* in a loop of your own"):
        accelerator.prepare(model, adamw(model.parameters()))


def test_master_weights():
    """A bf16 model whose fp32 masters are stepped: as in a loop of one's own; and it comes back with its optimizer."""
    accelerator = make(Accelerator, accumulator_options={"master_weights": True})
    model = mlp(torch.bfloat16)
    params = list(model.parameters())
    optimizer = adamw(params)
    accelerator.prepare(model, optimizer)
    twin = mlp(torch.bfloat16)
    acc = ak.FusedAccumulator(twin, master_weights=True)
    other = adamw(acc.parameters())
    fused = accelerator._optimizers[0]
    for window in range(3):
        for index in range(4):
            x, y = batch(SIZE, torch.bfloat16, seed=4 * window + index)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(params, 0.3)
                fused.step()
                fused.zero_grad()
            acc.backward(nn.functional.mse_loss(twin(x), y))
        acc.step(other, max_norm=0.3)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p.dtype == torch.float32 for p in stepped)
    for mine, theirs in zip(stepped, acc.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **CLIPPED)
    with accelerator.accumulate(model):
        accelerator.gradient_state._set_sync_gradients(True)
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        accelerator.clip_grad_norm_(params[0], 1e-3)  # one of them: of the model, to be clipped in the masters
        assert stepped[0].grad.norm().item() == pytest.approx(1e-3, rel=1e-3)
    accelerator.free_memory()
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in params]
    assert set(optimizer.state) == set(params)
    ak.FusedAccumulator(model).remove()


class Averaging(torch.optim.SGD):
    """Evaluates at the average of its weights, as schedule-free optimizers do, which change `.data`."""

    training = True

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["steps"] = state.get("steps", 0) + 1
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.detach(), 1 / state["steps"])

    def train(self, mode=True):
        for p in self.param_groups[0]["params"] if mode != self.training else ():
            kept = p.detach().clone()
            p.data.copy_(self.state[p]["mean"])
            self.state[p]["mean"] = kept
        self.training = mode

    def eval(self):
        self.train(False)


def test_an_optimizer_that_evaluates_at_other_weights():
    """They are in its masters, and the model gets them; what a loop has written to the model is not lost."""
    accelerator = make(Accelerator, steps=1, accumulator_options={"master_weights": True})
    model = mlp(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, Averaging(model.parameters(), lr=1.0))
    masters = optimizer.param_groups[0]["params"]

    def look():
        return [p.detach().clone() for p in model.parameters()]

    for index in range(3):
        optimizer.train()  # as transformers' Trainer does before each micro-batch
        with accelerator.accumulate(model):
            x, y = batch(SIZE, torch.bfloat16, seed=index)
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    trained, exact = look(), [p.detach().clone() for p in masters]
    optimizer.eval()
    means = look()
    assert not any(map(torch.equal, means, trained))
    assert all(torch.equal(mean, master.bfloat16()) for mean, master in zip(means, masters, strict=True))
    optimizer.train()
    assert all(map(torch.equal, look(), trained))
    assert all(map(torch.equal, masters, exact))
    with torch.no_grad():
        model[0].bias.zero_()
    optimizer.eval()
    optimizer.optimizer.train()  # whatever mode it was last asked for through accelerate's
    optimizer.eval()
    optimizer.train()
    assert model[0].bias.count_nonzero() == 0


def test_masters_stay_when_something_else_is_prepared():
    """The optimizer steps masters then, which no model has: its accumulator is kept, and apart from those of others."""
    accelerator = make(Accelerator, accumulator_options={"master_weights": True})
    model, other = mlp(torch.bfloat16), mlp(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    accumulator = accelerator.accumulator
    accelerator.prepare(loader(SIZE))
    accelerator.prepare_model(other)
    assert accelerator.accumulators == [accumulator]
    accelerator.prepare(adamw(other.parameters()))
    assert len(accelerator.accumulators) == 2
    assert accelerator.accumulators[0] is accumulator
    second = accelerator.prepare(adamw(model.parameters()))  # whose gradients belong to no single window
    assert optimizer.window is None
    assert second.window is None


@pytest.mark.parametrize("kind", [optimizer_accumulator._NoSync, lambda module: SimpleNamespace(remove=lambda: None)])
def test_collected_with_its_module(kind, monkeypatch):
    """After an exception, with all that refers to each other: nothing is raised on the way."""
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    module = nn.Linear(2, 2)
    module.held = optimizer_accumulator.shared(optimizer_accumulator._no_syncs, module, kind)
    module.held.__enter__()
    del module
    gc.collect()
    assert raised == []


def test_clipped_without_gradients():
    """Of a window that nothing has run in, the norm is 0; by value, as accelerate where no optimizer is prepared."""
    accelerator, model, optimizer = prepared(steps=1)
    with accelerator.accumulate(model):
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0
        optimizer.step()
    accelerator, other = make(Accelerator), mlp()
    other[0].bias.grad = torch.ones_like(other[0].bias)
    accelerator.clip_grad_value_(other.parameters(), 0.5)
    assert (other[0].bias.grad == 0.5).all()


def test_saved_before_gradients_are_cleared(tmp_path):
    """The window has been stepped: the resumed run begins the next."""
    accelerator, model, optimizer = prepared(steps=1)
    accelerator.register_for_checkpointing(accelerator.accumulator)
    with accelerator.accumulate(model):
        backward(accelerator, model)
        optimizer.step()
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    with accelerator.accumulate(model):
        backward(accelerator, model)
        optimizer.step()


def test_prepared_one_by_one():
    """In either order."""
    for first in (0, 1):
        accelerator = make(Accelerator, steps=1)
        model = mlp()
        parts = [model, sgd(model.parameters())]
        parts[first] = accelerator.prepare(parts[first])
        with pytest.raises(RuntimeError, match="prepare"):
            backward(accelerator, model, weight=2)
        parts[1 - first] = accelerator.prepare(parts[1 - first])
        with accelerator.accumulate(model):
            backward(accelerator, model)
            parts[1].step()
        assert relative_error(moved(model), big_batch_grads(mlp(), *batch(SIZE))) < ROUNDING


def test_models_that_share_a_parameter():
    """Two heads on one encoder, prepared as two models: as in accelerate, bit for bit."""

    def trained(cls):
        accelerator = make(cls, steps=2)
        encoder, *heads = (mlp(seed=seed) for seed in range(3))
        one, two = (nn.Sequential(encoder, nn.ZeroPad1d((0, 2)), head) for head in heads)
        params = list(dict.fromkeys([*one.parameters(), *two.parameters()]))
        one, two, optimizer, data = accelerator.prepare(one, two, adamw(params), loader(4 * SIZE))
        for x, y in data:
            with accelerator.accumulate(one, two):
                accelerator.backward(mse_loss(one(x), y) + mse_loss(two(x), -y))
                optimizer.step()
                optimizer.zero_grad()
        return params

    pairs = zip(trained(Accelerator), trained(STOCK), strict=True)
    assert all(same_bits(ours.detach(), stock.detach()) for ours, stock in pairs)


def test_models_that_nobody_steps():
    """A frozen teacher is prepared beside the model."""
    accelerator = make(Accelerator)
    teacher, model = mlp(seed=3), mlp()
    accelerator.prepare(teacher, model, sgd(model.parameters()))
    assert accelerator.accumulator.main_grad(model[0].weight).shape == (9, 5)


def test_fuse():
    """An accelerator that somebody else has made, before it prepares anything."""
    accelerator = fuse(make(STOCK), release="backward")
    ours, _ = train(accelerator, 4 * SIZE, sgd)
    assert relative_error(moved(ours), big_batch_grads(mlp(), *batch(4 * SIZE))) < ROUNDING
    with pytest.raises(TypeError, match=r"must be an accelerate\.Accelerator itself, of no subclass, got <"):
        fuse(accelerator)
    late = make(STOCK)
    late.prepare(mlp())
    with pytest.raises(RuntimeError, match="before"):
        fuse(late)


def test_errors():
    """What would be silently wrong says so."""
    accelerator, model, optimizer = prepared()
    with accelerator.accumulate(model):
        backward(accelerator, model)
        with pytest.raises(RuntimeError, match="twice inside one"):
            backward(accelerator, model)
    with accelerator.accumulate(model):
        backward(accelerator, model)
        optimizer.step()
        with pytest.raises(RuntimeError, match="twice for one window"):
            optimizer.step()

    accelerator, model, optimizer = prepared(steps=1)
    with accelerator.accumulate(model):
        backward(accelerator, model)
    with pytest.raises(RuntimeError, match=r"step the optimizer before"), accelerator.accumulate(model):
        pass
    accelerator, model, optimizer = prepared(steps=1)  # a loop that counts micro-batches itself
    backward(accelerator, model, weight=2)
    with pytest.raises(RuntimeError, match="give all of them a weight"):
        backward(accelerator, model)
    with pytest.raises(RuntimeError, match="prepare"):
        _ = make(Accelerator).accumulator


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_other_engines_are_refused(engine, monkeypatch):
    """Before anything is prepared, with what to use."""
    accelerator = make(STOCK)
    monkeypatch.setattr(STOCK, "distributed_type", accelerate.DistributedType(engine))
    with pytest.raises(ValueError, match=rf"{engine.replace('FSDP', 'FSDP1')}.*fsdp_version=2"):
        fuse(accelerator)


def test_beside_an_optimizer_that_is_left_to_accelerate():
    """Its step updates the scaler of both, which then forgets whose gradients are unscaled."""
    found = []
    for cls in (STOCK, Accelerator):
        accelerator = make(cls, "fp16", steps=1)
        one, other = mlp(seed=1), mlp(seed=2)  # the other is not prepared
        sgds = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (one, other)]
        prepared, first, second = accelerator.prepare(one, *sgds)
        for i in range(2):
            x, y = batch(4, seed=i)
            with accelerator.accumulate(prepared):
                accelerator.backward(mse_loss(prepared(x).float(), y) + mse_loss(other(x), y))
                for optimizer in (second, first):
                    optimizer.step()
                for optimizer in (second, first):
                    optimizer.zero_grad()
        found.append([p.detach().clone() for p in one.parameters()])
    assert relative_error(found[1], found[0]) < 1e-3  # of products in fp16


@pytest.mark.parametrize("change", ["scaler", "parameters"])
def test_masters_outlive_what_an_accumulator_was_made_for(change, tmp_path):
    """A scaler of each window's own, or parameters that come later: their bits stay, and are saved and loaded.

    Steps are far below the spacing of fp16, as of a loop with fp32 weights that are rounded into the model.
    """
    accelerator = make(Accelerator, "fp16", steps=1, accumulator_options={"master_weights": True})
    model, twin = mlp(torch.float16), mlp(torch.float16)
    first, *rest = model.parameters()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD([first] if change == "parameters" else [first, *rest], lr=1e-5)
    )
    accelerator.register_for_checkpointing(accelerator.accumulator)
    accelerator.scaler, *scalers = [torch.amp.GradScaler("cpu", init_scale=1.0) for _ in range(3)]
    if change == "parameters":
        optimizer.add_param_group({"params": rest})
    weights = [p.detach().float() for p in twin.parameters()]
    x, y = batch(SIZE, torch.float16)
    for i in range(150):
        if change == "scaler":
            accelerator.scaler = scalers[i % 2]
        accelerator.backward(mse_loss(model(x).float(), y.float()))
        optimizer.step()
        optimizer.zero_grad()
        grads = torch.autograd.grad(mse_loss(twin(x).float(), y.float()), list(twin.parameters()))
        for p, weight, grad in zip(twin.parameters(), weights, grads, strict=True) if i < 100 else ():
            p.data.copy_(weight.sub_(grad, alpha=1e-5))
        if i == 99:
            accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    masters, start = list(accelerator.accumulator.parameters()), list(mlp(torch.float16).parameters())
    moved = [[p.detach().double() - old for p, old in zip(found, start, strict=True)] for found in (masters, weights)]
    assert relative_error(*moved) < 0.01


def test_a_loss_with_parameters_that_was_not_prepared_is_refused_and_told_how():
    """One optimizer over both, which accelerate trains without knowing of the loss; prepared, it has the same bits."""
    found = []
    for cls, knows in ((STOCK, False), (Accelerator, False), (Accelerator, True)):
        accelerator = make(cls, steps=2)
        model, criterion = mlp(), nn.Linear(3, 3)
        criterion.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})
        optimizer = sgd([*model.parameters(), *criterion.parameters()])
        prepared, optimizer, *_ = accelerator.prepare(model, optimizer, *([criterion] if knows else []))
        for i in range(2):
            x, y = batch(SIZE, seed=i)
            with accelerator.accumulate(prepared):
                if accelerator.sync_gradients and cls is Accelerator and not knows:
                    with pytest.raises(RuntimeError, match=r"shape \(3, 3\).*In accelerate pass it to prepare\(\)"):
                        accelerator.backward(mse_loss(criterion(prepared(x)), y))
                    break
                accelerator.backward(mse_loss(criterion(prepared(x)), y))
                optimizer.step()
                optimizer.zero_grad()
        else:
            found.append([*model.parameters(), *criterion.parameters()])
    assert all(map(same_bits, *found))


def test_a_step_with_what_only_some_losses_have_left_is_refused():
    """A window that has ended keeps its gradients when another loss reaches it; who steps them is told why not to."""
    accelerator = make(Accelerator, steps=1)
    one, two = mlp(seed=1), mlp(seed=2)
    sgds = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (one, two)]
    first, second = accelerator.prepare(one, two, *sgds)[2:]
    x, y = batch(4)
    with accelerator.accumulate(one, two):
        accelerator.backward(mse_loss(one(x), y))
        grads = [p.grad.clone() for p in one.parameters()]
        accelerator.backward(mse_loss(one(x) + two(x), y))
        assert all(torch.equal(p.grad, g) for p, g in zip(one.parameters(), grads, strict=True))
        for ends in (first.step, lambda: accelerator.clip_grad_norm_(one.parameters(), 1.0)):
            with pytest.raises(RuntimeError, match=r"(?s)whose window had ended.*zero_grad\(\).*no_sync"):
                ends()
        second.step()


@pytest.mark.parametrize("reads_gradients", [True, False])
@pytest.mark.parametrize("turns", ["gd", "ggd", "gdgg", "gggdd"])
def test_a_discriminator_that_generator_losses_reach_is_cleared_before_its_own(turns, reads_gradients):
    """As in diffusers' VQGAN: what the generator's windows leave in it counts nothing, as in accelerate."""
    found = []
    for cls in (STOCK, Accelerator):
        accelerator = make(cls, steps=2)
        if cls is Accelerator:
            accelerator.reads_gradients = reads_gradients
        generator, discriminator = mlp(seed=1), torch.nn.Linear(3, 1)
        torch.nn.init.constant_(discriminator.weight, 0.5)
        torch.nn.init.zeros_(discriminator.bias)
        sgds = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
        optimizers = dict(zip("gd", accelerator.prepare(generator, discriminator, *sgds)[2:], strict=True))
        for index, turn in enumerate(t for t in turns * 2 for _ in range(2)):
            x, y = batch(4, seed=index)
            optimizers[turn].zero_grad()
            made = generator(x)
            with accelerator.accumulate(generator if turn == "g" else discriminator):
                if turn == "g":
                    loss = mse_loss(made, y) - discriminator(made).mean()
                else:
                    loss = (discriminator(made.detach()) - discriminator(y)).mean().square()
                accelerator.backward(loss)
                optimizers[turn].step()
        found.append([p.detach().clone() for model in (generator, discriminator) for p in model.parameters()])
    assert relative_error(found[1], found[0]) < 1e-6  # g / 2 + g / 2 against (g + g) / 2


def test_what_a_trial_prepared_is_freed_with_it(request):
    """At once, and not when the garbage collector comes: the next trial of a night needs the memory."""

    def trial():
        accelerator = make(Accelerator, steps=1)
        models = [mlp(seed=1), mlp(seed=2)]
        prepared = accelerator.prepare(*models, *(torch.optim.SGD(model.parameters(), lr=1.0) for model in models))
        x, y = batch(4)
        with accelerator.accumulate(*prepared[:2]):
            accelerator.backward(mse_loss(prepared[0](x) + prepared[1](x), y))
            for optimizer in prepared[2:]:
                optimizer.step()
                optimizer.zero_grad()
        return [weakref.ref(one) for one in (*models, *accelerator.accumulators)]

    trial()  # what comes once
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    assert [ref() for ref in trial()] == [None] * 4
