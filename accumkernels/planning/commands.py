"""`python -m accumkernels fit` and `plan`; what `compare` shares with them."""

from __future__ import annotations

import argparse
import importlib
import inspect
import reprlib
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..arguments import as_bytes
from ..devices import default
from ..splitting.memory import format_bytes
from .batch_size import MODES, BatchSize, find_batch_size
from .costs import measure_step_costs
from .worth import AccumulationPlan, plan

# ---- `python -m accumkernels fit MODULE:FACTORY`: find the batch size of a user's own model.
#
# The factory is a function without arguments that returns `find_batch_size`'s arguments in a dict; only `model` is
# required. Options on the command line override what the factory returns::
#
#     # train.py
#     def fit():
#         model = MyModel()
#         return {"model": model, "make_batch": lambda n: (torch.randn(n, 3, 224, 224), torch.randint(0, 1000, (n,))),
#                 "loss_fn": torch.nn.functional.cross_entropy, "dataset_size": 50_000}
#
#     python -m accumkernels fit train:fit --device cuda --amp bf16 --mode binsearch --target 512

AMP = {"fp16": torch.float16, "bf16": torch.bfloat16}
_OFFLOAD = "keep sums, masters and optimizer state in host memory"


class UserError(Exception):
    """An error that the user can fix; the message is one line."""


