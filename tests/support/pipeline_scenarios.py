"""What tests/ranks/test_pipeline.py runs on every rank: stages of torch.distributed.pipelining, held to one process."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.ranks.base import LocalStats
from accumkernels.ranks.sender import Sent
from tests.support.ranks import message, parameters

EXACT = {"rtol": 1e-12, "atol": 1e-14}
WIDTH = 6
SAMPLES = 8  # of a micro-batch: a schedule takes the same shapes in every step
CHUNKS = 4  # a schedule's own micro-batches, in one step
WEIGHTS = (3, 5)  # of a window's two micro-batches
MAX_NORM = 0.05

# By name: the schedule, and which stages rank r of R ranks has.
SCHEDULES = {
    "GPipe": (schedules.ScheduleGPipe, "one"),
    "1F1B": (schedules.Schedule1F1B, "one"),
    "Interleaved1F1B": (schedules.ScheduleInterleaved1F1B, "loop"),
    "LoopedBFS": (schedules.ScheduleLoopedBFS, "loop"),
    "InterleavedZeroBubble": (schedules.ScheduleInterleavedZeroBubble, "loop"),
    "ZBVZeroBubble": (schedules.ScheduleZBVZeroBubble, "v"),
    "DualPipeV": (schedules.ScheduleDualPipeV, "v"),
}


class Part(nn.Module):
    """A stage; those of odd number have more parameters."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] + [nn.Linear(WIDTH, WIDTH)] * (index % 2)
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x: Tensor) -> Tensor:
        """`[n, WIDTH]` to the same."""
        return self.layers(x)


class Pipeline:
    """This rank's stages of a model, their schedule, and the whole model for one process."""

    def __init__(self, name="GPipe", scaler=None, group=None, replica=0, shard=None, **kwargs) -> None:
        group = dist.group.WORLD if group is None else group
        rank, size = group.rank(), group.size()
        kind, order = SCHEDULES[name]
        places = {"one": [rank], "loop": [rank, rank + size], "v": [rank, 2 * size - 1 - rank]}[order]
        count = len(places) * size
        self.twin = nn.Sequential(*(Part(i) for i in range(count)))
        self.parts = nn.ModuleList(Part(i) for i in places)
        self.twins = [self.twin[i] for i in places]
        for part in self.parts if shard is not None else ():
            fully_shard(part, mesh=shard)
        self.stages = [
            PipelineStage(part, i, count, torch.device("cpu"), group=group)
            for part, i in zip(self.parts, places, strict=True)
        ]
        self.replica = replica
        loss_fn = mse_loss if scaler is None else lambda out, y: scaler.scale(mse_loss(out, y))
        stages = self.stages[0] if order == "one" else self.stages
        self.schedule = kind(stages, CHUNKS, loss_fn=loss_fn, **kwargs)
        self._first, self._last = 0 in places, count - 1 in places

    def run(self, window: int, i: int, **losses) -> None:
        """One micro-batch of a window through the schedule."""
        x, y = data(window, i, self.replica)
        self.schedule.step(*([x] if self._first else []), **({"target": y, **losses} if self._last else {}))

    def expect(self, used, divisor=None) -> float:
        """Let the whole model have the gradients of (weight, window, micro-batch, replica); their norm."""
        self.twin.zero_grad()
        total = sum(weight for weight, *_ in used) if divisor is None else divisor
        for weight, *which in used:
            x, y = data(*which)
            (mse_loss(self.twin(x), y) * (weight / total)).backward()
        return nn.utils.clip_grad_norm_(self.twin.parameters(), math.inf).item()

    def check(self) -> None:
        """Compare this rank's parameters."""
        for part, twin in zip(self.parts, self.twins, strict=True):
            for a, e in zip(part.parameters(), twin.parameters(), strict=True):
                whole = a.full_tensor() if hasattr(a, "full_tensor") else a
                torch.testing.assert_close(whole.detach(), e.detach(), **EXACT)


