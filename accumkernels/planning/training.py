"""What is trained on trial: its description, its batches, and checks of what users give."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import devices
from ..accumulator import FusedAccumulator
from ..arguments import as_int
from ..buffers.parameters import is_dtensor
from ..buffers.store import has_accumulator
from ..errors import expect, short, wrong_type
from ..snapshots import Snapshot
from ..splitting.batches import TreeSamples, to_device, tree_leaves

# ---- Checks of what users give


def positive_int(value: Any, name: str) -> int:
    """Return `value` as an int of at least 1; see `as_int`.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    number = as_int(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def as_float(
    value: Any, name: str, fits: Callable[[float], bool], range_: str, expected: str = "a number of seconds"
) -> float:
    """Return `value` as a float that `fits`, which is in `range_` in words; `expected` as for `wrong_type`.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    number = float(expect(value, Real, name, expected, but=bool))
    if not fits(number):
        raise ValueError(f"{name} must be {range_}, got {value!r}")
    return number


def positive_float(value: Any, name: str) -> float:
    """Return `value` as a positive finite float; raises as `as_float`."""
    return as_float(value, name, lambda x: 0 < x < math.inf, "positive and finite", "a number")


def seconds(value: Any, name: str) -> float:
    """Return `value`, a time, as a finite float of at least 0; raises as `as_float`."""
    return as_float(value, name, lambda x: 0 <= x < math.inf, "at least 0 and finite")


def fraction(value: Any, name: str, *, zero: bool = True) -> float:
    """Return `value` as a float below 1 and at least 0 (without `zero`: above 0); raises as `as_float`."""
    range_ = f"{'at least' if zero else 'more than'} 0 and less than 1"
    return as_float(value, name, lambda x: 0 <= x < 1 and (zero or x > 0), range_, "a number")


def is_callable(value: Any, name: str) -> Any:
    """Check that `value` can be called, and return it.

    Raises:
        TypeError: names the argument and its value.
    """
    return expect(value, Callable, name, "callable")


def is_module(value: Any) -> nn.Module:
    """Check that `value` is a module, and return it.

    Raises:
        TypeError: names the argument and its value.
    """
    return expect(value, nn.Module, "model", "a torch.nn.Module")


def as_device(value: Any) -> torch.device:
    """Return `value` as a device, whether this machine has it or not.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    expect(value, str | int | torch.device, "device", "a torch.device or its name", but=bool)
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"device must name a device, got {value!r} ({error})") from None


def no_accumulator(model: nn.Module, caller: str) -> None:
    """Check that a model to be trained on trial has no FusedAccumulator.

    Its hooks would take the trial's gradients into its window, and its buffers would be measured too.

    Raises:
        RuntimeError: names the first parameter that has one.
    """
    for collected in (False, True):
        name = next((name for name, param in model.named_parameters() if has_accumulator(param)), None)
        if name is None:
            return
        if not collected:
            gc.collect()  # the accumulator may be dead already, in a cycle of a trainer or a notebook
    raise RuntimeError(
        f"{caller}: {name!r} has a FusedAccumulator, which would accumulate gradients of the trial: call this before "
        "the accumulator is built, or after its remove()"
    )


# ---- Makes the batches of a trial

Source = Callable[[int, torch.device], Iterator[Any]]  # (batch size, device) -> endless batches


