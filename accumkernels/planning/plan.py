"""From the batch that is wanted to micro-batches that fit: micro-batches x steps x ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from .checks import positive_int
from .trees import samples, slice_samples

T = TypeVar("T")


def _balanced(total: int, most: int) -> tuple[int, ...]:
    """The fewest sizes of at most `most` with this sum, differing by at most one, larger ones first."""
    pieces = -(-total // most)
    size, larger = divmod(total, pieces)
    return (size + 1,) * larger + (size,) * (pieces - larger)


@dataclass(frozen=True)
class AccumulationPlan:
    """How a batch is reached. `plan()` makes one; `str()` of it is a table.

    Attributes:
        target_batch_size: Samples per optimizer step, over all ranks.
        max_micro_batch_size: What fits: no micro-batch is larger.
        world_size: Ranks of data parallelism.
        micro_batch_sizes: Samples of each micro-batch of a window, on every rank; larger ones first, so that memory
            that does not suffice runs out at once.
    """

    target_batch_size: int
    max_micro_batch_size: int
    world_size: int
    micro_batch_sizes: tuple[int, ...]

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return len(self.micro_batch_sizes)

    @property
    def rank_batch_size(self) -> int:
        """Samples per optimizer step on one rank."""
        return sum(self.micro_batch_sizes)

    def split(self, batch: T) -> list[T]:
        """Cut one rank's batch into the plan's micro-batches, without copying.

        Args:
            batch: A tensor, or tuples, lists and mappings of them, with samples along the first dimension. A smaller
                batch (the last of an epoch) is cut into the fewest equal pieces that fit.

        Returns:
            Micro-batches of the same structure; their tensors are views. 0-d tensors and other objects go into each
            of them as they are, lists without tensors and one item per sample are cut.

        Raises:
            ValueError: the batch is empty or larger than `rank_batch_size`, or its tensors have different numbers of
                samples.
        """
        count = samples(batch)
        if not 0 < count <= self.rank_batch_size:
            raise ValueError(f"batch has {count} samples; this plan splits batches of 1 to {self.rank_batch_size}")
        full = count == self.rank_batch_size
        sizes = self.micro_batch_sizes if full else _balanced(count, self.max_micro_batch_size)
        pieces, start = [], 0
        for size in sizes:
            pieces.append(slice_samples(batch, start, start + size, count))
            start += size
        return pieces

    def windows(
        self, loader: Iterable[T], schedule: Callable[[int], int] | None = None, first_step: int = 0
    ) -> Iterator[list[T]]:
        """Group a loader's micro-batches into windows, one per optimizer step; the last one may be shorter.

        Args:
            loader: Gives micro-batches; for sizes that are not all equal, `DataLoader(dataset,
                batch_sampler=plan.batch_sampler(sampler))` gives exactly the plan's. It is read one window ahead of the
                caller at most.
            schedule: Target batch size by optimizer step, asked as a window begins (`planning.schedule`), instead of
                `target_batch_size`. The window has the number of full micro-batches that comes nearest. It must answer
                the same on every rank.
            first_step: The step that the first window is, where training is resumed.

        Raises:
            ValueError: `first_step` is negative, or `schedule` answers with no positive int.
        """
        if first_step < 0:
            raise ValueError(f"first_step must not be negative, got {first_step}")
        return self._windows(loader, schedule, first_step)

    def _windows(self, loader: Iterable[T], schedule: Callable[[int], int] | None, step: int) -> Iterator[list[T]]:
        window: list[T] = []
        wanted = 0
        for micro_batch in loader:
            if not window:
                wanted = self.accumulation_steps if schedule is None else self._steps_for(schedule(step))
            window.append(micro_batch)
            if len(window) == wanted:
                yield window
                window, step = [], step + 1
        if window:
            yield window

    def _steps_for(self, target: int) -> int:
        target = positive_int(target, "the schedule's batch size")
        full = self.micro_batch_sizes[0] * self.world_size
        return max(1, (2 * target + full) // (2 * full))

    def batch_sampler(self, sampler: Iterable[int]) -> BatchSampler:
        """Batches of indices in the plan's micro-batch sizes, for `DataLoader(dataset, batch_sampler=...)`.

        Args:
            sampler: Gives one rank's indices: `torch.utils.data.RandomSampler(dataset)`, `DistributedSampler(dataset)`,
                or a range.
        """
        return BatchSampler(sampler, self.micro_batch_sizes)

    def __str__(self) -> str:
        counts = Counter(self.micro_batch_sizes)
        sizes = " + ".join(f"{count} x {size}" for size, count in counts.items())
        rows = (
            ("target batch size", self.target_batch_size, ""),
            ("ranks", self.world_size, ""),
            ("batch per rank", self.rank_batch_size, ""),
            ("accumulation steps", self.accumulation_steps, sizes),
            ("largest micro-batch", self.micro_batch_sizes[0], f"at most {self.max_micro_batch_size}"),
        )
        width = max(len(str(value)) for _, value, _ in rows)
        lines = [f"{name:<20} {value:>{width}}  {note}".rstrip() for name, value, note in rows]
        total = f"({sizes}) x {self.world_size} ranks" if self.world_size > 1 else sizes
        return "\n".join([*lines, f"{total} = {self.target_batch_size}"])


class BatchSampler:
    """Cuts a stream of indices into batches whose sizes repeat; the last one may be smaller."""

    def __init__(self, sampler: Iterable[int], sizes: tuple[int, ...]) -> None:
        self.sampler = sampler
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        number = 0
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.sizes[number % len(self.sizes)]:
                yield batch
                batch, number = [], number + 1
        if batch:
            yield batch

    def __len__(self) -> int:
        windows, left = divmod(len(self.sampler), sum(self.sizes))  # type: ignore[arg-type]
        number = windows * len(self.sizes)
        for size in self.sizes:
            if left <= 0:
                break
            number, left = number + 1, left - size
        return number

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the sampler, where it has the method (DistributedSampler)."""
        set_epoch: Any = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def plan(target_batch_size: int, max_micro_batch_size: int, *, world_size: int = 1) -> AccumulationPlan:
    """Reach a batch size exactly with micro-batches that fit.

    The fewest micro-batches possible, differing by at most one sample: 100 with at most 33 is 25 + 25 + 25 + 25. With
    `weight=` the number of samples of each, `FusedAccumulator` makes of them exactly the big batch's gradient.

    Args:
        target_batch_size: Samples per optimizer step, over all ranks.
        max_micro_batch_size: Largest micro-batch that fits one device, as from `find_batch_size`.
        world_size: Ranks of data parallelism; each takes the same share.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument is less than 1, or the target is no multiple of `world_size`: names the nearest ones.
    """
    target = positive_int(target_batch_size, "target_batch_size")
    most = positive_int(max_micro_batch_size, "max_micro_batch_size")
    ranks = positive_int(world_size, "world_size")
    share, rest = divmod(target, ranks)
    if rest:
        nearest = f"{share * ranks} and {(share + 1) * ranks}" if share else f"{ranks}"
        raise ValueError(
            f"target_batch_size {target} cannot be shared equally by world_size {ranks} ranks; "
            f"the nearest possible: {nearest}"
        )
    return AccumulationPlan(target, most, ranks, _balanced(share, most))
