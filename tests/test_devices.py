"""What is asked of accelerators, on the CPU: streams, events and tensors are replaced by ones that record.

More of it runs on the simulated device.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import accumkernels as ak
from accumkernels import devices
from accumkernels.devices import keep_until_done
from accumkernels.ops import triton

MANY = 100
DEVICE = torch.device("cuda", 0)


class Gradient:
    """Stands in for a tensor on an accelerator, and writes down which streams were recorded for it."""

    device = DEVICE

    def __init__(self, nbytes=1024):
        self.nbytes = nbytes
        self.recorded = []

    def record_stream(self, stream):
        self.recorded.append(stream.number)


class Stream:
    """Stands in for torch.Stream."""

    def __init__(self, number):
        self.number = number


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
        def __init__(self, device):
            assert device == DEVICE

        def record(self, stream):
            machine.events.append(stream.number)

        def query(self):
            return machine.has_run

    monkeypatch.setattr(devices, "current_stream", lambda device: machine.stream)
    monkeypatch.setattr(devices, "stream_id", lambda device: machine.stream.number)
    monkeypatch.setattr(devices, "captures", lambda stream, device: machine.capturing)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(devices, "_held", {})
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


def test_threads_that_share_a_stream(machine):
    """A thread that is slow to put its tensors down does not drop those that another has put down meanwhile."""
    first, second, third = gradients(), gradients(), gradients()
    keep_until_done(first)
    machine.has_run = False
    asked, go_on = threading.Event(), threading.Event()

    class Slow(list):
        """A list that is copied slowly, which is the last thing before the tensors are put down."""

        def __iter__(self):
            asked.set()
            go_on.wait(timeout=0.2)
            return super().__iter__()

    slow = threading.Thread(target=keep_until_done, args=(Slow(second),))
    slow.start()
    asked.wait(timeout=30)
    quick = threading.Thread(target=keep_until_done, args=(third,))
    quick.start()
    quick.join(timeout=0.05)
    go_on.set()
    slow.join()
    quick.join()
    (held,) = devices._held.values()
    dropped = [grads for grads in (first, second, third) if held.tensors != grads]
    assert len(dropped) == 2 and all(map(is_recorded, dropped))


def test_where_the_backend_records_no_streams(machine):
    """The host waits then: slow, but right."""
    waits = []
    machine.stream.synchronize = lambda: waits.append(machine.stream.number)

    class Unrecorded(Gradient):
        def record_stream(self, stream):
            raise NotImplementedError

    keep_until_done([Unrecorded()])
    assert waits == [0]


def test_triton_keeps_its_tables_until_after_the_launches(monkeypatch):
    """Before them, an event would say nothing of the kernels, and memory would be handed out while they read it."""
    steps = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(devices, "keep_until_done", lambda tensors: steps.append(list(tensors)))
    with triton._launching("norm_", DEVICE) as tables:
        tables.append("a table")
        steps.append("launched")
    assert steps == ["launched", ["a table"]]


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


# ---- Which devices there are


def test_a_device_without_fp64_is_refused(monkeypatch):
    """When the accumulator is built, with the parameter's name and the reason; frozen parameters may be there."""
    devices.obstacle.cache_clear()
    real = torch.ones

    def ones(*shape, dtype=None, device=None):
        if dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype\nas the MPS framework does not support it")
        return real(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "ones", ones)
    assert devices.obstacle(torch.device("cpu")) is None
    device = torch.device("mps", 0)
    assert devices.obstacle(device) == (
        "mps:0 has no fp64, in which weights and norms are counted: Cannot convert a MPS Tensor to float64 dtype"
    )
    devices.obstacle.cache_clear()
    monkeypatch.setattr(devices, "obstacle", lambda device: "cpu has no fp64")
    with pytest.raises(ValueError, match="params: 'weight' cannot be trained here: cpu has no fp64"):
        ak.FusedAccumulator(torch.nn.Linear(2, 2))


