"""What is learnt about memory, and runs whose lengths jump under a limit."""

from __future__ import annotations

import io
import logging
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.splitting import memory as memories
from accumkernels.splitting.memory import CountedMemory, LiveBytes
from accumkernels.splitting.packing import BARRED, Learned
from accumkernels.splitting.run import BatchRunner
from tests.support.models import batch, big_batch_grads, grads_of, mlp, relative_error
from tests.support.splitting import Lengths, room, truth

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the rules


def seen(*points):
    """After micro-batches with these costs and bytes."""
    learned = Learned()
    for cost, nbytes in points:
        learned.record(cost, nbytes)
    return learned


def test_nothing_is_known_at_first():
    """The whole batch is tried, and no cost is proven, not even none."""
    learned = Learned()
    assert learned.budget(1000) == math.inf
    assert not learned.known_to_fit(0)
    assert not learned.known_to_fit(1)


def test_line():
    """Costs fit up to where the line through the peaks leaves the margin; no peak lies above it."""
    learned = seen((10, 1100), (20, 2100), (30, 3100))
    assert learned.expect(50) == pytest.approx(5100)
    assert learned.budget(10_000) == pytest.approx(94)  # of 9500
    learned.record(15, 5000)
    assert all(learned.expect(cost) >= nbytes - 1e-6 for cost, nbytes in [(10, 1100), (15, 5000), (30, 3100)])


def test_growth_only_by_the_line():
    """What ran fits while there is room for its own peak, with or without the margin; more needs the line."""
    learned = seen((10, 1000), (20, 2000))
    assert learned.budget(2000) == 20
    assert learned.budget(1999) == pytest.approx(1999 * 0.95 / 100)
    assert learned.budget(4000) == pytest.approx(38)
    assert learned.budget(-5) == 0


def test_without_peaks_errors_alone_count():
    """Half of what failed, or what ran; never in between."""
    learned = Learned()
    learned.fail(100)
    assert learned.budget(None) == 50
    learned.record(60, None)
    assert learned.budget(None) == 60
    for _ in range(10 * BARRED):
        learned.end_batch(False)
    assert learned.budget(None) == 60


def test_bars():
    """A cost that failed is not tried again for 50 batches, and later if peaks say that it fits."""
    learned = seen((10, 1000), (20, 2000))
    learned.fail(40)
    for _ in range(BARRED):
        assert learned.budget(10_000) == 30  # half the way
        learned.end_batch(False)
    assert learned.budget(3500) == 30  # 40 costs 4000
    assert learned.failed == 40
    assert learned.budget(10_000) == pytest.approx(95)
    assert learned.failed == math.inf


def test_failing_again_goes_back():
    """A proven cost that fails is not fits any more; what was measured below it is."""
    learned = seen((10, 1000), (20, 2000), (30, 3000))
    learned.fail(25)
    assert (learned.ran, learned.ran_bytes) == (20, 2000)
    assert learned.known_to_fit(20) and not learned.known_to_fit(25)
    learned.fail(5)
    assert learned.ran == 0
    learned.record(5, 500)  # a single sample, which is tried all the same
    assert learned.failed == math.inf


# ---- runs


class Shared:
    """A run of windows of texts whose lengths jump, on a device that raises beyond its limit."""

    def __init__(self, limit, told, **options):
        told_limit = room(limit + 12_000) if told else None  # random states are kept beside
        self.model = Lengths()
        self.limit = limit
        self.acc = ak.FusedAccumulator(self.model, memory_limit=told_limit, **options)
        self.optimizer = torch.optim.AdamW(self.acc.parameters(), lr=1e-3)
        self.device = LiveBytes(limit)
        self.device.add([*self.model.parameters(), *self.acc.flat_buffers])


LONGEST = 64


