"""Makes the batches of a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import wrong_type
from ..splitting.trees import samples, to_device
from .checks import positive_int

Source = Callable[[int, torch.device], Iterator[Any]]  # (batch size, device) -> endless batches


def per_sample_shape(shape: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one sample; a single int is one dimension, like `(1000)`.

    Raises:
        TypeError, ValueError: names the argument.
    """
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = (shape,)
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise wrong_type(name, "a tuple of ints, the shape of one sample", shape)
    return tuple(positive_int(size, f"every size in {name}") for size in shape)


def dummy_batches(input_shape: Any, output_shape: Any) -> Source:
    """Make random fp32 inputs and targets of these shapes per sample, once per trial.

    Raises:
        TypeError, ValueError: a shape is wrong.
    """
    inputs = per_sample_shape(input_shape, "input_shape")
    outputs = per_sample_shape(output_shape, "output_shape")

    def batches(size: int, device: torch.device) -> Iterator[Any]:
        batch = torch.randn(size, *inputs, device=device), torch.randn(size, *outputs, device=device)
        while True:
            yield batch

    return batches


def made_batches(make_batch: Callable[[int], Any]) -> Source:
    """Call `make_batch(size)` for every micro-batch, and move the result to the device."""

    def batches(size: int, device: torch.device) -> Iterator[Any]:
        while True:
            yield to_device(_checked(make_batch(size), "make_batch"), device)

    return batches


def loaded_batches(make_loader: Callable[[int], Iterable[Any]]) -> Source:
    """Take full batches from the loader that `make_loader(size)` returns, and start over when it ends."""

    def batches(size: int, device: torch.device) -> Iterator[Any]:
        loader = make_loader(size)
        while True:
            full = 0
            for batch in loader:
                if samples(_checked(batch, "make_loader")) != size:
                    break  # the last one
                full += 1
                yield to_device(batch, device)
            if not full:
                raise ValueError(f"make_loader({size}): the loader's first batch does not have {size} samples")

    return batches


def _checked(batch: Any, origin: str) -> Any:
    if not isinstance(batch, Mapping) and not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise wrong_type(f"what {origin} returns", "(input, target) or a dict of keyword arguments", batch)
    return batch


def training_loss(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """Run one forward pass.

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