def per_sample_shape(shape: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one sample; a single int is one dimension, like `(1000)`.

    Raises:
        TypeError, ValueError: names the argument.
    """
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = (shape,)
    expect(shape, Sequence, name, "a tuple of ints, the shape of one sample", but=str)
    return tuple(positive_int(size, f"every size in {name}") for size in shape)


def random_batches(
    inputs: tuple[int, ...], targets: tuple[int, ...], size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Make random fp32 inputs and targets of these shapes per sample, once per trial."""
    batch = torch.randn(size, *inputs, device=device), torch.randn(size, *targets, device=device)
    while True:
        yield batch


def made_batches(make_batch: Callable[[int], Any], size: int, device: torch.device) -> Iterator[Any]:
    """Call `make_batch(size)` for every micro-batch, and move the result to the device."""
    while True:
        yield to_device(_of_size(_checked(make_batch(size), "make_batch"), size), device)


def _of_size(batch: Any, size: int) -> Any:
    """Check that a batch is not smaller than it should be, where its samples can be counted, and return it."""
    try:
        count = len(TreeSamples(batch))
    except (TypeError, ValueError):
        return batch
    # Samples may be along another dimension, or be joined into one that is longer.
    if count < size and not any(isinstance(leaf, Tensor) and size in leaf.shape for _, leaf in tree_leaves(batch)):
        raise ValueError(
            f"make_batch({size}) returned {count} samples: make it return {size}, or pass dataset_size if there are "
            "no more"
        )
    return batch


class DataEnd(ValueError):
    """A loader has fewer samples than one batch."""


def loaded_batches(make_loader: Callable[[int], Iterable[Any]], size: int, device: torch.device) -> Iterator[Any]:
    """Take full batches from the loader that `make_loader(size)` returns, and start over when it ends."""
    loader = make_loader(size)
    while True:
        full = count = 0
        found = iter(loader)
        for batch in found:
            count = len(TreeSamples(_checked(batch, "make_loader")))
            if count != size:
                break  # the last one
            full += 1
            yield to_device(batch, device)
        if not full:
            ends = count < size and next(found, None) is None
            raise (DataEnd if ends else ValueError)(
                f"make_loader({size}): the loader's first batch does not have {size} samples"
            )
        if found is loader:  # a generator, which does not start over
            loader = make_loader(size)


def _checked(batch: Any, origin: str) -> Any:
    if not isinstance(batch, Mapping) and not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise wrong_type(f"what {origin} returns", "(input, target) or a dict of keyword arguments", batch)
    return batch


# ---- What a trial trains, described and checked once for all that train on trial


@dataclass(frozen=True)
class Training:
    """A training, except for its batch size.

    Attributes:
        model: What is trained, without DistributedDataParallel.
        device: Where.
        source: Makes batches.
        loss_fn: See `training_loss`.
        optimizer_fn: Makes an optimizer from the list of trainable parameters.
        amp_dtype: Of autocast; None for none.
        accumulate: Micro-batches per step of a FusedAccumulator; None to train without one.
        cpu_offload: Whether it keeps sums, masters and optimizer state in host memory; then there always is one.
    """

    model: nn.Module
    device: torch.device
    source: Source
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer]
    amp_dtype: torch.dtype | None
    accumulate: int | None
    cpu_offload: bool = False

    def place(self) -> None:
        """Drop gradients, and move the model to the device, unless it is spread over several."""
        for param in self.model.parameters():
            param.grad = None
        if len({param.device for param in self.model.parameters()}) == 1:
            self.model.to(self.device)

    def snapshot(self) -> Snapshot:
        """Remember the model, and a loss function that is a module."""
        snapshot = Snapshot(self.model)
        if isinstance(self.loss_fn, nn.Module):
            snapshot.include(self.loss_fn)
        return snapshot

    def loss(self, batch: Any) -> Tensor:
        """Run one forward pass."""
        return self.loss_and_weight(batch)[0]

    def loss_and_weight(self, batch: Any) -> tuple[Tensor, Any]:
        """Run one forward pass; the weight is what `loss_fn` returns beside the loss, None if it returns a loss alone.

        Raises:
            TypeError: it returns neither.
        """
        enabled = self.amp_dtype is not None
        with torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=enabled):
            found = training_loss(self.model, batch, self.loss_fn)
        loss, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        return expect(loss, Tensor, "what loss_fn returns", "a tensor, or a tensor and a weight"), weight

    def accumulator(self, **options: Any) -> FusedAccumulator:
        """Build the accumulator."""
        options |= {"overflow": None, "process_group": False, "cpu_offload": self.cpu_offload}
        return FusedAccumulator(self.model, **options)

    def optimizer(self, acc: FusedAccumulator | None) -> Optimizer:
        """Make the optimizer of what is trained."""
        params: Any = self.model.parameters() if acc is None else acc.parameters()
        return self.optimizer_fn([param for param in params if param.requires_grad])


