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
from .methods import ACCUMULATION_STEPS, MAX_NORM, METHODS, BigBatch, Method
from .model import GPT
from .train import SEEDS, SHAPES, Shape, choose_size, seconds_per_window, train

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}
# A micro-batch is one line of text, as on a card that is full: its gradients then cost as much as its layers. Lines are
# unequal, as samples are.
CONTEXT = 64


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
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"--device {name}: the demo runs on cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = torch.version.cuda or torch.version.hip
            reason = "torch finds no usable GPU" if built else "this torch is built without CUDA"
            raise DemoError(f"--device {name}: {reason}")
        if (device.index or 0) >= torch.cuda.device_count():
            raise DemoError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def choose_amp(name: str | None, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, as a user would choose it: bf16; fp16 on a GPU, none on a CPU, that has no bf16."""
    if name is not None:
        return AMP_DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    # A CPU with AVX2 alone takes up to 50 times as long as in fp32; nothing in torch says so.
    return None if _seconds_of_product(torch.bfloat16) > 2 * _seconds_of_product(torch.float32) else torch.bfloat16


def _seconds_of_product(dtype: torch.dtype) -> float:
    a, b = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        torch.nn.functional.linear(a, b)
        times.append(time.perf_counter() - begin)
    return min(times)


def _measure(runs: list[report.Run], big: Method, corpus: Corpus, steps: int, display: Display) -> None:
    """Fill in the numbers of `runs` that training does not give, at the weights of the big batch."""
    windows = {"full": corpus.window(steps), "short": corpus.window(steps + 1, partial=True)}  # not trained on
    display.begin_measuring(len(windows) + len(runs))
    for key, window in windows.items():
        errors = measure.gradient_errors(METHODS, big.model, window, (big.amp_dtype, None))
        for run, (with_autocast, without) in zip(runs, errors, strict=True):
            run.gradient_errors[key] = with_autocast
            run.gradient_errors_without_autocast[key] = without
        display.measured()
    for run, cls in zip(runs, METHODS, strict=True):
        run.peak_bytes = measure.peak_bytes(cls, big.model, windows["full"], big.amp_dtype)
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


def _demo(
    device: torch.device, amp_dtype: torch.dtype | None, out: Path, steps: int | None, seed: int, display: Display
) -> None:
    console = display.console

    def build(shape: Shape, number: int) -> GPT:
        torch.manual_seed(number)
        return shape.build(CONTEXT).to(device)

    corpus = Corpus(1, ACCUMULATION_STEPS, device, seed, longest=CONTEXT, separator=b"\n")
    shape, fitting = choose_size(seconds_per_window(build(SHAPES[-1], seed), corpus, amp_dtype))
    steps = steps or fitting
    model = build(shape, seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    amp = "float32" if amp_dtype is None else str(amp_dtype).removeprefix("torch.")
    versions = _versions(device)
    console.print(
        f"A byte-level GPT of {parameters / 1e6:.0f} M parameters on Python's standard library: {steps} windows of "
        f"{ACCUMULATION_STEPS} micro-batches of one line, up to {CONTEXT} bytes, {amp}, on {versions['device']}, "
        f"{torch.get_num_threads()} threads; FusedAccumulator's backend: {versions['backend']}.",
        highlight=False,
    )
    methods = [cls(model, amp_dtype) for cls in METHODS]
    with display:
        display.begin_training([method.name for method in methods], steps)
        runs = train(methods, corpus, steps, display.trained)
        _measure(runs, methods[0], corpus, steps, display)
        del methods  # before there are more
        seeds = runs[:1]
        for number in range(1, SEEDS):
            name = f"{BigBatch.name}, seed {seed + number}"
            display.begin_training([name], steps)
            again = train([BigBatch(build(shape, seed + number), amp_dtype, name)], corpus, steps, display.trained)
            seeds += again
    display.stage = "while writing the files"
    ends = [run.final_loss for run in seeds]
    report.print_table(
        console,
        runs,
        full=ACCUMULATION_STEPS,
        short=len(corpus.window(0, partial=True).micro_batches),
        amp=amp,
        seeds=SEEDS,
        lowest=min(ends),
        highest=max(ends),
        memory="memory in torch's CUDA allocator" if device.type == "cuda" else "tensors alive at a time",
    )
    report.print_conclusion(console, runs[1], runs[2], amp)
    settings = {
        "steps": steps,
        "seed": seed,
        "parameters": parameters,
        "context": CONTEXT,
        "accumulation_steps": ACCUMULATION_STEPS,
        "autocast": amp,
        "max_norm": MAX_NORM,
        "threads": torch.get_num_threads(),
    }
    report.write_json(out / "demo.json", runs, seeds, settings=settings, versions=versions)
    about = ", ".join(f"{key} {value}" for key, value in versions.items() if key != "python")
    picture.draw(out / "demo.png", runs, seeds, f"GPT, {parameters / 1e6:.0f} M parameters, {amp}; {about}")


def run(device: str | None, out: Path, steps: int | None, seed: int, amp: str | None = None) -> int:
    """Run the demo, and return the exit status.

    Args:
        device: As for `choose_device`.
        out: Directory for `demo.png` and `demo.json`; created if it does not exist.
        steps: Windows to train; None for as many as fit into the time.
        seed: Of the weights and the order of the samples.
        amp: A key of `AMP_DTYPES`; by default as in `choose_amp`.
    """
    console = Console()
    display = Display(console)
    begin = time.perf_counter()
    try:
        chosen = choose_device(device)
        out.mkdir(parents=True, exist_ok=True)
        _demo(chosen, choose_amp(amp, chosen), out, steps, seed, display)
    except KeyboardInterrupt:
        print(f"demo interrupted {display.stage}; no results were written", file=sys.stderr)
        return 130
    except (DemoError, OSError) as error:
        print(f"accumkernels demo: error: {error}", file=sys.stderr)
        return 2
    console.print(f"{out / 'demo.png'} and demo.json written; {time.perf_counter() - begin:.0f} s.", highlight=False)
    return 0
