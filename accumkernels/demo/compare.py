"""`python -m accumkernels compare MODULE:FACTORY`: stock accumulation against FusedAccumulator on a user's own model.

The factory is that of `fit` (planning/commands.py). One batch of K micro-batches, and a short one, is trained in three
ways. The model is trained in place and restored, since there may be no memory for a copy; only the exact gradient is
that of a copy, in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import devices
from ..arguments import as_bytes
from ..batch_statistics import uses_batch_statistics
from ..errors import is_oom_error
from ..planning.commands import UserError, arguments_for
from ..planning.training import Training, positive_int, source_of, training_for
from ..planning.trial import Trials
from ..splitting.batches import TreeSamples, tree_map
from ..splitting.memory import format_bytes, let_go
from . import report
from .command import Display, in_short, run_command, versions_and_device
from .gpt import Window
from .train import METHODS, BigBatch, Fused, Gradient, Method, StockAccumulation, distance, gradient

MICRO_BATCH_SIZE = 8
ACCUMULATION_STEPS = 8
ITERATIONS = 5  # windows of a trial
SHORT = 5 / 16  # of a full window's samples
SAME_LOSS = 1e-4  # relative: two forwards of the same batch, whose sums a device may add up in another order
WRONG = 0.01  # relative error of a gradient that is not only rounded, to 16 bit or whatever a loss does inside
WRONG_IN_FP32 = 1e-3  # the same without autocast, in a model whose big batch is as near


# ---- What is trained: the samples of one optimizer step, with their weights


class Part(NamedTuple):
    """Samples in one forward pass; `tokens` is what their mean loss averages over."""

    batch: Any
    tokens: float


def window_of(samples: TreeSamples, count: int, micro_batch_size: int, weigh: Callable[[Any, int], float]) -> Window:
    """The first `count` samples, in micro-batches of `micro_batch_size`, the last one maybe smaller."""
    parts = []
    for start in range(0, count, micro_batch_size):
        indices = range(start, min(start + micro_batch_size, count))
        batch = samples.part(indices)
        parts.append(Part(batch, weigh(batch, len(indices))))
    return Window(Part(samples.part(range(count)), sum(part.tokens for part in parts)), parts)


class Comparison:
    """A training, and what is the same for all three ways.

    Args:
        training: What is trained.
        micro_batch_size: Samples of a micro-batch.
        steps: Micro-batches of a full window.
        cache_casts: See `Method`.

    Attributes:
        unit: "tokens" if `loss_fn` returns weights that are no numbers of samples, else "samples".
        evaluates: Why gradients are compared in eval mode; None if they are not.

    Raises:
        UserError: `make_batch` makes no such batch, or the loss is not finite, or another one each time.
    """

    def __init__(self, training: Training, micro_batch_size: int, steps: int, cache_casts: bool) -> None:
        self.training = training
        self.steps = steps
        self.unit = "samples"
        self.evaluates: str | None = None
        self._cache_casts = cache_casts
        model = training.model
        count = micro_batch_size * steps
        batch = next(training.source(count, training.device))
        samples = TreeSamples(batch)
        if len(samples) != count:
            raise UserError(f"the factory's batch of {count} has {len(samples)} samples")
        with self.restored():
            first = samples.part(range(micro_batch_size))
            self._weigh(first, micro_batch_size)
            self.evaluates = self._why_eval(first)  # its mode stays: BatchNorm cannot train on a rest of one sample
            self.full = window_of(samples, count, micro_batch_size, self._weigh)
            self.short = window_of(samples, max(1, int(count * SHORT)), micro_batch_size, self._weigh)
        if not min(self.full.big_batch.tokens, self.short.big_batch.tokens) > 0:
            raise UserError("loss_fn returned weights that sum to 0 in a window, whose mean is then undefined")
        self.parameters = sum(param.numel() for param in model.parameters())
        self.init_scale = self._settled_scale() if training.amp_dtype is torch.float16 else None

    def restored(self) -> contextlib.ExitStack:
        """Put the model onto its device, in the mode of the comparison, and everything back in the end."""
        model = self.training.model
        stack = contextlib.ExitStack()
        stack.callback(self.training.snapshot().restore)
        self.training.place()
        if self.evaluates:
            model.eval()
        return stack

    @torch.enable_grad()
    def _weigh(self, batch: Any, count: int) -> float:
        try:
            loss, weight = self.training.loss_and_weight(batch)
        except BaseException as error:
            if not is_oom_error(error):
                raise
            raise UserError(does_not_fit(count, str(error))) from None
        if loss.numel() != 1 or not loss.requires_grad:
            graph = "" if loss.requires_grad else " that no trainable parameter has a part in"
            raise UserError(
                f"the loss is a tensor of shape {tuple(loss.shape)}{graph}: the factory's loss_fn must return the mean "
                "loss of a batch, one element to run backward from"
            )
        value = float(loss.detach())
        if not math.isfinite(value):
            raise UserError(f"the loss of a micro-batch of {count} is {value}")
        tokens = float(count) if weight is None else float(weight)
        if tokens != count:
            self.unit = "tokens"
        return tokens

    def _why_eval(self, batch: Any) -> str | None:
        """Why the model in its mode is not the same function of each sample at each call; then it is in eval mode."""
        model = self.training.model
        names = uses_batch_statistics(model)
        if not names and len(self._losses(batch)) == 1:
            return None
        why = f"{names[0]!r} normalizes over the micro-batch" if names else "it is random in train mode (dropout)"
        model.eval()
        if uses_batch_statistics(model):
            raise UserError(f"{why}, in eval mode too, so that there is no gradient of the big batch to compare with")
        losses = self._losses(batch)
        if len(losses) > 1:
            raise UserError(
                f"the model is not deterministic: two forwards of the same batch have the losses {losses[0]:.6g} and "
                f"{losses[1]:.6g}, in eval mode too, so that there is no gradient to compare with"
            )
        return why

    @torch.no_grad()
    def _losses(self, batch: Any) -> list[float]:
        first, second = (float(self.training.loss(batch)) for _ in range(2))
        return [first] if math.isclose(first, second, rel_tol=SAME_LOSS, abs_tol=1e-12) else [first, second]

    def method(self, cls: type[Method], optimizer: Optimizer, steps: int | None = None) -> Method:
        """One of the three ways; `steps` as in `Method`."""
        return cls(
            self.training.model,
            lambda part: self.training.loss(part.batch),
            optimizer,
            steps or self.steps,
            init_scale=self.init_scale,
            cache_casts=self._cache_casts,
        )

    def parts(self, cls: type[Method], optimizer: Optimizer, stack: contextlib.ExitStack) -> list[Callable[[], object]]:
        """The parts of training the full window; see `Trials`."""
        method = self.method(cls, optimizer)
        stack.callback(method.close)
        return [functools.partial(method.backward, self.full), method.step]

    # ---- Gradients, and how far they are from the exact one

    def error(self, cls: type[Method], window: Window, exact: Gradient) -> float:
        """How far the window's gradient is from the exact one; nan if memory runs out."""
        found = self.gradient(cls, window)
        return math.nan if found is None else distance(found, exact)

    def is_no_mean(self, window: Window, exact: Gradient) -> bool:
        """Whether the mean of micro-batches is not the big batch's, without autocast, whose rounding hides it."""
        plain = copy.copy(self)
        plain.training, plain.init_scale = replace(self.training, amp_dtype=None), None
        big, fused = (plain.error(cls, window, exact) for cls in (BigBatch, Fused))
        return fused > WRONG_IN_FP32 and fused > 4 * big  # False where one is nan

    def gradient(self, cls: type[Method], window: Window, steps: int | None = None) -> Gradient | None:
        """The window's averaged gradient without loss scale, before clipping; None if memory runs out."""
        model = self.training.model
        with self.restored(), torch.enable_grad():
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
            method = self.method(cls, optimizer, steps)
            try:
                method.backward(window)
                method.unscale()
                return gradient(model)
            except BaseException as error:
                if not is_oom_error(error):
                    raise
                let_go(error)
                return None
            finally:
                method.close()

    def _settled_scale(self) -> float:
        """The largest loss scale, a power of two, at which no gradient of a micro-batch's undivided loss overflows."""
        scale = 2.0**16
        while scale >= 1:
            self.init_scale = scale
            found = self.gradient(StockAccumulation, self.full, steps=1)
            if found is None or all(grad is None or torch.isfinite(grad).all() for grad in found):
                return scale
            scale /= 2
        raise UserError("gradients overflow in fp16 whatever the loss scale is: take --amp bf16")

    def exact(self, window: Window) -> tuple[Gradient, str, str]:
        """The gradient of the big batch, in which precision it is, and how it was computed.

        Raises:
            UserError: it can be computed neither in float64 nor in float32.
        """
        causes = []
        for dtype in (torch.float64, torch.float32):
            for parts_of, how in (
                (lambda window: [window.big_batch], "in one batch"),
                (self._singles, "as the sum of its samples' (the batch does not fit)"),
            ):
                try:
                    return self._exact(parts_of(window), dtype), str(dtype).removeprefix("torch."), how
                except Exception as error:
                    causes.append(let_go(error).partition("\n")[0])
                    if not is_oom_error(error):
                        break
        raise UserError(f"the big batch's gradient can be had neither in float64 nor in float32: {causes[0]}")

    def _singles(self, window: Window) -> list[Part]:
        """The samples one by one, without those of weight 0, whose mean is one over nothing: nan."""
        samples = TreeSamples(window.big_batch.batch)
        singles = [samples.part([index]) for index in range(len(samples))]
        with self.restored(), torch.no_grad():
            weights = [self.training.loss_and_weight(single)[1] for single in singles]
        tokens = [1.0 if weight is None else float(weight) for weight in weights]
        return [Part(single, number) for single, number in zip(singles, tokens, strict=True) if number]

    def _exact(self, parts: Sequence[Part], dtype: torch.dtype) -> Gradient:
        model = copy.deepcopy(self.training.model).to(self.training.device, dtype)
        if self.evaluates:
            model.eval()
        training = replace(self.training, model=model, amp_dtype=None)

        def widened(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        total = sum(part.tokens for part in parts)
        with torch.enable_grad():
            for part in parts:
                (training.loss(tree_map(widened, part.batch)) * (part.tokens / total)).backward()
        return gradient(model)


def does_not_fit(size: int, cause: str) -> str:
    """The error about a micro-batch that is too large."""
    return (
        f"a micro-batch of {size} does not fit ({cause.partition(chr(10))[0]}): pass a smaller --micro-batch-size, "
        "which `python -m accumkernels fit` finds"
    )


# ---- Speed and memory


def train(comparison: Comparison, rounds: int, memory_limit: int | str | None, display: Display) -> list[report.Run]:
    """Train the full window in all three ways, `rounds` times in turn.

    A big batch that exceeds `memory_limit` is tried without it too, since its bytes say how far it is from fitting.

    Raises:
        UserError: a micro-batch does not fit.
    """
    runs = [report.Run(cls.name, ends_short=False) for cls in METHODS]
    window = comparison.full
    size = len(TreeSamples(window.big_batch.batch))
    micro_batch = len(TreeSamples(window.micro_batches[0].batch))
    ways = [functools.partial(comparison.parts, cls) for cls in METHODS]
    with Trials(comparison.training, ITERATIONS, memory_limit) as trials:
        for number in range(rounds):
            for turn in range(len(runs)):
                index = (number + turn) % len(runs)  # no method always goes first
                run = runs[index]
                if run.fits:
                    outcome = trials.try_size(size, None, ways[index])
                    run.fits = outcome.trial.ok
                    run.peak_bytes = max(run.peak_bytes, outcome.trial.peak_bytes)
                    if run.fits:
                        run.step_seconds.append(size / outcome.trial.samples_per_second)
                        run.tokens.append(window.big_batch.tokens)
                    elif index > 0:
                        raise UserError(does_not_fit(micro_batch, f"{run.name}: {outcome.failure}"))
                display.measured(f"round {number + 1}, {run.name}" + ("" if run.fits else ": does not fit"))
    if not runs[0].fits and memory_limit is not None:
        with Trials(comparison.training, ITERATIONS) as trials:
            runs[0].peak_bytes = max(runs[0].peak_bytes, trials.try_size(size, None, ways[0]).trial.peak_bytes)
    return runs


# ---- The command


def compare(arguments: argparse.Namespace, display: Display) -> None:
    """Measure, print the table, and write the files.

    Raises:
        UserError, TypeError, ValueError: an argument or what the factory returns is wrong, or cannot be compared.
    """
    call = arguments_for(arguments)
    if call.pop("cpu_offload", False):
        raise UserError("cpu_offload: compare trains with sums on the device: leave it out")
    asked = call.pop("accumulate", None)
    steps = positive_int(ACCUMULATION_STEPS if asked is None else asked, "--accumulate")
    rounds = positive_int(arguments.rounds, "--rounds")
    default = min(MICRO_BATCH_SIZE, call.get("max_batch_size") or MICRO_BATCH_SIZE)
    size = positive_int(
        default if arguments.micro_batch_size is None else arguments.micro_batch_size, "--micro-batch-size"
    )
    if steps < 2:
        raise UserError("--accumulate 1 accumulates nothing: pass at least 2")
    batches, others = (
        {name: call[name] for name in inspect.signature(taker).parameters if name in call}
        for taker in (source_of, training_for)
    )
    training = training_for("compare", source=source_of(**batches), **others)
    budget = call.get("memory_limit")
    limit = None if budget is None else as_bytes(budget, "memory_limit", of_a_device=True)
    dtypes = {p.dtype for p in training.model.parameters() if p.is_floating_point()}
    computed = sorted(map(str, dtypes)) if training.amp_dtype is None else [str(training.amp_dtype)]
    amp = " and ".join(dtype.removeprefix("torch.") for dtype in computed)
    versions = versions_and_device(training.device)
    console = display.console
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {arguments.out}: {error.strerror}") from None
    with display:
        display.begin_measuring(2 + rounds * len(METHODS))
        comparison = Comparison(training, size, steps, not arguments.no_cache_casts)
        console.print(
            f"{arguments.factory}: {comparison.parameters / 1e6:.3g} M parameters, {steps} micro-batches of {size} "
            f"samples, {amp}, on {versions['device']}; FusedAccumulator's backend: {versions['backend']}.",
            highlight=False,
        )
        runs = train(comparison, rounds, budget, display)
        for key, window in (("short", comparison.short), ("full", comparison.full)):
            exact, precision, how = comparison.exact(window)
            for run, cls in zip(runs, METHODS, strict=True):
                run.gradient_errors[key] = comparison.error(cls, window, exact)
            display.measured(f"gradient errors, {key} window")
        wrong = comparison.is_no_mean(window, exact)
    display.stage = "while writing the files"
    mode = f"; in eval mode, since {comparison.evaluates}" if comparison.evaluates else ""
    batch = f"{size * steps} samples"
    on_budget = "" if limit is None else f", on a budget of {format_bytes(limit)}"
    report.print_table(
        console,
        runs,
        unit=comparison.unit,
        exact=precision,
        how=how,
        where=mode,
        full=steps,
        short=len(comparison.short.micro_batches),
        amp=amp,
        memory="memory in torch's allocator" if devices.counts_memory(training.device) else "tensors alive at a time",
        batch=f"a batch of {batch}{on_budget}",
    )
    big, stock, fused = runs
    wrong |= fused.gradient_errors["full"] > max(WRONG, 4 * big.gradient_errors["full"])  # False where that is nan
    where = " in eval mode" if comparison.evaluates else ""
    report.print_conclusion(
        console,
        stock,
        fused,
        comparison.unit,
        scaled=comparison.init_scale is not None,
        cache_casts=training.amp_dtype is not None and not arguments.no_cache_casts,
        clips=False,
        mode=where,
        loop=not wrong,
    )
    if wrong:
        console.print(
            "FusedAccumulator's gradient is not the big batch's here, so the loss is no mean over samples: have "
            "loss_fn return (loss, weight), the weight being what it averages over, such as the number of tokens that "
            "count. Of a sum the weight is 1, and acc.step(optimizer, divisor=...) divides. Losses that couple samples "
            "need acc.backward_coupled.",
            style="bold",
            highlight=False,
        )
    settings = {
        "factory": arguments.factory,
        "parameters": comparison.parameters,
        "micro_batch_size": size,
        "accumulation_steps": steps,
        "short_window": [part.tokens for part in comparison.short.micro_batches],
        "unit": comparison.unit,
        "autocast": amp if training.amp_dtype is not None else None,
        "computed_in": amp,
        "loss_scale": comparison.init_scale,
        "exact_gradient": f"{precision}, {how}",
        "eval_mode": comparison.evaluates,
        "memory_limit": limit,
        "cache_casts": not arguments.no_cache_casts,
        "speed_to_stock": report.speedup(fused, stock),
    }
    title = f"{arguments.factory}, {comparison.parameters / 1e6:.3g} M parameters, {amp}; {in_short(versions)}"
    if comparison.evaluates:
        title += f"\ngradients in eval mode, since {comparison.evaluates}"
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:  # both files or none
        made = Path(folder)
        report.draw(made / "compare.png", runs, title, unit=comparison.unit, batch=batch, budget=limit)
        report.write_json(made / "compare.json", runs, settings=settings, versions=versions)
        for file in made.iterdir():
            file.replace(arguments.out / file.name)


def run_compare(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    return run_command("compare", arguments.out, lambda display: compare(arguments, display))
