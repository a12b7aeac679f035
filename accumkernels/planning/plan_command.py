"""`python -m accumkernels plan`: print the table of a plan, and whether it is worth it.

The costs of a step come from the options, or from measuring a user's own model: `--measure train:fit` trains on trial
what `fit()` in train.py returns, as `python -m accumkernels fit` does.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

from .costs import measure_step_costs
from .fit_command import AMP, FitError, arguments_for, is_ours
from .worth.plan import AccumulationPlan, plan

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


def add_parser(commands: Any) -> None:
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
        "--device", help="to measure on (default: the factory's, else cuda where there is one, else cpu)"
    )
    parser.add_argument("--amp", choices=AMP, help="measure under autocast to this dtype")
    parser.add_argument("--duration", type=float, default=10.0, metavar="S", help="seconds to measure (default: 10)")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return the exit status."""
    try:
        print(_plan(arguments))
    except FitError as error:
        print(f"accumkernels plan: error: {error}", file=sys.stderr)
        return 2
    except (TypeError, ValueError) as error:
        if not is_ours(error):
            raise  # the user's own code failed: its traceback helps
        message = str(error)
        for name, option in _OPTIONS.items():
            message = message.replace(name, option)
        print(f"accumkernels plan: error: {message}", file=sys.stderr)
        return 2
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