def test_a_device_that_computes_fp64_in_fp32_is_refused(monkeypatch):
    """Some NPUs do, with a warning."""
    devices.obstacle.cache_clear()
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: torch.zeros(shape))
    assert "has no fp64" in devices.obstacle(torch.device("xpu", 0))
    devices.obstacle.cache_clear()


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"memory_clock_rate": 3_201_000, "memory_bus_width": 6144}, 4.92e12),  # an H200; its data sheet says 4.8 TB/s
        ({"memory_clock_rate": 7_501_000, "memory_bus_width": 192}, 360e9),  # an RTX 3060
        ({"memory_clock_rate": 0, "memory_bus_width": 192}, 360e9),  # what some virtual machines say
        ({}, 360e9),
    ],
)
def test_bandwidth(known, expected, monkeypatch):
    """By clock and width as CUDA has them; the default is that of a small card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**known))
    assert devices.bytes_per_second(torch.device("cuda", 0)) == pytest.approx(expected, rel=0.01)
    assert devices.bytes_per_second(torch.device("xpu", 0)) == 360e9


def test_without_any_accelerator():
    """The CPU is the default, and has no streams."""
    cpu = torch.device("cpu")
    if not torch.accelerator.is_available():
        assert devices.default() == cpu and devices.accelerators() == []
    assert not devices.is_accelerator(cpu) and not devices.counts_memory(cpu) and not devices.is_capturing(cpu)
    assert devices.with_index(cpu) == cpu


def test_every_kind_is_listed(monkeypatch):
    """Also a GPU beside an accelerator of another kind, of which torch.accelerator alone speaks then."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    assert list(map(str, devices.accelerators())) == ["xpu:0", "cuda:0", "cuda:1"]
    assert list(map(str, devices.with_random_state())) == ["xpu:0"]
    assert devices.default() == torch.device("xpu")
    assert all(map(devices.is_accelerator, devices.accelerators()))


@pytest.mark.parametrize(
    ("dtype", "capability", "hip", "adds"),
    [
        (torch.float16, (7, 5), None, True),
        (torch.bfloat16, (7, 5), None, False),
        (torch.bfloat16, (8, 0), None, True),
        (torch.float16, (9, 4), "7.0", False),
    ],
)
def test_which_gpus_add_products(dtype, capability, hip, adds, monkeypatch):
    """bf16 only where it is multiplied without emulation; on ROCm none has run."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert devices.adds_products(DEVICE, dtype) is adds
    assert not devices.adds_products(torch.device("xpu", 0), dtype)


def test_what_graphs_have_reserved(monkeypatch):
    """Idle blocks of their pools, on this device; what tensors take of them counts as allocated."""
    segments = [
        {"device": device, "total_size": 100, "allocated_size": 30, "segment_pool_id": pool}
        for device in (0, 1)
        for pool in ((0, 0), (0, 1))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert devices.idle_bytes_of_graphs(DEVICE) == 70
    assert devices.idle_bytes_of_graphs(torch.device("xpu", 0)) == 0


def test_random_state_of_any_kind(monkeypatch):
    """By device, except where one generator serves all."""
    calls = []
    of_device = SimpleNamespace(
        get_rng_state=lambda *device: device, set_rng_state=lambda *arguments: calls.append(arguments)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: of_device)
    for device, state in ((torch.device("xpu", 1), (torch.device("xpu", 1),)), (torch.device("mps", 0), ())):
        assert devices.random_state(device) == state
        devices.set_random_state(device, state)
    assert calls == [((torch.device("xpu", 1),), torch.device("xpu", 1)), ((),)]


# ---- Captures


@pytest.mark.parametrize("knows", [False, True], ids=["torch 2.10", "newer"])
def test_whether_a_stream_is_captured(knows, monkeypatch):
    """It says so itself in newer torch; before, its device's module says so of the current one."""
    current = []

    class Captured:
        def __enter__(self):
            current.append(self)

        def __exit__(self, *error):
            current.pop()

    captured, other = Captured(), Captured()
    if knows:
        captured.is_capturing, other.is_capturing = lambda: True, lambda: False
    kind = devices._KINDS["cuda"]._replace(is_capturing=lambda: current[-1] is captured)
    monkeypatch.setitem(devices._KINDS, "cuda", kind)
    assert devices.captures(captured, DEVICE) and not devices.captures(other, DEVICE)
    assert devices.captures(captured, torch.device("xpu", 0)) is knows  # torch 2.10 has no captures there
    monkeypatch.setattr(devices, "current_stream", lambda device: captured)
    assert devices.is_capturing(DEVICE)


def test_order_of_streams_in_and_out_of_a_capture(monkeypatch):
    """A graph does not wait for what ran before it, nor what runs after it for the capture; inside it streams wait."""
    log, now, capturing = [], [], set()

    class Named:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append((self.name, other.name))

    streams = {name: Named(name) for name in ("main", "side", "branch")}
    monkeypatch.setattr(devices, "current_stream", lambda device: streams[now[-1]])
    monkeypatch.setattr(devices, "stream_id", lambda device: now[-1])
    monkeypatch.setattr(devices, "captures", lambda stream, device: stream.name in capturing)
    order = devices.StreamOrder()

    def take(name):
        now.append(name)
        order.take(DEVICE)

    take("main")
    take("main")
    take("side")
    assert log == [("side", "main")]
    take("main")
    capturing |= {"side", "branch"}
    take("side")
    take("branch")
    assert log[1:] == [("main", "side"), ("branch", "side")]
    take("side")
    take("side")
    capturing.clear()
    take("main")
    assert log[3:] == [("side", "branch"), ("main", "side")]
