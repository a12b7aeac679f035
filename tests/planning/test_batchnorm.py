"""BatchNorm found, warned of, replaced; its momentum corrected."""

import copy

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.planning.batchnorm import correct_batchnorm_momentum
from tests.support.models import batchnorms


def test_names():
    """In training or not; a model without any; "" for the model itself."""
    model = batchnorms()
    assert ak.batchnorm_modules(model) == ["1", "3"]
    assert ak.batchnorm_modules(model.eval()) == ["1", "3"]
    assert ak.batchnorm_modules(nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4))) == []
    assert ak.batchnorm_modules(nn.SyncBatchNorm(4)) == [""]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got \[\]"):
        ak.batchnorm_modules([])


@pytest.mark.parametrize(
    ("channels", "most", "groups"),
    [(64, 32, 32), (32, 32, 16), (6, 4, 3), (7, 32, 1), (2, 32, 1), (1, 32, 1), (48, 10, 8), (8, 1, 1)],
)
def test_groups(channels, most, groups):
    """The largest divisor up to the bound that leaves two channels to a group."""
    model = nn.Sequential(nn.BatchNorm2d(channels))
    assert ak.replace_batchnorm(model, num_groups=most) == 1
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0].num_groups == groups


def test_replaced():
    """The same affine parameters, eps and mode; a shared module stays shared; the count is of modules."""
    model = batchnorms().double()
    old = model[1]
    old.eps = 1e-3
    old.weight.requires_grad_(False)
    model[3].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert ak.replace_batchnorm(model) == 2
    assert ak.batchnorm_modules(model) == []
    new = model[1]
    assert new is model[2][1]
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert new.eps == 1e-3
    assert (new.training, model[3].training) == (True, False)
    model(torch.randn(2, 3, 9, 9, dtype=torch.float64)).square().sum().backward()
    optimizer.step()  # built before, it still trains what the model uses
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}


def test_without_affine():
    """Nothing is made up."""
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False))
    ak.replace_batchnorm(model)
    assert not model[0].affine
    assert list(model.parameters()) == []


@pytest.mark.parametrize(
    ("channels", "most", "groups"),
    [
        (64, 32, 8),
        (256, 32, 32),
        (64, 4, 4),
        (24, 32, 3),
        (20, 32, 2),
        (17, 32, 1),
        (16, 32, 2),
        (15, 32, 1),
        (2, 9, 1),
    ],
)
def test_groups_of_vectors(channels, most, groups):
    """A BatchNorm1d, lazy before its first batch or not, leaves at least 8 channels to a group."""
    for norm in (nn.BatchNorm1d(channels), nn.LazyBatchNorm1d()):
        norm(torch.randn(2, channels))
        model = nn.Sequential(norm)
        ak.replace_batchnorm(model, num_groups=most)
        assert model[0].num_groups == groups