def needed(count=1):
    """Bytes alive at the most in a window of so many of the longest samples, optimizer's state included."""
    run = Shared(None, False)
    for _ in range(2):
        samples = Lengths.samples([LONGEST] * count, 0)
        with run.device:
            run.acc.backward_batch(samples, run.model.loss, collate=Lengths.collate)
            run.acc.step(run.optimizer)
    return run.device.peak


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("options", [{}, {"release": "backward", "bucket_bytes": 64}], ids=["auto", "buckets"])
def test_never_dies(told, options):
    """200 windows under a limit that the longest sample fits, whether or not the limit is known; each is exact."""
    run = Shared(int(1.1 * needed()), told, **options)
    generator = torch.Generator().manual_seed(0)
    sizes, split = [], 0
    for window in range(200):
        longest = [8, LONGEST, 3, 30][window // 3 % 4]
        lengths = torch.randint(1, longest + 1, (6,), generator=generator).tolist()
        samples = Lengths.samples([longest, *lengths], window)
        with run.device:
            report = run.acc.backward_batch(samples, run.model.loss, collate=Lengths.collate)
        assert sum(report.sizes) == 7
        if window % 40 == 0:
            _, grads = truth(run.model, lambda twin, samples=samples: twin.mean(samples))
            run.acc.finalize(run.optimizer)
            assert relative_error(grads_of(run.acc), grads) < 1e-5  # of float32
            run.optimizer.step()
            run.acc.zero_()
            del grads
        else:
            run.acc.step(run.optimizer)
        del samples
        sizes.append(len(report.sizes))
        split += report.out_of_memory > 0
    assert min(sizes) < max(sizes)  # short ones run in fewer micro-batches than long ones
    assert split < 20


def test_grows_when_memory_is_freed():
    """Other tensors count while they live."""
    model = nn.Sequential(nn.Linear(5, 100), nn.Tanh(), nn.Linear(100, 3))
    x, y = batch(64)
    other = torch.zeros(240_000)
    acc = ak.FusedAccumulator(model, memory_limit=room(80_000))

    def sizes():
        report = acc.backward_batch((x, y), lambda part: nn.functional.mse_loss(model(part[0]), part[1]))
        acc.zero_()
        return report.sizes

    small = [sizes() for _ in range(4)][-1]
    del other
    grown = [sizes() for _ in range(2 * BARRED)][-1]
    assert len(small) > 1 and grown == [64]


def test_settled_batches_measure_nothing(monkeypatch):
    """Only every 16th looks at how much memory is free; none is measured."""
    calls = []
    for name in ("free", "measured", "let_go"):
        original = getattr(memories.CountedMemory, name)
        monkeypatch.setattr(
            memories.CountedMemory, name, lambda *args, o=original, n=name: (calls.append(n), o(*args))[1]
        )
    model = mlp()
    acc = ak.FusedAccumulator(model, memory_limit=room(300_000))
    for number in range(80):
        if number == 30:
            calls.clear()
        acc.backward_batch(batch(4096), lambda part: nn.functional.mse_loss(model(part[0]), part[1]))
        acc.step(torch.optim.SGD(acc.parameters(), lr=0.0))
    assert set(calls) <= {"free"} and len(calls) <= 4


def test_counts_all_live_tensors():
    """Also a `.grad`, but neither views twice nor fake tensors, nor what a lazy module has not made yet."""
    memory = memories.CountedMemory(torch.device("cpu"), 10_000)
    lazy = nn.LazyLinear(3)
    before = memory.free()
    param = nn.Parameter(torch.zeros(100))
    param.sum().backward()
    views = param.detach().split(10)
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(10_000)
    assert before - memory.free() == 800
    assert len(views) == 10 and fake.numel() == 10_000 and lazy.has_uninitialized_params()


def test_warns_of_many_splits(caplog):
    """Once, if more than a tenth of batches are split again."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    fails = [True]

    def loss_fn(part):
        if fails[0] and len(part[0]) > 1:
            fails[0] = False
            raise torch.OutOfMemoryError("planted")
        return nn.functional.mse_loss(model(part[0]), part[1])

    with caplog.at_level(logging.WARNING):
        for number in range(40):
            fails[0] = number % 5 == 0
            acc.backward_batch(batch(2**12 >> number // 5), loss_fn)
            acc.zero_()
    (record,) = [r for r in caplog.records if "backward_batch() ran out of memory" in r.getMessage()]
    assert "in 4 of 20 batches" in record.getMessage()


# ---- checkpoints


def test_everything_learnt_is_saved():
    """Also in which batch a cost failed, which is barred for so many from there on."""
    learned, resumed = Learned(), Learned()
    for cost in (3.0, 5.0, 9.0):
        learned.record(cost, 100 * cost)
        learned.end_batch(split=cost > 3)
    learned.fail(9.0)
    resumed.load(learned.state())
    assert vars(resumed) == vars(learned)


def test_state_dict():
    """A resumed run knows what was learnt; an old state says nothing of it."""
    model = mlp()
    limit = room(300_000)
    acc = ak.FusedAccumulator(model, memory_limit=limit)
    assert "batches" not in acc.state_dict()
    for _ in range(5):
        report = acc.backward_batch(batch(4096), lambda part: nn.functional.mse_loss(model(part[0]), part[1]))
        acc.zero_()
    file = io.BytesIO()
    torch.save(acc.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    acc.remove()
    with ak.FusedAccumulator(model, memory_limit=limit) as resumed:
        resumed.load_state_dict({key: value for key, value in state.items() if key != "batches"})
        assert resumed.engine.batches.learned.batches == 0
        resumed.load_state_dict(state)
        assert vars(resumed.engine.batches.learned) == vars(acc.engine.batches.learned)
        loss = resumed.backward_batch(batch(4096), lambda part: nn.functional.mse_loss(model(part[0]), part[1]))
        assert loss.sizes == report.sizes and len(loss.sizes) > 1


class Crowded(CountedMemory):
    """As where cached blocks had to be freed for it."""

    @property
    def over_limit(self):
        return True


def test_a_micro_batch_that_crowds_the_memory_counts_and_is_not_made_again():
    """It ran, and the next is smaller, though no memory ran out."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    acc.engine.batches = BatchRunner(Crowded(torch.device("cpu"), 2**30, list))
    x, y = batch(8)
    reports = [acc.backward_batch((x, y), lambda part: mse_loss(model(part[0]), part[1])) for _ in range(2)]
    assert reports[0].sizes == [8] and max(reports[1].sizes) < 8
    assert [report.out_of_memory for report in reports] == [0, 0]
    acc.finalize()
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6
