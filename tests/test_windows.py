"""acc.windows cuts any iterable into windows, reads nothing too early, and loses no batch in silence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp, relative_error

SIZES = (4, 1, 3, 2, 5)
RATE = 0.1


def batches(sizes=SIZES):
    """A generator: it has no length and cannot be iterated over twice."""
    return (batch(n, torch.float64, seed=i) for i, n in enumerate(sizes))


def build():
    """A model in fp64, its accumulator and an optimizer."""
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model)
    return model, acc, torch.optim.SGD(acc.parameters(), lr=RATE)


def trained_on(windows):
    """Stock: one step for each window's big batch."""
    model = mlp(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for window in windows:
        x, y = (torch.cat(tensors) for tensors in zip(*window, strict=True))
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_windows_train_as_big_batches(n):
    """Of every length, with a short last window; 9 is more than there are."""
    model, acc, optimizer = build()
    counts = []
    for window in acc.windows(batches(), n):
        for x, y in window:
            acc.backward(mse_loss(model(x), y), weight=len(x))
        counts.append(acc.micro_batches)
        acc.step(optimizer)
    cut = [list(batches())[i : i + n] for i in range(0, len(SIZES), n)]
    assert counts == [len(window) for window in cut]
    assert relative_error(list(model.parameters()), trained_on(cut)) < 1e-14


@pytest.mark.parametrize("cuts", [False, True])
def test_a_loader_that_raises_loses_no_batch(cuts):
    """What it gave before its error is trained first, as in a plain loop, though it was read one ahead."""

    def corrupt():
        yield from batches(SIZES[:3])
        raise OSError("corrupt")

    model, acc, optimizer = build()
    window = next(acc.windows(corrupt(), 5)) if cuts else acc.window(corrupt())
    with pytest.raises(OSError, match="corrupt"):
        for x, y in window:
            acc.backward(mse_loss(model(x), y), weight=len(x))
    assert acc.micro_batches == 3
    acc.step(optimizer)
    assert relative_error(list(model.parameters()), trained_on([list(batches(SIZES[:3]))])) < 1e-14


def test_each_window_is_one_of_window(monkeypatch):
    """The last micro-batch is marked by `window`, which gets exactly the window's batches."""
    _, acc, _ = build()
    given, window = [], acc.window

    def spy(batches):
        given.append(list(batches))
        return window(given[-1])

    monkeypatch.setattr(acc, "window", spy)
    assert [list(window) for window in acc.windows(iter(range(5)), 2)] == given == [[0, 1], [2, 3], [4]]


def test_nothing_is_read_too_early():
    """One batch ahead inside a window, none beyond its end; and the generator holds no batch of a window that runs."""
    _, acc, _ = build()
    read = []
    source = (read.append(i) or i for i in range(5))
    windows = acc.windows(source, 2)
    assert read == []
    seen = []
    for window in windows:
        for item in window:
            seen.append((item, len(read)))
    assert seen == [(0, 2), (1, 2), (2, 4), (3, 4), (4, 5)]


def test_nothing_to_cut():
    """No batches, no windows."""
    _, acc, _ = build()
    assert list(acc.windows([], 3)) == []


def test_a_window_left_early_skips_the_rest_of_it():
    """The next begins where it would have begun anyway."""
    model, acc, optimizer = build()
    for index, window in enumerate(acc.windows(batches(), 3)):
        for x, y in window:
            acc.backward(mse_loss(model(x), y), weight=len(x))
            if index == 0:
                break
        acc.step(optimizer)
    data = list(batches())
    assert relative_error(list(model.parameters()), trained_on([data[:1], data[3:]])) < 1e-14


@pytest.mark.parametrize("begun", [False, True])
def test_windows_out_of_turn_are_an_error(begun):
    """Windows in a list have no batches left: a loop over them would train nothing, in silence."""
    _, acc, _ = build()
    windows = acc.windows(range(4), 2)
    first = next(windows)
    if begun:
        next(first)
    next(windows)
    with pytest.raises(RuntimeError, match="the next window was asked for before the loop had iterated over this one"):
        list(first)
    with pytest.raises(RuntimeError, match=r"for window in acc.windows\(loader, n\): for x, y in window"):
        list(list(acc.windows(range(4), 2))[0])


def test_errors_of_the_source_come_out():
    """As they are, and the window goes on to be open."""
    _, acc, _ = build()

    def source():
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(next(acc.windows(source(), 3)))


def test_a_loaded_window_gets_what_it_lacks():
    """A run that is resumed inside a window ends it where the run that saved it would have."""
    model, acc, optimizer = build()
    data = list(batches())
    for x, y in data[:2]:
        acc.backward(mse_loss(model(x), y), weight=len(x))
    state = copy.deepcopy(acc.state_dict())
    acc.zero_()
    acc.load_state_dict(state)
    for window in acc.windows(iter(data[2:]), 3):
        for x, y in window:
            acc.backward(mse_loss(model(x), y), weight=len(x))
        acc.step(optimizer)
    assert relative_error(list(model.parameters()), trained_on([data[:3], data[3:]])) < 1e-14


@pytest.mark.parametrize("drops", [False, True])
def test_a_window_given_up_is_said_to_count(drops, caplog):
    """Once, where the next one begins; not if it was dropped, nor after an end."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    for _ in range(3):
        for number, _ in enumerate(acc.window(range(4))):
            acc.backward(mse_loss(model(x), y))
            if number == 1:
                break
        if drops:
            acc.zero_()
    for _ in acc.window(range(2)):
        acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    for _ in acc.window(range(2)):
        acc.backward(mse_loss(model(x), y))
    said = [record.getMessage() for record in caplog.records if "called again" in record.getMessage()]
    assert len(said) == (0 if drops else 1)
    assert drops or "2 micro-batches of the window before, which was not ended, count in this one" in said[0]
