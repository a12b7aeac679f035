"""Windows whose sums are in host memory: the same bits as on one device, no wait, no race, and bounded memory.

OFFLOAD_WINDOWS=1000 in the environment trains as many windows in each case, instead of 8.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import threading

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels import FusedAccumulator
from accumkernels.offload import host, sink
from tests import simulated_device as sim
from tests.support.offloaded import BF16, CASES, Twins, assert_same, waiting


@pytest.mark.parametrize("case", CASES)
def test_windows(case, monkeypatch):
    """Unequal micro-batches, tied, frozen and unfrozen parameters, overflows, clipping; the worker at any pace."""
    twins = Twins(**CASES[case])
    stagger(monkeypatch, twins.random)
    overflows = 0.0 if CASES[case].get("overflow", "") is None else 0.1
    for number in range(int(os.environ.get("OFFLOAD_WINDOWS", 8))):
        frozen = [model.frozen for model in (twins.model, twins.stock, twins.truth)]
        if number % 8 in (3, 6):
            for module in frozen:
                module.requires_grad_(number % 8 == 3)
        twins.window(twins.random.randint(1, 8), overflows, 0.5 if number % 2 else None, grows=number % 8 == 3)


def stagger(monkeypatch, random):
    """Let the other threads run now and then before the worker goes on."""
    wait, turns = sink.HostBucket.wait, threading.Event()

    def late(bucket):
        for _ in range(random.choice((0, 0, 1, 30))):
            turns.wait(0)
        wait(bucket)

    monkeypatch.setattr(sink.HostBucket, "wait", late)


# ---- each ordering, taken away


def mutated(monkeypatch, module, old, new):
    """Let engines use a module with other source."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, old
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    copy = importlib.util.module_from_spec(spec)
    copy.__package__ = module.__package__
    exec(compile(source.replace(old, new), module.__file__, "exec"), copy.__dict__)
    if module is sink:
        monkeypatch.setattr("accumkernels.window.micro_batch.Offload", copy.Offload)
    else:
        monkeypatch.setattr("accumkernels.engine.Slots", copy.Slots)
    return copy


