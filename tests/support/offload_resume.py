"""Trains on the simulated device with sums in host memory, saves after each micro-batch, and may die inside a window.

    python -m tests.support.offload_resume FOLDER MICRO_BATCHES [kill]

It goes on from what FOLDER has, runs so many micro-batches in all, and with `kill` ends by SIGKILL, while the worker
may have yet to add the last one. A window has four.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests import simulated_device


def main() -> None:
    """Train."""
    simulated_device.load()
    import torch
    from torch import nn

    import accumkernels as ak

    folder, count, kills = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).to("sim:0", torch.bfloat16)
    acc = ak.FusedAccumulator(model, cpu_offload=True, bucket_bytes=600)
    optimizer = torch.optim.AdamW(acc.parameters())
    file, begin = folder / "state.pt", 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        begin = state["done"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        acc.load_state_dict(state["acc"])
    for number in range(begin, count):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(number)).to("sim:0", torch.bfloat16)
        acc.backward(model(x).float().square().mean(), weight=number + 1.0)
        if number % 4 == 3:
            acc.step(optimizer, max_norm=1.0)
        if number != count - 1 or not kills:  # the last is lost, as it would be
            state = {"acc": acc.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "done": number + 1}, folder / "unfinished.pt")
            (folder / "unfinished.pt").rename(file)
    if kills:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