def training_for(
    caller: str,
    model: Any,
    device: Any,
    source: Source,
    *,
    loss_fn: Any = None,
    optimizer_fn: Any = None,
    amp_dtype: Any = None,
    accumulate: Any = None,
    cpu_offload: Any = False,
    fake: bool = False,
) -> Training:
    """Check the other arguments that all functions share which train on trial; see `find_batch_size`.

    With `fake`, only copies made of fake tensors are trained, which need neither memory nor the device.

    Raises:
        TypeError, ValueError: names the wrong argument, and its value.
        RuntimeError: the model has a FusedAccumulator.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    _check_trainable(is_module(model), fake)
    if not fake:
        no_accumulator(model, caller)
    return Training(
        model=model,
        device=as_device(device) if fake else _usable(as_device(device)),
        source=source,
        loss_fn=None if loss_fn is None else is_callable(loss_fn, "loss_fn"),
        optimizer_fn=torch.optim.Adam if optimizer_fn is None else is_callable(optimizer_fn, "optimizer_fn"),
        amp_dtype=expect(amp_dtype, torch.dtype | None, "amp_dtype", "a torch.dtype or None"),
        accumulate=None if accumulate is None else positive_int(accumulate, "accumulate"),
        cpu_offload=expect(cpu_offload, bool, "cpu_offload", "a bool"),
    )


def _check_trainable(model: nn.Module, fake: bool) -> None:
    """Check that this process alone can train a model on trial.

    Raises:
        ValueError: a parameter is lazy or sharded, or trainable and on the meta device, or none is trainable.
    """
    params = list(model.named_parameters())
    for name, param in params:
        if nn.parameter.is_lazy(param):
            raise ValueError(f"model: parameter {name!r} is lazy: run the model once first")
        if param.is_meta and param.requires_grad and not fake:
            raise ValueError(f"model: parameter {name!r} is on the meta device")
        if is_dtensor(param):  # a trial copies the model and restores it, and other ranks have the rest
            raise ValueError(f"model: parameter {name!r} is sharded (DTensor): the trials cannot run without its ranks")
    if not any(param.requires_grad for _, param in params):
        raise ValueError("model has no trainable parameter")


def source_of(
    input_shape: Any = None, output_shape: Any = None, make_batch: Any = None, make_loader: Any = None
) -> Source:
    """Check the arguments that say what batches are; see `find_batch_size`.

    Raises:
        TypeError, ValueError: names the wrong argument, and its value.
    """
    if make_batch is not None and make_loader is not None:
        raise ValueError("give make_batch or make_loader, not both")
    given = ("make_batch", make_batch, made_batches), ("make_loader", make_loader, loaded_batches)
    for name, made, batches in given:
        if made is None:
            continue
        is_callable(made, name)
        for other, shape in (("input_shape", input_shape), ("output_shape", output_shape)):
            if shape is not None:
                raise ValueError(f"give {name} or {other}, not both: got {other}={short(shape)}")
        return functools.partial(batches, made)
    if input_shape is None and output_shape is None:
        raise ValueError("give make_batch, which makes a batch of n samples, or input_shape and output_shape")
    inputs, targets = per_sample_shape(input_shape, "input_shape"), per_sample_shape(output_shape, "output_shape")
    return functools.partial(random_batches, inputs, targets)


def _usable(device: torch.device) -> torch.device:
    if not devices.is_accelerator(device):
        return device
    if not devices.is_available(device):
        raise ValueError(f"device: {str(device)!r}, but torch finds no usable GPU")
    # Creates the random generators, which must be remembered.
    getattr(devices.module(device), "init", lambda: None)()
    return devices.with_index(device)


def training_loss(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Any] | None) -> Any:
    """Run one forward pass; return the loss, or whatever else `loss_fn` returns.

    For `(input, target)`, the loss is `loss_fn(model(input), target)`, by default the mean squared error. For a
    mapping, it is the `.loss` of `model(**batch)` (or its `["loss"]`, or the output itself if that is a tensor), else
    `loss_fn(output, batch)`.

    Raises:
        TypeError: the output has no loss.
    """
    if not isinstance(batch, Mapping):
        inputs, target = batch
        return (nn.functional.mse_loss if loss_fn is None else loss_fn)(model(inputs), target)
    output = model(**batch)
    if loss_fn is not None:
        return loss_fn(output, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor):
        raise TypeError(f"the model's output has no loss ({type(output).__name__}): give a loss_fn(output, batch)")
    return loss