FAULTS = {  # what is taken away, where, and what the test then says
    "host wait": (sink, "self.copied[-1].synchronize()", "pass", "a sum differs"),
    "wait for the gradient": (sink, "copier.wait_stream(current)", "pass", "race: read after write"),
    "early free": (sink, "alive.copied.wait()", "pass", "free: "),
    "slot reuse": (
        sink,
        "self._slots.changed.wait_for(lambda: slot.holder is None)",
        "pass",
        "a sum differs",
    ),
    "rounding over a copy": (
        host,
        "self._underway.pop().synchronize()",
        "self._underway.pop()",
        "host: the host changed pinned memory",
    ),
    "record_stream": (
        sink,
        "self._alive[device] = _Alive([*inputs, *made_of], [current, *made_by], copied)",
        "[tensor.record_stream(copier) for tensor in (*inputs, *made_of)]",
        "record_stream",
    ),
    "blocking copy": (sink, "output.copy_(input, non_blocking=True)", "output.copy_(input)", "a copy to the host"),
    "letting go": (
        sink,
        "        self._let_go(device)\n        self._alive[device] = ",
        "        self.kept = [*vars(self).get('kept', ()), self._alive.get(device)]\n        self._alive[device] = ",
        "bytes on the device",
    ),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_every_ordering_is_needed(fault, monkeypatch):
    """What waits for what: without any one of these waits this test fails."""
    if fault is None:
        module = sink
    else:
        module, old, new, message = FAULTS[fault]
        module = mutated(monkeypatch, module, old, new)
    if module.__name__ == sink.__name__:
        meet_in_slots(monkeypatch, module, arrives=fault in (None, "slot reuse"))
    monkeypatch.setattr(torch.Tensor, "record_stream", refuse)  # it bounds nothing, since the host runs ahead
    if fault is None:
        train_and_check()
    else:
        with pytest.raises(AssertionError, match=message):
            train_and_check()


def refuse(*_):
    """Fail."""
    raise AssertionError("record_stream")


def meet_in_slots(monkeypatch, module, arrives):
    """Let the worker read a slot only when the next gradient of the same parameter wants it, or has it.

    Args:
        monkeypatch: The fixture.
        module: The sink's.
        arrives: Whether that gradient arrives before the worker reads, which orders everything else, too.
    """
    wanted = threading.Event()
    micro_batches = []

    class Watched(threading.Condition):
        def wait_for(self, predicate, timeout=None):
            wanted.set()
            return super().wait_for(predicate, timeout)

    copy, wait = module.Offload._copy, module.HostBucket.wait
    init = module.Offload.__init__

    def watched_init(self, *args):
        init(self, *args)
        self._slots.changed = Watched()

    def watched_copy(self, *args):
        copy(self, *args)
        micro_batches.append(self._buckets)
        if len({id(buckets) for buckets in micro_batches}) > 1:
            wanted.set()

    def late(bucket):
        if bucket.copied:
            wanted.wait(10)
        wait(bucket)
        if arrives:
            sim.settle()

    monkeypatch.setattr(module.Offload, "__init__", watched_init)
    monkeypatch.setattr(module.Offload, "_copy", watched_copy)
    monkeypatch.setattr(module.HostBucket, "wait", late)


def train_and_check():
    """Two micro-batches, two steps by hand, on layers of equal size: bits, reports, waits and bytes."""
    torch.manual_seed(0)
    size = 64
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(12)]).to("sim:0", BF16)
    nbytes = size * size * BF16.itemsize
    acc = FusedAccumulator(model, cpu_offload=True, bucket_bytes=nbytes)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    batches = [torch.randn(2, size).to("sim:0", BF16) for _ in range(2)]
    params = list(model.parameters())
    grads = [torch.autograd.grad(model(x).float().sum(), params) for x in batches]
    sums = [first.cpu().float() + second.cpu().float() for first, second in zip(*grads, strict=True)]
    with sim.watch() as seen:
        with waiting() as waits:
            for x in batches:
                loss = model(x).float().sum()
                before = torch.accelerator.memory_allocated()
                torch.accelerator.reset_peak_memory_stats()
                acc.backward(loss)
                peak = torch.accelerator.max_memory_allocated() - before
                assert peak <= 3 * nbytes + 8 * 512, f"{peak} bytes on the device"  # two buckets, a gradient
        found = [acc.main_grad(p).clone() for p in params]
        masters = [p.detach().clone() for p in acc.parameters()]
        acc.finalize(optimizer)
        optimizer.step()
        optimizer.step()
    seen.check()
    assert not waits, waits
    for sum_, expected in zip(found, sums, strict=True):  # all of them first: one that is NaN drops the step
        assert_same(sum_, expected, "a sum")
    for p, master, expected in zip(params, masters, sums, strict=True):
        grad = expected / 2
        assert_same(p, (master.sub(grad, alpha=0.1)).sub(grad, alpha=0.1).to(BF16), "a weight")


def test_a_slot_is_freed_once(monkeypatch):
    """Free again, it would be the third micro-batch's, while the second's gradient in it waits to be added."""
    submitted, second, arrived, third = [], threading.Event(), threading.Event(), threading.Event()
    take, copy, submit = sink.Offload._take, sink.Offload._copy, sink.Offload.submit
    wait, drop = sink.HostBucket.wait, sink._Addition.drop

    def watched_submit(offload, *args):
        submit(offload, *args)
        submitted.append(offload)
        if len(submitted) == 2:
            second.set()

    def late_drop(job):  # after the second micro-batch has got the slots
        second.wait(10)
        drop(job)

    def late(bucket):  # it is added when the third wants the slots, or has one
        wait(bucket)
        if second.is_set() and bucket.used:
            arrived.set()
            third.wait(10)

    def watched_take(offload, host, segment, grad):
        if len(submitted) == 2:
            arrived.wait(10)
            if offload._slots[segment.param].holder is not None:
                third.set()
        return take(offload, host, segment, grad)

    def watched_copy(*args):
        copy(*args)
        if len(submitted) == 2:
            third.set()

    monkeypatch.setattr(sink.Offload, "submit", watched_submit)
    monkeypatch.setattr(sink.Offload, "_take", watched_take)
    monkeypatch.setattr(sink.Offload, "_copy", watched_copy)
    monkeypatch.setattr(sink.HostBucket, "wait", late)
    monkeypatch.setattr(sink._Addition, "drop", late_drop)
    model, acc, _ = deep()
    params = list(model.parameters())
    grads = [torch.autograd.grad(model(x), params) for x in inputs(3)]
    for x in inputs(3):
        acc.backward(model(x))
    for p, *of_each in zip(params, *grads, strict=True):
        first, second_, third_ = (grad.cpu().float() for grad in of_each)
        assert_same(acc.main_grad(p), first + second_ + third_, "a sum")


