"""Launches every kernel a few times through the public interface, for a profiler: `each_kernel.py BACKEND DEVICE N`."""

from __future__ import annotations

import sys


def main(backend: str, device: str, elements: int) -> int:
    """Windows over parameters of each dtype, with what makes each kernel run."""
    import torch

    import accumkernels as ak

    shapes = [(elements // 16 // 64, 64)] * 16
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for overflow, masters in (("window", False), ("microbatch", True)):
            params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in shapes]
            grads = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            scaler = torch.amp.GradScaler(device)
            scaler.scale(torch.zeros((), device=device))  # its state is made lazily
            acc = ak.FusedAccumulator(
                params, scaler=scaler, overflow=overflow, master_weights=masters, backend=backend, noise_scale=masters
            )
            optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, momentum=0.9, fused=True)
            for _ in range(2):  # the first window overwrites, later micro-batches add
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad.clone()
                acc.accumulate()
            norm = acc.step(optimizer, max_norm=1.0)
            print(f"{backend}, {dtype}, overflow={overflow!r}: norm {float(norm):.6g}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
