"""FusedAccumulator: the life of a window of micro-batches."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .arguments import Fusion, Options, Overflow, Release, Split, as_int, as_scalar, refuse_unknown
from .batch_statistics import check_independent
from .buffers.parameters import check_group
from .engine import Engine
from .errors import expect, expect_iterable, logger, wrong_type
from .hooks import opaque, profiled
from .ops import Backend
from .ops.schema import State
from .ranks.pipeline import refuse_late_stages
from .splitting.batches import Cost
from .splitting.run import BatchReport
from .window.checkpoint import saved_by_dcp
from .window.coupled import CoupledLoss
from .window.end import read_parts, select
from .window.grad_scaler import current_scale
from .window.noise_scale import NoiseScale
from .window.state import Phase

_log = logger(__name__)
_Batch = TypeVar("_Batch")
_ClippedPart = tuple[Tensor | Iterable[Tensor], float | Tensor]  # parameters, and the norm that they are clipped to


class FusedAccumulator:
    """Accumulates gradients of micro-batches in flat fp32 buffers, in one fused pass per micro-batch.

    A window is the micro-batches between two optimizer steps. Its gradient is the weighted mean
    `sum_i w_i * g_i / sum_i w_i` over the micro-batches that really ran, so unequal micro-batches and a short last
    window need no `loss / accumulation_steps`:

        acc = FusedAccumulator(model, scaler=scaler)
        optimizer = torch.optim.AdamW(acc.parameters(), lr=3e-4, fused=True)
        for window in acc.windows(loader, 8):
            for x, y in window:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = loss_fn(model(x), y)
                acc.backward(loss, weight=y.numel())
            norm = acc.step(optimizer, max_norm=1.0)
            if not acc.step_was_skipped:
                scheduler.step()

    or, for a loop that keeps its own calls: `scaler.scale(loss).backward()`, `acc.accumulate(weight)`, ...,
    `acc.finalize(optimizer)`, `acc.clip_grad_norm_(1.0)`, `scaler.step(optimizer)`, `scaler.update()`, `acc.zero_()`.

    Args:
        params: A module, bare or in DistributedDataParallel, or an iterable of parameters, of (name, parameter) pairs,
            or of param groups. Frozen parameters may have any dtype, and take no memory until they are unfrozen. For
            DTensors (call FSDP2's `fully_shard` first), each rank accumulates its local shard: see docs/fsdp2.md.
        scaler: A `torch.amp.GradScaler`; a disabled one means the same as None. Gradients are unscaled while they are
            accumulated; do not call `scaler.unscale_`.
        overflow: What happens when a gradient has inf or nan. "window" (default): the step is skipped and the scale
            backs off. "microbatch": the micro-batch contributes neither gradient nor weight, and the others are used.
            "raise": `accumulate` raises FloatingPointError, at the cost of one synchronisation per micro-batch. None:
            nothing is checked.
        release: When gradients are added. "backward": in buckets while backward runs, so that they never live all at
            once. The weight must then be known before backward: pass it to `acc.backward`. An exception in backward
            breaks the window until `zero_()`. "microbatch": by `accumulate()`, which consumes `.grad`; an exception in
            backward leaves the window whole. "auto" (default): `acc.backward` adds in buckets if all gradients together
            are larger than a bucket. In smaller models, in a loop's own `loss.backward()`, and with
            `overflow="microbatch"` or "raise", it works as "microbatch" does. An exception breaks the window only if a
            bucket was added before it.
        bucket_bytes: Pending gradient bytes at which a bucket is added, as a number or as in "8 MiB". At most this much
            and one gradient are alive at any moment. None (default): 16 MiB on a GPU; on a CPU twice the largest
            gradient, 2 to 32 MiB.
        master_weights: Keep fp32 masters of fp16 and bf16 parameters: `parameters()` yields them, optimizers step them,
            and after any optimizer's step they are rounded into the model. What you write to the model's weights
            yourself is taken over into the masters, except by way of `.data` (`refresh_masters`). Without masters
            16-bit parameters get `.grad`s of their own dtype, rounded once.
        process_group: The ranks of data parallel training. False: do not reduce across ranks. Leave it out if `params`
            is a DistributedDataParallel module, which has a group, and for DTensors, which know their ranks. The
            constructor broadcasts parameters and module buffers from the group's rank 0, and every window ends with a
            broadcast of module buffers. Micro-batches communicate nothing (a DistributedDataParallel module is kept
            silent); `finalize` and `step` are collective, even on a rank that ran no micro-batch: see `finalize`. For
            pipeline stages, pass the group that they were built with, or the group of the ranks with the same stages:
            see docs/pipeline.md.
        noise_scale: Measure micro-batch norms for `noise_scale()`. A number is a half-life in windows: a measurement
            that old counts half; True lets all windows count the same.
        cache_casts: Keep autocast's 16-bit copies of the weights for the whole window, in torch's own cache, from the
            first `acc.backward` or from the beginning of `acc.window` on, which saves a cast of every weight in each
            further micro-batch. For loops in which only optimizers change weights: an edit in place inside a window is
            an error that names the parameter, and an edit by `.data` is not seen until the next window. A window's
            autocast contexts need one dtype. Where a micro-batch has several of them, gradients of their common casts
            are added up in 16 bits, as in one context.
        cpu_offload: Keep sums, fp32 masters and the optimizer's state in host memory, for a model whose weights fit on
            the card and whose training does not. `parameters()` yields masters on the CPU for every trainable
            parameter; backward copies gradients to pinned memory, and a thread adds them once the whole backward has
            ended, so that an error in it never breaks the window. At most two buckets and one gradient are alive on the
            card. After a step the masters are rounded into the model. See docs/cpu_offload.md.
        fuse_weight_gradients: Add weight gradients of matrix products and embeddings to the flat buffer by the op that
            computes them, so that they never exist on their own. This happens inside `acc.backward` for weights that
            the graph of this very backward uses in nothing else, and that have no hooks of yours. Such a gradient is
            not rounded to 16 bit first, so it is nearer to float64 and not bit-equal to stock's. "auto" (default) fuses
            weights of at least 2**18 elements, or on an accelerator 2**20 to 2**22 by its bandwidth, if gradients
            are added in buckets (`release`): embeddings, and weights of products in bf16 and fp32 if no GradScaler is
            enabled, except in bf16 if the sums stay in the cache of a CPU with AMX. True fuses every such weight, also
            with `release="microbatch"`, where an exception in backward then breaks the window, and in fp16 with a
            GradScaler, where a sum that overflows fp16 and not fp32 no longer skips the step. "deferred" fuses as
            "auto" does, whatever `release` is, and keeps the operands of short products (on a CPU of up to 32 tokens),
            to multiply those of several micro-batches together: for micro-batches of few tokens, where reading and
            writing the sums is what a product costs. Operands take at most a sixteenth of the memory of the sums, and
            must not be changed in place before the window ends: that is an error. False fuses nothing.
            `overflow="microbatch"`, "raise" and a measured noise scale need whole gradients, and fuse nothing.
        backend: "auto", "native", "triton" or "reference".
        comm_dtype: The dtype in which fp32 sums are reduced over ranks. torch.bfloat16 halves the bytes; every rank's
            sum is rounded (a relative error of at most 2**-8), and so are the partial sums of N ranks: the error of an
            element is at most N * 2**-8 of the sum of its magnitudes over ranks. fp64 sums are reduced in fp64.
            "auto": bf16 for sums of bf16 parameters, fp32 for others.
        memory_limit: Bytes of the first parameter's device that `backward_batch` may use, for tensors of the whole
            process, as in "10GiB" or as a number of at least 2**20. A micro-batch that would need more runs out of
            memory and is split. None: all that the device has; a CPU's memory is not known.
        **kwargs: None: a name that is not above is an error that says what to write instead.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it and its value.
        RuntimeError: A parameter already has an accumulator, the chosen backend does not work, torch.distributed runs
            several ranks and `process_group` is missing, or ranks differ in their parameters.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        *,
        scaler: torch.amp.GradScaler | None = None,
        overflow: Overflow | None = "window",
        release: Release = "auto",
        bucket_bytes: int | str | None = None,
        master_weights: bool = False,
        process_group: Any = None,
        noise_scale: bool | float = False,
        cache_casts: bool = False,
        cpu_offload: bool = False,
        fuse_weight_gradients: Fusion | bool = "auto",
        backend: Backend = "auto",
        comm_dtype: torch.dtype | Literal["auto"] = torch.float32,
        memory_limit: int | str | None = None,
        **kwargs: NoReturn,
    ) -> None:
        if kwargs:
            refuse_unknown(kwargs, Options.__dataclass_fields__)
        engine: Any = params
        if not isinstance(engine, Engine):  # else it is a trainer's adapter's, which runs windows between its calls
            options = Options(
                scaler=scaler,
                overflow=overflow,
                release=release,
                bucket_bytes=bucket_bytes,
                master_weights=master_weights,
                noise_scale=noise_scale,
                cache_casts=cache_casts,
                cpu_offload=cpu_offload,
                fuse_weight_gradients=fuse_weight_gradients,
                backend=backend,
                comm_dtype=comm_dtype,
                memory_limit=memory_limit,
            )
            engine = Engine(params, options, process_group)
        self.engine = engine
        self._store, self._ranks = engine.store, engine.ranks
        self._once: set[str] = set()  # what was said, or looked for, and is not again
        self._iterated = False  # whether `window` was called since a window ended
        self._in_last: object = None  # whose last batch is at hand: of what `window` returned
        self._turns = threading.RLock()

    # ---- what it holds

    @property
    def flat_buffers(self) -> list[Tensor]:
        """The flat buffers, fp32 (fp64 for fp64 parameters), one per device and dtype."""
        self._note_reader()
        return [buffer.tensor for buffer in self._store.buffers if not buffer.released]

    def parameters(self) -> Iterator[Tensor]:
        """The tensors to build the optimizer over, in the order given, frozen parameters included.

        With `master_weights=True` it yields the fp32 masters of fp16 and bf16 parameters, and all other parameters
        themselves. The master of a frozen parameter has no memory, and reads as zeros, until the parameter is unfrozen.
        """
        return (self._store.target(entry.param) for entry in self._store.named)

    def param_groups(self, groups: Iterable[Any]) -> list[dict[str, Any]]:
        """Translate param groups over the model's parameters into groups over `parameters()`, in the same order.

        Args:
            groups: Dicts with a `params` entry, as torch.optim takes them; other entries are kept.

        Raises:
            TypeError, ValueError: A group is not a dict, or has no `params`.
        """
        groups = list(expect_iterable(groups, "groups", "an iterable of dicts"))
        for index, group in enumerate(groups):
            check_group(group, index)
        return self._store.param_groups(groups)

    def refresh_masters(self) -> None:
        """Copy all of the model's values into the masters, after an edit of weights that torch does not count.

        Most edits need no call: in-place ops on the weights (`model.load_state_dict`, `p.clamp_()` under
        `torch.no_grad()`) and `p.data = x` are noticed before the next step or checkpoint, and the elements that they
        have changed are taken over. `p.data.clamp_()` and other in-place ops by way of `.data` or NumPy are not, since
        they leave no trace but the values, nor are any edits between replays of a CUDA graph.
        """
        if self._store.masters is not None:
            self._store.masters.refresh()

    def main_grad(self, param: Tensor) -> Tensor:
        """A parameter's view of its flat buffer, shaped and strided like the parameter (a DTensor: its local shard).

        Its content is undefined until the parameter gets a gradient in this window.

        Raises:
            TypeError, ValueError: `param` is not a tensor, not accumulated here, or frozen.
        """
        found = self._store.segment_of(expect(param, Tensor, "main_grad(): param", "a parameter"))
        if found is None:
            raise ValueError(
                f"main_grad(): a tensor of shape {tuple(param.shape)} is not one of the accumulator's trainable "
                "parameters"
            )
        buffer, segment = found
        if buffer.released:
            raise RuntimeError(
                "main_grad(): release_buffers() freed the buffers; the next accumulate() makes them anew"
            )
        self._note_reader()
        return buffer.views[segment.index]

    def release_buffers(self) -> None:
        """Free the flat buffers between windows, for evaluation or generation.

        The next `accumulate` allocates them again; until then `flat_buffers` is empty. Old views keep the old memory.
        Masters stay. Parameters that are frozen now get memory only once they are unfrozen; with several ranks, that is
        left to the end of the next window, when they agree about it.

        Raises:
            RuntimeError: inside a window.
        """
        if self.micro_batches or self.engine.window.phase is not Phase.OPEN or self.engine.runner.is_uncounted():
            raise RuntimeError("release_buffers() inside a window: end it with step() or zero_() before")
        if self._ranks.size == 1:  # other ranks may not call this
            self.engine.give_back(self._store.idle(self._store.touched_bytes(), least=0.0))
        self._store.release()

    @property
    def micro_batches(self) -> int:
        """How many `accumulate` calls this window has had, dropped micro-batches included."""
        return self.engine.window.micro_batches

    @property
    def weight(self) -> Tensor:
        """Sum of the weights of the window's micro-batches, without dropped ones; fp64 0-d, on the first device.

        Until `finalize` it is this rank's sum, afterwards the sum over all ranks. The same holds for `found_inf`.
        """
        self.engine.flush()
        return self._store.state()[State.WEIGHT].clone()

    @property
    def found_inf(self) -> Tensor:
        """Whether any gradient of this window was not finite: fp32 0-d, 0.0 or 1.0, on the first device.

        With DTensors, ranks agree when the window ends; until then it is this rank's own value.
        """
        if self.engine.window.outcome is not None:
            return self.engine.window.outcome.verdict.found_inf.clone()
        if not self.engine.window.sent.count:
            self.engine.flush()
            self._store.check_sums(self.micro_batches, self.engine.options.overflow is not None)
        return self._store.state()[State.FOUND_INF].float()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, for overflow or because the window was empty. Reading it synchronises."""
        return self.engine.ending.was_skipped()

    def overflow_report(self) -> list[str]:
        """Names of the parameters with non-finite gradients in the last bad micro-batch; synchronises.

        Fused weights are checked when the window ends. If one of them is not finite, the names are those of the whole
        window.

        With DTensors, it names the parameters whose local shard was not finite.
        """
        self.engine.flush()
        return self._store.flagged()[1]

    def noise_scale(self) -> NoiseScale:
        """The critical batch size, as measured so far: how large a batch pays off.

        If the constructor's `noise_scale` did not turn the measurement on, the first call does so from the next window
        on. The accumulate pass then takes the squared norms of the micro-batches' gradients and of their sum. Only
        windows count that were not skipped and have at least two micro-batches of positive weight, with FSDP2 the same
        weights on all ranks; with `release="backward"`, none with several backwards in a micro-batch, as
        `backward_coupled` has. `float()` of the result is in the unit of `weight`; reading it synchronises, calling
        this method does not. The estimate assumes that a micro-batch of weight w is a mean over w independent samples;
        with sum-reduced losses and `divisor`, the unit is the micro-batch.

        The estimator follows McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162),
        appendix A.1, extended to unequal weights; see `accumkernels.window.noise_scale`.
        """
        if not self.engine.noise.on:
            self.engine.measure_noise()
        return self.engine.noise.read()

    def metrics(self) -> dict[str, float | Tensor]:
        """A snapshot of the last finished window for a logger: numbers and 0-d tensors, none of them read back.

        For numbers take `float(value)` of each, which waits for the device, so do so only every few windows. `step` or
        `finalize` finishes a window. Keys that do not apply are absent:

        * `micro_batches`: `accumulate` calls; `micro_batches_used`: those that were not dropped and had a positive
          weight;
        * `weight`: sum of their weights; `grad_norm`: the norm before clipping, where one was computed;
        * `loss`: `sum w_i l_i / sum w_i` over the micro-batches used, of all ranks, if losses are known from `backward`
          or `accumulate(loss=...)`;
        * `found_inf`, `step_skipped`: 1.0 if true, else 0.0;
        * `windows`, `windows_skipped`: how many have ended since construction, and how many of them without a step;
        * `loss_scale`: the GradScaler's current scale; `noise_scale`: the critical batch size, if it is measured;
        * `offload_wait`: with `cpu_offload`, seconds that the window waited for gradients to be added on the host, at
          its end and whenever its sums were read.
        """
        metrics = self.engine.ending.metrics()
        loss_scale = current_scale(self.engine.options.scaler)
        if loss_scale is not None:
            metrics["loss_scale"] = loss_scale
        if self.engine.noise.on:
            metrics["noise_scale"] = self.engine.noise.read().tensor()
        return metrics

    def _state(self) -> Iterator[tuple[str, str, object]]:
        """Yield what a reader may want to know: what it is, how one line says it, and its value."""
        captures, last_norm = self.engine.runner.captures, self.engine.ending.last_norm
        finalized = self.engine.window.phase is Phase.FINALIZED
        yield "holds", "{}", self._store
        if captures.graph is not None:
            yield "last backward", "elements in the last backward: {}", captures.graph
        if str(self._ranks):
            yield "ranks", "{}", self._ranks
        yield "overflow", "overflow={}", repr(self.engine.options.overflow)
        yield "release", "release={}", captures
        if (learned := self.engine.batches.learned).batches:
            yield "backward_batch", "micro-batches of backward_batch: {}", learned
        yield "window", "{}", "finalized" if finalized else f"{self.micro_batches} micro-batches into the window"
        yield "last norm", "last norm {}", "none yet" if last_norm is None else f"{last_norm.item():.6g}"

    def __repr__(self) -> str:
        return f"FusedAccumulator({', '.join(form.format(value) for _, form, value in self._state())})"

    def __str__(self) -> str:
        """A table of its state. Like `repr`, it waits for the device if a norm was computed."""
        return "\n".join(["FusedAccumulator", *(f"  {name:14}  {value}" for name, _, value in self._state())])

    # ---- a micro-batch

    @opaque
    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, *, last: bool = False, **kwargs: Any
    ) -> None:
        """`scaler.scale(loss).backward(**kwargs)`, then `accumulate(weight)`.

        Args:
            loss: The plain loss, neither scaled nor divided by a number of accumulation steps.
            weight: See `accumulate`. With several ranks the loss is multiplied by it, so that unequal weights are right
                where backward itself crosses ranks. None (default) counts 1, and a window is warned of, once, whose
                losses are known by their graphs to be means over unequal numbers of items; 1 means that they are to
                count the same.
            last: This is the window's last micro-batch, on this rank and on all others that ran any. With a process
                group, sums are sent while backward completes them if it adds buckets, otherwise when it has ended. The
                result is the same. `window` sets this by itself.
            **kwargs: `retain_graph`, `create_graph` and `inputs` of `Tensor.backward`.
        """
        engine = self.engine
        with self._turn("backward()"):
            engine.check_open("backward()")
            last = self._ranks.reduces_sums and self._check_last(last)
            caller = sys._getframe(1).f_back if weight is None else None  # above `opaque`; None if C has called
            engine.misuse.inspect_loss(engine.window, loss, caller=caller)
            # A wrong one is an error before backward runs.
            weight = 1.0 if weight is None else as_scalar(weight, "weight", self._store.layout.devices[0])
            engine.backward(loss, engine.micro_batch(weight, last=last), **kwargs)

    @opaque
    def accumulate(self, weight: float | Tensor = 1.0, *, last: bool = False, loss: Tensor | None = None) -> None:
        """Add the gradients in `.grad` to the window, multiplied by `weight / loss_scale`, and free them.

        The host does not wait for the device (except with `overflow="raise"`).

        Args:
            weight: How much this micro-batch counts in the weighted mean: 1 for a mean over micro-batches, or the
                number of samples or tokens that a mean-reduced loss averages. Non-negative and finite; int, float or
                0-d tensor. A tensor on the device is checked there, and a bad value counts as overflow.
            last: See `backward`; sums are sent now.
            loss: The plain loss of this micro-batch, one element, for `metrics()`; it is copied, not read.

        Raises:
            TypeError, ValueError: `weight` or `loss` is invalid.
            RuntimeError: The window is finalized, or its last micro-batch was counted; a parameter changed since
                construction; a gradient is sparse; `scaler.unscale_` was called.
            FloatingPointError: With `overflow="raise"`, gradients are not finite; the message names their parameters.
        """
        self.engine.check_open("accumulate()")
        if "stages" not in self._once:  # they may have been built after the accumulator
            self._once.add("stages")
            refuse_late_stages(self._store.named, self._ranks)
        last = self._check_last(last)
        scalar = as_scalar(weight, "weight", self._store.layout.devices[0])
        if loss is not None and expect(loss, Tensor, "loss", "a tensor").numel() != 1:
            raise ValueError(f"loss must have one element, got a tensor of shape {tuple(loss.shape)}")
        given = isinstance(scalar, Tensor) or scalar != 1
        if given and self.engine.runner.is_uncounted():
            raise RuntimeError(
                f"accumulate(weight={weight}) after backward with release='backward': gradients were added while it "
                "ran, with weight 1; pass the weight to acc.backward(loss, weight) instead (AK08)"
            )
        if given:
            self.engine.window.weigh_late()
        if self.engine.window.weighed_after:
            self.engine.misuse.inspect_late_weight(self.engine.synchronised)
        self.engine.accumulate(self.engine.micro_batch(scalar, last=last, loss=loss))

    @opaque
    def backward_coupled(
        self,
        chunks: Iterable[Any],
        encode: Callable[[Any], Any],
        loss_fn: Callable[..., Tensor],
        *,
        weight: float | Tensor = 1.0,
        last: bool = False,
    ) -> Tensor:
        """Accumulate one micro-batch whose loss couples its samples, such as a contrastive loss, chunk by chunk.

        The result equals the whole micro-batch at once, with the activations of one chunk in memory. The first pass
        encodes all chunks without a graph. The loss of all encodings gives the gradient of each. The second pass
        encodes each chunk with a graph and the same random numbers, and runs backward from there (Gao et al. 2021,
        arXiv:2101.06983).

            loss = acc.backward_coupled(zip(images.split(64), texts.split(64)), encode_pair, clip_loss)

        Args:
            chunks: The parts of the micro-batch, kept until the end of the call.
            encode: Called with each chunk, twice; returns a tensor, or a tuple or dict of tensors, with one row per
                sample. It must do the same both times, which a BatchNorm in training would not.
            loss_fn: Returns the loss of all encodings, concatenated over chunks. A tuple is passed as arguments and a
                dict as keyword arguments (or as one argument if `loss_fn` takes only one). It may have parameters of
                its own, and may gather encodings of other ranks by differentiable collectives.
            weight: See `accumulate`.
            last: See `backward`.

        Returns:
            The loss, detached.

        Raises:
            TypeError, ValueError: An argument is wrong; encodings are not tensors with one row per sample; a BatchNorm
                is in training.
            RuntimeError: As `accumulate`; or `encode` returned other shapes in its second pass. After an exception the
                window is as it was, unless gradients were added in buckets, which breaks it.
        """
        with self._turn("backward_coupled()"):
            self.engine.check_open("backward_coupled()")
            last = self._check_last(last)
            check_independent(self.engine.module)
            scalar = as_scalar(weight, "weight", self._store.layout.devices[0])
            coupled = CoupledLoss(chunks, encode, loss_fn)
            return self.engine.backward_coupled(coupled, self.engine.micro_batch(scalar, last=last))

    @opaque
    def backward_batch(
        self,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        *,
        micro_batch: int | Literal["auto"] = "auto",
        cost: Cost = None,
        budget: float | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        weight: Callable[[Any], float | Tensor] | None = None,
        multiple_of: int = 1,
    ) -> BatchReport:
        """Split a batch into micro-batches that fit in memory; the result does not depend on the split.

            for batch in loader:
                acc.backward_batch(batch, lambda part: loss_fn(model(part["x"]), part["y"]))
                acc.step(optimizer, max_norm=1.0)

        A micro-batch that runs out of memory is split in two and run again, with the same random numbers, and nothing
        that ran is lost. What a forward leaves in the model, such as running statistics, stays. Several calls before a
        step are one window. Inside `window` the last micro-batch of the last batch is marked.

        Args:
            batch: A tree of tensors with samples along the first dimension (tuples, lists, mappings, dataclasses).
                Lists without tensors, such as texts, are split as tensors beside them are. What has no samples (neither
                tensor nor list, no dimension, or one row or item) goes into every micro-batch. With `collate`, a list
                of samples.
            loss_fn: Called with a part of the batch, which is the place to move it to the device; returns its mean
                loss, `(loss, weight)`, or `(loss, weight, extra)`: see `weight` (None: as if not returned) and `extras`
                of the report. If neither says what a part weighs, the first split of each kind of samples, of a list
                with `collate`, of rows with unequal numbers of labels (not -100) or of ones in a mask, or with a loss
                whose graph does not prove that it is a mean over samples, finds out whether it is one: `loss_fn` is
                called on a few samples, in eval mode, without gradients, and random state and buffers are kept. A mean
                with class weights is an error.
            micro_batch: The most samples of a micro-batch. "auto" (default): as many as have shown to fit, beginning
                with the whole batch. Sizes grow again when measured peaks of memory say that they fit.
            cost: What a sample takes of the memory: a function of one sample, or one number per sample, in any unit,
                which stays the same in all calls, since what fits is learnt in it. Default: 1; with `collate` the
                length of a sample, or of a mapping's first value that has one. A micro-batch costs the sum of its
                samples', with `collate` the most expensive times their number, since it is padded to that.
            budget: The most that a micro-batch may cost, unless it is a single sample. Samples are sorted by cost and
                packed into as few micro-batches as possible, of about the same cost, the most expensive first: always
                the same for the same batch and budget.
            collate: Makes a part of a list of samples, right before it runs, so that it is padded to its own longest.
            weight: Returns the weight of a part, such as its number of label tokens. Default: its number of samples. A
                part of weight 0 is left out, or adds nothing where other ranks wait for it. A weight on the device is
                read.
            multiple_of: Sizes are multiples of this where the limits allow, so that a compiled model sees few of them.

        Returns:
            A `BatchReport`: what ran, how often memory ran out, the peak, the loss, and the extras.

        Raises:
            TypeError, ValueError: An argument is wrong, tensors or lists of the batch differ in their number of
                samples, or the loss is found to be no mean over samples and comes without a weight.
            torch.OutOfMemoryError: `memory_limit` is below what is alive, or one sample does not fit; the message has
                the bytes and the cost, and says so if the try broke the window, which `zero_()` then drops.
            RuntimeError: As `accumulate`; or memory ran out where it had not before, after gradients had been added,
                and the window has other micro-batches. After any other exception of `loss_fn` or of backward, the
                micro-batches that ran stay in the window.
        """
        split = Split(
            micro_batch=micro_batch, cost=cost, budget=budget, collate=collate, weight=weight, multiple_of=multiple_of
        )
        with self._turn("backward_batch()"):
            return self.engine.backward_batch(batch, loss_fn, split, last=self._check_last(False))

    def _turn(self, caller: str) -> AbstractContextManager[Any]:
        """Return what a micro-batch runs under, so that threads that train one model take turns."""
        if torch._C._current_graph_task_id() >= 0:  # in a hook of a backward, which may be the one that has the turn
            self.engine.check_open(caller)
        return self._turns

    def _check_last(self, last: bool) -> bool:
        """Whether the micro-batch is the window's last, and what is complete may be sent."""
        sends = self._sends_in_backward
        if last and self._ranks.reduces_sums and not sends:
            raise ValueError(
                "last=True needs release='auto' or 'backward', and overflow='window' or None: otherwise there is no "
                "backward to send sums in"
            )
        last = sends and (last or self._in_last is not None)
        if last:
            self.engine.window.sent.mark()
        return last

    @property
    def _sends_in_backward(self) -> bool:
        return self._ranks.reduces_sums and self.engine.runner.captures.release_early

    def window(self, batches: Iterable[_Batch]) -> Generator[_Batch, None, None]:
        """Iterate over a window's batches and mark the last, whose backward overlaps with the reduction over ranks.

            for x, y in acc.window(batches):
                acc.backward(loss_fn(model(x), y), weight=y.numel())
            acc.step(optimizer)

        The result is the same as without it; the last micro-batch gets `last=True` (see `backward`) if that is allowed
        and useful. The iterator reads one batch ahead of the current one, so a loader must not fill the tensors of one
        batch with the next. An error of the loader comes after the batch before it, as in a plain loop.

        Call it once per window: with a process group, a second call before `step` or `finalize`, also after `zero_`,
        means that this rank has missed the end of a window, which `step` then says on all ranks. To run a dropped
        window again on one rank alone, iterate over its batches without this. Without a process group, such a call
        warns once if the window before has left micro-batches, which count.

        Args:
            batches: All batches of this rank in the window, one for each `backward` or `accumulate`; there may be none.

        Yields:
            The batches.
        """
        iterator = iter(expect_iterable(batches, "batches"))
        if self._iterated and self._ranks.ends_together:  # nobody has ended the window that was iterated over before
            self.engine.window.miss_end()
        elif self._iterated and self.micro_batches and "window" not in self._once:
            self._once.add("window")
            _log.warning(
                "acc.window() was called again before step() or finalize(): %d micro-batches of the window before, "
                "which was not ended, count in this one. acc.zero_() drops a window that was given up",
                self.micro_batches,
            )
        self._iterated = True
        token = object()
        try:
            batch = next(iterator)
            if self.engine.runner.casts is not None:
                self.engine.runner.casts.hold()
            while True:
                try:
                    following = next(iterator)
                except StopIteration:
                    break
                except Exception:  # after the batch that was read before, as in a plain loop
                    yield batch
                    raise
                yield batch
                batch = following
            self._in_last = token
            if self._sends_in_backward:  # also where the batch fails, and is discarded
                self.engine.window.sent.mark()
            yield batch
        except StopIteration:  # there is no batch
            return
        finally:
            if self.engine.runner.casts is not None:
                self.engine.runner.casts.release()
            if self._in_last is token:
                self._in_last = None

    def windows(self, batches: Iterable[_Batch], n: int) -> Iterator[Iterator[_Batch]]:
        """Cut batches into windows of `n`, each an iterator as `window` returns it; the last window may be shorter.

            for window in acc.windows(loader, 8):
                for x, y in window:
                    acc.backward(loss_fn(model(x), y), weight=len(x))
                acc.step(optimizer)

        Batches are taken as they are needed, one ahead of the current one and none beyond the window's end. A window
        that the loop leaves early skips the rest of its batches. One that `load_state_dict` has left open gets as many
        as it lacks, of a loop that calls `backward` once per batch.

        Args:
            batches: A DataLoader, or any iterable, with or without a length.
            n: The micro-batches of a window, at least 1.

        Yields:
            The windows, each to be iterated over before the next is asked for.

        Raises:
            TypeError, ValueError: An argument is wrong.
            RuntimeError: From the iterator of a window, once the next one was asked for: `list(acc.windows(...))`.
        """
        number = as_int(n, "n")
        if number < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        return self._cut(iter(expect_iterable(batches, "batches")), number)

    def _cut(self, batches: Iterator[_Batch], n: int) -> Iterator[Iterator[_Batch]]:
        size = n - self.micro_batches if self.engine.window.resumed and self.micro_batches < n else n
        for first in batches:
            all_of_it = itertools.chain((first,), itertools.islice(batches, size - 1))
            del first  # or it would stay in memory for the whole window
            window, open_ = self.window(all_of_it), [True]
            yield _in_turn(window, open_)
            open_.clear()
            window.close()
            for _ in all_of_it:
                pass
            size = n

    @opaque
    def discard(self, *, window: bool = False) -> None:
        """Drop the `.grad`s of a micro-batch that should not be accumulated, for instance after an exception.

        The rest of the window is used, on this and on other ranks. If gradients were already added in buckets
        (`release`), a window that has counted micro-batches, or in which a backward raised, is broken until `zero_()`,
        or dropped as a whole with a process group.

        Args:
            window: Drop the whole window, on all ranks. Nothing is communicated now; all ranks still call `finalize` or
                `step`, which then skips the step and leaves the loss scale alone. More micro-batches may follow.

        Raises:
            RuntimeError: A backward of the accumulator runs.
        """
        self.engine.check_idle("discard()")
        current = self.engine.window
        raised = current.phase is Phase.BROKEN or self.engine.runner.captures.inbox.running
        self.engine.discard()
        broken = not raised and current.phase is Phase.BROKEN
        if broken and current.micro_batches == 0 and not self._ranks.ends_together:
            self.engine.drop()  # nothing else was in it
            window = window or current.dropped
        self.engine.window.discard(window, together=self._ranks.ends_together)

    # ---- the end of a window

    @opaque
    @profiled
    def finalize(
        self, *optimizers: Optimizer, divisor: float | Tensor | None = None, ignore: Iterable[Tensor] = ()
    ) -> None:
        """Average the window and set `.grad` to the result.

        Afterwards `.grad` of every parameter that got a gradient is a view of its flat buffer (for 16-bit parameters, a
        copy rounded once); of every other parameter it is None. One that somebody keeps over `zero_` gets memory of its
        own then. `scaler.step` knows that gradients are unscaled, and skips on overflow.

        With a process group this is collective, and the window spans all ranks. The mean is the sum of weighted
        gradients over the sum of weights of all ranks, a parameter gets a `.grad` if any rank had a gradient for it,
        and all ranks skip the step for an overflow or a `discard(window=True)` on any rank. A rank makes its own checks
        before it communicates. If one of them raises, or the rank dies, the others get torch.distributed's error, at
        the latest after the group's timeout.

        Args:
            *optimizers: All optimizers that step this window; each accumulated parameter belongs to exactly one.
                Without an enabled GradScaler there may be none, for an update written by hand, which uses the `.grad`s
                if `step_was_skipped` is False.
            divisor: Replaces the sum of weights, for sum-reduced losses; positive and finite. With several ranks it is
                the divisor of all ranks together, the same number on each; FSDP2 has divided by the number of ranks
                already, so there it is that divisor divided by this number (docs/fsdp2.md).
            ignore: Parameters that no optimizer needs to own, since they should stay as they are. Their gradients still
                count in the norm, as they do in stock's norm of `model.parameters()`.

        Raises:
            TypeError: An argument is not an optimizer, or a trainer has wrapped it.
            ValueError: `divisor` is zero, negative or not finite.
            RuntimeError: The window is already finalized; gradients were never accumulated; no optimizer owns an
                accumulated parameter; a parameter changed since construction; `scaler.unscale_` was called.
        """
        self._check_end("finalize()", optimizers, divisor, ignore)
        self.engine.finalize(optimizers, self.engine.ending.divisor(self.engine.window, divisor))
        self._iterated = False

    @opaque
    @profiled
    def clip_grad_norm_(
        self, max_norm: float | Tensor, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the averaged gradient, as `torch.nn.utils.clip_grad_norm_` does; call it after `finalize`.

        It clips `.grad` as the loop left it, whether that was edited in place, replaced, or set to None.

        Args:
            max_norm: The largest norm allowed.
            norm_type: The order of the norm; any order that torch accepts, including `inf`.
            error_if_nonfinite: Raise when the norm is not finite; synchronises.

        Returns:
            The norm before clipping, 0-d on the first device; fp32 (fp64 for fp64 parameters). The host does not read
            it.

        Raises:
            TypeError, ValueError: `max_norm` or `norm_type` is invalid.
            RuntimeError: `finalize` was not called before; or the norm is not finite, with `error_if_nonfinite`.
        """
        limit = as_scalar(max_norm, "max_norm", self._store.layout.device, allow_inf=True)
        try:
            order = float(norm_type)
        except (TypeError, ValueError):
            raise wrong_type("norm_type", "a number", norm_type) from None
        if self.engine.window.phase is not Phase.FINALIZED:
            raise RuntimeError(
                "clip_grad_norm_() before finalize(): the order is acc.finalize(optimizer), "
                "acc.clip_grad_norm_(max_norm), scaler.step(optimizer), scaler.update(), acc.zero_()"
            )
        self.engine.window.take_over()
        norm = self.engine.ending.norm(order)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable "
                "this error and scale the gradients by the non-finite norm anyway, set error_if_nonfinite=False"
            )
        self.engine.window.clip(norm, limit)
        return self.engine.ending.result(norm)

    @overload
    def step(
        self,
        *optimizers: Optimizer,
        max_norm: None = None,
        divisor: float | Tensor | None = None,
        ignore: Iterable[Tensor] = (),
    ) -> None: ...

    @overload
    def step(
        self,
        *optimizers: Optimizer,
        max_norm: float | Tensor,
        divisor: float | Tensor | None = None,
        ignore: Iterable[Tensor] = (),
    ) -> Tensor: ...

    @overload
    def step(
        self,
        *optimizers: Optimizer,
        max_norm: Sequence[_ClippedPart],
        divisor: float | Tensor | None = None,
        ignore: Iterable[Tensor] = (),
    ) -> list[Tensor]: ...

    @opaque
    @profiled
    def step(
        self,
        *optimizers: Optimizer,
        max_norm: float | Tensor | Sequence[_ClippedPart] | None = None,
        divisor: float | Tensor | None = None,
        ignore: Iterable[Tensor] = (),
    ) -> Tensor | list[Tensor] | None:
        """End the window: average, clip, `scaler.step`, `scaler.update`, and open the next.

        With torch's fused optimizers over fp32 parameters, average and clip are folded into the optimizer's own pass
        (`optimizer.grad_scale`, `optimizer.found_inf`), and the host does not wait for the device; otherwise it reads
        found_inf once. Several optimizers are stepped in the order given, or all skipped. A window without weight is a
        no-op that leaves the scale alone. With a process group this is collective, as `finalize` is; on a GPU, a rank
        where a parameter got no gradient reads whether other ranks have one.

        Args:
            *optimizers: Each accumulated parameter belongs to exactly one of them.
            max_norm: Clip the averaged gradient to this 2-norm. A list of pairs (parameters, max_norm), such as
                `[(head.parameters(), 0.1), (body.parameters(), 1.0)]` or one for each param group, clips each part by a
                norm of its own; parameters in no pair are not clipped. `math.inf` only measures.
            divisor: See `finalize`.
            ignore: See `finalize`.

        Returns:
            The norm before clipping (see `clip_grad_norm_`) if `max_norm` is given, a list of norms if it is a list;
            otherwise None.

        Raises:
            TypeError: An optimizer's step needs a closure; and as `finalize`.
        """
        parts = read_parts(max_norm, self._store) if isinstance(max_norm, list | tuple) else None
        limit = None if parts is not None else self.engine.ending.limit(max_norm)
        self._check_end("step()", optimizers, divisor, ignore)
        given = self.engine.ending.divisor(self.engine.window, divisor)
        norms = self.engine.step(optimizers, given, limit, parts)
        self._iterated, self._in_last = False, None  # whatever becomes of the iterator
        return norms

    @opaque
    def zero_(self) -> None:
        """Drop the window, finished or not, and open the next: every `.grad` is None afterwards.

        With a process group only this rank's part is dropped; `discard(window=True)` drops it on all ranks.

        Raises:
            RuntimeError: Parts of the window were sent to other ranks, which wait for the rest; or other stages of a
                pipeline clip a window that was finalized, which on stages is collective; or a backward of the
                accumulator runs.
        """
        self.engine.check_idle("zero_()")
        if self.engine.window.sent.count and self.engine.window.phase not in (Phase.ENDING, Phase.FINALIZED):
            raise RuntimeError(
                "zero_() after last=True had sent a part of this window: to drop it call acc.discard(window=True), "
                "then acc.step(optimizer) or acc.finalize(optimizer), as all ranks do"
            )
        if unsynced := self.engine.window.unsynced:
            _log.warning(
                "zero_(): FSDP2 still keeps the gradients of %d micro-batches (set_requires_gradient_sync(False)) and "
                "will add them to those of its next reduction",
                unsynced.number,
            )
        if self.engine.window.phase is Phase.FINALIZED and not self.engine.window.clipped:
            self.engine.window.note_clipping()  # said once
            self._ranks.end_without_clipping(self._store.layout.device)
        if self.engine.window.phase is Phase.FINALIZED:
            self._in_last = None
        self.engine.drop()

    # ---- checkpoints

    @torch.no_grad()
    def state_dict(self, *, reduced: bool = False) -> dict[str, Any]:
        """Everything that a resumed run needs to continue bit for bit, at any moment, inside a window too.

        The dict holds, by parameter name, the window's sums, the masters and which gradients were not finite; and the
        weights, the last norm and the noise scale. Tensors are copies on the same devices;
        `torch.load(weights_only=True)` accepts them. The GradScaler, the model and the optimizer have their own states.
        A dict saved between `finalize` and `zero_` keeps the averages, and the resumed run calls `finalize` again.
        Synchronises.

        With DTensors (FSDP2) all ranks call it together, and sums and masters are DTensors. Every trainable parameter
        has a sum, so that the dict has the same entries at any moment, as `torch.distributed.checkpoint` needs:
        `dcp.save({"acc": acc})`, `dcp.load({"acc": acc})`. See docs/checkpoints.md.

        Args:
            reduced: Add up the sums of all ranks, which call this together. The state is then the same on all of them,
                and any number of ranks may load it, inside a window too. In one process it only gives the dict the same
                entries at any moment.

        Raises:
            RuntimeError: The window is broken; with `release="backward"`, a backward was not followed by its
                `accumulate`; a micro-batch with `last=True` was not followed by `finalize`; FSDP2 keeps gradients that
                it has not reduced; or torch.distributed.checkpoint saves a window, without DTensors, that is not
                `reduced`.
        """
        if self.engine.window.sent.count and self.engine.window.phase is not Phase.FINALIZED:
            raise RuntimeError(
                "state_dict() while ranks add up their sums (last=True): call it before, or after step()"
            )
        if (
            self.engine.window.phase in (Phase.BROKEN, Phase.ENDING)
            or self.engine.runner.runs
            or self.engine.runner.captures.inbox.running
            or self.engine.runner.is_uncounted()
        ):
            raise RuntimeError(
                "state_dict() with gradients of a backward that was not counted "
                f"(release={self.engine.options.resolved_release!r}): call acc.accumulate() before, or acc.zero_()"
            )
        if unsynced := self.engine.window.unsynced:
            self._refuse_unsynced("state_dict()", unsynced.number)
        if reduced:
            self.engine.make_room()  # as another rank may have
        elif self.micro_batches and not self._store.sharded and saved_by_dcp():
            raise RuntimeError(
                f"state_dict() by torch.distributed.checkpoint after {self.micro_batches} micro-batches of a window: "
                "it loads only entries that are there between windows too, and keeps one rank's values, where each "
                'rank has sums of its own. Save a state of all ranks, {"acc": acc.state_dict(reduced=True)}, or save '
                "between windows (AK26)"
            )
        return self.engine.state_dict(reduced)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict()` was taken, and drop the window that is open now.

        Masters are loaded and rounded into the model. Prefixes that wrappers add to names are ignored. Afterwards
        `micro_batches` says how many of the window's micro-batches are done. Inside a window, a state of another data
        parallel rank, or of another number of ranks, is refused; a state of all ranks (DTensors, or `reduced=True`) is
        not.

        Raises:
            TypeError: `state_dict` is not a dict.
            RuntimeError: The state does not fit; the message lists names that are missing, unexpected or of another
                shape. Nothing is changed then.
        """
        expect(state_dict, Mapping, "state_dict", "a dict")
        state = self.engine.checked(state_dict)
        self.engine.window.note_clipping()  # or other ranks would have to load now, too
        self.zero_()
        self.engine.load_state_dict(state)
        self._iterated = False

    def remove(self) -> None:
        """Release the parameters, so that another accumulator may take them. Leaving `with` does this too."""
        self.engine.remove()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a FusedAccumulator cannot be copied or pickled: it belongs to its parameters, which have its hooks. Copy "
            "the model alone and build a new FusedAccumulator for the copy; acc.state_dict() has what it accumulated"
        )

    def __enter__(self) -> FusedAccumulator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    # ---- inside

    def _note_reader(self) -> None:
        """Whoever reads sums, such as a probe of gradients, may need no step."""
        self.engine.flush()
        if self.micro_batches:
            self.engine.patience.silence()

    def _check_end(
        self, caller: str, optimizers: tuple[Optimizer, ...], divisor: object, ignore: Iterable[Tensor]
    ) -> None:
        self.engine.check_open(caller, adds=False)
        self.engine.flush()
        if self.engine.silence is not None:
            self.engine.silence.check_end(caller)
        if unsynced := self.engine.window.unsynced:
            self._refuse_unsynced(caller, unsynced.number)
        nothing = isinstance(ignore, tuple) and not ignore
        self.engine.ending.steps.check(
            caller, optimizers, frozenset() if nothing else select(ignore, "ignore", self._store)
        )
        if self.engine.runner.captures.inbox.uncounted:
            raise RuntimeError(
                f"{caller}: gradients of a backward were never counted; call acc.accumulate() after backward "
                "(acc.backward does), or acc.zero_() to drop the window"
            )
        self.engine.misuse.inspect_end(self.engine.window, caller, divisor, self.engine.ending.steps.plan.touched)

    def _refuse_unsynced(self, caller: str, number: int) -> NoReturn:
        raise RuntimeError(
            f"{caller}: the last {number} micro-batches left no gradient, FSDP2 keeps them: call "
            "model.set_requires_gradient_sync(True) before the last backward of a window, and before a checkpoint. If "
            "a backward has raised before, FSDP2 reduces no more, in a stock loop either: build the model anew"
        )


def _in_turn(window: Iterator[_Batch], open_: list[bool]) -> Iterator[_Batch]:
    """Iterate over a window of several while it is open."""
    yield from window
    if not open_:
        raise RuntimeError(
            "windows(): the next window was asked for before the loop had iterated over this one, whose batches are "
            "skipped: iterate over each in turn, `for window in acc.windows(loader, n): for x, y in window`"
        )