def data(window: int, i: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    """A micro-batch."""
    generator = torch.Generator().manual_seed(100 * window + 10 * i + replica)
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def _steps(pipeline, acc, scaler, replicas=1, windows=3, poisoned=1) -> None:
    """Train; in one window a gradient of the first rank's first stage is not finite."""
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01)
    stock = torch.optim.AdamW(pipeline.twin.parameters(), lr=0.01)
    first = dist.get_rank() == 0
    for window in range(windows):
        before = parameters(pipeline.parts)
        for i, weight in enumerate(WEIGHTS):
            pipeline.run(window, i)
            if first and window == poisoned and i == 0:
                next(pipeline.parts.parameters()).grad.fill_(torch.nan)
            acc.accumulate(weight + pipeline.replica)
        norm = acc.step(optimizer, max_norm=MAX_NORM)
        assert acc.step_was_skipped is (window == poisoned)
        if scaler is not None:
            assert scaler.get_scale() == (4.0 if window < poisoned else 2.0)
        if window == poisoned:
            assert all(map(torch.equal, parameters(pipeline.parts), before))
            continue
        used = [(w + r, window, i, r) for i, w in enumerate(WEIGHTS) for r in range(replicas)]
        assert norm.item() == pytest.approx(pipeline.expect(used), rel=1e-12)
        nn.utils.clip_grad_norm_(pipeline.twin.parameters(), MAX_NORM)
        stock.step()
        pipeline.check()


# ---- on two ranks


def every_schedule(rank, size):
    """Unequal weights, one norm, one scale, and a step that all stages skip."""
    for name, (release, scaled) in itertools.product(SCHEDULES, (("auto", True), ("microbatch", False))):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
        pipeline = Pipeline(name, scaler)
        acc = ak.FusedAccumulator(pipeline.parts, release=release, scaler=scaler, process_group=dist.group.WORLD)
        _steps(pipeline, acc, scaler)
        acc.remove()


def losses_that_are_sums(rank, size):
    """`scale_grads=False` sums over a schedule's own micro-batches; a divisor is that of the window."""
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        pipeline = Pipeline(name, scale_grads=False)
        acc = ak.FusedAccumulator(pipeline.parts, process_group=dist.group.WORLD)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for i in range(2):
            pipeline.run(0, i)
            acc.accumulate()
        acc.step(optimizer, divisor=2 * CHUNKS)
        pipeline.expect([(1, 0, 0, 0), (1, 0, 1, 0)])
        torch.optim.SGD(pipeline.twin.parameters(), lr=0.1).step()
        pipeline.check()
        acc.remove()


def parts_are_clipped_over_stages(rank, size):
    """Each by the norm of all its parameters, on whatever stages; norms of other orders too."""
    pipeline = Pipeline("ZBVZeroBubble")
    acc = ak.FusedAccumulator(pipeline.parts, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)

    def biases(module):
        return [p for p in module.parameters() if p.dim() == 1]

    def weights_of_first(module):
        return [p for p in module[0].parameters() if p.dim() == 2]

    mine = weights_of_first(pipeline.parts) if rank == 0 else []
    pipeline.run(0, 0)
    acc.accumulate()
    norms = acc.step(optimizer, max_norm=[(biases(pipeline.parts), 0.01), (mine, 0.02)])
    pipeline.expect([(1, 0, 0, 0)])
    parts = (biases(pipeline.twin), 0.01), (weights_of_first(pipeline.twin), 0.02)
    for norm, (params, limit) in zip(norms, parts, strict=True):
        expected = nn.utils.get_total_norm([p.grad for p in params])
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        for p in params:
            p.grad *= min(1, limit / (expected + 1e-6))
    torch.optim.SGD(pipeline.twin.parameters(), lr=0.1).step()
    pipeline.check()

    pipeline.run(0, 1)
    acc.accumulate()
    acc.finalize(optimizer)
    pipeline.expect([(1, 0, 1, 0)])
    for order in (1.0, 3.0, math.inf):
        expected = nn.utils.get_total_norm([p.grad for p in pipeline.twin.parameters()], order).item()
        assert acc.clip_grad_norm_(math.inf, order).item() == pytest.approx(expected, rel=1e-12)
    assert "must be positive" in message(acc.clip_grad_norm_, 1.0, 0.0)[1]


