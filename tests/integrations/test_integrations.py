"""Adapters without their package, and the advice for optimizers that trainers have wrapped."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

import accumkernels as ak
from tests.support.models import mlp

TRAINERS = ("accelerate", "lightning", "transformers")


@pytest.mark.parametrize("package", TRAINERS)
def test_a_missing_package_is_named(package, monkeypatch):
    """With the extra that brings it; accumkernels itself needs none of them."""
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for name in TRAINERS:
        monkeypatch.delitem(sys.modules, f"accumkernels.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=re.escape(f"pip install 'accumkernels[{package}]'")):
        importlib.import_module(f"accumkernels.integrations.{package}")


@pytest.mark.parametrize(
    ("module", "adapter"),
    [
        ("accelerate.optimizer", "accumkernels.integrations.accelerate.Accelerator"),
        ("lightning.pytorch.core.optimizer", "accumkernels.integrations.lightning.FusedAccumulation"),
        ("pytorch_lightning.core.optimizer", "accumkernels.integrations.lightning.FusedAccumulation"),
    ],
)
def test_advice_for_wrapped_optimizers(module, adapter):
    """Names the adapter, and what to pass without it."""
    wrapped = type("Wrapped", (), {"__module__": module, "optimizer": None})()
    with pytest.raises(TypeError, match=rf"{re.escape(adapter)}.*optimizer\.optimizer"):
        ak.FusedAccumulator(mlp()).step(wrapped)
