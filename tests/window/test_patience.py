"""Loops in which no window ends, or one becomes far longer than all before: warnings, and none where it is meant."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

import accumkernels as ak
from accumkernels.window import misuse
from tests.support.models import batch, mlp

MANY = 40  # instead of 1000


@pytest.fixture(autouse=True)
def few_suffice(monkeypatch, caplog):
    """Short windows count as long, and accumulators of other tests do not count."""
    monkeypatch.setattr(misuse, "MANY", MANY)
    monkeypatch.setattr(misuse, "_never_ended", set())
    for name in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)
    caplog.set_level(logging.WARNING, logger="accumkernels")


class Half:
    """A loop with an accumulator."""

    def __init__(self, **options):
        self.model = mlp()
        self.acc = ak.FusedAccumulator(self.model, **options)
        self.optimizer = torch.optim.SGD(self.acc.parameters(), lr=0.1)

    def accumulate(self, count):
        """So many micro-batches."""
        x, _ = batch(1)
        for _ in range(count):
            self.acc.backward(self.model(x).sum())


def said_at_exit(caplog):
    """What is logged when the process ends."""
    caplog.clear()
    misuse._warn_at_exit()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("options", [{}, {"release": "backward"}])
def test_a_first_window_that_does_not_end(caplog, options):
    """One warning, at the limit."""
    loop = Half(**options)
    loop.accumulate(MANY - 1)
    assert caplog.records == []
    loop.accumulate(MANY)
    (record,) = caplog.records
    assert f"this window has {MANY} micro-batches, and none has ended yet" in record.getMessage()


def test_a_window_far_longer_than_any_before(caplog):
    """Ten times the longest, if that is above the limit; afterwards nothing more is said."""
    loop = Half()
    for count in (5, 3, 0):
        loop.accumulate(count)
        loop.acc.step(loop.optimizer)
    loop.accumulate(49)
    assert caplog.records == []
    loop.accumulate(1)
    (record,) = caplog.records
    assert "this window has 50 micro-batches, and the longest before had 5" in record.getMessage()
    loop.acc.step(loop.optimizer)
    loop.accumulate(600)
    assert len(caplog.records) == 1
    assert said_at_exit(caplog) == []


@pytest.mark.parametrize("dropped", [False, True])
def test_the_process_ends_without_any_step(caplog, dropped):
    """Also after the accumulator is gone, and where every window was dropped; one micro-batch less says nothing."""
    for count, words in ((misuse.FEW - 1, 0), (misuse.FEW, 1)):
        loop = Half()
        for _ in range(count):
            loop.accumulate(1)
            if dropped:
                loop.acc.zero_()
        del loop
        assert len(said_at_exit(caplog)) == words


def stepped(loop):
    """The usual."""
    loop.acc.step(loop.optimizer)


def finalized(loop):
    """Somebody looks at the gradients."""
    loop.acc.finalize()


def saved(loop):
    """A run that goes on elsewhere."""
    loop.acc.state_dict()


def read(loop):
    """A probe of gradients."""
    loop.acc.main_grad(loop.model[0].weight)
    loop.accumulate(misuse.FEW)
    loop.acc.zero_()
    loop.accumulate(misuse.FEW)


def read_flat(loop):
    """All of them."""
    assert loop.acc.flat_buffers


def read_and_dropped(loop):
    """As with Fisher information, in short windows."""
    loop.acc.zero_()
    for _ in range(misuse.FEW):
        loop.accumulate(1)
        loop.acc.main_grad(loop.model[0].weight)
        loop.acc.zero_()


def removed(loop):
    """It was for a while only."""
    loop.acc.remove()


def loaded(loop):
    """A run that goes on from elsewhere, and is cut off."""
    loop.acc.load_state_dict(loop.acc.state_dict())
    loop.accumulate(misuse.FEW)


def probed(loop):
    """It is gone, and another one trains."""
    del loop.acc
    stepping = Half()
    stepping.accumulate(1)
    stepping.acc.step(stepping.optimizer)


def failed(loop):
    """An exception has ended the process, and is what matters."""
    sys.last_value = ValueError()


ENDS = [stepped, finalized, saved, read, read_flat, read_and_dropped, removed, loaded, probed, failed]


@pytest.mark.parametrize("end", ENDS)
def test_ends_that_say_nothing(caplog, end):
    """See the functions."""
    loop = Half()
    loop.accumulate(misuse.FEW)
    end(loop)
    assert said_at_exit(caplog) == []


SCRIPT = """
import os, sys, torch, accumkernels as ak
from torch import nn
model = nn.Linear(2, 1)
acc = ak.FusedAccumulator(model)
class Stock:  # a half-swapped loop of a library with optimizers of its own: it finds no gradient, and says nothing
    def step(self):
        for p in model.parameters():
            if p.grad is not None:
                raise AssertionError
for _ in range(12):
    acc.backward(model(torch.ones(1, 2)).sum())
    Stock().step()
if sys.argv[1] == "raises":
    raise ValueError("something else")
if sys.argv[1] == "forks" and os.fork():
    os.wait()
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.mark.starts
@pytest.mark.parametrize("how", ["ends", "raises", "forks"])
def test_a_process_that_ends(how):
    """The warning is the last line; after an exception there is none, nor in a fork whose parent ends the window."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=False)
    assert ("no window of a FusedAccumulator" in done.stderr) == (how == "ends")
    assert done.returncode == (how == "raises")
