"""Faults that the simulated device has found, which no test on a CPU could: each of them once more."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

import accumkernels as ak
from accumkernels.ranks.sender import ChunkSender
from tests import simulated_device as sim
from tests.simulated_device.training import Model

pytestmark = pytest.mark.filterwarnings("ignore:accumkernels")
WIDTH = 32
# No two ways of adding: each bucket alone, whole micro-batches, and products that are added where they are made.
WAYS = {
    "buckets": {"release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": False},
    "some buckets": {"release": "backward", "bucket_bytes": 6000, "fuse_weight_gradients": False},
    "whole": {"release": "microbatch", "fuse_weight_gradients": False},
    "fused": {"release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": True},
    "deferred": {"release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": "deferred"},
}


@pytest.fixture(autouse=True)
def small_weights_are_fused(monkeypatch):
    """As large ones are; the tests' would take seconds."""
    monkeypatch.setattr("accumkernels.capture.choice._SMALLEST_FUSED", 0)


def rows(way):
    """How many the batch has: few are worth keeping their products for another micro-batch."""
    return 1 if way["fuse_weight_gradients"] == "deferred" else 4


@pytest.fixture(params=WAYS)
def way(request):
    """Options of an accumulator."""
    return WAYS[request.param]


class Branches(nn.Module):
    """Layers on streams and devices of their own, whose outputs are added on the current stream of the first device.

    Branches advance layer by layer, so that backward changes between their streams, too. With `changes`, each forward
    has the streams in another order.
    """

    def __init__(self, devices=(0, 0), depth=3, seed=0, changes=False, bias=True):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias).to(f"sim:{index}") for index in devices) for _ in range(depth)
        )
        self.streams = [torch.Stream(f"sim:{index}") for index in devices]
        self.changes = changes

    def forward(self, x, parallel=True):
        if self.changes:
            self.streams.reverse()
        mains = [torch.accelerator.current_stream(stream.device) for stream in self.streams]
        values = [x.to(stream.device) for stream in self.streams]
        streams = self.streams if parallel else mains
        for value, stream, main in zip(values, streams, mains, strict=True):
            if parallel:
                stream.wait_stream(main)
                value.record_stream(stream)
        for layer in self.layers:
            for index, stream in enumerate(streams):
                with stream:
                    values[index] = layer[index](values[index]).tanh()
        for value, stream, main in zip(values, streams, mains, strict=True):
            if parallel:
                main.wait_stream(stream)
                value.record_stream(main)
        return torch.stack([value.to(x.device) for value in values]).sum(0)


class Embedded(nn.Module):
    """An embedding on a stream of its own, for which autograd does not wait where its rows are added as they are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, WIDTH).to("sim:0")
        self.linear = nn.Linear(WIDTH, WIDTH).to("sim:0")
        self.streams = [torch.Stream("sim:0")]
        self.tokens = torch.arange(48).to("sim:0") % 7

    def forward(self, x, parallel=True):
        main = torch.accelerator.current_stream(x.device)
        side = self.streams[0] if parallel else main
        side.wait_stream(main)
        with side:
            rows = self.embedding(self.tokens)
        main.wait_stream(side)
        rows.record_stream(main)
        return self.linear(rows) + x.sum()


class Detour(nn.Module):
    """Products on a stream of the other device, on which nothing ends that autograd lets its caller wait for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Linear(WIDTH, WIDTH).to("sim:0") for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).to("sim:1") for _ in range(2))
        self.streams = [torch.Stream("sim:1")]

    def forward(self, x, parallel=True):
        main = torch.accelerator.current_stream(torch.device("sim:1"))
        side = self.streams[0] if parallel else main
        value = self.first(x)
        side.wait_stream(main)
        with side:
            value = value.to("sim:1")
            for layer in self.layers:
                value = layer(value).tanh()
        main.wait_stream(side)
        value.record_stream(main)
        return self.last(value.to("sim:0"))


def sums(model, x, parallel, options, windows=2):
    """Train; return the sums of the last window."""
    with ak.FusedAccumulator(model, **options) as acc:
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for _ in range(windows):
            for step in range(3):
                acc.backward(model(x + step, parallel).square().mean())
            acc.finalize(optimizer)
            found = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            acc.zero_()
    return found


MODELS = {
    "two streams": Branches,
    "two devices": lambda: Branches((1, 0)),
    "both": lambda: Branches((0, 0, 1, 1)),
    "embedding": Embedded,
    "changing streams": lambda: Branches(changes=True),
    "a detour": Detour,
    "nothing but products": lambda: Branches(changes=True, bias=False),
}