def test_dropping_a_window_waits_for_what_is_being_added(monkeypatch):
    """Or it would be added to the next."""
    begun, waits, run, wait = threading.Event(), threading.Event(), sink._Addition.run, sink.Worker.wait

    def late(job):
        begun.set()
        waits.wait(1)
        run(job)

    def watched(worker):
        waits.set()
        wait(worker)

    monkeypatch.setattr(sink._Addition, "run", late)
    monkeypatch.setattr(sink.Worker, "wait", watched)
    model, acc, _ = deep()
    dropped, kept = inputs(2)
    acc.backward(model(dropped))
    begun.wait(10)
    acc.zero_()
    acc.backward(model(kept))
    params = list(model.parameters())
    for p, grad in zip(params, torch.autograd.grad(model(kept), params), strict=True):
        assert_same(acc.main_grad(p), grad.cpu().float(), "a sum")


# ---- nothing of a micro-batch is added before its backward has ended


class Failing(torch.autograd.Function):
    """Raises in backward, in the device's thread."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.error is not None:
            raise ctx.error
        return grad, None


class Deep(nn.Module):
    """Fails in its first layer, when most buckets are on their way."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x, error=None):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0:
                x = Failing.apply(x, error)
        return x.float().square().mean()


def deep(**options):
    """Such a model, its accumulator and its optimizer."""
    torch.manual_seed(0)
    model = Deep().to("sim:0", BF16)
    acc = FusedAccumulator(model, cpu_offload=True, bucket_bytes=600, **options)
    return model, acc, torch.optim.AdamW(acc.parameters(), fused=True)


def inputs(count):
    """So many inputs, always the same."""
    return [torch.randn(3, 16, generator=torch.Generator().manual_seed(n)).to("sim:0", BF16) for n in range(count)]


def run(model, acc, optimizer, failures=(), last=()):
    """Train three windows; before some micro-batches one fails, and after some, such as the last of a window."""

    def fail(failure):
        before = [buffer.clone() for buffer in acc.flat_buffers]
        failure(model, acc, x)
        for buffer, old in zip(acc.flat_buffers, before, strict=True):
            assert_same(buffer, old, "a sum after a failure")

    for number, x in enumerate(inputs(9)):
        if number in failures:
            fail(failures[number])
        acc.backward(model(x), weight=number + 1.0)
        if number in last:
            fail(last[number])
        if number % 3 == 2:
            acc.step(optimizer, max_norm=1.0)
    return [p.detach().cpu() for p in model.parameters()]


def raised(error):
    """A failure of `acc.backward`."""

    def fail(model, acc, x):
        loss = model(100 * x, error)
        with pytest.raises(type(error)):
            acc.backward(loss)

    return fail


def out_of_memory(model, acc, x):
    """A failure in the middle of `acc.backward`."""
    loss = model(100 * x)
    sim.fail_after(0, 12)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            acc.backward(loss)
    finally:
        sim.fail_after(0, -1)


def of_the_loop(model, acc, x):
    """A failure of a loop's own backward."""
    with pytest.raises(ArithmeticError):
        model(100 * x, ArithmeticError()).backward()
    acc.discard()


@pytest.mark.parametrize("overflow", ["window", "microbatch", "raise"])
def test_a_failure_adds_nothing(overflow):
    """Errors, out of memory, and an error in a loop's own backward leave the sums and the window as they were."""
    expected = run(*deep(overflow=overflow))
    failures = {1: raised(ValueError()), 4: out_of_memory, 5: raised(KeyboardInterrupt()), 7: of_the_loop}
    found = run(*deep(overflow=overflow), failures)
    for p, q in zip(found, expected, strict=True):
        assert_same(p, q, "a weight")


