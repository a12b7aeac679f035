"""The timer of the benchmarks on a GPU, with the part of torch.cuda that it uses recorded."""

import types

import pytest
import torch

from benchmarks import measure


@pytest.fixture
def sleeps(monkeypatch) -> list[int]:
    """The cycles that the device was kept busy for; the device takes 3 ms for everything."""
    found: list[int] = []
    event = types.SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 3.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", found.append)
    return found


def test_device_is_kept_busy_until_the_host_is_done(sleeps, monkeypatch):
    """A call that takes the host 40 ms is timed again behind a head start that is longer; a short one is not."""
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    calls = []

    def call(seconds: float) -> None:
        calls.append(seconds)
        clock[0] += seconds

    timer = measure.Timer(torch.device("cuda"))
    assert timer(lambda: call(0.001)) == 0.003
    assert (calls, sleeps) == ([0.001], [10_000_000])
    assert timer(lambda: call(0.04)) == 0.003
    assert calls[1:] == [0.04, 0.04]
    assert sleeps[-1] / 2e9 > 1.5 * 0.04


def test_a_call_that_waits_for_the_device_is_timed_all_the_same(sleeps, monkeypatch):
    """However long the head start, such a call takes longer; it is not repeated for ever."""
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 0.001 + sleeps[-1] / 1.5e9

    assert measure.Timer(torch.device("cuda"))(call) == 0.003
    assert sleeps[-1] == 400_000_000
