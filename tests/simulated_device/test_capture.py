"""A window in one graph of torch.accelerator: nothing waits, and replays are windows."""

from __future__ import annotations

import pytest
import torch

import accumkernels as ak
from tests import simulated_device as sim
from tests.simulated_device.training import OPTIONS, ROWS, TOKENS, Training, on

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumkernels uses its reference backend"),
    pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this torch has no torch.accelerator.Graph"),
]
NAMES = [
    "default",
    "whole",
    "buckets",
    "fused",
    "unchecked",
    "autocast",
    "autocast, fused",
    "scaled",
    "masters",
    "fp64",
]


class Captured(Training):
    """A window whose data lie in fixed tensors, eagerly or from a graph."""

    def __init__(self, name):
        super().__init__("sim:0", name)
        self.optimizer = torch.optim.AdamW(self.acc.parameters(), 0.5, eps=1.0, fused=True, capturable=True)
        self.ids = [torch.zeros(rows, TOKENS, dtype=torch.int64, device="sim:0") for rows in ROWS]
        self.stream = torch.Stream("sim:0")

    def feed(self, window):
        """Put a window's data there."""
        for ids, new in zip(self.ids, self.batches(window), strict=True):
            ids.copy_(new)

    def run(self):
        """One window."""
        self.window(self.ids)

    def capture(self):
        """Two eager windows to warm up, and the capture, all on a side stream."""
        with on(self.stream):
            for window in range(2):
                self.feed(window)
                self.run()
        graph = torch.accelerator.Graph()
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream, graph:
            self.run()
        return graph


@pytest.mark.parametrize("name", NAMES)
def test_replays_are_windows(name):
    """The same bits as eager windows."""
    assert name in OPTIONS
    eager = Captured(name)
    for window in range(5):
        eager.feed(window)
        eager.run()
    captured = Captured(name)
    with sim.watch(lines=True) as seen:
        graph = captured.capture()
        for window in range(2, 5):
            captured.feed(window)
            graph.replay()
    seen.check()
    assert all(torch.equal(a, b) for a, b in zip(captured.parameters(), eager.parameters(), strict=True))
    graph.reset()


@pytest.mark.parametrize("built", ["on the default stream", "on the side stream"])
def test_nothing_of_the_past_is_in_the_way(built):
    """An accumulator that has trained on the default stream can be captured on another: it holds no node of a leaf."""
    captured = Captured("default")
    if built == "on the default stream":
        for window in range(2):
            captured.feed(window)
            captured.run()
    graph = captured.capture()
    graph.replay()
    graph.reset()


def test_what_waits_is_refused():
    """An optimizer that asks the host cannot be captured; the error comes out, and the accumulator goes on."""
    captured = Captured("default")
    captured.optimizer = torch.optim.AdamW(captured.acc.parameters(), 0.5, foreach=True, capturable=True)
    with pytest.raises(RuntimeError, match="captur"):
        captured.capture()
    captured.acc.zero_()
    captured.feed(0)
    captured.run()


def test_raising_mode_cannot_be_captured():
    """It waits in each micro-batch."""
    captured = Captured("raises")
    with pytest.raises(RuntimeError, match="captur"):
        captured.capture()
    assert isinstance(captured.acc, ak.FusedAccumulator)