@pytest.mark.parametrize("model", MODELS)
def test_streams_and_devices(way, model):
    """What adds on another stream than the caller's is joined; gradients live until they were read; same bits."""
    x = torch.ones(rows(way), WIDTH, device="sim:0")
    expected = sums(MODELS[model](), x, False, way)
    model = MODELS[model]()
    for stream in model.streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with sim.watch(lines=True) as seen:
        found = sums(model, x, True, way)
    seen.check()
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def test_a_loops_own_backward():
    """Buckets of `loss.backward()` are joined, too, before whoever called it goes on."""
    x = torch.ones(4, WIDTH, device="sim:0")
    model = Branches()
    with ak.FusedAccumulator(model, release="backward", bucket_bytes=6000) as acc, sim.watch() as seen:
        for _ in range(2):
            model(x).square().mean().backward()
            acc.accumulate()
        acc.finalize()
    seen.check()


class Fails(torch.autograd.Function):
    """Its backward raises, after `before` was called."""

    @staticmethod
    def forward(ctx, x, before):
        ctx.before = before
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.before()
        raise RuntimeError("planted")


@pytest.mark.parametrize("fuses", [False, True])
def test_after_an_error_the_caller_goes_on(fuses):
    """What a backward that raised has added on side streams is done before the window is dropped and begun anew."""
    x = torch.ones(4, WIDTH, device="sim:0")
    model = Branches()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1, fuse_weight_gradients=fuses)
    failing = Fails.apply(model.layers[0][0].weight.sum(), lambda: None)
    with sim.watch() as seen:
        with pytest.raises(RuntimeError, match="planted"):
            acc.backward(model(x).square().mean() + failing)
        acc.zero_()
        acc.backward(model(x, parallel=False).square().mean())
        acc.finalize()
        acc.zero_()
        acc.release_buffers()
    seen.check()


def test_buffers_are_released_where_they_were_used():
    """They may have been allocated on another stream, which hands their memory out again."""
    x = torch.ones(4, WIDTH, device="sim:0")
    model = nn.Linear(WIDTH, WIDTH).to("sim:0")
    acc = ak.FusedAccumulator(model)
    side = torch.Stream("sim:0")
    side.wait_stream(torch.accelerator.current_stream())
    with sim.watch() as seen:
        with side:
            acc.backward(model(x).square().mean())
            acc.zero_()
            acc.release_buffers()
        torch.zeros(4096, device="sim:0")
    assert [text for kind, text in seen.reports if kind == "free"] == []


def test_an_error_on_one_of_two_devices():
    """Where the host's part of a backward raises, a device's thread may be inside a node: its `.grad` is nobody's."""
    entered, raised = threading.Event(), threading.Event()

    def linger(grad):
        entered.set()
        raised.wait(timeout=30)

    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).to(device) for device in ("cpu", "sim:0"))
    acc = ak.FusedAccumulator(model, release="microbatch", fuse_weight_gradients=False)
    model[1].weight.register_hook(linger)  # runs inside the node that fills `.grad`
    failing = Fails.apply(model[0].weight, lambda: entered.wait(timeout=30)).sum()
    with pytest.raises(RuntimeError, match="planted"):
        torch.autograd.backward(failing + model[1].weight.sum().cpu())
    threading.Timer(0.2, raised.set).start()
    acc.discard()
    leaf = torch.ones((), device="sim:0", requires_grad=True)
    torch.autograd.grad(leaf.clone(), leaf)  # after all that the thread had to do
    assert [p.grad for p in model.parameters()] == [None, None]


@pytest.mark.parametrize("where", ["sim:0", "sim:1"])
def test_second_pass_of_a_coupled_loss_draws_the_same_numbers(where):
    """Also on a device that has frozen parameters alone, or only the batch."""
    model = nn.Linear(WIDTH, WIDTH).to("sim:0")
    x = torch.ones(6, WIDTH, device=where)
    drawn = []

    def encode(chunk):
        noisy = dropout(chunk, 0.5)
        drawn.append(noisy.cpu())
        return model(noisy.to("sim:0"))

    with ak.FusedAccumulator(model) as acc:
        acc.backward_coupled(x.split(2), encode, lambda encoded: (encoded @ encoded.t()).mean())
    first, second = drawn[:3], drawn[3:]
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_frozen_parameters_draw_the_same_numbers_too():
    """An encoder on another device than the one that is trained; the batch is on the host."""
    encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to("sim:1").requires_grad_(False)
    head = nn.Linear(WIDTH, WIDTH).to("sim:0")
    drawn = []

    def encode(chunk):
        hidden = encoder(chunk.to("sim:1"))
        drawn.append(hidden.cpu())
        return head(hidden.to("sim:0"))

    with ak.FusedAccumulator(nn.ModuleList([encoder, head])) as acc:
        acc.backward_coupled(torch.ones(4, WIDTH).split(2), encode, lambda encoded: encoded.square().mean())
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