class Cast(nn.Module):
    """A stage whose parameters have a dtype of their own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, WIDTH]` to the same in fp64."""
        return self.layer(x.to(self.layer.weight.dtype)).double()


def stages_of_different_dtypes(rank, size):
    """Only one stage rounds gradients, or none, since it has masters; what overflows in it skips both steps."""
    half, double = torch.float16, torch.float64
    for dtypes, masters in (
        ((half, double), (False, False)),
        ((half, half), (False, True)),
        ((half, double), (True, False)),
    ):
        twin = nn.Sequential(*map(Cast, dtypes))
        part = Cast(dtypes[rank])
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        schedule = schedules.ScheduleGPipe(stage, CHUNKS, loss_fn=mse_loss)
        acc = ak.FusedAccumulator(part, process_group=dist.group.WORLD, master_weights=masters[rank])
        optimizer, stock = torch.optim.SGD(acc.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
        for window in range(3):
            before = parameters(part)
            for i, weight in enumerate(WEIGHTS):
                x, y = data(window, i)
                schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == size - 1 else {}))
                acc.accumulate(weight)
                (mse_loss(twin(x), y) * (weight / sum(WEIGHTS))).backward()
            if window == 1:
                acc.step(optimizer, divisor=1e-30)  # no fp16 holds this mean
                assert acc.step_was_skipped is not masters[0]
                if not masters[0]:
                    assert all(map(torch.equal, parameters(part), before))
                break
            acc.step(optimizer)
            stock.step()
            stock.zero_grad()
            for a, e in zip(part.parameters(), twin[rank].parameters(), strict=True):
                torch.testing.assert_close(a, e, rtol=2**-9, atol=2**-10)  # fp16
        acc.remove()


def dropped_micro_batches(rank, size):
    """overflow="microbatch": what is bad on one stage is dropped on all, and the rest is used."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipeline = Pipeline("Interleaved1F1B", scaler)
    acc = ak.FusedAccumulator(pipeline.parts, scaler=scaler, overflow="microbatch", process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for i, weight in enumerate((3, 4, 5)):
        pipeline.run(0, i)
        if rank == 1 and i == 1:
            next(pipeline.parts.parameters()).grad.fill_(math.inf)
        acc.accumulate(weight)
    acc.step(optimizer)
    assert scaler.get_scale() == 2.0
    assert acc.metrics()["weight"].item() == 8
    pipeline.expect([(3, 0, 0, 0), (5, 0, 2, 0)])
    torch.optim.SGD(pipeline.twin.parameters(), lr=0.1).step()
    pipeline.check()


def loss_and_noise(rank, size):
    """The last stage's loss, which the schedule scales, is in everyone's metrics; the noise scale is one process's."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipeline = Pipeline(scaler=scaler)
    acc = ak.FusedAccumulator(pipeline.parts, scaler=scaler, noise_scale=True, process_group=dist.group.WORLD)
    alone = ak.FusedAccumulator(pipeline.twin, noise_scale=True, process_group=False)
    for window in range(2):
        for i, weight in enumerate(WEIGHTS):
            losses = []
            pipeline.run(window, i, losses=losses)
            acc.accumulate(weight, loss=torch.stack(losses).mean() / scaler.get_scale() if losses else None)
            x, y = data(window, i)
            alone.backward(mse_loss(pipeline.twin(x), y), weight)
        for a in (acc, alone):
            a.step(torch.optim.SGD(a.parameters(), lr=0.1))
        for key in ("loss", "weight"):
            assert acc.metrics()[key].item() == pytest.approx(alone.metrics()[key].item(), rel=1e-12)
    assert float(acc.noise_scale()) == pytest.approx(float(alone.noise_scale()), rel=1e-9)


