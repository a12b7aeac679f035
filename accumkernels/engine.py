"""The engine: opens windows, takes micro-batches, ends windows and drops them.

FusedAccumulator and the trainers' adapters drive it. They check what users give; it checks the order of calls.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .arguments import Options, Split, as_scalar
from .batch_statistics import synchronised_batchnorm, warn_of_batchnorm
from .buffers.flat import SquaredNorms
from .buffers.parameters import named_parameters
from .buffers.store import Store
from .capture.inbox import Bucket, MicroBatch
from .devices import is_accelerator
from .errors import logger
from .hooks import Hook, profiled, unfollow
from .offload.host import Slots, check_parameters
from .ranks.choice import choose_ranks
from .ranks.pipeline import stages_of
from .splitting.batches import costs_of, samples_of, tree_leaves, tree_map
from .splitting.memory import Memory, memory_of
from .splitting.packing import Packer
from .splitting.run import BatchReport, BatchRunner, LossAndWeight, adding_nothing
from .splitting.sample_mean import SampleMean
from .window.checkpoint import ALL_RANKS, check, load, save, share, without_window
from .window.coupled import CoupledLoss
from .window.end import End, Part
from .window.grad_scaler import LossScaler
from .window.loss_items import has_class_weights, is_plain_mean
from .window.micro_batch import MicroBatchRunner
from .window.misuse import MisuseDetector, Patience
from .window.noise_scale import NoiseMeter
from .window.state import Observed, Phase, Window, WindowLoss

_log = logger(__name__)


class Engine:
    """Runs the windows of one accumulator.

    Args:
        params: FusedAccumulator's argument.
        options: Its options.
        process_group: Its argument.
        stepped: Ids of the parameters to accumulate; None: all.
        shared: See `ranks.choice.Choice`.

    Attributes:
        options: As the argument.
        store: Flat buffers, masters and states.
        ranks: All ranks that take part.
        scaler: The GradScaler's; None if there is none.
        noise: Measures the noise scale.
        runner: Runs micro-batches.
        ending: Ends windows.
        misuse: Observes what the loop does.
        patience: Observes how long windows become.
        module: What was given, if that is a module.
        silence: Keeps a DistributedDataParallel module silent; None if there is none.
        window: The open window, or the one that was finalized.
    """

    window: Window

    def __init__(
        self,
        params: Any,
        options: Options,
        process_group: Any = None,
        stepped: Set[int] | None = None,
        shared: Callable[[], list[Tensor]] | None = None,
    ) -> None:
        chosen = choose_ranks(params, process_group, shared)
        named = named_parameters(chosen.params)
        if stepped is not None:
            ignored = [e.name for e in named if id(e.param) not in stepped and e.param.requires_grad]
            if ignored:
                _log.warning(
                    "no optimizer steps %s%s, so that no gradient of it is accumulated",
                    ", ".join(map(repr, ignored[:3])),
                    f" and {len(ignored) - 3} more" if len(ignored) > 3 else "",
                )
            named = [e for e in named if id(e.param) in stepped]
        self.options = options
        self.scaler = None if options.scaler is None else LossScaler(options.scaler)
        if self.scaler is not None:
            self.scaler.check_device(named)
        if options.cpu_offload:
            check_parameters(named, chosen.group, bool(stages_of(named)))
            if self.scaler is not None:
                self.scaler.keep_on_host()
        self.ranks = chosen.join(named, options)
        warn_of_batchnorm(chosen.params)
        self.module = chosen.params if isinstance(chosen.params, nn.Module) else None
        self.synchronised = synchronised_batchnorm(chosen.params)
        self.store = Store(named, options.backend, options.master_weights, Slots() if options.cpu_offload else None)
        self.ranks.follow(self.store.buffers)
        self.silence = chosen.silence()
        half_life = None if isinstance(options.noise_scale, bool) else float(options.noise_scale)
        self.noise = NoiseMeter(half_life, options.noise_scale is not False, self.ranks)
        add = Hook(self, Engine._add_of_loop, in_graphs=True)
        self.runner = MicroBatchRunner(self.store, self.ranks, self.scaler, options, add)
        self.ending = End(self.store, self.ranks, self.scaler, options.overflow, self.noise)
        uncounted, flush = self.runner.is_uncounted, self.runner.flush
        self.misuse = MisuseDetector(self, self.store, self.ranks, self.scaler, uncounted, flush)
        self.patience = Patience(self)
        self._open()

    # ---- which calls the window allows

    def check_open(self, caller: str, adds: bool = True) -> None:
        """Refuse a call that adds to the window, or else ends it, where it cannot.

        Raises:
            RuntimeError: says why, and what to do.
        """
        running = self.runner.runs or self.runner.captures.inbox.running
        sent = adds and self.window.sent.count
        if running or sent or self.window.phase is not Phase.OPEN or not self.store.has_claim:
            self._refuse(caller, adds)

    def check_idle(self, caller: str) -> None:
        """Refuse a call in the middle of a backward; see `check_open`."""
        if self.runner.runs:
            raise RuntimeError(
                f"{caller} while a backward of this accumulator runs, as in one of its hooks: what it has made so far "
                "would count or be lost here. Add up the losses, or call it when that backward has ended"
            )

    def _refuse(self, caller: str, adds: bool) -> None:
        """Raise what is wrong with a call in the phase that the window is in, if anything is."""
        phase, interrupted = self.window.phase, self.runner.captures.inbox.running  # of a backward
        if not self.store.has_claim:
            raise RuntimeError(f"{caller} after remove(): build a new FusedAccumulator")
        self.check_idle(caller)
        if phase is Phase.FINALIZED:
            raise RuntimeError(
                f"{caller} after finalize(): step the optimizer, then call acc.zero_() to open a new window"
            )
        if phase is Phase.AVERAGED and adds:
            raise RuntimeError(
                f"{caller}: the window was loaded as finalized; call acc.finalize(optimizer) or acc.zero_()"
            )
        if phase is Phase.ENDING:
            raise RuntimeError(
                f"{caller}: ending this window failed, in its sum over ranks or later, and its sums are lost; "
                "drop it with acc.zero_()"
            )
        if self.options.cpu_offload and interrupted:
            raise RuntimeError(f"{caller} after a backward that raised: drop what it has left by acc.discard()")
        if phase is Phase.BROKEN or interrupted:
            together = self.ranks.ends_together
            out = "acc.discard(), on all ranks at their finalize() or step()" if together else "acc.zero_()"
            raise RuntimeError(
                f"{caller}: this window is broken: a backward raised or was discarded after some of its gradients "
                f"may have been added (release={self.options.resolved_release!r}); drop the window with {out} (AK07)"
            )
        if self.window.sent.count and adds:
            raise RuntimeError(f"{caller} after last=True: end the window with acc.step() or acc.finalize()")

    # ---- open

    def _open(self, number: int = 0, observed: Observed | None = None, state: Mapping[str, Any] | None = None) -> None:
        """Open a window, new or from a state, after `number` others have ended; `observed` is what they leave."""
        device = self.store.layout.devices[0]
        self._begun = False  # whether a micro-batch of it was made, which knows where its squared norms go
        notes = self.options.make_notes()
        if state is None:
            squares = SquaredNorms() if self.noise.on else None
            observed = observed or Observed()
            self.window = Window(number, WindowLoss(device), squares=squares, notes=notes, observed=observed)
        else:
            squares = self.noise.load_state_dict(state["noise_scale"], self.store.layout.device)
            sums = torch.tensor(state["loss"], dtype=torch.float64, device=device) if any(state["loss"]) else None
            of_all, loss = state["rank"] == ALL_RANKS, WindowLoss(device, sums)
            self.window = Window.of_state(state["window"], of_all, loss=loss, squares=squares, notes=notes)
        self.runner.open_window()

    def measure_noise(self) -> None:
        """Measure the noise scale from now on; from the next window on if this one holds a part of a micro-batch."""
        self.noise.turn_on()
        if not (self._begun or self.window.micro_batches):
            self.window.measure()

    def make_room(self) -> None:
        """Before a window's first micro-batch: do what that would do for parameters that were unfrozen."""
        if self.window.micro_batches == 0 and self.window.phase is Phase.OPEN and self.store.unplaced():
            self.runner.prepare_window()

    # ---- accumulate

    def micro_batch(self, weight: float | Tensor, **about: Any) -> MicroBatch:
        """Make the next micro-batch, with other fields of `MicroBatch`."""
        self._begun = True
        return MicroBatch(weight, self.runner.serial + 1, squares=self.window.squares, **about)

    @profiled
    def accumulate(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of a micro-batch whose backward has run, and count it."""
        try:
            self.runner.accumulate(self.window, micro_batch)
        except BaseException:
            if micro_batch.ran_backward:  # or the next micro-batch would add what this one has left in `.grad`
                self.discard()
            raise
        if self.window.micro_batches >= self.patience.limit:
            self.patience.record(self.window.micro_batches)

    def _add_of_loop(self, bucket: Bucket) -> None:
        self.runner.add_of_loop(self.window, self.micro_batch(1.0), bucket)

    def backward(self, loss: Tensor, micro_batch: MicroBatch, **kwargs: Any) -> None:
        """Run a micro-batch: backward of its plain loss, with arguments of `Tensor.backward`, and `accumulate`."""
        self.accumulate(self.runner.backward(self.window, loss, micro_batch, kwargs))

    def backward_coupled(self, coupled: CoupledLoss, micro_batch: MicroBatch, made: int = 0) -> Tensor:
        """Run a micro-batch whose loss couples its samples, chunk by chunk; returns the loss, detached.

        Args:
            coupled: The loss.
            micro_batch: The micro-batch.
            made: See `MisuseDetector.inspect_loss`.
        """
        last, micro_batch = micro_batch.last, micro_batch._replace(last=False)

        def backward(loss: Tensor) -> None:
            nonlocal micro_batch
            self.misuse.inspect_loss(self.window, loss, made)
            micro_batch = self.runner.backward(self.window, loss, micro_batch, {})

        def backward_part(tensors: Sequence[Tensor], grads: Sequence[Tensor], ends: bool) -> None:
            self.runner.backward_part(self.window, tensors, grads, micro_batch._replace(last=last and ends))

        try:
            loss = coupled.run(self.drawing(coupled.chunks), backward, backward_part)
        except BaseException:
            self.discard()
            raise
        self.accumulate(micro_batch._replace(last=last))
        return loss

    def backward_batch(
        self,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        split: Split,
        *,
        divided_by: float | Tensor | None = None,
        last: bool = False,
        splits_together: bool = False,
    ) -> BatchReport:
        """Run a whole batch as micro-batches; see `FusedAccumulator.backward_batch`.

        Args:
            batch: The batch.
            loss_fn: Returns the loss of a part, or that and its weight, or these and anything else.
            split: How it is split.
            divided_by: See `MicroBatch`.
            last: Whether the last micro-batch of the batch is the window's last.
            splits_together: Whether ranks wait for each other in `loss_fn`.
        """
        self.check_open("backward_batch()")
        max_over_ranks = self._max_over_ranks(split.is_automatic, splits_together)
        device = self.store.layout.devices[0]
        check = functools.partial(as_scalar, name="weight", device=device)
        call = LossAndWeight(loss_fn, split.weight, check, max_over_ranks is not None)
        samples = samples_of(batch, split.collate)
        costs = costs_of(samples, split.cost)
        packer = Packer(costs, padded=samples.padded, most=split.most, multiple_of=split.multiple_of)
        budget = math.inf if split.budget is None and split.most is not None else split.budget
        unweighted = None if max_over_ranks else functools.partial(self.sample_mean.check, loss_fn, samples, costs)
        parts = _Parts(self, call, unweighted, max_over_ranks, divided_by, last)
        report = self.batches.run(samples, packer, budget, parts, self.drawing(batch))
        if len(report.sizes) > 1:  # a loop does not divide by a number that is found here
            self.window.observed.divisors.append(None)
        return report

    @functools.cached_property
    def batches(self) -> BatchRunner:
        """Runs batches, and learns which micro-batches fit; loops of plain micro-batches never need it."""
        return BatchRunner(self._memory())

    @functools.cached_property
    def sample_mean(self) -> SampleMean:
        """Finds out which losses are means over samples."""
        return SampleMean(is_plain_mean, has_class_weights, self._memory())

    def _memory(self) -> Memory:
        return memory_of(self.store.layout.devices[0], self.options.memory_limit)

    def drawing(self, batch: Any) -> list[torch.device]:
        """Accelerators whose random numbers a batch may draw: those of all parameters, frozen ones too, and its own."""
        devices = dict.fromkeys(entry.param.device for entry in self.store.named)
        devices |= dict.fromkeys(leaf.device for _, leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        return [device for device in devices if is_accelerator(device)]

    def _max_over_ranks(self, automatic: bool, together: bool) -> Callable[[Sequence[int]], list[int]] | None:
        """The largest of such numbers on all ranks, if they wait for each other in forward or backward; else None."""
        if not self.store.sharded:
            if not self.ranks.ends_together:  # nobody waits, and modules need no look
                return None
            if not together and synchronised_batchnorm(self.module) is None:
                return None
        if automatic:
            raise ValueError(
                "micro_batch='auto' where ranks communicate in forward or backward (FSDP2, SyncBatchNorm): one that "
                "runs out of memory would leave the others waiting. Pass micro_batch or budget; "
                "accumkernels.memory_report of the model before fully_shard says how many samples fit"
            )

        return functools.partial(self.ranks.largest, device=self.store.layout.device)

    def discard(self) -> None:
        """Drop the gradients of the current micro-batch; this breaks the window if some were added."""
        self.runner.discard(self.window)

    def flush(self) -> None:
        """Add what is kept or on its way, before sums are read."""
        self.runner.flush(self.window)

    # ---- end

    def finalize(self, optimizers: Sequence[Optimizer], divisor: Tensor | None) -> None:
        """Average the window and set `.grad`, after the checks of `OptimizerSteps.check`."""
        self._close()
        self.ending.finalize(self.window, optimizers, divisor)

    def step(
        self,
        optimizers: Sequence[Optimizer],
        divisor: Tensor | None,
        max_norm: Tensor | None = None,
        parts: Sequence[Part] | None = None,
    ) -> Tensor | list[Tensor] | None:
        """Average, clip, step all optimizers or none, and open the next window.

        Args:
            optimizers: All that step it, checked.
            divisor: fp64 0-d; None for the sum of weights.
            max_norm: fp64 0-d; None to clip nothing.
            parts: To be clipped by norms of their own; None if there are none.

        Returns:
            The parts' norms, or the norm of all where `max_norm` is given.
        """
        window, ending, skips = self.window, self.ending, False
        if window.micro_batches == 0 and not self.ranks.ends_together:
            norms = list(torch.zeros(len(parts or [None]), dtype=torch.float64, device=self.store.layout.device))
            ending.skip_empty()
            skips = True
        else:
            self._close()
            norms = list(ending.step(window, optimizers, divisor, max_norm, parts or ()))
        found: Tensor | list[Tensor] | None = None
        if parts is not None:
            found = ending.results(norms[: len(parts)])
        elif max_norm is not None:
            found = ending.result(norms[0])
        self.drop(skips)
        return found

    def _close(self) -> None:
        """The window ends: a backward from here on adds to what is assigned."""
        if self.window.micro_batches > self.patience.longest:
            self.patience.end(self.window.micro_batches, used=True)
        if self.runner.casts is not None:
            self.runner.casts.release()
        if self.window.micro_batches == 0 and self.ranks.ends_together:
            self.runner.prepare_window()  # as its first micro-batch would have: other ranks may have had one
        self.runner.captures.inbox.set_listening(False)

    # ---- drop

    def drop(self, ended: bool = False) -> None:
        """Drop the window, finished or not, and open the next.

        Args:
            ended: Whether it ended though nothing was to be finalized.
        """
        window = self.window
        if window.phase is Phase.FINALIZED:
            ended = True
            if self.store.masters is not None:
                self.store.masters.round_late(unseen=not self.ending.steps.plan.is_seen)
        else:
            self.patience.end(window.micro_batches, used=False)
        if self.scaler is not None:
            self.scaler.withdraw()
        if self.runner.offload is not None:
            self.runner.offload.drop()
        self.store.drop_grads()
        self.store.open_window()
        if window.outcome is not None and window.outcome.idle:
            self.give_back(window.outcome.idle)
            self.store.allocate()
        self._open(window.number + ended, window.observe_next(ended))

    def give_back(self, idle: bytes) -> None:
        """Between windows, free the segments of frozen parameters; the same on all ranks that sum them."""
        if 1 in idle:
            self.store.give_back(idle)
            self.ranks.follow(self.store.buffers)
            self.runner.renew_captures()

    def remove(self) -> None:
        """Release the parameters, so that another accumulator may take them."""
        self.patience.silence()
        self.runner.remove_hooks()
        unfollow(self.misuse)
        if self.silence is not None:
            self.silence.remove()
        self.store.release_claim()

    def succeed(self, before: Engine) -> None:
        """Go on from an engine that was removed between two windows: with its counts, averages and last window."""
        self.ending.succeed(before.ending)
        self.noise.succeed(before.noise)
        self._open(before.window.number)

    # ---- checkpoints

    def state_dict(self, reduced: bool, whole: bool = True) -> dict[str, Any]:
        """See `FusedAccumulator.state_dict`, which has checked that the window can be saved; not `whole`: without it.

        Without the window, nothing but this is read or changed: a backward or a step may be running.
        """
        if whole:
            self.make_room()  # a run that resumes has masters of what is trainable by now
            self.flush()
            self.store.check_sums(self.window.micro_batches, self.options.overflow is not None)
            self.patience.silence()
        saved = save(self.store, self.ranks, self.window, self.runner.serial, reduced=reduced, sums=whole)
        reduced = reduced and self.ranks.reduces_sums
        joined = saved["sums"].values() if reduced else None
        saved |= {
            **self.ending.state_dict(),
            "noise_scale": self.noise.state_dict(self.window.squares, self.store.layout.device, joined),
        }
        if self.batches.learned.batches and not (self.store.sharded or reduced):
            saved["batches"] = self.batches.learned.state()
        return saved if whole else without_window(saved)

    def checked(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state that fits, as it is to be loaded; see `FusedAccumulator.load_state_dict`."""
        self.store.check_drift()
        self.make_room()
        return share(self.ranks, check(self.store, self.ranks, state_dict))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checked state, in an empty window."""
        self.runner.prepare_window()
        load(self.store, state)
        self._open(state=state)
        self.patience.silence()  # the run that saved it is over, too, and may have ended windows
        self.runner.resume(state["serial"])
        self.ending.load_state_dict(state)
        if "batches" in state:
            self.batches.learned.load(state["batches"])


class _Parts:
    """The open window, to which the parts of one batch are added; see `splitting.run.Window`."""

    def __init__(
        self,
        engine: Engine,
        call: LossAndWeight,
        unweighted: Callable[[Any, Sequence[int], Tensor], None] | None,
        max_over_ranks: Callable[[Sequence[int]], list[int]] | None,
        divided_by: float | Tensor | None,
        last: bool,
    ) -> None:
        self.max_over_ranks = max_over_ranks
        self._engine = engine
        self._call = call
        self._unweighted = unweighted
        self._divided_by = divided_by
        self._last = last
        self._begins = engine.window.micro_batches == 0 and not engine.window.dropped
        self._before = self._sums()

    def add(self, part: Any, indices: Sequence[int], whole: bool, last: bool, asks: bool) -> tuple[bool, Any]:
        """Add a part."""
        engine = self._engine
        engine.check_open("backward_batch()")
        engine.runner.captures.inbox.set_listening(not whole)
        try:
            check = self._unweighted if asks else None
            kept = None if check is None else tree_map(lambda leaf: leaf, part)  # a loss may take labels out
            found = self._call(part, len(indices))
            if check is not None and found is not None and not found.given:
                check(kept, indices, found.loss)
            kept = None
            if found is not None:
                self._add(found.loss, found.weight, self._last and last and not whole)
        except BaseException:
            engine.discard()
            raise
        finally:
            engine.runner.captures.inbox.set_listening(True)
        if found is None:
            return False, None
        return True, tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, found.extra)

    def _add(self, loss: Tensor, weight: float, last: bool) -> None:
        engine, kind = self._engine, self._engine.store.layout.devices[0].type
        engine.misuse.inspect_loss(engine.window, loss)
        if last:  # also where it fails, and is discarded
            engine.window.sent.mark()
        micro_batch = engine.micro_batch(weight, last=last, divided_by=self._divided_by)
        with contextlib.ExitStack() as stack:
            if weight == 0:
                stack.enter_context(adding_nothing(loss))
            if torch.is_autocast_enabled(kind):  # it is for the forward
                stack.enter_context(torch.autocast(kind, enabled=False))
            micro_batch = engine.runner.backward(engine.window, loss, micro_batch, {})
        engine.accumulate(micro_batch)

    def adds_early(self) -> bool:
        """Whether gradients may be added while backward runs."""
        return self._engine.runner.captures.add_early

    def is_broken(self) -> bool:
        """Whether an error has left a part of a micro-batch in the sums."""
        return self._engine.window.phase is Phase.BROKEN

    def begin_anew(self) -> bool:
        """Drop the window if this batch has begun it."""
        anew = self._begins and not self._engine.window.sent.count
        if anew:
            self._engine.drop()
        return anew

    def loss(self) -> Tensor:
        """The loss of what was added."""
        sums = self._sums()
        if sums is None:
            sums = torch.zeros(2, dtype=torch.float64, device=self._engine.store.layout.devices[0])
        if self._before is not None:
            sums = sums - self._before
        return sums[0] / sums[1]

    def _sums(self) -> Tensor | None:
        """The window's sums of losses and weights until now."""
        if self._engine.options.overflow == "microbatch":
            self._engine.flush()  # which may be where micro-batches are dropped
        return self._engine.window.loss.sums()
