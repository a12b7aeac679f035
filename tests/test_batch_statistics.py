"""Models with BatchNorm in training: their statistics are those of micro-batches, which is said once."""

import logging

from torch import nn

import accumkernels as ak
from tests.support.models import batchnorms


def test_warning(caplog):
    """Once per model with BatchNorm in training, by logging; never without."""
    caplog.set_level(logging.WARNING, "accumkernels")
    model = batchnorms()
    for _ in range(2):
        ak.FusedAccumulator(model).remove()
    assert len(caplog.records) == 1
    assert "2 BatchNorm modules in training (the first: '1')" in caplog.text
    caplog.clear()
    ak.FusedAccumulator(batchnorms().eval()).remove()
    ak.FusedAccumulator(nn.Linear(2, 2)).remove()
    ak.FusedAccumulator(batchnorms().parameters()).remove()
    assert not caplog.records
    ak.FusedAccumulator(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()).remove()
    assert "1 BatchNorm module in training" in caplog.text  # without running statistics eval changes nothing
