"""Weights in losses: what goes into the loss and what is left to the accumulate pass are the weight together."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from accumkernels.capture.inbox import MicroBatch
from accumkernels.ranks import base
from accumkernels.window import loss_weighting as module
from accumkernels.window.loss_weighting import LossWeighting, grad_weight, together

KEY = "a unit"


@pytest.fixture
def proposed(monkeypatch):
    """Several ranks, whose unit is what the first proposes."""
    asked = []

    def agree(weight, key):
        assert key == KEY
        asked.append(weight)
        exponent = 0 if isinstance(weight, torch.Tensor) or weight == 0 else math.frexp(weight)[1] - 1
        return 2.0**exponent

    monkeypatch.setattr(module, "propose_unit", agree)
    return asked


def weighed(weighting, weight, dtype):
    """The gradient of `3 x`, weighted by both parts, what the loss's was, and the micro-batch."""
    x = torch.ones((), dtype=dtype, requires_grad=True)
    loss, micro_batch = weighting.weigh(3 * x, MicroBatch(weight, 1))
    loss.backward()
    return float(grad_weight(micro_batch)) * x.grad.double().item(), x.grad.item(), micro_batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_parts_are_the_weight(proposed, dtype, on_device):
    """Exactly, whatever the loss's dtype rounds; the unit is agreed on once."""
    weighting = LossWeighting(KEY)
    for weight in (1001.0, 0.3, 7.0, 1e-3):
        given = torch.tensor(weight, dtype=torch.float64) if on_device else weight
        both, _, micro_batch = weighed(weighting, given, dtype)
        # A product of three and a 16-bit factor is rounded once more.
        assert both == pytest.approx(3 * weight, rel=4 * torch.finfo(dtype).eps)
        assert float(micro_batch.weight) == weight
        loss_weight = 1.0 if micro_batch.loss_weight is None else micro_batch.loss_weight
        assert float(grad_weight(micro_batch) * loss_weight) == pytest.approx(weight, rel=1e-15)
    assert len(proposed) == 1


def test_the_loss_stays_as_large_as_it_is(proposed):
    """Weighted by the unit's multiple between 1 and 2; a weight that is a power of two leaves it alone."""
    for weight in (1.0, 4096.0, 0.25, 1000.0, 0.3):
        _, grad, micro_batch = weighed(LossWeighting(KEY), weight, torch.float32)
        assert 3 <= grad < 6.0001
        assert (micro_batch.loss_weight is None) is (math.frexp(weight)[0] == 0.5)


def test_a_factor_that_rounds_to_one(proposed):
    """In the loss's dtype it changes nothing, and all of the weight is left to the gradients."""
    weight = 1 + 2.0**-10
    both, grad, micro_batch = weighed(LossWeighting(KEY), weight, torch.bfloat16)
    assert (both, grad, micro_batch.loss_weight) == (3 * weight, 3, None)


@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_zero_keeps_the_unit(proposed, on_device):
    """What comes from other ranks' losses is still multiplied by the unit."""
    weighting = LossWeighting(KEY)
    weighed(weighting, 12.0, torch.float64)
    zero = torch.zeros((), dtype=torch.float64) if on_device else 0.0
    _, grad, micro_batch = weighed(weighting, zero, torch.float64)
    assert grad == 0
    assert float(grad_weight(micro_batch)) == 8


@pytest.mark.parametrize("known_to_others", [False, True])
def test_zero_proposes_nothing(proposed, known_to_others, monkeypatch):
    """A first weight of 0 says nothing of how large weights are; gradients of others' losses have theirs."""
    units = [8.0 if known_to_others else None]
    for place in (module, base):
        monkeypatch.setattr(place, "read_unit", lambda key: units[-1] if key == KEY else None)
    weighting = LossWeighting(KEY)
    _, grad, micro_batch = weighed(weighting, 0.0, torch.float64)
    assert (grad, proposed) == (0, [])
    assert grad_weight(micro_batch) == (8 if known_to_others else 1)
    units.append(8.0)  # another rank's weight came while this one's backward ran
    assert grad_weight(micro_batch) == 8
    assert grad_weight(together(micro_batch, MicroBatch(12.0, 2, loss_weight=1.5, unit=8.0))) == 8
    weighed(weighting, 4096.0, torch.float64)
    assert proposed == [4096.0]


