"""A Trainer's `training_step` on a whole batch, whose loss and backward are those of as many parts as it takes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import wrong_type
from .loss_questions import rows

_OPTIONS = {"micro_batch", "budget", "cost", "multiple_of"}


def split_options(split: Any) -> dict[str, Any] | None:
    """The options of `FusedAccumulator.backward_batch` that the argument `split` of an adapter stands for.

    Args:
        split: "auto", the most that a part may cost, a dict of options, or None.

    Raises:
        TypeError, ValueError: It is none of these.
    """
    if split is None:
        return None
    if isinstance(split, Mapping):
        if unknown := sorted(map(str, split.keys() - _OPTIONS)):
            raise ValueError(f"split has {', '.join(map(repr, unknown))}, it may have {', '.join(sorted(_OPTIONS))}")
        return dict(split)
    if split == "auto":
        return {}
    if isinstance(split, bool) or not isinstance(split, int | float):
        raise wrong_type("split", "'auto', the most that a part may cost, a dict of options, or None", split)
    if not split > 0:
        raise ValueError(f"split must be positive, got {split}")
    return {"budget": split}


def is_automatic(options: Mapping[str, Any]) -> bool:
    """Whether only memory limits the parts."""
    return options.get("micro_batch", "auto") == "auto" and options.get("budget") is None


def costs(inputs: Any) -> list[float] | None:
    """What each row of a Trainer's inputs costs: its tokens, padding included; None: 1, without tokens."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() < 2:
        return None
    found = rows(inputs)
    assert found is not None
    return [float(ids[0].numel())] * found[1] if len(ids) else []


@contextlib.contextmanager
def deferred_loss(trainer: Any, run: Callable[[Callable[[Any], Tensor], Any], Tensor]) -> Iterator[None]:
    """Let `training_step` compute its loss in `accelerator.backward`, where `run` may do so in parts.

    Everything else in a `training_step`, of whatever class, sees the batch once, and the loss that `run` returns.

    Args:
        trainer: A Trainer.
        run: Called with a function that computes the loss of inputs, in the contexts of `compute_loss`, and with the
            prepared inputs of the whole batch. It runs backward, and returns the loss that `training_step` returns.
    """
    compute_loss = trainer.compute_loss
    calls: list[Callable[[], Tensor]] = []

    def defer(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        def compute(part: Any) -> Tensor:
            with trainer.compute_loss_context_manager():
                return compute_loss(model, copy.copy(part), *args, **kwargs)  # it may take labels out

        calls.append(lambda: run(compute, inputs))
        return torch.zeros((), device=trainer.args.device)

    def backward(loss: Tensor, **kwargs: Any) -> None:
        loss.copy_(calls.pop()())

    instance, accelerator = vars(trainer), trainer.accelerator
    own = instance.get("compute_loss")
    instance["compute_loss"], vars(accelerator)["backward"] = defer, backward
    try:
        yield
    finally:
        del instance["compute_loss"], vars(accelerator)["backward"]
        if own is not None:
            instance["compute_loss"] = own
