"""A planted fault of each kind is seen, and the right program beside it is not blamed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests import simulated_device as sim


@pytest.fixture
def side():
    """A stream beside the default one."""
    return torch.Stream("sim:0")


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", ["read after write", "write after read", "write after write"])
def test_race(side, kind, ordered):
    """Two streams touch the same bytes; `wait_stream` orders them."""
    x = torch.zeros(4, 4, device="sim:0")
    first, second = (part == "write" for part in reversed(kind.split(" after ")))

    def touch(write):
        return x.zero_() if write else x.sum()

    with sim.watch() as seen:
        touch(first)
        if ordered:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            touch(second)
            x.record_stream(side)
    assert [report[1].split(":")[0] for report in seen.reports] == ([] if ordered else [kind])


def test_bytes_not_tensors(side):
    """Streams may work on different columns of one tensor."""
    x = torch.zeros(6, 6, device="sim:0")
    side.wait_stream(torch.accelerator.current_stream())
    with sim.watch() as seen:
        x[:, :3].add_(1)
        with side:
            x[:, 3:].add_(1)
    seen.check()
    with sim.watch() as seen:
        x[:, :4].add_(1)
        with side:
            x[:, 3:].add_(1)
    assert seen.reports


def test_events_order(side):
    """What came before the event's record, and nothing after."""
    x, y = torch.zeros(2, 4, device="sim:0").unbind()
    event = torch.Event("sim:0")
    side.wait_stream(torch.accelerator.current_stream())
    with sim.watch() as seen:
        x.add_(1)
        event.record()
        y.add_(1)
        side.wait_event(event)
        with side:
            x.add_(1)
        seen_before = len(seen.reports)
        with side:
            y.add_(1)
    assert seen_before == 0 and len(seen.reports) == 1


def test_devices_are_not_ordered_with_each_other():
    """A copy between devices waits for both; the host orders what it waited for."""
    x = torch.zeros(4, device="sim:0")
    with sim.watch() as seen:
        y = x.add_(1).to("sim:1")
        x.add_(1)  # after the copy has read it
        y.add_(1)
    seen.check()
    other = torch.Stream("sim:1")
    with sim.watch() as seen:
        with other:
            y.add_(1)
        y.add_(1)
    assert seen.reports


@pytest.mark.parametrize("safe", ["", "record_stream", "wait", "synchronize", "nothing allocated"])
def test_memory_freed_too_soon(side, safe):
    """A block that another stream still reads may be given to the next who allocates."""
    side.wait_stream(torch.accelerator.current_stream())
    with sim.watch() as seen:
        x = torch.zeros(4, device="sim:0")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x + 1
        if safe == "record_stream":
            x.record_stream(side)
        del x
        if safe == "wait":
            torch.accelerator.current_stream().wait_stream(side)
        if safe == "synchronize":
            side.synchronize()
        if safe != "nothing allocated":
            torch.zeros(2, device="sim:0")
    assert [kind for kind, _ in seen.reports] == ([] if safe else ["free"])
    del y


def test_fresh_memory_is_nan():
    """Of new tensors and of those whose memory was freed."""
    for _ in range(2):
        x = torch.empty(5, device="sim:0")
        assert x.isnan().all()
        x.zero_()
        del x
    assert (torch.empty(3, dtype=torch.int64, device="sim:0") == -1).all()
    assert torch.empty(3, dtype=torch.bfloat16, device="sim:0").isnan().all()


@pytest.mark.parametrize("wait", ["stream", "event", "device", "query"])
def test_copies_to_the_host_arrive_when_somebody_waits(side, wait):
    """And not when another stream is waited for."""
    x = torch.arange(4.0, device="sim:0")
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    late = x.to("cpu", non_blocking=True)
    event = torch.Event("sim:0")
    event.record()
    side.synchronize()
    assert pinned.isnan().all() and late.isnan().all()
    if wait == "stream":
        torch.accelerator.current_stream().synchronize()
    elif wait == "event":
        event.synchronize()
    elif wait == "device":
        torch.accelerator.synchronize()
    else:
        while not event.query():
            assert pinned.isnan().all()
    assert pinned.tolist() == late.tolist() == [0, 1, 2, 3]


