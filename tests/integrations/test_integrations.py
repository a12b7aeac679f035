"""Adapters without their package, and the advice for optimizers that trainers have wrapped."""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import pytest
import torch

import accumkernels as ak
from tests.support.models import mlp

TRAINERS = ("accelerate", "lightning", "transformers")


@pytest.mark.parametrize(
    ("adapter", "missing"), [*((name, [name]) for name in TRAINERS), ("transformers", ["accelerate", "transformers"])]
)
def test_a_missing_package_is_named(adapter, missing, monkeypatch):
    """With the extra that brings it; accumkernels itself needs none of them."""
    for name in list(sys.modules):
        if name.partition(".")[0] in missing:
            monkeypatch.delitem(sys.modules, name)
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    for name in TRAINERS:
        monkeypatch.delitem(sys.modules, f"accumkernels.integrations.{name}", raising=False)
    needed = f"accumkernels.integrations.{adapter} needs {adapter}: pip install 'accumkernels[{adapter}]'"
    with pytest.raises(ImportError, match=re.escape(needed)):
        importlib.import_module(f"accumkernels.integrations.{adapter}")


def test_a_package_that_an_adapter_needs_besides_is_named(monkeypatch):
    """The Trainer's adapter stands on accelerate's, and its extra brings both."""
    pytest.importorskip("transformers")
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for name in TRAINERS:
        monkeypatch.delitem(sys.modules, f"accumkernels.integrations.{name}", raising=False)
    needed = "accumkernels.integrations.transformers needs accelerate: pip install 'accumkernels[transformers]'"
    with pytest.raises(ImportError, match=re.escape(needed)):
        importlib.import_module("accumkernels.integrations.transformers")


def test_a_package_that_is_too_old_is_not_said_to_be_missing(monkeypatch):
    """The Trainer's adapter says which release of accelerate is installed, as accelerate's own does."""
    pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate, "__version__", "1.0.0")
    for name in TRAINERS:
        monkeypatch.delitem(sys.modules, f"accumkernels.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=r"needs accelerate >= [\d.]+, and 1\.0\.0 is installed"):
        importlib.import_module("accumkernels.integrations.transformers")


@pytest.mark.parametrize(
    ("module", "adapter"),
    [
        ("accelerate.optimizer", "accumkernels.integrations.accelerate.Accelerator"),
        ("lightning.pytorch.core.optimizer", "accumkernels.integrations.lightning.FusedAccumulation"),
        ("pytorch_lightning.core.optimizer", "accumkernels.integrations.lightning.FusedAccumulation"),
        ("lightning.fabric.wrappers", "FabricSGD of lightning wraps an optimizer; pass"),  # there is no Trainer
        ("lightning_fabric.wrappers", "FabricSGD of lightning_fabric wraps an optimizer; pass"),
    ],
)
def test_advice_for_wrapped_optimizers(module, adapter):
    """Names the adapter, and what to pass without it."""
    wrapped = type("FabricSGD", (), {"__module__": module, "optimizer": None})()
    with pytest.raises(TypeError, match=rf"{re.escape(adapter)}.*optimizer\.optimizer"):
        ak.FusedAccumulator(mlp()).step(wrapped)


class Odd:
    """What no argument takes."""

    def __repr__(self):
        return "an odd value"


def prepared(name, argument):
    """Accelerate's Accelerator of ours with a model, and one of its methods called with an odd value."""
    from accelerate.state import AcceleratorState

    from accumkernels.integrations.accelerate import Accelerator

    AcceleratorState._reset_state(True)
    accelerator, model = Accelerator(), mlp()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(2, 5)).sum()
    getattr(accelerator, name)(**{**({"loss": loss} if name == "backward" else {}), argument: Odd()})


# Adapters' functions with arguments of their own, beside those that they hand on to the trainer.
ADAPTERS = {
    "accelerate": {
        "Accelerator.__init__": lambda cls, argument: cls(**{argument: Odd()}),
        "Accelerator.backward": lambda cls, argument: prepared("backward", argument),
        "Accelerator.window_metrics": lambda cls, argument: prepared("window_metrics", argument),
        "fuse": lambda fuse, argument: fuse(**{argument: Odd()}),
    },
    "lightning": {"FusedAccumulation.__init__": lambda cls, argument: cls(**{argument: Odd()})},
    "transformers": {
        "FusedAccumulationMixin.__init__": lambda cls, argument: cls(**{argument: Odd()}),
        "Trainer.__init__": lambda cls, argument: cls(model=mlp(), **{argument: Odd()}),
    },
}
FLAGS = {"metrics", "log_windows"}


@pytest.mark.integrations
@pytest.mark.parametrize(
    ("package", "function"), [(package, function) for package, calls in ADAPTERS.items() for function in calls]
)
def test_every_argument_repeats_what_it_was_given(package, function):
    """A value of the wrong kind stands in the error, beside the name of the argument."""
    pytest.importorskip(package)
    module = importlib.import_module(f"accumkernels.integrations.{package}")
    name, _, method = function.partition(".")
    called = getattr(module, name)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = inspect.signature(getattr(called, method) if method else called).parameters.values()
    checked = [p.name for p in given if p.name != "self" and p.kind in kinds and p.name not in FLAGS]
    assert checked
    for argument in checked:
        with pytest.raises(TypeError, match=f"{argument} must be .*, got an odd value"):
            ADAPTERS[package][function](called, argument)
