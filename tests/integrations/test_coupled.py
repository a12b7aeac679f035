"""Losses that couple samples, inside accelerate and Lightning: as the big batch, chunk by chunk."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn

from tests.support.models import relative_error
from tests.support.towers import Towers, chunked, data, truth
from tests.support.trainers import SCALE, fp16_plugins, make, quiet_trainer

accelerate = pytest.importorskip("accelerate")
pl = pytest.importorskip("lightning.pytorch")

from accumkernels.integrations.accelerate import Accelerator  # noqa: E402
from accumkernels.integrations.lightning import FusedAccumulation  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread", "fresh_state"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice: more workers, a GPU, a logger
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

EXACT = 1e-12  # fp64 rounding
# One rounding: where a weight is cast once for all chunks, autograd adds up their gradients in 16 bit.
AUTOCAST = {"bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}
STEPS = 2  # micro-batches of a window; the last window has one
WEIGHTS = [1.0, 3.0, 2.0]
MAX_NORM = 0.05


class Callable(Towers):
    """Encodes when called, as trainers wrap `forward`."""

    def forward(self, pair):
        return self.encode(pair)


def batches(dtype=torch.float64):
    """Micro-batches by the seed of their dropout."""
    return [(seed, data(seed, dtype)) for seed in range(len(WEIGHTS))]


def parts(model):
    """Parameters of two optimizers, each of which the loss reaches."""
    return [model.images.parameters(), [*model.texts.parameters(), model.scale]]


def expected(clip=None):
    """Movement of two windows of SGD with rate 1, of which the second has one micro-batch, and the losses; in fp64."""
    model, found = Towers(), []
    for start in range(0, len(WEIGHTS), STEPS):
        seeds, inputs = zip(*batches()[start : start + STEPS], strict=True)
        grads, losses = truth(model, inputs, seeds, WEIGHTS[start : start + STEPS])
        found += losses
        norm = torch.cat([grad.flatten() for grad in grads]).norm().item()
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.data -= grad * min(1.0, (clip or float("inf")) / (norm + 1e-6))  # as torch
    return way(model), found


def way(model, dtype=torch.float64):
    """By how much the parameters have moved."""
    return [before - after for before, after in zip(Towers(dtype).parameters(), model.parameters(), strict=True)]


def sgd(params):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(params, lr=1.0)


# ---- accelerate


def accelerated(accelerator, step, model=None, optimizers=1, clip=None, dtype=torch.float64):
    """accelerate's loop, with `step` in place of forward and backward; the model and what `step` has returned."""
    model = Callable(dtype) if model is None else model
    of = [model.parameters()] if optimizers == 1 else parts(model)
    numbers = torch.utils.data.DataLoader(range(len(WEIGHTS)), batch_size=1, collate_fn=lambda one: one[0])
    prepared, numbers, *stepped = accelerator.prepare(model, numbers, *map(sgd, of))
    found = []
    for index in numbers:
        seed, pair = batches(dtype)[index]
        torch.manual_seed(seed)
        with accelerator.accumulate(prepared):
            found.append(step(prepared, chunked(*pair), WEIGHTS[index]))
            if accelerator.sync_gradients and clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            for optimizer in stepped:
                optimizer.step()
                optimizer.zero_grad()
    return model, found


def coupled(accelerator):
    """What is tested."""
    return lambda model, chunks, weight: accelerator.backward_coupled(chunks, model, model.loss, weight=weight)


def whole(accelerator):
    """The loss of a micro-batch whose activations all live."""

    def step(model, chunks, weight):
        images, texts = zip(*map(model, chunks), strict=True)
        accelerator.backward(model.loss(torch.cat(images), torch.cat(texts)), weight=weight)

    return step


OPTIONS = [{}, {"release": "microbatch"}, {"release": "backward", "bucket_bytes": 64}]


