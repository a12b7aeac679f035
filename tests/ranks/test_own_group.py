"""The library's own process group beside the user's: made once, like the user's, and kept alive by nobody here."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import accumkernels as ak
from accumkernels.ranks import group as module
from accumkernels.ranks.group import own_group

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=77)


def begin():
    """A world of one rank, whose group has a timeout of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


def alive(group):
    """Whether torch has the group."""
    return group in dist.distributed_c10d._world.pg_map


@pytest.fixture(autouse=True)
def world():
    """Ended after each test."""
    begin()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_made_once_for_each_group_of_the_users():
    """Accumulators share it; another group of the same ranks gets another."""
    first = own_group([0], dist.group.WORLD, CPU)
    assert first is not dist.group.WORLD
    assert own_group([0], dist.group.WORLD, CPU) is first
    other = dist.new_group([0])
    assert own_group([0], other, CPU) is not first
    assert own_group([0]) is not first


def test_like_the_users():
    """It gives up when the user's would."""
    assert own_group([0], dist.group.WORLD, CPU)._get_backend(CPU).options._timeout == TIMEOUT


def test_ended_groups_are_made_anew():
    """One that was ended alone, and one that went with its world."""
    first = own_group([0], dist.group.WORLD, CPU)
    dist.destroy_process_group(first)
    second = own_group([0], dist.group.WORLD, CPU)
    assert second is not first and alive(second)
    dist.destroy_process_group()
    begin()
    third = own_group([0], dist.group.WORLD, CPU)
    assert third is not second and alive(third)


def test_not_kept_alive():
    """After destroy_process_group() its threads end, which they cannot when the interpreter does."""
    freed = weakref.ref(own_group([0], dist.group.WORLD, CPU))
    dist.destroy_process_group()
    gc.collect()
    assert freed() is None


def test_ended_with_the_process():
    """If nobody has; the user's are left alone, and ended ones too."""
    group, ended = own_group([0], dist.group.WORLD, CPU), own_group([0])
    dist.destroy_process_group(ended)
    module._end()
    assert not alive(group)
    assert alive(dist.group.WORLD)


@pytest.mark.parametrize("release", ["backward", "microbatch"])
def test_an_accumulator_of_the_main_module_ends_it_too(release):
    """It outlives the interpreter, and no thread of a group may: one crashed after destroy_process_group()."""
    model = torch.nn.Linear(3, 3)
    acc = ak.FusedAccumulator(model, process_group=dist.group.WORLD, release=release)
    freed = weakref.ref(acc.engine.ranks._group._group)
    dist.destroy_process_group()
    assert freed() is not None
    module._end()
    gc.collect()
    assert freed() is None and acc.micro_batches == 0
