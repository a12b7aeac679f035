"""`python -m accumkernels plan`: the table of a plan."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .plan import plan


def add_parser(commands: Any) -> None:
    """Add the command to argparse's `commands`."""
    parser = commands.add_parser(
        "plan",
        help="reach a batch size with micro-batches that fit",
        description="Print the micro-batches that make up a batch exactly: the fewest possible, and nearly equal.",
    )
    parser.add_argument("--target", type=int, required=True, metavar="N", help="samples per optimizer step, all ranks")
    parser.add_argument("--max-micro", type=int, required=True, metavar="N", help="the largest micro-batch that fits")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of data parallelism (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; the answer is the exit status."""
    try:
        print(plan(arguments.target, arguments.max_micro, world_size=arguments.world_size))
    except ValueError as error:
        message = str(error)
        for name, option in (("target_batch_size", "--target"), ("max_micro_batch_size", "--max-micro")):
            message = message.replace(name, option)
        print(f"accumkernels plan: error: {message.replace('world_size', '--world-size')}", file=sys.stderr)
        return 2
    return 0
