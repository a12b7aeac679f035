"""One hook on all optimizers serves every accumulator: it does not pile up, and keeps none alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from accumkernels import hooks
from tests.support.loop import Loop


def test_hooks_do_not_pile_up():
    """Accumulators come and go; torch keeps one hook of ours before a step and one after."""
    Loop(dtype=torch.bfloat16, master_weights=True)
    before = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    clip = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
    loops = [Loop(dtype=torch.bfloat16, master_weights=True) for _ in range(5)]
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before
    assert (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_) == clip
    freed = [weakref.ref(loop.acc) for loop in loops]
    del loops
    gc.collect()
    assert [ref() for ref in freed] == [None] * 5


def test_accumulator_freed_while_another_optimizer_steps():
    """The garbage collector may run in a hook of the step, and free an accumulator with masters there."""
    loop = Loop(dtype=torch.bfloat16, master_weights=True)
    gc.disable()
    circle = [Loop(dtype=torch.bfloat16, master_weights=True).acc]
    freed = weakref.ref(circle[0])
    circle.append(circle)
    del circle
    handle = register_optimizer_step_post_hook(lambda *_: gc.collect())
    later = register_optimizer_step_post_hook(lambda *_: None)
    try:
        x, y = loop.windows(1)[0][0]
        loop.acc.backward(loop.loss(x, y))
        loop.acc.step(loop.optimizer)
    finally:
        gc.enable()
        handle.remove()
        later.remove()
    assert freed() is None


def test_many_short_runs_in_one_process():
    """A thousand runs with masters end as garbage, each collected in the middle of a step of another optimizer."""
    runs = 1000  # in 3 seconds: the youngest generation is all that has to be looked at
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    freed = []
    gc.disable()
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: optimizer is other and gc.collect(0))
    try:
        for _ in range(runs):
            loop = Loop(dtype=torch.bfloat16, master_weights=True)
            x, y = loop.windows(1)[0][0]
            loop.acc.backward(loop.loss(x, y))
            loop.acc.step(loop.optimizer)
            weakref.finalize(loop.acc, freed.append, None)
            loop.circle = loop
            del loop, x, y
            other.step()
    finally:
        gc.enable()
        handle.remove()
    assert len(freed) == runs


def test_followers_may_come_while_others_are_told():
    """An accumulator that is built in a hook of a step does not disturb it."""

    class Builder(hooks.Follower):
        def after_step(self, optimizer, has_closure):
            self.built = Loop().acc

    builder = Builder()
    hooks.follow(builder)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert builder.built is not None
    hooks.unfollow(builder)


@pytest.mark.parametrize("fused", [False, True])
def test_our_hook_leaves_folding_alone(fused):
    """A pre-hook of the user's keeps a fused optimizer from folding; ours does not count as one."""
    loop = Loop(fused=fused)
    seen = []
    loop.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(getattr(optimizer, "grad_scale", None)))
    x, y = loop.windows(1)[0][0]
    loop.acc.backward(loop.loss(x, y), weight=3)
    loop.acc.step(loop.optimizer)
    assert seen == ([torch.tensor(3.0)] if fused else [None])


def test_the_dead_and_those_that_left_are_told_nothing():
    """Neither is kept in the list that every step of every optimizer walks."""

    class Counter(hooks.Follower):
        told = 0

        def after_step(self, optimizer, has_closure):
            Counter.told += 1

    gc.collect()
    before = len(hooks._followers)
    dead, gone, alive = Counter(), Counter(), Counter()
    for follower in (dead, gone, alive):
        hooks.follow(follower)
    del dead, follower
    hooks.unfollow(gone)
    assert len(hooks._followers) == before + 1
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert Counter.told == 1
    hooks.unfollow(alive)
    assert len(hooks._followers) == before
