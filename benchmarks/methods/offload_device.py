"""Peaks of a backward's bytes on the simulated device, above what was there before it: stock, and with cpu_offload.

The device has to be there before the first backward of a process, and so before the library is imported.
`benchmarks.offload` runs it.
"""

from __future__ import annotations

import json

from tests import simulated_device

LAYERS, WIDTH, TOKENS = 12, 512, 64
BUCKET = WIDTH**2 * 2  # bytes: one gradient, so that the bound shows in a small model


def report() -> None:
    """Print the number of parameters, and the peaks by way."""
    simulated_device.load()
    import torch
    from torch import nn

    import accumkernels as ak

    peaks = {}
    for way in ("stock", "offloaded"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        model.to("sim:0", torch.bfloat16)
        acc = None if way == "stock" else ak.FusedAccumulator(model, cpu_offload=True, bucket_bytes=BUCKET)
        for _ in range(3):
            loss = model(torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16).to("sim:0")).float().square().mean()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            if acc is None:
                loss.backward()
                model.zero_grad()
            else:
                acc.backward(loss)
            peaks[way] = torch.accelerator.max_memory_allocated() - before
        if acc is not None:
            acc.remove()
    print(json.dumps([LAYERS * WIDTH**2, peaks]))


if __name__ == "__main__":
    report()
