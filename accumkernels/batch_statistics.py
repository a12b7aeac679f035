"""Finds modules that normalize with the statistics of the batch they see, and warns about them."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .errors import expect, logger

_log = logger(__name__)
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def batchnorms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """BatchNorm modules with their names.

    Raises:
        TypeError: `model` is not a module.
    """
    modules = expect(model, nn.Module, "model", "a torch.nn.Module").named_modules()
    return [(name, module) for name, module in modules if isinstance(module, _BatchNorm)]


def uses_batch_statistics(model: nn.Module) -> list[str]:
    """Names of the BatchNorm modules that currently normalize with the statistics of the batch."""
    return [
        name
        for name, module in batchnorms(model)
        if module.training or (module.running_mean is None and module.running_var is None)
    ]


def synchronised_batchnorm(params: object) -> str | None:
    """The name of the first SyncBatchNorm, whose backward crosses ranks; `params` may be anything."""
    modules = params.named_modules() if isinstance(params, nn.Module) else ()
    return next((name for name, module in modules if isinstance(module, nn.SyncBatchNorm)), None)


def warn_of_batchnorm(params: object) -> None:
    """Warn, once per model, that it is accumulated with BatchNorm in training; `params` may be anything."""
    if not isinstance(params, nn.Module) or params in _warned:
        return
    names = uses_batch_statistics(params)
    if names:
        _warned.add(params)
        _log.warning(
            "the model has %d BatchNorm module%s in training (the first: %r), which normalize over each micro-batch, "
            "not over the window: gradients are not those of one big batch. See accumkernels.replace_batchnorm and "
            "accumkernels.planning.batchnorm",
            len(names),
            "" if len(names) == 1 else "s",
            names[0],
        )


def check_independent(module: nn.Module | None) -> None:
    """Refuse modules that need the whole batch, since a chunk is only a part of it.

    Raises:
        ValueError: Names the first BatchNorm in training.
    """
    names = [] if module is None else uses_batch_statistics(module)
    if names:
        raise ValueError(
            f"backward_coupled(): {names[0]!r} is a BatchNorm in training, which normalizes over each chunk and "
            "would move its running statistics twice. Use accumkernels.replace_batchnorm(model), or put the module "
            "into eval mode (AK09)"
        )
