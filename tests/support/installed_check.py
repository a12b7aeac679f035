"""Run by the Python of an environment with an installed wheel, from another folder: does it work there?

`python installed_check.py [BACKEND]` ends with a line of JSON: where the package is from, its torch, and what the
doctor says. A failed assertion is status 1. It uses nothing but torch and accumkernels. BACKEND is what the CPU must
get: native, or reference from a wheel without a library.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import sysconfig
import warnings
from pathlib import Path

import torch

import accumkernels
from accumkernels.__main__ import main
from accumkernels.ops.schema import SCHEMAS


def diagnose(backend: str) -> dict:
    """The doctor's report; it must find nothing wrong, and the CPU must get `backend`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["--json"])
    found = json.loads(printed.getvalue())
    assert (status, found["ok"]) == (0, True), found
    assert found["devices"][0]["backend"] == backend, found
    return found


def every_op_has_kernels(with_cuda: bool) -> None:
    """The library registered each op for the CPU and, if it was built with CUDA, for GPUs."""
    for op in SCHEMAS:
        for key in ("CPU", "CUDA"):
            registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"accumkernels::{op}", key)
            assert registered == (key == "CPU" or with_cuda), f"{op} on {key}: {registered}"


def train_a_window(backend: str) -> None:
    """Three unequal micro-batches with GradScaler step the parameters as one big batch in stock torch does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    stock = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    stock.load_state_dict(model.state_dict())
    x, y = torch.randn(10, 8), torch.randn(10, 1)

    accumulator = accumkernels.FusedAccumulator(
        model, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0), backend=backend
    )
    optimizer = torch.optim.AdamW(accumulator.parameters(), lr=0.01)
    for inputs, targets in zip(x.split([5, 3, 2]), y.split([5, 3, 2]), strict=True):
        accumulator.backward(torch.nn.functional.mse_loss(model(inputs), targets), weight=len(inputs))
    norm = accumulator.step(optimizer, max_norm=0.5)

    stock_optimizer = torch.optim.AdamW(stock.parameters(), lr=0.01)
    torch.nn.functional.mse_loss(stock(x), y).backward()
    stock_norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
    stock_optimizer.step()
    torch.testing.assert_close(norm, stock_norm, check_dtype=False)
    for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


if __name__ == "__main__":
    place = Path(accumkernels.__file__).parents[1]
    assert place == Path(sysconfig.get_path("purelib")), f"accumkernels is from {place}"
    expected = sys.argv[1] if len(sys.argv) > 1 else "native"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)  # what tells of a fallback
        train_a_window(expected)
        train_a_window("auto")
        report = diagnose(expected)
        if expected == "native":
            every_op_has_kernels(with_cuda=report["library"]["cuda"] is not None)
    fallbacks = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert len(fallbacks) == (expected != "native"), fallbacks
    print(json.dumps({"place": str(place), "torch": torch.__version__, "report": report}))
