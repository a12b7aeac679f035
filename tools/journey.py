"""Traces a micro-batch and a step through the package: the frames that they make, and the files of these frames.

`python -m tools.journey` prints a line per case: the number of calls of the package's own functions, of their files and
of changes of folder between calls, in a settled window on one thread. `--list CASE` prints the calls themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import accumkernels as ak

PACKAGE = Path(ak.__file__).resolve().parent
_SETTLED = 3  # windows: the first two make the plans of steps


class Journey:
    """Calls of the package's functions, in order: (file, function)."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.calls: list[tuple[str, str]] = []
        sys.setprofile(self._see)
        try:
            run()
        finally:
            sys.setprofile(None)

    def _see(self, frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            self.calls.append((file, frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name))

    @property
    def files(self) -> int:
        """The number of files that hold the frames."""
        return len({file for file, _ in self.calls})

    @property
    def changes_of_folder(self) -> int:
        """The number of calls in another folder than the call before."""
        folders = [file.rpartition("/")[0] for file, _ in self.calls]
        return sum(a != b for a, b in zip(folders, folders[1:], strict=False))


def _loop(layers: int, width: int, *, autocast: bool = False, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    x = torch.randn(4, width)
    acc = ak.FusedAccumulator(model, backend="native", **options)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=1e-3, fused=True)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).square().mean()

    return acc, optimizer, loss


def _micro_batch(*args: Any, **options: Any) -> Journey:
    """Trace `acc.backward` in the second micro-batch of a settled window."""
    acc, optimizer, loss = _loop(*args, **options)
    for _ in range(_SETTLED):
        acc.backward(loss())
        acc.backward(loss())
        acc.step(optimizer, max_norm=1.0)
    acc.backward(loss())
    last = loss()
    return Journey(lambda: acc.backward(last))


def _step(*args: Any, **options: Any) -> Journey:
    acc, optimizer, loss = _loop(*args, **options)
    for _ in range(_SETTLED):
        acc.backward(loss())
        acc.step(optimizer, max_norm=1.0)
    acc.backward(loss())
    return Journey(lambda: acc.step(optimizer, max_norm=1.0))


_BUCKETS = {"release": "backward", "bucket_bytes": 2**20}
CASES: dict[str, Callable[[], Journey]] = {
    "whole": lambda: _micro_batch(2, 16),
    "buckets": lambda: _micro_batch(4, 512, fuse_weight_gradients=False, **_BUCKETS),
    "fused": lambda: _micro_batch(4, 512, fuse_weight_gradients=True, **_BUCKETS),
    "autocast": lambda: _micro_batch(4, 512, autocast=True, fuse_weight_gradients=False, **_BUCKETS),
    "autocast, fused": lambda: _micro_batch(4, 512, autocast=True, fuse_weight_gradients=True, **_BUCKETS),
    "step, whole": lambda: _step(2, 16),
    "step, buckets": lambda: _step(4, 512, fuse_weight_gradients=False, **_BUCKETS),
    "step, fused": lambda: _step(4, 512, fuse_weight_gradients=True, **_BUCKETS),
    "step, autocast": lambda: _step(4, 512, autocast=True, fuse_weight_gradients=False, **_BUCKETS),
}


def _lines(journey: Journey) -> Iterator[str]:
    for file, function in journey.calls:
        yield f"{file:32} {function}"


def main() -> None:
    """Print the table, or one case's calls."""
    parser = argparse.ArgumentParser(prog="python -m tools.journey", description=__doc__)
    parser.add_argument("--list", metavar="CASE", choices=list(CASES), help="print the calls of one case")
    chosen = parser.parse_args().list
    torch.set_num_threads(1)
    if chosen:
        print(*_lines(CASES[chosen]()), sep="\n")
        return
    print(f"{'':18}{'frames':>8}{'files':>8}{'changes of folder':>20}")
    for name, case in CASES.items():
        journey = case()
        print(f"{name:18}{len(journey.calls):8}{journey.files:8}{journey.changes_of_folder:20}")


if __name__ == "__main__":
    main()