def states_of_stages(rank, size):
    """Each stage goes on from its own state, inside a window too; another's is refused, at any moment."""
    pipeline = Pipeline("LoopedBFS")
    acc = ak.FusedAccumulator(pipeline.parts, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for reduced in (False, True):
        for inside in (False, True):
            if inside:
                pipeline.run(0, 0)
                acc.accumulate(3)
            everyones = [None] * size
            dist.all_gather_object(everyones, acc.state_dict(reduced=reduced))
            acc.zero_()
            kind, text = message(acc.load_state_dict, everyones[1 - rank])
            assert kind == "RuntimeError"
            assert f"saved by rank {1 - rank} of a pipeline" in text
            acc.load_state_dict(everyones[rank])
            assert acc.micro_batches == inside
        pipeline.run(0, 1)
        acc.accumulate(5)
        acc.finalize(optimizer)
        pipeline.expect([(3, 0, 0, 0), (5, 0, 1, 0)])
        for part, twin in zip(pipeline.parts, pipeline.twins, strict=True):
            for p, q in zip(part.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, **EXACT)
        acc.zero_()


def frozen_stage(rank, size):
    """A rank that trains nothing counts as the others do, whatever its options, and also if it was frozen later."""
    ways = (0, True, "window"), (0, False, "microbatch"), (1, True, None), (1, False, "raise")
    for frozen, scaled, overflow in ways:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
        pipeline = Pipeline("GPipe", scaler)
        stages = [pipeline.twin[frozen], *(pipeline.parts if rank == frozen else ())]
        late = overflow in ("microbatch", None)
        for stage in stages:
            stage.requires_grad_(late)
        acc = ak.FusedAccumulator(pipeline.parts, scaler=scaler, overflow=overflow, process_group=dist.group.WORLD)
        for stage in stages:
            stage.requires_grad_(False)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        stock = torch.optim.SGD(pipeline.twin.parameters(), lr=0.1)
        for window in range(2):
            for i, weight in enumerate(WEIGHTS):
                pipeline.run(window, i)
                acc.accumulate(torch.tensor(float(weight)) if i else weight)
            norm = acc.step(optimizer, max_norm=MAX_NORM)
            used = [(weight, window, i, 0) for i, weight in enumerate(WEIGHTS)]
            rounding = 1e-6 if rank == frozen else 1e-12  # a norm is fp32 where no parameter with a gradient is fp64
            assert norm.item() == pytest.approx(pipeline.expect(used), rel=rounding)
            nn.utils.clip_grad_norm_(pipeline.twin.parameters(), MAX_NORM)
            stock.step()
            pipeline.check()
        acc.remove()


def refused(rank, size):
    """What cannot be right for stages, by name and with what to use."""
    pipeline = Pipeline()
    params, group = pipeline.parts, dist.group.WORLD
    scaler = torch.amp.GradScaler("cpu")
    wrapped = DistributedDataParallel(
        nn.Linear(2, 2), process_group=dist.new_group([rank], use_local_synchronization=True)
    )
    stage = PipelineStage(wrapped, rank, size, torch.device("cpu"))
    for target, options, kind, text in (
        (params, {"release": "backward", "process_group": group}, "ValueError", "release='auto' or 'microbatch'"),
        (params, {"process_group": False}, "ValueError", "process_group= the group that the stages were built with"),
        (params, {}, "RuntimeError", "for the stages of a pipeline, the group that they were built with"),
        (wrapped, {}, "ValueError", "build the stage from the module inside"),
        (
            params,
            {"process_group": group, "scaler": scaler if rank else None},
            "RuntimeError",
            "has scaler=False, rank 1",
        ),
    ):
        found = message(ak.FusedAccumulator, target, **options)
        assert found[0] == kind, found
        assert text in found[1], found
    assert stage.submod is wrapped

    late = Part(0)
    acc = ak.FusedAccumulator(late, process_group=False)
    stage = PipelineStage(late, rank, size, torch.device("cpu"))
    (late(data(0, 0)[0]).sum()).backward()
    kind, text = message(acc.accumulate)
    assert kind == "RuntimeError"
    assert "build the stage first" in text
    acc.remove()
    assert stage.submod is late


def stages_that_disagree(rank, size):
    """An error on every rank in the window it happens in, and nothing is stepped; the next window is right."""
    pipeline = Pipeline()
    acc = ak.FusedAccumulator(pipeline.parts, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    before = parameters(pipeline.parts)
    for case, text in (
        ("weights", "sum, by stage rank, to [3.0, 5.0]"),
        ("count", "by stage rank [0, 1]"),
        ("divisor", "by stage rank it is [1.0, 2.0]"),
        ("window", "different windows"),
        ("clipping", "by stage rank it is 0.5, none"),
        ("limit", "by stage rank it is 0.5, 1.5"),
        ("parts", "by stage rank it is a list of 1 for 0.5 together, a list of 2 for 0.75 together"),
    ):
        pipeline.run(0, 0)
        if case == "count" and rank == 0:
            acc.discard()
        else:
            acc.accumulate(WEIGHTS[rank] if case == "weights" else 3)
        if case == "window":
            acc.engine.window.number += rank
        parts = [(pipeline.parts[0].parameters(), 0.5), ([], 0.25)]
        limits = {"clipping": [0.5, None], "limit": [0.5, 1.5], "parts": [parts[:1], parts]}.get(case, [None, None])
        kind, found = message(
            acc.step, optimizer, divisor=rank + 1 if case == "divisor" else None, max_norm=limits[rank]
        )
        assert kind == "RuntimeError", case
        assert text in found, found
        for a, e in zip(pipeline.parts.parameters(), before, strict=True):
            assert torch.equal(a, e)
        acc.zero_()
        if case == "window":  # dropping does not undo it
            acc.engine.window.number -= rank
    # Dropped on one stage: skipped on all, and no error.
    pipeline.run(0, 0)
    acc.accumulate()
    if rank == 0:
        acc.discard(window=True)
    acc.step(optimizer)
    assert acc.step_was_skipped
    pipeline.run(0, 1)
    acc.accumulate()
    acc.step(optimizer)
    pipeline.expect([(1, 0, 1, 0)])
    torch.optim.SGD(pipeline.twin.parameters(), lr=0.1).step()
    pipeline.check()


def what_devices_conclude(rank, size):
    """Without a look of the host's: any stage's flags are all's, a difference sets them, an empty stage empties all."""
    pipeline = Pipeline()
    acc = ak.FusedAccumulator(pipeline.parts, process_group=dist.group.WORLD)
    rounded = (0.1 + 0.2) * 10 if rank else 3.0  # in another order
    for weight, flag, options, found_inf in (
        (3.0, 0.0, {}, 0.0),
        (rounded, 0.0, {}, 0.0),
        (3.0, float(rank), {}, 1.0),
        (3.0 + 1e-6 * rank, 0.0, {}, 1.0),
        (3.0, 0.0, {"micro_batches": rank}, 1.0),
        (3.0, 0.0, {"divisor": torch.tensor(2.0 + rank, dtype=torch.float64)}, 1.0),
        (3.0 * rank, 0.0, {"micro_batches": rank, "dropped": rank == 0}, 0.0),
        (3.0 * rank, 0.0, {"window": rank}, 1.0),
    ):
        empty = weight == 0 or "dropped" in options or "window" in options
        state = torch.tensor([weight, flag, weight, flag], dtype=torch.float64)
        loss = torch.tensor([6.0, 2.0], dtype=torch.float64)
        squares = torch.tensor([5.0 + rank, 0.0], dtype=torch.float64)
        given = {"dropped": False, "squares": squares, "divisor": None, **options}
        stats = acc._ranks.all_reduce_stats(
            LocalStats(state=state, touched=b"", sent=Sent(), loss=lambda v=loss: v, **given)
        )
        used = 0.0 if empty else weight
        assert stats.state.tolist() == [used, found_inf, used, found_inf]
        assert stats.loss.tolist() == ([0.0, 0.0] if empty else [12.0, 4.0])
        assert stats.squares.item() == 11.0
    acc.remove()


def clipped_on_some_stages(rank, size):
    """Every stage hears, when it ends the window, that only one has called clip_grad_norm_, or by another order."""
    for clips in range(size):
        pipeline = Pipeline()
        acc = ak.FusedAccumulator(pipeline.parts, process_group=dist.group.WORLD)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for orders in ([2.0 if stage == clips else 0.0 for stage in range(size)], [2.0, math.inf]):
            pipeline.run(0, 0)
            acc.accumulate()
            acc.finalize(optimizer)
            order = orders[rank]
            kind, text = message(*((acc.clip_grad_norm_, 1.0, order) if order else (acc.zero_,)))
            assert kind == "RuntimeError"
            assert f"by stage rank the order is {orders}" in text
            acc.zero_()
        for clip in (True, False):  # alike, and no error
            pipeline.run(0, 0)
            acc.accumulate()
            acc.finalize(optimizer)
            if clip:
                expected = pipeline.expect([(1, 0, 0, 0)])
                assert acc.clip_grad_norm_(math.inf).item() == pytest.approx(expected, rel=1e-12)
            acc.zero_()
        acc.remove()


# ---- two stages on two replicas each


def replicated_stages(rank, size):
    """Sums over a stage's replicas, whose weights differ; verdict, scale and norm over everything."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    stages, replicas = mesh.get_group("stage"), mesh.get_group("replica")
    for name, scaled in (("GPipe", True), ("InterleavedZeroBubble", False), ("DualPipeV", True)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
        pipeline = Pipeline(name, scaler, stages, replica=rank // 2)
        acc = ak.FusedAccumulator(pipeline.parts, scaler=scaler, process_group=replicas)
        assert "pipeline rank" in repr(acc)
        _steps(pipeline, acc, scaler, replicas=2)
        acc.remove()

    # Not the world, whose ranks have different stages.
    pipeline = Pipeline("GPipe", group=stages, replica=rank // 2)
    kind, text = message(ak.FusedAccumulator, pipeline.parts, process_group=dist.group.WORLD)
    assert kind == "ValueError"
    assert "have different stages of a pipeline" in text

    # A norm that one stage alone wants: each rank hears of it, also where no sum is measured otherwise.
    acc = ak.FusedAccumulator(pipeline.parts, overflow=None, process_group=replicas)
    for clips in (stages.rank() == 0, rank == 0):
        pipeline.run(0, 0)
        acc.accumulate()
        kind, text = message(acc.step, torch.optim.SGD(acc.parameters(), lr=0.1), max_norm=1.0 if clips else None)
        assert kind == "RuntimeError"
        assert "max_norm must be the same on all ranks" in text or "share another stage" in text
        acc.zero_()
    acc.remove()

    # One state for both replicas of a stage, that either may load, and the noise scale of all.
    acc = ak.FusedAccumulator(pipeline.parts, noise_scale=True, process_group=replicas)
    alone = ak.FusedAccumulator(pipeline.twin, noise_scale=True, process_group=False)
    pipeline.run(0, 0)
    acc.accumulate(3 + rank // 2)
    state = acc.state_dict(reduced=True)
    acc.zero_()
    acc.load_state_dict(state)
    pipeline.run(0, 1)
    acc.accumulate(5 + rank // 2)
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.1))
    for i, r in itertools.product(range(2), range(2)):
        x, y = data(0, i, r)
        alone.backward(mse_loss(pipeline.twin(x), y), WEIGHTS[i] + r)
    alone.step(torch.optim.SGD(alone.parameters(), lr=0.1))
    pipeline.check()
    assert float(acc.noise_scale()) == pytest.approx(float(alone.noise_scale()), rel=1e-9)

    # A marked last micro-batch that one replica leaves out.
    for i in acc.window(range(2)):
        pipeline.run(0, i)
        if i == 1 and rank < 2:
            acc.discard()
        else:
            acc.accumulate()
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.1))
    pipeline.expect([(1, 0, 0, 0), (1, 0, 0, 1), (1, 0, 1, 1)])
    torch.optim.SGD(pipeline.twin.parameters(), lr=0.1).step()
    pipeline.check()


def sharded_stages(rank, size):
    """FSDP2 inside each stage: the mesh says who shares it, and the verdict, the scale and the norm are everyone's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "stage"))
    stages = mesh.get_group("stage")
    for given in (None, stages):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        pipeline = Pipeline("1F1B", scaler, stages, replica=rank // 2, shard=mesh["shard"])
        acc = ak.FusedAccumulator(pipeline.parts, scaler=scaler, process_group=given)
        optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01)
        stock = torch.optim.AdamW(pipeline.twin.parameters(), lr=0.01)
        for window in range(3):
            for i, weight in enumerate(WEIGHTS):
                pipeline.run(window, i)
                if rank == 0 and window == 1:
                    next(pipeline.parts.parameters()).grad._local_tensor.fill_(math.inf)
                acc.accumulate(weight)
            norm = acc.step(optimizer, max_norm=MAX_NORM)
            assert acc.step_was_skipped is (window == 1)
            assert scaler.get_scale() == (4.0 if window == 0 else 2.0)
            if window == 1:
                continue
            used = [(w, window, i, r) for i, w in enumerate(WEIGHTS) for r in range(2)]
            assert norm.item() == pytest.approx(pipeline.expect(used), rel=1e-12)
            nn.utils.clip_grad_norm_(pipeline.twin.parameters(), MAX_NORM)
            stock.step()
            pipeline.check()
        acc.remove()


def frozen_stages(rank, size):
    """A stage that trains nothing, replicated or sharded as the others are, whose state is saved inside a window."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    stages, replicas = mesh.get_group("stage"), mesh.get_group("replica")
    for shard, frozen in itertools.product((None, mesh["replica"]), range(2)):
        pipeline = Pipeline("GPipe", group=stages, replica=rank // 2, shard=shard)
        for part in [pipeline.twin[frozen], *(pipeline.parts if stages.rank() == frozen else ())]:
            part.requires_grad_(False)
        acc = ak.FusedAccumulator(pipeline.parts, process_group=replicas if shard is None else None)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        stock = torch.optim.SGD(pipeline.twin.parameters(), lr=0.1)
        for window in range(2):
            for i, weight in enumerate(WEIGHTS):
                pipeline.run(window, i)
                acc.accumulate(weight)
                state = acc.state_dict()
                acc.zero_()
                acc.load_state_dict(state)
            norm = acc.step(optimizer, max_norm=MAX_NORM)
            expected = pipeline.expect([(w, window, i, r) for i, w in enumerate(WEIGHTS) for r in range(2)])
            assert norm.item() == pytest.approx(expected, rel=1e-6)  # fp32 where nothing is trained
            nn.utils.clip_grad_norm_(pipeline.twin.parameters(), MAX_NORM)
            stock.step()
            pipeline.check()
        acc.remove()


TWO_RANKS = [
    every_schedule,
    losses_that_are_sums,
    parts_are_clipped_over_stages,
    stages_of_different_dtypes,
    dropped_micro_batches,
    loss_and_noise,
    states_of_stages,
    frozen_stage,
    stages_that_disagree,
    what_devices_conclude,
    clipped_on_some_stages,
    refused,
]
FOUR_RANKS = [replicated_stages, sharded_stages, frozen_stages]
