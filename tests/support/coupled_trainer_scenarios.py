"""What ranks run of `backward_coupled` inside trainers: negatives of the rank's own, and gathered from all ranks."""

from __future__ import annotations

import itertools

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support import ranks, towers
from tests.support.coupled_scenarios import EQUAL, EXACT, WEIGHTS, global_loss, pairs, seed, truth
from tests.support.models import relative_error
from tests.support.trainer_data import environment
from tests.support.trainer_loops import accelerator, lightning_trainer
from tests.support.trainers import reset


class Towers(towers.Towers):
    """Encodes when called, as trainers wrap `forward`."""

    def forward(self, pair):
        """One row per sample."""
        return self.encode(pair)


class PassingOn(Towers):
    """Encodes through a Function."""

    def forward(self, pair):
        """One row per sample."""
        return tuple(map(towers.PassOn.apply, self.encode(pair)))


def sgd(params):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(params, lr=1.0)


def optimizers(model, number):
    """One for all parameters, or two, of which the loss reaches both."""
    if number == 1:
        return [sgd(model.parameters())]
    return [sgd(model.images.parameters()), sgd([*model.texts.parameters(), model.scale])]


def own_truth(size):
    """Gradients where each rank's negatives are its own samples: the weighted mean over micro-batches of all ranks."""
    model, mean = Towers(), 0.0
    for (step, weight), rank in itertools.product(enumerate(WEIGHTS), range(size)):
        seed(step, rank)
        images, texts = zip(*map(model, pairs(step, rank, EQUAL)), strict=True)
        mean = mean + model.loss(torch.cat(images), torch.cat(texts)) * (weight / sum(WEIGHTS) / size)
    mean.backward()
    return [p.grad for p in model.parameters()]


def check(model, gathered, size):
    """The parameters have moved by the gradient of one process on all the data."""
    expected = truth(Towers(), size, EQUAL)[0] if gathered else own_truth(size)
    found = [before - after for before, after in zip(Towers().parameters(), model.parameters(), strict=True)]
    assert relative_error(found, expected) < EXACT


def accelerate_coupled(rank, size):
    """One window, in DistributedDataParallel."""
    environment(rank, size)
    for number, gathered, reads in itertools.product((1, 2), (False, True), (False, True)):
        one = accelerator(steps=len(WEIGHTS))
        one.reads_gradients = reads
        towers_ = Towers()
        model, *stepped = one.prepare(towers_, *optimizers(towers_, number))
        assert isinstance(model, DistributedDataParallel)
        loss_fn = global_loss(towers_) if gathered else towers_.loss
        for step, weight in enumerate(WEIGHTS):
            seed(step, rank)
            with one.accumulate(model):
                one.backward_coupled(pairs(step, rank, EQUAL), model, loss_fn, weight=weight)
                for optimizer in stepped:
                    optimizer.step()
                    optimizer.zero_grad()
        check(towers_, gathered, size)
        one.free_memory()


def functions_of_encoders(rank, size):
    """Are named once by a warning if the loss has a part of the weight in it, whoever counts their gradients."""
    environment(rank, size)
    for number, weight in itertools.product((1, 2), (4, 3)):
        one = accelerator(steps=2)
        towers_ = PassingOn()
        model, *stepped = one.prepare(towers_, *optimizers(towers_, number))
        with ranks.logged() as texts:
            for step in range(2):
                with one.accumulate(model):
                    one.backward_coupled(pairs(step, rank, EQUAL), model, towers_.loss, weight=weight)
                    for optimizer in stepped:
                        optimizer.step()
                        optimizer.zero_grad()
        assert sum("has PassOn: " in text for text in texts) == (weight == 3)
        one.free_memory()


def lightning_coupled(rank, size):
    """One window, with strategy="ddp"."""
    import lightning.pytorch as pl

    from accumkernels.integrations.lightning import FusedAccumulation

    class Contrastive(pl.LightningModule):
        def __init__(self, number, gathered):
            super().__init__()
            self.automatic_optimization = False
            self.towers, self.number, self.gathered = Towers(), number, gathered

        def training_step(self, step, _):
            seed(step, rank)
            loss_fn = global_loss(self.towers) if self.gathered else self.towers.loss
            callback = FusedAccumulation.of(self.trainer)
            callback.backward_coupled(pairs(step, rank, EQUAL), self.towers, loss_fn, weight=WEIGHTS[step])
            if step + 1 == len(WEIGHTS):
                stepped = self.optimizers()
                for optimizer in [stepped] if self.number == 1 else stepped:
                    optimizer.step()

        def configure_optimizers(self):
            return optimizers(self.towers, self.number)

    environment(rank, size)
    for number, gathered in itertools.product((1, 2), (False, True)):
        trainer = lightning_trainer(rank, size, FusedAccumulation(), steps=1)
        module = Contrastive(number, gathered)
        steps = torch.utils.data.DataLoader(range(len(WEIGHTS)), batch_size=1, collate_fn=lambda one: one[0])
        trainer.fit(module, steps)
        check(module.towers, gathered, size)


def transformers_coupled(rank, size):
    """Two windows, the second of one micro-batch; without dropout."""
    import transformers

    from accumkernels.integrations.transformers_coupled import CoupledAccumulationMixin

    environment(rank, size)
    windows = [pairs(0, each, EQUAL)[:3] for each in range(size)], [pairs(1, each, EQUAL)[:1] for each in range(size)]

    class Trainer(CoupledAccumulationMixin, transformers.Trainer):
        gathered = False

        def encode(self, model, inputs):
            return model(inputs["pair"])

        def coupled_loss(self, *encodings):
            return (global_loss(self.model) if self.gathered else self.model.loss)(*encodings)

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    for gathered in (False, True):
        reset()
        model, expected = Towers(), Towers()
        for one in (model, expected):
            one.eval().train = lambda mode=True, one=one: one
        for window in windows:
            encoded = [[torch.cat(part) for part in zip(*map(expected, chunks), strict=True)] for chunks in window]
            if gathered:
                loss = expected.loss(*(torch.cat(part) for part in zip(*encoded, strict=True)))
            else:
                loss = sum(expected.loss(*of_rank) for of_rank in encoded) / size
            loss.backward()
            torch.optim.SGD(expected.parameters(), lr=1.0).step()
            expected.zero_grad()
        arguments = transformers.TrainingArguments(
            str(ranks.shared),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=3,
            num_train_epochs=1,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo",
            disable_tqdm=True,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"pair": c} for window in windows for step in zip(*window, strict=True) for c in step],
            data_collator=lambda items: items[0],
            optimizers=(sgd(model.parameters()), None),
        )
        trainer.gathered = gathered
        trainer.train()
        found = [p.detach() - q.detach() for p, q in zip(model.parameters(), Towers().parameters(), strict=True)]
        way = [p.detach() - q.detach() for p, q in zip(expected.parameters(), Towers().parameters(), strict=True)]
        assert relative_error(found, way) < EXACT


TWO_RANKS = [accelerate_coupled, functions_of_encoders, lightning_coupled, transformers_coupled]
