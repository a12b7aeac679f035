"""What accelerate and Lightning serve beyond the plain loop: served here too, with what stock gives as the truth."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune

from tests.support.backends import same_bits
from tests.support.models import batch, big_batch_grads, mlp, relative_error
from tests.support.trainers import make

accelerate = pytest.importorskip("accelerate")

from accelerate.utils import find_executable_batch_size  # noqa: E402

from accumkernels import FusedAccumulator  # noqa: E402
from accumkernels.integrations.accelerate import Accelerator  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread", "fresh_state"),
    pytest.mark.filterwarnings("ignore"),
]

STOCK = accelerate.Accelerator
BOTH = (STOCK, Accelerator)
SIZE = 3
ROUNDING = 1e-6


def adamw(params):
    """Unfused."""
    return torch.optim.AdamW(params, lr=0.01)


def loss_of(model, seed, n=SIZE):
    """Of a micro-batch."""
    x, y = batch(n, seed=seed)
    return mse_loss(model(x).float(), y)


def assert_bits(one, two):
    """Of all parameters."""
    assert all(same_bits(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def assert_close(one, two, rtol=1e-5):
    """Sums in another order."""
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=0.01 * rtol)


def recipe(accelerator, model, optimizer, scheduler):
    """accelerate's for token counts: the whole window first, then a backward for each, and one step."""
    for window in range(3):
        batches = [batch(2 + i, seed=10 * window + i) for i in range(4 if window < 2 else 2)]  # the last one is short
        total = sum(x.numel() for x, _ in batches)
        for x, y in batches:
            loss = mse_loss(model(x).float(), y, reduction="sum") * 4 / total
            accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def by_hand(accelerator, model, optimizer, scheduler):
    """A loop that divides and counts itself, and clips with torch."""
    for i in range(8):
        accelerator.backward(loss_of(model, i) / 4)
        if i % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def dropped(accelerator, model, optimizer, scheduler):
    """Gradients are cleared by way of the model; one of a parameter is changed, and one taken away."""
    accelerator.backward(loss_of(model, 0))
    model.zero_grad()
    accelerator.backward(loss_of(model, 1))
    params = list(model.parameters())
    params[0].grad = params[0].grad * 0.5
    params[1].grad.mul_(2)
    params[2].grad = None
    accelerator.backward(loss_of(model, 2))
    params[3].grad = None
    optimizer.step()
    optimizer.zero_grad()


def raw_backward(accelerator, model, optimizer, scheduler):
    """As accelerate's docstrings have it, without its `backward`."""
    for i in range(8):
        with accelerator.accumulate(model):
            (loss_of(model, i) / 4).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def own_backwards(accelerator, model, optimizer, scheduler):
    """Backwards that accelerate does not see, alone or before its own, and gradients cleared by way of the model."""
    for i in range(9):
        loss_of(model, i).backward()
        if i % 3 == 1:
            accelerator.backward(loss_of(model, 10 + i))
        accelerator.clip_grad_norm_(model.parameters(), 0.05 if i % 2 else 1e6)
        optimizer.step()
        scheduler.step()
        model.zero_grad(set_to_none=i % 4 < 2)


def penalties(accelerator, model, optimizer, scheduler):
    """Backwards of the loop's own after accelerate's, which add to the sum so far."""
    for i in range(8):
        accelerator.backward(loss_of(model, i) / 4)
        if i % 4:
            (0.1 * sum(p.square().sum() for p in model.parameters())).backward()
        if i % 4 == 3:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def nothing_to_step(accelerator, model, optimizer, scheduler):
    """A step without a backward: schedulers go on."""
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    scheduler.step()
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, 0))
    optimizer.step()
    scheduler.step()


def closures(accelerator, model, optimizer, scheduler):
    """Of an optimizer that takes one."""
    for i in range(4):

        def closure(i=i):
            loss = loss_of(model, i)
            accelerator.backward(loss)
            return loss

        with accelerator.accumulate(model):
            optimizer.step(closure)
            optimizer.zero_grad()


LOOPS = [recipe, by_hand, dropped, raw_backward, own_backwards, penalties, nothing_to_step, closures]
COUNTED = (recipe, raw_backward)


