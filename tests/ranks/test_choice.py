"""Engines that keep gradients to themselves are refused by name; FSDP1 itself is in fsdp2_scenarios.py."""

from __future__ import annotations

import pytest
from torch import nn

import accumkernels as ak
from tests.support.models import mlp


class Engine(nn.Module):
    """Stands for DeepSpeedEngine, which is known by its package."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self):
        super().__init__()
        self.module = mlp()


def test_deepspeed():
    """The engine, and parameters that ZeRO has taken over."""
    zero = mlp()
    zero[0].bias.ds_id = 1
    for params in (Engine(), zero, zero.parameters()):
        with pytest.raises(ValueError, match="DeepSpeed.* reduces gradients itself"):
            ak.FusedAccumulator(params)


def test_flat_parameters():
    """Parameters of FSDP1, packed (`use_orig_params=False`) or views of what is packed."""
    for attribute in ("_is_flat_param", "_fsdp_flattened"):
        model = mlp()
        setattr(model[0].bias, attribute, True)
        with pytest.raises(ValueError, match=r"FullyShardedDataParallel \(FSDP1\).*fully_shard"):
            ak.FusedAccumulator(model.parameters())
