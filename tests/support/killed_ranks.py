"""Four ranks of which one is killed or hangs, once for each of CASES; a rank ends as the process of a script does.

    python killed_ranks.py FOLDER

One process imports torch, and ranks are forks of it that let their error through to the interpreter. FOLDER/CASE.RANK
has what a rank saw, and FOLDER/CASE the exit statuses: below zero for a signal, None where a rank did not end and had
to be killed. tests/ranks/test_killed.py reads them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # optimizers import it: once here, and not in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
import accumkernels.ranks.sender
from tests.support.models import batch, mlp
from tests.support.ranks import CHUNK_BYTES, message

RANKS, MICRO_BATCHES = 4, 3
CLEAN = 3  # windows before the one in which a rank dies: from the third on, ranks send what a settled layout sends
LEARNING_RATE = 0.1
DEADLINE = 100  # seconds for the ranks of a case to end; they take one
TIMEOUT = timedelta(seconds=6)  # where ranks wait for it: more than a window takes on a busy machine
# Of the others. gloo's pair wakes those who wait for a message that has not begun, not the one whose message was cut in
# its middle (signalException leaves out rx_): a rank killed while it sends leaves such a wait once in some 300 times.
CUT_OFF = timedelta(seconds=60)


class Case(NamedTuple):
    """Who dies, and where.

    Attributes:
        rank: Who; rank 0 hosts the store, too.
        place: "forward" or "backward", in the middle of the model; "step" or "state_dict", at one of its all-reduces;
            "buffers", before a window's module buffers are shared.
        index: Which micro-batch of the window, or which all-reduce of the call.
        model: "bare", "ddp" or "sharded".
        kwargs: Of FusedAccumulator.
        begun: Whether the all-reduce has begun, so that the others may yet complete it.
        stops: Whether the rank hangs instead, until the others have ended.
        again: Whether the others go on without it. Those who have got their error keep their connections, so the rest
            waits for the timeout.
    """

    rank: int
    place: str
    index: int = 0
    model: str = "bare"
    kwargs: dict[str, Any] = {}
    begun: bool = False
    stops: bool = False
    again: bool = False

    @property
    def waits(self) -> bool:
        """Whether ranks get their error by a timeout."""
        return self.stops or self.again


EARLY = {"release": "backward", "bucket_bytes": 64}  # the last backward sends 7 chunks, and step() what ranks agree on
LATE = {"release": "microbatch"}  # step() sends what ranks agree on, then the chunks
LAST = MICRO_BATCHES - 1

CASES = {
    "stops": Case(2, "forward", kwargs=EARLY, stops=True),
    "again": Case(0, "step", kwargs=EARLY, again=True),
    "forward": Case(0, "forward", 1, "ddp"),
    "backward": Case(1, "backward", kwargs=LATE),
    "last_backward": Case(2, "backward", LAST, kwargs=EARLY),
    "step": Case(3, "step", kwargs=LATE),
    "step_between_chunks": Case(1, "step", 4, kwargs=LATE),
    "step_last_reduction": Case(1, "step", kwargs=EARLY, begun=True),
    "buffers": Case(0, "buffers", kwargs=EARLY),
    "state_dict": Case(0, "state_dict", 2, kwargs=EARLY),
    "sharded_backward": Case(1, "backward", 1, "sharded"),
    "sharded_step": Case(3, "step", 0, "sharded"),
    "sharded_state_dict": Case(2, "state_dict", 1, "sharded"),
}


class Middle(nn.Module):
    """A layer that calls `in_forward` and `in_backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward = self.in_backward = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        self.in_forward()
        x, in_backward = x.clone(), self.in_backward
        x.register_hook(lambda grad: in_backward())
        return x


def micro_batches(window: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the data of a rank in a window, in micro-batches of different sizes."""
    return (batch(1 + (rank + i) % 3, seed=100 * window + 10 * rank + i) for i in range(MICRO_BATCHES))


class Training:
    """A rank's model, optimizer and accumulator."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        layers, self.middle = mlp(), Middle()
        self.module = nn.Sequential(*layers[:2], self.middle, *layers[2:])
        if case.place == "buffers":
            self.middle.register_buffer("shared", torch.zeros(()))
        self.model: nn.Module = self.module
        if case.model == "sharded":
            mesh = init_device_mesh("cpu", (RANKS,))
            fully_shard(self.module[0], mesh=mesh)
            fully_shard(self.module, mesh=mesh)
        elif case.model == "ddp":
            self.model = DistributedDataParallel(self.module)
        self.accumulate(dist.new_group(timeout=TIMEOUT) if case.waits else dist.group.WORLD)

    def accumulate(self, group: Any) -> None:
        """Build the accumulator, and the optimizer over it."""
        named = {"process_group": group} if self.case.model == "bare" else {}
        self.acc = ak.FusedAccumulator(self.model, **named, **self.case.kwargs)
        self.optimizer = torch.optim.SGD(self.acc.parameters(), lr=LEARNING_RATE)

    def window(self, number: int, die: Callable[[], None] | None = None) -> None:
        """Train a window; `die` in it."""
        case = self.case
        for index, (x, y) in enumerate(self.acc.window(micro_batches(number, self.rank))):
            if die is not None and index == case.index and case.place in ("forward", "backward"):
                setattr(self.middle, f"in_{case.place}", die)
            # FSDP2 takes the mean over ranks in backward, where ranks' weights must be alike.
            self.acc.backward(mse_loss(self.model(x), y), 1 if case.model == "sharded" else len(x))
            if case.place == "state_dict" and index == 1 and number == CLEAN:
                with at_collective(die, case):
                    self.acc.state_dict(reduced=True)
        with at_collective(die if case.place in ("step", "buffers") else None, case):
            self.acc.step(self.optimizer, max_norm=1e9)

    def values(self) -> list[torch.Tensor]:
        """Copies of the parameters, or of this rank's shards."""
        return [getattr(p, "_local_tensor", p).detach().clone() for p in self.acc.parameters()]

    def expected(self, window: int, ranks: list[int]) -> list[torch.Tensor]:
        """The parameters after that window's step, by stock torch in fp64, on the data of all ranks at once."""
        twin = copy.deepcopy(self.module).double()
        x, y = (torch.cat(t) for t in zip(*(part for r in ranks for part in micro_batches(window, r)), strict=True))
        mse_loss(twin(x.double()), y.double()).backward()
        return [p.detach() - LEARNING_RATE * p.grad for p in twin.parameters()]


@contextlib.contextmanager
def at_collective(die: Callable[[], None] | None, case: Case) -> Iterator[None]:
    """Call `die` at the collective that the case says, inside a `with`."""
    if die is None:
        yield
        return
    original, count = dist.all_reduce, 0

    def all_reduce(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        nonlocal count
        here, count = count == case.index, count + 1
        if here and not case.begun:
            die()
        work = original(*args, async_op=True, **kwargs)
        if here:
            die()
        return work if async_op else work.wait()

    if case.place == "buffers":
        dist.broadcast = lambda *args, **kwargs: die()
    else:
        dist.all_reduce = all_reduce
    yield
    raise AssertionError("nobody died")


def live(case: Case, rank: int, store: Any, out: Path) -> None:
    """Be a rank: train until torch's error comes, note what it has left, and end by it."""
    torch.set_num_threads(1)
    accumkernels.ranks.sender.CHUNK_BYTES = CHUNK_BYTES
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=CUT_OFF)
    training = Training(case, rank)
    for number in range(CLEAN):
        training.window(number)
    acc, before = training.acc, training.values()
    after = [] if case.model == "sharded" else training.expected(CLEAN, list(range(RANKS)))

    def die() -> None:
        out.write_text(json.dumps({"begun": acc.engine.window.sent.count > 0}))
        os.kill(os.getpid(), signal.SIGSTOP if case.stops else signal.SIGKILL)

    number = CLEAN
    try:
        while True:
            training.window(number, die if rank == case.rank else None)
            number += 1
    except RuntimeError as error:
        found = {
            "error": [type(error).__name__, str(error)],
            "windows": number - CLEAN,
            "as_before": all(map(torch.equal, training.values(), before)),
            "as_after": near(training.values(), after),
        }
        if case.place == "state_dict" and case.model != "sharded":
            state = acc.state_dict()  # of this rank alone
            found["saved"] = [state["window"]["micro_batches"], state["sums"].keys() == state["shapes"].keys()]
        if case.place in ("step", "buffers"):
            found["again"] = message(acc.step, training.optimizer)
        if case.model == "bare":
            acc.remove()
            found["removed"] = trains_as_stock(training)
        if case.again:
            found["went_on"] = goes_on(training, out.with_suffix(".store"))
        out.write_text(json.dumps(found))
        raise


def near(values: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether parameters are those expected, but for rounding."""
    return bool(expected) and all(
        torch.allclose(v.double(), e, rtol=0, atol=1e-6) for v, e in zip(values, expected, strict=True)
    )


def trains_as_stock(training: Training) -> bool:
    """Whether the model gets the gradients of a model that never had an accumulator."""
    model, twin = training.module, copy.deepcopy(training.module)
    for m in (model, twin):
        m.zero_grad()
        x, y = batch(4)
        mse_loss(m(x), y).backward()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def goes_on(training: Training, store: Path) -> bool:
    """Whether the survivors train a right window on their own, in a new world of three."""
    dist.destroy_process_group()
    survivors = [rank for rank in range(RANKS) if rank != training.case.rank]
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), len(survivors)), rank=survivors.index(training.rank), world_size=3
    )
    training.module.zero_grad()
    training.accumulate(dist.group.WORLD)
    expected = training.expected(CLEAN, survivors)
    training.window(CLEAN)
    return near(training.values(), expected)


def start(case: Case, files: str) -> list[int] | None:
    """Fork the ranks of a case; returns their process ids, and None in each of them, which does not get there."""
    reader, writer = os.pipe()  # the port of the store: rank 0 finds a free one
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            if rank == 0:
                store = dist.TCPStore("127.0.0.1", 0, RANKS, is_master=True, wait_for_workers=False)
                os.write(writer, b"%5d" % store.port * (RANKS - 1))
            else:
                store = dist.TCPStore("127.0.0.1", int(os.read(reader, 5)), RANKS)
            live(case, rank, store, Path(f"{files}.{rank}"))
            return None
        pids.append(pid)
    os.close(reader)
    os.close(writer)
    return pids


def wait(case: Case, pids: list[int]) -> list[int | None]:
    """Wait for all ranks to end, or kill them; returns their exit status."""
    found: dict[int, int] = {}
    signal.alarm(DEADLINE)
    try:
        for pid in [pid for pid in pids if pid != pids[case.rank]] + [pids[case.rank]]:
            status = os.waitpid(pid, os.WUNTRACED)[1]
            if os.WIFSTOPPED(status):
                os.kill(pid, signal.SIGKILL)
                status = os.waitpid(pid, 0)[1]
            found[pid] = os.waitstatus_to_exitcode(status)
    except TimeoutError:
        for pid in set(pids) - found.keys():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    signal.alarm(0)
    return [found.get(pid) for pid in pids]


def late(*_: object) -> None:
    """Handle the alarm."""
    raise TimeoutError


def main(folder: Path) -> None:
    """Run all cases, one after another; those that wait for a timeout run beside the rest."""
    gc.freeze()  # or the collections of each rank would copy all that it was forked with
    signal.signal(signal.SIGALRM, late)
    waiting = []
    for name, case in sorted(CASES.items(), key=lambda item: not item[1].waits):
        pids = start(case, str(folder / name))
        if pids is None:
            return
        if case.waits:
            waiting.append((name, case, pids))
        else:
            (folder / name).write_text(json.dumps(wait(case, pids)))
    for name, case, pids in waiting:
        (folder / name).write_text(json.dumps(wait(case, pids)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
