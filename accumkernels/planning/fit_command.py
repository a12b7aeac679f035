"""`python -m accumkernels fit MODULE:FACTORY`: find the batch size of a user's own model.

The factory is a function without arguments that returns `find_batch_size`'s arguments in a dict; only `model` is
required. Options on the command line override what the factory returns::

    # train.py
    def fit():
        model = MyModel()
        return {"model": model, "make_batch": lambda n: (torch.randn(n, 3, 224, 224), torch.randint(0, 1000, (n,))),
                "loss_fn": torch.nn.functional.cross_entropy, "dataset_size": 50_000}

    python -m accumkernels fit train:fit --device cuda --amp bf16 --mode binsearch --target 512
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import reprlib
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..splitting.live_bytes import format_bytes
from .fit.batch_size import MODES, BatchSize, find_batch_size
from .worth.plan import plan

AMP = {"fp16": torch.float16, "bf16": torch.bfloat16}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class FitError(Exception):
    """An error that the user can fix; the message is one line."""


def parse_bytes(text: str) -> int:
    """Parse the bytes in "8GiB", "512M", "1.5 GB" (all in powers of 1024) or "123456"."""
    found = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    try:
        value = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a number of bytes: {text!r} (write 8GiB, 512M or 123456)")
    return value


def add_parser(commands: Any) -> None:
    """Add the command to argparse's `commands`."""
    parser = commands.add_parser(
        "fit",
        help="find the largest batch size at which a model of yours trains",
        description="Find the largest micro-batch by training: FACTORY() returns the arguments of "
        "accumkernels.find_batch_size in a dict with 'model' at least; options override them.",
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="as in train:fit for fit() in train.py")
    parser.add_argument("--device", help="default: the factory's, else cuda where there is one, else cpu")
    parser.add_argument("--mode", choices=MODES, help="power of two (default), or the exact limit")
    parser.add_argument("--dataset-size", type=int, metavar="N", help="no larger batch is tried (default: 65536)")
    parser.add_argument("--max-batch-size", type=int, metavar="N", help="no larger batch is tried")
    parser.add_argument("--num-iterations", type=int, metavar="N", help="training steps per size (default: 5)")
    parser.add_argument("--multiple-of", type=int, metavar="N", help="try only multiples of N")
    parser.add_argument(
        "--accumulate", type=int, metavar="K", help="train with FusedAccumulator, K micro-batches a step"
    )
    parser.add_argument("--amp", choices=AMP, help="autocast to this dtype")
    parser.add_argument("--margin", type=float, metavar="F", help="fraction of the memory to leave free (default: 0)")
    parser.add_argument("--memory-limit", type=parse_bytes, metavar="BYTES", help="of a smaller device, as in 8GiB")
    parser.add_argument("--target", type=int, metavar="N", help="plan how to reach this batch size with what was found")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks for the plan (default: 1)")


def _factory(place: str) -> Any:
    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise FitError(f"{place!r} is not MODULE:FACTORY, as in train:fit")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # an import inside the module failed
        raise FitError(f"there is no module {module_name!r} on the path") from None
    factory: Any = module
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise FitError(f"{module_name!r} has no function {name!r}")
    return factory


def arguments_for(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect the arguments of `find_batch_size`: the factory's, overridden by the command line.

    Raises:
        FitError: MODULE:FACTORY, or what it returns, is wrong.
    """
    made = _factory(arguments.factory)()
    if not isinstance(made, Mapping):
        raise FitError(
            f"{arguments.factory} must return a dict of find_batch_size's arguments, got {reprlib.repr(made)}"
        )
    known = inspect.signature(find_batch_size).parameters
    unknown = [str(key) for key in made if key not in known]
    if unknown:
        raise FitError(f"{arguments.factory} returns {', '.join(unknown)}; find_batch_size takes {', '.join(known)}")
    if "model" not in made:
        raise FitError(f"{arguments.factory} returns no 'model'")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    call = {"device": device, "input_shape": None, "output_shape": None, "dataset_size": 65536, **made}
    given = {name: value for name, value in vars(arguments).items() if name in known and value is not None}
    if arguments.amp is not None:
        given["amp_dtype"] = AMP[arguments.amp]
    return {**call, **given}


def table(found: BatchSize) -> str:
    """Format the sizes that were tried, in order of size."""
    lines = [f"{'batch size':>10}  {'fits':<4}  {'peak memory':>12}  {'samples/s':>10}"]
    for trial in sorted(found.tried):
        rate = f"{trial.samples_per_second:>10,.1f}" if trial.ok else f"{'-':>10}"
        mark = "  <- fits" if trial.size == found else ""
        mark += "  <- fastest" if trial.size == found.fastest else ""
        fits = "yes" if trial.ok else "no"
        lines.append(f"{trial.size:>10}  {fits:<4}  {format_bytes(trial.peak_bytes):>12}  {rate}{mark}")
    return "\n".join(lines)


def is_ours(error: BaseException) -> bool:
    """Whether the innermost frame of an error is in this package."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(__file__).parent in Path(frames[-1].filename).parents


_REASONS = {
    "oom": "larger ones run out of memory",
    "max": "max_batch_size allows no larger one",
    "dataset": "dataset_size allows no larger one",
}


def run(arguments: argparse.Namespace) -> int:
    """Find the size, print a table and, with `--target`, the plan; return the exit status."""
    try:
        call = arguments_for(arguments)
    except FitError as error:
        print(f"accumkernels fit: error: {error}", file=sys.stderr)
        return 2
    try:
        found = find_batch_size(**call)
    except (TypeError, ValueError) as error:
        if not is_ours(error):
            raise  # the user's own code failed: its traceback helps
        print(f"accumkernels fit: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "not even the smallest batch fits" not in str(error):
            raise
        print(f"accumkernels fit: {error}", file=sys.stderr)
        return 1
    print(table(found))
    print(f"batch size {found}: {_REASONS[found.reason]}")
    if arguments.target is not None:
        try:
            print()
            print(plan(arguments.target, found, world_size=arguments.world_size))
        except ValueError as error:
            print(f"accumkernels fit: error: {error}", file=sys.stderr)
            return 2
    return 0
