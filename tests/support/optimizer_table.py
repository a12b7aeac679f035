"""Which optimizers work with FusedAccumulator, found out by running them: writes the table in docs/optimizers.md.

    python tests/support/optimizer_table.py  # after a change of CASES; needs schedulefree, torchao and bitsandbytes

Judged against stock torch: the same optimizer on the mean gradient, computed by hand as the contract says (each product
and sum rounded to fp32), must leave the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.window.optimizers import steps_scaled_gradients

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
BEGIN, END = "<!-- table: python tests/support/optimizer_table.py -->\n", "<!-- end of table -->\n"
WEIGHTS = (3, 1, 2)  # of a window's micro-batches


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer and how it is made.

    Attributes:
        path: Module and class.
        kwargs: Of the constructor.
        variant: What of them a reader should know.
        form: "step", or "closure" where only the long form inside a closure works.
        matrices: Whether it takes matrices alone.
        large: Whether it treats only large tensors as it is meant to.
    """

    path: str
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    variant: str = ""
    form: str = "step"
    matrices: bool = False
    large: bool = False

    @property
    def package(self) -> str:
        """That it comes from."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Of the class."""
        return self.path.rpartition(".")[2]

    @property
    def label(self) -> str:
        """For people, and ids of tests."""
        return f"{self.path}, {self.variant}" if self.variant else self.path

    def missing(self) -> bool:
        """Whether the package, or this class in its version, is not there."""
        if importlib.util.find_spec(self.package) is None:
            return True
        return not hasattr(importlib.import_module(self.path.rpartition(".")[0]), self.name)

    def make(self, params: Any) -> torch.optim.Optimizer:
        """The optimizer, in training mode where it has modes."""
        optimizer = getattr(importlib.import_module(self.path.rpartition(".")[0]), self.name)(params, **self.kwargs)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer


def _torch_cases() -> Iterator[Case]:
    plain = {"Adadelta": {}, "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {}, "Rprop": {}}
    fused = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "Adagrad": {}}
    for name, kwargs in {**fused, **plain}.items():
        path, kwargs = f"torch.optim.{name}", {"lr": 0.01, **kwargs}
        yield Case(path, {**kwargs, "foreach": False})
        yield Case(path, {**kwargs, "foreach": True}, "foreach=True")
        if name in fused:
            yield Case(path, {**kwargs, "fused": True}, "fused=True")
    yield Case("torch.optim.AdamW", {"lr": 0.01, "amsgrad": True, "fused": True}, "amsgrad, fused=True")
    yield Case("torch.optim.Adafactor", {"lr": 0.01})
    yield Case("torch.optim.Muon", {"lr": 0.01}, "matrices only", matrices=True)
    yield Case("torch.optim.LBFGS", {"lr": 0.1, "max_iter": 3}, form="closure")


def _other_cases() -> Iterator[Case]:
    for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"):
        yield Case(f"schedulefree.{name}", {"lr": 0.01, "foreach": False})
        yield Case(f"schedulefree.{name}", {"lr": 0.01, "foreach": True}, "foreach=True")
    yield Case("schedulefree.AdamWScheduleFreeClosure", {"lr": 0.01}, form="closure")
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        yield Case(f"torchao.optim.{name}", {"lr": 0.01}, large=True)
    for name in ("AdamW", "AdamW8bit", "Lion", "Lion8bit", "AdEMAMix", "LAMB"):
        yield Case(f"bitsandbytes.optim.{name}", {"lr": 0.01}, large="8bit" in name)
    yield Case("bitsandbytes.optim.SGD", {"lr": 0.01, "momentum": 0.9})


CASES = [*_torch_cases(), *_other_cases()]


def available() -> list[Case]:
    """The cases that can be run here."""
    with _quiet():
        return [case for case in CASES if not case.missing()]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Packages warn of the GPU that they miss; torchao compiles its steps, which takes a minute and changes nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")


# ---- training with ours and with stock torch


def _model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    width = 64 if case.large else 8  # 4096 elements: what optimizers quantise the state of
    return nn.Sequential(nn.Linear(8, width, not case.matrices), nn.Tanh(), nn.Linear(width, width, not case.matrices))