@pytest.mark.parametrize("release", ["auto", "backward"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(loop, release):
    """Where a loop does not count by `accumulate()` and `backward`, gradients are accelerate's own."""
    models = []
    for cls in BOTH:
        options = {} if cls is STOCK else {"accumulator_options": {"release": release}}
        accelerator = make(cls, steps=4 if loop in COUNTED else 1, **options)
        model = mlp()
        optimizer = adamw(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        loop(accelerator, model, optimizer, scheduler)
        models.append((model, scheduler.get_last_lr()))
    assert_close(models[0][0], models[1][0])
    assert models[0][1] == models[1][1]
    assert not all(same_bits(a, b) for a, b in zip(models[0][0].parameters(), mlp().parameters(), strict=True))


def test_the_recipe_in_fp16():
    """With a scaler; `.grad` is unscaled at once, and 16-bit models have theirs rounded."""
    models = []
    for cls in BOTH:
        accelerator = make(cls, "fp16")
        model = mlp()
        optimizer = adamw(model.parameters())
        prepared = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
        recipe(accelerator, *prepared)
        models.append(model)
    assert_close(*models)
    accelerator = make(Accelerator)
    model, optimizer = accelerator.prepare(mlp(torch.bfloat16), adamw(half := mlp(torch.bfloat16).parameters()))
    assert half is not None
    accelerator = make(Accelerator, steps=1)
    model = mlp(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    for seed in (1, 2):
        x, y = batch(SIZE, torch.bfloat16, seed=seed)
        accelerator.backward(mse_loss(model(x), y) / 2)
    grads = [p.grad for p in model.parameters()]
    assert all(grad.dtype == torch.bfloat16 for grad in grads)
    grads[0].zero_()
    optimizer.step()
    assert torch.equal(before[0], next(model.parameters()))
    assert not torch.equal(before[2], list(model.parameters())[2])


def test_a_model_without_an_optimizer():
    """accelerate serves it; a weight has no meaning there."""
    for cls in BOTH:
        accelerator = make(cls)
        model = accelerator.prepare(mlp())
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, 0))
        truth = [grad / 4 for grad in big_batch_grads(mlp(), *batch(SIZE, seed=0))]
        assert relative_error([p.grad for p in model.parameters()], truth) < ROUNDING
        assert accelerator.clip_grad_norm_(model.parameters(), 1e-3) > 1e-3


class NeedsClosure(torch.optim.SGD):
    """Evaluates it as often as it is told."""

    def __init__(self, params, calls=1, **options):
        super().__init__(params, **options)
        self.calls = calls

    def step(self, closure):
        """Of SGD."""
        self.losses = [closure() for _ in range(self.calls)]
        return super().step()


def test_optimizers_that_need_a_closure():
    """One that evaluates it once is served; another is told what that would mean."""
    for precision in ("no", "fp16"):
        accelerator = make(Accelerator, precision, steps=1)
        model = mlp()
        optimizer = NeedsClosure(model.parameters(), lr=1.0)
        model, prepared = accelerator.prepare(model, optimizer)

        def closure(model=model, accelerator=accelerator):
            loss = loss_of(model, 1)
            accelerator.backward(loss)
            return loss

        prepared.step(closure)
        moved = [a - b for a, b in zip(mlp().parameters(), model.parameters(), strict=True)]
        assert relative_error(moved, big_batch_grads(mlp(), *batch(SIZE, seed=1))) < 5e-3
        assert len(optimizer.losses) == 1
    optimizer.calls = 2
    with pytest.raises(TypeError, match="twice in one step"):
        prepared.step(closure)
    with pytest.raises(TypeError, match="LBFGS"):
        make(Accelerator).prepare(model := mlp(), torch.optim.LBFGS(model.parameters()))


class Sharp(torch.optim.SGD):
    """Evaluates a closure at weights that it has moved, as SAM, if it gets one; `first` also where they are."""

    def __init__(self, params, first, **options):
        super().__init__(params, **options)
        self.first = first

    def step(self, closure=None):
        """Of SGD."""
        if closure is not None:
            if self.first:
                closure()
            params = self.param_groups[0]["params"]
            before, grads = [p.detach().clone() for p in params], [p.grad.clone() for p in params]
            with torch.no_grad():
                torch._foreach_add_(params, grads, alpha=0.5)
            self.zero_grad()
            closure()
            with torch.no_grad():
                torch._foreach_copy_(params, before)
        return super().step()


@pytest.mark.parametrize("first", [False, True])
def test_optimizers_that_evaluate_a_closure_elsewhere(first):
    """They get it, whether they demand one or not."""
    models = []
    for cls in BOTH:
        accelerator = make(cls, steps=1)
        model = mlp()
        model, optimizer = accelerator.prepare(model, Sharp(model.parameters(), first, lr=0.5, momentum=0.5))
        for i in range(3):

            def closure(i=i, model=model, accelerator=accelerator, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(model, i)
                accelerator.backward(loss)
                return loss

            with accelerator.accumulate(model):
                if not first:
                    accelerator.backward(loss_of(model, i))
                optimizer.step(closure)
                optimizer.zero_grad()
        models.append(model)
    assert relative_error(list(models[1].parameters()), list(models[0].parameters())) < ROUNDING


class Ascends(NeedsClosure):
    """Moves weights before a base class evaluates the closure, as SAM."""

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad)
        return super().step(closure)


def test_hooks_on_a_step_may_change_gradients_before_its_closure():
    """They run before the optimizer does: what it evaluates is what it finds. Its own changes are another matter."""
    models = []
    for cls in BOTH:
        accelerator = make(cls)
        model = mlp()
        optimizer = NeedsClosure(model.parameters(), lr=1.0)
        optimizer.register_step_pre_hook(
            lambda optimizer, *_: [p.grad.clamp_(-1e-3, 1e-3) for p in optimizer.param_groups[0]["params"]] and None
        )
        model, prepared = accelerator.prepare(model, optimizer)
        for i in range(8):
            with accelerator.accumulate(model):
                loss = loss_of(model, i)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    prepared.step(lambda loss=loss: loss)
                    prepared.zero_grad()
        models.append(model)
    assert_close(*models)
    accelerator = make(Accelerator, "fp16", steps=1)  # an overflow at the moved weights would go unseen
    model = mlp()
    model, prepared = accelerator.prepare(model, Ascends(model.parameters(), lr=1.0))
    accelerator.backward(loss_of(model, 0))
    with pytest.raises(TypeError, match="after it has changed weights or gradients, as SAM"):
        prepared.step(lambda: None)


def test_parameters_that_nobody_steps(caplog):
    """Are left alone, as by accelerate, with one warning; and accumulated once the optimizer gets them."""
    models = []
    for cls in BOTH:
        accelerator = make(cls)
        model = mlp()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model[2:].parameters(), lr=0.1))
        with caplog.at_level(logging.WARNING, "accumkernels"):
            for i in range(24):
                if i == 8:
                    model.zero_grad()
                    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, i))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.2)
                    optimizer.step()
                    optimizer.zero_grad()
            if i == 7:
                assert torch.equal(model[0].weight, mlp()[0].weight)
        models.append(model)
    assert_close(*models)
    assert [record.message for record in caplog.records if "no optimizer steps" in record.message] == [
        "accumkernels: no optimizer steps '0.weight', '0.bias', so that no gradient of it is accumulated"
    ]


