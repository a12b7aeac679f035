"""Models people use, on the device: the sums of the CPU, no wait in backward, no race."""

from __future__ import annotations

import pytest
import torch

import accumkernels as ak
from tests import simulated_device as sim
from tests.support import zoo
from tests.support.models import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:accumkernels uses its reference backend", "ignore:.*weight_norm")
MICRO_BATCHES = [[0, 1, 2], [3], [4, 5]]
# Relative L2 over all parameters, of the same kernels. Autocast's lists of ops differ between devices, so that under it
# other ops round to bf16, 2**-9 each, some of them one after the other.
CLOSE = {False: 1e-5, True: 0.1}


def moved(model, device):
    """To the device, with ties: torch makes new parameters of moved ones for kinds of devices that it does not know."""
    first = {}
    ties = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    model.to(device)
    for name, tied in ties.items():
        if name != tied:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(tied))
    return model


def sums(name, device, enabled, seen=None, **options):
    """What two windows hand to the optimizer in the end; and waits in backward, ours and stock torch's."""
    case = zoo.make(name)
    model, waits = moved(case.model, device), {"ours": 0, "stock": 0}

    def backward(who, call, rows):
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=enabled):
            loss, weight = case.loss(model, rows)
        before = 0 if seen is None else len(seen.waits)
        call(loss, **({} if who == "stock" else {"weight": weight}))
        waits[who] += 0 if seen is None else len(seen.waits) - before

    for rows in MICRO_BATCHES:
        backward("stock", torch.autograd.backward, rows)
    model.zero_grad()
    with ak.FusedAccumulator(model, backend="reference", **options) as acc:
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.05)
        for _ in range(2):
            for rows in MICRO_BATCHES:
                backward("ours", acc.backward, rows)
            acc.finalize(optimizer)
            found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            acc.zero_()
    return found, waits


NAMES = [*zoo.PLAIN, *(pytest.param(name, marks=pytest.mark.integrations) for name in zoo.INTEGRATIONS)]
WAYS = {
    "fused": {"release": "backward", "bucket_bytes": 500, "fuse_weight_gradients": True},
    "whole": {"release": "microbatch", "fuse_weight_gradients": False},
}


@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_the_cpus(name, enabled):
    """Fused in fp32, whole under autocast, whose casts are taken from the graph."""
    way = WAYS["whole" if enabled else "fused"]
    expected, _ = sums(name, "cpu", enabled, **way)
    with sim.watch(lines=True) as seen:
        found, waits = sums(name, "sim:1", enabled, seen, **way)
    seen.check()
    assert found.keys() == expected.keys()
    order = list(expected)
    assert relative_error([found[n].cpu() for n in order], [expected[n] for n in order]) < CLOSE[enabled]
    assert waits["ours"] == 2 * waits["stock"]  # two windows; indexing by masks waits in torch's own backward