@pytest.mark.parametrize("clip", [None, MAX_NORM])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_accelerate(optimizers, options, reads, clip):
    """Unequal weights, dropout, a parameter in the loss, and a short last window."""
    accelerator = make(Accelerator, steps=STEPS, accumulator_options=options)
    accelerator.reads_gradients = reads
    model, losses = accelerated(accelerator, coupled(accelerator), optimizers=optimizers, clip=clip)
    moved, expected_losses = expected(clip=clip)
    assert relative_error(way(model), moved) < EXACT
    assert [loss.item() for loss in losses] == pytest.approx(expected_losses, rel=EXACT)
    assert not any(loss.requires_grad for loss in losses)
    # The metrics are of the last window, which has one micro-batch.
    assert accelerator.window_metrics("")[f"{'' if optimizers == 1 else '1/'}loss"] == pytest.approx(losses[-1].item())


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_of_accelerate(precision, optimizers):
    """Autocast of the prepared model, and the loss scale: as the ordinary backward of the whole micro-batch."""
    found = []
    for kind, of in ((coupled, precision), (whole, precision), (coupled, "no")):
        accelerator = make(Accelerator, of, STEPS)
        model, _ = accelerated(accelerator, kind(accelerator), optimizers=optimizers, dtype=torch.float32)
        found.append(way(model, torch.float32))
    assert relative_error(*found[:2]) < AUTOCAST[precision]
    assert relative_error(*found[1:]) > 1e-4  # 16 bit, indeed


@pytest.mark.parametrize("optimizers", [1, 2])
def test_an_overflow_of_a_coupled_loss(optimizers):
    """Skips the window's step, and halves the scale."""
    accelerator = make(Accelerator, "fp16", STEPS)

    def step(model, chunks, weight):
        bad = torch.inf if weight == WEIGHTS[0] else 1.0
        accelerator.backward_coupled(chunks, model, lambda *encodings: model.loss(*encodings) * bad, weight=weight)

    model, _ = accelerated(accelerator, step, optimizers=optimizers, dtype=torch.float32)
    assert all(p.isfinite().all() for p in model.parameters())
    assert any(moved.any() for moved in way(model, torch.float32))  # by the second window
    assert accelerator.scaler.get_scale() == SCALE / 2**optimizers  # accelerate updates it after each step


def test_outside_of_accumulate():
    """Losses without weights are added up, divided by the number of steps, as accelerate's own."""
    accelerator = make(Accelerator, steps=STEPS)
    model = Callable()
    prepared, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    for seed, pair in batches():
        torch.manual_seed(seed)
        accelerator.backward_coupled(chunked(*pair), prepared, model.loss)
    optimizer.step()
    seeds, inputs = zip(*batches(), strict=True)
    grads, _ = truth(Towers(), inputs, seeds)
    assert relative_error(way(model), [grad * len(WEIGHTS) / STEPS for grad in grads]) < EXACT


def test_weights_of_two_optimizers_in_buckets():
    """An ordinary backward, too: gradients that are added while it runs have the weight of their micro-batch."""
    options = {"release": "backward", "bucket_bytes": 64}
    accelerator = make(Accelerator, steps=STEPS, accumulator_options=options)
    model, _ = accelerated(accelerator, whole(accelerator), optimizers=2)
    assert relative_error(way(model), expected()[0]) < EXACT


@pytest.mark.parametrize("optimizers", [1, 2])
def test_what_accelerate_refuses(optimizers):
    """With words; a micro-batch that failed leaves nothing."""
    accelerator = make(Accelerator, steps=STEPS)
    model = Callable()
    with pytest.raises(RuntimeError, match=r"backward_coupled\(\): nothing to accumulate into"):
        accelerator.backward_coupled([1], model, model.loss)

    def step(prepared, chunks, weight):
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="chunks must not be empty"):
            accelerator.backward_coupled([], prepared, model.loss)
        with pytest.raises(TypeError, match="loss_fn must be callable"):
            accelerator.backward_coupled(chunks, prepared, None)
        with pytest.raises(TypeError, match="what loss_fn returns must be a tensor, got 1"):
            accelerator.backward_coupled(chunks, prepared, lambda *_: 1)
        calls = itertools.count()

        def grows(chunk):  # fails in the second pass of the second chunk
            images, texts = prepared(chunk)
            return images, texts.repeat(1, 1 + (next(calls) == len(chunks) + 1))

        with pytest.raises(RuntimeError, match="encode returned shapes"):
            accelerator.backward_coupled(chunks, grows, model.loss)
        torch.set_rng_state(state)
        accelerator.backward_coupled(chunks, prepared, model.loss, weight=weight)
        if optimizers == 1:
            with pytest.raises(RuntimeError, match="twice inside one|after the last one of its window"):
                accelerator.backward_coupled(chunks, prepared, model.loss)

    accelerated(accelerator, step, model, optimizers)
    assert relative_error(way(model), expected()[0]) < EXACT


