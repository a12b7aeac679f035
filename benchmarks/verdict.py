"""What `ak.plan` says of five trainings, held against the trainings themselves.

    python -m benchmarks.verdict [--cases 1,5] [--csv FILE]

For each case the costs of a step are measured (`planning.costs.measure_step_costs`), and the plan predicts the time of
a sample for every number of micro-batches K. Then loops as users write them are timed with K = 1 (stock training),
powers of two, and the verdict's K, in turns. The fastest run of each micro-batch and of each update counts, as in the
measurement of the costs, so that what else a machine does hardly matters. A verdict is right where, by the times of the
loops, no K that was timed reaches a loss in more than 10 % less time: 5 % is what `plan` does not deem worth it, and
5 % is left to the measurement. Everything runs on the CPU, each training in a process of its own, with one thread.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import accumkernels as ak
from accumkernels.planning.costs import StepCosts, measure_step_costs

from .harness.machine import environment
from .harness.measure import Timer
from .harness.processes import in_new_process
from .harness.results import Row, groups, write_csv, write_json
from .harness.tables import Table
from .methods.verdict import CASES, Case, loop

COLUMNS = (
    *("case", "parameters", "micro_batch", "target", "noise_scale", "micro_batches", "us_per_sample"),
    *("us_per_sample_predicted", "error", "time_to_loss", "verdict", "why", "right", "device", "threads"),
    *("instruction_set", "torch", "python", "commit", "date"),
)
TOLERANCE = 1.10
TURNS = 4
LOOPS = 3  # times the time of the costs: there are more of them, and each is to be undisturbed as often
STEPS = 6  # of a loop in each turn; the first makes the optimizer's state


class Measured(NamedTuple):
    """A plan with its verdict, and seconds per sample by K as loops took them."""

    plan: ak.AccumulationPlan
    seconds: dict[int, float]
    parameters: int


def measure(case: Case, duration: float) -> Measured:
    """Measure costs for `duration` seconds, predict, and train, all in turns."""
    found: list[StepCosts] = []
    parts: dict[int, list[float]] = {}
    for _ in range(TURNS):
        costs = measure_step_costs(
            case.model(),
            "cpu",
            case.micro_batch,
            make_batch=case.batch,
            optimizer_fn=case.optimizer,
            duration=duration / TURNS,
        )
        found.append(costs)
        # Of several measurements the fastest was the least disturbed.
        best = min(found, key=lambda costs: sum(costs.window_seconds(steps, case.micro_batch) for steps in (1, 4)))
        plan = ak.plan(case.target, case.micro_batch, noise_scale=case.noise_scale, **best._asdict())
        powers = {2**power for power in range(plan.accumulation_steps.bit_length())}
        _train(case, sorted(powers | {plan.accumulation_steps, plan.best_steps}), LOOPS * duration / TURNS, parts)

    # What a window takes undisturbed is the sum of its parts.
    seconds = {steps: sum(parts[steps]) / (steps * case.micro_batch) for steps in sorted(parts)}
    return Measured(plan, seconds, sum(param.numel() for param in case.model().parameters()))


def _train(case: Case, counts: list[int], duration: float, parts: dict[int, list[float]]) -> None:
    """Train with each number of micro-batches in turn, and keep the least seconds of each part."""
    timer = Timer(torch.device("cpu"))
    end = time.monotonic() + duration
    while time.monotonic() < end:
        for steps in counts:
            step = loop(case, steps)  # alone in memory and in the caches, as in training
            for _ in range(STEPS):
                seconds = [timer(part) for part in step]
                parts[steps] = list(map(min, parts.get(steps, seconds), seconds))
            del step
            gc.collect()


def measure_on_one_thread(name: str, duration: float) -> Measured:
    """Measure a case on one thread, in a process of its own."""
    torch.set_num_threads(1)
    return measure(CASES[name], duration)


def rows(name: str, case: Case, measured: Measured, about: Row) -> list[Row]:
    """A row per K."""
    plan = measured.plan
    needed = {
        steps: 1 + (steps * case.micro_batch / case.noise_scale if case.noise_scale else 0.0)
        for steps in measured.seconds
    }
    to_loss = {steps: seconds * needed[steps] for steps, seconds in measured.seconds.items()}
    right = to_loss[plan.best_steps] <= TOLERANCE * min(to_loss.values())
    found = []
    for steps, seconds in measured.seconds.items():
        predicted = plan.seconds_per_sample(steps)
        row: Row = {
            **about,
            **{"case": name, "parameters": measured.parameters, "micro_batch": case.micro_batch},
            **{"target": case.target, "noise_scale": case.noise_scale, "micro_batches": steps},
            "us_per_sample": float(f"{1e6 * seconds:.4g}"),
            "us_per_sample_predicted": float(f"{1e6 * predicted:.4g}"),
            "error": float(f"{predicted / seconds - 1:.3f}"),
            "time_to_loss": float(f"{to_loss[steps] / to_loss[1]:.3f}"),
            **{"verdict": plan.verdict, "why": plan.why, "right": right, "threads": 1},
        }
        found.append({column: row.get(column) for column in COLUMNS})
    return found


def show(found: Sequence[Row]) -> None:
    """A table per case."""
    for group in groups(found, "case").values():
        first = group[0]
        title = f"{first['case']}: {first['parameters']:,} parameters. {first['verdict']}, since {first['why']}. "
        title += "Right." if first["right"] else "Wrong."
        table = Table(title, ("K", "us per sample", "predicted", "error", "time to a loss"))
        for r in group:
            cells = (r["micro_batches"], r["us_per_sample"], r["us_per_sample_predicted"])
            table.add(*cells, f"{r['error']:+.1%}", f"{r['time_to_loss']:.2f}")
        table.print()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 1 where a verdict is wrong or a time is predicted more than 15 % off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="1,2,3,4,5", help=f"by number: {', '.join(CASES)}")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds for costs; loops take 3 times that")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    # The processes' allocator keeps what is freed, as a GPU's does: else the time of a step is that of page faults,
    # which come and go with the state of the heap.
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(2**30), MALLOC_TRIM_THRESHOLD_=str(2**34))
    names = list(CASES)
    about = environment(torch.device("cpu"))
    found: list[Row] = []
    for number in map(int, arguments.cases.split(",")):
        name = names[number - 1]
        added = rows(name, CASES[name], in_new_process(measure_on_one_thread, name, arguments.duration), about)
        show(added)
        found += added
        write_csv(arguments.csv, found)
        write_json(arguments.json, found)
    return 0 if all(row["right"] and abs(float(str(row["error"]))) <= 0.15 for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
