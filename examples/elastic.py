"""Training that goes on from inside a window when a rank dies, on as many ranks or on fewer.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/elastic.py --kill rank

After every round of micro-batches, each rank saves its own sums, and rank 0 those of all ranks together. In the second
window a rank kills itself. The others get torch's error, and torchrun starts all four again. Each loads its own sums,
and the result is that of a run without interruption to the last bit.

Where a machine is lost, fewer ranks come back. They load the sums of all and deal out what is left of the window, which
gives the same result up to rounding (with --whole-numbers to the last bit). Start the first of these on a machine that
stays, since it hosts the rendezvous; by torchrun's defaults, it goes on half a minute after the second is lost:

    torchrun --nnodes 1:2 --nproc-per-node 3 --rdzv-backend c10d --rdzv-endpoint localhost:29400 --max-restarts 3 \
        examples/elastic.py
    torchrun --nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:29400 --max-restarts 3 \
        examples/elastic.py --kill machine

Without the environment variable torchrun keeps one store over all restarts, in which new ranks find the addresses of
dead ones (pytorch/pytorch#135712). At the end, all ranks train again without interruption, and rank 0 in fp64 by torch
alone, to compare.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import l1_loss

import accumkernels as ak

WINDOWS, MICRO_BATCHES = 4, 16  # those of all ranks together
SIZES = [1, 2, 4, 1]  # of micro-batches, in turn


class Training:
    """Model, optimizer and accumulator of a rank, and where it is.

    Args:
        whole_numbers: Train on whole numbers. All sums are then exact, whatever their order, so that results on
            different numbers of ranks can be compared to the last bit.
        device: Of this rank.

    Attributes:
        window: The window that is open.
        done: How many of its micro-batches are done, on all ranks together.
    """

    def __init__(self, whole_numbers: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.whole_numbers, self.device = whole_numbers, device
        self.model = nn.Linear(64, 4, bias=False).to(device)
        if whole_numbers:
            nn.init.zeros_(self.model.weight)
        self.acc = ak.FusedAccumulator(self.model, process_group=dist.group.WORLD)
        self.optimizer = torch.optim.SGD(self.acc.parameters(), lr=0.125, momentum=0.5)
        self.window = self.done = 0

    def micro_batch(self, window: int, index: int) -> tuple[Tensor, Tensor]:
        """Return micro-batch `index` of a window, the same on whichever rank."""
        generator = torch.Generator().manual_seed(1000 * window + index)
        x, y = (torch.randn(SIZES[index % len(SIZES)], width, generator=generator) for width in (64, 4))
        if self.whole_numbers:
            x, y = (4 * x).round(), (4 * y).round()
        return x.to(self.device), y.to(self.device)

    def train(self, folder: Path | None, kill: str | None = None) -> Tensor:
        """Train to the end, from where it is; returns the parameters. Without a folder nothing is saved."""
        while self.window < WINDOWS:
            for index in self.acc.window(range(self.done + self.rank, MICRO_BATCHES, self.size)):
                x, y = self.micro_batch(self.window, index)
                self.acc.backward(l1_loss(self.model(x), y), weight=len(x))
                self.done += self.size
                if kill and self.window == 1 and self.done > MICRO_BATCHES // 2:
                    die(kill)
                if folder and MICRO_BATCHES - self.done >= self.size:  # before the last micro-batch of any rank
                    self.save(folder)
            self.acc.step(self.optimizer)
            self.window, self.done = self.window + 1, 0
            if folder:
                self.save(folder)
        return self.model.weight.detach().clone()

    def save(self, folder: Path) -> None:
        """Save everything; collective."""
        name = f"{self.window}-{self.done}"
        # To the last bit on as many ranks, each needs its own sums; on another number, the sums of all.
        of_all = self.acc.state_dict(reduced=True)
        torch.save(self.acc.state_dict(), folder / f"{name}.{self.rank}")
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "acc": of_all}
            state |= {"window": self.window, "done": self.done, "size": self.size}
            torch.save(state, folder / f"{name}.all")
        dist.barrier()  # a checkpoint counts when every rank has written its part
        if self.rank == 0:
            (folder / "new").write_text(name)
            os.replace(folder / "new", folder / "latest")

    def load(self, folder: Path) -> bool:
        """Go on from the latest checkpoint; whether there is one."""
        if not (folder / "latest").exists():
            return False
        name = (folder / "latest").read_text()
        state = torch.load(folder / f"{name}.all", map_location=self.device, weights_only=True)
        sums = state["acc"]
        if state["size"] == self.size:
            sums = torch.load(folder / f"{name}.{self.rank}", map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.acc.load_state_dict(sums)
        self.window, self.done = state["window"], state["done"]
        if self.rank == 0:
            there = f"from window {self.window}, after {self.done} micro-batches"
            print(f"{self.size} ranks go on {there}, saved by {state['size']} ranks", flush=True)
        return True

    def true(self, start: Tensor) -> Tensor:
        """The final parameters in fp64, by torch alone, on the whole batch of every window."""
        weight = start.double().requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
        for window in range(WINDOWS):
            parts = [self.micro_batch(window, index) for index in range(MICRO_BATCHES)]
            x, y = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
            optimizer.zero_grad()
            l1_loss(x @ weight.T, y).backward()
            optimizer.step()
        return weight.detach()


def die(what: str) -> None:
    """Kill this process, and first torchrun if it is the machine that dies."""
    if what == "machine":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    """Train, go on where a checkpoint is found, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("elastic"), help="of checkpoints, which all machines see")
    parser.add_argument("--kill", choices=["rank", "machine"], help="in the second window: the last rank, or all here")
    parser.add_argument("--whole-numbers", action="store_true", help="train on whole numbers, whose sums are exact")
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # The timeout of ranks that wait for one that hangs. One that is killed is noticed at once.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=1))
    rank, size = dist.get_rank(), dist.get_world_size()
    arguments.folder.mkdir(exist_ok=True)

    training = Training(arguments.whole_numbers, device)
    start = training.model.weight.detach().clone()
    # Not where torchrun says that it is the first try: that one may have failed before it began, by a port not free.
    dies = not training.load(arguments.folder) and (arguments.kill == "machine" or rank == size - 1)
    ours = training.train(arguments.folder, arguments.kill if dies else None)
    training.acc.remove()

    uninterrupted = Training(arguments.whole_numbers, device).train(None)
    if rank == 0:
        shutil.rmtree(arguments.folder)
        apart, rounding = ((ours - other).abs().max().item() for other in (uninterrupted, training.true(start)))
        moved = (ours - start).abs().max().item()
        print(
            f"differs by {apart:.2g} from a run on {size} ranks that nothing interrupted, and by {rounding:.2g}\n"
            f"from fp64; training moved parameters by {moved:.2g}"
        )
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
