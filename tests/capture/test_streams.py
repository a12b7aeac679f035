"""Which CUDA streams wait for which, on the CPU: torch's stream API is replaced by one that records."""

from __future__ import annotations

import pytest
import torch

from accumkernels.capture.streams import Streams

DEVICE = torch.device("cuda", 0)
OTHER = torch.device("cuda", 1)


class Stream:
    """Stands in for torch.cuda.Stream, and writes down what it waits for."""

    def __init__(self, name, device, log):
        self.name, self.device, self._log = name, device, log

    def wait_stream(self, other):
        if other is not self:
            self._log.append((self.name, other.name))

    def wait_event(self, event):
        self._log.append((self.name, event.recorded_on))


class Machine:
    """The current stream of each device."""

    def __init__(self):
        self.log = []
        names = {DEVICE: ("main", "side"), OTHER: ("main of 1",)}
        self.streams = {name: Stream(name, device, self.log) for device in names for name in names[device]}
        self.current = {0: self.streams["main"], 1: self.streams["main of 1"]}

    def use(self, name):
        stream = self.streams[name]
        self.current[stream.device.index] = stream


@pytest.fixture
def machine(monkeypatch):
    """Two devices, of which the first has a side stream; the default streams have the same handle, as CUDA's have."""
    machine = Machine()

    class Event:
        def record(self, stream):
            self.recorded_on = stream.name

    handles = {"main": 0, "main of 1": 0, "side": 7}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: machine.current[device.index])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: handles[machine.current[index].name], raising=False
    )
    return machine


def test_whoever_reads_waits_for_every_writer(machine):
    """And what it computes from them is waited for in turn; streams of one device do not wait for another's."""
    streams = Streams()
    for name in ("main", "side", "main of 1"):
        machine.use(name)
        streams.see(machine.streams[name].device)
    machine.use("main")
    streams.join()
    assert machine.log == [("main", "side")]
    machine.use("side")
    streams.join()
    assert machine.log[1:] == [("side", "main")]
    streams.forget()
    streams.join()
    assert len(machine.log) == 2


def test_a_reader_that_nobody_saw_before(machine):
    """The stream that joins is waited for by the next that does, although it made none of the tensors."""
    streams = Streams()
    streams.see(DEVICE)
    machine.use("side")
    streams.join()
    machine.use("main")
    streams.join()
    assert machine.log == [("side", "main"), ("main", "side")]