def test_sums_have_one_multiplier():
    """Gradients that were summed by FSDP2 are multiplied by what all were."""
    first, second = MicroBatch(6.0, 1, loss_weight=1.5, unit=4.0), MicroBatch(4.0, 2)._replace(unit=4.0)
    assert grad_weight(together(first, second)) == 4


# ---- Functions that may add a gradient of their own


class AddAuxiliaryLoss(torch.autograd.Function):
    """Passes `x` on; backward adds the gradient of an auxiliary loss, whatever gradient it gets."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(grad)


class PassOn(torch.autograd.Function):
    """Passes gradients on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.library.custom_op("accumkernels_tests::pass_on", mutates_args=())
def pass_on(x: torch.Tensor) -> torch.Tensor:
    """Pass gradients on."""
    return x.clone()


pass_on.register_autograd(lambda ctx, grad: grad)


def with_auxiliary_loss(x):
    """`3 x` and an auxiliary loss of `5 x`, which only backward knows."""
    return AddAuxiliaryLoss.apply(3 * x, 5 * x)


def told(caplog):
    """What the warnings so far name; forgets them."""
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    assert all(
        text.startswith("accumkernels: backward(weight): on several ranks a part of the weight") for text in texts
    )
    return [text.partition(" has ")[2].partition(":")[0] for text in texts]


def test_a_gradient_of_its_own(proposed, caplog):
    """Gets the whole weight where the loss is left as it is, and where it is not, there is a warning."""
    for weight in (1.0, 16.0, 12.0):
        x = torch.ones((), requires_grad=True)
        loss, micro_batch = LossWeighting(KEY).weigh(with_auxiliary_loss(x), MicroBatch(weight, 1))
        loss.backward()
        right = float(grad_weight(micro_batch)) * x.grad.item() == weight * (3 + 5)
        assert (right, told(caplog)) == ((True, []) if weight in (1, 16) else (False, ["AddAuxiliaryLoss"]))


@pytest.mark.parametrize("weight", [12.0, 0.0, torch.tensor(1.0, dtype=torch.float64)], ids=str)
def test_each_function_is_named_once(proposed, caplog, monkeypatch, weight):
    """Functions and custom ops of users, wherever they are in the graph and whichever graph they come in."""
    monkeypatch.setattr(module, "read_unit", lambda key: None)
    weighting, x = LossWeighting(KEY), torch.ones((), requires_grad=True)

    def weigh(loss):
        weighting.weigh(loss, MicroBatch(weight, 1))
        return told(caplog)

    assert weigh(3 * x) == []
    assert weigh(x.detach()) == []
    assert weigh(checkpoint(torch.tanh, x, use_reentrant=True) * 2) == []  # a Function of torch's
    assert weigh(torch.tanh(with_auxiliary_loss(2 * x)) + PassOn.apply(x)) == ["AddAuxiliaryLoss, PassOn"]
    assert weigh(with_auxiliary_loss(x)) == []
    assert weigh(PassOn.apply(pass_on(x))) == ["accumkernels_tests_pass_on_default"]
    assert weigh(pass_on(x)) == []
    LossWeighting(KEY).weigh(PassOn.apply(x), MicroBatch(weight, 1))
    assert told(caplog) == ["PassOn"]


def test_parts_of_a_weighted_loss(proposed, caplog):
    """Graphs behind encodings are inspected too, from all tensors that backward begins at."""
    weighting, x = LossWeighting(KEY), torch.ones((), requires_grad=True)
    roots = 2 * x, PassOn.apply(x)
    for weight, names in ((8.0, []), (12.0, ["PassOn"])):
        _, micro_batch = weighting.weigh(3 * x, MicroBatch(weight, 1))
        weighting.inspect(roots, micro_batch)
        assert told(caplog) == names