def _batches(model: nn.Module, window: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(window)
    width = model[2].out_features  # type: ignore[union-attr,operator]
    for weight in WEIGHTS:
        yield torch.randn(weight, 8, generator=generator), torch.randn(weight, width, generator=generator), weight


def _ours(case: Case, overflow_in: int | None, long_form: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model(case)
    scaler = None if case.form == "closure" else torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = case.make(acc.parameters())
    for window in range(3):

        def backwards(window: int = window) -> Tensor:
            for x, y, weight in _batches(model, window):
                loss = mse_loss(model(x), y) * (float("inf") if window == overflow_in else 1)
                acc.backward(loss, weight=weight)
            return loss

        def closure() -> Tensor:
            acc.zero_()
            loss = backwards()
            acc.finalize(optimizer)
            return loss

        if case.form == "closure":
            optimizer.step(closure)
            acc.zero_()
            continue
        backwards()
        if long_form:
            acc.finalize(optimizer)
            scaler.step(optimizer)  # type: ignore[union-attr]
            scaler.update()  # type: ignore[union-attr]
            acc.zero_()
        else:
            acc.step(optimizer)
    return model, optimizer


def _stock(case: Case, overflow_in: int | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model(case)
    optimizer = case.make(model.parameters())
    params = list(model.parameters())
    for window in range(3):
        if window == overflow_in:
            continue

        def closure(window: int = window) -> Tensor:
            sums: list[Tensor] = []
            for x, y, weight in _batches(model, window):
                loss = mse_loss(model(x), y)
                products = [g * weight for g in torch.autograd.grad(loss, params)]
                sums = [a + b for a, b in zip(sums, products, strict=True)] if sums else products
            for p, total in zip(params, sums, strict=True):
                p.grad = total / sum(WEIGHTS)
            return loss

        if case.form == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return model, optimizer


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [*model.parameters(), *(v for state in states for v in state.values() if isinstance(v, Tensor))]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    def bits(t: Tensor) -> Tensor:
        quantised = type(t).__module__.startswith("torchao.")
        return (t.dequantize() if quantised else t.detach()).float()

    return len(a) == len(b) and all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@dataclasses.dataclass(frozen=True)
class Result:
    """What running a case showed.

    Attributes:
        step: "yes" where `acc.step` leaves the bits of stock torch, parameters and state; else what goes instead.
        long_form: The same of finalize, scaler.step, update.
        folded: Whether average and clip are folded into the optimizer's pass, so that nothing waits for the device.
        skips: Whether a window that overflows leaves parameters and state as they were.
    """

    step: str
    long_form: str
    folded: str
    skips: str


def run(case: Case) -> Result:
    """Train with ours and stock torch."""
    with _quiet():
        expected = _values(*_stock(case, None))
        if case.form == "closure":
            same = _same(_values(*_ours(case, None, True)), expected)
            return Result("in a closure", "yes, in a closure" if same else "NO", "no", "-")
        answers = ["yes" if _same(_values(*_ours(case, None, long)), expected) else "NO" for long in (False, True)]
        optimizer = case.make(_model(case).parameters())
        skipped = all(_same(_values(*_ours(case, window, False)), _values(*_stock(case, window))) for window in (0, 1))
        folded = "yes" if steps_scaled_gradients(optimizer) else "no"
        return Result(answers[0], answers[1], folded, "yes" if skipped else "NO")


# ---- the table

COLUMNS = ["optimizer", "`acc.step`", "folds average and clip, no wait"]


def row(case: Case, result: Result) -> str:
    """A line of the table; that the long form does the same, and that overflow skips, holds for all and is tested."""
    name = f"`{case.path}`" + (f", {case.variant}" if case.variant else "")
    return "| " + " | ".join([name, result.step, result.folded]) + " |\n"


def header() -> str:
    """The first two lines."""
    return "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"


def committed() -> list[str]:
    """The lines of the table in the document."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].splitlines(keepends=True)


def main() -> int:
    """Write the table into the document."""
    missing = sorted({case.package for case in CASES if case.missing()})
    if missing:
        print(f"not written: {', '.join(missing)} missing", file=sys.stderr)
        return 1
    table = header() + "".join(row(case, run(case)) for case in CASES)
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
