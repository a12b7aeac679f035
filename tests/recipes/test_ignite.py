"""docs/recipes/ignite.md: its update function against the big batch, beside ignite's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("ignite")

from ignite.engine import Engine, Events, supervised_training_step  # noqa: E402
from ignite.handlers import FastaiLRFinder  # noqa: E402

import accumkernels as ak  # noqa: E402
from tests.support.recipes import batches, check, classifier, difference, recipe, together, train_big  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

SIZES = [4, 1, 7, 3, 5, 2]  # a window of four, and a short one
STEPS = 4
STOCK_IS_OFF = 0.3  # measured 0.5: a mean of means, and the last window waits for the next epoch


def sgd(parameters):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_two_epochs(max_norm):
    """Unequal micro-batches, a short last window, with and without clipping."""
    model, data, loss_fn = classifier(), batches(SIZES), nn.CrossEntropyLoss()
    windows = [together(data[:STEPS]), together(data[STEPS:])] * 2

    def clip(twin):
        if max_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), max_norm)

    truth = train_big(model, windows, lambda twin, window: loss_fn(twin(window[0]), window[1]), sgd, clip)

    ours = copy.deepcopy(model)
    acc = ak.FusedAccumulator(ours)
    trainer = recipe("ignite")["fused_trainer"](ours, acc, sgd(acc.parameters()), loss_fn, STEPS, max_norm)
    trainer.run(data, max_epochs=2)
    check("ignite", difference(model, ours, truth))

    if max_norm is None:
        stock = copy.deepcopy(model)
        step = supervised_training_step(
            stock, sgd(stock.parameters()), loss_fn, gradient_accumulation_steps=STEPS, output_transform=lambda *_: None
        )
        Engine(step).run(data, max_epochs=2)
        assert difference(model, stock, truth) > STOCK_IS_OFF


class Stream(torch.utils.data.IterableDataset):
    """Does not know its length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.parametrize("cut", [None, 3])
def test_epochs_of_unknown_or_other_lengths(cut):
    """A loader without a length, and a first epoch that a handler ends: each epoch's last window is used."""
    model, data, loss_fn = classifier(), batches(SIZES), nn.CrossEntropyLoss()
    first = [data[:cut]] if cut else [data[:STEPS], data[STEPS:]]
    windows = [together(window) for window in (*first, data[:STEPS], data[STEPS:])]
    truth = train_big(model, windows, lambda twin, window: loss_fn(twin(window[0]), window[1]), sgd)

    ours = copy.deepcopy(model)
    acc = ak.FusedAccumulator(ours)
    trainer = recipe("ignite")["fused_trainer"](ours, acc, sgd(acc.parameters()), loss_fn, STEPS)
    if cut:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=cut), lambda engine: engine.terminate_epoch())
    loader = torch.utils.data.DataLoader(Stream(data), batch_size=None)
    trainer.run(loader, max_epochs=2, epoch_length=len(data) if cut else None)
    check("ignite", difference(model, ours, truth))


@pytest.mark.filterwarnings("ignore:Run completed without loss diverging")
def test_a_search_for_the_learning_rate_leaves_nothing_behind():
    """FastaiLRFinder terminates a run inside a window, and restores the model: its gradients are of other weights."""
    model, data, loss_fn = classifier(), batches(SIZES), nn.CrossEntropyLoss()
    windows = [together(data[:STEPS]), together(data[STEPS:])]
    truth = train_big(model, windows, lambda twin, window: loss_fn(twin(window[0]), window[1]), sgd)

    ours = copy.deepcopy(model)
    acc = ak.FusedAccumulator(ours)
    optimizer = sgd(acc.parameters())
    trainer = recipe("ignite")["fused_trainer"](ours, acc, optimizer, loss_fn, STEPS)
    found = FastaiLRFinder()
    with found.attach(trainer, {"model": ours, "optimizer": optimizer}, float, num_iter=2, end_lr=1.0) as search:
        search.run(data)
    trainer.run(data, max_epochs=1)
    check("ignite", difference(model, ours, truth))
