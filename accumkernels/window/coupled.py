"""A loss that couples samples (contrastive, for one), computed chunk by chunk as if the batch were one.

A loss over all samples at once needs all encodings, but not all activations. The first pass encodes every chunk without
a graph, and the loss of all encodings gives the gradient of each. The second pass encodes every chunk again, with a
graph and the random numbers of the first pass, and runs backward from those gradients. By the chain rule, the sum over
chunks is the gradient of the big batch (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", arXiv:2101.06983).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import expect, expect_iterable
from ..snapshots import RandomState

Encodings = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def leaves(encodings: Any, chunk: int) -> list[Tensor]:
    """List the tensors that `encode` returned for a chunk, in a fixed order.

    Raises:
        TypeError: it returned something else.
        ValueError: a tensor has no dimension for samples, or the numbers of samples differ.
    """
    if isinstance(encodings, Tensor):
        found = [encodings]
    elif isinstance(encodings, tuple):
        found = list(encodings)
    elif isinstance(encodings, Mapping):
        found = [encodings[key] for key in sorted(encodings)]
    else:
        found = []
    if not found or not all(isinstance(tensor, Tensor) for tensor in found):
        raise TypeError(
            "encode must return a tensor, or a tuple or dict of tensors, got "
            f"{type(encodings).__name__} for chunk {chunk}"
        )
    shapes = [tuple(tensor.shape) for tensor in found]
    if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(f"encode must return tensors with one row per sample, got shapes {shapes} for chunk {chunk}")
    return found


def like(encodings: Any, tensors: Sequence[Tensor]) -> Encodings:
    """Put `tensors`, in the order of `leaves`, into the structure of `encodings`."""
    if isinstance(encodings, Tensor):
        return tensors[0]
    if isinstance(encodings, tuple):  # a named one keeps its names
        return getattr(type(encodings), "_make", tuple)(tensors)
    return dict(zip(sorted(encodings), tensors, strict=True))


def call_with(loss_fn: Callable[..., Tensor], encodings: Encodings) -> Tensor:
    """Call `loss_fn` with a tensor; pass a tuple or dict as separate arguments if it takes that many, else as one."""
    if isinstance(encodings, Tensor):
        return loss_fn(encodings)
    args, kwargs = ((), encodings) if isinstance(encodings, dict) else (encodings, {})
    try:
        inspect.signature(loss_fn).bind(*args, **kwargs)
    except TypeError:
        return loss_fn(encodings)
    except ValueError:  # a builtin without a signature
        pass
    return loss_fn(*args, **kwargs)


class CoupledLoss:
    """A loss of all chunks together.

    Args:
        chunks: Arguments for `encode`, one per chunk, kept until the end of `run`.
        encode: Called with each chunk, twice.
        loss_fn: Returns the loss of all encodings.

    Attributes:
        chunks: All of them.

    Raises:
        TypeError, ValueError: An argument is wrong, or there are no chunks.
    """

    def __init__(self, chunks: Iterable[Any], encode: Callable[[Any], Any], loss_fn: Callable[..., Tensor]) -> None:
        self.chunks = list(expect_iterable(chunks, "chunks"))
        self._encode = expect(encode, Callable, "encode", "callable")
        self._loss_fn = expect(loss_fn, Callable, "loss_fn", "callable")
        if not self.chunks:
            raise ValueError("backward_coupled(): chunks must not be empty")

    def run(
        self,
        devices: Iterable[torch.device],
        backward: Callable[[Tensor], None],
        backward_part: Callable[[Sequence[Tensor], Sequence[Tensor], bool], None],
    ) -> Tensor:
        """Run both passes.

        Args:
            devices: Accelerators whose random numbers `encode` may draw.
            backward: Runs backward of the loss, which ends at the encodings and at parameters of `loss_fn`.
            backward_part: Runs backward of a chunk's encodings from their gradients; whether it is the last chunk.

        Returns:
            The loss, detached.

        Raises:
            TypeError, ValueError: Encodings are not tensors of one structure.
            RuntimeError: An encoding's shape differs from the first pass.
        """
        devices = list(devices)
        states, rows, encodings, joined = self._first_pass(devices)
        loss = expect(call_with(self._loss_fn, encodings), Tensor, "what loss_fn returns", "a tensor")
        backward(loss)
        after, start = RandomState(devices), 0
        for index, chunk in enumerate(self.chunks):
            states[index].restore()
            found = leaves(self._encode(chunk), index)
            shapes = [tuple(tensor.shape) for tensor in found]
            expected = [(rows[index], *tensor.shape[1:]) for tensor in joined]
            if shapes != expected:
                raise RuntimeError(
                    f"encode returned shapes {shapes} for chunk {index} in the second pass, and {expected} in the first"
                    " (AK10)"
                )
            stop = start + rows[index]
            pairs = [
                (tensor, of_all.grad[start:stop])
                for tensor, of_all in zip(found, joined, strict=True)
                if tensor.requires_grad and of_all.grad is not None
            ]
            if pairs:
                tensors, grads = zip(*pairs, strict=True)
                backward_part(tensors, grads, index == len(self.chunks) - 1)
            torch.clear_autocast_cache()
            start = stop
        after.restore()
        return loss.detach()

    def _first_pass(
        self, devices: Sequence[torch.device]
    ) -> tuple[list[RandomState], list[int], Encodings, list[Tensor]]:
        """Encode all chunks without a graph.

        Returns:
            The random state before each chunk, its rows, the encodings of all, and these as a list of leaves.
        """
        states, parts = [], []
        with torch.no_grad():
            for index, chunk in enumerate(self.chunks):
                states.append(RandomState(devices))
                structure = self._encode(chunk)
                parts.append(leaves(structure, index))
                if len(parts[-1]) != len(parts[0]):
                    raise ValueError(
                        f"encode returned {len(parts[0])} tensors for chunk 0 and {len(parts[-1])} for chunk {index}"
                    )
        # Autocast caches 16-bit copies of weights, made here without a graph, and would use them in the second pass.
        torch.clear_autocast_cache()
        joined = [torch.cat(tensors).detach() for tensors in zip(*parts, strict=True)]
        for tensor in joined:
            tensor.requires_grad_(tensor.is_floating_point())
        return states, [part[0].shape[0] for part in parts], like(structure, joined), joined
