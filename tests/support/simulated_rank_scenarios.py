"""What tests/simulated_device/test_ranks.py runs on every rank: data parallel training on side streams."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests import simulated_device as sim
from tests.simulated_device.streams import Chain
from tests.simulated_device.training import Training, error

WINDOWS = 3
# fp32 sums in another order; bf16 sums of two ranks, each of which is rounded, as the total is: 2**-9 each.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


class OfRank(Training):
    """Trains on a rank's own batches, each stage on a stream drawn anew."""

    def __init__(self, rank, name, group, wrap=None, **options):
        self.wrap, self.waits_by_stage = wrap, {}
        self.chain = Chain(rank, [torch.device("sim:0")])
        self.early = []
        super().__init__("sim:0", name, self.staged, process_group=group, **options)
        self.rank = rank

    @contextlib.contextmanager
    def staged(self, stage):
        before = len(self.seen.waits)
        with self.chain(stage):
            yield
        self.waits_by_stage.setdefault(stage, []).append(self.seen.waits[before:])
        if stage == "backward":
            self.early.append(self.acc.engine.window.sent.count > 0)

    def data(self, window):
        """As `batches`, different on every rank."""
        return self.batches(100 * self.rank + window)


def truth(name, size):
    """The parameters of one process that has all ranks' micro-batches."""
    training = Training("cpu", name, process_group=False)
    for window in range(WINDOWS):
        training.window([ids for rank in range(size) for ids in training.batches(100 * rank + window)])
    return training.parameters()


def train(rank, size, name, comm_dtype=torch.float32, early=False, **options):
    """Zero races and waits, and the parameters of one process."""
    warnings.filterwarnings("ignore", "accumkernels uses its reference backend")
    group = dist.new_group(backend="cpu:gloo,sim:gloo")
    run = OfRank(rank, name, group, comm_dtype=comm_dtype, **options)
    run.marked = early
    data = [run.data(window) for window in range(WINDOWS)]
    with sim.watch(lines=True) as seen:
        run.seen = seen
        for batches in data:
            run.window(batches)
        run.chain.end()
        torch.empty(1, device="sim:0")
    seen.check()
    waits = run.waits_by_stage
    assert not any(waits["forward"] + waits["backward"]), waits
    # All ranks learn in the vector at the end of a window which parameters any of them has touched.
    assert all(len(of_step) <= 1 for of_step in waits["step"]), waits["step"]
    assert any(run.early) == early, run.early
    assert error(run.parameters(), truth(name, size)) < CLOSE[comm_dtype]
    run.acc.remove()


def sums_in_fp32(rank, size):
    """Sent when the window ends."""
    train(rank, size, "default")


def sent_early(rank, size):
    """Sent while the last backward runs, from the device's thread."""
    train(rank, size, "buckets", early=True)


def sent_early_when_fused(rank, size):
    """The same where products are added on the streams that made them."""
    train(rank, size, "fused", early=True)


def sums_in_bf16(rank, size):
    """Narrower copies are sent, and widened when they have arrived."""
    train(rank, size, "default", torch.bfloat16)


def sent_early_in_bf16(rank, size):
    """Both."""
    train(rank, size, "buckets", torch.bfloat16, early=True)


def whole_micro_batches(rank, size):
    """Without buckets."""
    train(rank, size, "whole")


def without_a_wait(rank, size):
    """What a user who forgets `work.wait()` would do: the detector sees collectives, too."""
    group = dist.new_group(backend="cpu:gloo,sim:gloo")
    x = torch.ones(4, device="sim:0")
    with sim.watch() as seen:
        work = dist.all_reduce(x, group=group, async_op=True)
        x.add_(1)
        work.wait()
    assert [kind for kind, _ in seen.reports] == ["race"]
    with sim.watch() as seen:
        dist.all_reduce(x, group=group)
        x.add_(1)
    seen.check()
    assert seen.waits == []
    assert x.tolist() == [7] * 4


def stock_ddp(rank, size):
    """DistributedDataParallel itself runs on the device without a race."""
    group = dist.new_group(backend="cpu:gloo,sim:gloo")
    model = DistributedDataParallel(torch.nn.Linear(3, 3).to("sim:0"), process_group=group)
    with sim.watch() as seen:
        model(torch.full((2, 3), rank + 1.0, device="sim:0")).sum().backward()
    seen.check()
    assert model.module.weight.grad.tolist() == [[3.0] * 3] * 3
