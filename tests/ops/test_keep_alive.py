"""What keeps gradients alive on a GPU, on the CPU: streams, events and tensors are replaced by ones that record."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from accumkernels import ops
from accumkernels.ops import keep_alive
from accumkernels.ops.keep_alive import keep_until_done

MANY = 100
DEVICE = torch.device("cuda", 0)


class Gradient:
    """Stands in for a CUDA tensor, and writes down which streams were recorded for it."""

    is_cuda, device = True, DEVICE

    def __init__(self, nbytes=1024):
        self.nbytes = nbytes
        self.recorded = []

    def record_stream(self, stream):
        self.recorded.append(stream.cuda_stream)


class Stream:
    """Stands in for torch.cuda.Stream."""

    device_index = 0

    def __init__(self, handle):
        self.cuda_stream = handle


class Machine:
    """The current stream, whether it is being captured, and whether what was queued has run."""

    def __init__(self):
        self.stream = Stream(0)
        self.capturing = False
        self.has_run = True
        self.events = []


@pytest.fixture
def machine(monkeypatch):
    """A device whose work has run, outside of a capture; nothing is held from other tests."""
    machine = Machine()

    class Event:
        def record(self, stream):
            machine.events.append(stream.cuda_stream)

        def query(self):
            return machine.has_run

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: machine.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(keep_alive, "_held", {})
    return machine


def gradients(count=MANY, nbytes=1024):
    """New ones, of so many bytes each."""
    return [Gradient(nbytes) for _ in range(count)]


def is_recorded(grads, stream=0):
    """Whether each was recorded once, for that stream."""
    return [grad.recorded for grad in grads] == [[stream]] * len(grads)


def is_untouched(grads):
    """Whether nothing was recorded for any."""
    return not any(grad.recorded for grad in grads)


@pytest.mark.parametrize(
    ("count", "nbytes", "capturing"),
    [(3, 1024, False), (MANY, 2**20, False), (MANY, 1024, True)],
    ids=["few", "large", "captured"],
)
def test_recorded_at_once(machine, count, nbytes, capturing):
    """Few do not pay for an event, large ones are not to stay, and a capture does not allow to ask for events."""
    machine.capturing = capturing
    grads = gradients(count, nbytes)
    keep_until_done(grads)
    assert is_recorded(grads)
    assert machine.events == []


def test_many_small_ones_are_held(machine):
    """Until the next ones come; no call for each of them where their kernels have run by then."""
    grads = gradients()
    alive = weakref.ref(grads[0])
    keep_until_done(grads)
    assert is_untouched(grads)
    assert machine.events == [0]
    del grads
    gc.collect()
    assert alive() is not None
    keep_until_done(gradients())
    gc.collect()
    assert alive() is None


def test_recorded_where_the_device_lags_behind(machine):
    """The ones before are freed then, and the allocator has to wait for their kernels."""
    first, second = gradients(), gradients()
    keep_until_done(first)
    machine.has_run = False
    keep_until_done(second)
    assert is_recorded(first)
    assert is_untouched(second)


def test_the_same_ones_twice(machine):
    """Checked, then added: both kernels are queued before anything is freed."""
    grads = gradients()
    machine.has_run = False
    keep_until_done(grads)
    keep_until_done(grads)
    assert is_untouched(grads)
    assert machine.events == [0, 0]


def test_streams_hold_their_own(machine):
    """Kernels of one stream having run says nothing of another's."""
    first, second = gradients(), gradients()
    keep_until_done(first)
    machine.has_run = False
    machine.stream = Stream(7)
    keep_until_done(second)
    assert is_untouched(first + second)
    keep_until_done(gradients())
    assert is_untouched(first)
    assert is_recorded(second, stream=7)


def test_nothing_for_other_devices(machine):
    """Nor for none."""
    keep_until_done([])
    keep_until_done([torch.zeros(2)] * MANY)
    assert machine.events == []


@pytest.mark.parametrize("op", ["accumulate_", "check_finite_"])
def test_native_ops_of_cuda_tensors_keep_gradients(monkeypatch, op):
    """These are what a CUDA device gets; users read the same name."""
    monkeypatch.setattr(ops.native, "unavailable", lambda device: None)
    module, kept = ops.select("native", torch.device("cuda", 0)), []
    assert ops.name(module) == ops.name(ops.select("native", torch.device("cpu"))) == "native"
    monkeypatch.setattr(module, "keep_until_done", kept.append)
    grads, layout = [torch.ones(3)], torch.tensor([[0, 3]])
    found, flags = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
    if op == "accumulate_":
        buffer = torch.zeros(32)
        module.accumulate_(buffer, torch.zeros(4, dtype=torch.float64), grads, [0], [True], layout, layout, weight=2.0)
        assert buffer[:3].tolist() == [2, 2, 2]
    else:
        grads[0][1] = torch.inf
        module.check_finite_(grads, [0], found, flags, tag=3)
        assert (found.item(), flags.item()) == (1, 3)
    assert len(kept) == 1 and kept[0] is grads
    assert module.norm_ is ops.native.norm_


@pytest.mark.gpu
def test_memory_is_not_handed_out_before_it_was_read():
    """Gradients of a side stream, read on the default stream behind other work, and freed at once."""
    buffer = torch.zeros(MANY * 256, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        grads = [torch.ones(256, device="cuda") for _ in range(MANY)]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda._sleep(50_000_000)
    for view, grad in zip(buffer.split(256), grads, strict=True):
        view.add_(grad)
    keep_until_done(grads)
    del grads, grad
    with torch.cuda.stream(side):
        others = [torch.full((256,), torch.nan, device="cuda") for _ in range(MANY)]
    torch.cuda.synchronize()
    assert len(others) == MANY
    assert buffer.eq(1).all()
