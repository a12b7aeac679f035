"""docs/swapping.md: what a block computes, where running is not enough."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.doc_blocks import ROOT, run_page
from tests.support.models import mlp
from tests.support.models import relative_error as off

ROUNDING = 1e-12  # float64, relative to the movement
RHO, RATE = 0.05, 0.1


def movement(model, start):
    """How far each parameter has moved."""
    return [p.detach() - s.detach() for p, s in zip(model.parameters(), start.parameters(), strict=True)]


def warnings(caplog):
    """Ours, without what torch.compile logs."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("accumkernels")]


def test_gan(one_thread, caplog):
    """Three windows of unequal micro-batches are those of the big batch, in plain torch; and nothing is warned of."""
    gan_step = run_page(ROOT / "docs" / "swapping.md")["gan_step"]
    generator, discriminator = torch.nn.Linear(2, 5).double(), torch.nn.Linear(5, 1).double()
    ours, truth = ([copy.deepcopy(generator), copy.deepcopy(discriminator)] for _ in range(2))
    accs = [ak.FusedAccumulator(network) for network in ours]
    optimizers = [torch.optim.SGD(acc.parameters(), lr=RATE) for acc in accs]
    stock = [torch.optim.SGD(network.parameters(), lr=RATE) for network in truth]
    G, D = truth
    for sizes in ((4, 1, 3), (2, 5), (1,)):
        window = [(torch.randn(n, 5).double(), torch.randn(n, 2).double()) for n in sizes]
        gan_step(*ours, *accs, *optimizers, window)
        real, noise = (torch.cat(parts) for parts in zip(*window, strict=True))
        D.zero_grad()
        on_real, on_fake = D(real), D(G(noise).detach())
        (bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))).backward()
        stock[1].step()
        G.zero_grad()
        on_fake = D(G(noise))
        bce(on_fake, torch.ones_like(on_fake)).backward()
        stock[0].step()
    for mine, theirs, start in zip(ours, truth, (generator, discriminator), strict=True):
        assert off(movement(mine, start), movement(theirs, start)) < ROUNDING
    assert warnings(caplog) == []


def test_adversarial_samples(one_thread, caplog):
    """`fgsm` leaves no gradient in the model."""
    page = run_page(ROOT / "docs" / "swapping.md")
    page["acc"].zero_()
    x, y = page["window"][0]
    assert not torch.equal(page["fgsm"](x, y), x)
    assert all(p.grad is None for p in page["model"].parameters())
    assert warnings(caplog) == []


@pytest.mark.parametrize("own_backward", [False, True])
def test_several_losses(one_thread, own_backward, caplog):
    """Both forms, with weights, take the big batch's gradient of the sum; the last window has one micro-batch."""
    model = mlp(torch.float64)
    start, truth = copy.deepcopy(model), copy.deepcopy(model)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=RATE)
    for sizes in ((4, 1, 3), (2,)):
        window = [(torch.randn(n, 5).double(), torch.randn(n, 3).double()) for n in sizes]
        for x, y in window:
            out = model(x)
            first, second = mse_loss(out, y), out.abs().mean()
            if own_backward:
                first.backward(retain_graph=True)
            acc.backward(second if own_backward else first + second, weight=len(x))
        acc.step(optimizer)
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        out = truth(x)
        grads = torch.autograd.grad(mse_loss(out, y) + out.abs().mean(), truth.parameters())
        for p, g in zip(truth.parameters(), grads, strict=True):
            p.data -= RATE * g
    assert off(movement(model, start), movement(truth, start)) < ROUNDING
    assert warnings(caplog) == []


def test_sam(one_thread):
    """Two steps of unequal micro-batches are those of the big batch, in plain torch."""
    sam_step = run_page(ROOT / "docs" / "swapping.md")["sam_step"]
    model = mlp(torch.float64)
    start, truth = copy.deepcopy(model), copy.deepcopy(model)
    windows = [
        [(torch.randn(n, 5).double(), torch.randn(n, 3).double()) for n in sizes] for sizes in ((4, 1, 3), (2, 5))
    ]
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=RATE)
    for window in windows:
        sam_step(model, acc, optimizer, window, rho=RHO)
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        first = torch.autograd.grad(mse_loss(truth(x), y), truth.parameters())
        norm = torch.cat([g.flatten() for g in first]).norm()
        climbed = copy.deepcopy(truth)
        for p, g in zip(climbed.parameters(), first, strict=True):
            p.data += RHO * g / norm
        second = torch.autograd.grad(mse_loss(climbed(x), y), climbed.parameters())
        for p, g in zip(truth.parameters(), second, strict=True):
            p.data -= RATE * g
    assert off(movement(model, start), movement(truth, start)) < ROUNDING


def test_sam_with_masters(one_thread):
    """The climb is of 16-bit weights, by the gradients of their masters; without it, they move elsewhere."""
    sam_step = run_page(ROOT / "docs" / "swapping.md")["sam_step"]
    start = mlp(torch.bfloat16).float()
    movements = []
    for dtype, rho in ((torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float32, 0.0)):
        model = copy.deepcopy(start).to(dtype)
        acc = ak.FusedAccumulator(model, master_weights=True)
        torch.manual_seed(0)
        window = [(torch.randn(n, 5).to(dtype), torch.randn(n, 3).to(dtype)) for n in (4, 1, 3)]
        sam_step(model, acc, torch.optim.SGD(acc.parameters(), lr=RATE), window, rho=rho)
        movements.append([m.detach() - s.detach() for m, s in zip(acc.parameters(), start.parameters(), strict=True)])
    climbed, ours, plain = movements
    assert off(ours, climbed) < 0.03
    assert off(plain, climbed) > 0.3
