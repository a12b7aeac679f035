"""On a GPU the host's time and the device's are told apart, for ours and for every peer."""

import types

import pytest
import torch

from benchmarks import kernel_jobs, kernel_rows
from benchmarks.harness import measure
from benchmarks.harness.tables import Table
from benchmarks.kernel_jobs import COLD, Measured
from benchmarks.methods import peers

CUDA = torch.device("cuda", 0)


def test_both_are_printed(capsys):
    """A peer of 1,500 launches that keeps the host busy for 6 ms and the device for 2, beside ours."""
    measured = [
        Measured("accumulate", peers.OURS, COLD, 1, [0.0004], host=0.0005, device=0.0004),
        Measured("accumulate", peers.MIXED, COLD, 1, [0.006], host=0.006, device=0.002),
    ]
    rows = kernel_rows.rows(measured, "tiny", [(64,)] * 1500, "bf16", {"threads": 2, "torch": "t", "device": "d"}, 7)
    assert [(row["host_ms"], row["device_ms"]) for row in rows] == [(0.5, 0.4), (6.0, 2.0)]
    kernel_rows.show(rows)
    header, _, ours, mixed = capsys.readouterr().out.splitlines()[1:5]
    assert "host ms" in header and "device ms" in header
    assert ours.split()[-6:-4] != mixed.split()[-6:-4]
    assert " 6 " in mixed and " 2 " in mixed


def test_measured_for_every_method(monkeypatch):
    """Nobody's host time stands for his device time; where the profiler does not work, the device's is not known."""
    monkeypatch.setattr(kernel_jobs, "host_seconds", lambda call, before, repetitions, device: [call()] * repetitions)
    monkeypatch.setattr(kernel_jobs, "device_seconds", lambda call, device: call() / 2 if call() > 1 else None)
    host, device = kernel_jobs._apart({"a": lambda: 3.0, "b": lambda: 1.0}, CUDA)
    assert host == {"a": 3.0, "b": 1.0}
    assert device == {"a": 1.5}
    assert kernel_jobs._apart({"a": lambda: 3.0}, torch.device("cpu")) == ({}, {})


def test_device_seconds_add_up_kernels(monkeypatch):
    """Of what the profiler saw on the device, in microseconds there; the median of some calls."""
    durations = iter([[10, 20], [1, 2], [30, 40]])

    def events(call, device):
        return [
            types.SimpleNamespace(time_range=types.SimpleNamespace(elapsed_us=lambda t=t: t)) for t in next(durations)
        ]

    monkeypatch.setattr(measure, "device_events", events)
    assert measure.device_seconds(lambda: None, CUDA, 3) == pytest.approx(30e-6)
    monkeypatch.setattr(measure, "device_events", lambda call, device: None)
    assert measure.device_seconds(lambda: None, CUDA, 3) is None


def test_a_gpu_is_kept_busy_for_as_long_as_the_host_needs(monkeypatch):
    """5 ms at least, and half as long again as the host takes."""
    slept = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    timer = measure.Timer(CUDA)
    assert timer(lambda: None) == timer(lambda: None, host=0.02) == 1e-3
    assert slept == [10_000_000, 60_000_000]


def test_tables():
    """Columns are as wide as their widest cell; None is empty."""
    table = Table("title", ("method", "ms"))
    table.add("a", 12.5)
    table.add("longer than that", None)
    assert str(table).splitlines() == [
        "title",
        "method              ms",
        "-" * 22,
        "a                 12.5",
        "longer than that",
    ]