def test_replaced_mlp_trains():
    """A 3-layer MLP of width 64 reaches BatchNorm's accuracy; with two channels per group it stays near chance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6000, 20, generator=generator)
    hidden = (x @ torch.randn(20, 32, generator=generator) / 2).tanh()
    y = (hidden @ torch.randn(32, 10, generator=generator)).argmax(1)

    def accuracy(norm, replace=False):
        torch.manual_seed(0)
        widths = (20, 64, 64, 64)
        layers = [[nn.Linear(n, m), norm(m), nn.ReLU()] for n, m in zip(widths, widths[1:], strict=False)]
        model = nn.Sequential(*sum(layers, []), nn.Linear(64, 10))
        assert not replace or ak.replace_batchnorm(model) == 3
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for index in torch.randint(4000, (200, 64), generator=torch.Generator().manual_seed(1)):
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        return (model(x[4000:]).argmax(1) == y[4000:]).float().mean().item()

    truth = accuracy(nn.BatchNorm1d)
    assert truth > 0.6
    assert accuracy(lambda width: nn.GroupNorm(width // 2, width)) < truth / 2
    assert accuracy(nn.BatchNorm1d, replace=True) > truth - 0.05  # 2,000 samples: a standard error of 0.01


def test_never_one_value_per_group():
    """`[N, channels]` inputs are not normalized away."""
    model = nn.Sequential(nn.BatchNorm1d(6))
    ak.replace_batchnorm(model)
    assert model(torch.randn(5, 6)).abs().min(1).values.max() > 0
    assert model(torch.randn(1, 6)).abs().max() > 0


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.BatchNorm2d(4), "the model is itself a BatchNorm"),
        (nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm1d(1)), "'1' has a single channel"),
        (nn.Sequential(nn.BatchNorm2d(4), nn.LazyBatchNorm1d()), "'1' is lazy"),
    ],
    ids=["itself", "one channel", "lazy"],
)
def test_impossible(model, match):
    """Named, and nothing is replaced."""
    before = list(model.modules())
    with pytest.raises(ValueError, match=match):
        ak.replace_batchnorm(model)
    assert list(model.modules()) == before
    with pytest.raises(ValueError, match="num_groups must be at least 1, got 0"):
        ak.replace_batchnorm(nn.Sequential(), num_groups=0)


def test_replaced_model_accumulates_exactly():
    """Micro-batches then give the gradient of the big batch; with BatchNorm they do not."""
    x, y = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8)

    def distance(model):
        twin = copy.deepcopy(model).double()
        nn.functional.cross_entropy(twin(x.double()), y).backward()
        exact = torch.cat([p.grad.flatten() for p in twin.parameters()])
        acc = ak.FusedAccumulator(model)
        for inputs, targets in ak.plan(8, 3).split((x, y)):
            acc.backward(nn.functional.cross_entropy(model(inputs), targets), weight=len(inputs))
        acc.finalize(torch.optim.SGD(model.parameters(), lr=0.0))
        return ((torch.cat([p.grad.flatten() for p in model.parameters()]) - exact).norm() / exact.norm()).item()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))
    assert distance(copy.deepcopy(model)) > 1e-2
    ak.replace_batchnorm(model)
    assert distance(model) < 1e-5


@pytest.mark.parametrize("steps", [1, 2, 7, 32])
@pytest.mark.parametrize("momentum", [0.01, 0.1, 0.9])
def test_momentum(steps, momentum):
    """After K micro-batches of one value, running statistics are where one big batch of it takes them."""
    norm = nn.BatchNorm1d(1, momentum=momentum, dtype=torch.float64)
    big = copy.deepcopy(norm)
    assert correct_batchnorm_momentum(nn.Sequential(norm), steps) == 1
    data = torch.tensor([[1.0], [5.0]], dtype=torch.float64)
    for _ in range(steps):
        norm(data)
    big(data)
    assert norm.running_mean.item() == pytest.approx(big.running_mean.item(), rel=1e-12)
    assert norm.running_var.item() == pytest.approx(big.running_var.item(), rel=1e-12)


def test_momentum_in_expectation():
    """Over many draws the running statistics of micro-batches and of big batches have the same mean."""
    generator = torch.Generator().manual_seed(0)
    channels = 20_000  # independent draws
    big = nn.BatchNorm1d(channels)
    micro = nn.BatchNorm1d(channels)
    correct_batchnorm_momentum(micro, 4)
    for _ in range(3):
        x = 2 + 3 * torch.randn(16, channels, generator=generator)
        big(x)
        for piece in x.split(4):
            micro(piece)
    # The standard error of a mean over 20,000 channels is 0.3 % of the variance or less.
    assert micro.running_mean.mean().item() == pytest.approx(big.running_mean.mean().item(), rel=0.01)
    assert micro.running_var.mean().item() == pytest.approx(big.running_var.mean().item(), rel=0.02)


def test_momentum_left_alone():
    """Cumulative averages weigh all batches equally already; without running statistics there is nothing to correct."""
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2, track_running_stats=False))
    assert correct_batchnorm_momentum(model, 4) == 0
    assert model[0].momentum is None
    with pytest.raises(ValueError, match="accumulation_steps must be at least 1, got 0"):
        correct_batchnorm_momentum(model, 0)
