"""What torch offers for accelerators works on the simulated one: streams, random numbers, autocast, graphs."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import simulated_device as sim

graphs = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="torch.accelerator.Graph is newer than this torch"
)


class Net(nn.Module):
    """One of most things."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.norm(self.convolution(self.embedding(ids).transpose(1, 2))).transpose(1, 2)
        x = x + self.attention(x, x, x)[0]
        x = x + self.recurrent(x)[0]
        return F.cross_entropy(self.head(F.gelu(x)).flatten(0, 1), ids.flatten())


def test_training_equals_the_cpu():
    """Bit for bit but for the LSTM, since the other kernels are the CPU's."""
    torch.manual_seed(0)
    models = [Net()]
    models.append(copy.deepcopy(models[0]).to("sim:1"))
    ids = torch.randint(11, (3, 5))
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
        for _ in range(2):
            model(ids.to(model.head.weight.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), cpu in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert torch.allclose(ours.cpu(), cpu, atol=1e-5), name


def test_backward_has_a_thread_per_device():
    """And its streams are those of the forward."""
    seen = {}
    leaves = [torch.ones(2, device=device, requires_grad=True) for device in ("sim:0", "sim:1")]
    side = torch.Stream("sim:1")
    side.wait_stream(torch.accelerator.current_stream(1))
    total = 0
    with side:
        for leaf in leaves:
            y = leaf * 2
            y.register_hook(
                lambda grad: seen.update(
                    {
                        grad.device.index: (
                            threading.get_ident(),
                            torch.accelerator.current_stream(grad.device).stream_id,
                        )
                    }
                )
            )
            total = total + y.sum().to("sim:0")
    total.backward()
    assert len({thread for thread, _ in seen.values()} | {threading.get_ident()}) == 3
    assert [seen[index][1] for index in (0, 1)] == [0, side.stream_id]


def test_random_numbers_of_its_own():
    """By device; the CPU's generator is left alone."""
    before = torch.get_rng_state()
    torch.sim.manual_seed_all(3)
    draws = [lambda: torch.rand(4, device="sim:1"), lambda: F.dropout(torch.ones(64, device="sim:1"))]
    draws.append(lambda: torch.randperm(9, device="sim:1"))
    draws.append(lambda: torch.multinomial(torch.ones(9, device="sim:1"), 3))
    for draw in draws:
        state, other = torch.sim.get_rng_state(1), torch.sim.get_rng_state(0)
        first = draw()
        assert not torch.equal(first, draw())
        assert torch.equal(other, torch.sim.get_rng_state(0))
        torch.sim.set_rng_state(state, 1)
        assert torch.equal(first, draw())
    assert torch.equal(before, torch.get_rng_state())
    own = torch.Generator("sim:0").manual_seed(5)
    first = torch.rand(4, device="sim:0", generator=own)
    assert torch.equal(first, torch.rand(4, device="sim:0", generator=own.manual_seed(5)))
    torch.manual_seed(7)
    first = torch.rand(4, device="sim:0")
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(4, device="sim:0"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_draws_the_same_numbers(reentrant):
    """torch.utils.checkpoint asks the device's module for random state."""
    x = torch.ones(1000, device="sim:0", requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_autocast():
    """Products in 16 bits, softmax in fp32; the CPU's autocast is another one."""
    x = torch.ones(4, 4, device="sim:0")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("sim", dtype):
            y = x @ x
            assert y.dtype == dtype and y.softmax(0).dtype == (y + x).dtype == torch.float32
            assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.float32


def test_grad_scaler():
    """It reads back one flag per device and step, no more."""
    leaf = torch.ones(4, device="sim:0", requires_grad=True)
    optimizer = torch.optim.SGD([leaf], 0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    with sim.watch() as seen:
        scaler.scale(leaf.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [what for what, _ in seen.waits][-1:] == ["item"]
    assert torch.allclose(leaf.detach().cpu(), torch.full((4,), 0.9))


def test_state_is_saved_and_loaded():
    """With torch.save, and deepcopy."""
    x = torch.arange(4.0, device="sim:1")
    file = io.BytesIO()
    torch.save({"x": x}, file)
    for place, device in ((None, "sim:1"), ("cpu", "cpu"), ("sim:0", "sim:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=place, weights_only=True)["x"]
        assert loaded.device == torch.device(device) and loaded.tolist() == [0, 1, 2, 3]
    twin = copy.deepcopy(x)
    assert twin.device == x.device and twin.data_ptr() != x.data_ptr()


def test_memory_figures():
    """As torch.accelerator and torch.sim tell them."""
    torch.accelerator.set_device_index(0)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1000, device="sim:0")
    assert torch.accelerator.memory_allocated() - before == 4096
    del x
    assert torch.sim.memory_allocated("sim:0") == before and torch.sim.max_memory_allocated(0) == before + 4096
    free, total = torch.sim.mem_get_info(1)
    kept = torch.empty(1000, device="sim:1")
    assert torch.sim.mem_get_info(1) == (free - 4096, total)
    del kept


def test_resizing():
    """Of tensors, storages and out= arguments."""
    x = torch.arange(3.0, device="sim:0")
    x.resize_(5)
    assert x[:3].tolist() == [0, 1, 2] and x[3:].isnan().all()
    out = torch.empty(0, device="sim:0")
    assert torch.add(x[:3], 1, out=out).tolist() == out.tolist() == [1, 2, 3]
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    values, places = torch.sort(torch.tensor([2.0, 1.0], device="sim:1"))
    assert values.tolist() == [1, 2] and places.tolist() == [1, 0]


def test_the_device_may_come_after_the_import():
    """As a plugin's does: importing the package runs no backward, which would start threads for the devices of then."""
    code = "import torch, accumkernels\nfrom tests import simulated_device as sim\nsim.load()\n"
    code += "p = torch.nn.Parameter(torch.ones(2, device='sim:0'))\nacc = accumkernels.FusedAccumulator([p])\n"
    code += "acc.backward(p.sum())\nprint(acc.main_grad(p).tolist())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout == "[1.0, 1.0]\n", done.stderr


# ---- graphs


@pytest.fixture
def captured():
    """Captures a function on a side stream; the graph, its stream and what the function returned."""

    def capture(function, **options):
        stream = torch.Stream("sim:0")
        stream.wait_stream(torch.accelerator.current_stream())
        graph = torch.accelerator.Graph(**options)
        with stream, graph:
            result = function(stream)
        torch.accelerator.current_stream().wait_stream(stream)
        return graph, result

    return capture


@graphs
def test_graph(captured):
    """Nothing runs in the capture; a replay runs everything, with the numbers that are there then."""
    x = torch.zeros(4, device="sim:0")
    w = torch.full((4,), 2.0, device="sim:0", requires_grad=True)
    w.grad = torch.zeros_like(w)

    def step(_):
        x.add_(1)
        loss = (w * x).sum()
        loss.backward()
        return loss.detach(), F.dropout(torch.ones_like(x))

    with sim.watch() as seen:
        graph, (loss, dropped) = captured(step)
    seen.check()
    assert x.tolist() == [0] * 4 and loss.isnan() and w.grad.tolist() == [0] * 4
    drops = set()
    for count in (1, 2, 3):
        with sim.watch() as seen:
            graph.replay()
        seen.check()
        assert x.tolist() == [count] * 4 and loss.item() == 8 * count
        assert w.grad.tolist() == [count * (count + 1) / 2] * 4
        drops.add(tuple(dropped.tolist()))
    assert len(drops) > 1


@graphs
def test_a_capture_refuses_waits(captured):
    """Each kind; the capture is lost."""
    x = torch.ones(4, device="sim:0")
    event = torch.Event("sim:0")
    event.record()
    waits = [
        lambda _: x.sum().item(),
        lambda _: x.cpu(),
        lambda _: torch.accelerator.synchronize(),
        lambda stream: stream.synchronize(),
        lambda _: event.synchronize(),
        lambda _: event.query(),
        lambda _: x.nonzero(),
    ]
    for wait in waits:
        with pytest.raises(RuntimeError, match="the host waits meanwhile|it was broken before"):
            captured(wait)
    captured(lambda _: event.query() or x + 1, capture_error_mode="relaxed")


@graphs
def test_a_capture_is_isolated(captured):
    """From events that are not of it; and nobody waits for its events afterwards."""
    x = torch.ones(4, device="sim:0")
    event = torch.Event("sim:0")
    event.record()
    side = torch.Stream("sim:0")
    with pytest.raises(RuntimeError, match="isolation|it was broken"):
        captured(lambda stream: stream.wait_event(event))
    with pytest.raises(RuntimeError, match="default stream|it was broken"):
        captured(lambda stream: torch.sim.default_stream(0).wait_event(stream.record_event()))

    def fork(stream, join=True):
        side.wait_stream(stream)
        with side:
            y = x + 1
        if join:
            stream.wait_stream(side)
        return y, stream.record_event()

    with pytest.raises(RuntimeError, match="unjoined"):
        captured(lambda stream: fork(stream, join=False))
    graph, (y, inside) = captured(fork)
    graph.replay()
    assert y.tolist() == [2] * 4
    with pytest.raises(RuntimeError, match="a capture that has ended"):
        torch.accelerator.current_stream().wait_event(inside)
    with pytest.raises(RuntimeError, match="recorded while a graph was captured"):
        inside.synchronize()


@graphs
def test_races_within_a_capture_and_after(captured):
    """Two of its streams on the same bytes; a replay beside other work; a replay on memory that is gone."""
    x = torch.ones(4, device="sim:0")
    side = torch.Stream("sim:0")

    def racing(stream):
        side.wait_stream(stream)
        with side:
            x.add_(1)
        x.add_(1)
        stream.wait_stream(side)

    with sim.watch() as seen:
        captured(racing)
    assert [kind for kind, _ in seen.reports] == ["race"]
    gone = [torch.ones(4, device="sim:0")]
    graph, _ = captured(lambda _: x.add_(gone[0]))
    with sim.watch() as seen:
        with side:
            graph.replay()
        x.add_(1)
    assert [kind for kind, _ in seen.reports] == ["race"]
    gone.clear()
    with sim.watch() as seen:
        graph.replay()
    assert [kind for kind, _ in seen.reports] == ["capture"]
