"""Compares numbers of micro-batches: which trains fastest, and why, down to not accumulating at all.

If the noise scale B_noise is known, the time to a given loss counts: the time of a sample, which falls with the batch B
because a step is paid for less often, times the samples needed, which grow as `1 + B / B_noise` (McCandlish et al.
2018, arXiv:1812.06162). Otherwise only the time of a sample counts. Since a smaller batch needs no more samples (the
same source; Marek et al. 2025, arXiv:2507.07101), the smallest batch wins whose samples take hardly longer than the
fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..costs import StepCosts

WORTH_IT = 0.05  # a smaller gain in time is not worth more micro-batches, and measurements are no more precise


@dataclass(frozen=True)
class Recommendation:
    """How many micro-batches to accumulate.

    Attributes:
        accumulation_steps: K; 1 for not accumulating.
        text: "K = 1", "K up to 4", or "K = 8 for the batch 512".
        why: The reason, in a sentence or more.
    """

    accumulation_steps: int
    text: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """Numbers of micro-batches up to a plan's, compared by their known costs.

    Attributes:
        target: Samples wanted per optimizer step, over all ranks.
        steps: Micro-batches per rank that reach it.
        most: Samples that fit at a time.
        world_size: Ranks.
        costs: None if they are not all known.
        missing: The names of the unknown costs.
        noise_scale: In samples, or None.
        limit: Why no larger micro-batch fits, as the end of a sentence; or nothing.
    """

    target: int
    steps: int
    most: int
    world_size: int
    costs: StepCosts | None
    missing: tuple[str, ...]
    noise_scale: float | None
    limit: str

    @property
    def size(self) -> float:
        """Samples of a micro-batch, or their mean if they differ."""
        return self.target / self.world_size / self.steps

    def batch(self, steps: int) -> float:
        """Samples over all ranks in so many of the plan's micro-batches."""
        return self.target * steps / self.steps

    def seconds_per_sample(self, steps: int) -> float:
        """Seconds of a window over its samples on all ranks."""
        assert self.costs is not None
        return self.costs.window_seconds(steps, self.size) / self.batch(steps)

    def samples_needed(self, steps: int) -> float:
        """Samples to a given loss, relative to the fewest possible; 1 if the noise scale is not known."""
        return 1.0 if self.noise_scale is None else 1 + self.batch(steps) / self.noise_scale

    def seconds_to_loss(self, steps: int) -> float:
        """Seconds of a sample, times the samples needed if their number is known; smaller is better."""
        return self.seconds_per_sample(steps) * self.samples_needed(steps)

    def recommendation(self) -> Recommendation:
        """Recommend a number of micro-batches."""
        if self.steps == 1:
            ranks = " on each rank" if self.world_size > 1 else ""
            why = f"the batch of {self.target} is one micro-batch{ranks}: there is nothing to accumulate"
            return Recommendation(1, "K = 1", why + self._faster_size())
        if self.costs is None:
            why = (
                f"a micro-batch has at most {self.most} samples{self.limit}; whether a smaller batch trains as fast is "
                f"not known without {', '.join(self.missing)}"
            )
            if self.noise_scale is not None:
                needed = self.samples_needed(self.steps) / self.samples_needed(1)
                why += (
                    f". At a noise scale of {self.noise_scale:.4g} it takes {needed:.3g} times the samples to a loss "
                    "that K = 1 takes"
                )
            return Recommendation(self.steps, f"K = {self.steps} for the batch {self.target}", why)
        times = [self.seconds_to_loss(steps) for steps in range(1, self.steps + 1)]
        enough = (1 + WORTH_IT) * min(times)
        best = next(steps for steps, seconds in enumerate(times, 1) if seconds <= enough)
        if best == 1:
            text, why = "K = 1", self._why(best)
        elif best < self.steps:
            text, why = f"K up to {best}", self._why(best)
        else:
            text, why = f"K = {best} for the batch {self.target}", self._why(best) + self.limit
        return Recommendation(best, text, why + self._faster_size())

    def _why(self, best: int) -> str:
        """Compare with not accumulating, and with accumulating up to the target."""
        compared = self.steps if best == 1 else best
        samples = _change(self.seconds_per_sample(compared) / self.seconds_per_sample(1))
        why = f"with K = {compared} a sample takes {samples} time than with K = 1"
        costs = self._costs()
        if self.noise_scale is None:
            if best == 1:
                slower = self.seconds_per_sample(compared) > self.seconds_per_sample(1)
                return f"{why}{'' if slower else f', too little for {compared} times fewer steps'}; {costs}"
            if best == self.steps:
                return f"{why}: {costs}"
            rest = _change(self.seconds_per_sample(self.steps) / self.seconds_per_sample(best))
            return f"{why}: {costs}; from there to K = {self.steps} it takes only {rest}"
        needed = self.samples_needed(compared) / self.samples_needed(1)
        total = _change(self.seconds_to_loss(compared) / self.seconds_to_loss(1))
        why += (
            f" ({costs}) and, at a noise scale of {self.noise_scale:.4g}, a loss takes {needed:.3g} times the "
            f"samples: {total} time in all"
        )
        if best in (1, self.steps):
            return why
        rest = _change(self.seconds_to_loss(self.steps) / self.seconds_to_loss(best))
        return f"{why}; K = {self.steps} takes {rest} than that"

    def _costs(self) -> str:
        """Say what a window pays for once, and what it pays for in each micro-batch."""
        assert self.costs is not None
        once = self.costs.optimizer_seconds + self.costs.reduction_seconds
        what = "optimizer step and reduction take" if self.costs.reduction_seconds else "the optimizer step takes"
        return f"{what} {_time(once)}, a micro-batch {_time(self.costs.micro_batch_seconds(self.size))}"

    def _faster_size(self) -> str:
        """Point to a smaller micro-batch size that computes samples faster."""
        costs = self.costs
        if costs is None:
            return ""

        def rate(size: float) -> float:
            return size / max(costs.micro_batch_seconds(size), 1e-12)

        smaller = [size for size in costs.samples_per_second if size < self.size]
        fastest = max(smaller, key=rate, default=None)
        if fastest is None or rate(fastest) <= (1 + WORTH_IT) * rate(self.size):
            return ""
        gain = rate(fastest) / rate(self.size)
        return (
            f". Micro-batches of {fastest} compute {gain:.2g} times as many samples per second: try "
            f"max_micro_batch_size={fastest}"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _change(ratio: float) -> str:
    """Describe a ratio for people: 0.75 is "25 % less"."""
    return f"{100 * abs(ratio - 1):.0f} % {'less' if ratio <= 1 else 'more'}"
