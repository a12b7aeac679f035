"""`python -m accumkernels`: the doctor; `demo` and `compare`: against stock; `plan` and `fit`: choosing the batch."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .planning.commands import UserError, add_compare, add_fit, add_plan, as_options, is_ours, run_fit, run_plan


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m accumkernels",
        description="Without a command: say what works on this machine and why; exit status 1 when something that "
        "should work does not.",
    )
    parser.add_argument("--json", action="store_true", help="say it for programs")
    commands = parser.add_subparsers(dest="command")
    demo = commands.add_parser(
        "demo",
        help="train a small GPT three ways and compare",
        description="Train a small GPT on real text with one big batch, with stock accumulation and with "
        "FusedAccumulator; print a table, write demo.png and demo.json.",
    )
    demo.add_argument("--device", help="cpu, cuda or another accelerator (default: the one that is there)")
    demo.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="for the files (default: ./demo)")
    demo.add_argument("--steps", type=_positive, help="windows to train (default: as many as a minute allows)")
    demo.add_argument("--seed", type=int, default=0, help="of weights and order of the data (default: 0)")
    demo.add_argument(
        "--amp",
        choices=("bf16", "fp16", "none"),
        help="autocast; fp16 with a GradScaler (default: bf16 where there is it)",
    )
    add_plan(commands)
    add_fit(commands)
    add_compare(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's); the answer is the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError as error:  # `| head` has read enough
        if not is_ours(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except UserError as error:
        said = str(error)
    except (TypeError, ValueError) as error:
        if arguments.command in (None, "demo") or not is_ours(error):
            raise  # the user's own code failed: its traceback helps
        said = as_options(error)
    print(f"accumkernels {arguments.command}: error: {said}", file=sys.stderr)
    return 2


def _run(arguments: argparse.Namespace) -> int:
    """Run a command; return the exit status."""
    if arguments.command is None:
        from .doctor import report

        return report(as_json=arguments.json)
    if arguments.command in ("plan", "fit"):
        return (run_plan if arguments.command == "plan" else run_fit)(arguments)
    for package in ("rich", "matplotlib"):
        try:
            importlib.import_module(package)
        except ImportError:
            command = "the demo" if arguments.command == "demo" else arguments.command
            print(f'{command} needs {package}: pip install "accumkernels[demo]"', file=sys.stderr)
            return 2
    if arguments.command == "compare":
        from .demo.compare import run_compare

        return run_compare(arguments)
    from .demo.command import run

    return run(arguments.device, arguments.out, arguments.steps, arguments.seed, arguments.amp)


if __name__ == "__main__":
    sys.exit(main())