def test_zero_grad_clears_a_late_parameter():
    """It was nobody's when the window before was accumulated, and backward has left gradients in it since."""
    models = []
    for cls in BOTH:
        accelerator = make(cls)
        model = mlp()
        late = list(model[2].parameters())
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for i in range(12):
            if i == 4:
                optimizer.optimizer.add_param_group({"params": late})
                optimizer.zero_grad()
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, i))
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    assert_close(*models)


def test_pruning():
    """Parameters get other names between windows, and are the same."""
    models = []
    for cls in BOTH:
        accelerator = make(cls)
        model = mlp()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for i in range(24):
            if i in (8, 16):
                prune.l1_unstructured(model[0], "weight", 0.3)
            elif i == 20:
                assert (model[0].weight == 0).any()
                prune.remove(model[0], "weight")
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, i))
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    assert_bits(*models)


def test_a_late_parameter_has_a_master():
    """What the others' masters and the optimizer's state have gathered stays."""
    accelerator = make(Accelerator, steps=1, accumulator_options={"master_weights": True})
    model = mlp(torch.bfloat16)
    raw = adamw(model[2:].parameters())
    model, optimizer = accelerator.prepare(model, raw)

    def one(seed):
        x, y = batch(SIZE, torch.bfloat16, seed=seed)
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    one(0)
    master = raw.param_groups[0]["params"][0]
    value = master.detach().clone()
    assert not torch.equal(value.bfloat16().float(), value)
    raw.add_param_group({"params": list(model[0].parameters())})
    accelerator.open_window()
    assert torch.equal(raw.param_groups[0]["params"][0], value)
    assert raw.param_groups[1]["params"][0].dtype == torch.float32
    assert raw.state[raw.param_groups[0]["params"][0]]["step"] == 1
    one(1)
    assert raw.state[raw.param_groups[1]["params"][0]]["step"] == 1