def test_weights_do_not_meet_gradients_that_a_failure_left():
    """Copies of these may still be on their way to the host when the step's weights go through the same memory."""
    expected = run(*deep())
    found = run(*deep(), last={2: raised(ValueError()), 8: raised(ValueError())})
    for p, q in zip(found, expected, strict=True):
        assert_same(p, q, "a weight")


def test_a_loop_of_its_own():
    """With buckets in a loop's own backwards, and two of them in one micro-batch, sums are those of both."""
    model, acc, _ = deep(release="backward")
    first, second = inputs(2)
    params = list(model.parameters())
    grads = [torch.autograd.grad(model(x), params) for x in (first, second)]
    model(first).backward()
    model(second).backward()
    acc.accumulate()
    for p, one, two in zip(params, *grads, strict=True):
        assert_same(acc.main_grad(p), one.cpu().float() + two.cpu().float(), "a sum")
    with pytest.raises(ArithmeticError):
        model(first, ArithmeticError()).backward()
    with pytest.raises(RuntimeError, match=r"acc.discard\(\)"):
        acc.backward(model(first))
    acc.discard()
    acc.backward(model(first))
    assert acc.micro_batches == 2


def test_overflow_raises():
    """`overflow="raise"` names the parameters, and the window is as it was."""
    model, acc, optimizer = deep(overflow="raise")
    x, *_ = inputs(1)
    acc.backward(model(x))
    before = acc.flat_buffers[0].clone()
    with pytest.raises(FloatingPointError, match="micro-batch 1 of the window dropped: .* gradients of layers.0"):
        acc.backward(model(x) * float("inf"))
    assert_same(acc.flat_buffers[0], before, "the sums")
    assert acc.micro_batches == 1
    acc.step(optimizer)
    assert not acc.step_was_skipped


def test_an_error_in_the_worker(monkeypatch):
    """It comes out of the next call, the window is broken until it is dropped, and nothing is wrong afterwards."""
    model, acc, optimizer = deep()
    x, *_ = inputs(1)
    from accumkernels.window.micro_batch import Sums

    add = Sums.add

    def fails(self, *args, **kwargs):
        monkeypatch.setattr(Sums, "add", add)
        raise MemoryError("no memory for this")

    monkeypatch.setattr(Sums, "add", fails)
    acc.backward(model(x))
    with pytest.raises(RuntimeError, match="adding gradients in host memory failed: MemoryError: no memory for this"):
        acc.step(optimizer)
    with pytest.raises(RuntimeError, match="this window is broken"):
        acc.backward(model(x))
    acc.zero_()
    expected = run(*deep())
    for p, q in zip(run(model, acc, optimizer), expected, strict=True):
        assert_same(p, q, "a weight")


def test_interrupted_while_it_waits(monkeypatch):
    """Ctrl-C while the window's end waits for the worker loses nothing: `step` may be called again."""
    expected = run(*deep())
    model, acc, optimizer = deep()
    from accumkernels.offload.sink import Worker

    wait, interrupts = Worker.wait, [KeyboardInterrupt()] * 3

    def interrupted(self):
        if interrupts:
            raise interrupts.pop()
        wait(self)

    monkeypatch.setattr(Worker, "wait", interrupted)
    step = acc.step

    def again(*args, **kwargs):
        while True:
            try:
                return step(*args, **kwargs)
            except KeyboardInterrupt:
                assert acc.micro_batches == 3

    monkeypatch.setattr(acc, "step", again)
    for p, q in zip(run(model, acc, optimizer), expected, strict=True):
        assert_same(p, q, "a weight")
    assert not interrupts


@pytest.mark.parametrize("overflow", ["window", "microbatch", "raise"])
def test_gradients_go_out_in_buckets_whatever_may_be_dropped(overflow):
    """Two buckets and a gradient at most: all of a micro-batch is in host memory before any of it is added."""
    size = 64
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(12)]).to("sim:0", torch.bfloat16)
    nbytes = size * size * torch.bfloat16.itemsize
    with ak.FusedAccumulator(model, cpu_offload=True, bucket_bytes=nbytes, overflow=overflow) as acc:
        for _ in range(2):
            loss = model(torch.ones(2, size).to("sim:0", torch.bfloat16)).float().sum()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            acc.backward(loss)
            peak = torch.accelerator.max_memory_allocated() - before
            assert peak <= 3 * nbytes + 8 * 512, f"{peak} bytes on the device"
