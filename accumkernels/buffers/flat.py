"""Flat buffers: where each parameter's gradient lives, and the views that optimizers get as `.grad`.

A layout grows: parameters that are frozen at first get a further buffer when they are unfrozen, and existing views
never move. It shrinks where parameters that are frozen again give their segments back (`Store.give_back`): a buffer
that keeps some of its segments is laid out anew.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Sequence, Set
from dataclasses import dataclass
from operator import is_
from pathlib import Path
from sys import getrefcount
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..devices import is_accelerator, keep_until_done
from ..errors import logger
from ..ops.schema import State
from .parameters import NamedParameter, is_dtensor, local, move

# ---- Large CPU tensors on huge pages, if the system grants them on request: an eighth less time per pass

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE = 2 * 2**20  # bytes of a huge page
_MADV_HUGEPAGE = 14


def setting() -> str | None:
    """The system's setting of transparent huge pages: "always", "madvise" (on request), "never"; None if unknown."""
    try:
        text = _SETTING.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, 1-d; on the CPU on huge pages, if it has at least two."""
    tensor = torch.empty(numel, dtype=dtype, device=device)
    # This comes before the first write, which allocates the pages. A fake tensor has none.
    if device.type == "cpu" and type(tensor) is Tensor and tensor.nbytes >= 2 * _HUGE and setting() == "madvise":
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        # If madvise returns an error, the pages stay as they were.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor.zero_()


# ---- Where each parameter's gradient lives: segments of flat buffers

ALIGNMENT_BYTES = 128  # of a segment relative to its buffer: one cache line pair, eight 16-byte accesses


def aligned(numel: int, dtype: torch.dtype) -> int:
    """`numel` rounded up so that the next segment in a flat tensor of `dtype` is aligned."""
    elements = ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // elements) * elements


@dataclass(frozen=True)
class Segment:
    """One parameter's range of a flat buffer; for a DTensor, the range, shape and strides of its local part.

    `stride` is dense: the parameter's own order of dimensions, so that a gradient laid out like its parameter is
    accumulated in memory order, without a permutation.
    """

    index: int
    name: str
    param: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    numel: int
    contiguous: bool
    param_stride: tuple[int, ...]

    def in_memory_order(self, grad: Tensor) -> Tensor:
        """`grad` itself when its memory order is the segment's, else a copy that has it.

        Raises:
            RuntimeError: names the parameter: the gradient is sparse, or has another number of elements.
        """
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {self.name!r} is sparse; only dense gradients can be accumulated: pass "
                "sparse=False to its module"
            )
        if grad.numel() != self.numel:
            raise RuntimeError(
                f"the gradient of {self.name!r} has {grad.numel()} elements, its parameter had {self.numel} at "
                "construction"
            )
        same_order = grad.is_contiguous() if self.contiguous else grad.stride() == self.stride
        if same_order and not grad._is_zerotensor():  # zeros without memory, of forward-mode derivatives
            return grad
        return torch.empty_strided(self.shape, self.stride, dtype=grad.dtype, device=grad.device).copy_(grad)

    def drift(self) -> str | None:
        """What changed about the parameter since construction, in words; None if nothing did."""
        p = local(self.param)
        if p.dtype != self.dtype:
            return f"{self.name!r} was {self.dtype} at construction and is {p.dtype} now (AK05)"
        if p.device != self.device:
            return f"{self.name!r} was on {self.device} at construction and is on {p.device} now (AK05)"
        if p.shape != self.shape:
            was, now = tuple(self.shape), tuple(p.shape)
            return f"{self.name!r} was of shape {was} at construction and is of {now} now (AK05)"
        if p.stride() != self.param_stride:
            was, now = self.param_stride, p.stride()
            return f"{self.name!r} was strided {was} at construction and is strided {now} now (AK05)"
        return None


# ---- The views of a flat buffer that optimizers get as `.grad`, and what becomes of those that somebody keeps

_log = logger(__name__)
use_count = torch._C._storage_Use_Count


class ExposedViews:
    """Hands out views of one flat buffer in every window, as the same tensors.

    The next window overwrites the buffer. Stock torch leaves a `.grad` that an optimizer or a user has kept as it was
    (`state["previous"] = p.grad`), and so does this: when the window ends, a kept tensor gets memory of its own. The
    reference counts of the tensors show it, and the use count of their storage shows aliases (`p.grad.detach()`), which
    are then looked for among Python's objects.

    Args:
        tensor: The flat buffer.
        segments: Of the views, in order.

    Attributes:
        views: Of all segments.
        unkept: Their reference counts if nobody keeps one.
        storage: The use count that matters is that of its `_cdata`.
    """

    def __init__(self, tensor: Tensor, segments: Sequence[Segment]) -> None:
        self._tensor = tensor
        self._segments = segments
        self.views = [self._view(segment) for segment in segments]
        self.unkept = list(map(getrefcount, self.views))
        self.storage = tensor.untyped_storage()
        self._once: set[str] = set()  # what was looked for, and is not again; and whether a graph was captured

    def _view(self, segment: Segment) -> Tensor:
        # Detached, it shares memory and version but is no view for torch, which refuses detach_() on views (fastai's
        # zero_grad). The base of its views is itself, while that of views of `main_grad` is the buffer.
        return self._tensor.as_strided(segment.shape, segment.stride, segment.offset).detach()

    def renew(self) -> None:
        """Make views anew that were given other memory (`p.grad.data = ...`): they no longer show the buffer."""
        for index, view in enumerate(self.views):
            if view.untyped_storage()._cdata != self.storage._cdata:
                self.views[index] = self._view(self._segments[index])

    def move_kept(self, uses: int) -> bool:
        """Move what somebody keeps out of the buffer, after every `.grad` was set to None.

        Args:
            uses: Of the storage, before this window exposed anything.

        Returns:
            False if some of it cannot be moved, since its address is known elsewhere.
        """
        self.renew()
        counts = list(map(getrefcount, self.views))
        kept = [i for i, (count, unkept) in enumerate(zip(counts, self.unkept, strict=True)) if count > unkept]
        if not (self.storage.resizable() and all(self._may_move(self.views[index]) for index in kept)):
            return False
        for index in kept:
            _move(self.views[index])
            self.views[index] = self._view(self._segments[index])
        return "aliases" in self._once or use_count(self.storage._cdata) <= uses or self._move_aliases(uses)

    def _move_aliases(self, uses: int) -> bool:
        """Move aliases of views until only `uses` of the storage are left: new objects first, which are few.

        Some are not found: those of graphs (their backward raises torch's error for tensors that have changed), and
        what `gc.freeze` hides. The search looks at every object, so one in vain is the last.

        Returns:
            False if one of them cannot be moved.
        """
        ours = {id(tensor) for tensor in (self._tensor, *self.views)}
        moved, of_main_grad = False, -len(self.views)  # without the buffer's own
        for generation in range(3):
            objects = gc.get_objects(generation=generation)
            kinds = list(map(type, objects))
            wanted = {kind for kind in set(kinds) if _is_plain(kind)}
            for found in [found for found, kind in zip(objects, kinds, strict=True) if kind in wanted]:
                if id(found) in ours or not self._holds(found):
                    continue
                if found._base is self._tensor:
                    of_main_grad += 1
                elif not self._may_move(found):
                    return False
                else:
                    moved = True
                    _move(found)
            if use_count(self.storage._cdata) <= uses:
                return True
        if not moved and of_main_grad <= 0:
            self._once.add("aliases")
            _log.warning(
                "something keeps the memory of a .grad over the end of a window, and no search finds it (gc.freeze(), "
                "a graph): the next window overwrites it. Keep p.grad.clone() instead. From now "
                "on, aliases such as p.grad.detach() are not looked for either (AK15)"
            )
        return True

    def stay(self) -> None:
        """Keep the buffer where it is, also where others have its address: a CUDA graph has it, too."""
        self._once.add("captured")

    def _may_move(self, tensor: Tensor) -> bool:
        """Whether only Python holds a tensor: what DLPack has exported holds it in C++, and keeps the address."""
        return tensor._use_count() == 1 or "captured" in self._once  # type: ignore[attr-defined]

    def _holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffer."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse tensors have none
            return False
        return storage._cdata == self.storage._cdata


def _is_plain(kind: type) -> bool:
    """Whether these are tensors with memory of their own, which DTensors and fake tensors leave to a plain one."""
    return Tensor in kind.__mro__ and kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _move(tensor: Tensor) -> None:
    """Give a tensor memory of its own."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensor.data = tensor.detach().clone()


# ---- Flat buffers: the segments of one device and dtype, side by side in one tensor


class FlatBuffer:
    """Segments of one device and buffer dtype, side by side in one tensor, and the tables that the ops need.

    Attributes:
        tensor: fp32 or fp64 `[elements]`. Padding between segments is never read.
        segments: in the order of their offsets.
        views: `tensor`'s segments, shaped and strided like the parameters.
        layout: int64 `[segments, 2]` (offset, numel) on the device; `layout_host` the same on the CPU.
        flags: int32 `[segments]`, the serial number of the last micro-batch whose gradient was not finite.
        all_indices: the indices of all segments.
        contiguous: whether all segments are in index order.
        touched: per segment, whether it holds a sum of this window.
        unchecked: segments with a sum that was not checked for overflow, each with the serial number of the last
            micro-batch that was added without a check.
        sharded: whether any parameter is a DTensor.
        grad_device: where its gradients are made, which is another device if sums are in host memory.
        queues: whether work there is queued on streams, of which gradients may come from others.
        ops: the backend's module.

    It has no memory before `allocate`, and none after `release`.
    """

    def __init__(
        self, named: Sequence[NamedParameter | Segment], dtype: torch.dtype, device: torch.device, ops: ModuleType
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.ops = ops
        self.segments: list[Segment] = []
        end = 0
        for index, entry in enumerate(named):
            p = local(entry.param)
            # Dense, even if p itself is not. Subclasses need not know `empty_like`.
            stride = p.stride() if p.is_contiguous() else torch.empty_like(p, device="meta").stride()
            contiguous = torch.empty(p.shape, device="meta").stride() == stride
            of_param = p.shape, stride, p.dtype, p.device
            self.segments.append(
                Segment(index, entry.name, entry.param, *of_param, end, p.numel(), contiguous, p.stride())
            )
            end += aligned(p.numel(), dtype)
        self.numel = end
        self.layout_host = torch.tensor([[s.offset, s.numel] for s in self.segments], dtype=torch.int64, device="cpu")
        self.layout = self.layout_host.to(device)
        self.grad_device = self.segments[0].device if self.segments else device
        self.queues = is_accelerator(self.grad_device) and type(self.layout) is Tensor  # a fake one is never computed
        self.flags = torch.zeros(len(self.segments), dtype=torch.int32, device=device)
        self.touched = bytearray(len(self.segments))
        self.unchecked: dict[int, int] = {}
        self.params = [s.param for s in self.segments]
        self.sharded = any(map(is_dtensor, self.params))
        self.all_indices = list(range(len(self.segments)))
        self.contiguous = all(s.contiguous for s in self.segments)
        self.tensor = torch.empty(0, dtype=dtype, device=device)
        self.views: list[Tensor] = []
        self.release()

    def release(self) -> None:
        """Free the tensor and keep the rest of the buffer. Views that a user has kept keep their memory."""
        if self.queues and self.views:  # the current stream may not be the one that it was allocated on
            keep_until_done([self.tensor])
        self.tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        self.views = []
        self._exposed: ExposedViews | None = None
        self._uses: int | None = None  # of the tensor's storage, before this window exposed anything

    def allocate(self) -> None:
        """Allocate the tensor and its views."""
        self.tensor = zeros(self.numel, self.dtype, self.device)
        self.views = [self.tensor.as_strided(s.shape, s.stride, s.offset) for s in self.segments]

    def without(self, freed: Sequence[int]) -> FlatBuffer:
        """Return a buffer of the other segments, which has no memory yet, with their flags.

        Args:
            freed: For each segment, not 0 if it is left out.
        """
        kept = [segment for segment, is_freed in zip(self.segments, freed, strict=True) if not is_freed]
        rest = FlatBuffer(kept, self.dtype, self.device, self.ops)
        rest.flags.copy_(self.flags[[segment.index for segment in kept]])
        return rest

    @property
    def released(self) -> bool:
        """Whether the tensor has to be allocated before it is used."""
        return not self.views

    def __str__(self) -> str:
        elements = sum(s.numel for s in self.segments)
        return f"flat buffer of {len(self.segments)} segments, {elements:,} elements, {self.dtype} on {self.device}"

    def accumulate(self, state: Tensor, segments: list[int], grads: list[Tensor], *options: Any) -> None:
        """Add gradients to their segments, by the op `accumulate_`, and note that they hold a sum.

        Args:
            state: The device's, fp64 `[4]`.
            segments: Of the gradients.
            grads: As backward left them.
            *options: Those of the op from `flags` to `count`, in order: names take their time, in each bucket.

        Raises:
            RuntimeError: the op refused its arguments, or names the parameter whose gradient is sparse or has the wrong
                size; nothing has changed.
        """
        touched = self.touched
        if 1 not in touched:  # a search of memory, where any() and all() look at each
            overwrite = [True]  # one answer for all: the ops read long lists slowly
        elif 0 not in touched:
            overwrite = [False]
        else:
            overwrite = [not touched[index] for index in segments]
        rows = [] if segments is self.all_indices else segments
        given = grads if self.contiguous else self.in_memory_order(segments, grads)
        rest = rows, overwrite, self.layout, self.layout_host, *options, self.contiguous
        try:
            self.ops.accumulate_(self.tensor, state, given, *rest)
        except RuntimeError as error:
            self.ops.accumulate_(self.tensor, state, self.reordered(segments, grads, error), *rest)
        if self.queues:
            keep_until_done(grads)
        if segments is self.all_indices:
            self.touched = bytearray(b"\1") * len(segments)
        else:
            for index in segments:
                touched[index] = True

    def check_finite(self, segments: list[int], grads: list[Tensor], found_inf: Tensor, **options: Any) -> None:
        """Look for values that are not finite, by the op `check_finite_`; raises as `accumulate`."""
        rows = [] if segments is self.all_indices else segments
        given = grads if self.contiguous else self.in_memory_order(segments, grads)
        try:
            self.ops.check_finite_(given, rows, found_inf, self.flags, **options)
        except RuntimeError as error:
            self.ops.check_finite_(self.reordered(segments, grads, error), rows, found_inf, self.flags, **options)
        if self.queues:
            keep_until_done(grads)

    def reordered(self, segments: list[int], grads: list[Tensor], error: RuntimeError) -> list[Tensor]:
        """Gradients in memory order, after an op has refused them as they were.

        Nearly always they are in memory order as backward made them. The op sees that, and refuses others before it has
        done anything: a look at each of them before would take a third of its time.

        Raises:
            RuntimeError: the error itself, where the order was not its cause; see `in_memory_order`.
        """
        ordered = self.in_memory_order(segments, grads)
        if not self.contiguous or all(map(is_, ordered, grads)):
            raise error
        return ordered

    def in_memory_order(self, segments: list[int], grads: list[Tensor]) -> list[Tensor]:
        """Gradients, each in its segment's memory order; raises as `Segment.in_memory_order`."""
        return [self.segments[index].in_memory_order(grad) for index, grad in zip(segments, grads, strict=True)]

    def set_touched(self, touched: Sequence[int]) -> None:
        """Set, for every segment, whether it holds a sum."""
        self.touched = bytearray(touched)

    def touch(self, index: int, holds: bool = True) -> None:
        """Note that a segment holds a sum, or that its sum was dropped."""
        self.touched[index] = holds

    def touch_unchecked(self, index: int, tag: int) -> None:
        """Mark that micro-batch `tag` was added to a segment, without a check whether the sum is finite."""
        self.touched[index] = True
        self.unchecked[index] = tag

    def check_sums(self, state: Tensor, tag: int, opened: int) -> None:
        """Look for an overflow in sums that were added to without a look.

        Args:
            state: Of the device.
            tag: Of the last micro-batch; what was found in this window is noted to be in it.
            opened: The last micro-batch before the window.
        """
        found = torch.zeros(1, dtype=torch.float64, device=self.device)
        segments = list(self.unchecked)
        self.ops.check_finite_([self.views[index] for index in segments], segments, found, self.flags, tag=tag)
        earlier = (found > 0) & (self.flags > opened)
        self.flags.masked_fill_(earlier, tag)
        for flag in (State.FOUND_INF, State.POISONED):
            state[flag].clamp_(min=found[0])

    def touched_segments(self) -> list[Segment]:
        """Segments that hold a sum of this window."""
        if 0 not in self.touched:
            return self.segments
        return [s for s, touched in zip(self.segments, self.touched, strict=True) if touched]

    def touched_views(self, only: Set[int] | None) -> list[Tensor]:
        """Their views; `only` those of parameters with these `id`s, None for all."""
        if 0 not in self.touched and only is None:
            return self.views
        return [self.views[s.index] for s in self.touched_segments() if only is None or id(s.param) in only]

    def expose(self) -> ExposedViews:
        """The views of all segments that may become `.grad`; not `views`, which users may keep (`main_grad`)."""
        if self._exposed is None:
            with torch.inference_mode(False), torch.no_grad():
                self._exposed = ExposedViews(self.tensor, self.segments)
        if self._uses is None:
            self._uses = use_count(self._exposed.storage._cdata)
        return self._exposed

    def take_back(self) -> None:
        """End the window, after every `.grad` was set to None: leave to others what they keep of it."""
        handed, uses, self._uses = self._exposed, self._uses, None
        if handed is None or uses is None:
            return
        kept = list(map(getrefcount, handed.views)) != handed.unkept
        if (kept or use_count(handed.storage._cdata) != uses) and not handed.move_kept(uses):
            self._leave_memory()

    def _leave_memory(self) -> None:
        """Leave the memory to those who know its address, and go on in a copy. Tensors of ours stay the same objects.

        They are arrays of NumPy, of whose first one torch makes the storage one of fixed size, and tensors in C++.
        """
        with torch.inference_mode(False), torch.no_grad():
            self.tensor.data = zeros(self.numel, self.dtype, self.device).copy_(self.tensor)
            for view, s in zip(self.views, self.segments, strict=True):
                view.data = self.tensor.as_strided(s.shape, s.stride, s.offset)
        self._exposed = None

    def ranges(self, segments: Sequence[Segment]) -> list[Tensor]:
        """The fewest 1-d slices of `tensor` that cover these segments, given in order, and no other segment."""
        if segments is self.segments:
            return [self.tensor[: segments[-1].offset + segments[-1].numel]]
        ranges: list[tuple[int, int]] = []
        previous = -2
        for s in segments:
            start = s.offset
            if previous == s.index - 1:
                start = ranges.pop()[0]
            ranges.append((start, s.offset + s.numel))
            previous = s.index
        return [self.tensor[start:end] for start, end in ranges]


class SquaredNorms:
    """The squared norms of one window's micro-batches, which the accumulate pass adds up on each device."""

    def __init__(self) -> None:
        self._found: dict[torch.device, Tensor] = {}
        self._seen: tuple[int, dict[FlatBuffer, set[int]]] = 0, {}  # which segments got a gradient in a micro-batch

    @classmethod
    def of(cls, sums: Tensor) -> SquaredNorms:
        """Go on from the sums of a window that was saved."""
        norms = cls()
        norms._found[sums.device] = sums
        return norms

    def at(self, buffer: FlatBuffer, segments: Sequence[int], serial: int) -> Tensor:
        """Return the pass's `sq_norm` output for the gradients of micro-batch `serial`.

        The squared norms of a micro-batch's buckets add up, unless a parameter's gradient comes in several parts; then
        the window does not count.
        """
        device = buffer.device
        if device not in self._found:
            self._found[device] = torch.zeros(2, dtype=torch.float64, device=device)
        if serial != self._seen[0]:
            self._seen = serial, {}
        seen = self._seen[1].setdefault(buffer, set())
        if not seen.isdisjoint(segments):
            self._found[device].fill_(torch.nan)
        seen.update(segments)
        return self._found[device]

    def sums(self, device: torch.device) -> Tensor:
        """Return fp64 `[2]`: `sum w_i |g_i|^2` and the squared norm of the window's sum."""
        parts = [move(norms, device) for norms in self._found.values()]
        return torch.stack(parts).sum(0) if parts else torch.zeros(2, dtype=torch.float64, device=device)


def buffer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that gradients of `dtype` are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flat_buffers(
    named: Sequence[NamedParameter], ops: dict[torch.device, ModuleType], device: torch.device | None = None
) -> list[FlatBuffer]:
    """Lay out parameters in new flat buffers, one per (device, buffer dtype).

    Segments are in reverse order of registration, roughly the order in which backward produces gradients, so that the
    gradients of a bucket lie side by side.

    Args:
        named: The parameters.
        ops: The backend's module, by the device of sums.
        device: Of all sums; None: sums are where their parameters are.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[NamedParameter]] = {}
    for entry in named:
        groups.setdefault((entry.param.device, buffer_dtype(entry.param.dtype)), []).append(entry)
    buffers = []
    for (of_params, dtype), group in groups.items():
        of_sums = of_params if device is None else device
        buffers.append(FlatBuffer(group[::-1], dtype, of_sums, ops[of_sums]))
    for buffer in buffers:
        buffer.allocate()
    return buffers