def nodes_of_leaves(model):
    """The nodes in which autograd fills `.grad`, made anew unless somebody holds them."""
    return [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]


def test_nodes_of_leaves_are_not_held(way):
    """They remember the stream on which they were made: a held one would make a later capture on another fail."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).to("sim:0")
    x = torch.ones(4, WIDTH, device="sim:0")
    with ak.FusedAccumulator(model, **way) as acc:
        for node in nodes_of_leaves(model):
            node.metadata["made"] = "before"
        del node
        assert not any(node.metadata for node in nodes_of_leaves(model))  # nobody held them
        for _ in range(2):
            loss = model(x).square().mean()
            for node in nodes_of_leaves(model):
                node.metadata["made"] = "in the graph"
            del node
            acc.backward(loss)
            del loss
            assert not any(node.metadata for node in nodes_of_leaves(model))


class Link:
    """Stands in for a process group: sends on streams of its own, and doubles what it sends."""

    own = True

    def __init__(self, comm_dtype):
        self.comm_dtype = comm_dtype
        self.streams = [torch.Stream(device) for device in sim.DEVICES]
        self.count = 0
        self.sends = threading.Lock()

    def send(self, piece, dtype):
        assert self.sends.acquire(blocking=False), "two threads send at once"
        try:
            return self.send_alone(piece, dtype)
        finally:
            self.sends.release()

    def send_alone(self, piece, dtype):
        threading.Event().wait(1e-3)  # let another device's thread run
        sent, stream = piece.to(dtype), self.streams[piece.device.index]
        stream.wait_stream(torch.accelerator.current_stream(piece.device))
        with stream:
            sent.mul_(2)
        self.count += 1
        return sent, Sent(stream)


class Sent(NamedTuple):
    """The work of one send."""

    stream: torch.Stream

    def wait(self):
        torch.accelerator.current_stream(self.stream.device).wait_stream(self.stream)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_early_sending(way, model, dtype, monkeypatch):
    """A chunk waits for every stream that wrote to it, and a narrower copy lives until it was read."""
    monkeypatch.setattr("accumkernels.ranks.sender.CHUNK_BYTES", 1024)
    x = torch.ones(4, WIDTH, device="sim:0")
    model, link = MODELS[model](), Link(dtype)
    options = {**way, "release": "backward"}
    with ak.FusedAccumulator(model, **options) as acc:
        engine = acc.engine
        sender = ChunkSender(link, early=True)
        sender.follow(engine.store.buffers)
        sender.note_same_layout()
        monkeypatch.setattr(engine.runner, "_sender", sender)
        loss = model(x).square().mean()
        with sim.watch(lines=True) as seen:
            engine.backward(loss, engine.micro_batch(1.0, last=True))
            early = link.count
            sender.send_rest(engine.window.sent, lambda buffer, parts: None)
            torch.zeros(64, device="sim:0")
        seen.check()
    assert early > 0


def test_commands_take_the_accelerator(monkeypatch):
    """The doctor lists both devices, whose ops pass its self-test; the demo, `fit` and `plan` take the first."""
    from accumkernels import doctor
    from accumkernels.demo import command
    from accumkernels.planning import commands

    found = {device["device"]: device for device in doctor.examine()["devices"]}
    assert found.keys() >= {"cpu", "sim:0", "sim:1"}
    assert found["sim:1"]["description"] == "simulated device"
    assert found["sim:1"]["backend"] == "reference"
    assert found["sim:1"]["backends"][-1] == {"name": "reference", "cause": None, "failure": None}
    assert command.choose_device(None).type == commands.default().type == "sim"
    assert command.choose_device("sim:1") == sim.DEVICES[1]
    with pytest.raises(command.UserError, match="there are 2 devices"):
        command.choose_device("sim:2")


def test_planning_reads_its_allocator():
    """The largest batch that fits, and what a step takes, by what the device says of its memory."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))
    options = {"loss_fn": nn.functional.mse_loss, "num_iterations": 2}
    sim.limit(0, 2 * 2**20)
    try:
        found = ak.find_batch_size(model, "sim:0", (64,), (4,), 2**16, **options)
    finally:
        sim.limit(0, 2**40)
    assert found.reason == "oom" and 8 <= found <= 2048
    assert 0 < found.peak_bytes <= 2 * 2**20
    assert {p.device.type for p in model.parameters()} == {"cpu"}

    model.to("sim:0")
    optimizer = torch.optim.AdamW(model.parameters())

    def make_batch(n):
        return torch.randn(n, 64, device="sim:0"), torch.randn(n, 4, device="sim:0")

    report = ak.memory_report(model, optimizer, make_batch, 256, loss_fn=nn.functional.mse_loss)
    assert report.total > report.parameters > 64 * 256 * 4


