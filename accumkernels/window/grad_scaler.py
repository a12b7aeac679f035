"""The handshake with `torch.amp.GradScaler`.

The accumulator has already unscaled and checked gradients when the window ends, so it enters its verdict where
`scaler.unscale_` would: the optimizer's stage becomes UNSCALED and `found_inf_per_device` holds the verdict. Then
`scaler.step` neither unscales again nor misses an overflow, and `scaler.update` moves the scale as in a stock loop.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.overrides import has_torch_function_unary

from ..buffers.parameters import NamedParameter, move
from ..capture.inbox import MicroBatch
from .verdict import is_known_zero

_TORCHS_STEP = torch.amp.GradScaler.step


class _Verdict(dict[torch.device, Tensor]):
    """A `found_inf_per_device` that answers `scaler.step` and `scaler.update` separately.

    The answers differ when a window is stepped although a micro-batch overflowed (the scale backs off), or skipped
    although nothing overflowed (there was nothing to average). Every answer is a clone, because `update` adds in place
    into the first found_inf it gets.
    """

    def __init__(self, scaler: torch.amp.GradScaler, key: int, device: torch.device, skip: Tensor) -> None:
        super().__init__()
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}  # by accumulator: skip, found_inf
        self._scaler = weakref.ref(scaler)  # weak, because the scaler holds this
        self._key = key
        self[device] = skip

    def values(self) -> list[Tensor]:  # type: ignore[override]
        scaler = self._scaler()
        stepped = scaler is not None and scaler._per_optimizer_states[self._key]["stage"] is OptState.STEPPED
        verdicts = [part[stepped] for part in self.parts.values()]
        return [verdicts[0].clone() if len(verdicts) == 1 else torch.stack(verdicts).amax()]


class LossScaler:
    """FusedAccumulator's interface to an enabled GradScaler."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self._unscaled: set[int] = set()  # ids of optimizers refused because they were unscaled

    def check_device(self, named: Sequence[NamedParameter]) -> None:
        """Refuse a scaler whose scale lives on another kind of device than the trainable parameters.

        Raises:
            ValueError: names the first such parameter.
        """
        device = torch.device(self.scaler._device).type
        for entry in named:
            if entry.param.requires_grad and entry.param.device.type != device:
                raise ValueError(
                    f"scaler is for {device!r}, but {entry.name!r} is on {entry.param.device}: "
                    f"use torch.amp.GradScaler({entry.param.device.type!r})"
                )

    def keep_on_host(self) -> None:
        """Let scale and growth tracker live on the host, as the sums and verdicts do.

        A fused CPU optimizer reads found_inf at once, and `scaler.update` combines it with others, so that a copy from
        a device would be read too early. `scaler.scale` copies the scale to the loss's device, which waits for nothing.

        Raises:
            ValueError: The scaler is of a class that keeps a scale of its own.
        """
        scaler = self.scaler
        stock = torch.amp.GradScaler
        for name in ("scale", "unscale_", "step", "update", "_lazy_init_scale_growth_tracker"):
            if getattr(type(scaler), name) is not getattr(stock, name) or name in vars(scaler):
                raise ValueError(
                    f"cpu_offload=True with scaler of {type(scaler).__qualname__}, whose {name}() is not torch's: its "
                    "scale could not be kept in host memory. Pass a torch.amp.GradScaler"
                )
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(_CPU)
        else:
            assert scaler._growth_tracker is not None
            scaler._scale, scaler._growth_tracker = scaler._scale.to(_CPU), scaler._growth_tracker.to(_CPU)

    def check_not_unscaled(self, ours: Callable[[Optimizer], bool]) -> None:
        """Refuse gradients that `scaler.unscale_` has already divided by the scale.

        Args:
            ours: Whether an optimizer steps this accumulator's parameters; others may be unscaled at any time.

        Raises:
            RuntimeError: `scaler.unscale_` was called for such an optimizer since the last `scaler.update()`.
        """
        for key, record in self.scaler._per_optimizer_states.items():
            if record["stage"] is not OptState.UNSCALED or isinstance(record["found_inf_per_device"], _Verdict):
                continue
            # The scaler knows optimizers only by id. Searching for the object is slow, but rare.
            optimizer = next((o for o in gc.get_objects() if id(o) == key and isinstance(o, Optimizer)), None)
            if optimizer is None or ours(optimizer):
                self._unscaled.add(key)
                raise RuntimeError(
                    "scaler.unscale_(optimizer) was called inside a window: delete that line, FusedAccumulator "
                    "unscales in accumulate(). Drop the window with acc.zero_() to go on (AK25)"
                )

    def unscales(self, optimizer: Optimizer) -> bool:
        """Whether `scaler.step`, which is under way, divides the optimizer's gradients by the scale.

        It does so if it has no verdict of a window, as after an update, which forgets the verdicts of all optimizers.
        """
        record = self.scaler._per_optimizer_states.get(id(optimizer))
        found_inf = None if record is None else record["found_inf_per_device"]
        return bool(found_inf) and not isinstance(found_inf, _Verdict)

    def check_not_stepped(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse an optimizer that was stepped since the last `scaler.update()`.

        Raises:
            RuntimeError: says that `scaler.update()` is missing.
        """
        for optimizer in optimizers:
            record = self.scaler._per_optimizer_states.get(id(optimizer))
            if record is not None and record["stage"] is OptState.STEPPED:
                raise RuntimeError(
                    "this optimizer was stepped before: call scaler.update() after scaler.step(optimizer)"
                )

    def record(self, optimizer: Optimizer, skip: Tensor, found_inf: Tensor) -> None:
        """Tell the scaler that `optimizer`'s gradients are unscaled and checked.

        If several accumulators feed one optimizer, the worst verdict counts.

        Args:
            optimizer: The optimizer that `scaler.step` will be called with.
            skip: fp32 0-d, exactly 1.0 when the optimizer must not step.
            found_inf: fp32 0-d, exactly 1.0 when the scale must back off.
        """
        if self.scaler._scale is None:  # an empty window before any loss was scaled: step() and update() need a scale
            self.scaler.scale(torch.zeros((), device=skip.device))
        assert self.scaler._scale is not None
        device = self.scaler._scale.device
        record = self.scaler._per_optimizer_states[id(optimizer)]
        verdict = record["found_inf_per_device"]
        if skip.device != device:
            skip, found_inf = move(skip, device), move(found_inf, device)
        if not isinstance(verdict, _Verdict):
            verdict = record["found_inf_per_device"] = _Verdict(self.scaler, id(optimizer), device, skip)
        verdict.parts[id(self)] = (skip, found_inf)
        record["stage"] = OptState.UNSCALED

    def step(self, optimizer: Optimizer, skips_itself: bool) -> None:
        """Run `scaler.step(optimizer)`, after `record`.

        Args:
            optimizer: The optimizer.
            skips_itself: Whether it is one of torch's fused optimizers, which read `found_inf` on the device.
        """
        scaler = self.scaler
        if not skips_itself or type(scaler).step is not _TORCHS_STEP or "step" in vars(scaler):
            scaler.step(optimizer)
            return
        # Do as torch does, without inspecting the optimizer's signature, which takes as long as a small model's step,
        # and without a found_inf of 0, which would make the optimizer subtract from each of its step counters.
        record = scaler._per_optimizer_states[id(optimizer)]
        (found_inf,) = record["found_inf_per_device"].values()
        if not is_known_zero(found_inf):
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()
        record["stage"] = OptState.STEPPED

    def withdraw(self) -> None:
        """Withdraw verdicts that no step has used, because the window was dropped."""
        for key, record in list(self.scaler._per_optimizer_states.items()):
            if record["stage"] is not OptState.UNSCALED:
                continue
            verdict = record["found_inf_per_device"]
            if isinstance(verdict, _Verdict):
                verdict.parts.pop(id(self), None)
            if key in self._unscaled or (isinstance(verdict, _Verdict) and not verdict.parts):
                del self.scaler._per_optimizer_states[key]
        self._unscaled.clear()

    def update(self, keep: Tensor | None) -> None:
        """Run `scaler.update()`, but keep scale and growth tracker where `keep` (0-d bool) holds; no sync."""
        scale, tracker = self.scaler._scale, self.scaler._growth_tracker
        assert scale is not None
        assert tracker is not None
        if keep is None:
            self.scaler.update()
            return
        old_scale, old_tracker = scale.clone(), tracker.clone()
        self.scaler.update()
        keep = move(keep, scale.device)
        scale.copy_(torch.where(keep, old_scale, scale))
        tracker.copy_(torch.where(keep, old_tracker, tracker))


# ---- the scale of a micro-batch's gradients


def loss_scale(scaler: torch.amp.GradScaler | None, micro_batch: MicroBatch) -> Tensor | None:
    """Return the scale that a micro-batch's gradients carry, fp32 0-d; None when they carry none.

    Raises:
        RuntimeError: the scaler has not scaled any loss yet.
    """
    divided_by = micro_batch.divided_by
    if scaler is None:
        return None if divided_by is None else 1 / torch.as_tensor(divided_by, dtype=torch.float32)
    if scaler._scale is None:
        raise RuntimeError(
            "accumulate() with a GradScaler that has never scaled a loss: call acc.backward(loss), or "
            "scaler.scale(loss).backward() before acc.accumulate()"
        )
    scale = scaler._scale if micro_batch.scale is None else micro_batch.scale
    return scale if divided_by is None else scale / divided_by


def current_scale(scaler: torch.amp.GradScaler | None) -> Tensor | None:
    """Copy the scale, fp32 0-d; None if there is none yet."""
    scale = None if scaler is None else scaler._scale
    return None if scale is None else scale.reshape(()).clone()


# ---- backward of a scaled loss, starting from the scale as its gradient


def _of(module: str, function: Any) -> Any:
    """Return the function, or something that equals nothing if somebody replaced it before this import."""
    return function if getattr(function, "__globals__", {}).get("__name__") == module else object()


_TORCHS_SCALE = _of("torch.amp.grad_scaler", torch.amp.GradScaler.scale)
_TORCHS_BACKWARD = _of("torch._tensor", Tensor.backward), _of("torch.autograd", torch.autograd.backward)
_CPU = torch.device("cpu")
_run_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
_WHOLE = {"allow_unreachable": True, "accumulate_grad": True}  # as torch.autograd.backward calls it


def scaled_backward(
    loss: Tensor, scaler: torch.amp.GradScaler | None, kwargs: dict[str, Any]
) -> tuple[Callable[..., None], bool]:
    """Return a function that makes the gradients of `scaler.scale(loss).backward(**kwargs)` bit for bit.

    The gradient of a product is the other factor, so backward of the plain loss may start from the scale. For a loss of
    one element, torch's two functions have nothing else to do, yet take as long as a small layer. Any unusual loss, and
    any function that somebody replaced, goes through torch's own.

    Args:
        loss: The plain loss.
        scaler: An enabled one, or None.
        kwargs: Arguments of `Tensor.backward`.

    Returns:
        The function, and whether it takes the engine's `inputs`, graph edges to run; without any, it runs all.
    """
    if kwargs.keys() <= {"retain_graph"} and loss.dim() == 0 and _is_usual(loss):
        gradient = None
        if scaler is None:
            gradient = torch.ones_like(loss)
        elif type(scaler).scale is _TORCHS_SCALE and "scale" not in vars(scaler):
            if scaler._scale is None:  # its first loss, after a checkpoint too, takes the same way as all others
                scaler.scale(loss.detach())
            if scaler._scale is not None and scaler._scale.device in (loss.device, _CPU):
                # A copy, since a user's function may write to its gradient.
                gradient = scaler._scale.to(loss.device, non_blocking=True, copy=True)
        if gradient is not None:
            return partial(_run_engine, (loss,), (gradient,), bool(kwargs.get("retain_graph")), False, **_WHOLE), True
    return partial((loss if scaler is None else scaler.scale(loss)).backward, **kwargs), False


def backward_from(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Callable[..., None], bool]:
    """Return a function for `torch.autograd.backward(tensors, grads)`; see `scaled_backward`."""
    if all(map(_is_usual, tensors)):
        return partial(_run_engine, tuple(tensors), tuple(grads), False, False, **_WHOLE), True
    return partial(torch.autograd.backward, tensors, grads), False


def _is_usual(loss: Tensor) -> bool:
    """Whether its backward would go to the engine by torch's own code, with nothing around it."""
    return (
        type(loss) is Tensor
        and loss.requires_grad
        and loss.is_floating_point()
        and _run_engine is not None
        and (Tensor.backward, torch.autograd.backward) == _TORCHS_BACKWARD
        and not has_torch_function_unary(loss)
        and not torch._C._are_functorch_transforms_active()
    )
