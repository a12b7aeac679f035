"""Overflows that raise, caught by the loop, where a loss is of several optimizers: each drops what is not finite."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.models import batch, mlp
from tests.support.trainers import make, quiet_trainer

pytest.importorskip("accelerate")
pl = pytest.importorskip("lightning.pytorch")

from accumkernels.integrations.accelerate import Accelerator  # noqa: E402
from accumkernels.integrations.lightning import FusedAccumulation  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread", "fresh_state"),
    pytest.mark.filterwarnings("ignore"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
STEPS, SIZE = 2, 3


def loss_of(nets, i, bad):
    """Of both networks; in the first micro-batch, gradients of those in `bad` are not finite."""
    x, y = batch(SIZE, seed=i)
    outs = [net(x) for net in nets]
    for place in bad if i == 0 else ():
        outs[place].register_hook(lambda grad: grad * math.nan)
    return mse_loss(sum(outs), y)


def sgd(net):
    """Its parameters are sums of gradients."""
    return torch.optim.SGD(net.parameters(), lr=0.5)


def truth(bad):
    """Each network moves by the mean over the micro-batches that are finite for it."""
    nets = [mlp(torch.float64), mlp(torch.float64, seed=1)]
    for window in (0, STEPS):
        grads = []
        for place, net in enumerate(nets):
            numbers = [i for i in range(window, window + STEPS) if i or place not in bad]
            losses = [mse_loss(nets[0](x) + nets[1](x), y) for x, y in (batch(SIZE, torch.float64, i) for i in numbers)]
            grads.append(torch.autograd.grad(sum(losses) / len(losses), list(net.parameters())))
        for net, mine in zip(nets, grads, strict=True):
            for p, grad in zip(net.parameters(), mine, strict=True):
                p.data -= 0.5 * grad
    return nets


def with_accelerate(bad):
    """The networks, and the numbers of micro-batches whose backward has raised."""
    accelerator, raised = make(Accelerator, steps=STEPS, accumulator_options={"overflow": "raise"}), []
    nets = [mlp(), mlp(seed=1)]
    *nets, one, two = accelerator.prepare(*nets, *map(sgd, nets))
    for i in range(2 * STEPS):
        with accelerator.accumulate(*nets):
            try:
                accelerator.backward(loss_of(nets, i, bad))
            except FloatingPointError:
                raised.append(i)
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
    return nets, raised


def with_lightning(bad):
    """The same in manual optimization."""

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.nets = torch.nn.ModuleList([mlp(), mlp(seed=1)])
            self.raised = []

        def training_step(self, _, index):
            try:
                self.manual_backward(loss_of(self.nets, index, bad))
            except FloatingPointError:
                self.raised.append(index)
            if index % STEPS == STEPS - 1:
                for optimizer in self.optimizers():
                    optimizer.step()

        def configure_optimizers(self):
            return list(map(sgd, self.nets))

    module = Manual()
    trainer = quiet_trainer(FusedAccumulation(overflow="raise"), steps=1)
    trainer.fit(module, torch.utils.data.DataLoader(range(2 * STEPS)))
    return module.nets, module.raised


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("trained", [with_accelerate, with_lightning])
def test_the_next_micro_batch_is_alone(trained, bad):
    """Nothing of the bad one is left for it, and it does not raise in place of the bad one."""
    nets, raised = trained(bad)
    assert raised == [0]
    for net, expected in zip(nets, truth(bad), strict=True):
        for a, b in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6)