def nbytes(text: str) -> str:
    """Check for argparse that `as_bytes` takes a text, and return it."""
    try:
        as_bytes(text, "--memory-limit", of_a_device=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_fit(commands: Any) -> None:
    """Add the command to argparse's `commands`."""
    parser = commands.add_parser(
        "fit",
        help="find the largest batch size at which a model of yours trains",
        description="Find the largest micro-batch by training: FACTORY() returns the arguments of "
        "accumkernels.find_batch_size in a dict with 'model' at least; options override them.",
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="as in train:fit for fit() in train.py")
    parser.add_argument("--device", help="default: the factory's, else the accelerator that is there, else cpu")
    parser.add_argument("--mode", choices=MODES, help="power of two (default), or the exact limit")
    parser.add_argument("--dataset-size", type=int, metavar="N", help="no larger batch is tried (default: 65536)")
    parser.add_argument("--max-batch-size", type=int, metavar="N", help="no larger batch is tried")
    parser.add_argument("--num-iterations", type=int, metavar="N", help="training steps per size (default: 5)")
    parser.add_argument("--multiple-of", type=int, metavar="N", help="try only multiples of N")
    parser.add_argument(
        "--accumulate", type=int, metavar="K", help="train with FusedAccumulator, K micro-batches a step"
    )
    parser.add_argument("--amp", choices=AMP, help="autocast to this dtype")
    parser.add_argument("--cpu-offload", action="store_true", default=None, help=_OFFLOAD)
    parser.add_argument("--margin", type=float, metavar="F", help="fraction of the memory to leave free (default: 0)")
    parser.add_argument("--memory-limit", type=nbytes, metavar="BYTES", help="of a smaller device, as in 8GiB")
    parser.add_argument("--target", type=int, metavar="N", help="plan how to reach this batch size with what was found")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks for the plan (default: 1)")


def _factory(place: str) -> Any:
    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise UserError(f"{place!r} is not MODULE:FACTORY, as in train:fit")
    hint = ""
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        hint = f": a module is named with dots, from a folder on the path: {dotted}:{name}"
    missing = UserError(f"there is no module {module_name!r} on the path{hint}")
    if module_name.startswith("."):  # no module is named so; import_module takes it for a relative import
        raise missing
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # an import inside the module failed
        raise missing from None
    factory: Any = module
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise UserError(f"{module_name!r} has no function {name!r}")
    return factory


def arguments_for(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect the arguments of `find_batch_size`: the factory's, overridden by the command line.

    Raises:
        UserError: MODULE:FACTORY, or what it returns, is wrong.
    """
    made = _factory(arguments.factory)()
    if not isinstance(made, Mapping):
        raise UserError(
            f"{arguments.factory} must return a dict of find_batch_size's arguments, got {reprlib.repr(made)}"
        )
    known = inspect.signature(find_batch_size).parameters
    unknown = [str(key) for key in made if key not in known]
    if unknown:
        raise UserError(f"{arguments.factory} returns {', '.join(unknown)}; find_batch_size takes {', '.join(known)}")
    if "model" not in made:
        raise UserError(f"{arguments.factory} returns no 'model'")
    call = {"device": default().type, **made}
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
    return bool(frames) and Path(__file__).parent.parent in Path(frames[-1].filename).parents


_REASONS = {
    "oom": "larger ones run out of memory",
    "max": "max_batch_size allows no larger one",
    "dataset": "there are no more samples",
}


def run_fit(arguments: argparse.Namespace) -> int:
    """Find the size, print a table and, with `--target`, the plan; return the exit status."""
    target, ranks = arguments.target, arguments.world_size
    call = arguments_for(arguments)
    if target is not None:
        plan(target, target, world_size=ranks)  # a wrong one is an error before anything is trained
    try:
        found = find_batch_size(**call)
    except RuntimeError as error:
        if "not even the smallest batch fits" not in str(error):
            raise
        print(f"accumkernels fit: {error}", file=sys.stderr)
        return 1
    print(table(found))
    print(f"batch size {found}: {_REASONS[found.reason]}")
    if target is not None:
        print(f"\n{plan(target, found, world_size=ranks)}")
    return 0


# ---- `python -m accumkernels compare MODULE:FACTORY`: its options; demo/compare.py runs it


def add_compare(commands: Any) -> None:
    """Add the command to argparse's `commands`."""
    parser = commands.add_parser(
        "compare",
        help="stock accumulation against FusedAccumulator, on a model of yours",
        description="Train what FACTORY() returns, as for fit, in one big batch, with stock accumulation and with "
        "FusedAccumulator: speed, peak memory, and the gradient's error against the big batch. Print a table, write "
        "compare.png and compare.json. The model is as before afterwards.",
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="as in train:fit for fit() in train.py")
    parser.add_argument("--device", help="default: the factory's, else the accelerator that is there, else cpu")
    parser.add_argument("--micro-batch-size", type=int, metavar="N", help="samples (default: 8, or max_batch_size)")
    parser.add_argument("--accumulate", type=int, metavar="K", help="micro-batches a step (default: 8)")
    parser.add_argument("--amp", choices=AMP, help="autocast to this dtype; fp16 with a GradScaler")
    parser.add_argument("--memory-limit", type=nbytes, metavar="BYTES", help="of a smaller device, as in 8GiB")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times to train each way (default: 5)")
    parser.add_argument("--no-cache-casts", action="store_true", help="for models that edit weights inside a window")
    parser.add_argument(
        "--out", type=Path, default=Path("compare"), metavar="DIR", help="for the files (default: ./compare)"
    )


# ---- `python -m accumkernels plan`: print the table of a plan, and whether it is worth it.
#
# The costs of a step come from the options, or from measuring a user's own model: `--measure train:fit` trains on trial
# what `fit()` in train.py returns, as `python -m accumkernels fit` does.

_OPTIONS = {
    "target_batch_size": "--target",
    "max_micro_batch_size": "--max-micro",
    "world_size": "--world-size",
    "samples_per_second": "--samples-per-second",
    "optimizer_seconds": "--optimizer-seconds",
    "reduction_seconds": "--reduction-seconds",
    "noise_scale": "--noise-scale",
    "duration": "--duration",
}
_COSTS = ("samples_per_second", "optimizer_seconds", "reduction_seconds")


def add_plan(commands: Any) -> None:
    """Add the command to argparse's `commands`."""
    parser = commands.add_parser(
        "plan",
        help="reach a batch size with micro-batches that fit, and say whether it is worth it",
        description="Print the micro-batches that make up a batch exactly: the fewest possible, and nearly equal. With "
        "the costs of a step, say whether to accumulate at all: --measure finds them by training.",
    )
    parser.add_argument("--target", type=int, required=True, metavar="N", help="samples per optimizer step, all ranks")
    parser.add_argument("--max-micro", type=int, required=True, metavar="N", help="the largest micro-batch that fits")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of data parallelism (default: 1)")
    parser.add_argument("--samples-per-second", type=float, metavar="X", help="of one rank, without accumulation")
    parser.add_argument("--optimizer-seconds", type=float, metavar="S", help="of one optimizer step")
    parser.add_argument(
        "--reduction-seconds", type=float, metavar="S", help="of one reduction of the gradients over ranks"
    )
    parser.add_argument("--noise-scale", type=float, metavar="N", help="the critical batch size, in samples")
    parser.add_argument(
        "--measure", dest="factory", metavar="MODULE:FACTORY", help="measure costs: as in fit's train:fit"
    )
    parser.add_argument(
        "--device", help="to measure on (default: the factory's, else the accelerator that is there, else cpu)"
    )
    parser.add_argument("--amp", choices=AMP, help="measure under autocast to this dtype")
    parser.add_argument("--cpu-offload", action="store_true", default=None, help=_OFFLOAD)
    parser.add_argument("--duration", type=float, default=10.0, metavar="S", help="seconds to measure (default: 10)")


def as_options(text: object) -> str:
    """Return a text in which arguments have the names that they have on the command line."""
    said = str(text)
    for name, option in _OPTIONS.items():
        said = said.replace(name, option)
    return said


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; return the exit status."""
    print(as_options(_plan(arguments)))
    return 0


def _plan(arguments: argparse.Namespace) -> AccumulationPlan:
    """Make the plan with the given costs, and measure the others."""
    given = {name: getattr(arguments, name) for name in _COSTS if getattr(arguments, name) is not None}
    wanted = {"world_size": arguments.world_size, "noise_scale": arguments.noise_scale}
    made = plan(arguments.target, arguments.max_micro, **wanted, **given)
    if arguments.factory is None:
        return made
    known = inspect.signature(measure_step_costs).parameters
    call = {name: value for name, value in arguments_for(arguments).items() if name in known}
    call |= {"micro_batch_size": made.micro_batch_sizes[0], "duration": arguments.duration}
    costs = measure_step_costs(**call)._asdict()
    if arguments.world_size > 1:
        del costs["reduction_seconds"]  # a process alone cannot know it
    return plan(arguments.target, arguments.max_micro, **wanted, **{**costs, **given})