def test_batchnorm_with_two_optimizers():
    """Refused as with one."""
    accelerator = make(Accelerator, steps=STEPS)
    model = Callable()
    model.images = nn.Sequential(model.images, nn.BatchNorm1d(5).double())
    with pytest.raises(ValueError, match=r"backward_coupled\(\): 'images.1' is a BatchNorm in training"):
        accelerated(accelerator, coupled(accelerator), model, optimizers=2)


# ---- Lightning


class Contrastive(pl.LightningModule):
    """Manual optimization of `optimizers` optimizers; the batches are numbers.

    Args:
        callback: The callback in the Trainer; None for Lightning's own loop, with the whole micro-batch at once.
    """

    def __init__(self, optimizers=1, dtype=torch.float64, ours=True, clip=None):
        super().__init__()
        self.automatic_optimization = False
        self.towers = Callable(dtype)
        self.dtype_of_data, self.ours, self.clip = dtype, ours, clip
        self.losses = []
        self.number = optimizers

    def training_step(self, index, _):
        seed, pair = batches(self.dtype_of_data)[index]
        torch.manual_seed(seed)
        chunks, model = chunked(*pair), self.towers
        if self.ours:
            self.losses.append(FusedAccumulation.of(self.trainer).backward_coupled(chunks, model, model.loss))
        else:
            images, texts = zip(*map(model, chunks), strict=True)
            self.manual_backward(model.loss(torch.cat(images), torch.cat(texts)))
        if (index + 1) % STEPS and index + 1 < len(WEIGHTS):
            return
        optimizers = self.optimizers()
        for optimizer in [optimizers] if self.number == 1 else optimizers:
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()

    def configure_optimizers(self):
        return [sgd(self.towers.parameters())] if self.number == 1 else list(map(sgd, parts(self.towers)))


def lightning(module, callback=None, **options):
    """Fit; the module's towers."""
    callback = FusedAccumulation(weight=WEIGHTS.__getitem__, **(callback or {}))
    numbers = torch.utils.data.DataLoader(range(len(WEIGHTS)), batch_size=1, collate_fn=lambda one: one[0])
    trainer = quiet_trainer(callback, steps=1, **options)
    trainer.fit(module, numbers)
    return module.towers, trainer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_lightning(optimizers, options):
    """The callback's weights, dropout, a parameter in the loss, and a short last window."""
    module = Contrastive(optimizers)
    towers, _ = lightning(module, options)
    moved, losses = expected()
    assert relative_error(way(towers), moved) < EXACT
    assert [loss.item() for loss in module.losses] == pytest.approx(losses, rel=EXACT)


def test_lightning_clips():
    """With its own call."""
    towers, _ = lightning(Contrastive(clip=MAX_NORM))
    assert relative_error(way(towers), expected(clip=MAX_NORM)[0]) < EXACT


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_of_lightning(precision, optimizers):
    """As `manual_backward` of the whole micro-batch."""
    found = []
    plugins = {"bf16": lambda: {"precision": "bf16-mixed"}, "fp16": lambda: {"plugins": fp16_plugins()}, "no": dict}
    for ours, of in ((True, precision), (False, precision), (True, "no")):
        options = plugins[of]()
        towers, _ = lightning(Contrastive(optimizers, torch.float32, ours), **options)
        found.append(way(towers, torch.float32))
    assert relative_error(*found[:2]) < AUTOCAST[precision]
    assert relative_error(*found[1:]) > 1e-4  # 16 bit, indeed


def test_what_lightning_refuses():
    """With words."""

    class Automatic(Contrastive):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

    with pytest.raises(RuntimeError, match=r"backward_coupled\(\) in automatic optimization"):
        lightning(Automatic())
    with pytest.raises(RuntimeError, match=r"this Trainer has no FusedAccumulation"):
        FusedAccumulation.of(quiet_trainer())
    model = Towers()
    with pytest.raises(RuntimeError, match=r"backward_coupled\(\): the callback has no accumulator"):
        FusedAccumulation().backward_coupled(chunked(*data()), model.encode, model.loss)
