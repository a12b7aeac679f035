"""What tests of whole batches share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture
def little_to_collect():
    """After each error, and for each measured micro-batch, the collector looks at every object of the process."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
