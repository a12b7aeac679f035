"""FusedAccumulator over FSDP2's DTensors, on gloo ranks: fsdp2_*scenarios.py and coupled_scenarios.py."""

from __future__ import annotations

from tests.support import coupled_scenarios as coupled
from tests.support import fsdp2_mesh_scenarios as meshes
from tests.support import fsdp2_overflow_scenarios as overflow
from tests.support import fsdp2_scenarios as training
from tests.support import fsdp2_state_scenarios as checkpoints
from tests.support.ranks import check

TWO_RANKS = training.TWO_RANKS + overflow.TWO_RANKS + coupled.TWO_RANKS_FSDP2 + checkpoints.TWO_RANKS
FOUR_RANKS = meshes.FOUR_RANKS + checkpoints.FOUR_RANKS


def test_two_ranks(two, scenario):
    """See the function of that name."""
    check(two, scenario)


def test_four_ranks(four, scenario):
    """See the function of that name."""
    check(four, scenario)
