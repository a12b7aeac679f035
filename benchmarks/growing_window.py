"""Does a window that grows with the noise scale reach a loss sooner than the best window of fixed length?

    python -m benchmarks.growing_window [--seeds 0,1,2,3,4] [--target 2.3] [--csv FILE]

The demo's GPT is trained to one validation loss, with windows of 2, 4, 8 and 16 micro-batches of 4 samples, and with a
window that begins with 2 and follows the measured noise scale: every 20 steps it grows to it, to twice its length at
most, and never shrinks (McCandlish et al. 2018, arXiv:1812.06162). The learning rate is scaled by the square root of
the batch and Adam's beta2 by its half-life in samples, from one base for all, as docs/planning.md says. Counted are the
bytes of text and the process's own seconds on one thread until the loss is reached; validation does not count. The
fixed length that is best on average is compared with the growing one, seed by seed: the ratio's geometric mean, its
95 % interval and p by Student's t on logarithms.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from scipy import stats

import accumkernels as ak
from accumkernels.demo.gpt import CONTEXT, GPT, TRAINING_FILES, VALIDATION_FILES, Batch, read_samples

from .harness.arguments import command_line, usable
from .harness.machine import environment
from .harness.results import Row, write_csv
from .harness.tables import Table, progress

SAMPLES = 4  # of a micro-batch
FIXED = (2, 4, 8, 16)  # micro-batches of a window
FIRST, LONGEST = 2, 64  # micro-batches of the window that grows
EVERY, HALF_LIFE = 20, 10  # steps between looks, and the measure's memory
BASE_BATCH, BASE_LR, BASE_BETA2 = 16, 2e-3, 0.98
LOOK = 256  # samples from one validation to the next
MOST = 24_000  # samples; a run that needs more is ended
GROWS = "follows the noise scale"
COLUMNS = (
    *("window", "seed", "target", "reached", "tokens", "seconds", "steps", "last_batch", "loss", "parameters"),
    *("device", "threads", "instruction_set", "torch", "python", "commit", "date"),
)


def batches(samples: Sequence[bytes], seed: int) -> Iterator[Batch]:
    """Micro-batches in a new random order in each epoch."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(samples), generator=draw).tolist()
        for start in range(0, len(order) - SAMPLES + 1, SAMPLES):
            yield Batch.collate([samples[i] for i in order[start : start + SAMPLES]], torch.device("cpu"))


def train(length: int | None, seed: int, target: float) -> Row:
    """Train to the target with windows of one length, or (None) with one that grows."""
    torch.manual_seed(seed)
    samples, held_out = (
        [sample for sample in read_samples(files) if len(sample) == CONTEXT]
        for files in (TRAINING_FILES, VALIDATION_FILES)
    )
    validation = Batch.collate(held_out[:128], torch.device("cpu"))
    model = GPT()
    acc = ak.FusedAccumulator(model, noise_scale=HALF_LIFE if length is None else False)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=BASE_LR, betas=(0.9, BASE_BETA2), weight_decay=0.1, fused=True)
    loader = batches(samples, seed)
    size, used, steps, looked = length or FIRST, 0, 0, 0
    seconds, loss = 0.0, math.inf
    while loss > target and used < MOST:
        begin = time.process_time()
        if length is None and steps and steps % EVERY == 0:
            wanted = float(acc.noise_scale()) / SAMPLES
            if wanted > size:  # False for nan
                size = int(min(wanted, 2 * size, LONGEST))
        for group in optimizer.param_groups:
            group["lr"] = ak.suggest_learning_rate(BASE_LR, BASE_BATCH, size * SAMPLES, "sqrt")
            group["betas"] = (0.9, ak.suggest_betas(BASE_BETA2, BASE_BATCH, size * SAMPLES))
        for batch in (next(loader) for _ in range(size)):
            acc.backward(model(batch.inputs, batch.targets), weight=SAMPLES)
        acc.step(optimizer, max_norm=1.0)
        seconds += time.process_time() - begin
        used, steps = used + size * SAMPLES, steps + 1
        if used - looked >= LOOK:
            looked = used
            with torch.no_grad():
                loss = float(model(validation.inputs, validation.targets))
    acc.remove()
    return {
        **{"window": GROWS if length is None else str(length), "seed": seed, "target": target},
        **{"reached": loss <= target, "tokens": used * CONTEXT, "seconds": round(seconds, 2), "steps": steps},
        **{"last_batch": size * SAMPLES, "loss": round(loss, 4)},
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def compared(rows: Sequence[Row], column: str) -> tuple[str, float, float, float, float]:
    """The best fixed length, and how many times as much it needs as the window that grows.

    Returns:
        Its name; the geometric mean over seeds of the ratio, the ends of its 95 % interval, and p for "no difference".
    """
    of = {
        name: [float(str(r[column])) for r in rows if r["window"] == name] for name in {str(r["window"]) for r in rows}
    }
    best = min((name for name in of if name != GROWS), key=lambda name: statistics.mean(of[name]))
    logs = [math.log(fixed / grown) for fixed, grown in zip(of[best], of[GROWS], strict=True)]
    test = stats.ttest_1samp(logs, 0.0)
    low, high = test.confidence_interval(0.95)
    return best, math.exp(statistics.mean(logs)), math.exp(low), math.exp(high), float(test.pvalue)


def main(argv: Sequence[str] | None = None) -> int:
    """Train all, print and write."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="comma-separated")
    parser.add_argument("--target", type=float, default=2.3, help="nats per byte on held-out text")
    arguments = parser.parse_args(argv)
    about = environment(usable("cpu", 1))
    rows: list[Row] = []
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for seed in seeds:
        for length in (*FIXED, None):
            progress(f"seed {seed}: {GROWS if length is None else length}")
            found = {**about, **train(length, seed, arguments.target)}
            rows.append({column: found.get(column) for column in COLUMNS})
            write_csv(arguments.csv, rows)
    progress("")
    table = Table(
        f"to {arguments.target} nats per byte, means of {len(seeds)} seeds", ("window", "tokens", "s", "steps")
    )
    for name in dict.fromkeys(str(row["window"]) for row in rows):
        of = [row for row in rows if row["window"] == name]
        means = [statistics.mean(float(str(row[column])) for row in of) for column in ("tokens", "seconds", "steps")]
        table.add(name, f"{means[0]:,.0f}", f"{means[1]:.1f}", f"{means[2]:,.0f}")
    table.print()
    if len(seeds) > 1:
        for column in ("tokens", "seconds"):
            best, ratio, low, high, p = compared(rows, column)
            print(f"{column}: windows of {best} need {ratio:.3f} times as many ({low:.3f} to {high:.3f}), p = {p:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
