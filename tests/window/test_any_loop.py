"""Loops drawn at random: whatever a loop does, weights move as fp64 arithmetic on stock's gradients says."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import TwoHeads, batch

RATE, MAX_NORM = 0.1, 0.05
# Sums of fp64 gradients in another order, and the rounding of weights near 1 that move by RATE times as much.
RELATIVE, ABSOLUTE = 1e-11, 1e-14

OPTIONS = st.fixed_dictionaries(
    {
        "overflow": st.sampled_from(["window", "microbatch", None]),
        "release": st.sampled_from(["auto", "microbatch", "backward"]),
        "bucket_bytes": st.sampled_from([None, 64, 600]),
        "fuse_weight_gradients": st.sampled_from(["auto", True, False, "deferred"]),
        "backend": st.sampled_from(["native", "reference"]),
    }
).filter(lambda options: (options["overflow"], options["release"]) != ("microbatch", "backward"))
# What a loop does between two steps, some of which counts; with the samples, their weight and the head that they use.
DOES = st.tuples(
    st.sampled_from(["backward", "backward", "own backward", "batch", "coupled", "thread"])
    | st.sampled_from(["inf", "discard", "raises", "resume", "grad", "evaluate"]),
    st.integers(1, 5),
    st.sampled_from([1.0, 2.5, 0.0, torch.tensor(3.0)]),
    st.sampled_from(["a", "b"]),
)
ENDS = ["step", "clipped step", "finalize", "clipped finalize", "drop", "discard"]
WINDOW = st.tuples(
    st.sampled_from([None, "body", "a"]), st.lists(DOES, max_size=5), st.sampled_from(ENDS), st.booleans()
)


def stop(grad: torch.Tensor) -> None:
    """Fail in the middle of a backward."""
    raise ZeroDivisionError


class Loop:
    """A loop, and what stock's gradients say that its open window holds."""

    def __init__(self, options: dict[str, Any], scale: float | None) -> None:
        torch.manual_seed(0)
        self.options, self.seed = options, 0
        self.model = TwoHeads().double()
        self.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        self.build()
        self.forget()

    def build(self) -> None:
        """Make an accumulator, and an optimizer over its parameters."""
        self.acc = ak.FusedAccumulator(self.model, scaler=self.scaler, **self.options)
        self.optimizer = torch.optim.SGD(self.acc.parameters(), lr=RATE)

    def forget(self) -> None:
        """Begin the truth of another window."""
        self.sums: dict[str, Any] = defaultdict(float)
        self.weight, self.counted, self.overflowed = 0.0, 0, False

    def count(self, model, x, y, head, weight) -> None:
        """Add what stock's backward leaves in a copy of the model."""
        mse_loss(model(x, head), y).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                self.sums[name] = self.sums[name] + float(weight) * p.grad
        self.weight += float(weight)
        self.counted += 1

    def do(self, what: str, samples: int, weight: float | torch.Tensor, head: str) -> None:
        """One thing that loops do."""
        self.seed += 1
        x, y = batch(samples, torch.float64, self.seed)
        twin = copy.deepcopy(self.model)
        loss = mse_loss(self.model(x, head), y)
        if what == "backward":
            self.acc.backward(loss, weight)
        elif what == "own backward":
            if self.options["release"] != "microbatch":
                weight = 1.0  # the gradients may have been added by now
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.acc.accumulate(weight)
        elif what == "batch":
            weight = float(samples)
            self.acc.backward_batch((x, y), lambda part: mse_loss(self.model(part[0], head), part[1]), micro_batch=2)
        elif what == "coupled":
            encode = partial(self.model, head=head)
            self.acc.backward_coupled(x.split(2), encode, lambda out: mse_loss(out, y), weight=weight)
        elif what == "thread":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.acc.backward, loss, weight).result()
        else:
            self.do_uncounted(what, loss)
            return
        self.count(twin, x, y, head, weight)

    def do_uncounted(self, what: str, loss: torch.Tensor) -> None:
        """What adds nothing to the window, and may drop it."""
        if what == "inf" and self.options["overflow"] is not None:
            self.acc.backward(loss * math.inf)
            self.overflowed |= self.options["overflow"] == "window"
        elif what == "discard":
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.acc.discard()
            if self.options["release"] != "microbatch":  # the window may be broken
                self.acc.zero_()
                self.forget()
        elif what == "raises" and self.model.body.weight.requires_grad:
            handle = self.model.body.register_forward_hook(lambda *args: args[-1].register_hook(stop) and None)
            with handle, pytest.raises(ZeroDivisionError):
                self.acc.backward(mse_loss(self.model(torch.ones(1, 5).double(), "a"), torch.ones(1, 3).double()))
            if self.options["release"] != "microbatch":  # the window may be broken
                self.acc.zero_()
                self.forget()
        elif what == "resume":
            state = copy.deepcopy(self.acc.state_dict())
            self.acc.remove()
            self.build()
            self.acc.load_state_dict(state)
        elif what == "grad":
            torch.autograd.grad(loss, [p for p in self.model.parameters() if p.requires_grad], allow_unused=True)

    def end(self, how: str) -> None:
        """End the window, and hold each parameter's movement to the truth."""
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        max_norm = MAX_NORM if how.startswith("clipped") else None
        if how == "drop" or not self.counted:
            self.acc.zero_()
        elif how == "discard":
            self.acc.discard(window=True)
            self.acc.step(self.optimizer)
        elif how.endswith("step"):
            self.acc.step(self.optimizer, max_norm=max_norm)
        else:
            self.acc.finalize(self.optimizer)
            if max_norm is not None:
                self.acc.clip_grad_norm_(max_norm)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif not self.acc.step_was_skipped:
                self.optimizer.step()
            self.acc.zero_()
        steps = how not in ("drop", "discard") and self.weight > 0 and not self.overflowed
        means = {name: total / self.weight for name, total in self.sums.items()} if steps else {}
        factor = -RATE
        if means and max_norm is not None:
            norm = torch.cat([mean.flatten() for mean in means.values()]).norm().item()
            factor *= min(1.0, max_norm / (norm + 1e-6))
        for name, p in self.model.named_parameters():
            moved = factor * means[name] if name in means else torch.zeros_like(p)
            torch.testing.assert_close(p.detach() - before[name], moved, rtol=RELATIVE, atol=ABSOLUTE)
            assert p.grad is None or how not in ("drop", "finalize", "clipped finalize")
        self.forget()


@pytest.mark.native
@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=100)
@given(options=OPTIONS, scale=st.sampled_from([None, 1.0, 256.0]), windows=st.lists(WINDOW, min_size=1, max_size=3))
def test_any_loop(options, scale, windows):
    """Of any options: micro-batches of any kind, what adds nothing between them, layers that are frozen, and ends.

    Some release buffers after the end.
    """
    if scale is not None and options["overflow"] is None:
        scale = None  # a GradScaler needs to know of overflows
    loop = Loop(options, scale)
    for frozen, things, end, releases in windows:
        for name, p in loop.model.named_parameters():
            p.requires_grad_(frozen is None or not name.startswith(f"{frozen}."))
        for thing in things:
            loop.do(*thing)
        loop.end(end)
        if releases:
            loop.acc.release_buffers()
    loop.acc.remove()
