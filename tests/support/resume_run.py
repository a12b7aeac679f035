"""A training run that is killed, and resumed in a new process from everything that the killed one saved.

    python resume_run.py kill MODE RANK FOLDER      trains, saves at every cut, and dies before its last step
    python resume_run.py resume MODE RANK FOLDER    trains once without a cut, then resumes from every cut

A cut is behind every micro-batch and behind every step. What a resumed run ends with must be what the uncut one does,
to the last bit. tests/window/test_resume.py starts it, once per rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp

WINDOWS, MICRO_BATCHES = 3, 3


class Mode(NamedTuple):
    """A way to train.

    Attributes:
        ranks: How many processes.
        sharded: Whether the model is `fully_shard`ed, and saved by torch.distributed.checkpoint; else several ranks
            are a process_group, and each saves to a file of its own.
        kwargs: Of FusedAccumulator.
    """

    ranks: int
    sharded: bool
    kwargs: dict[str, Any]


MODES = {
    "alone": Mode(1, False, {"overflow": "microbatch", "noise_scale": True}),
    "process_group": Mode(2, False, {"noise_scale": True}),
    "fully_shard": Mode(2, True, {"overflow": "microbatch", "noise_scale": True}),
}


class Run:
    """Model, optimizer, scaler, accumulator, and the norms of its steps."""

    def __init__(self, mode: Mode, seed: int = 0) -> None:
        self.sharded = mode.sharded
        kwargs = dict(mode.kwargs)
        if mode.ranks > 1 and not mode.sharded:
            kwargs["process_group"] = dist.group.WORLD
        self.model = mlp(seed=seed)
        if mode.sharded:
            mesh = init_device_mesh("cpu", (mode.ranks,))
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.acc = ak.FusedAccumulator(self.model, scaler=self.scaler, **kwargs)
        self.optimizer = torch.optim.AdamW(self.acc.parameters(), lr=0.01)
        self.norms: list[float] = []

    def micro_batch(self, window: int, step: int) -> None:
        """One micro-batch, of the rank's own data; in the second window one overflows."""
        size = 1 + (window + step) % 3
        rank = dist.get_rank() if dist.is_initialized() else 0
        x, y = batch(size, seed=1000 * rank + 100 * window + step)
        factor = float("inf") if (window, step) == (1, 1) else 1.0
        self.acc.backward(mse_loss(self.model(x), y) * factor, size)

    def train(self, begin: str = "") -> Iterator[str]:
        """Train to the end from the cut `begin`, "" for the beginning; yields every cut when it is reached."""
        reached = begin == ""
        for window in range(WINDOWS):
            for step in range(MICRO_BATCHES):
                if reached:
                    self.micro_batch(window, step)
                    yield f"{window}-{step}"
                reached = reached or begin == f"{window}-{step}"
            if reached:
                self.norms.append(self.acc.step(self.optimizer, max_norm=0.5).item())
                yield f"{window}-stepped"
            reached = reached or begin == f"{window}-stepped"

    def save(self, path: Path) -> None:
        """Save everything."""
        state = {"norms": self.norms}
        if self.sharded:
            dcp.save({**self._collective(), "acc": self.acc}, checkpoint_id=path)
            parts = ["optimizer"]
        else:
            parts = ["optimizer", "model", "scaler", "acc"]
        torch.save({**state, **{part: getattr(self, part).state_dict() for part in parts}}, self._own_file(path))

    def load(self, path: Path) -> None:
        """Go on from what was saved."""
        state = torch.load(self._own_file(path), weights_only=True)
        if self.sharded:
            collective = self._collective()
            dcp.load({**collective, "acc": self.acc}, checkpoint_id=path)
            state = {**state, **collective}
        for part in ("optimizer", "model", "scaler", "acc"):
            if part in state:
                getattr(self, part).load_state_dict(state[part])
        self.norms = state["norms"]

    def _collective(self) -> dict[str, Any]:
        # Not the optimizer: to list its state, get_optimizer_state_dict would step a new one, which makes AdamW count
        # a step that never was.
        return {"model": self.model.state_dict(), "scaler": self.scaler.state_dict()}

    def _own_file(self, path: Path) -> Path:
        return path.with_suffix(f".{dist.get_rank() if dist.is_initialized() else 0}")

    def position(self) -> str:
        """What can be seen of a window that is open."""
        measured = self.acc.noise_scale()
        skipped = self.acc.step_was_skipped
        return (
            f"{self.acc!r} {self.acc.micro_batches} {self.acc.weight} {skipped} {measured} {self.scaler.state_dict()}"
        )

    def result(self) -> list[Any]:
        """What the run ended with, exactly."""
        noise = self.acc.noise_scale()
        measured = None if noise is None else (noise.trace, noise.grad_squared_norm, noise.windows)
        tensors = [*self.model.parameters()]
        for p in self.acc.parameters():
            tensors += self.optimizer.state[p].values()
        local = [getattr(t, "_local_tensor", t).detach().numpy().tobytes() for t in tensors]
        return [str(self.norms), self.scaler.state_dict(), measured, self.acc.step_was_skipped, local]


def main(what: str, mode: Mode, rank: int, folder: Path) -> None:
    """Kill or resume."""
    torch.set_num_threads(1)
    if mode.ranks > 1:
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", f"file://{folder}/{what}", timeout, world_size=mode.ranks, rank=rank)

    last = f"{WINDOWS - 1}-{MICRO_BATCHES - 1}"
    whole = Run(mode)
    if what == "kill":
        for cut in whole.train():
            whole.save(folder / cut)
            if cut == last:
                os._exit(9)  # nothing is flushed, closed or said to other ranks
    positions = {cut: whole.position() for cut in whole.train()}
    expected = whole.result()
    assert len(set(whole.norms)) == WINDOWS
    cuts = list(positions)[:-1]  # the killed run did not get to the last step
    assert cuts[-1] == last
    for cut in cuts:
        resumed = Run(mode, seed=9)
        resumed.load(folder / cut)
        assert resumed.position() == positions[cut], f"{cut}: {resumed.position()}\n!= {positions[cut]}"
        for now in resumed.train(cut):
            assert resumed.position() == positions[now], f"{cut}, at {now}: {resumed.position()}\n!= {positions[now]}"
        assert resumed.result() == expected, cut
    print(f"resumed from {len(cuts)} cuts")
    if mode.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], MODES[sys.argv[2]], int(sys.argv[3]), Path(sys.argv[4]))
