"""A whole window in one CUDA graph equals eager windows; its warm-up leaves nothing behind."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp

K, SIZE = 3, 8


class Captured:
    """A model, its accumulator, and a window that runs eagerly or from a graph."""

    def __init__(self, release="microbatch", autocast=False, scaled=False, overflow="window"):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4)).cuda()
        self.autocast = autocast
        self.scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=3) if scaled else None
        self.stream = torch.cuda.Stream()
        self.acc = ak.FusedAccumulator(
            self.model, scaler=self.scaler, release=release, bucket_bytes=400, overflow=overflow, backend="native"
        )
        self.stream.wait_stream(torch.cuda.current_stream())
        self.optimizer = torch.optim.AdamW(self.acc.parameters(), lr=0.01, fused=True, capturable=True)
        self.x = torch.zeros(K, SIZE, 16, device="cuda")
        self.y = torch.zeros(K, SIZE, 4, device="cuda")
        self.weights = torch.zeros(K, dtype=torch.float64, device="cuda")
        self.graph = None

    def run(self):
        for x, y, weight in zip(self.x, self.y, self.weights, strict=True):
            with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast, cache_enabled=False):
                loss = mse_loss(self.model(x), y)
            self.acc.backward(loss, weight=weight)
        return self.acc.step(self.optimizer, max_norm=0.5)

    def warm_up(self, windows=3):
        """Windows without weight, on data that would throw any sum far off."""
        with torch.cuda.stream(self.stream):
            self.x.fill_(1e4)
            self.weights.zero_()
            for _ in range(windows):
                self.run()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self):
        self.warm_up()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.norm = self.run()

    def window(self, seed, factor=1.0):
        """One window with data and weights of its own. Returns its norm."""
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        self.y.copy_(torch.randn(self.y.shape, generator=generator) * factor)
        self.weights.copy_(torch.randint(0, 5, (K,), generator=generator).double() + 1)
        if self.graph is None:
            with torch.cuda.stream(self.stream):
                norm = self.run()
            torch.cuda.current_stream().wait_stream(self.stream)
            return norm.item()
        self.graph.replay()
        return self.norm.item()

    def values(self):
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return [t.detach().clone() for t in (*self.model.parameters(), *states)]


@pytest.mark.gpu
@pytest.mark.parametrize("release", ["microbatch", "backward"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_replays_are_eager_windows(release, autocast, scaled):
    """New data and weights in each replay, one of which overflows: parameters, state, norm, scale and what is told."""
    eager, graphed = (Captured(release, autocast, scaled) for _ in range(2))
    eager.warm_up()  # the route is taken from the first micro-batch on in both
    graphed.capture()
    for seed in range(6):
        factor = float("inf") if seed == 2 else 1.0
        expected, norm = eager.window(seed, factor), graphed.window(seed, factor)
        assert norm == pytest.approx(expected, rel=1e-4, nan_ok=True)
        assert graphed.acc.step_was_skipped == eager.acc.step_was_skipped == (seed == 2)
        # The same kernels; cuBLAS may choose others for a capture, which changes the last bits.
        for a, e in zip(graphed.values(), eager.values(), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-3 if autocast else 1e-4, atol=1e-5)
        if scaled:
            assert graphed.scaler.get_scale() == eager.scaler.get_scale()
    metrics = {name: float(value) for name, value in graphed.acc.metrics().items()}
    assert metrics["windows_skipped"] == 3 + 1  # the warm-up's and the one that overflowed
    assert metrics["windows"] == 3 + 6
    assert metrics["weight"] == graphed.weights.sum().item()
    assert (graphed.acc.micro_batches, graphed.acc.weight.item()) == (0, 0)


@pytest.mark.gpu
def test_warm_up_leaves_no_residue():
    """Neither in parameters, optimizer state and scale, nor in the sums of the windows after it."""
    warmed, fresh = Captured(scaled=True), Captured(scaled=True)
    before = [p.detach().clone() for p in warmed.model.parameters()]
    warmed.warm_up()
    assert all(torch.equal(p, b) for p, b in zip(warmed.model.parameters(), before, strict=True))
    assert not any(v.any() for s in warmed.optimizer.state.values() for v in s.values())
    assert warmed.scaler.get_scale() == 256.0
    for seed in range(2):
        assert warmed.window(seed) == fresh.window(seed)
    assert all(torch.equal(a, b) for a, b in zip(warmed.values(), fresh.values(), strict=True))


@pytest.mark.gpu
def test_optimizer_that_asks_the_host_is_refused():
    """In a capture, with what to use instead; after it the accumulator goes on."""
    captured = Captured()
    captured.optimizer = torch.optim.AdamW(captured.acc.parameters(), lr=0.01, foreach=True, capturable=True)
    captured.warm_up()
    with pytest.raises(RuntimeError, match=r"fused=True, capturable=True"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=captured.stream):
            captured.run()
    captured.acc.zero_()
    assert captured.window(0) > 0


def test_window_without_weight_runs_every_kernel_and_changes_nothing():
    """The warm-up, as the device decides it: optimizer state is made, and neither it, parameters nor scale move."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    before = copy.deepcopy(model)
    x, y = batch(4)
    for _ in range(2):
        scaler.scale(mse_loss(model(x), y)).backward()
        zero = torch.zeros((), dtype=torch.float64)  # a CPU tensor of the user's would be read
        acc.engine.accumulate(acc.engine.micro_batch(zero))
        norm = acc.step(optimizer, max_norm=1.0)
        assert norm.isfinite()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert len(optimizer.state) == len(list(model.parameters()))
    assert not any(v.any() for state in optimizer.state.values() for v in state.values())
    assert scaler.get_scale() == 64.0
    assert acc.metrics()["windows_skipped"] == 2


def test_example(capsys):
    """It trains; without a GPU it says that nothing is captured."""
    path = Path(__file__).parent.parent / "examples" / "cuda_graph.py"
    spec = importlib.util.spec_from_file_location("cuda_graph", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--windows", "3"]) == 0
    out = capsys.readouterr().out
    assert "window    3" in out
    assert ("captured" in out) if torch.cuda.is_available() else ("no CUDA GPU here" in out)
    assert "python examples/cuda_graph.py" in module.__doc__