def test_pinned_memory_changed_under_a_copy():
    """From there to the device; after the copy it may be."""
    pinned = torch.ones(4).pin_memory()
    x = torch.zeros(4, device="sim:0")
    with sim.watch() as seen:
        x.copy_(pinned, non_blocking=True)
        torch.accelerator.synchronize()
        pinned.fill_(2)
    seen.check()
    with sim.watch() as seen:
        x.copy_(pinned, non_blocking=True)
        pinned.fill_(3)
    assert [kind for kind, _ in seen.reports] == ["host"]


def test_to_the_host_and_back_without_waiting():
    """The stream orders the two copies, although the host has nothing yet."""
    x = torch.arange(4.0, device="sim:0")
    pinned = torch.zeros(4, pin_memory=True)
    with sim.watch() as seen:
        pinned.copy_(x, non_blocking=True)
        y = pinned.to("sim:0", non_blocking=True)
        assert pinned.isnan().all()
    seen.check()
    assert seen.waits == []
    assert y.tolist() == [0, 1, 2, 3]


def test_waits_are_counted_with_their_callers():
    """In the order in which they happen."""
    x = torch.ones(4, device="sim:0")
    pinned = torch.zeros(4, pin_memory=True)
    with sim.watch() as seen:
        x.sum().item()
        x.cpu()
        x.nonzero()
        x[x > 0]
        x[x > 100] = x[:0]
        torch.ones(3).to("sim:0")
        torch.accelerator.synchronize()
        x.add_(1).mul_(2)  # none from here on
        x[x > 100] = 0
        pinned.copy_(x, non_blocking=True)
        x.copy_(pinned, non_blocking=True)
    what = ["item", "a copy to the host", "aten::nonzero", "aten::nonzero", "aten::_index_put_impl_"]
    what += ["a copy from the host", "synchronize"]
    assert [wait for wait, _ in seen.waits] == what
    assert all("test_faults.py" in caller and "test_waits_are_counted" in caller for _, caller in seen.waits)


def test_waits_in_the_device_thread():
    """The caller is the hook there."""
    x = torch.ones(4, device="sim:1", requires_grad=True)

    def hook(grad):
        grad.sum().item()

    y = x * 2
    y.register_hook(hook)
    with sim.watch() as seen:
        y.sum().backward()
    ((what, caller),) = seen.waits
    assert what == "item" and caller.endswith(" hook")


def test_limit():
    """Of the bytes in use, as torch.OutOfMemoryError; an allocation may be chosen to fail."""
    free, total = torch.sim.mem_get_info(0)
    try:
        sim.limit(0, total - free + 4096)
        torch.empty(1024, device="sim:0")
        with pytest.raises(torch.OutOfMemoryError, match="sim:0 has a limit of"):
            torch.empty(1025, device="sim:0")
    finally:
        sim.limit(0, total)
    sim.fail_after(1, 1)
    kept = torch.empty(4, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4, device="sim:1")
    assert torch.empty(4, device="sim:1").shape == kept.shape


def test_the_host_cannot_touch_it():
    """It ends the process, which says why."""
    code = "import ctypes, torch\nfrom tests import simulated_device as sim\nsim.load()\n"
    code += "ctypes.string_at(torch.ones(4, device='sim:1').data_ptr(), 4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode < 0 and "The host touches memory of device sim:1" in done.stderr


def test_tensors_of_two_devices_do_not_mix():
    """As on a GPU; numbers of the CPU do."""
    x = torch.ones(4, device="sim:0")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4, device="sim:1")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4)
    assert (x + torch.tensor(1.0)).sum() == 8