def test_whole_batches_are_split_where_the_allocator_says_so():
    """`backward_batch` learns from what the device has free, and loses nothing where it was wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4)).to("sim:0")
    x = torch.randn(1024, 64, device="sim:0")
    expected = [g.clone() for g in torch.autograd.grad(model(x).square().mean(), list(model.parameters()))]
    with ak.FusedAccumulator(model) as acc:
        free = torch.accelerator.memory_allocated("sim:0") + 2**20
        sim.limit(0, free)
        try:
            report = acc.backward_batch(x, lambda part: model(part).square().mean())
        finally:
            sim.limit(0, 2**40)
        acc.finalize()
        assert len(report.sizes) > 1 and sum(report.sizes) == 1024
        for grad, exact in zip((p.grad for p in model.parameters()), expected, strict=True):
            torch.testing.assert_close(grad.cpu(), exact.cpu(), rtol=1e-4, atol=1e-6)  # sums of another order


@pytest.mark.parametrize("overflow", ["window", "microbatch"])
@pytest.mark.parametrize("place", [0, 1])
def test_an_overflow_on_one_device_alone(place, overflow):
    """Nothing steps where the window is lost, on whichever device it was; a bad micro-batch is dropped on both."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False).to(device) for device in ("sim:0", "sim:1")])
    acc = ak.FusedAccumulator(layers, overflow=overflow)
    optimizer = torch.optim.SGD(acc.parameters(), lr=1.0)
    before = [p.detach().cpu().clone() for p in acc.parameters()]
    params = list(acc.parameters())
    inputs = [torch.ones(1, 4, device=p.device) for p in params]

    def backward(factor):
        losses = [
            layer(x).sum() * (factor if i == place else 1.0)
            for i, (layer, x) in enumerate(zip(layers, inputs, strict=True))
        ]
        acc.backward(losses[0] + losses[1].to("sim:0"))

    backward(1.0)
    backward(math.inf)
    assert acc.found_inf.item() == 1.0
    acc.step(optimizer)
    assert acc.step_was_skipped is (overflow == "window")
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p.cpu(), old if overflow == "window" else old - 1.0)


def test_weights_on_the_device_that_sum_to_zero():
    """Where overflows do not matter, too, an optimizer that does not skip by itself is not called."""
    layer = nn.Linear(4, 4).to("sim:0")
    acc = ak.FusedAccumulator(layer, overflow=None)
    optimizer = torch.optim.AdamW(acc.parameters(), foreach=True)
    before = [p.detach().cpu().clone() for p in layer.parameters()]
    acc.backward(layer(torch.ones(1, 4, device="sim:0")).sum(), torch.zeros((), device="sim:0"))
    acc.step(optimizer)
    assert acc.step_was_skipped
    assert all(torch.equal(p.cpu(), old) for p, old in zip(layer.parameters(), before, strict=True))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_first_device_keeps_its_buffer_while_another_has_one(scaled):
    """All of it is frozen after the first window; weights, norms and noise go on being counted there."""
    model = Model(("sim:1", "sim:0"))
    scaler = torch.amp.GradScaler("sim", init_scale=8.0) if scaled else None
    with ak.FusedAccumulator(model, scaler=scaler, backend="reference", noise_scale=True) as acc:
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for number in range(4):
            for rows in (1, 2):
                ids = (torch.arange(7 * rows) % 13).reshape(rows, 7).to("sim:1")
                acc.backward(model(ids), weight=ids.numel())
            acc.step(optimizer, max_norm=1.0)
            assert not acc.step_was_skipped
            found = acc.metrics()
            assert found["windows"].item() == number + 1 and found["weight"].item() == 21
            if number == 0:
                for p in model.parameters():
                    p.requires_grad_(p.device.index == 0)