def gan(accelerator, clip):
    """Generator and discriminator; the generator's loss reaches the discriminator, whose gradients are cleared."""
    generator, discriminator = mlp(seed=1), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for p in discriminator.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    prepared = accelerator.prepare(
        generator, discriminator, adamw(generator.parameters()), adamw(discriminator.parameters())
    )
    generator, discriminator, of_generator, of_discriminator = prepared
    for i in range(6):
        with accelerator.accumulate(generator, discriminator):
            x, y = batch(SIZE, seed=i)
            of_discriminator.zero_grad()
            fake = generator(x)
            accelerator.backward(discriminator(fake.detach()).mean() - discriminator(y).mean())
            if clip:
                accelerator.clip_grad_norm_(discriminator.parameters(), 0.1)
            of_discriminator.step()
            of_generator.zero_grad()
            accelerator.backward(-discriminator(fake).mean())
            if clip:
                accelerator.clip_grad_norm_(generator.parameters(), 0.1)
            of_generator.step()
    return nn.ModuleList([generator, discriminator])


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("clip", [False, True])
def test_two_models_with_two_optimizers(clip, precision):
    """Each optimizer has an accumulator; clearing one leaves the other."""
    stock, ours = (gan(make(cls, precision, steps=1), clip and precision == "no") for cls in BOTH)
    assert_close(stock, ours, 1e-5 if precision == "no" else 1e-3)  # Adam makes much of small differences


def test_accumulated_by_two_optimizers():
    """Toggled by hand: each window is the mean over its own losses. A loss that reaches both is refused."""
    accelerator = make(Accelerator, steps=4)
    one, two = mlp(seed=1), mlp(seed=2)
    sgds = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (one, two)]
    before = [[p.detach().clone() for p in model.parameters()] for model in (one, two)]
    _, _, *optimizers = accelerator.prepare(one, two, *sgds)
    with pytest.raises(RuntimeError, match="accelerator.accumulators"):
        _ = accelerator.accumulator
    assert len(accelerator.accumulators) == 2
    for i in range(4):
        with accelerator.accumulate(one, two):
            for model in (one, two):
                x, y = batch(SIZE + i, seed=i)
                accelerator.backward(mse_loss(model(x), y), weight=len(x))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    data = [batch(SIZE + i, seed=i) for i in range(4)]
    whole = [torch.cat(parts) for parts in zip(*data, strict=True)]
    for model, start, seed in zip((one, two), before, (1, 2), strict=True):
        moved = [a - b for a, b in zip(start, model.parameters(), strict=True)]
        assert relative_error(moved, big_batch_grads(mlp(seed=seed), *whole)) < ROUNDING
    metrics = accelerator.window_metrics()
    assert metrics["accumulator/0/weight"] == metrics["accumulator/1/weight"] == sum(len(x) for x, _ in data)
    with accelerator.accumulate(one, two):
        accelerator.backward(mse_loss(one(whole[0]) + two(whole[0]), whole[1]))
        with pytest.raises(RuntimeError, match="twice inside one"):
            accelerator.backward(loss_of(one, 0))


