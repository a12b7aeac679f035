"""Capture a whole window in one CUDA graph (K micro-batches and the step) and replay it with new data.

    python examples/cuda_graph.py

Without a GPU the same windows run one kernel at a time, and the program says so. docs/cuda_graphs.md explains what a
capture needs, and what the host knows under replay.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import accumkernels as ak


class Window:
    """K micro-batches and a step. Inputs, targets and weights are tensors that keep their place.

    Args:
        model: The model, on its device.
        accumulation_steps: K.
        micro_batch_size: How many samples fit in a micro-batch; weights say how many of them count.
    """

    def __init__(self, model: nn.Module, accumulation_steps: int, micro_batch_size: int, width: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.accumulator = ak.FusedAccumulator(model)
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.accumulator.parameters(), lr=1e-3, fused=True, capturable=on_gpu)
        shape = (accumulation_steps, micro_batch_size)
        self.inputs = torch.zeros(*shape, width, device=self.device)
        self.targets = torch.zeros(*shape, 1, device=self.device)
        self.weights = torch.zeros(accumulation_steps, dtype=torch.float64, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._norm: Tensor | None = None

    def _run(self) -> Tensor | None:
        for x, y, weight in zip(self.inputs, self.targets, self.weights, strict=True):
            loss = nn.functional.mse_loss(self.model(x), y)
            self.accumulator.backward(loss, weight=weight)
        return self.accumulator.step(self.optimizer, max_norm=1.0)

    def capture(self) -> None:
        """Warm up, which leaves no trace, and capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.weights.zero_()  # every kernel runs, and the step does not happen
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._norm = self._run()
        self._graph = graph

    def __call__(self, inputs: Tensor, targets: Tensor, weights: Sequence[float]) -> Tensor | None:
        """Run one window. Returns the norm before clipping, 0-d; each replay overwrites the tensor returned before."""
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.weights.copy_(torch.tensor(weights, dtype=torch.float64))
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._norm


def main(argv: list[str] | None = None) -> int:
    """Train a small model, with a graph on a GPU and without one on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=50, help="optimizer steps (default: 50)")
    parser.add_argument("--accumulation-steps", type=int, default=4, help="micro-batches per window (default: 4)")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, size, steps = 32, 16, arguments.accumulation_steps
    model = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    window = Window(model, steps, size, width)
    if device == "cuda":
        window.capture()
        print(f"captured {steps} micro-batches and the step in one CUDA graph on {torch.cuda.get_device_name()}")
    else:
        print("no CUDA GPU here: the windows run one kernel at a time, nothing is captured")
    truth = torch.randn(width, 1)
    for step in range(arguments.windows):
        inputs = torch.randn(steps, size, width)
        norm = window(inputs, torch.tanh(inputs @ truth), weights=[size] * steps)
        if norm is not None and (step % 10 == 0 or step == arguments.windows - 1):
            print(f"window {step + 1:>4}  gradient norm {norm.item():.4f}")
    metrics = window.accumulator.metrics()
    print(f"{int(metrics['windows_skipped'])} windows skipped (warm-up included)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
