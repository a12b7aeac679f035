"""Runs the demo, from the command line's arguments to its files."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from accumkernels import __version__, ops

from ..demo import measure, picture, report
from .data import Corpus
from .display import Display
from .methods import ACCUMULATION_STEPS, INIT_SCALE, MAX_NORM, METHODS, Method
from .model import GPT
from .train import MICRO_BATCH_SIZES, choose_size, seconds_per_sample, train

# fp16 is too slow on the CPU: a product of 2048x128 and 128x512 takes 13 ms in fp16, 0.3 ms in bf16 (torch 2.13, two
# Zen 5 cores with AVX-512 BF16). bf16 needs no loss scale, but goes through the GradScaler like fp16.
AMP_DTYPES = {"cpu": torch.bfloat16, "cuda": torch.float16}
# The model is too small for many threads: a window three ways takes 0.5 s with two threads, 0.8 s with one (two Zen 5
# cores). When other programs use the cores too, two threads take 8 to 30 s, since they wait for each other in every op,
# and one takes 1.5 s.
THREADS = 1
# At a width of 128 there are 0.4 M gradients, whose handling is bound by calls rather than bytes; here there are 3.7 M.
WIDTH, HEADS = 384, 6


class DemoError(Exception):
    """An error that the user can fix; the message is one line."""


def choose_device(name: str | None) -> torch.device:
    """The device called `name`; by default a CUDA device if there is one.

    Raises:
        DemoError: There is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DemoError(f"--device {name}: no such device; use cpu or cuda") from None
    if device.type not in AMP_DTYPES:
        raise DemoError(f"--device {name}: the demo runs on cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            reason = "torch finds no usable GPU" if torch.version.cuda else "this torch is built without CUDA"
            raise DemoError(f"--device {name}: {reason}")
        if (device.index or 0) >= torch.cuda.device_count():
            raise DemoError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def timed_windows(steps: int) -> int:
    """The number of windows whose gradient handling is timed: 7, or fewer in a short run."""
    return min(7, steps)


def _measure(runs: list[report.Run], methods: list[Method], corpus: Corpus, steps: int, display: Display) -> None:
    """Fill in the numbers of `runs` that training does not give."""
    model = methods[0].model  # the big batch's
    amp_dtype = methods[0].amp_dtype
    full, last = corpus.window(steps), corpus.window(steps + 1, partial=True)  # not trained on
    timed = [corpus.window(steps + index) for index in range(timed_windows(steps))]
    display.begin_measuring(3 + len(runs))
    for key, window in (("full", full), ("last", last)):
        errors = measure.gradient_errors(METHODS, model, window, (amp_dtype, None))
        for run, (with_autocast, without) in zip(runs, errors, strict=True):
            run.gradient_errors[key] = with_autocast
            run.gradient_errors_without_autocast[key] = without
        display.measured()
    for run, seconds in zip(runs, measure.gradient_seconds(methods, timed), strict=True):
        run.gradient_seconds = seconds
    display.measured()
    for run, cls in zip(runs, METHODS, strict=True):
        run.peak_bytes = measure.peak_bytes(cls, model, full, amp_dtype)
        display.measured()


def _versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "accumkernels": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device} ({name})",
        "backend": ops.name(ops.select("auto", device)),
    }


def _demo(device: torch.device, out: Path, steps: int | None, seed: int, display: Display) -> None:
    console = display.console
    amp_dtype = AMP_DTYPES[device.type]
    torch.manual_seed(seed)
    model = GPT(width=WIDTH, heads=HEADS).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sample = Corpus(MICRO_BATCH_SIZES[0], ACCUMULATION_STEPS, device, seed).window(0).micro_batches[0]
    size = choose_size(seconds_per_sample(model, sample, amp_dtype))
    steps = steps or size.steps
    corpus = Corpus(size.micro_batch_size, ACCUMULATION_STEPS, device, seed)
    amp = str(amp_dtype).removeprefix("torch.")
    versions = _versions(device)
    console.print(
        f"A byte-level GPT of {parameters:,} parameters on Python's standard library: {steps} windows of "
        f"{ACCUMULATION_STEPS} x {size.micro_batch_size} samples, {amp} autocast, on {versions['device']}; "
        f"FusedAccumulator's backend: {versions['backend']}.",
        highlight=False,
    )
    methods = [cls(model, amp_dtype) for cls in METHODS]
    with display:
        display.begin_training([method.name for method in methods], steps)
        runs = train(methods, corpus, steps, display.trained)
        _measure(runs, methods, corpus, steps, display)
    display.stage = "while writing the files"
    report.print_table(
        console,
        runs,
        full=ACCUMULATION_STEPS,
        last=len(corpus.window(0, partial=True).micro_batches),
        amp=amp,
        timed=timed_windows(steps),
        memory="memory in torch's CUDA allocator" if device.type == "cuda" else "tensors alive at a time",
    )
    settings = {
        "steps": steps,
        "seed": seed,
        "parameters": parameters,
        "micro_batch_size": size.micro_batch_size,
        "accumulation_steps": ACCUMULATION_STEPS,
        "autocast": amp,
        "init_scale": INIT_SCALE,
        "max_norm": MAX_NORM,
        "threads": torch.get_num_threads(),
    }
    report.write_json(out / "demo.json", runs, settings=settings, versions=versions)
    about = ", ".join(f"{key} {value}" for key, value in versions.items())
    picture.draw(out / "demo.png", runs, f"GPT, {parameters:,} parameters, {amp} autocast; {about}")


def run(device: str | None, out: Path, steps: int | None, seed: int) -> int:
    """Run the demo, and return the exit status.

    Args:
        device: As for `choose_device`.
        out: Directory for `demo.png` and `demo.json`; created if it does not exist.
        steps: Windows to train; None for as many as fit into the time.
        seed: Of the weights and the order of the samples.
    """
    console = Console()
    display = Display(console)
    begin = time.perf_counter()
    try:
        chosen = choose_device(device)
        out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(THREADS)
        _demo(chosen, out, steps, seed, display)
    except KeyboardInterrupt:
        print(f"demo interrupted {display.stage}; no results were written", file=sys.stderr)
        return 130
    except (DemoError, OSError) as error:
        print(f"accumkernels demo: error: {error}", file=sys.stderr)
        return 2
    console.print(f"{out / 'demo.png'} and demo.json written; {time.perf_counter() - begin:.0f} s.", highlight=False)
    return 0