def test_muon_with_adamw():
    """Matrices and all else of one model; a backward is a micro-batch of both."""
    models = []
    for cls in BOTH:
        accelerator = make(cls)
        model = mlp()
        matrices, others = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
        model, *optimizers = accelerator.prepare(model, torch.optim.Muon(matrices, lr=0.1), adamw(others))
        for i in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, i))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        models.append(model)
    assert_bits(*models)
    assert not any(same_bits(a, b) for a, b in zip(models[0].parameters(), mlp().parameters(), strict=True))


def test_a_loss_beside_an_ended_window():
    """It leaves the other's gradients alone."""
    accelerator = make(Accelerator, steps=1)
    one, two = mlp(seed=1), mlp(seed=2)
    accelerator.prepare(one, two, *(torch.optim.SGD(model.parameters(), lr=1.0) for model in (one, two)))
    with accelerator.accumulate(one, two):
        accelerator.backward(loss_of(one, 0))
        grads = [p.grad for p in one.parameters()]
        accelerator.backward(loss_of(two, 0))
        assert all(p.grad is grad for p, grad in zip(one.parameters(), grads, strict=True))


def test_find_executable_batch_size():
    """accelerate's finder runs the function anew after an out-of-memory error."""
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(size):
        accelerator.free_memory()
        tried.append(size)
        model = mlp()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for i in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, i, size))
                if size > 2 and i == 1:
                    raise RuntimeError("CUDA out of memory. Tried to allocate 1 EiB")
                optimizer.step()
        return model

    accelerator = make(Accelerator)
    model = train()
    assert tried == sorted(tried, reverse=True)
    assert tried[-1] <= 2 < tried[0]
    data = [batch(tried[-1], seed=i) for i in range(4)]
    truth = big_batch_grads(mlp(), *(torch.cat(parts) for parts in zip(*data, strict=True)))
    moved = [a - b for a, b in zip(mlp().parameters(), model.parameters(), strict=True)]
    assert relative_error(moved, truth) < ROUNDING


def test_optimizers_are_pickled():
    """As accelerate's; a copy steps by itself."""
    accelerator = make(Accelerator)
    model = mlp()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.window is None
    assert copied.param_groups[0]["lr"] == 0.01


def test_the_noise_scale_is_that_of_undivided_losses():
    """What the trainer divides by is undone before norms are measured."""
    accelerator = make(Accelerator, accumulator_options={"noise_scale": True})
    model = mlp()
    twin = mlp()
    acc = FusedAccumulator(twin, noise_scale=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    other = torch.optim.SGD(twin.parameters(), lr=0.0)
    for i in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, i))
            optimizer.step()
            optimizer.zero_grad()
        acc.backward(loss_of(twin, i))
        if i % 4 == 3:
            acc.step(other)
    mine, truth = accelerator.accumulator.noise_scale(), acc.noise_scale()
    assert mine.trace == pytest.approx(truth.trace, rel=1e-5)
    assert mine.grad_squared_norm == pytest.approx(truth.grad_squared_norm, rel=1e-5)


def test_each_optimizer_has_its_own_noise_scale():
    """One backward reaches the parameters of both; each measures those that it steps."""
    accelerator, count = make(Accelerator, accumulator_options={"noise_scale": True}), 4
    model, twin = mlp(), mlp()
    parts = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    model, *optimizers = accelerator.prepare(model, *(torch.optim.SGD(part, lr=0.0) for part in parts))
    for i in range(count):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, i))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    every = [torch.autograd.grad(loss_of(twin, i), list(twin.parameters())) for i in range(count)]
    for optimizer, ndim in zip(optimizers, (2, 1), strict=True):
        flat = [torch.cat([g.double().flatten() for g in grads if g.ndim == ndim]) for grads in every]
        of_mean = torch.stack(flat).mean(0).square().sum()
        trace = (sum(g.square().sum() for g in flat) - count * of_mean) / (count - 1)
        found = optimizer.window.accumulator.noise_scale()
        assert found.windows == 1
        assert found.trace == pytest.approx(trace.item(), rel=1e-5)  # sums are fp32
        assert found.grad_squared_norm == pytest.approx((of_mean - trace / count).item(), rel=1e-4)
